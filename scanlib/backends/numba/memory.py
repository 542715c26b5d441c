"""Fresh memory: what it costs the first time it is touched, and how to pay less.

The operating system hands out memory in pages of 4 KB and clears each when it is first written,
which takes longer than a loop needs to fill it. On Linux, memory that was freed is used again: the
C library returns what is freed at the end of its heap at once, and asks for it anew at the next
call; `keep_freed_memory` tells it to keep some. (NumPy asks for pages of 2 MB for large arrays.)
"""

from __future__ import annotations

import ctypes
import sys

from pytensor.configdefaults import config

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
