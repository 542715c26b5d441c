"""Compiled functions of SciPy that kernels call: of BLAS, of LAPACK, and special functions.

SciPy offers their addresses to Cython, each with its signature in C.
"""

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

from pytensor.graph.op import Op
from scipy.linalg import cython_blas, cython_lapack
from scipy.special import cython_special

_capsule_name = ctypes.pythonapi.PyCapsule_GetName
_capsule_name.argtypes, _capsule_name.restype = [ctypes.py_object], ctypes.c_char_p
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
_capsule_pointer.restype = ctypes.c_void_p


@dataclass(frozen=True)
class Routine:
    """A function of BLAS or LAPACK, all of whose arguments are pointers, or a special function,
    whose arguments are numbers in double precision and an integer, one."""

    name: str
    is_special: bool = False

    def address(self) -> int:
        return _address(self)


@cache
def _address(routine: Routine) -> int:
    modules = (cython_special,) if routine.is_special else (cython_blas, cython_lapack)
    (capsule,) = (m.__pyx_capi__[routine.name] for m in modules if routine.name in m.__pyx_capi__)
    return int(_capsule_pointer(capsule, _capsule_name(capsule)))


def special_function(op: Op, arguments: int) -> Routine | None:
    """Return the function of SciPy's that a scalar Op names, None if there is none in C."""
    path = getattr(op, "nfunc_spec", None)
    module, _, name = path[0].rpartition(".") if path else ("", "", "")
    if module != "scipy.special":
        return None
    known: dict[str, Any] = cython_special.__pyx_capi__
    wanted = f"double ({'double, ' * arguments}int __pyx_skip_dispatch)"
    for full in (name, f"__pyx_fuse_0{name}", f"__pyx_fuse_1{name}"):
        if full in known and _capsule_name(known[full]).decode() == wanted:
            return Routine(full, is_special=True)
    return None
