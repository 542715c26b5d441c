"""The body in canonical form, and work that every step repeats taken out of it."""

from __future__ import annotations

from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.subtensor import Subtensor

from scanlib.ops.graph import CHEAP, applies, depends_on, read_from_outside, substitute
from scanlib.ops.logaddexp import write_stable_logs
from scanlib.ops.loop import NonSequence
from scanlib.ops.row_ops.triangular import true_shapes
from scanlib.rewrites.edit import LoopEdit
from scanlib.rewrites.inline import write_out_graphs
from scanlib.rewrites.pytensor_rewrites import CANONICAL, BodyRewrite, run_query

# Ops whose result is larger than what they read, or a view of it: nothing to gain outside.
_NOT_WORTH_IT = (Alloc, DimShuffle, CheckAndRaise)


def _canonicalize(body: FunctionGraph) -> None:
    """Run PyTensor's canonicalization on a body.

    Gradients leave terms behind that read a value for its shape alone, or multiply by zero;
    as long as they stand, the loop seems to need what it does not. Shares of sums of exponentials
    are written before parts of them are stored, or leave the loop.
    """
    write_out_graphs.rewrite(body)
    true_shapes.rewrite(body)
    run_query(CANONICAL, body)
    write_stable_logs(body)


canonicalize_body = BodyRewrite(_canonicalize, settles=True)


def hoist_invariants(edit: LoopEdit) -> None:
    """Compute what depends on non-sequences alone once, outside the loop: the largest expressions
    for which that is worth it."""
    loop = edit.loop
    outer_of = {part.inner: part.outer for part in loop.non_sequences}
    varying = [variable for variable in loop.body_inputs() if variable not in outer_of]
    outputs = loop.body_outputs()
    pending = read_from_outside(toposort(outputs), outputs, depends_on(outputs, varying))[::-1]
    found, seen = dict[Variable, None](), set[Variable]()
    while pending:
        current = pending.pop()
        if current.owner is None or current in seen:
            continue
        seen.add(current)
        if _worth_hoisting(current):
            found[current] = None
        else:
            pending += reversed(current.owner.inputs)
    if not found:
        return
    replacements: dict[Variable, Variable] = {}
    hoisted = substitute(list(found), outer_of)
    for inner, outer in zip(found, hoisted, strict=True):
        new = inner.type()
        loop.non_sequences.append(NonSequence(outer, new))
        replacements[inner] = new
    loop.substitute(replacements)
    edit.changed = True


def _worth_hoisting(variable: Variable) -> bool:
    node = variable.owner
    if isinstance(node.op, Subtensor):
        return bool(variable.type.ndim > 0)  # what remains may be elementwise
    if isinstance(node.op, _NOT_WORTH_IT) or getattr(node.op, "view_map", None):
        return False
    if applies(node, ps.Second):
        return False
    if getattr(variable.type, "ndim", 0) > 0:
        return True
    return not all(
        applies(above, CHEAP) or isinstance(above.op, _NOT_WORTH_IT)
        for above in toposort([variable])
    )
