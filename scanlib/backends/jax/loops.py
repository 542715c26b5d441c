"""`Scan` under JAX: `lax.scan` where the number of steps is known, `lax.while_loop` elsewhere.

Inside compiled code the length of an array is known, so loops over sequences, and loops of a
constant number of steps, are `lax.scan`::

    (window, carry), (y, z) = lax.scan(step, (initial rows, carry), rows of the sequences)

A state of depth `K` is carried as its last `K` rows, the latest one first; a history is its initial
rows and the stacked new ones. A loop that ends by a condition, or whose number of steps is computed
by the function itself, is a `lax.while_loop` that writes into buffers as long as the loop can get.
Its histories are `Bounded`. Where nothing bounds the number of steps, only results that
are not stored over time exist.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from pytensor.graph.basic import Apply

from scanlib.backends.jax.body import array_of, step_function
from scanlib.backends.jax.bounded import (
    UnknownLengthError,
    first_rows,
    has_unknown_rows,
    rows_of,
)
from scanlib.backends.jax.mesh_axes import varying
from scanlib.backends.jax.state_rows import (
    StepCount,
    count_steps,
    joined,
    last_rows,
    shifted,
    window_of,
)
from scanlib.backends.jax.unknown_steps import run_unknown
from scanlib.ops.errors import (
    StepShapeError,
)
from scanlib.ops.messages import Messages, loop_title
from scanlib.ops.scan import Scan
from scanlib.ops.signature import OuterInputs


def single(results: list[Any]) -> Any:
    """Return results as PyTensor's linker takes them: one alone, several as a list."""
    return results[0] if len(results) == 1 else results


class StepValues(NamedTuple):
    """What a step gives: new rows of the states, next carries, rows of the outputs, stop."""

    states: tuple[Any, ...]
    carries: tuple[Any, ...]
    outputs: tuple[Any, ...]
    stop: Any


class JAXLoop:
    """Runs one `Scan` on JAX values.

    Parameters
    ----------
    op : Scan
    node : Apply
        Whose inputs are those of the loop.
    """

    def __init__(self, op: Scan, node: Apply) -> None:
        self.op, self.node = op, node
        self.signature = op.signature
        self.messages = Messages(op.signature, op.labels, op.name)
        self.inner = op.signature.split_body_inputs(op.body.inputs)
        self.result = op.signature.split_body_outputs(op.body.outputs)

    @cached_property
    def function(self) -> Callable[..., tuple]:
        """One step: the body as a function of JAX arrays."""
        with jax.ensure_compile_time_eval():  # its constants are for every program that calls it
            return step_function(self.op, self.node)

    def __call__(self, *inputs: Any) -> list[Any]:
        outer = self.typed(self.signature.split_inputs(inputs))
        steps = count_steps(outer.n_steps, outer.sequences)
        self.check(outer, steps)
        outer = outer._replace(
            initials=varying(outer.initials, inputs), carries=varying(outer.carries, inputs)
        )
        windows = [
            window_of(initial, depth, self.signature.reverse)
            for initial, depth in zip(outer.initials, self.signature.depths, strict=True)
        ]
        if steps.known is not None and not self.signature.has_stop:
            return self.run_known(outer, steps.known, windows)
        return run_unknown(self, outer, steps, windows)

    # Before the first step

    def typed(self, outer: OuterInputs) -> OuterInputs:
        """Return the inputs as arrays of the body's dtypes."""

        def array(value: Any, variable: Any) -> Any:
            return value if has_unknown_rows(value) else array_of(value, variable)

        return outer._replace(
            sequences=[array(*pair) for pair in zip(outer.sequences, self.inner.rows, strict=True)],
            initials=[
                array_of(first_rows(initial, depth), taps[0])
                for initial, taps, depth in zip(
                    outer.initials, self.inner.taps, self.signature.depths, strict=True
                )
            ],
            carries=[
                array_of(value, variable)
                for value, variable in zip(outer.carries, self.inner.carries, strict=True)
            ],
        )

    def check(self, outer: OuterInputs, steps: StepCount) -> None:
        """Raise what can be known to be wrong when JAX compiles."""
        if steps.known is not None:
            lengths = (None if has_unknown_rows(s) else len(s) for s in outer.sequences)
            self.messages.count_steps(steps.known, lengths)
            if steps.known < self.signature.required_steps:
                raise IndexError(self.messages.missing_steps())
        self.messages.check_initial_rows(map(len, outer.initials))

    # One step

    def step(
        self, rows: list[Any], windows: Any, carries: Any, non_sequences: list[Any]
    ) -> StepValues:
        """Return what one step computes, in the dtypes of the body."""
        taps = [
            window[-offset - 1]
            for window, offsets in zip(windows, self.signature.taps, strict=True)
            for offset in offsets
        ]
        found = self.signature.split_body_outputs(
            self.function(*rows, *taps, *carries, *non_sequences)
        )
        states = tuple(
            array_of(value, taps[0])
            for value, taps in zip(found.states, self.inner.taps, strict=True)
        )
        for i, (value, window) in enumerate(zip(states, windows, strict=True)):
            for axis, (size, wanted) in enumerate(zip(value.shape, window[0].shape, strict=True)):
                if size != wanted:
                    raise StepShapeError(self.messages.state_shape(i, axis), 0, wanted, size)
        return StepValues(
            states,
            tuple(map(array_of, found.carries, self.inner.carries)),
            tuple(map(array_of, found.outputs, self.result.outputs)),
            None if found.stop is None else jnp.asarray(found.stop).reshape(()) != 0,
        )

    # A known number of steps

    def run_known(self, outer: OuterInputs, steps: int, windows: list[Any]) -> list[Any]:
        """Run the loop by `lax.scan`."""
        traced = [not untraced for untraced in self.signature.untraced]
        if steps == 0:  # XLA has no rows to index then
            return [*outer.initials, *outer.carries, *self.empty_outputs(outer, windows, 0)]

        def step(carry: Any, rows: Any) -> Any:
            windows, carries = carry
            values = self.step(rows, windows, carries, outer.non_sequences)
            kept = [value for value, keep in zip(values.states, traced, strict=True) if keep]
            moved = [shifted(*pair) for pair in zip(windows, values.states, strict=True)]
            return (moved, list(values.carries)), (kept, list(values.outputs))

        sequences = [rows_of(sequence)[:steps] for sequence in outer.sequences]
        (windows, carries), (kept, outputs) = lax.scan(
            step,
            (windows, outer.carries),
            sequences,
            length=steps,
            reverse=self.signature.reverse,
        )
        rows = iter(kept)
        histories = [
            joined(initial, next(rows), self.signature.reverse)
            if keep
            else last_rows(window, self.signature.reverse)
            for initial, window, keep in zip(outer.initials, windows, traced, strict=True)
        ]
        return [*histories, *carries, *outputs]

    def empty_outputs(self, outer: OuterInputs, windows: list[Any], rows: int) -> list[Any]:
        """Return buffers for stacked outputs; their rows have the shapes that a step says."""
        if not self.signature.n_outputs:
            return []

        def outputs(rows: list[Any], windows: list[Any], carries: list[Any]) -> Any:
            return self.step(rows, windows, carries, outer.non_sequences).outputs

        first = [
            jax.ShapeDtypeStruct(rows_of(s).shape[1:], rows_of(s).dtype) for s in outer.sequences
        ]
        found = jax.eval_shape(outputs, first, windows, outer.carries)
        return [jnp.zeros((rows, *row.shape), row.dtype) for row in found]

    # For messages

    def title(self) -> str:
        title = loop_title(self.op.name, self.op.labels.function)
        return title if self.op.name else f"a {title}"

    def refuse_unbounded(self) -> None:
        raise UnknownLengthError(
            f"{self.title()}: JAX needs to know when it compiles how many rows the results of a "
            "loop can have, but the number of steps is computed by the function itself and no "
            "sequence bounds it. Read last rows only, pass n_steps as an input or a "
            "constant, or loop over a sequence of the greatest length"
        )
