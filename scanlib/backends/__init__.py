"""How PyTensor's linkers run scanlib's Ops."""

from scanlib.backends import numba as _numba
