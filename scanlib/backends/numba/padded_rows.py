"""Numba code of `PaddedRows`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import as_scalar
from scanlib.ops.padded_rows import PaddedRows
from scanlib.source_keys import source_key

VERSION = source_key(__name__)


@register_funcify_and_cache_key(PaddedRows)
def funcify_padded_rows(
    op: PaddedRows, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a `PaddedRows`."""
    ndim = node.inputs[0].type.ndim
    source = Source()
    source.object("as_scalar", as_scalar)
    source.line("length = as_scalar(length)")
    sizes = ", ".join(["length", *(f"rows.shape[{axis}]" for axis in range(1, ndim))])
    with source.block("if rows.shape[0] == length:"):
        source.line("padded = rows")
    with source.block("else:"):
        source.line(f"padded = np.empty(({sizes},), rows.dtype)")
        indices = ", ".join(f"j{axis}" for axis in range(ndim))
        with ExitStack() as stack:
            stack.enter_context(source.block("for j0 in range(length):"))
            for axis in range(1, ndim):
                stack.enter_context(source.block(f"for j{axis} in range(rows.shape[{axis}]):"))
            source.line(f"padded[{indices}] = rows[{indices}] if j0 < rows.shape[0] else 0")
    source.line("return padded")
    function, key = source.compile("padded_rows", ["rows", "length"], VERSION)
    return numba_njit(function), key
