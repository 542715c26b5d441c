"""Reverse mode from checkpoints: segments are run again, from the last to the first.

The loop is seen as a nest (`ops.gradient.nest`) of segments and a tail. Its pullback is that of the
tail, then that of the outer loop, which is an ordinary loop: its own pullback reads the starts
of the segments, and its step runs the inner loop forward and pulls it back. What is special here
is where the starts come from. They are read from the histories of the loop that the user has
(`SegmentStarts`), so that nothing runs forward twice; if nothing else reads these histories, a
rewrite makes the forward loop a nest that stores the starts alone.

Griewank, Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000.
"""

from __future__ import annotations

from dataclasses import replace

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.graph.basic import Variable, equal_computations
from pytensor.tensor.type import lvector

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.derivatives import Variables
from scanlib.ops.gradient.cotangents import (
    HistoryCotangent,
    placed_history,
    split_history,
    terms_of,
    total_of,
)
from scanlib.ops.gradient.nest import Cut, outer_loop, restored_carry, stored_carry, tail_loop
from scanlib.ops.gradient.pullback import finish, is_null, pull_back, reachable
from scanlib.ops.gradient.step_pullback import as_dtype, is_connected, is_usable
from scanlib.ops.gradient.truncated import truncated_pullback
from scanlib.ops.graph import is_differentiable, is_tensor
from scanlib.ops.loop import Carry, Loop, Results, State
from scanlib.ops.row_ops.generator_words import GeneratorWords
from scanlib.ops.row_ops.row_segments import (
    JoinRows,
    MergeRows,
    PlacedStarts,
    SegmentStarts,
    SplitRows,
)
from scanlib.ops.scan import Scan
from scanlib.ops.signature import OuterInputs, OuterOutputs


def checkpointed_pullback(
    op: Scan, inputs: Variables, outputs: Variables, cotangents: Variables
) -> list[Variable]:
    """Return the cotangents of a loop's inputs, computing its steps again from checkpoints."""
    if op.truncate_gradient >= 0:
        return truncated_pullback(op, inputs, cotangents)
    return _Checkpointed(op, list(inputs), list(outputs), list(cotangents)).cotangents()


class _Checkpointed:
    """One pullback, in the order in which it is computed: tail, outer loop, collection."""

    def __init__(
        self,
        op: Scan,
        inputs: list[Variable],
        outputs: list[Variable],
        cotangents: list[Variable],
    ) -> None:
        assert op.checkpoint is not None
        self.op, self.inputs = op, inputs
        self.given: OuterOutputs = op.signature.split_outputs(cotangents)
        self.loop = Loop.from_op(op, inputs)
        length, self.inside = op.checkpoint.first(self.loop)
        self.starts = self.loop
        self.results = Results(*op.signature.split_outputs(outputs), outputs[0].owner)
        self.store_starts()
        self.walked = self.walked_loop()
        self.cut = Cut.of(self.walked.length(), length)
        self.histories = [self.split(i) for i in range(len(self.loop.states))]

    # What the forward pass stored

    def store_starts(self) -> None:
        """Run the loop with carries stored, and its steps counted, if the segments need that."""
        loop = self.loop
        dropped = any(state.untraced for state in loop.states)
        if not loop.carries and loop.stop is None and not dropped:
            return
        states = [replace(state, taps=dict(state.taps), untraced=False) for state in loop.states]
        kept = []
        for carry in loop.carries:
            initial = pt.expand_dims(stored_carry(carry.initial), 0)
            if is_tensor(carry.value):
                states.append(State(initial, {-1: carry.value}, carry.next, name=carry.name))
            else:
                kept.append(carry)
                words = GeneratorWords()(carry.next)
                states.append(State(initial, {-1: lvector()}, words, name=carry.name))
        if loop.stop is not None:
            count = pt.lscalar()
            kept.append(Carry(pt.constant(0, dtype="int64"), count, count + 1, "steps"))
        self.starts = replace(loop, states=states, carries=kept)
        self.results = self.starts.apply()

    def walked_loop(self) -> Loop:
        """Return the loop over the steps that ran."""
        loop = self.loop
        if loop.stop is None:
            return loop
        steps = self.results.carries[-1]
        return replace(
            loop,
            stop=None,
            n_steps=None if loop.sequences else steps,
            sequences=[replace(part, outer=part.outer[:steps]) for part in loop.sequences],
        )

    def start_rows(self, i: int) -> Variable:
        """Return what the segments start from, of a state, or of a carry after the states."""
        depth = self.starts.states[i].depth
        rows = SegmentStarts(depth)(self.results.histories[i], self.cut.count, self.cut.length)
        return rows if i < len(self.loop.states) else rows[:, 0]

    # What enters

    def split(self, i: int) -> tuple[HistoryCotangent, Variable | None]:
        """Take the cotangent of a history apart; return that of the segments' starts as well."""
        state, cotangent = self.loop.states[i], self.given.histories[i]
        if not is_usable(cotangent):
            return HistoryCotangent(), None
        own: list[Variable] = []
        others: list[Variable] = []
        for term in terms_of(as_dtype(cotangent, state.initial)):
            (own if self.places_starts(term) else others).append(term)
        rest = HistoryCotangent()
        if others:
            rest = split_history(total_of(others), state.depth, reverse=False)
        return rest, total_of([term.owner.inputs[0] for term in own])

    def places_starts(self, term: Variable) -> bool:
        node = term.owner
        return (
            node is not None
            and isinstance(node.op, PlacedStarts)
            and equal_computations(node.inputs[2:], [self.cut.count, self.cut.length])
        )

    # The two loops

    def cotangents(self) -> list[Variable]:
        states, carries = len(self.loop.states), len(self.loop.carries)
        starts = [self.start_rows(i) for i in range(states + carries)]
        self.has_tail = constant_integer(self.cut.rest(self.walked.length())) != 0
        tail = self.tail_cotangents(starts) if self.has_tail else None
        outer = self.outer_cotangents(starts, tail)
        return self.collect(outer, tail)

    def tail_cotangents(self, starts: list[Variable]) -> OuterInputs:
        loop, cut = self.walked, self.cut
        states = len(loop.states)
        carries = [
            restored_carry(carry, rows[-1])
            for carry, rows in zip(loop.carries, starts[states:], strict=True)
        ]
        initials = [rows[-1] for rows in starts[:states]]
        node = tail_loop(loop, cut, initials, carries, self.inside).apply().node
        outs = node.op.signature.split_outputs(node.outputs)
        given = [
            placed_history(history, self.after_segments(i), loop.states[i].depth)
            for i, history in enumerate(outs.histories)
        ]
        given += self.given.carries
        given += [g[cut.steps :] if is_usable(g) else g for g in self.given.outputs]
        found = node.op.pullback(node.inputs, node.outputs, given)
        return node.op.signature.split_inputs(found)

    def after_segments(self, i: int) -> HistoryCotangent:
        """Return the part of a history's cotangent that belongs to the tail."""
        whole = self.histories[i][0]
        return replace(whole, rows=None if whole.rows is None else whole.rows[self.cut.steps :])

    def outer_cotangents(self, starts: list[Variable], tail: OuterInputs | None) -> OuterInputs:
        loop, cut = self.walked, self.cut
        traced = [i for i, (c, _) in enumerate(self.histories) if c.rows is not None]
        stacked = [i for i, g in enumerate(self.given.outputs) if is_usable(g)]
        node = outer_loop(loop, cut, self.inside, traced, stacked).apply().node
        outs = node.op.signature.split_outputs(node.outputs)
        given = [self.start_cotangent(i, history, tail) for i, history in enumerate(outs.histories)]
        for i in traced:
            given.append(SplitRows()(self.histories[i][0].rows, cut.count, cut.length))
        for i in stacked:
            value = as_dtype(self.given.outputs[i], loop.outputs[i].value)
            given.append(SplitRows()(value, cut.count, cut.length))
        forward = Results(starts, outs.carries, outs.outputs, node)
        found = pull_back(node.op, node.inputs, forward, given)
        return node.op.signature.split_inputs(found)

    def start_cotangent(self, i: int, history: Variable, tail: OuterInputs | None) -> Variable:
        """Return the cotangent of the starts of all segments, and of what the tail starts from."""
        states = len(self.loop.states)
        own: Variable | None = None
        if i < states:
            cotangent, own = self.histories[i]
            if tail is not None:
                last = tail.initials[i]
            else:
                ends = replace(cotangent, rows=None)
                last = placed_history(history[-1], ends, self.loop.states[i].depth)
        else:
            last = tail.carries[i - states] if tail else self.given.carries[i - states]
        if not is_usable(last) or not is_differentiable(history):
            return pg.disconnected_type() if own is None else own
        placed = placed_history(history, HistoryCotangent(last=as_dtype(last, history)), 1)
        return placed if own is None else own + placed

    # What comes out

    def collect(self, outer: OuterInputs, tail: OuterInputs | None) -> list[Variable]:
        loop, states = self.loop, len(self.loop.states)
        found: list[Variable | None] = [None] * int(self.op.signature.has_n_steps)
        for i, part in enumerate(loop.sequences):
            found.append(self.sequence(part.outer, outer.sequences[i], tail and tail.sequences[i]))
        for i in range(states):
            entering = self.histories[i][0].initial
            value = self.first(outer.initials[i], tail and tail.initials[i])
            value = total_of([value, entering])
            found.append(value if is_differentiable(loop.states[i].initial) else None)
        for i, carry in enumerate(loop.carries):
            value = self.first(outer.initials[states + i], tail and tail.carries[i])
            found.append(value if is_differentiable(carry.initial) else None)
        for i in range(len(loop.non_sequences)):
            found.append(total_of([outer.non_sequences[i], tail and tail.non_sequences[i]]))
        reached = reachable(self.op, self.given)
        return [
            self.finish(variable, value, reaches)
            for variable, value, reaches in zip(self.inputs, found, reached, strict=True)
        ]

    @staticmethod
    def finish(outer: Variable, value: Variable | None, reaches: bool) -> Variable:
        if value is not None and is_null(value):
            return finish(outer, None, value, reaches)
        return finish(outer, value, None, reaches)

    @staticmethod
    def first(value: Variable, last: Variable | None) -> Variable | None:
        """Return the cotangent of the first start; it is undefined if that of the last one is."""
        for each in (value, last):
            if each is not None and is_null(each):
                return each
        return value[0] if is_connected(value) else None

    def sequence(self, outer: Variable, whole: Variable, rest: Variable | None) -> Variable | None:
        """Return the cotangent of a sequence from those of its segments and of the tail's rows."""
        parts = [part for part in (whole, rest) if part is not None and is_connected(part)]
        if not is_differentiable(outer) or not parts:
            return None
        for part in parts:
            if is_null(part):
                return part
        if not is_connected(whole):
            whole = pt.zeros_like(SplitRows()(outer, self.cut.count, self.cut.length))
        if rest is not None and not is_connected(rest):
            rest = pt.zeros_like(outer[self.cut.steps : self.walked.length()])
        rows = MergeRows()(whole) if rest is None else JoinRows()(whole, rest)
        if self.loop.stop is None:
            return rows
        return pt.set_subtensor(pt.zeros_like(outer)[: self.walked.length()], rows)
