"""Arrays known to be contiguous (compiled code only).

Numba forgets that a slice is contiguous unless the slice is written in the function itself; slices
that PyTensor's functions return have the layout ``A``, whose loops are not vectorized. The
functions here look at the strides when they run: what is contiguous gets the type that says so,
as a view; what is not is copied.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic, overload


@intrinsic
def assumed_contiguous(typingctx: Any, array: Any) -> Any:
    """Return the same array with the type of a contiguous one; the caller has checked it."""
    known = array.copy(layout="C")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from numba.core.imputils import impl_ret_borrowed

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

    def checked(array):
        expected = array.itemsize
        for axis in range(array.ndim - 1, -1, -1):
            if array.shape[axis] > 1 and array.strides[axis] != expected:
                return array.copy()
            expected *= array.shape[axis]
        return assumed_contiguous(array)

    return checked


def contiguous_rows(array: Any, buffer: Any) -> Any:
    """Return a vector with the type of a contiguous one: itself, or its items in `buffer`."""
    raise NotImplementedError("compiled code only")


@overload(contiguous_rows)
def _contiguous_rows(array, buffer):
    if array.layout == "C":
        return lambda array, buffer: array

    def checked(array, buffer):
        if array.size < 2 or array.strides[0] == array.itemsize:
            return assumed_contiguous(array)
        for j in range(array.shape[0]):
            buffer[j] = array[j]
        return buffer[: array.shape[0]]

    return checked


def contiguous_steps(array: Any) -> Any:
    """Return an array whose rows are contiguous, one behind the other at any distance.

    That is the array itself, with its own type, or a copy.
    """
    raise NotImplementedError("compiled code only")


@overload(contiguous_steps)
def _contiguous_steps(array):
    if array.layout == "C":
        return lambda array: array

    def checked(array):
        expected = array.itemsize
        for axis in range(array.ndim - 1, 0, -1):
            if array.shape[axis] > 1 and array.strides[axis] != expected:
                return _any_layout(array.copy())
            expected *= array.shape[axis]
        if array.strides[0] % array.itemsize != 0:
            return _any_layout(array.copy())
        return _any_layout(array)

    return checked


@intrinsic
def _any_layout(typingctx: Any, array: Any) -> Any:
    """Return the same array with the type of one that lies in memory in any way."""
    known = array.copy(layout="A")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        from numba.core.imputils import impl_ret_borrowed

        return impl_ret_borrowed(context, builder, known, arguments[0])

    return known(array), codegen
