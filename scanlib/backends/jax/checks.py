"""Checks of loops and their results: made where JAX knows enough when it compiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify

from scanlib.backends.jax.bounded import static_int
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.row_ops.checked_convergence import CheckedConvergence
from scanlib.ops.row_ops.checked_rows import CheckedPlaces, CheckedRows


@jax_funcify.register(CheckedPlaces)
def funcify_checked_places(op: CheckedPlaces, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return a function that checks nothing: compiled code raises no errors."""

    def checked_places(places: Any, *conditions: Any) -> Any:
        return places

    return checked_places


@jax_funcify.register(CheckedRows)
def funcify_checked_rows(op: CheckedRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function that compares numbers of rows and of steps."""

    def checked_rows(rows: Any, steps: Any) -> Any:
        known = static_int(steps)
        if known is not None and len(rows) != known:
            raise SequenceLengthError(op.message, len(rows), known)
        return rows

    return checked_rows


@jax_funcify.register(CheckedConvergence)
def funcify_checked_convergence(
    op: CheckedConvergence, node: Apply, **kwargs: Any
) -> Callable[..., Any]:
    """Return the function that has NaN say that iterations have not converged."""

    def checked_convergence(rows: Any, failed: Any, *numbers: Any) -> Any:
        return jnp.where(failed, jnp.nan, rows)

    return checked_convergence
