"""Elementwise loops become `ElemwiseScan`s.

Elementwise work on whole sequences moves into the loop that reads them first. ``2 * y`` over all
time, computed for one loop alone, is a pass over memory that writes an array only for the loop to
read it. In the body of an elementwise loop the same product costs no memory.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.basic import Alloc
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.math import Dot

from scanlib.analysis.recognition import analyse
from scanlib.analysis.scalar_body import NotElementwiseError, scalar_loop
from scanlib.ops.graph import is_linear_algebra, row_type
from scanlib.ops.loop import Loop, NonSequence, Results, Sequence
from scanlib.ops.loop_rewrite import LowersLoops
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.rewrites.edit import results_by_part
from scanlib.rewrites.lower.functions_of_sums import take_sums_apart
from scanlib.rewrites.over_time.logsumexp import stabilize_logs
from scanlib.rewrites.pytensor_rewrites import BodyRewrite, run_query
from scanlib.rewrites.simplify.simplify import replace

_SPECIALIZED = RewriteDatabaseQuery(
    include=["canonicalize", "stabilize", "specialize", "merge"],
    # A sum of products is no product of a sum where numbers are huge or not finite. What is for C
    # alone looks for a library of matrix products, and PyTensor warns where there is none.
    exclude=["inplace", "fusion", "BlasOpt", "cxx_only", "local_sum_prod_of_mul_or_div"],
)


class LowerElementwiseLoops(LowersLoops):
    """Replace every loop whose body is elementwise; see `scanlib.ops.lowered.elemwise_scan`."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        if not config.scanlib__lower:
            return False
        try:
            loop = absorb_producers(fgraph, node)
            parts = [*loop.states, *loop.carries, *loop.outputs]
            new = lower_elementwise(loop)
        except NotElementwiseError:
            return False
        pairs = zip(parts, node.outputs, strict=True)
        replace(fgraph, {old: new[id(part)] for part, old in pairs}, "scanlib_elementwise")
        return True


def lower_elementwise(loop: Loop) -> dict[int, Variable]:
    """Return the results of a loop, which is edited on the way, by the `id` of their part.

    Raises
    ------
    NotElementwiseError
        If its body is not elementwise.
    """
    specialize_elementwise(loop)
    apart = take_sums_apart(loop)
    results = _lowered(loop)
    if apart is not None:
        results |= _lowered(apart.loop(results))
    return results


def _lowered(loop: Loop) -> dict[int, Variable]:
    """Return the results of an elementwise loop by their part."""
    scalar = scalar_loop(loop)
    analysis = analyse(scalar)
    made = loop.apply()
    op = ElemwiseScan(
        made.node.op, scalar.freeze(), scalar.layout, analysis.recurrences, analysis.notes
    )
    node = op.make_node(*made.node.inputs)
    parts = op.signature.split_outputs(node.outputs)
    return results_by_part(loop, Results(parts.histories, parts.carries, parts.outputs, node))


def specialize_elementwise(loop: Loop) -> None:
    """Run PyTensor's rewrites on a body that may be elementwise then.

    Raises
    ------
    NotElementwiseError
        If it multiplies matrices, factorizes or solves. Bodies are canonical, and no other rewrite
        takes out what they have of these, but where an axis may have one item.
    """
    if config.scanlib__simplify:
        for node in toposort(loop.body_outputs()):
            if _stays(node):
                raise NotElementwiseError(f"{node.op} is not elementwise", node.outputs[0])
    specialize_body(loop)


def is_elementwise(loop: Loop) -> bool:
    """Whether a loop, which is edited, could be lowered."""
    try:
        specialize_elementwise(loop)
        scalar_loop(loop)
    except NotElementwiseError:
        return False
    return True


def _stays(node: Apply) -> bool:
    op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    if isinstance(op, Dot):
        left, right = node.inputs
        return 1 not in (left.type.shape[-1], right.type.shape[-2:][0])
    return is_linear_algebra(op) and 1 not in node.inputs[0].type.shape[-2:]


def _specialize(body: FunctionGraph) -> None:
    stabilize_logs(body)
    run_query(_SPECIALIZED, body)


_specialized = BodyRewrite(_specialize)


def specialize_body(loop: Loop) -> None:
    """Run PyTensor's rewrites on the body, but for fusion and in-place ones."""
    _specialized(loop)


def absorb_producers(fgraph: FunctionGraph, node: Apply) -> Loop:
    """Return a loop whose step computes what elementwise Ops made for it alone.

    `node` is the loop as it stands in `fgraph`.
    """
    loop = Loop.from_node(node)
    absorbed = {node}
    pending = list(loop.sequences)
    while pending:
        rows: dict[Variable, Variable] = {}
        added: list[Sequence] = []
        read: set[Variable] = set()
        for part in reversed(pending):
            if part.row in read:
                added.append(part)  # until what reads it is part of the step
                continue
            if part.outer.owner is None or not _is_read_once(loop, part.outer):
                continue
            if any(client not in absorbed for client, _ in fgraph.clients[part.outer]):
                continue
            new = _absorb(loop, part, rows)
            if new is not None:
                absorbed.add(part.outer.owner)
                read.update(ancestors([rows[part.row]]))
                added += new
        loop.substitute(rows)
        pending = added
    return loop


def _is_read_once(loop: Loop, variable: Variable) -> bool:
    """Whether a variable is one sequence of a loop, and nothing else of it."""
    if sum(part.outer is variable for part in loop.sequences) > 1:
        return False
    return all(part.outer is not variable for part in loop.non_sequences)


def _absorb(
    loop: Loop, part: Sequence, replaced: dict[Variable, Variable]
) -> list[Sequence] | None:
    """Replace a sequence by those it was computed from; return the new ones.

    `replaced` gets what its row is in the step.
    """
    producer = part.outer.owner
    if producer is None or len(producer.outputs) != 1:
        return None
    if isinstance(producer.op, Alloc):
        return _absorb_constant(loop, part, producer, replaced)
    if not isinstance(producer.op, Elemwise):
        return None
    if all(inp.type.broadcastable[0] for inp in producer.inputs):
        return None
    rows: list[Variable] = []
    sequences: list[Sequence] = []
    non_sequences: list[NonSequence] = []
    for inp in producer.inputs:
        if isinstance(inp, Constant) and inp.type.ndim and inp.data.size == 1:
            rows.append(pt.constant(inp.data.reshape((1,) * (inp.type.ndim - 1))))
        elif inp.type.broadcastable[0]:
            inner = row_type(inp)()
            non_sequences.append(NonSequence(inp[0], inner))
            rows.append(inner)
        else:
            known = next((s for s in [*loop.sequences, *sequences] if s.outer is inp), None)
            if known is None or known is part:
                known = Sequence(inp, row_type(inp)())
                sequences.append(known)
            rows.append(known.row)
    value = producer.op(*rows)
    if value.type.dtype != part.row.type.dtype or value.type.ndim != part.row.type.ndim:
        return None
    if not part.row.type.is_super(value.type):
        return None
    loop.sequences = [other for other in loop.sequences if other is not part] + sequences
    loop.non_sequences += non_sequences
    replaced[part.row] = value
    return sequences


def _absorb_constant(
    loop: Loop, part: Sequence, producer: Apply, replaced: dict[Variable, Variable]
) -> list[Sequence] | None:
    """Replace a sequence that holds one number everywhere."""
    value = producer.inputs[0]
    if part.row.type.ndim or value.type.ndim > 1 or len(loop.sequences) == 1:
        return None
    if value.type.ndim and not value.type.broadcastable[0]:
        return None
    scalar = value[0] if value.type.ndim else value
    if isinstance(value, Constant):
        inner: Variable = pt.constant(value.data.reshape(()), dtype=value.type.dtype)
    else:
        inner = scalar.type()
        loop.non_sequences.append(NonSequence(scalar, inner))
    loop.sequences = [other for other in loop.sequences if other is not part]
    replaced[part.row] = inner
    return []
