"""The loop in plain Python: without any kernels, or for a backend that puts kernels into its steps.

It walks the steps one by one and calls the compiled body for each; histories are written
once, row by row, into arrays made before the first step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.io import In
from pytensor.compile.mode import FAST_COMPILE
from pytensor.graph.fg import FunctionGraph

from scanlib._compat import thaw_graph
from scanlib.ops.errors import StepShapeError
from scanlib.ops.messages import Messages
from scanlib.ops.shapes import stacked_row_shapes

if TYPE_CHECKING:
    from scanlib.ops.scan import Scan

FIRST_CAPACITY = 64  # rows allocated at first by a loop with `until`


class PythonLoop:
    """Runs one `Scan` on values.

    The arrays are NumPy's. A subclass for others says how they are made and what a step is.
    """

    def __init__(self, op: Scan) -> None:
        self.op = op
        self.signature = op.signature
        self.messages = Messages(op.signature, op.labels, op.name)

    @cached_property
    def step(self) -> Callable[..., Sequence[Any]]:
        """The function of one step, compiled before the first."""
        fgraph = thaw_graph(self.op.body)
        return pytensor.function(
            [In(variable, borrow=True) for variable in fgraph.inputs],
            list(fgraph.outputs),
            mode=FAST_COMPILE,
            on_unused_input="ignore",
            trust_input=True,
        )

    def as_array(self, value: Any) -> Any:
        return np.asarray(value)

    def empty(self, shape: tuple[int, ...], like: Any) -> Any:
        """Return a new array of the dtype of another."""
        return np.empty(shape, dtype=like.dtype)

    def copied(self, value: Any) -> Any:
        """Return a copy of an array, or of a carry that is none."""
        return value.copy() if isinstance(value, np.ndarray) else copy.deepcopy(value)

    def row(self, history: Any, place: int) -> Any:
        """Return a row of a history as a step reads it."""
        return np.asarray(history[place])

    def __call__(self, *inputs: Any) -> list[Any]:
        walk = self.walk(*inputs)
        while True:
            try:
                next(walk)
            except StopIteration as end:
                return end.value

    def start(self, inputs: Sequence[Any]) -> tuple[Any, int, int, list[Any], list[Any]]:
        """Return the inputs in groups, the number of steps, for how many there is memory at first,
        histories and carries."""
        outer = self.signature.split_inputs(inputs)
        n_steps = None if outer.n_steps is None else int(outer.n_steps)
        initial_rows = map(len, outer.initials)
        steps = self.messages.count_steps(n_steps, map(len, outer.sequences), initial_rows)
        grows = self.signature.has_stop and not self.signature.reverse
        capacity = min(steps, FIRST_CAPACITY) if grows else steps
        histories = [self._history(i, first, capacity) for i, first in enumerate(outer.initials)]
        return outer, steps, capacity, histories, [self.copied(value) for value in outer.carries]

    def walk(self, *inputs: Any) -> Generator[tuple[int, list, Sequence[Any]], None, list[Any]]:
        """Take the steps; yield the place, the arguments and the results of each."""
        signature = self.signature
        outer, steps, capacity, histories, carries = self.start(inputs)
        stacks: list[Any] = [None] * signature.n_outputs
        first_carry = signature.n_states
        first_output = first_carry + signature.n_carries
        stop = first_output + signature.n_outputs
        done = 0
        while done < steps:
            if done == capacity:
                capacity = min(steps, 2 * capacity)
                histories, stacks = self.grown(histories, stacks, done, capacity)
            t = steps - 1 - done if signature.reverse else done
            arguments = [self.as_array(sequence[t]) for sequence in outer.sequences]
            arguments += [
                self.row(histories[i], place + t * moves) for i, place, moves in self.taps
            ]
            arguments += carries
            arguments += outer.non_sequences
            found = self.step(*arguments)
            for i, history in enumerate(histories):
                self._write_state(i, history, t, done, found[i])
            carries = list(found[first_carry:first_output])
            for i in range(signature.n_outputs):
                value = self.as_array(found[first_output + i])
                if done == 0:
                    stacks[i] = self.empty((capacity, *value.shape), value)
                self.check_row(self.messages.output_shape, i, done, stacks[i], value)
                stacks[i][t] = value
            done += 1
            yield t, arguments, found
            if signature.has_stop and bool(found[stop]):
                break
        return self.end(inputs, histories, carries, stacks, done, capacity)

    def end(
        self,
        inputs: Sequence[Any],
        histories: list[Any],
        carries: list[Any],
        stacks: list[Any],
        done: int,
        capacity: int,
    ) -> list[Any]:
        """Return the results after `done` steps, of `capacity` for which there is memory."""
        if done < self.signature.required_steps:
            raise IndexError(self.messages.missing_steps())
        if done == 0:
            stacks = self._empty_outputs(inputs)
        return self._finish(histories, carries, stacks, done, capacity)

    @cached_property
    def taps(self) -> list[tuple[int, int, int]]:
        """What a step reads of states: which, and the place before the first step, and whether it
        moves on with the steps."""
        own = self.signature
        states = enumerate(zip(own.taps, own.depths, own.untraced, strict=True))
        return [
            (i, -tap - untraced if own.reverse else depth + tap, not untraced)
            for i, (taps, depth, untraced) in states
            for tap in taps
        ]

    def _history(self, i: int, initial: Any, capacity: int) -> Any:
        depth = self.signature.depths[i]
        if self.signature.untraced[i]:
            return self.copied(initial)
        history = self.empty((capacity + depth, *initial.shape[1:]), initial)
        if self.signature.reverse:
            history[capacity:] = initial
        else:
            history[:depth] = initial
        return history

    def grown(
        self, histories: list[Any], stacks: list[Any], done: int, capacity: int
    ) -> tuple[list[Any], list[Any]]:
        """Return what holds the rows of `done` steps in memory for more."""

        def larger(rows: Any, extra: int) -> Any:
            found = self.empty((capacity + extra, *rows.shape[1:]), rows)
            found[: done + extra] = rows
            return found

        kept = zip(histories, self.signature.depths, self.signature.untraced, strict=True)
        return (
            [rows if untraced else larger(rows, depth) for rows, depth, untraced in kept],
            [larger(rows, 0) for rows in stacks],
        )

    def check_row(
        self, text: Callable[[int, int], str], i: int, done: int, rows: Any, value: Any
    ) -> None:
        """Check that a result of a step has the shape of the rows before it."""
        if rows.shape[1:] == value.shape:
            return
        for axis, (expected, size) in enumerate(zip(rows.shape[1:], value.shape, strict=True)):
            if expected != size:
                raise StepShapeError(text(i, axis), done, expected, size)

    def _write_state(self, i: int, history: Any, t: int, done: int, value: Any) -> None:
        value = self.as_array(value)
        self.check_row(self.messages.state_shape, i, done, history, value)
        depth = self.signature.depths[i]
        if not self.signature.untraced[i]:
            history[t if self.signature.reverse else t + depth] = value
        elif self.signature.reverse:
            if depth > 1:
                history[1:] = self.copied(history[: depth - 1])
            history[0] = value
        else:
            if depth > 1:
                history[: depth - 1] = self.copied(history[1:])
            history[-1] = value

    @cached_property
    def row_shapes(self) -> Callable[..., Sequence[Any]]:
        """The compiled function of `row_shape_graph`."""
        graph = row_shape_graph(self.op)
        return pytensor.function(
            list(graph.inputs), list(graph.outputs), mode=FAST_COMPILE, on_unused_input="ignore"
        )

    def _empty_outputs(self, inputs: Sequence[Any]) -> list[Any]:
        shapes = self.row_shapes(*inputs) if self.signature.n_outputs else []
        types = self.signature.split_body_outputs(self.op.body.outputs).outputs
        remaining = iter(shapes)
        return [
            np.empty((0, *(int(next(remaining)) for _ in range(out.type.ndim))), out.type.dtype)
            for out in types
        ]

    def _finish(
        self, histories: list, carries: list, stacks: list, done: int, capacity: int
    ) -> list[Any]:
        skipped = capacity - done
        if skipped:
            first = skipped if self.signature.reverse else 0
            histories = [
                history if untraced else history[first : first + len(history) - skipped]
                for history, untraced in zip(histories, self.signature.untraced, strict=True)
            ]
            stacks = [stack[first : first + done] for stack in stacks]
        return [*histories, *carries, *stacks]


def row_shape_graph(op: Scan) -> FunctionGraph:
    """Return the graph from a loop's inputs to the flat row shapes of its stacked outputs.

    It is used when no step runs. Sizes that only a step could tell are zero.
    """
    inputs = [type() for type in op.outer_input_types()]
    shapes = [list(v.shape) if hasattr(v.type, "ndim") else None for v in inputs]
    rows = stacked_row_shapes(op.signature, op.body, inputs, shapes)
    sizes = [pt.as_tensor_variable(0 if dim is None else dim) for row in rows for dim in row]
    return FunctionGraph(inputs, sizes, clone=False)
