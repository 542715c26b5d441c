r"""Logarithms that compilers vectorize: `log`, `log1p`, `softplus`, `logaddexp`.

With ``x = 2^k m``, ``√½ ≤ m < √2``, ``f = m - 1`` and ``s = f / (2 + f)``,

    log(m) = 2 artanh(s) = 2 s + s³ p(s²) = f - (f²/2 - s (f²/2 + s² p(s²)))
    log(x) = k ln 2 + log(m)
    log1p(x) = log(u) + c / u,   u = 1 + x rounded, c = (1 + x) - u
    softplus(x) = max(x, 0) + log1p(exp(-|x|))
    logaddexp(x, y) = max(x, y) + log1p(exp(-|x - y|))

The second form of ``log(m)`` adds small terms to `f`, which is exact (J.-M. Muller, "Elementary
Functions", 3rd ed. 2016, chapter 11); `c` is exact too (T. Dekker, "A floating-point technique for
extending the available precision", 1971). `p` is the polynomial that minimizes the largest error
relative to ``log(m)``, found by E. Remez's exchange in sixty digits: 1.3e-18 with seven
coefficients, 8e-10 with three. Subnormal numbers are scaled first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

from scanlib.codegen.vector_bits import DOUBLE, OPTIONS, Format, polynomial, split
from scanlib.codegen.vector_exp import make_exp

_P_DOUBLE = polynomial(
    (
        float.fromhex("0x1.5555555555593p-1"),
        float.fromhex("0x1.999999997fb33p-2"),
        float.fromhex("0x1.2492494217975p-2"),
        float.fromhex("0x1.c71c51e7fdc22p-3"),
        float.fromhex("0x1.7466462b67e72p-3"),
        float.fromhex("0x1.39a0f51c7299fp-3"),
        float.fromhex("0x1.2f0d8db6bcb10p-3"),
    )
)
_P_SINGLE = polynomial((0.666667767254, 0.39977494736, 0.298730927949))


def make_parts(form: Format) -> Callable[..., Any]:
    """Return a function from `m`, `k` and a small number to ``k ln 2 + log(m) + small``."""
    high_ln2, low_ln2 = (form.number(part) for part in form.ln2)
    one, two, half = form.number(1), form.number(2), form.number(0.5)
    p = _P_DOUBLE if form is DOUBLE else _P_SINGLE

    @njit(**OPTIONS)
    def parts(m: Any, k: Any, small: Any) -> Any:
        f = m - one
        s = f / (two + f)
        z = s * s
        square = half * f * f
        correction = s * (square + z * p(z)) + (k * low_ln2 + small)
        return k * high_ln2 + (f - (square - correction))

    return parts


def make_log(form: Format) -> Callable[..., Any]:
    """Return the natural logarithm of a format."""
    parts = make_parts(form)
    zero, one, infinity, nan = (form.number(v) for v in (0.0, 1.0, np.inf, np.nan))
    normal = form.number(2.0 ** (1 - form.bias))
    shift = form.number(form.mantissa + 2)
    scale = form.number(2.0 ** (form.mantissa + 2))

    @njit(**OPTIONS)
    def log(x: Any) -> Any:
        subnormal = x < normal
        m, k = split(x * (scale if subnormal else one))
        result = parts(m, k - (shift if subnormal else zero), zero)
        result = result if x > zero else nan
        result = -infinity if x == zero else result
        return x if x == infinity else result

    return log


def make_log1p_core(form: Format) -> Callable[..., Any]:
    """Return ``log(1 + x)`` for finite x above -1; the sign of zero is lost."""
    parts, one = make_parts(form), form.number(1)

    @njit(**OPTIONS)
    def log1p_core(x: Any) -> Any:
        u = one + x
        c = x - (u - one) if x < one else one - (u - x)
        m, k = split(u)
        return parts(m, k, c / u)

    return log1p_core


def make_log1p(form: Format) -> Callable[..., Any]:
    """Return ``log(1 + x)`` of a format."""
    core = make_log1p_core(form)
    zero, one, infinity, nan = (form.number(v) for v in (0.0, 1.0, np.inf, np.nan))

    @njit(**OPTIONS)
    def log1p(x: Any) -> Any:
        result = core(x)
        result = result if x > -one else nan
        result = -infinity if x == -one else result
        return x if (x == infinity) | (x == zero) else result

    return log1p


def make_softplus(form: Format) -> Callable[..., Any]:
    """Return ``log(1 + exp(x))`` of a format."""
    exp, core, zero = make_exp(form), make_log1p_core(form), form.number(0)

    @njit(**OPTIONS)
    def softplus(x: Any) -> Any:
        return (x if x > zero else zero) + core(exp(-abs(x)))

    return softplus


def make_logaddexp(form: Format) -> Callable[..., Any]:
    """Return ``log(exp(x) + exp(y))`` of a format; equal infinities have no difference."""
    exp, core, zero = make_exp(form), make_log1p_core(form), form.number(0)

    @njit(**OPTIONS)
    def logaddexp(x: Any, y: Any) -> Any:
        distance = zero if x == y else abs(x - y)
        return (x if x > y else y) + core(exp(-distance))

    return logaddexp
