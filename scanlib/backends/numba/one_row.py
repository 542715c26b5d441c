"""Numba code of `OneRow`: plain loops, which compile fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

from scanlib.backends.numba.initial import _write_items
from scanlib.backends.numba.source import Source
from scanlib.ops.one_row import OneRow
from scanlib.source_keys import source_key

VERSION = source_key(__name__)


@register_funcify_and_cache_key(OneRow)
def funcify_one_row(
    op: OneRow, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a `OneRow`."""
    source = Source()
    dtype = np.dtype(node.outputs[0].type.dtype)
    item = source.object(f"np_{dtype.name}", dtype.type)
    axes = range(1, node.inputs[0].type.ndim)
    sizes = [f"value.shape[{axis}]" for axis in axes]
    index = ", ".join(["0", *(f"j{axis - 1}" for axis in axes)])
    source.line(f"out = np.empty(({', '.join(['1', *sizes])},), {item})")
    if not op.zeros:
        with source.block("if value.shape[0] > 0:"):
            _write_items(source, sizes, f"out[{index}]", f"value[{index}]")
            source.line("return out")
    _write_items(source, sizes, f"out[{index}]", f"{item}(0)")
    source.line("return out")
    function, key = source.compile("one_row", ["value"], VERSION)
    return numba_njit(function), key
