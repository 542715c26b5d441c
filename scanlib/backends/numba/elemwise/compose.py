"""The map of many affine steps, composed from the last one backwards (compiled code only).

The steps ``h ← a h + b`` from step `j` on are the map ``h ↦ A h + B``; with the step before them,

    B ← A b + B,    A ← a A

Where the coefficients decay, `A` is soon so small that no value before step `j` counts, and `B`
alone is the value in the end. A block is cut in strips whose maps do not wait for one another, and
which are composed in the end.

Rounding is no worse than that of the steps: with ``S[i]`` the product of the coefficients after
step `i`, the errors of `B` are units in the last place of ``Σ |S[i]| |B[i]|``, where
``B[i] = h[i] - A[i] h[j]``; the steps' are those of ``Σ |S[i]| |h[i]|``, and ``S[i] A[i] = A`` is
small. What overflows is an infinity or NaN of `B` from then on. Where the steps alone overflow,
their last value is not finite: the caller looks at it. Everything is computed in double precision.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

VERSION = 2

SMALL = 2.0**-120  # coefficients of values that count no more
_UNDERFLOW = 2.0**-900  # what products may have lost
_ROUNDING = 2.0**-60  # of a value, in doubles: less than half a unit in the last place
_STRIPS = 8
_OPTIONS = {
    "error_model": "numpy",
    "fastmath": {"contract"},
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def item_at(values: Any, j: int) -> Any:
    """Return item `j` of an array, or the number that all items are (compiled code only)."""
    raise NotImplementedError("compiled code only")


@overload(item_at, jit_options={"forceinline": True})
def _item_at(values, j):
    if isinstance(values, types.Array):
        return lambda values, j: np.float64(values[j])
    return lambda values, j: np.float64(values)


@njit(**_OPTIONS)
def is_forgotten(mul: float, before: float, value: float) -> bool:
    """Whether ``mul * before`` is nothing next to a value; not if one of them is not finite."""
    return max(abs(mul), _UNDERFLOW) * abs(before) <= _ROUNDING * abs(value) < np.inf


@njit(**_OPTIONS)
def blocks_to_forget(mul: float) -> float:
    """Return how many blocks make a coefficient small if one makes it `mul`."""
    return np.log(SMALL) / np.log(abs(mul)) if abs(mul) < 1 else np.inf


@njit(**_OPTIONS)
def _before(a: float, b: float, mul: float, add: float) -> tuple[float, float]:
    """Return the composition of a map with the step ``h ← a h + b`` before it."""
    return mul * a, add + mul * b


@njit(**_OPTIONS)
def _before_sum(a: float, b: float, mul: float, add: float) -> tuple[float, float]:
    """Return the composition of a map with the step ``h ← a (h + b)`` before it."""
    mul *= a
    return mul, add + mul * b


@njit(**_OPTIONS)
def _after(a: float, b: float, mul: float, add: float) -> tuple[float, float]:
    """Return the composition of a map with the step ``h ← a h + b`` after it."""
    return mul * a, add * a + b


@njit(**_OPTIONS)
def _after_sum(a: float, b: float, mul: float, add: float) -> tuple[float, float]:
    """Return the composition of a map with the step ``h ← a (h + b)`` after it."""
    return mul * a, (add + b) * a


def _composing(reverse: bool, sum_first: bool) -> Callable[..., tuple[float, float]]:
    before, after = (_before_sum, _after_sum) if sum_first else (_before, _after)

    @njit(**_OPTIONS)
    def compose(a: Any, b: Any, n: int, mul: float, add: float) -> tuple[float, float]:
        """Compose a map with the `n` steps of the block before it."""
        size = n // _STRIPS
        sign = -1 if reverse else 1
        start = n - 1 if reverse else 0
        for k in range(n - 1, _STRIPS * size - 1, -1):
            j = start + sign * k
            mul, add = before(item_at(a, j), item_at(b, j), mul, add)
        m0 = m1 = m2 = m3 = m4 = m5 = m6 = m7 = 1.0
        s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
        far = sign * size
        for k in range(size):
            j = start + sign * k
            m0, s0 = after(item_at(a, j), item_at(b, j), m0, s0)
            j += far
            m1, s1 = after(item_at(a, j), item_at(b, j), m1, s1)
            j += far
            m2, s2 = after(item_at(a, j), item_at(b, j), m2, s2)
            j += far
            m3, s3 = after(item_at(a, j), item_at(b, j), m3, s3)
            j += far
            m4, s4 = after(item_at(a, j), item_at(b, j), m4, s4)
            j += far
            m5, s5 = after(item_at(a, j), item_at(b, j), m5, s5)
            j += far
            m6, s6 = after(item_at(a, j), item_at(b, j), m6, s6)
            j += far
            m7, s7 = after(item_at(a, j), item_at(b, j), m7, s7)
        for m, s in (
            (m7, s7),
            (m6, s6),
            (m5, s5),
            (m4, s4),
            (m3, s3),
            (m2, s2),
            (m1, s1),
            (m0, s0),
        ):
            add += mul * s
            mul *= m
        return mul, add

    return compose


# By whether the loop walks backwards, and whether its sum comes first.
COMPOSE = {
    (reverse, sum_first): _composing(reverse, sum_first)
    for reverse in (False, True)
    for sum_first in (False, True)
}
