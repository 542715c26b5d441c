"""Kernels that scan one block of steps of one channel (compiled code only).

Each takes the elements of `n` steps in contiguous arrays and the values `h` of a state; it writes the
`n` new values to ``h[start]`` and after, and returns whether they can be trusted. The state before
the block is ``h[start - 1]``, or ``h[start + n]`` for kernels that walk backwards; arrays are in the
order of memory in both cases. New values cannot be trusted where composing steps could lose what
one step after the other keeps: after an overflow (``inf · 0``), or where products of coefficients
come close to underflow. The caller then runs the block step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from scanlib.backends.numba.elemwise import lanes

# The product of eight coefficients above these is a normal number.
_SMALL_64, _SMALL_32 = 2.0**-120, np.float32(2.0**-15)
VERSION = 3

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


def _affine(eight_steps: Any, reverse: bool) -> Callable[..., bool]:
    size = lanes.STEPS

    @njit(**_OPTIONS)
    def affine(a: Any, b: Any, h: Any, start: int, n: int) -> bool:
        """``h = a * h + b``. A value that is not finite stays so: looking at the last is enough."""
        if some_small(a, n):
            return False
        state = h[start + n] if reverse else h[start - 1]
        done = 0
        while done + size <= n:
            j = n - size - done if reverse else done
            state = eight_steps(a, b, state, h, j, start + j)
            done += size
        while done < n:
            j = n - 1 - done if reverse else done
            state = a[j] * state + b[j]
            h[start + j] = state
            done += 1
        return is_finite(state)

    return affine


def _affine_fixed(eight_steps: Any, reverse: bool) -> Callable[..., bool]:
    size = lanes.STEPS

    @njit(**_OPTIONS)
    def affine_fixed(a: Any, b: Any, h: Any, start: int, n: int) -> bool:
        """``h = a * h + b`` with one coefficient."""
        if is_small(a):
            return False
        state = h[start + n] if reverse else h[start - 1]
        done = 0
        while done + size <= n:
            j = n - size - done if reverse else done
            state = eight_steps(a, b, state, h, j, start + j)
            done += size
        while done < n:
            j = n - 1 - done if reverse else done
            state = a * state + b[j]
            h[start + j] = state
            done += 1
        return is_finite(state)

    return affine_fixed


def _product(reverse: bool) -> Callable[..., bool]:
    sign = -1 if reverse else 1

    @njit(**_OPTIONS)
    def product(a: Any, h: Any, start: int, n: int) -> bool:
        """``h = a * h``, four steps at a time."""
        if some_small(a, n):
            return False
        j = n - 1 if reverse else 0
        state = h[start + j - sign]
        for _ in range(n // 4):
            a1 = a[j]
            a2 = a1 * a[j + sign]
            a3 = a2 * a[j + 2 * sign]
            a4 = a2 * (a[j + 2 * sign] * a[j + 3 * sign])
            h[start + j] = a1 * state
            h[start + j + sign] = a2 * state
            h[start + j + 2 * sign] = a3 * state
            state = a4 * state
            h[start + j + 3 * sign] = state
            j += 4 * sign
        for _ in range(n % 4):
            state = a[j] * state
            h[start + j] = state
            j += sign
        return is_finite(state)

    return product


@njit(**_OPTIONS)
def _larger(a: Any, b: Any) -> Any:
    return a if a > b else b


@njit(**_OPTIONS)
def _smaller(a: Any, b: Any) -> Any:
    return a if a < b else b


def _extreme(pick: Any, reverse: bool) -> Callable[..., bool]:
    sign = -1 if reverse else 1

    @njit(**_OPTIONS)
    def extreme(b: Any, h: Any, start: int, n: int) -> bool:
        """``h = max(h, b)`` or `min`, four steps at a time; a comparison would lose a NaN."""
        j = n - 1 if reverse else 0
        state = h[start + j - sign]
        if is_nan(state) or _some_nan(b, n):
            return False
        for _ in range(n // 4):
            b1 = b[j]
            b2 = pick(b1, b[j + sign])
            b3 = pick(b2, b[j + 2 * sign])
            b4 = pick(b2, pick(b[j + 2 * sign], b[j + 3 * sign]))
            h[start + j] = pick(b1, state)
            h[start + j + sign] = pick(b2, state)
            h[start + j + 2 * sign] = pick(b3, state)
            state = pick(b4, state)
            h[start + j + 3 * sign] = state
            j += 4 * sign
        for _ in range(n % 4):
            state = pick(b[j], state)
            h[start + j] = state
            j += sign
        return True

    return extreme


# By name and by whether they walk backwards.
KERNELS: dict[tuple[str, bool], Callable[..., bool]] = {
    ("affine", False): _affine(lanes.eight_steps, False),
    ("affine", True): _affine(lanes.eight_steps_backward, True),
    ("affine_fixed", False): _affine_fixed(lanes.eight_steps_fixed, False),
    ("affine_fixed", True): _affine_fixed(lanes.eight_steps_fixed_backward, True),
    ("product", False): _product(False),
    ("product", True): _product(True),
    ("maximum", False): _extreme(_larger, False),
    ("maximum", True): _extreme(_larger, True),
    ("minimum", False): _extreme(_smaller, False),
    ("minimum", True): _extreme(_smaller, True),
}
