"""The numba backend: loops inside numba mode, and the compiled loop that `perform` runs."""

from scanlib.backends.handler.thunks import prepare_library
from scanlib.backends.numba import array_ops, dispatch, general_loop, linker, memory, recurrences

memory.keep_freed_memory()
prepare_library()

__all__ = ["array_ops", "dispatch", "general_loop", "linker", "memory", "recurrences"]
