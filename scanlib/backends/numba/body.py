"""The body of a loop, made ready for compilation: rewritten, and in-place where it is safe."""

from __future__ import annotations

from dataclasses import dataclass

from pytensor.compile.aliasing import add_supervisor_to_fgraph
from pytensor.compile.io import In
from pytensor.compile.mode import NUMBA
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph

from scanlib._compat import thaw_graph
from scanlib.ops.execution import register_preparer
from scanlib.ops.graph import is_tensor
from scanlib.ops.row_ops.triangular import true_shapes
from scanlib.ops.scan import Scan


@dataclass
class PreparedBody:
    """A rewritten body. `destroyed` holds the positions of carries whose value a step may
    overwrite; the loop gives those a buffer of their own. The next values of those in `views` may
    be views of what else a step reads, which the loop may overwrite later."""

    fgraph: FunctionGraph
    destroyed: set[int]
    views: set[int]


@register_preparer
def prepare_body(op: Scan) -> PreparedBody:
    """Rewrite a copy of the body with PyTensor's numba rewrites.

    Nothing a step reads may be overwritten by it, except the value of a carry that nothing
    else holds: the memory of such a carry is reused from step to step (accumulators, random
    generators).
    """
    fgraph = thaw_graph(op.body)
    inputs = op.signature.split_body_inputs(fgraph.inputs)
    mutable = {inputs.carries[i] for i in range(op.signature.n_carries) if _owns_its_value(op, i)}
    true_shapes.rewrite(fgraph)
    specs = [In(inp, borrow=True, mutable=inp in mutable) for inp in fgraph.inputs]
    add_supervisor_to_fgraph(fgraph=fgraph, input_specs=specs, accept_inplace=True)
    NUMBA.optimizer.rewrite(fgraph)
    carries = op.signature.split_body_inputs(fgraph.inputs).carries
    next_carries = op.signature.split_body_outputs(fgraph.outputs).carries
    destroyed = set()
    if hasattr(fgraph, "destroyers"):
        destroyed = {i for i, carry in enumerate(carries) if fgraph.destroyers(carry)}
    views = {
        i
        for i, (carry, value) in enumerate(zip(carries, next_carries, strict=True))
        if not _is_fresh(value, carry)
    }
    return PreparedBody(fgraph, destroyed, views)


def _owns_its_value(op: Scan, i: int) -> bool:
    """Whether no other result of a step can share memory with the next value of carry `i`."""
    outputs = op.signature.split_body_outputs(op.body.outputs)
    mine = outputs.carries[i]
    inner = op.signature.split_body_inputs(op.body.inputs).carries[i]
    if is_tensor(mine) and mine.type.ndim == 0:
        return False
    if mine is inner or not _is_fresh(mine, inner):
        return False
    others = [out for out in op.body.outputs if out is not mine]
    shared = sum(out is mine for out in op.body.outputs) > 1
    return not shared and all({mine, inner}.isdisjoint(_viewed(out)) for out in others)


def _is_fresh(variable: Variable, own: Variable) -> bool:
    """Whether a value is made by the step, and is no view of anything but the carry itself."""
    last = _viewed(variable)[-1]
    return last.owner is not None or last is own


def _viewed(variable: Variable) -> list[Variable]:
    """Return a value, and what it is a view of, one after the other."""
    found = [variable]
    while (node := found[-1].owner) is not None:
        viewed = node.op.view_map.get(node.outputs.index(found[-1]))
        if not viewed:
            break
        found.append(node.inputs[viewed[0]])
    return found
