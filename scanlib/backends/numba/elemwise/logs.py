r"""Kernels of the log-affine family for one block of steps of one channel (compiled code only).

    h[t] = logaddexp(h[t-1] + a[t], b[t])

With the running maximum `m`, ``p[t] = m[t-1] + a[t]`` and ``h = m + log s``,

    m[t] = max(p[t], b[t]),                m = h, s = 1 before the block
    E[t] = exp(-|b[t] - p[t]|)
    s[t] = E[t] s[t-1] + 1   where b[t] > p[t],   s[t-1] + E[t]   elsewhere

so that exponentials and logarithms are functions of arrays, which compilers vectorize, and only
`m`, a recurrence of the max-affine family, and `s`, of the affine one, wait for the step before.
Since ``1 ≤ s ≤ n + 1``, nothing overflows and nothing underflows that counts, for any range of
values. Rounding a difference changes `E` by no more than its product with that difference does,
and a step adds about one unit in the last place to `s`, whose logarithm is part of `h`: the errors
are those of the loop itself. (The rescaled sum is the one of P. Blanchard, D. Higham and N. Higham,
"Accurately computing the log-sum-exp and softmax functions", 2021, with a maximum that grows.)

Equal infinities are taken to differ by zero, as in `logaddexp`; ``E = 0`` where one is infinite.
NaN stays in `s` and so in `h`. So all values can be trusted that come of numbers below infinity.
The `a` or `b` of a step may be a sum, of ``logaddexp(h, b) + a`` for one, that the loop adds up
in another order: where one is NaN or infinity, the caller runs the block step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload

from scanlib.backends.numba.elemwise import lanes
from scanlib.backends.numba.kernel_functions import vector_intrinsic

_OPTIONS = {
    "error_model": "numpy",
    "fastmath": {"contract"},
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


def exp(value: Any) -> Any:
    """Return the exponential of a float, by code that compilers vectorize."""
    return np.exp(value)


def log(value: Any) -> Any:
    """Return the logarithm of a float, by code that compilers vectorize."""
    return np.log(value)


@overload(exp, jit_options={"forceinline": True})
def _exp(value):
    function, _ = vector_intrinsic("exp", str(value))
    return lambda value: function(value)


@overload(log, jit_options={"forceinline": True})
def _log(value):
    function, _ = vector_intrinsic("log", str(value))
    return lambda value: function(value)


@njit(**_OPTIONS)
def _larger(a: Any, b: Any) -> Any:
    return a if a > b else b


@njit(**_OPTIONS)
def all_below_infinity(values: Any) -> bool:
    found = False
    for j in range(values.shape[0]):
        found |= not values[j] < np.inf
    return not found


def _maximum(reverse: bool) -> Callable[..., None]:
    sign = -1 if reverse else 1

    @njit(**_OPTIONS)
    def maximum(b: Any, m: Any, state: Any) -> None:
        """Write the running maximum, four steps at a time. NaN may get lost: `s` keeps it."""
        n = b.shape[0]
        j = n - 1 if reverse else 0
        for _ in range(n // 4):
            b1 = b[j]
            b2 = _larger(b1, b[j + sign])
            b3 = _larger(b2, b[j + 2 * sign])
            b4 = _larger(b2, _larger(b[j + 2 * sign], b[j + 3 * sign]))
            m[j] = _larger(b1, state)
            m[j + sign] = _larger(b2, state)
            m[j + 2 * sign] = _larger(b3, state)
            state = _larger(b4, state)
            m[j + 3 * sign] = state
            j += 4 * sign
        for _ in range(n % 4):
            state = _larger(b[j], state)
            m[j] = state
            j += sign

    return maximum


def _shifted_maximum(reverse: bool) -> Callable[..., None]:
    @njit(**_OPTIONS)
    def shifted_maximum(a: Any, b: Any, m: Any, state: Any) -> None:
        """Write ``m = max(m + a, b)``, each sum rounded as the loop itself rounds it."""
        n = b.shape[0]
        for k in range(n):
            j = n - 1 - k if reverse else k
            state = _larger(b[j], state + a[j])
            m[j] = state

    return shifted_maximum


@njit(**_OPTIONS)
def _elements(b: Any, p: Any, scale: Any, added: Any, j: int) -> None:
    """Write the coefficients of ``s = scale * s + added`` at step `j`."""
    one, zero = b.dtype.type(1), b.dtype.type(0)
    e = exp(-(zero if b[j] == p else abs(b[j] - p)))
    scale[j] = e if b[j] > p else one
    added[j] = one if b[j] > p else e


def _sum(reverse: bool) -> Callable[..., None]:
    several_steps = lanes.scan(reverse)

    @njit(**_OPTIONS)
    def rescaled_sum(scale: Any, s: Any) -> None:
        """Replace what each step adds by the sum after it; the sum before the block is one.

        Products of scales that underflow belong to terms that do not count beside ``s ≥ 1``.
        """
        n = s.shape[0]
        state, done, _ = several_steps(scale, s, s, 0, n, s.dtype.type(1), ())
        while done < n:
            j = n - 1 - done if reverse else done
            state = scale[j] * state + s[j]
            s[j] = state
            done += 1

    return rescaled_sum


def _make(reverse: bool) -> tuple[Callable[..., bool], Callable[..., bool]]:
    maximum, shifted_maximum = _maximum(reverse), _shifted_maximum(reverse)
    rescaled_sum = _sum(reverse)
    before = 1 if reverse else -1

    @njit(**_OPTIONS)
    def logaddexp(b: Any, h: Any, start: int, n: int) -> bool:
        """``h = logaddexp(h, b)``."""
        b = b[:n]
        if not all_below_infinity(b):
            return False
        scale, s = np.empty(n, h.dtype), np.empty(n, h.dtype)
        new, old = h[start : start + n], h[start + before : start + before + n]
        maximum(b, new, h[start + n] if reverse else h[start - 1])
        for j in range(n):
            _elements(b, old[j], scale, s, j)
        rescaled_sum(scale, s)
        for j in range(n):
            new[j] = new[j] + log(s[j])
        return True

    @njit(**_OPTIONS)
    def logaddexp_shifted(a: Any, b: Any, h: Any, start: int, n: int) -> bool:
        """``h = logaddexp(h + a, b)``."""
        a, b = a[:n], b[:n]
        if not (all_below_infinity(a) and all_below_infinity(b)):
            return False
        scale, s = np.empty(n, h.dtype), np.empty(n, h.dtype)
        new, old = h[start : start + n], h[start + before : start + before + n]
        shifted_maximum(a, b, new, h[start + n] if reverse else h[start - 1])
        for j in range(n):
            _elements(b, old[j] + a[j], scale, s, j)
        rescaled_sum(scale, s)
        for j in range(n):
            new[j] = new[j] + log(s[j])
        return True

    return logaddexp, logaddexp_shifted


logaddexp_forward, logaddexp_shifted_forward = _make(False)
logaddexp_backward, logaddexp_shifted_backward = _make(True)
