"""Arrays known to be contiguous (compiled code only).

Numba forgets that a slice is contiguous unless the slice is written in the function itself; slices
that PyTensor's functions return have the layout ``A``, whose loops are not vectorized. The
functions here look at the strides when they run: what is contiguous gets the type that says so,
as a view; what is not is copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic, overload

from scanlib._compat.numba import as_dtype, compile_numba_function_src, impl_ret_borrowed
from scanlib.backends.numba.lazy import lazily, register
from scanlib.source_keys import source_key

VERSION = source_key(__name__)
MOST_AXES = 8  # copied by code of our own


def _copying(ndim: int) -> tuple[Callable[..., Any], str]:
    """Return a function that copies an array, and its key."""
    indices = [f"j{axis}" for axis in range(ndim)]
    lines = ["def copied(array):", "    out = np.empty(array.shape, array.dtype)"]
    for axis, index in enumerate(indices):
        lines.append("    " * (axis + 1) + f"for {index} in range(array.shape[{axis}]):")
    place = ", ".join(indices)
    lines += ["    " * (ndim + 1) + f"out[{place}] = array[{place}]", "    return out"]
    key = f"{VERSION} {ndim}"
    names = {"np": np, "__name__": __name__}
    return compile_numba_function_src("\n".join(lines), "copied", names, cache_key=key), key


_copies = {ndim: _copying(ndim) for ndim in range(1, MOST_AXES + 1)}
for _function, _key in _copies.values():
    register(_function, _key, cache=True)  # compiled code from the disk calls them by their keys


def _copy_of(array: types.Array) -> Any:
    """Return a function of compiled code that takes a tuple of one array and returns a copy.

    It is compiled when an array is not contiguous: most are.
    """
    if array.ndim not in _copies:
        return njit(lambda arrays: arrays[0].copy())
    return lazily(*_copies[array.ndim], [(str(as_dtype(array.dtype)), array.ndim)], cache=True)


@intrinsic
def assumed_contiguous(typingctx: Any, array: Any) -> Any:
    """Return the same array with the type of a contiguous one; the caller has checked it."""
    known = array.copy(layout="C")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        old = context.make_array(array)(context, builder, arguments[0])
        new = context.make_array(known)(context, builder)
        for name in ("meminfo", "parent", "nitems", "itemsize", "data", "shape", "strides"):
            setattr(new, name, getattr(old, name))
        return impl_ret_borrowed(context, builder, known, new._getvalue())

    return known(array), codegen


def contiguous(array: Any) -> Any:
    """Return an array with the type of a contiguous one: itself, or a copy if it is not."""
    raise NotImplementedError("compiled code only")


@overload(contiguous)
def _contiguous(array):
    if not isinstance(array, types.Array) or array.layout == "C":
        return lambda array: array

    copy = _copy_of(array)

    def checked(array):
        expected = array.itemsize
        for axis in range(array.ndim - 1, -1, -1):
            if array.shape[axis] > 1 and array.strides[axis] != expected:
                return copy((array,))
            expected *= array.shape[axis]
        return assumed_contiguous(array)

    return checked
