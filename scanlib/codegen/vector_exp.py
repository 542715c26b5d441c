r"""Exponentials that compilers vectorize: `exp`, `expm1`, `tanh`, `sigmoid`.

With `k` the integer nearest to ``x / ln 2``,

    x = k ln 2 + r,   |r| ≤ ln 2 / 2
    exp(r) = 1 + r + r² q(r)
    exp(x) = 2^k exp(r)
    expm1(x) = 2^k (exp(r) - 1) + (2^k - 1)
    tanh |x| = e / (e + 2),   e = expm1(2 |x|)
    sigmoid(x) = 1 / (1 + exp(-x)),   for negative x exp(x) / (1 + exp(x))

``k ln 2`` is subtracted in two parts (W. Cody and W. Waite, "Software Manual for the Elementary
Functions", 1980), and what rounding `r` loses is added to ``r² q(r)``, the smaller part of the
sum (J.-M. Muller, "Elementary Functions", 3rd ed. 2016, chapter 11). `q` is the polynomial that
minimizes the largest error of ``exp(r) - 1`` relative to `r` for ``|r| ≤ 1.001 ln 2 / 2``, found
by E. Remez's exchange in sixty digits: 1.8e-17 with ten coefficients, 1.3e-8 with five.
``2^k`` is multiplied in two factors, so that results next to overflow and among the subnormal
numbers are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

from scanlib.codegen.vector_bits import DOUBLE, OPTIONS, Format, polynomial, power_of_two

_Q_DOUBLE = polynomial(
    (
        float.fromhex("0x1.0000000000005p-1"),
        float.fromhex("0x1.555555555555cp-3"),
        float.fromhex("0x1.5555555552093p-5"),
        float.fromhex("0x1.111111110e68ap-7"),
        float.fromhex("0x1.6c16c17f51eb0p-10"),
        float.fromhex("0x1.a01a01b5f500fp-13"),
        float.fromhex("0x1.a019a631c4c6ap-16"),
        float.fromhex("0x1.71dde9bea790ap-19"),
        float.fromhex("0x1.28a30304c559ap-22"),
        float.fromhex("0x1.af772447a6bafp-26"),
    )
)
_Q_SINGLE = polynomial(
    (0.500000006223, 0.16666542544, 0.0416662806616, 0.00836664411516, 0.00139465549235)
)


def make_reduction(form: Format) -> Callable[..., Any]:
    """Return a function from x to `k`, `r` and ``exp(r) - 1 - r``."""
    log2_e, rounding = form.log2_e, form.rounding
    high_ln2, low_ln2 = (form.number(part) for part in form.ln2)
    q = _Q_DOUBLE if form is DOUBLE else _Q_SINGLE

    @njit(**OPTIONS)
    def reduction(x: Any) -> Any:
        k = (x * log2_e + rounding) - rounding
        high = x - k * high_ln2
        low = k * low_ln2
        r = high - low
        lost = (high - r) - low
        return k, r, r * r * q(r) + lost

    return reduction


def make_exp(form: Format) -> Callable[..., Any]:
    """Return the exponential function of a format."""
    reduction, rounding = make_reduction(form), form.rounding
    smallest, largest = form.number(form.smallest), form.number(form.largest)
    one, half = form.number(1), form.number(0.5)

    @njit(**OPTIONS)
    def exp(x: Any) -> Any:
        y = largest if x > largest else x
        y = smallest if y < smallest else y
        k, r, rest = reduction(y)
        first = k * half + rounding
        second = (k - (first - rounding)) + rounding
        return ((one + (r + rest)) * power_of_two(first)) * power_of_two(second)

    return exp


def make_expm1(form: Format) -> Callable[..., Any]:
    """Return ``exp(x) - 1`` of a format; half of it is computed, which does not overflow."""
    reduction, rounding = make_reduction(form), form.rounding
    largest, lowest = form.number(form.largest), form.number(-40 if form is DOUBLE else -20)
    one, two, half = form.number(1), form.number(2), form.number(0.5)
    tiny = form.number(2.0 ** -(form.mantissa + 2))

    @njit(**OPTIONS)
    def expm1(x: Any) -> Any:
        y = largest if x > largest else x
        y = lowest if y < lowest else y
        k, r, rest = reduction(y)
        scale = power_of_two((k - one) + rounding)
        result = two * (scale * (r + rest) + (scale - half))
        return x if abs(x) < tiny else result

    return expm1


def make_tanh(form: Format) -> Callable[..., Any]:
    """Return the hyperbolic tangent of a format."""
    reduction, rounding = make_reduction(form), form.rounding
    limit, tiny = (20.0, 1e-8) if form is DOUBLE else (10.0, 1e-4)
    limit, tiny = form.number(limit), form.number(tiny)
    zero, one, two = form.number(0), form.number(1), form.number(2)

    @njit(**OPTIONS)
    def tanh(x: Any) -> Any:
        size = abs(x)
        k, r, rest = reduction(two * (limit if size > limit else size))
        scale = power_of_two(k + rounding)
        e = scale * (r + rest) + (scale - one)
        result = e / (e + two)
        result = -result if x < zero else result
        return x if size < tiny else result

    return tanh


def make_sigmoid(form: Format) -> Callable[..., Any]:
    """Return the logistic function of a format."""
    exp = make_exp(form)
    zero, one = form.number(0), form.number(1)

    @njit(**OPTIONS)
    def sigmoid(x: Any) -> Any:
        e = exp(-abs(x))
        return (e if x < zero else one) / (one + e)

    return sigmoid
