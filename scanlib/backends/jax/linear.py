r"""`LinearScan` under JAX: ``h_t = A_t ⊗ h_{t-1} + b_t``.

What it is where it has no compiled code (`scanlib.backends.jax.compiled_loops`).
Shapes and semirings are those of `ops.lowered.linear_scan`. Arrays of an unknown length (`Bounded`)
run over their whole buffers; steps beyond the length leave the state as it is, so that row `n` of
the history, in either direction, is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from pytensor.graph.basic import Apply

from scanlib.backends.jax.body import array_of
from scanlib.backends.jax.bounded import (
    Bounded,
    first_rows,
    has_unknown_rows,
    rows_of,
)
from scanlib.backends.jax.loops import StepCount, count_steps
from scanlib.backends.jax.mesh_axes import varying
from scanlib.ops.lowered import linear_loop
from scanlib.ops.lowered.linear_scan import LinearScan, Parts


class LinearLoop:
    """Runs one `LinearScan` on JAX values.

    Parameters
    ----------
    op : LinearScan
    node : Apply
        Whose inputs are those of the recurrence.
    """

    def __init__(self, op: LinearScan, node: Apply) -> None:
        self.op, self.node = op, node
        self.title = str(op)

    def __call__(self, *inputs: Any) -> list[Any]:
        first = int(self.op.has_n_steps)
        arrays = [
            value if has_unknown_rows(value) else array_of(value, variable)
            for value, variable in zip(inputs[first:], self.node.inputs[first:], strict=True)
        ]
        parts = self.op.parts([*inputs[:first], *arrays])
        return [run(self.op, parts._replace(initial=first_rows(parts.initial, 1)))]

    def check(self, inputs: Sequence[Any], steps: int) -> None:
        """Raise what can be known to be wrong when JAX compiles."""
        parts = self.op.parts(inputs)
        linear_loop.check_shapes(self.op, parts)
        linear_loop.check_rows(self.op, parts, steps)


def run(op: LinearScan, parts: Parts) -> Any:
    """Run the recurrence, one product per step."""
    number, known, bound = _count(op, parts)
    linear_loop.check_shapes(op, parts)
    if known is not None:
        whole = Parts(*(None if has_unknown_rows(part) else part for part in parts))
        linear_loop.check_rows(op, whole, known)
    if not bound:  # XLA has no rows to index then
        return parts.initial
    timed = {
        name: rows_of(value)[:bound]
        for name, value in (
            ("matrix", parts.matrix if op.coefficient == "steps" else None),
            ("offset", parts.offset),
        )
        if value is not None
    }

    def step(h: Any, rows: Any) -> Any:
        t, row = rows
        now = parts._replace(offset=None)._replace(**row)
        new = linear_loop.next_state(op, now, h, _times(op))
        if known is None:
            new = jnp.where(t < number, new, h)
        return new, None if op.untraced else new

    times = jnp.arange(bound)
    start = varying(parts.initial[0], [timed, parts.matrix, number])
    last, rows = lax.scan(step, start, (times, timed), length=bound, reverse=op.reverse)
    if op.untraced:
        return last[None]
    pieces = [rows, parts.initial] if op.reverse else [parts.initial, rows]
    history = jnp.concatenate(pieces)
    return history if known is not None else Bounded(history, number + 1, str(op))


def _count(op: LinearScan, parts: Parts) -> StepCount:
    steps = op.steps(parts)
    return count_steps(steps.n_steps, steps.sequences, str(op))


def _times(op: LinearScan) -> linear_loop.Times:
    def times(matrix: Any, state: Any, mask: Any) -> Any:
        if mask is None:
            return product(op.semiring, matrix, state)
        terms = matrix[..., :, :, None] * state[..., None, :, :]
        return jnp.where(mask[:, :, None], terms, 0).sum(axis=-2)

    return times


def product(semiring: str, matrix: Any, state: Any) -> Any:
    """Return ``A ⊗ h`` for matrices ``(…, d, d)`` and ``(…, d, m)``."""
    if semiring == "real":
        return jnp.matmul(matrix, state, precision=lax.Precision.HIGHEST)
    terms = matrix[..., :, :, None] + state[..., None, :, :]
    if semiring == "max":
        return jnp.max(terms, axis=-2, initial=-jnp.inf)
    if semiring == "min":
        return jnp.min(terms, axis=-2, initial=jnp.inf)
    return jax.scipy.special.logsumexp(terms, axis=-2)
