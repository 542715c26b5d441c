"""Which elementwise loops can be taken in parts that several threads work on at the same time.

Backends write what is said here, and `scanlib.explain` shows it.
"""

from __future__ import annotations

import pytensor.scalar.basic as ps
from pytensor.configdefaults import config
from pytensor.graph.op import Op
from pytensor.graph.traversal import ancestors

from scanlib.ops.elemwise_scan import ElemwiseScan, schedule
from scanlib.ops.positions import has_positions

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
    cheap = all(_is_cheap(node.op) for node in op.body.toposort())
    return min(LEAST_CHEAP_ROW if cheap else LEAST_ROW, config.scanlib__parallel_channels)


def _is_cheap(op: Op) -> bool:
    if isinstance(op, ps.Composite):
        return all(_is_cheap(node.op) for node in op.fgraph.toposort())
    return isinstance(op, CHEAP)


def can_chunk(op: ElemwiseScan) -> bool:
    """Whether chunks of the steps can be run from values that a few steps before them give.

    That takes one channel, and affine recurrences of one real state each with a coefficient, the
    elements of which depend on no state. Whether coefficients decay is known when the loop runs.
    """
    if schedule(op) != "blocks" or op.layout.ndim:
        return False
    inner = op.signature.split_body_inputs(op.body.inputs)
    states = [*(taps[0] for taps in inner.taps), *inner.carries]
    for number, recurrence in enumerate(op.recurrences):
        (part, *others), (terms, *_) = recurrence.parts, recurrence.terms
        depth = op.signature.depths[part] if part < op.signature.n_states else 1
        real = states[part].type.dtype in ("float32", "float64")
        affine = recurrence.family in ("affine", "affine in squares")
        single = not others and len(terms) == 1 and terms[0].tap == -1 and depth == 1
        decays = single and terms[0].coefficient is not None
        if not (affine and decays and real and _is_free(op, number)):
            return False
    return True


def _is_free(op: ElemwiseScan, number: int) -> bool:
    """Whether the elements of a recurrence depend on no state or carry."""
    inputs, outputs, scanned = op.elements_of(number)
    parts = op.signature.split_body_inputs(inputs)
    states = {*(tap for taps in parts.taps for tap in taps), *parts.carries}
    return not scanned and states.isdisjoint(ancestors(outputs))
