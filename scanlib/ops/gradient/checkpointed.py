"""Reverse mode from checkpoints: segments are run again, from the last to the first.

A loop of `T` steps is written as a nest of ordinary loops: an outer loop over ``n = T // s``
segments of `s` steps, whose step is an inner loop, and a tail of ``T - n s`` steps::

    outer, j = 0 … n-1:   start_{j+1} = last rows of inner(start_j, x[j s : (j+1) s])
    tail:                 the same loop, from start_n, over x[n s :]

`start_j` holds the `K` rows of a state before segment `j`, shape (K, …); carries become states
of the outer loop, so that they are stored at the start of each segment, and a random generator
is stored as its words. Sequences are cut by views. Nothing is padded.

These loops are pulled back: the tail, then the loop over segments, whose pullback reads the
starts of the segments, and whose step runs the inner loop forward and pulls it back. If nothing
else is to be stored of the user's loop, a rewrite makes it the same nest, and merging one of both.

A loop with `until` is run to count its steps; the nest is that of a loop of so many steps. With
``truncate_gradient = n``, it is that of the last `n` steps: a head of ``m = max(R - n, 0)`` of the
`R` steps that ran is run once more, stores nothing and takes no part.

Griewank, Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import floordiv, mul, sub

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable
from pytensor.tensor.type import TensorType

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.checkpoint_schedules import Schedule
from scanlib.ops.derivatives import Variables
from scanlib.ops.gradient.cotangents import HistoryCotangent, split_history, total_of
from scanlib.ops.gradient.pullback import finish, is_null, reachable
from scanlib.ops.gradient.step_pullback import as_dtype, is_connected, is_usable
from scanlib.ops.graph import is_differentiable, is_tensor, row_type, substitute
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.row_ops.generator_words import GeneratorFromWords, GeneratorWords
from scanlib.ops.row_ops.row_segments import MergeRows, SplitRows
from scanlib.ops.scan import Scan

Gradients = dict[Variable, Variable]


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


def checkpointed_pullback(
    op: Scan, inputs: Variables, outputs: Variables, cotangents: Variables
) -> list[Variable]:
    """Return the cotangents of a loop's inputs, computing its steps again from checkpoints."""
    return _Checkpointed(op, list(inputs), list(cotangents)).cotangents()


def _steps_that_ran(loop: Loop) -> Variable:
    """Return how many steps a loop takes; one with `until` is run for that, and merged later."""
    if loop.stop is None:
        return loop.length()
    count = pt.lscalar()
    counter = Carry(pt.constant(0, dtype="int64"), count, count + 1, "steps")
    return replace(loop, carries=[*loop.carries, counter], checkpoint=None).apply().carries[-1]


class _Checkpointed:
    """One pullback.

    The nest reads variables of its own in the place of the loop's inputs, which may be one variable
    several times; `replacements` are what these stand for.
    """

    def __init__(self, op: Scan, inputs: list[Variable], cotangents: list[Variable]) -> None:
        assert op.checkpoint is not None
        self.op, self.inputs = op, inputs
        self.given = op.signature.split_outputs(cotangents)
        self.replacements: dict[Variable, Variable] = {}
        steps = inputs[: int(op.signature.has_n_steps)]
        own = [*steps, *(self.stand_in(variable) for variable in inputs[len(steps) :])]
        groups = op.signature.split_inputs(own)
        # What is differentiated behind the sequences, by the position of the input.
        self.recurrent = len(steps) + len(groups.sequences)
        self.wrt: list[Variable | None] = [
            v if is_differentiable(v) or (is_tensor(v) and v in groups.non_sequences) else None
            for v in own[self.recurrent :]
        ]
        self.loop = Loop.from_op(op, own)
        # Of all steps, those that are walked back.
        self.steps = slice(None)
        self.walked = self.walked_loop()
        self.cut = Cut.of(self.walked, op.checkpoint)
        self.histories = [self.split(i) for i in range(len(groups.initials))]

    def stand_in(self, value: Variable) -> Variable:
        if isinstance(value, Constant) and not is_differentiable(value):
            return value
        variable = value.type()
        self.replacements[variable] = value
        return variable

    def split(self, i: int) -> HistoryCotangent:
        """Take the cotangent of a history apart; its rows are those of the steps walked."""
        state, cotangent = self.loop.states[i], self.given.histories[i]
        if not is_usable(cotangent):
            return HistoryCotangent()
        parts = split_history(as_dtype(cotangent, state.initial), state.depth, reverse=False)
        return replace(parts, rows=None if parts.rows is None else self.walk(parts.rows))

    def walk(self, rows: Variable) -> Variable:
        return rows if self.steps.start is None else rows[self.steps.start :]

    # The steps

    def walked_loop(self) -> Loop:
        """Return the loop over the steps that are walked back, of a number known before."""
        loop, real = self.loop, Loop.from_op(self.op, self.inputs)
        n = loop.truncate_gradient
        if loop.stop is None and n < 0:
            return loop
        steps = _steps_that_ran(real)
        self.steps = slice(None if n < 0 else pt.maximum(steps - n, 0), steps)
        walked = self.some_steps(loop, self.steps)
        if n < 0:
            return walked
        head = self.some_steps(real, slice(None, self.steps.start))
        head.states = [replace(s, taps=dict(s.taps), untraced=True) for s in head.states]
        head.outputs = []
        before = head.apply()
        walked.states = [
            self.started(state, rows)
            for state, rows in zip(loop.states, before.histories, strict=True)
        ]
        values = [self.stand_in(value) for value in before.carries]
        walked.carries = [
            replace(carry, initial=value) for carry, value in zip(loop.carries, values, strict=True)
        ]
        for i, value in enumerate(values, start=len(loop.states)):
            self.wrt[i] = value if is_differentiable(value) else None
        return walked

    @staticmethod
    def some_steps(loop: Loop, steps: slice) -> Loop:
        first, last = steps.start, steps.stop
        return replace(
            loop,
            stop=None,
            truncate_gradient=-1,
            required_steps=0,
            checkpoint=None,
            n_steps=None if loop.sequences else (last if first is None else last - first),
            sequences=[replace(p, outer=p.outer[first:last]) for p in loop.sequences],
        )

    def started(self, state: State, rows: Variable) -> State:
        """Return a state that starts from rows that the head ends with.

        Its initial rows that are among them are differentiated, the others are not.
        """
        shift = pt.minimum(self.steps.start, state.depth)
        head = self.stand_in(rows)
        start = pt.concatenate([state.initial[shift:], head[state.depth - shift :]])
        start = pt.specify_shape(start, (state.depth, *[None] * (start.type.ndim - 1)))
        return replace(state, initial=start, taps=dict(state.taps), untraced=False)

    # The two loops

    def cotangents(self) -> list[Variable]:
        loop, cut, states = self.walked, self.cut, len(self.walked.states)
        node = outer_loop(loop, cut).apply().node
        outer = node.op.signature.split_outputs(node.outputs)
        segments = node.op.signature.split_inputs(node.inputs).sequences
        ends = [history[-1] for history in outer.histories]
        rows = [parts.rows for parts in self.histories]
        rows += [self.walk(g) if is_usable(g) else None for g in self.given.outputs]
        stacked = [
            (out, SplitRows()(value, cut.count, cut.length))
            for out, value in zip(outer.outputs, rows, strict=True)
            if value is not None
        ]
        if not cut.has_tail:
            finals = self.finals(ends[:states], ends[states:])
            found = self.pull([*stacked, *finals], segments)
            return self.collect([found], segments, [])
        starts = [end.type() for end in ends]
        tail = tail_loop(loop, cut, starts).apply()
        rests = tail.node.op.signature.split_inputs(tail.node.inputs).sequences
        behind = [h[s.depth :] for h, s in zip(tail.histories, loop.states, strict=True)]
        last = [h[-s.depth :] for h, s in zip(tail.histories, loop.states, strict=True)]
        known = [
            (out, value[cut.steps :])
            for out, value in zip([*behind, *tail.outputs], rows, strict=True)
            if value is not None
        ]
        found = self.pull([*known, *self.finals(last, tail.carries)], [*starts, *rests])
        read = substitute([*found.values()], dict(zip(starts, ends, strict=True)))
        found = dict(zip(found, read, strict=True))
        # Through a start whose cotangent is undefined nothing flows back.
        owed, undefined = [], {}
        for start, end, variable in zip(starts, ends, self.wrt, strict=False):
            if start not in found:
                continue
            if not is_null(found[start]):
                owed.append((end, found[start]))
            elif variable is not None:
                undefined[variable] = found[start]
        before = self.pull([*stacked, *owed], segments)
        return self.collect([found, before, undefined], segments, rests)

    def finals(
        self, rows: list[Variable], carries: list[Variable]
    ) -> list[tuple[Variable, Variable]]:
        """Return the cotangents of the last rows of the states, and of the last carries."""
        known = list(zip(carries, self.given.carries, strict=True))
        for value, parts in zip(rows, self.histories, strict=True):
            known += [(value[-1], parts.last)] if parts.last is not None else []
            known += [(value, parts.ends)] if parts.ends is not None else []
        return [(value, g) for value, g in known if is_usable(g)]

    def pull(self, known: list[tuple[Variable, Variable]], others: list[Variable]) -> Gradients:
        """Return the cotangents of inputs, and of `others`, from those of what they reach."""
        known = [(value, g) for value, g in known if is_differentiable(value)]
        wrt = [v for v in self.wrt if v is not None] + [v for v in others if is_differentiable(v)]
        if not known:
            return {}
        gradients = pg.grad(
            cost=None,
            # One of the values may be computed from another one: copies keep them apart.
            known_grads={pt.tensor_copy(value): as_dtype(g, value) for value, g in known},
            wrt=wrt,
            disconnected_inputs="ignore",
            return_disconnected="disconnected",
            null_gradients="return",
        )
        return {v: g for v, g in zip(wrt, gradients, strict=True) if is_connected(g)}

    # What comes out

    def collect(
        self, found: list[Gradients], segments: list[Variable], rests: list[Variable]
    ) -> list[Variable]:
        """Return the cotangent of each input from what was found for it."""
        totals = [total_of([each.get(v) for each in found if v is not None]) for v in self.wrt]
        for i, parts in enumerate(self.histories):
            totals[i] = total_of([totals[i], parts.initial])
        rows = [
            self.sequence(i, found, pair) for i, pair in enumerate(zip_longest(segments, rests))
        ]
        totals = [*[None] * (self.recurrent - len(rows)), *rows, *totals]
        there = [value for value in totals if value is not None]
        values = dict(zip(there, substitute(there, self.replacements), strict=True))
        results = []
        reached = reachable(self.op, self.given)
        for outer, total, reaches in zip(self.inputs, totals, reached, strict=True):
            value = None if total is None else values[total]
            undefined = value if value is not None and is_null(value) else None
            results.append(finish(outer, value, undefined, reaches))
        return results

    def sequence(
        self, i: int, found: list[Gradients], pair: tuple[Variable, Variable | None]
    ) -> Variable | None:
        """Return the cotangent of a sequence from those of its segments and of the rest."""
        parts = [part for part in pair if part is not None]
        gradients = [total_of([each.get(part) for each in found]) for part in parts]
        there = [g for g in gradients if g is not None]
        undefined = [g for g in there if is_null(g)]
        if not there or undefined:
            return next(iter(undefined), None)
        whole, *rest = [
            pt.zeros_like(part) if g is None else g
            for part, g in zip(parts, gradients, strict=True)
        ]
        rows = pt.concatenate([MergeRows()(whole), *rest])
        if self.steps.stop is None:
            return rows
        return pt.set_subtensor(pt.zeros_like(self.loop.sequences[i].outer)[self.steps], rows)
