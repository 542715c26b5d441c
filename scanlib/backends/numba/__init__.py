"""The numba backend: loops inside numba mode, and the compiled loop that `perform` runs."""

from scanlib.backends.numba import dispatch, initial

__all__ = ["dispatch", "initial"]
