"""Fresh memory: what it costs the first time it is touched, and how to pay less.

The operating system hands out memory in pages of 4 KB and clears each when it is first written,
which takes longer than a loop needs to fill it. Two things help, both on Linux:

* memory that was freed is used again. The C library returns what is freed at the end of its heap
  at once, and asks for it anew at the next call; `keep_freed_memory` tells it to keep some;
* large arrays ask for pages of 2 MB (`advise`), as NumPy does for its own.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from pytensor.configdefaults import config

from scanlib._compat.numba import cgutils

HUGE = 1 << 22  # bytes from which an array asks for large pages
_PAGE = 4096
_MADV_HUGEPAGE = 14
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_MMAP_THRESHOLD = 32 << 20  # what the C library accepts at most


def keep_freed_memory() -> None:
    """Have the C library keep up to ``scanlib__keep_memory`` MiB of freed memory for reuse.

    It holds for the whole process. Zero leaves the C library as it is, and so does any system
    without its `mallopt`.
    """
    kept = config.scanlib__keep_memory
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if kept > 0 and mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, min(kept << 20, _LARGEST_MMAP_THRESHOLD))
        mallopt(_M_TRIM_THRESHOLD, min(kept, 2047) << 20)


@intrinsic
def advise(typingctx: Any, array: Any) -> Any:
    """Ask for large pages for a fresh array (compiled code only)."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        ask_for_large_pages(builder, context.make_array(array)(context, builder, arguments[0]))
        return context.get_dummy_value()

    return types.void(array), codegen


def ask_for_large_pages(builder: Any, array: Any) -> None:
    """Write the request for large pages for the memory of a fresh array."""
    if sys.platform != "linux":
        return
    word = array.nitems.type
    size = builder.mul(array.nitems, array.itemsize)
    with builder.if_then(builder.icmp_signed(">=", size, ir.Constant(word, HUGE))):
        first = builder.add(builder.ptrtoint(array.data, word), ir.Constant(word, _PAGE - 1))
        start = builder.and_(first, ir.Constant(word, -_PAGE))
        code = ir.IntType(32)
        madvise = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(code, [word, word, code]), "madvise"
        )
        rest = builder.sub(size, ir.Constant(word, _PAGE))
        builder.call(madvise, [start, rest, ir.Constant(code, _MADV_HUGEPAGE)])
