"""Kernels that scan one block of steps of one channel (compiled code only).

Each takes the elements of `n` steps in contiguous buffers and the values `h` of a state, with the
`start` values before the block in front; it writes the `n` new values behind them and returns
whether they can be trusted. They cannot where composing steps could lose what one step after
the other keeps: after an overflow (``inf · 0``), or where products of coefficients come close to
underflow. The caller then runs the block step by step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from scanlib.backends.numba.elemwise.lanes import STEPS, eight_steps, eight_steps_fixed

# The product of eight coefficients above these is a normal number.
_SMALL_64, _SMALL_32 = 2.0**-120, np.float32(2.0**-15)
VERSION = 1

_OPTIONS = {
    "error_model": "numpy",
    "fastmath": {"contract", "nsz"},
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def is_finite(value: Any) -> bool:
    """Whether a number is neither NaN nor infinite."""
    return bool(np.isfinite(value))


@overload(is_finite)
def _is_finite(value):
    if isinstance(value, types.Float):
        return lambda value: abs(value) < np.inf
    if isinstance(value, types.Complex):
        return lambda value: abs(value.real) < np.inf and abs(value.imag) < np.inf
    return lambda value: True


def is_small(value: Any) -> bool:
    """Whether a coefficient is so small, and not zero, that products of it may underflow."""
    return 0 < abs(value) < _SMALL_64


@overload(is_small)
def _is_small(value):
    if isinstance(value, types.Float):
        limit = _SMALL_64 if value.bitwidth == 64 else _SMALL_32
        return lambda value: (abs(value) < limit) & (value != 0)
    if isinstance(value, types.Complex):
        limit = _SMALL_64 if value.bitwidth == 128 else _SMALL_32
        return lambda value: (
            (max(abs(value.real), abs(value.imag)) < limit) & (value.real != 0) & (value.imag != 0)
        )
    return lambda value: False


@njit(**_OPTIONS)
def some_small(a: Any, n: int) -> bool:
    """Whether one of the first `n` coefficients is so small that products may underflow."""
    count = 0
    for j in range(n):
        count += is_small(a[j])
    return count > 0


@njit(**_OPTIONS)
def all_finite(h: Any, start: int, n: int) -> bool:
    """Whether the `n` values from `start` on are finite."""
    count = 0
    for j in range(n):
        count += is_finite(h[start + j])
    return count == n


@njit(**_OPTIONS)
def affine(a: Any, b: Any, h: Any, start: int, n: int) -> bool:
    """``h = a * h + b``. A value that is not finite stays so: looking at the last is enough."""
    if some_small(a, n):
        return False
    state = h[start - 1]
    j = 0
    while j + STEPS <= n:
        state = eight_steps(a, b, state, h, j, start + j)
        j += STEPS
    while j < n:
        state = a[j] * state + b[j]
        h[start + j] = state
        j += 1
    return is_finite(state)


@njit(**_OPTIONS)
def affine_fixed(a: Any, b: Any, h: Any, start: int, n: int) -> bool:
    """``h = a * h + b`` with one coefficient."""
    if is_small(a):
        return False
    state = h[start - 1]
    j = 0
    while j + STEPS <= n:
        state = eight_steps_fixed(a, b, state, h, j, start + j)
        j += STEPS
    while j < n:
        state = a * state + b[j]
        h[start + j] = state
        j += 1
    return is_finite(state)


@njit(**_OPTIONS)
def product(a: Any, h: Any, start: int, n: int) -> bool:
    """``h = a * h``, four steps at a time."""
    if some_small(a, n):
        return False
    state = h[start - 1]
    j = 0
    while j + 4 <= n:
        a1 = a[j]
        a2 = a1 * a[j + 1]
        a3 = a2 * a[j + 2]
        a4 = a2 * (a[j + 2] * a[j + 3])
        h[start + j] = a1 * state
        h[start + j + 1] = a2 * state
        h[start + j + 2] = a3 * state
        state = a4 * state
        h[start + j + 3] = state
        j += 4
    while j < n:
        state = a[j] * state
        h[start + j] = state
        j += 1
    return is_finite(state)


def is_nan(value: Any) -> bool:
    """Whether a value is not a number."""
    return value != value


@overload(is_nan)
def _is_nan(value):
    if isinstance(value, types.Float):
        return lambda value: value != value
    return lambda value: False


@njit(**_OPTIONS)
def _some_nan(b: Any, n: int) -> bool:
    count = 0
    for j in range(n):
        count += is_nan(b[j])
    return count > 0


@njit(**_OPTIONS)
def maximum(b: Any, h: Any, start: int, n: int) -> bool:
    """``h = max(h, b)``, four steps at a time; not for NaN, which a comparison loses."""
    state = h[start - 1]
    if is_nan(state) or _some_nan(b, n):
        return False
    j = 0
    while j + 4 <= n:
        b1, b3 = b[j], b[j + 2]
        b2 = b[j + 1] if b[j + 1] > b1 else b1
        b4 = b[j + 3] if b[j + 3] > b3 else b3
        b3 = b3 if b3 > b2 else b2
        b4 = b4 if b4 > b2 else b2
        h[start + j] = b1 if b1 > state else state
        h[start + j + 1] = b2 if b2 > state else state
        h[start + j + 2] = b3 if b3 > state else state
        state = b4 if b4 > state else state
        h[start + j + 3] = state
        j += 4
    while j < n:
        state = b[j] if b[j] > state else state
        h[start + j] = state
        j += 1
    return True


@njit(**_OPTIONS)
def minimum(b: Any, h: Any, start: int, n: int) -> bool:
    """``h = min(h, b)``, four steps at a time; not for NaN, which a comparison loses."""
    state = h[start - 1]
    if is_nan(state) or _some_nan(b, n):
        return False
    j = 0
    while j + 4 <= n:
        b1, b3 = b[j], b[j + 2]
        b2 = b[j + 1] if b[j + 1] < b1 else b1
        b4 = b[j + 3] if b[j + 3] < b3 else b3
        b3 = b3 if b3 < b2 else b2
        b4 = b4 if b4 < b2 else b2
        h[start + j] = b1 if b1 < state else state
        h[start + j + 1] = b2 if b2 < state else state
        h[start + j + 2] = b3 if b3 < state else state
        state = b4 if b4 < state else state
        h[start + j + 3] = state
        j += 4
    while j < n:
        state = b[j] if b[j] < state else state
        h[start + j] = state
        j += 1
    return True
