"""The numba backend: loops inside numba mode, and the compiled loop that `perform` runs."""

from scanlib.backends.numba import dispatch

__all__ = ["dispatch"]
