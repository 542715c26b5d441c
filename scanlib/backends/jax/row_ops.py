"""Small Ops under JAX: rows that are cut, padded and checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.bounded import (
    LARGE,
    Bounded,
    Length,
    UnknownLengthError,
    static_int,
)
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.row_ops.checked_rows import CheckedConvergence, CheckedSizes, CheckedValue
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.row_ops.row_segments import MergeRows, SplitRows
from scanlib.ops.row_ops.step_products import StepProducts
from scanlib.ops.row_ops.triangular import TriangularFactor


@jax_funcify.register(PaddedRows)
def funcify_padded_rows(op: PaddedRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return rows and zero rows behind them, up to a length."""

    def padded_rows(rows: Any, length: Any) -> Any:
        known = length.bound if isinstance(length, Length) else static_int(length)
        if known is None:
            raise UnknownLengthError(
                "the gradient of a sequence needs the length of the sequence when JAX compiles. "
                "Cut all sequences of the loop alike, let it run over all rows and let pt.where "
                'choose, or compile with mode="NUMBA"'
            )
        values = rows.filled() if isinstance(rows, Bounded) else jnp.asarray(rows)
        missing = max(known - len(values), 0)
        padded = jnp.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1))[:known]
        if isinstance(length, Length):
            return Bounded(padded, length.value, "the gradient of an array of unknown length")
        return padded

    return padded_rows


@jax_funcify.register(StepProducts)
def funcify_step_products(op: StepProducts, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the products of all steps, or their sum."""

    def step_products(x: Any, y: Any) -> Any:
        if op.total:
            return jnp.tensordot(x, y, ((0, 2), (0, 1)))
        return jnp.matmul(x, y)

    return step_products


@jax_funcify.register(TriangularFactor)
def funcify_triangular_factor(op: TriangularFactor, **kwargs: Any) -> Callable[..., Any]:
    """Return the rows of the factor that are not zero: SciPy's function has them all."""
    if op.pivoting:
        raise NotImplementedError(f"{op}: JAX has no pivoting here")
    return lambda x: jnp.linalg.qr(x, mode="r")


@jax_funcify.register(SplitRows)
def funcify_split_rows(op: SplitRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the first rows of an array, cut into segments."""

    def split_rows(value: Any, count: Any, length: Any) -> Any:
        n, size = static_int(count), static_int(length)
        if n is None or size is None:
            raise UnknownLengthError(LARGE)
        if n * size > len(value):
            raise SequenceLengthError(
                f"a sequence has {len(value)} rows, but the loop takes {n * size} steps or more"
            )
        return jnp.reshape(value[: n * size], (n, size, *value.shape[1:]))

    return split_rows


@jax_funcify.register(MergeRows)
def funcify_merge_rows(op: MergeRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return segments of rows, one above the other."""
    return lambda value: jnp.reshape(value, (value.shape[0] * value.shape[1], *value.shape[2:]))


@jax_funcify.register(CheckedValue)
def funcify_checked_value(op: CheckedValue, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function that raises for a condition which is known when JAX compiles."""

    def checked_value(value: Any, *conditions: Any) -> Any:
        if any(static_int(condition) == 0 for condition in conditions):
            raise op.exc_type(op.msg)
        return value

    return checked_value


@jax_funcify.register(CheckedSizes)
def funcify_checked_sizes(op: CheckedSizes, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function that checks the sizes of an array."""

    def checked_sizes(array: Any, steps: Any = None) -> Any:
        sizes = op.larger(array.shape, static_int(array.shape[0] if steps is None else steps))
        return array if sizes is None else jnp.zeros(sizes, array.dtype)

    return checked_sizes


@jax_funcify.register(CheckedConvergence)
def funcify_checked_convergence(
    op: CheckedConvergence, node: Apply, **kwargs: Any
) -> Callable[..., Any]:
    """Return the function that has NaN say that iterations have not converged."""

    def checked_convergence(rows: Any, failed: Any, *numbers: Any) -> Any:
        return jnp.where(failed, jnp.nan, rows)

    return checked_convergence
