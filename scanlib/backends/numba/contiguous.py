"""Arrays known to be contiguous (compiled code only).

Numba forgets that a slice is contiguous unless the slice is written in the function itself; slices
that PyTensor's functions return have the layout ``A``, whose loops are not vectorized. The
functions here look at the strides when they run: what is contiguous gets the type that says so,
as a view; what is not is copied.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array


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


@intrinsic
def rows_of_block(typingctx: Any, array: Any, low: Any, n: Any, indices: Any, buffer: Any) -> Any:
    """Return `n` rows of one channel, ``array[low : low + n, *indices]``, as a contiguous vector.

    They are the rows themselves where they lie side by side, else their copy in `buffer`. The
    result counts no reference, which would take as long as dozens of steps in every block: it may
    be used only as long as `array` and `buffer` are there.
    """
    known = buffer.copy(layout="C")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source = context.make_array(array)(context, builder, arguments[0])
        spare = context.make_array(buffer)(context, builder, arguments[4])
        word = source.itemsize.type
        pointer = spare.data.type
        distances = cgutils.unpack_tuple(builder, source.strides, array.ndim)
        places = [arguments[1], *cgutils.unpack_tuple(builder, arguments[3], array.ndim - 1)]
        first = builder.ptrtoint(source.data, word)
        for place, distance in zip(places, distances, strict=True):
            first = builder.add(first, builder.mul(place, distance))
        rows = cgutils.alloca_once_value(builder, builder.inttoptr(first, pointer))
        with cgutils.if_unlikely(builder, builder.icmp_signed("!=", distances[0], source.itemsize)):
            with cgutils.for_range(builder, arguments[2], intp=word) as loop:
                place = builder.add(first, builder.mul(loop.index, distances[0]))
                item = builder.load(builder.inttoptr(place, pointer))
                builder.store(item, builder.gep(spare.data, [loop.index]))
            builder.store(spare.data, rows)
        result = context.make_array(known)(context, builder)
        populate_array(
            result,
            data=builder.load(rows),
            shape=[arguments[2]],
            strides=[source.itemsize],
            itemsize=source.itemsize,
            meminfo=None,
        )
        return result._getvalue()

    return known(array, types.intp, types.intp, indices, buffer), codegen


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
