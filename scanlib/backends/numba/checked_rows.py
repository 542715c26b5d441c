"""Numba code of `CheckedRows` and `CheckedConvergence`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import as_scalar
from scanlib.ops import errors
from scanlib.ops.checked_convergence import CheckedConvergence
from scanlib.ops.checked_rows import CheckedRows
from scanlib.source_keys import source_key

VERSION = source_key(__name__)


@register_funcify_and_cache_key(CheckedRows)
def funcify_checked_rows(
    op: CheckedRows, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a `CheckedRows`."""
    source = Source()
    source.object("as_scalar", as_scalar)
    source.object("SequenceLengthError", errors.SequenceLengthError)
    with source.block("if rows.shape[0] != as_scalar(steps):"):
        source.line(f"raise SequenceLengthError({op.message!r}, rows.shape[0], as_scalar(steps))")
    source.line("return rows")
    function, key = source.compile("checked_rows", ["rows", "steps"], VERSION)
    return numba_njit(function), key


@register_funcify_and_cache_key(CheckedConvergence)
def funcify_checked_convergence(
    op: CheckedConvergence, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a `CheckedConvergence`."""
    source = Source()
    source.object("as_scalar", as_scalar)
    source.object("ConvergenceError", errors.ConvergenceError)
    names = ["count", "step", "residual"]
    with source.block("if as_scalar(failed):"):
        numbers = ", ".join(f"as_scalar({name})" for name in names)
        source.line(f"raise ConvergenceError({op.message!r}, {numbers})")
    source.line("return rows")
    function, key = source.compile("checked_convergence", ["rows", "failed", *names], VERSION)
    return numba_njit(function), key
