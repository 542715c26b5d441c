"""The numba backend: loops inside numba mode, and the compiled loop that `perform` runs."""

from scanlib.backends.handler.thunks import prepare_library
from scanlib.backends.numba import dispatch, linker, memory

memory.keep_freed_memory()
prepare_library()

__all__ = ["dispatch", "linker", "memory"]
