"""Reverse mode from checkpoints over the last steps only.

With ``truncate_gradient = n`` a derivative walks back `n` of the `R` steps that ran. The loop is
seen as a head of ``m = max(R - n, 0)`` steps, which takes no part, and the loop of the other steps,
which starts where the head ends and is pulled back from checkpoints of its own. The head runs
once more for that, and stores nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.ops.gradient.cotangents import HistoryCotangent, placed_history, split_history
from scanlib.ops.gradient.pullback import finish, is_null, reachable
from scanlib.ops.gradient.step_pullback import as_dtype, is_connected, is_usable
from scanlib.ops.graph import is_differentiable
from scanlib.ops.loop import Carry, Loop, State
from scanlib.ops.scan import Scan
from scanlib.ops.signature import OuterInputs


def truncated_pullback(
    op: Scan, inputs: Sequence[Variable], cotangents: Sequence[Variable]
) -> list[Variable]:
    """Return the cotangents of a checkpointed loop's inputs, over its last steps."""
    return _Truncated(op, list(inputs), list(cotangents)).cotangents()


def steps_that_ran(loop: Loop) -> Variable:
    """Return how many steps a loop takes; one with `until` is run for that, and merged later."""
    if loop.stop is None:
        return loop.length()
    count = pt.lscalar()
    counter = Carry(pt.constant(0, dtype="int64"), count, count + 1, "steps")
    return replace(loop, carries=[*loop.carries, counter]).apply().carries[-1]


class _Truncated:
    def __init__(self, op: Scan, inputs: list[Variable], cotangents: list[Variable]) -> None:
        self.op, self.inputs = op, inputs
        self.given = op.signature.split_outputs(cotangents)
        self.loop = Loop.from_op(op, inputs)
        self.steps = steps_that_ran(self.loop)
        self.first = pt.maximum(self.steps - op.truncate_gradient, 0)
        self.histories = [self.split(i) for i in range(len(self.loop.states))]

    def split(self, i: int) -> HistoryCotangent:
        state, cotangent = self.loop.states[i], self.given.histories[i]
        if not is_usable(cotangent):
            return HistoryCotangent()
        return split_history(as_dtype(cotangent, state.initial), state.depth, reverse=False)

    def part(self, first: Variable | None, last: Variable, states: list[State]) -> Loop:
        """Return the loop over some of the steps."""
        loop = self.loop
        steps = last if first is None else last - first
        return replace(
            loop,
            stop=None,
            truncate_gradient=-1,
            required_steps=0,
            n_steps=None if loop.sequences else steps,
            sequences=[replace(p, outer=p.outer[first:last]) for p in loop.sequences],
            states=states,
        )

    def cotangents(self) -> list[Variable]:
        loop = self.loop
        untraced = [replace(s, taps=dict(s.taps), untraced=True) for s in loop.states]
        head = self.part(None, self.first, untraced)
        head.outputs, head.checkpoint = [], None
        before = head.apply()
        starts = [
            replace(state, initial=rows, taps=dict(state.taps), untraced=False)
            for state, rows in zip(loop.states, before.histories, strict=True)
        ]
        walked = self.part(self.first, self.steps, starts)
        walked.carries = [
            replace(carry, initial=value)
            for carry, value in zip(loop.carries, before.carries, strict=True)
        ]
        node = walked.apply().node
        outs = node.op.signature.split_outputs(node.outputs)
        given = [
            placed_history(history, self.after_head(i), loop.states[i].depth)
            for i, history in enumerate(outs.histories)
        ]
        given += self.given.carries
        given += [g[self.first :] if is_usable(g) else g for g in self.given.outputs]
        found = node.op.pullback(node.inputs, node.outputs, given)
        return self.collect(node.op.signature.split_inputs(found))

    def after_head(self, i: int) -> HistoryCotangent:
        parts = self.histories[i]
        return replace(
            parts, initial=None, rows=None if parts.rows is None else parts.rows[self.first :]
        )

    def collect(self, found: OuterInputs) -> list[Variable]:
        loop = self.loop
        values: list[Variable] = []
        for part, value in zip(loop.sequences, found.sequences, strict=True):
            if is_usable(value) and is_differentiable(part.outer):
                zeros = pt.zeros_like(part.outer)
                value = pt.set_subtensor(zeros[self.first : self.steps], value)
            values.append(value)
        for i, value in enumerate(found.initials):
            values.append(self.initial(i, value))
        values += [*found.carries, *found.non_sequences]
        reached = reachable(self.op, self.given)
        start = int(self.op.signature.has_n_steps)
        results = [finish(outer, None, None, False) for outer in self.inputs[:start]]
        rows = zip(self.inputs[start:], values, reached[start:], strict=True)
        for outer, value, reaches in rows:
            undefined = value if is_connected(value) and is_null(value) else None
            results.append(finish(outer, value if is_usable(value) else None, undefined, reaches))
        return results

    def initial(self, i: int, value: Variable) -> Variable:
        """Return the cotangent of initial rows: those among the rows that the head ends with."""
        entering = self.histories[i].initial
        if is_usable(value):
            shift = pt.minimum(self.first, self.loop.states[i].depth)
            zeros = pt.zeros_like(value)
            value = pt.concatenate([zeros[:shift], value[: value.shape[0] - shift]])
            return value if entering is None else value + entering
        if is_connected(value) or entering is None:
            return value
        return entering
