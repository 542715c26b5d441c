"""Which elementwise loops can be taken in parts that several threads work on at the same time.

Backends write what is said here, and `scanlib.explain` shows it.
"""

from __future__ import annotations

import pytensor.scalar.basic as ps
from pytensor.configdefaults import config
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors

from scanlib.ops.lowered.elemwise_scan import ElemwiseScan, Recurrence, schedule
from scanlib.ops.lowered.positions import has_positions

# How many channels a slice has at least: threads that work on neighbouring pieces of short rows
# wait for one another in every step. Where steps do little but read and write, they share the
# memory, too, and fetch what belongs to others.
LEAST_ROW, LEAST_CHEAP_ROW = 256, 1024
CHEAP = (
    *(ps.Add, ps.Sub, ps.Mul, ps.TrueDiv, ps.Neg, ps.Sqr, ps.Abs, ps.Identity, ps.Cast),
    *(ps.Switch, ps.Second, ps.ScalarMaximum, ps.ScalarMinimum, ps.Reciprocal),
    *(ps.LogicalComparison, ps.BinaryBitOp, ps.UnaryBitOp, ps.Sign),
)


def can_slice(op: ElemwiseScan) -> bool:
    """Whether slices of the channels, along their first axis, are independent of one another.

    That takes results which all have this axis, or are sums over it, and steps that raise nothing.
    """
    if not op.layout.ndim or op.signature.has_stop or has_positions(op.body.outputs):
        return False
    return all(0 in target.kept or 0 in target.reduced for target in op.plan().targets)


def least_row(op: ElemwiseScan) -> int:
    """Return how many channels a slice has at least."""
    least = LEAST_CHEAP_ROW if _is_cheap_step(op) else LEAST_ROW
    return min(least, config.scanlib__parallel_channels)


def _is_cheap_step(op: ElemwiseScan) -> bool:
    """Whether the steps of a loop do little but read and write."""
    return all(is_cheap(node.op) for node in op.body.toposort())


def is_cheap(op: Op) -> bool:
    if isinstance(op, ps.Composite):
        return all(is_cheap(node.op) for node in op.fgraph.toposort())
    return isinstance(op, CHEAP)


# A chunk of the steps has so many blocks at least. Where coefficients decay, those before it are
# composed up to one in so many of a chunk.
BLOCKS_OF_A_CHUNK = 4


def chunks_by(op: ElemwiseScan) -> str | None:
    """Return how chunks of the steps find the values before them, None if they do not.

    That takes one channel, whose recurrences have real states and elements that depend on no state.
    To compose them, steps read one past value each, or `MOST_VALUES` where coefficients may decay.

    Returns
    -------
    {"decay", "all steps", None}
        ``"decay"``: from the steps before, up to where coefficients are small; whether they are is
        known when the loop runs. ``"all steps"``: from all steps before, which takes
        `composing_cost`. That is for loops that compute functions, logarithms of sums for one.
        Steps that do little but read and write take half a nanosecond, and reading all once more
        takes half of that; a thread starts in the time of a hundred thousand of them.
    """
    if schedule(op) != "blocks" or op.layout.ndim or not op.recurrences:
        return None
    reads = [_past_values(op, number) for number in range(len(op.recurrences))]
    if not all(1 <= count <= MOST_VALUES for count in reads):
        return None
    if all(_decays(*pair) for pair in zip(op.recurrences, reads, strict=True)):
        return "decay"
    pays = max(reads) == 1 and composing_cost(op) < 1 and not _is_cheap_step(op)
    return "all steps" if pays else None


# How many past values a step may read: composing takes steps of as many columns, and one more.
MOST_VALUES = 4


# What composing takes of the time of running, measured for a million steps of logarithms in both
# backends (0.38 to 0.43). Extremes and sums beside them change little.
_COSTS = {"maximum": 0.4, "minimum": 0.4, "sum": 0.4, "log-affine": 0.4}


def simple_family(recurrence: Recurrence) -> str:
    """Return the family of a recurrence, "sum" where it adds to its state and does no more."""
    is_sum = recurrence.family == "affine" and recurrence.constants[0] is not None
    is_sum = is_sum and recurrence.terms[0][0].coefficient is None
    return "sum" if is_sum else recurrence.family


def composing_cost(op: ElemwiseScan) -> float:
    """Return what composing the steps of a loop takes of the time of running them, one or less."""
    return max(_COSTS.get(simple_family(recurrence), 1.0) for recurrence in op.recurrences)


def _decays(recurrence: Recurrence, reads: int) -> bool:
    """Whether coefficients may decay; where they surely do not, sums are found otherwise."""
    if recurrence.family == "affine in squares":
        return reads == 1
    return recurrence.family == "affine" and (
        reads > 1 or any(term.coefficient is not None for term in recurrence.terms[0])
    )


def _past_values(op: ElemwiseScan, number: int) -> int:
    """Return how many past values the steps of a recurrence read, zero if they are not real."""
    recurrence, n = op.recurrences[number], op.signature.n_states
    inner = op.signature.split_body_inputs(op.body.inputs)
    count = 0
    for part in recurrence.parts:
        state = inner.taps[part][0] if part < n else inner.carries[part - n]
        if state.type.dtype not in ("float32", "float64"):
            return 0
        count += op.signature.depths[part] if part < n else 1
    return count if _is_free(op, number) else 0


def _is_free(op: ElemwiseScan, number: int) -> bool:
    """Whether the elements of a recurrence depend on no state or carry."""
    inputs, outputs, scanned = op.elements_of(number)
    parts = op.signature.split_body_inputs(inputs)
    states = {*(tap for taps in parts.taps for tap in taps), *parts.carries}
    return not scanned and states.isdisjoint(ancestors(outputs))
