"""Numba code of `Filled` and `AsRow`: plain loops, which compile fast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import as_scalar
from scanlib.ops.initial import AsRow, Filled
from scanlib.source_keys import source_key

VERSION = source_key(__name__)


def _new_source(node: Apply) -> Source:
    source = Source()
    source.object("as_scalar", as_scalar)
    dtype = np.dtype(node.outputs[0].type.dtype)
    source.line(f"dtype = {source.object(f'np_{dtype.name}', dtype.type)}")
    return source


def _write_items(source: Source, sizes: list[str], left: str, right: str) -> None:
    """Write loops that assign every item; `left` and `right` may use ``j0, j1, …``."""
    with ExitStack() as stack:
        for axis, size in enumerate(sizes):
            stack.enter_context(source.block(f"for j{axis} in range({size}):"))
        source.line(f"{left} = {right}")


@register_funcify_and_cache_key(Filled)
def funcify_filled(op: Filled, node: Apply, **kwargs: Any) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a `Filled`."""
    source = _new_source(node)
    ndim = len(node.inputs) - 1
    arguments = ["value", *(f"size{axis}" for axis in range(ndim))]
    sizes = [f"n{axis}" for axis in range(ndim)]
    source.line("item = as_scalar(value)")
    for axis, name in enumerate(sizes):
        source.line(f"{name} = as_scalar(size{axis})")
    source.line(f"out = np.empty(({', '.join(sizes)},), dtype)")
    index = ", ".join(f"j{axis}" for axis in range(ndim))
    _write_items(source, sizes, f"out[{index}]", "item")
    source.line("return out")
    function, key = source.compile("filled", arguments, VERSION)
    return numba_njit(function), key


@register_funcify_and_cache_key(AsRow)
def funcify_as_row(op: AsRow, node: Apply, **kwargs: Any) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of an `AsRow`."""
    source = _new_source(node)
    ndim = node.inputs[0].type.ndim
    sizes = [f"value.shape[{axis}]" for axis in range(ndim)]
    source.line(f"out = np.empty(({', '.join(['1', *sizes])},), dtype)")
    index = ", ".join(f"j{axis}" for axis in range(ndim))
    right = f"value[{index}]" if ndim else "as_scalar(value)"
    _write_items(source, sizes, f"out[{', '.join(['0', index]) if ndim else '0'}]", right)
    source.line("return out")
    function, key = source.compile("as_row", ["value"], VERSION)
    return numba_njit(function), key
