r"""`LinearScan` under JAX: ``h_t = A_t ⊗ h_{t-1} + b_t``.

It is compiled on the CPU, runs by kernels on CUDA devices, and as `lax.scan` elsewhere.
Shapes and semirings are those of `ops.lowered.linear_scan`. Arrays of an unknown length (`Bounded`)
run over their whole buffers; steps beyond the length leave the state as it is, so that row `n` of
the history, in either direction, is right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.body import array_of
from scanlib.backends.jax.bounded import (
    Bounded,
    first_rows,
    has_unknown_rows,
    rows_of,
    static_int,
)
from scanlib.backends.jax.cuda import call_linear, has_linear_kernels
from scanlib.backends.jax.kernels import call_target, target_for, words_of
from scanlib.backends.jax.loops import StepCount, count_steps, single
from scanlib.backends.jax.mesh_axes import check_whole, varying
from scanlib.backends.jax.partitioned import linear_factors, part_of
from scanlib.backends.jax.platforms import on_platforms
from scanlib.ops.lowered import linear_loop
from scanlib.ops.lowered.linear_scan import LinearScan, Parts


@jax_funcify.register(LinearScan)
def funcify_linear_scan(op: LinearScan, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the JAX function of a matrix recurrence."""
    target = target_for(op, node)
    has_kernels = has_linear_kernels(node)
    start = op.parts(range(len(node.inputs))).initial

    read = op.steps_of(node).sequences

    def linear_scan(*inputs: Any) -> Any:
        values = [
            value if has_unknown_rows(value) else array_of(value, variable)
            for value, variable in zip(inputs, node.inputs, strict=True)
        ]
        if op.has_n_steps:
            values[0] = inputs[0]
        values[start] = first_rows(values[start], 1)
        parts = op.parts(values)
        check_whole(str(op), zip(read, op.steps(parts).sequences, strict=True))
        known = _count(op, parts).known
        if not (target or has_kernels) or not known or any(has_unknown_rows(v) for v in values):
            return run(op, parts)
        steps = [static_int(values[0])] if op.has_n_steps else []
        arrays = [*map(jnp.asarray, map(words_of, steps)), *values[len(steps) :]]

        def own(given: Sequence[Any]) -> list[Any]:
            """Return the arguments with the number of steps as one number."""
            return [*steps, *given[len(steps) :]]

        def portable(*given: Any) -> list[Any]:
            return [run(op, op.parts(own(given)))]

        def run_kernels(*given: Any) -> list[Any]:
            kernels = call_linear(op, own(given))
            assert kernels is not None
            return kernels(*given)

        factors = linear_factors(op, [np.ndim(array) for array in arrays])
        part = part_of(node, factors)
        assert part is not None

        def run_target(*given: Any) -> list[Any]:
            same = [np.shape(value) for value in given] == [np.shape(value) for value in arrays]
            fit = target if same else target_for(part.op, part)
            assert fit is not None
            return call_target(op, fit, jax.eval_shape(portable, *given), given)

        on_cpu = None if target is None else run_target
        on_cuda = run_kernels if has_kernels and call_linear(op, own(values)) else None
        return single(on_platforms(portable, None, on_cpu, on_cuda, factors)(*arrays))

    return linear_scan


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
