"""Which schedule an elementwise loop gets, and into which parts several threads may take it.

The one place that decides: `inner_loops` writes what is said here, and `scanlib.explain` shows it.
"""

from math import prod

import numpy as np
from pytensor.configdefaults import config

from scanlib.kernels.language import FLOATS
from scanlib.ops.graph import is_cheap
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan, Recurrence
from scanlib.recurrences import CLASSES
from scanlib.schedules.loop_kernels import REGISTER_DEPTH

# Steps of a block: a few buffers fit the first-level cache, and a block is worth starting. Scans
# ask for what the next block reads and writes. In blocks of less than 1024 steps, it still arrives
# while the next elements and results are computed; in longer ones, the memory waits meanwhile.
BLOCK = 512
MANY_STEPS = 256  # so many steps are worth taking channel by channel
# Steps of so many operations wait for these, not for their states, and blocks write them three
# times: before the states are scanned, after, and for what cannot be composed.
LONG_STEP = 200
# Of a strip of steps: more operations do not run beside those of other channels, and longer rows
# keep the processor busy step by step.
STRIP_OPERATIONS, LONGEST_STRIP_ROW = 32, 256
# How many channels a slice has at least: threads that work on neighbouring pieces of short rows
# wait for one another in every step. Where steps do little but read and write, they share the
# memory, too, and fetch what belongs to others.
LEAST_ROW, LEAST_CHEAP_ROW = 256, 1024


def few_channels(op: ElemwiseScan) -> int:
    """Return up to how many channels take turns in blocks of steps.

    Each then walks as fast as alone. Next to one another they wait for every step, which takes long
    where it computes logarithms; but where they fill a vector register, that is faster.
    """
    if any(recurrence.family == "log-affine" for recurrence in op.recurrences):
        return 8 if _longest_item(op) <= 4 else 7
    return 1


def _longest_item(op: ElemwiseScan) -> int:
    """Return how many bytes the values of states and carries have at most."""
    inner = op.signature.split_body_inputs(op.body.inputs)
    items = [*(taps[0] for taps in inner.taps), *inner.carries]
    return max((np.dtype(item.type.dtype).itemsize for item in items), default=1)


def schedule(op: ElemwiseScan) -> str:
    """Return how compiled code walks an elementwise loop. The one place that decides: backends
    write what it says, `scanlib.explain` shows it.

    ``"channels"``: time outside, channels inside. ``"blocks"``: blocks of steps of one channel
    after the other, whose parts all belong to recurrence families, where steps are not long, nor
    of complex numbers: composing pairs of these is more work than waiting for them.
    ``"steps"``: one channel, step by step, states in registers. ``"by width"``: ``"blocks"`` for
    `few_channels` and at least `MANY_STEPS` steps, otherwise ``"channels"``; their number is known
    when the loop runs. For a single channel alone that would not pay.
    """
    composed = bool(op.recurrences) and all(r.family in CLASSES for r in op.recurrences)
    composed = composed and len(op.body.toposort()) <= LONG_STEP and not has_complex(op)
    if not op.layout.ndim:
        return "blocks" if composed else "steps"
    width, few = static_width(op), few_channels(op)
    if not composed or (width or 2) > few or not op.plan().is_independent():
        return "channels"
    return "by width" if width is None else "blocks"


def has_complex(op: ElemwiseScan) -> bool:
    """Whether steps compute with complex numbers."""
    return any(variable.type.dtype.startswith("complex") for variable in op.body.variables)


def strip_steps(op: ElemwiseScan) -> int:
    """Return up to how many steps some channels take before the next ones do, 1 for one at a time.

    Short steps wait for what the step before has written. Where a vector register of channels
    takes several steps, its states stay in registers, and other channels' steps run beside them.
    """
    plan, nodes = op.plan(), op.body.toposort()
    if not op.layout.ndim or op.signature.has_stop or not plan.is_independent():
        return 1
    if max(op.signature.depths, default=0) > REGISTER_DEPTH or has_short_rows(op) is False:
        return 1
    if not all(is_cheap(n.op) and plan.levels[n.outputs[0]] == op.layout.ndim for n in nodes):
        return 1
    return max(STRIP_OPERATIONS // max(len(nodes), 1), 1)


def has_short_rows(op: ElemwiseScan) -> bool | None:
    """Return whether rows are so short that strips pay, None where types do not say."""
    width = static_width(op)
    return None if width is None else width * _longest_item(op) <= LONGEST_STRIP_ROW


def static_width(op: ElemwiseScan) -> int | None:
    """Return the number of channels of an elementwise loop, None where types do not say."""
    inner = op.signature.split_body_inputs(op.scan.body.inputs)
    sizes: dict[int, int] = {}
    for variables, layouts in (
        (inner.rows, op.layout.sequences),
        ([taps[0] for taps in inner.taps], op.layout.states),
        (inner.carries, op.layout.carries),
        (inner.non_sequences, op.layout.non_sequences),
    ):
        for variable, axes in zip(variables, layouts, strict=True):
            for own, axis in enumerate(axes):
                size = variable.type.shape[own]
                if axis is not None and size is not None:
                    sizes[axis] = size
    return prod(sizes.values()) if len(sizes) == op.layout.ndim else None


# Threads


def can_slice(op: ElemwiseScan) -> bool:
    """Whether slices of the channels, along their first axis, are independent of one another.

    That takes results which all have this axis, or are sums over it.
    """
    if not op.layout.ndim or op.signature.has_stop:
        return False
    return all(0 in target.kept or 0 in target.reduced for target in op.plan().targets)


def least_row(op: ElemwiseScan) -> int:
    """Return how many channels a slice has at least."""
    least = LEAST_CHEAP_ROW if is_cheap_step(op) else LEAST_ROW
    return min(least, config.scanlib__parallel_channels)


def is_cheap_step(op: ElemwiseScan) -> bool:
    """Whether the steps of a loop do little but read and write."""
    return all(is_cheap(node.op) for node in op.body.toposort())


def can_chunk(op: ElemwiseScan) -> bool:
    """Whether chunks of the steps may find the values before them from some of the steps before.

    That takes one channel, and affine recurrences of floats whose coefficients may decay:
    whether they do is known when the loop runs, that they do not where they are all one.
    """
    if schedule(op) != "blocks" or op.layout.ndim:
        return False
    inner = op.signature.split_body_inputs(op.body.inputs)
    items = [*(taps[0] for taps in inner.taps), *inner.carries]
    dtypes = {items[part].type.dtype for r in op.recurrences for part in r.parts}
    return dtypes <= set(FLOATS) and all(map(_may_decay, op.recurrences))


def _may_decay(recurrence: Recurrence) -> bool:
    """Whether coefficients may decay."""
    terms = [term for own in recurrence.terms for term in own]
    is_affine = recurrence.family in ("affine", "affine in squares")
    return is_affine and (len(terms) > 1 or any(term.coefficient is not None for term in terms))
