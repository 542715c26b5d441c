"""Numba code of `AxesSum` and `SpecifiedSizes`, which compiles fast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

from scanlib.backends.numba.contiguous import contiguous
from scanlib.backends.numba.pointers import keep, load, pointer, store
from scanlib.backends.numba.source import Source
from scanlib.ops import reductions
from scanlib.ops.errors import SpecifiedShapeError
from scanlib.ops.reductions import AxesSum, SpecifiedSizes

VERSION = "scanlib-reductions-1"


@register_funcify_and_cache_key(AxesSum)
def funcify_axes_sum(
    op: AxesSum, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of an `AxesSum`."""
    source = Source()
    line = source.line
    for function in (contiguous, keep, load, pointer, store):
        source.object(function.__name__, function)
    number, result = (
        source.object(f"np_{np.dtype(name).name}", np.dtype(name).type)
        for name in (op.acc_dtype, op.dtype)
    )
    ndim = node.inputs[0].type.ndim
    kept = [axis for axis in range(ndim) if axis not in op.axes]
    sizes = [f"x.shape[{axis}]" for axis in kept]
    line("array = contiguous(x)")
    line(f"out = np.empty(({', '.join([*sizes, ''])}), {number})")
    line("read, write, at, items = pointer(array), pointer(out), 0, out.size")
    with source.block("for j in range(items):"):
        line(f"store(write, j, {number}(0))")
    _write_sums(source, op, ndim, number)
    line("keep(array)")
    if number != result:
        line(f"rounded = np.empty(out.shape, {result})")
        line("write_rounded = pointer(rounded)")
        with source.block("for j in range(items):"):
            line(f"store(write_rounded, j, {result}(load(write, j)))")
        line("keep(out)")
    line(f"return {'out' if number == result else 'rounded'}")
    function, key = source.compile("axes_sum", ["x"], VERSION)
    return numba_njit(function), key


def _write_sums(source: Source, op: AxesSum, ndim: int, number: str) -> None:
    """Write loops in the order of memory; neighbouring axes of one kind are one loop."""
    groups = [
        (is_summed, list(axes)) for is_summed, axes in groupby(range(ndim), op.axes.__contains__)
    ]
    for number_of, (_, axes) in enumerate(groups):
        sizes = " * ".join(f"x.shape[{axis}]" for axis in axes)
        source.line(f"n{number_of} = {sizes}")
    *outer, (inner_summed, _) = groups
    with ExitStack() as stack:
        place = ""
        for i, (is_summed, _) in enumerate(outer):
            stack.enter_context(source.block(f"for i{i} in range(n{i}):"))
            if not is_summed:
                place = f"({place}) * n{i} + i{i}" if place else f"i{i}"
        last = len(outer)
        if inner_summed:
            source.line(f"to = {place or '0'}")
            source.line("total = load(write, to)")
            with source.block(f"for j in range(n{last}):"):
                source.line(f"total += {number}(load(read, at + j))")
            source.line("store(write, to, total)")
        else:
            source.line(f"to = ({place or '0'}) * n{last}")
            with source.block(f"for j in range(n{last}):"):
                item = f"{number}(load(read, at + j))"
                source.line(f"store(write, to + j, load(write, to + j) + {item})")
        source.line(f"at += n{last}")


@register_funcify_and_cache_key(SpecifiedSizes)
def funcify_specified_sizes(
    op: SpecifiedSizes, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a `SpecifiedSizes`."""
    source = Source()
    source.object("SpecifiedShapeError", SpecifiedShapeError)
    for axis, size in enumerate(op.sizes):
        if size is None:
            continue
        with source.block(f"if x.shape[{axis}] != {size}:"):
            numbers = f"{axis}, x.shape[{axis}], {size}"
            source.line(f"raise SpecifiedShapeError({reductions.SPECIFIED!r}, {numbers})")
    source.line("return x")
    function, key = source.compile("specified_sizes", ["x"], VERSION)
    return numba_njit(function), key
