"""The loop in plain Python: the fall-back for bodies that no backend can compile.

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
from scanlib.ops.errors import (
    InitialRowsError,
    StepShapeError,
)
from scanlib.ops.messages import Messages
from scanlib.ops.shapes import stacked_row_shapes

if TYPE_CHECKING:
    from scanlib.ops.scan import Scan


class PythonLoop:
    """Runs one `Scan` on values.

    The arrays are NumPy's. A subclass for others says how they are made and what a step is.
    """

    def __init__(self, op: Scan) -> None:
        self.op = op
        self.signature = op.signature
        self.messages = Messages(op.signature, op.labels, op.name)
        self._row_shapes: Any = None

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

    def walk(self, *inputs: Any) -> Generator[tuple[int, list, Sequence[Any]], None, list[Any]]:
        """Take the steps; yield the place, the arguments and the results of each."""
        outer = self.signature.split_inputs(inputs)
        steps = count_steps(self.messages, outer)
        histories = [self._history(i, initial, steps) for i, initial in enumerate(outer.initials)]
        carries = [self.copied(value) for value in outer.carries]
        stacks: list[Any] = [None] * self.signature.n_outputs
        done = 0
        while done < steps:
            t = steps - 1 - done if self.signature.reverse else done
            arguments = self._arguments(t, outer, histories, carries)
            found = self.step(*arguments)
            result = self.signature.split_body_outputs(found[: len(self.op.body.outputs)])
            for i, value in enumerate(result.states):
                self._write_state(i, histories[i], t, done, value)
            carries = result.carries
            for i, value in enumerate(result.outputs):
                stacks[i] = self._write_output(i, stacks[i], t, done, steps, value)
            done += 1
            yield t, arguments, found
            if result.stop is not None and bool(result.stop):
                break
        if done < self.signature.required_steps:
            raise IndexError(self.messages.missing_steps())
        if done == 0:
            stacks = self._empty_outputs(inputs)
        return self._finish(histories, carries, stacks, done, steps)

    def _history(self, i: int, initial: Any, steps: int) -> Any:
        depth = self.signature.depths[i]
        if len(initial) != depth:
            raise InitialRowsError(self.messages.initial_rows(i), len(initial))
        if self.signature.untraced[i]:
            return self.copied(initial)
        history = self.empty((steps + depth, *initial.shape[1:]), initial)
        if self.signature.reverse:
            history[steps:] = initial
        else:
            history[:depth] = initial
        return history

    def _arguments(self, t: int, outer: Any, histories: list, carries: list) -> list[Any]:
        arguments = [self.as_array(sequence[t]) for sequence in outer.sequences]
        for i, history in enumerate(histories):
            start = 0 if self.signature.untraced[i] else t
            for tap in self.signature.taps[i]:
                if self.signature.reverse:
                    row = start - tap - self.signature.untraced[i]
                else:
                    row = start + self.signature.depths[i] + tap
                arguments.append(self.row(history, row))
        return [*arguments, *carries, *outer.non_sequences]

    def _write_state(self, i: int, history: Any, t: int, done: int, value: Any) -> None:
        value = self.as_array(value)
        for axis, (expected, size) in enumerate(zip(history.shape[1:], value.shape, strict=True)):
            if expected != size:
                raise StepShapeError(self.messages.state_shape(i, axis), done, expected, size)
        depth = self.signature.depths[i]
        if not self.signature.untraced[i]:
            history[t if self.signature.reverse else t + depth] = value
        elif self.signature.reverse:
            history[1:] = self.copied(history[: depth - 1])
            history[0] = value
        else:
            history[: depth - 1] = self.copied(history[1:])
            history[-1] = value

    def _write_output(self, i: int, stack: Any, t: int, done: int, steps: int, value: Any) -> Any:
        value = self.as_array(value)
        if stack is None:
            stack = self.empty((steps, *value.shape), value)
        for axis, (expected, size) in enumerate(zip(stack.shape[1:], value.shape, strict=True)):
            if expected != size:
                raise StepShapeError(self.messages.output_shape(i, axis), done, expected, size)
        stack[t] = value
        return stack

    def _empty_outputs(self, inputs: Sequence[Any]) -> list[Any]:
        if self._row_shapes is None:
            self._row_shapes = empty_row_shapes(self.op)
        shapes = self._row_shapes(*inputs) if self.signature.n_outputs else []
        types = self.signature.split_body_outputs(self.op.body.outputs).outputs
        remaining = iter(shapes)
        return [
            np.empty((0, *(int(next(remaining)) for _ in range(out.type.ndim))), out.type.dtype)
            for out in types
        ]

    def _finish(
        self, histories: list, carries: list, stacks: list, done: int, steps: int
    ) -> list[Any]:
        skipped = steps - done
        if skipped:
            first = skipped if self.signature.reverse else 0
            histories = [
                history if untraced else history[first : first + len(history) - skipped]
                for history, untraced in zip(histories, self.signature.untraced, strict=True)
            ]
            stacks = [stack[first : first + done] for stack in stacks]
        return [*histories, *carries, *stacks]


def count_steps(messages: Messages, outer: Any) -> int:
    """Return the number of steps of a loop and check that its sequences have it."""
    n_steps = None if outer.n_steps is None else int(outer.n_steps)
    return messages.count_steps(n_steps, map(len, outer.sequences))


def row_shape_graph(op: Scan) -> FunctionGraph:
    """Return the graph from a loop's inputs to the flat row shapes of its stacked outputs.

    It is used when no step runs. Sizes that only a step could tell are zero.
    """
    inputs = [type() for type in op.outer_input_types()]
    shapes = [list(v.shape) if hasattr(v.type, "ndim") else None for v in inputs]
    rows = stacked_row_shapes(op.signature, op.body, inputs, shapes)
    sizes = [pt.as_tensor_variable(0 if dim is None else dim) for row in rows for dim in row]
    return FunctionGraph(inputs, sizes, clone=False)


def empty_row_shapes(op: Scan) -> Any:
    """Return the compiled function of `row_shape_graph`."""
    graph = row_shape_graph(op)
    return pytensor.function(
        list(graph.inputs), list(graph.outputs), mode=FAST_COMPILE, on_unused_input="ignore"
    )
