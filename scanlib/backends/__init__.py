"""How PyTensor's linkers run scanlib's Ops."""

from scanlib.backends import numba

__all__ = ["numba"]
