"""A loop cut into segments: an outer loop over segments, an inner loop over their steps.

``T`` steps become ``n = T // s`` segments of `s` steps and a tail of ``T - n s`` steps::

    outer, j = 0 … n-1:   start_{j+1} = last rows of inner(start_j, x[j s : (j+1) s])
    tail:                 the same loop, from start_n, over x[n s :]

`start_j` holds the `K` rows of a state before segment `j`, shape (K, …); carries become states
of the outer loop, so that they are stored at the start of each segment, and a random generator
is stored as its words. Sequences are cut by views. Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import floordiv, mul, sub

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor.type import TensorType

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.checkpoint_schedules import Schedule
from scanlib.ops.graph import is_tensor, row_type
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.row_ops.generator_words import GeneratorFromWords, GeneratorWords
from scanlib.ops.row_ops.row_segments import SplitRows


@dataclass(frozen=True)
class Cut:
    """How a loop is cut: `count` segments of `length` steps, `steps` in all, and `rest` behind.

    All are int64 scalars; `inside` are the checkpoints of a segment.
    """

    count: Variable
    length: Variable
    steps: Variable
    rest: Variable
    inside: Schedule | None

    @classmethod
    def of(cls, loop: Loop, schedule: Schedule) -> Cut:
        """Cut a loop into as many whole segments as there are."""
        total = loop.length()
        length, inside = schedule.first(loop)
        count = _folded(floordiv, total, length)
        steps = _folded(mul, count, length)
        return cls(count, length, steps, _folded(sub, total, steps), inside)

    @property
    def has_tail(self) -> bool:
        return constant_integer(self.rest) != 0


def _folded(combine: Callable[..., Variable], first: Variable, second: Variable) -> Variable:
    known = constant_integer(first), constant_integer(second)
    return combine(first, second) if None in known else pt.constant(combine(*known), dtype="int64")


def segments_name(name: str | None) -> str:
    """Return the name of the loop over the segments of a loop."""
    return f"{name}_segments" if name else "segments"


def restored_carry(carry: Carry, stored: Variable) -> Variable:
    """Return the value of a carry from what was stored."""
    return stored if is_tensor(carry.value) else GeneratorFromWords()(stored)


def _stored(carry: Variable) -> Variable:
    return carry if is_tensor(carry) else GeneratorWords()(carry)


def outer_loop(loop: Loop, cut: Cut) -> Loop:
    """Return the loop over segments of a loop, which is left as it is.

    Its states are the starts of the loop's states, then those of its carries; its outputs are the
    rows of all steps, shape (n, s, …), of the states, then of the outputs.
    """
    outer = Loop(name=segments_name(loop.name), function=loop.function, recompute=True)
    inner = Loop(name=loop.name, function=loop.function, checkpoint=cut.inside)
    _add_inputs(loop, cut, outer, inner)
    for state in loop.states:
        tap_type = next(iter(state.taps.values())).type
        # No size for several rows: asserting it would stand in the way of rewrites.
        rows = 1 if state.depth == 1 else None
        start = TensorType(tap_type.dtype, shape=(rows, *tap_type.shape))()
        initial = pt.expand_dims(state.initial, 0)
        outer.states.append(State(initial, {-1: start}, start, name=state.name))
        inner.states.append(replace(state, initial=start, taps=dict(state.taps), untraced=False))
    for carry in loop.carries:
        initial = _stored(carry.initial)
        value = carry.value.type() if is_tensor(carry.value) else initial.type()
        rows = pt.expand_dims(initial, 0)
        outer.states.append(State(rows, {-1: value}, value, name=carry.name))
        inner.carries.append(replace(carry, initial=restored_carry(carry, value)))
    inner.outputs = [replace(output) for output in loop.outputs]
    results = inner.apply()
    for state, start, history in zip(
        loop.states, outer.states[: len(loop.states)], results.histories, strict=True
    ):
        deep = state.depth > 1
        start.next = history[-state.depth :] if deep else pt.expand_dims(history[-1], 0)
        outer.outputs.append(Output(history[state.depth :]))
    for start, final in zip(outer.states[len(loop.states) :], results.carries, strict=True):
        start.next = _stored(final)
    outer.outputs += [Output(value) for value in results.outputs]
    return outer


def _add_inputs(loop: Loop, cut: Cut, outer: Loop, inner: Loop) -> None:
    for part in loop.sequences:
        segments = SplitRows()(part.outer, cut.count, cut.length)
        rows = row_type(segments)(name=part.name)
        outer.sequences.append(SequencePart(segments, rows, part.name))
        inner.sequences.append(SequencePart(rows, part.row, part.name))
    for whole in loop.non_sequences:
        between = whole.inner.type(name=whole.name)
        outer.non_sequences.append(NonSequence(whole.outer, between, whole.name))
        inner.non_sequences.append(NonSequence(between, whole.inner, whole.name))
    if loop.sequences:
        return
    outer.n_steps = cut.count
    inner.n_steps = cut.length
    if constant_integer(cut.length) is None:
        inner.n_steps = pt.lscalar()
        outer.non_sequences.append(NonSequence(cut.length, inner.n_steps))


def tail_loop(loop: Loop, cut: Cut, starts: Sequence[Variable]) -> Loop:
    """Return the loop over the steps after the last whole segment.

    `starts` are what it starts from: states of the loop over segments, without time.
    """
    states = len(loop.states)
    return replace(
        loop,
        n_steps=None if loop.n_steps is None else cut.rest,
        sequences=[replace(part, outer=part.outer[cut.steps :]) for part in loop.sequences],
        states=[
            replace(state, initial=rows, taps=dict(state.taps), untraced=False)
            for state, rows in zip(loop.states, starts[:states], strict=True)
        ],
        carries=[
            replace(carry, initial=restored_carry(carry, value))
            for carry, value in zip(loop.carries, starts[states:], strict=True)
        ],
        outputs=list(loop.outputs),
        required_steps=0,
        checkpoint=cut.inside,
    )
