"""Elementary functions made of plain arithmetic, so that compilers vectorize them.

Numba and C++ compilers call the C library's functions once per number; in a recurrent network that
takes longer than the matrix products. The functions here have no calls and no branches;
`vector_exp` and `vector_log` open with how they work. Their errors stay below 2.5 units in the last
place. NaN, infinities, signed zeros, subnormal numbers, overflow and underflow give what the C
library gives. `scanlib.backends.c.vector_functions` translates them to C++.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from scanlib.codegen.vector_bits import FORMATS
from scanlib.codegen.vector_exp import make_exp, make_expm1, make_sigmoid, make_tanh
from scanlib.codegen.vector_log import make_log, make_log1p, make_logaddexp, make_softplus

# Part of the keys of compiled code: to be raised when a function changes.
VERSION = 2

_MAKERS: dict[str, Callable[..., Callable[..., Any]]] = {
    "exp": make_exp,
    "expm1": make_expm1,
    "log": make_log,
    "log1p": make_log1p,
    "logaddexp": make_logaddexp,
    "sigmoid": make_sigmoid,
    "softplus": make_softplus,
    "tanh": make_tanh,
}
# By name and dtype.
VECTOR_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    (name, np.dtype(form.dtype).name): make(form)
    for name, make in _MAKERS.items()
    for form in FORMATS
}
