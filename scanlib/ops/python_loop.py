"""The loop in plain Python: without any kernels, or for a backend that puts kernels into its steps.

It is a function of Python, written for the loop, that walks the steps one by one and calls the
compiled body for each, or has its lines; histories are written once, row by row, into arrays made
before the first step.
"""

import copy
from collections.abc import Callable, Generator, Iterator, Sequence
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

    def __init__(self, op: "Scan") -> None:
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

    def past(self, row: str, ndim: int) -> str:
        """Return the text of a row of a history as a step reads it, given that of the row."""
        return row if ndim else f"asarray({row})"

    def step_text(self) -> tuple[Sequence[str], list[str], dict[str, Any]]:
        """Return the lines that compute a step from ``x0``, ``x1`` and so on, the texts of its
        results, and what the lines refer to."""
        given = ", ".join(f"x{k}" for k in range(len(self.op.body.inputs)))
        results = [f"found[{k}]" for k in range(len(self.op.body.outputs))]
        return [f"found = step({given})"], results, {"step": self.step}

    def __call__(self, *inputs: Any) -> list[Any]:
        return self.end(inputs, *self.loop(*self._given(inputs)))

    def walk(self, *inputs: Any) -> Generator[tuple[int, list, Sequence[Any]], None, list[Any]]:
        """Take the steps; yield the place, the arguments and the results of each."""
        found = yield from self._function(yields=True)(*self._given(inputs))
        return self.end(inputs, *found)

    def _given(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        outer, steps, capacity, histories, carries = self.start(inputs)
        return steps, capacity, *outer.sequences, *histories, *carries, *outer.non_sequences

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

    @cached_property
    def loop(self) -> Callable[..., Any]:
        """The function that takes the steps."""
        return self._function()

    def _function(self, yields: bool = False) -> Callable[..., Any]:
        """Return the function that takes the steps, and perhaps yields what each one does.

        In its text ``s`` are sequences, ``h`` histories, ``z`` stacked outputs, ``p`` and ``q`` the
        shapes of their rows, and ``x`` what a step reads.
        """
        signature = self.signature
        names = [f"x{k}" for k in range(len(self.op.body.inputs))]
        inner, (computed, results, scope) = signature.split_body_inputs(names), self.step_text()
        if yields:
            computed = [*computed, f"yield t, [{', '.join(names)}], found"]
        arrays = [f"s{i}" for i in range(signature.n_sequences)]
        arrays += [f"h{i}" for i in range(signature.n_states)]
        given = ["steps", "capacity", *arrays, *inner.carries, *inner.non_sequences]
        lines = [f"def loop({', '.join(given)}):"]
        lines += [f" p{i} = h{i}.shape[1:]" for i in range(signature.n_states)]
        lines += [f" z{i} = q{i} = None" for i in range(signature.n_outputs)]
        lines += [" done = 0", " while done < steps:"]
        lines += [f"  {line}" for line in self._step_lines(names, computed, results)]
        groups = [arrays[signature.n_sequences :], inner.carries]
        groups += [[f"z{i}" for i in range(signature.n_outputs)]]
        texts = [f"[{', '.join(group)}]" for group in groups]
        lines.append(f" return {', '.join(texts)}, done, capacity")
        scope = {
            **scope,
            "asarray": self.as_array,
            "check": self.check_row,
            "copied": self.copied,
            "empty": self.empty,
            "grown": self.grown,
            "messages": self.messages,
        }
        exec("\n".join(lines), scope)
        return scope["loop"]

    def _step_lines(
        self, names: list[str], computed: Sequence[str], results: list[str]
    ) -> Iterator[str]:
        signature, inputs = self.signature, self.op.body.inputs
        states, outputs = range(signature.n_states), range(signature.n_outputs)
        if signature.has_stop and not signature.reverse:
            hs, zs = ("".join(f"{c}{i}, " for i in n) for c, n in (("h", states), ("z", outputs)))
            yield "if done == capacity:"
            yield " capacity = min(steps, 2 * capacity)"
            yield f" ({hs}), ({zs}) = grown(({hs}), ({zs}), done, capacity)"
        yield f"t = {'steps - 1 - done' if signature.reverse else 'done'}"
        ndims = [getattr(variable.type, "ndim", 0) for variable in inputs]
        rows = [f"s{i}[t]" for i in range(signature.n_sequences)]
        rows = [row if ndim else f"asarray({row})" for row, ndim in zip(rows, ndims, strict=False)]
        rows += [
            self.past(f"h{i}[{place}{' + t' * moves}]", ndim)
            for (i, place, moves), ndim in zip(self.taps, ndims[len(rows) :], strict=False)
        ]
        yield from (f"{name} = {row}" for name, row in zip(names, rows, strict=False))
        yield from computed
        made = signature.split_body_outputs(results)
        for i, value in enumerate(made.outputs):
            yield "if done == 0:"
            yield f" z{i}, q{i} = empty((capacity, *{value}.shape), {value}), {value}.shape"
            yield f"if {value}.shape != q{i}:"
            yield f" check(messages.output_shape, {i}, done, z{i}, {value})"
            yield f"z{i}[t] = {value}"
        for i, value in enumerate(made.states):
            yield f"if {value}.shape != p{i}:"
            yield f" check(messages.state_shape, {i}, done, h{i}, {value})"
            yield from self._written(i, value)
        if made.carries:
            carries = signature.split_body_inputs(names).carries
            yield f"{', '.join(carries)} = {', '.join(made.carries)}"
        yield "done += 1"
        if made.stop is not None:
            yield f"if {made.stop}: break"

    def _written(self, i: int, value: str) -> Iterator[str]:
        """Yield what writes a result into its row; an untraced state moves its own on."""
        reverse, depth = self.signature.reverse, self.signature.depths[i]
        if not self.signature.untraced[i]:
            yield f"h{i}[{'t' if reverse else f't + {depth}'}] = {value}"
            return
        if depth > 1:
            later, earlier = f"h{i}[1:]", f"h{i}[:-1]"
            into, read = (later, earlier) if reverse else (earlier, later)
            yield f"{into} = copied({read})"
        yield f"h{i}[{0 if reverse else -1}] = {value}"

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


def row_shape_graph(op: "Scan") -> FunctionGraph:
    """Return the graph from a loop's inputs to the flat row shapes of its stacked outputs.

    It is used when no step runs. Sizes that only a step could tell are zero.
    """
    inputs = [type() for type in op.outer_input_types()]
    shapes = [list(v.shape) if hasattr(v.type, "ndim") else None for v in inputs]
    rows = stacked_row_shapes(op.signature, op.body, inputs, shapes)
    sizes = [pt.as_tensor_variable(0 if dim is None else dim) for row in rows for dim in row]
    return FunctionGraph(inputs, sizes, clone=False)
