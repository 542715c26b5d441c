"""Small Ops under JAX: where recurrences start, and rows of zeros behind others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.bounded import (
    Bounded,
    Length,
    UnknownLengthError,
    has_unknown_rows,
    rows_of,
    static_int,
)
from scanlib.ops.row_ops.one_row import OneRow
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.row_ops.step_products import StepProducts
from scanlib.ops.row_ops.triangular import TriangularFactor


@jax_funcify.register(OneRow)
def funcify_one_row(op: OneRow, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the first row of an array, zeros if there is none."""

    def one_row(value: Any) -> Any:
        first = rows_of(value)[:1]
        if not len(first):
            return jnp.zeros((1, *first.shape[1:]), first.dtype)
        if has_unknown_rows(value):
            return jnp.where(jnp.asarray(value.length) > 0, first, jnp.zeros_like(first))
        return first

    return one_row


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
        values = rows.filled() if has_unknown_rows(rows) else jnp.asarray(rows)
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
