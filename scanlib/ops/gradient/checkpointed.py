"""Reverse mode from checkpoints: segments are run again, from the last to the first.

The loop is written as a nest (`ops.gradient.nest`) of ordinary loops, a loop over segments and
a tail, and these are pulled back: the tail, then the loop over segments, whose pullback reads the
starts of the segments, and whose step runs the inner loop forward and pulls it back. If nothing
else is to be stored of the user's loop, a rewrite makes it the same nest, and merging one of both.

A loop with `until` is run to count its steps; the nest is that of a loop of so many steps. With
``truncate_gradient = n``, it is that of the last `n` steps: a head of ``m = max(R - n, 0)`` of the
`R` steps that ran is run once more, stores nothing and takes no part.

Griewank, Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.graph.basic import Constant, Variable

from scanlib.ops.derivatives import Variables
from scanlib.ops.gradient.cotangents import HistoryCotangent, split_history, total_of
from scanlib.ops.gradient.nest import Cut, outer_loop, tail_loop
from scanlib.ops.gradient.pullback import finish, is_null, reachable
from scanlib.ops.gradient.step_pullback import as_dtype, is_connected, is_usable
from scanlib.ops.graph import is_differentiable, is_tensor, substitute
from scanlib.ops.loop import Carry, Loop, State
from scanlib.ops.row_ops.row_segments import MergeRows, SplitRows
from scanlib.ops.scan import Scan

Gradients = dict[Variable, Variable]


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
