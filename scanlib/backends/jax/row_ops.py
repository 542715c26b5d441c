"""Small Ops under JAX: rows that are cut, padded and checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax.numpy as jnp
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.bounded import LARGE, Bounded, Length, UnknownLengthError, static_int
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.row_ops.checked_rows import CheckedConvergence, CheckedSizes, CheckedValue
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.row_ops.row_segments import MergeRows, SplitRows
from scanlib.ops.row_ops.step_products import StepProducts
from scanlib.ops.row_ops.triangular import TriangularFactor


def rule(kind: type) -> Callable[[Callable[..., Any]], None]:
    """Register a function of an Op and of arrays."""
    return lambda function: jax_funcify.register(kind)(lambda op, **kwargs: partial(function, op))


@rule(PaddedRows)
def padded_rows(op: PaddedRows, rows: Any, length: Any) -> Any:
    """Return rows and zero rows behind them, up to a length."""
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


@rule(StepProducts)
def step_products(op: StepProducts, x: Any, y: Any) -> Any:
    """Return the products of all steps, or their sum."""
    return jnp.tensordot(x, y, ((0, 2), (0, 1))) if op.total else jnp.matmul(x, y)


@jax_funcify.register(TriangularFactor)
def funcify_triangular_factor(op: TriangularFactor, **kwargs: Any) -> Callable[..., Any]:
    """Return the rows of the factor that are not zero: SciPy's function has them all."""
    if op.pivoting:
        raise NotImplementedError(f"{op}: JAX has no pivoting here")
    return lambda x: jnp.linalg.qr(x, mode="r")


@rule(SplitRows)
def split_rows(op: SplitRows, value: Any, count: Any, length: Any) -> Any:
    """Return the first rows of an array, cut into segments."""
    n, size = static_int(count), static_int(length)
    if n is None or size is None:
        raise UnknownLengthError(LARGE)
    if n * size > len(value):
        raise SequenceLengthError(
            f"a sequence has {len(value)} rows, but the loop takes {n * size} steps or more"
        )
    return jnp.reshape(value[: n * size], (n, size, *value.shape[1:]))


@rule(MergeRows)
def merge_rows(op: MergeRows, value: Any) -> Any:
    """Return segments of rows, one above the other."""
    return jnp.reshape(value, (value.shape[0] * value.shape[1], *value.shape[2:]))


@rule(CheckedValue)
def checked_value(op: CheckedValue, value: Any, *conditions: Any) -> Any:
    """Return a value, and raise for a condition which is known when JAX compiles."""
    if any(static_int(condition) == 0 for condition in conditions):
        raise op.exc_type(op.msg)
    return value


@rule(CheckedSizes)
def checked_sizes(op: CheckedSizes, array: Any, steps: Any = None) -> Any:
    """Return an array whose sizes have been checked."""
    sizes = op.larger(array.shape, static_int(array.shape[0] if steps is None else steps))
    return array if sizes is None else jnp.zeros(sizes, array.dtype)


@rule(CheckedConvergence)
def checked_convergence(op: CheckedConvergence, rows: Any, failed: Any, *numbers: Any) -> Any:
    """Return rows, NaN where iterations have not converged."""
    return jnp.where(failed, jnp.nan, rows)
