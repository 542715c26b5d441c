"""A loop cut into segments: an outer loop over segments, an inner loop over their steps.

``T`` steps become ``n = T // s`` segments of `s` steps and a tail of ``T - n s`` steps::

    outer, j = 0 … n-1:   start_{j+1} = last rows of inner(start_j, x[j s : (j+1) s])
    tail:                 the same loop, from start_n, over x[n s :]

`start_j` holds the `K` rows of a state before segment `j`, shape (K, …); carries become states
of the outer loop, so that they are stored at the start of each segment, and a random generator
is stored as its words. Sequences are cut by views. Nothing is padded.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.type import TensorType

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.checkpoint_schedules import Schedule
from scanlib.ops.graph import is_tensor, row_type, substitute
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Results, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.row_ops.generator_words import GeneratorFromWords, GeneratorWords
from scanlib.ops.row_ops.row_segments import SplitRows


@dataclass(frozen=True)
class Cut:
    """`count` segments of `length` steps each, both int64 scalars."""

    count: Variable
    length: Variable

    @classmethod
    def of(cls, steps: Variable, length: Variable) -> Cut:
        """Cut a number of steps into as many whole segments as there are."""
        known, size = constant_integer(steps), constant_integer(length)
        if known is not None and size is not None:
            return cls(pt.constant(known // size, dtype="int64"), length)
        return cls(steps // length, length)

    @property
    def steps(self) -> Variable:
        """The number of steps in whole segments."""
        known, size = constant_integer(self.count), constant_integer(self.length)
        if known is not None and size is not None:
            return pt.constant(known * size, dtype="int64")
        return self.count * self.length

    def rest(self, steps: Variable) -> Variable:
        """Return the number of steps after the last whole segment."""
        known, whole = constant_integer(steps), constant_integer(self.steps)
        if known is not None and whole is not None:
            return pt.constant(known - whole, dtype="int64")
        return steps - self.steps


def stored_carry(initial: Variable) -> Variable:
    """Return the value of a carry as it is stored at the starts of segments."""
    return initial if is_tensor(initial) else GeneratorWords()(initial)


def restored_carry(carry: Carry, stored: Variable) -> Variable:
    """Return the value of a carry from what was stored."""
    return stored if is_tensor(carry.value) else GeneratorFromWords()(stored)


def outer_loop(
    loop: Loop,
    cut: Cut,
    inside: Schedule | None = None,
    traced: Collection[int] = (),
    stacked: Collection[int] = (),
) -> Loop:
    """Return the loop over segments.

    Parameters
    ----------
    loop : Loop
        The loop to cut; it is left as it is.
    cut : Cut
        At most as many steps as the loop takes.
    inside : Schedule, optional
        Checkpoints of the inner loop.
    traced, stacked : collection of int
        The states whose rows of all steps are stacked, shape (n, s, …), and the outputs that are.

    Returns
    -------
    Loop
        Its states are the starts of the loop's states, then those of its carries; its outputs
        the traces, then the outputs. With `until`, a last carry says whether the loop stopped.
    """
    return _Outer(loop, cut, inside, list(traced), list(stacked)).build()


class _Outer:
    def __init__(
        self,
        loop: Loop,
        cut: Cut,
        inside: Schedule | None,
        traced: list[int],
        stacked: list[int],
    ) -> None:
        self.loop, self.cut, self.traced, self.stacked = loop, cut, traced, stacked
        name = f"{loop.name}_segments" if loop.name else "segments"
        self.outer = Loop(name=name, function=loop.function, recompute=True)
        self.inner = Loop(name=loop.name, function=loop.function, checkpoint=inside)
        # Which state of the inner loop, if any, is a state of the loop.
        self.position: dict[int, int] = {}

    def build(self) -> Loop:
        self.add_inputs()
        self.add_states()
        self.add_carries()
        self.inner.outputs = [Output(self.loop.outputs[i].value) for i in self.stacked]
        if self.loop.stop is not None:
            self.add_stop(self.loop.stop)
        self.set_results(self.inner.apply())
        return self.outer

    def add_inputs(self) -> None:
        cut, outer, inner = self.cut, self.outer, self.inner
        for part in self.loop.sequences:
            segments = SplitRows()(part.outer, cut.count, cut.length)
            rows = row_type(segments)(name=part.name)
            outer.sequences.append(SequencePart(segments, rows, part.name))
            inner.sequences.append(SequencePart(rows, part.row, part.name))
        for whole in self.loop.non_sequences:
            between = whole.inner.type(name=whole.name)
            outer.non_sequences.append(NonSequence(whole.outer, between, whole.name))
            inner.non_sequences.append(NonSequence(between, whole.inner, whole.name))
        if self.loop.sequences:
            return
        outer.n_steps = cut.count
        inner.n_steps = cut.length
        if constant_integer(cut.length) is None:
            inner.n_steps = pt.lscalar()
            outer.non_sequences.append(NonSequence(cut.length, inner.n_steps))

    def add_states(self) -> None:
        for i, state in enumerate(self.loop.states):
            tap_type = next(iter(state.taps.values())).type
            # No size for several rows: asserting it would stand in the way of rewrites.
            rows = 1 if state.depth == 1 else None
            start = TensorType(tap_type.dtype, shape=(rows, *tap_type.shape))()
            initial = pt.expand_dims(state.initial, 0)
            self.outer.states.append(State(initial, {-1: start}, start, name=state.name))
            if self.is_made_of_finals(i):
                continue
            self.position[i] = len(self.inner.states)
            copy = replace(state, initial=start, taps=dict(state.taps), untraced=False)
            self.inner.states.append(copy)

    def is_made_of_finals(self, i: int) -> bool:
        """Whether no step reads a state, and its next value is made of those of carries.

        Its value after a segment then follows from the final carries, once for the segment.
        """
        loop, state = self.loop, self.loop.states[i]
        roots = [*loop.body_outputs()]
        if i in self.traced or set(ancestors(roots)).intersection(state.taps.values()):
            return False
        finals = [carry.next for carry in loop.carries]
        known = {*finals, *(part.inner for part in loop.non_sequences)}
        inputs = set(loop.body_inputs())
        above = ancestors([state.next], blockers=finals)
        return not any(v in inputs and v not in known for v in above)

    def add_carries(self) -> None:
        for carry in self.loop.carries:
            initial = stored_carry(carry.initial)
            value = carry.value.type() if is_tensor(carry.value) else initial.type()
            rows = pt.expand_dims(initial, 0)
            self.outer.states.append(State(rows, {-1: value}, value, name=carry.name))
            start = restored_carry(carry, value)
            self.inner.carries.append(Carry(start, carry.value, carry.next, carry.name))

    def add_stop(self, stop: Variable) -> None:
        false = pt.constant(np.zeros((), dtype=bool))
        before, after = pt.TensorType("bool", shape=())(), pt.neq(stop, 0)
        self.inner.stop = after
        self.inner.carries.append(Carry(false, before, after, "stopped"))
        value = before.type()
        self.outer.carries.append(Carry(false, value, value, "stopped"))

    def set_results(self, results: Results) -> None:
        loop, outer = self.loop, self.outer
        finals = {c.next: v for c, v in zip(loop.carries, results.carries, strict=False)}
        finals |= {
            inner.inner: between.outer
            for inner, between in zip(loop.non_sequences, self.inner.non_sequences, strict=True)
        }
        for i, state in enumerate(loop.states):
            if i in self.position:
                history = results.histories[self.position[i]]
                deep = state.depth > 1
                rows = history[-state.depth :] if deep else pt.expand_dims(history[-1], 0)
            else:
                rows = pt.expand_dims(substitute([state.next], finals)[0], 0)
            outer.states[i].next = rows
        after = outer.states[len(loop.states) :]
        for part, final in zip(after, results.carries, strict=False):
            part.next = stored_carry(final)
        if loop.stop is not None:
            outer.carries[-1].next = outer.stop = results.carries[-1]
        for i in self.traced:
            history = results.histories[self.position[i]]
            outer.outputs.append(Output(history[loop.states[i].depth :]))
        outer.outputs += [Output(value) for value in results.outputs]


def tail_loop(
    loop: Loop,
    cut: Cut,
    initials: Sequence[Variable],
    carries: Sequence[Variable],
    inside: Schedule | None = None,
    steps: Variable | None = None,
) -> Loop:
    """Return the loop over the steps after the last whole segment.

    Parameters
    ----------
    loop, cut, inside
        As for `outer_loop`.
    initials : sequence of Variable
        The rows of each state that the tail starts from, shape (K, …).
    carries : sequence of Variable
        The values of the carries that it starts from.
    steps : int64 scalar, optional
        How many steps it takes; by default all that are left.
    """
    first, last = cut.steps, None if steps is None else cut.steps + steps
    n_steps = cut.rest(loop.length()) if steps is None else steps
    return replace(
        loop,
        n_steps=n_steps if loop.n_steps is not None else None,
        sequences=[replace(part, outer=part.outer[first:last]) for part in loop.sequences],
        states=[
            replace(state, initial=rows, taps=dict(state.taps), untraced=False)
            for state, rows in zip(loop.states, initials, strict=True)
        ],
        carries=[
            replace(carry, initial=value)
            for carry, value in zip(loop.carries, carries, strict=True)
        ],
        outputs=list(loop.outputs),
        required_steps=0,
        checkpoint=inside,
    )
