"""Fresh memory: what it costs the first time it is touched, and how to pay less.

The operating system hands out memory in pages of 4 KB and clears each when it is first written,
which takes longer than a loop needs to fill it. On Linux, memory that was freed is used again: the
C library returns what is freed at the end of its heap at once, and asks for it anew at the next
call; `keep_freed_memory` tells it to keep some. (NumPy asks for pages of 2 MB for large arrays.)
"""

import ctypes
import sys
from typing import Any

from numba import types
from numba.extending import intrinsic
from pytensor.configdefaults import config

from scanlib._compat.numba import (
    cgutils,
    impl_ret_borrowed,
    impl_ret_new_ref,
    new_array_of,
    populate_array,
)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # what the C library accepts at most


def keep_freed_memory() -> None:
    """Have the C library of the process keep up to ``scanlib__keep_memory`` MiB of freed memory,
    where that is not zero, and where it has `mallopt`."""
    kept = config.scanlib__keep_memory
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if kept > 0 and mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, min(kept << 20, _LARGEST_MMAP_THRESHOLD))
        mallopt(_M_TRIM_THRESHOLD, min(kept, 2047) << 20)


@intrinsic
def new_array(typingctx: Any, dtype: Any, *sizes: Any) -> Any:
    """Return a new array of some sizes, which holds anything (compiled code only): numba compiles
    half a dozen functions for each `np.empty`."""
    known = types.Array(dtype.dtype, len(sizes), "C")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        numbers = cgutils.unpack_tuple(builder, arguments[1])
        shape = [
            context.cast(builder, number, kind, types.intp)
            for kind, number in zip(sizes, numbers, strict=True)
        ]
        array = new_array_of(context, builder, known, shape)
        return impl_ret_new_ref(context, builder, known, array._getvalue())

    return known(dtype, types.StarArgTuple.from_types(sizes)), codegen


@intrinsic
def row_view(typingctx: Any, array: Any, row: Any) -> Any:
    """Return a row of an array as a view, of no axes too (compiled code only)."""
    # A row of an array by columns is not contiguous.
    layout = "C" if array.layout == "C" or array.ndim == 1 else "A"
    known = array.copy(ndim=array.ndim - 1, layout=layout)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        whole = context.make_array(array)(context, builder, arguments[0])
        shape, strides = (cgutils.unpack_tuple(builder, t) for t in (whole.shape, whole.strides))
        number = context.cast(builder, arguments[1], row, types.intp)
        start = cgutils.pointer_add(builder, whole.data, builder.mul(number, strides[0]))
        view = context.make_array(known)(context, builder)
        populate_array(
            view,
            data=builder.bitcast(start, view.data.type),
            shape=shape[1:],
            strides=strides[1:],
            itemsize=whole.itemsize,
            meminfo=whole.meminfo,
            parent=whole.parent,
        )
        return impl_ret_borrowed(context, builder, known, view._getvalue())

    return known(array, row), codegen


@intrinsic
def as_array(typingctx: Any, number: Any) -> Any:
    """Return a new array of no axes that holds a number (compiled code only)."""
    known = types.Array(number, 0, "C")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = new_array_of(context, builder, known, ())
        context.pack_value(builder, number, arguments[0], array.data)
        return impl_ret_new_ref(context, builder, known, array._getvalue())

    return known(number), codegen
