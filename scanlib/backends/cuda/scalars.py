"""Scalar code for kernels: that of the C backend, with half precision computed in single."""

from __future__ import annotations

from typing import Any

from scanlib.backends.c.scalars import Scalars
from scanlib.backends.c.source import literal

HALF = "float16"


def item_type(dtype: str) -> str:
    """Return the type in which a kernel computes."""
    return f"pytensor_{dtype}" if dtype.startswith("complex") else f"npy_{dtype}"


def memory_type(dtype: str) -> str:
    """Return the type of an item in memory."""
    return "scanlib_half" if dtype == HALF else item_type(dtype)


class DeviceScalars(Scalars):
    """Writes scalar operations for a kernel."""

    has_vectors = False  # a thread has one item, and the device functions of its own

    def c_type(self, dtype: str) -> str:
        return item_type(dtype)

    def literal(self, value: Any, dtype: str) -> str:
        return literal(value, "float32" if dtype == HALF else dtype)
