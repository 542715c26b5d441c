"""The C backend: loops as C code for PyTensor's C linker."""

from scanlib.backends.c import linear_scan, printer

__all__ = ["linear_scan", "printer"]
