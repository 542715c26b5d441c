"""Kernels that scan one block of steps of one channel (compiled code only).

Each takes the elements of `n` steps in contiguous arrays and the values `h` of a state; it writes
the `n` new values to ``h[start]`` and after, and returns whether they can be trusted. The state
before the block is ``h[start - 1]``, or ``h[start + n]`` for kernels that walk backwards; arrays
are in the order of memory in both cases. New values cannot be trusted where composing steps could
lose what one step after the other keeps, or keep what it loses: where a value came near to
overflow or is not finite, or where products of coefficients may overflow or underflow. The caller
then runs the block step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import overload

from scanlib.backends.numba.elemwise import extremes, lanes, logs
from scanlib.backends.numba.elemwise.bounds import (
    ALL_BUT_SIGN,
    HIGHEST,
    LOWEST,
    MODERATE,
    WORDS,
    bits_of,
)
from scanlib.backends.numba.pointers import keep, load, pointer, shift
from scanlib.backends.numba.vectors import as_words

VERSION = 22

OPTIONS = {
    "error_model": "numpy",
    "fastmath": {"contract", "nsz"},
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


@njit(**OPTIONS)
def multiply_add(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c``, which the compiler may fuse but not rearrange with what stands around it."""
    return a * b + c


def is_moderate(value: Any) -> bool:
    """Whether a value is so far from overflow that no step from it overflows."""
    return bool(abs(value) <= MODERATE[64])


@overload(is_moderate)
def _is_moderate(value):
    if isinstance(value, types.Float):
        limit = MODERATE[value.bitwidth]
        return lambda value: abs(value) <= limit
    if isinstance(value, types.Complex):
        limit = MODERATE[value.bitwidth // 2]
        return lambda value: (abs(value.real) <= limit) & (abs(value.imag) <= limit)
    return lambda value: True


def is_extreme(value: Any) -> bool:
    """Whether products of a coefficient may leave the range of its dtype, zero aside."""
    return bool(value != 0 and not LOWEST[64] <= abs(value) <= HIGHEST[64])


@overload(is_extreme)
def _is_extreme(value):
    if isinstance(value, types.Float):
        low, high = LOWEST[value.bitwidth], HIGHEST[value.bitwidth]
        return lambda value: ((abs(value) >= low) & (abs(value) <= high) | (value == 0)) ^ True
    if isinstance(value, types.Complex):
        low, high = LOWEST[value.bitwidth // 2], HIGHEST[value.bitwidth // 2]

        def extreme(value):
            real, imag = abs(value.real), abs(value.imag)
            within = ((real >= low) | (imag >= low)) & (real <= high) & (imag <= high)
            return (within | ((real == 0) & (imag == 0))) ^ True

        return extreme
    return lambda value: False


def some_extreme(a: Any, n: int) -> bool:
    """Whether products of the first `n` coefficients may leave their range."""
    raise NotImplementedError("compiled code only")


@overload(some_extreme, jit_options=OPTIONS)
def _some_extreme(a, n):
    if not isinstance(a.dtype, types.Float):

        def one_by_one(a, n):
            count = 0
            for j in range(n):
                count += is_extreme(a[j])
            return count > 0

        return one_by_one
    width = a.dtype.bitwidth
    word, mask, one = WORDS[width], ALL_BUT_SIGN[width], WORDS[width](1)
    low, high = bits_of(LOWEST[width], width), bits_of(HIGHEST[width], width)

    def by_bits(a, n):
        bits = as_words(pointer(a))
        outside = word(0)
        for j in range(n):
            value = load(bits, j) & mask
            is_low = word(value - low) & ~word(value - one)  # zero is allowed
            outside |= is_low | word(high - value)
        keep(a)
        return outside < 0

    return by_bits


def _below(width: int, limit: float) -> Callable[..., bool]:
    """Return a function: whether the sizes of `n` values from `start` on are at most a limit."""
    word, mask, highest = WORDS[width], ALL_BUT_SIGN[width], bits_of(limit, width)

    def by_bits(h, start, n):
        bits = as_words(shift(pointer(h), start))
        above = word(0)
        for j in range(n):
            above |= word(highest - (load(bits, j) & mask))
        keep(h)
        return above >= 0

    return by_bits


def all_moderate(h: Any, start: int, n: int) -> bool:
    """Whether the `n` values from `start` on are far from overflow."""
    raise NotImplementedError("compiled code only")


@overload(all_moderate, jit_options=OPTIONS)
def _all_moderate(h, start, n):
    if isinstance(h.dtype, types.Float):
        return _below(h.dtype.bitwidth, MODERATE[h.dtype.bitwidth])

    def one_by_one(h, start, n):
        count = 0
        for j in range(n):
            count += is_moderate(h[start + j])
        return count == n

    return one_by_one


def is_nan(value: Any) -> bool:
    """Whether a value is not a number."""
    return value != value


@overload(is_nan)
def _is_nan(value):
    if isinstance(value, types.Float):
        return lambda value: value != value
    return lambda value: False


def some_nan(b: Any, n: int) -> bool:
    """Whether one of the first `n` values is not a number."""
    raise NotImplementedError("compiled code only")


@overload(some_nan, jit_options=OPTIONS)
def _some_nan(b, n):
    if isinstance(b.dtype, types.Float):
        finite = njit(_below(b.dtype.bitwidth, np.inf), **OPTIONS)
        return lambda b, n: not finite(b, 0, n)
    return lambda b, n: False


def _affine(reverse: bool, fixed: bool) -> Callable[..., bool]:
    several_steps = lanes.scan(reverse, fixed=fixed)

    @njit(**OPTIONS)
    def affine(a: Any, b: Any, h: Any, start: int, n: int, ahead: Any) -> bool:
        """``h = a * h + b``, maybe with one `a`."""
        before = h[start + n] if reverse else h[start - 1]
        if (is_extreme(a) if fixed else False) or not is_moderate(before):
            return False
        state, done, lost = several_steps(a, b, h, start, n, before, ahead)
        while done < n:
            j = n - 1 - done if reverse else done
            state = (a if fixed else a[j]) * state + b[j]
            h[start + j] = state
            lost |= (False if fixed else is_extreme(a[j])) | (not is_moderate(h[start + j]))
            done += 1
        return not lost

    return affine


def _product(reverse: bool) -> Callable[..., bool]:
    several_steps = lanes.scan(reverse, product=True)

    @njit(**OPTIONS)
    def product(a: Any, h: Any, start: int, n: int, ahead: Any) -> bool:
        """``h = a * h``."""
        state = h[start + n] if reverse else h[start - 1]
        if not is_moderate(state):
            return False
        state, done, lost = several_steps(a, a, h, start, n, state, ahead)
        while done < n:
            j = n - 1 - done if reverse else done
            state = a[j] * state
            h[start + j] = state
            lost |= is_extreme(a[j]) | (not is_moderate(state))
            done += 1
        return not lost

    return product


@njit(**OPTIONS)
def _larger(a: Any, b: Any) -> Any:
    return a if a > b else b


@njit(**OPTIONS)
def _smaller(a: Any, b: Any) -> Any:
    return a if a < b else b


def _extreme(pick: Any, reverse: bool) -> Callable[..., bool]:
    sign, size = -1 if reverse else 1, extremes.EXTREMES
    sixteen_extremes = extremes.sixteen_extremes[pick is _larger, reverse]

    @njit(**OPTIONS)
    def extreme(b: Any, h: Any, start: int, n: int, ahead: Any) -> bool:
        """``h = max(h, b)`` or `min`, sixteen steps at a time; a comparison would lose a NaN."""
        j = n - 1 if reverse else 0
        state = h[start + j - sign]
        if is_nan(state) or some_nan(b, n):
            return False
        done = 0
        while done + size <= n:
            j = n - size - done if reverse else done
            state = sixteen_extremes(b, state, h, j, start + j, ahead)
            done += size
        while done < n:
            j = n - 1 - done if reverse else done
            state = pick(b[j], state)
            h[start + j] = state
            done += 1
        return True

    return extreme


_LARGE: dict[int, Any] = {64: 2.0**1000, 32: np.float32(2.0**120)}


def some_large(a: Any, n: int) -> bool:
    """Whether sums of a few of the first `n` shifts may overflow; NaN counts."""
    raise NotImplementedError("compiled code only")


@overload(some_large, jit_options=OPTIONS)
def _some_large(a, n):
    small = njit(_below(a.dtype.bitwidth, _LARGE[a.dtype.bitwidth]), **OPTIONS)
    return lambda a, n: not small(a, 0, n)


@njit(**OPTIONS)
def _clamped(value: Any, low: Any, high: Any) -> Any:
    return _smaller(_larger(value, low), high)


def _clamp(reverse: bool) -> Callable[..., bool]:
    sign = -1 if reverse else 1

    @njit(**OPTIONS)
    def clamp(a: Any, low: Any, high: Any, h: Any, start: int, n: int) -> bool:
        """``h = min(max(h + a, low), high)``, four steps at a time."""
        j = n - 1 if reverse else 0
        state = h[start + j - sign]
        if is_nan(state) or some_large(a, n) or some_nan(low, n) or some_nan(high, n):
            return False
        for _ in range(n // 4):
            j2, j3, j4 = j + sign, j + 2 * sign, j + 3 * sign
            a12 = a[j] + a[j2]
            low12 = _larger(low[j] + a[j2], low[j2])
            high12 = _clamped(high[j] + a[j2], low[j2], high[j2])
            a34 = a[j3] + a[j4]
            low34 = _larger(low[j3] + a[j4], low[j4])
            high34 = _clamped(high[j3] + a[j4], low[j4], high[j4])
            low14 = _larger(low12 + a34, low34)
            high14 = _clamped(high12 + a34, low34, high34)
            second = _clamped(state + a12, low12, high12)
            h[start + j] = _clamped(state + a[j], low[j], high[j])
            h[start + j2] = second
            h[start + j3] = _clamped(second + a[j3], low[j3], high[j3])
            state = _clamped(state + (a12 + a34), low14, high14)
            h[start + j4] = state
            j += 4 * sign
        for _ in range(n % 4):
            state = _clamped(state + a[j], low[j], high[j])
            h[start + j] = state
            j += sign
        return True

    return clamp


# By name and by whether they walk backwards.
KERNELS: dict[tuple[str, bool], Callable[..., bool]] = {
    ("affine", False): _affine(False, fixed=False),
    ("affine", True): _affine(True, fixed=False),
    ("affine_fixed", False): _affine(False, fixed=True),
    ("affine_fixed", True): _affine(True, fixed=True),
    ("logaddexp", False): logs.logaddexp_forward,
    ("logaddexp", True): logs.logaddexp_backward,
    ("logaddexp_shifted", False): logs.logaddexp_shifted_forward,
    ("logaddexp_shifted", True): logs.logaddexp_shifted_backward,
    ("product", False): _product(False),
    ("product", True): _product(True),
    ("maximum", False): _extreme(_larger, False),
    ("maximum", True): _extreme(_larger, True),
    ("minimum", False): _extreme(_smaller, False),
    ("minimum", True): _extreme(_smaller, True),
    ("clamp", False): _clamp(False),
    ("clamp", True): _clamp(True),
}
