"""The numba backend: loops inside numba mode, and the compiled loop that `perform` runs."""

from scanlib.backends.numba import dispatch, initial, one_row

__all__ = ["dispatch", "initial", "one_row"]
