"""Recurrences in which a sum comes first: ``h ← a · (h + g)``, read as ``h + g`` alone.

In a gradient, what a state is owed is its own cotangent plus what later steps owe; the derivatives
of a step read that sum, and the step before gets a multiple of it:

    s_t = h_{t-1} + g_t,    h_t = a_t · s_t

Where nothing else reads `h`, a kernel may scan the sums: products ``a g`` and states `h` are then
never in memory, and no reader adds up what the scan has added up already. It is the affine
recurrence ``h ← a h + a g`` all the same, and is composed as that.
"""

from dataclasses import dataclass

import pytensor.scalar.basic as ps
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors

from scanlib.ops.lowered.elemwise_scan import ElemwiseScan, Recurrence


@dataclass(frozen=True)
class SumFirst:
    """The sum ``h + g`` and the addend `g` in a graph of the body."""

    total: Variable
    addend: Variable


def sum_first(op: ElemwiseScan, number: int, body: FunctionGraph) -> SumFirst | None:
    """Return the sum that recurrence `number` of a loop scans first, None where it is no such
    recurrence; `body` is a copy of the loop's."""
    recurrence = op.recurrences[number]
    results = op.signature.split_body_outputs(body.outputs)
    after = [*results.states, *results.carries][recurrence.parts[0]]
    tap = _tap(op, recurrence, body)
    if tap is None or _is_read_elsewhere(op, number, body.inputs.index(tap)):
        return None
    readers = [node for node in body.toposort() if tap in node.inputs]
    if len(readers) != 1 or not isinstance(readers[0].op, ps.Add) or tap in body.outputs:
        return None
    total = readers[0].outputs[0]
    others = [inp for inp in readers[0].inputs if inp is not tap]
    if len(others) != len(readers[0].inputs) - 1 or not _is_multiple(after, total):
        return None
    addend = others[0] if len(others) == 1 else ps.add(*others)
    same = {tap.type.dtype, total.type.dtype, addend.type.dtype, after.type.dtype}
    return SumFirst(total, addend) if len(same) == 1 else None


def sums_first(op: ElemwiseScan, body: FunctionGraph) -> dict[int, SumFirst]:
    """Return what `sum_first` finds for all recurrences, by their part."""
    found = {r.parts[0]: sum_first(op, k, body) for k, r in enumerate(op.recurrences)}
    return {part: first for part, first in found.items() if first is not None}


def _tap(op: ElemwiseScan, recurrence: Recurrence, body: FunctionGraph) -> Variable | None:
    """Return the state of a recurrence of the right form, if its values are not kept."""
    (part, *others), (terms, *_) = recurrence.parts, recurrence.terms
    (constant, *_), n = recurrence.constants, op.signature.n_states
    if recurrence.family != "affine" or others or len(terms) != 1 or terms[0].tap != -1:
        return None
    if terms[0].coefficient is None or constant in (None, terms[0].coefficient):
        return None
    inner = op.signature.split_body_inputs(body.inputs)
    if part < n and (op.signature.depths[part] != 1 or not op.signature.untraced[part]):
        return None
    tap = inner.taps[part][0] if part < n else inner.carries[part - n]
    return tap if tap.type.dtype in ("float32", "float64") else None


def _is_read_elsewhere(op: ElemwiseScan, number: int, place: int) -> bool:
    """Whether another recurrence's elements depend on an input of the body."""
    graphs = [r.elements for k, r in enumerate(op.recurrences) if k != number]
    return any(graph.inputs[place] in ancestors(graph.outputs) for graph in graphs)


def _is_multiple(value: Variable, total: Variable) -> bool:
    """Whether a value is `total` times, or divided by, what does not depend on it."""
    if value is total:
        return True
    node: Apply | None = value.owner
    if node is None or not isinstance(node.op, ps.Mul | ps.TrueDiv):
        return False
    depending = [inp for inp in node.inputs if total in ancestors([inp])]
    if len(depending) != 1 or (isinstance(node.op, ps.TrueDiv) and depending != node.inputs[:1]):
        return False
    return _is_multiple(depending[0], total)
