"""Numba code of `AxesSoftmax`: three passes over memory, the exponentials side by side."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import groupby
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

from scanlib.backends.numba.contiguous import contiguous
from scanlib.backends.numba.kernel_functions import vector_intrinsic
from scanlib.backends.numba.pointers import keep, load, pointer, store
from scanlib.backends.numba.source import Source
from scanlib.ops.softmax import AxesSoftmax

VERSION = "scanlib-softmax-1"


@register_funcify_and_cache_key(AxesSoftmax)
def funcify_axes_softmax(
    op: AxesSoftmax, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of an `AxesSoftmax`."""
    source = Source()
    line, ndim, dtype = source.line, node.inputs[0].type.ndim, node.inputs[0].type.dtype
    for function in (contiguous, keep, load, pointer, store):
        source.object(function.__name__, function)
    exp = source.function(*vector_intrinsic("exp", dtype))
    number = source.object(f"np_{dtype}", np.dtype(dtype).type)
    kept = [f"x.shape[{axis}]" for axis in range(ndim) if axis not in op.axes]
    line("array = contiguous(x)")
    sizes = [f"x.shape[{axis}]" for axis in range(ndim)]
    line(f"out = new_array({number}, {', '.join(sizes)})")
    line(f"groups = {' * '.join(kept) or '1'}")
    line(f"spare = new_array({number}, groups)")
    line("read, write, known = pointer(array), pointer(out), pointer(spare)")
    with source.block("for j in range(groups):"):
        line(f"store(known, j, {number}(-np.inf))")
    _walk(source, op.axes, ndim, _MAXIMUM)
    _walk(source, op.axes, ndim, "store(write, at + j, load(read, at + j) - load(known, {to}))")
    with source.block("for j in range(out.size):"):
        line(f"store(write, j, {exp}(load(write, j)))")
    with source.block("for j in range(groups):"):
        line(f"store(known, j, {number}(0))")
    _walk(source, op.axes, ndim, "store(known, {to}, load(known, {to}) + load(write, at + j))")
    _walk(source, op.axes, ndim, "store(write, at + j, load(write, at + j) / load(known, {to}))")
    line("keep(array)")
    line("keep(spare)")
    line("return out")
    function, key = source.compile("axes_softmax", ["x"], VERSION)
    return numba_njit(function), key


# A NaN is no maximum, but is found by its own exponential, and then in the sum.
_MAXIMUM = "store(known, {to}, max(load(known, {to}), load(read, at + j)))"


def _walk(source: Source, axes: tuple[int, ...], ndim: int, statement: str) -> None:
    """Write a loop over all items in the order of memory.

    `statement` reads or writes the item at ``at + j``, and the number of its group at ``{to}``.
    """
    runs = [(inside, list(run)) for inside, run in groupby(range(ndim), axes.__contains__)]
    for k, (_, run) in enumerate(runs):
        source.line(f"n{k} = {' * '.join(f'x.shape[{axis}]' for axis in run)}")
    last = len(runs) - 1
    source.line("at = 0")
    with ExitStack() as stack:
        place = ""
        for k, (inside, _) in enumerate(runs[:-1]):
            stack.enter_context(source.block(f"for i{k} in range(n{k}):"))
            if not inside:
                place = f"({place}) * n{k} + i{k}" if place else f"i{k}"
        inside = runs[-1][0]
        source.line(f"first = {place or '0'}" if inside else f"first = ({place or '0'}) * n{last}")
        with source.block(f"for j in range(n{last}):"):
            source.line(statement.format(to="first" if inside else "first + j"))
        source.line(f"at += n{last}")
