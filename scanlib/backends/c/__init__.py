"""The C backend: loops as C code for PyTensor's C linker."""

from scanlib.backends.c import printer

__all__ = ["printer"]
