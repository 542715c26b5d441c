r"""Elementary functions made of plain arithmetic, so that compilers vectorize them.

Numba calls the C library's `tanh` once per number; in a recurrent network that takes longer
than the matrix products. The function here has no calls and no branches. With ``y = 2|x|``,

    y = k ln 2 + r,   |r| ≤ ln 2 / 2
    e = exp(y) - 1 = 2^k (exp(r) - 1) + (2^k - 1)
    tanh |x| = e / (e + 2)

``exp(r) - 1`` is its Taylor polynomial, of a degree that leaves less than half a unit in the
last place; ``k ln 2`` is subtracted in two parts (W. Cody and W. Waite, "Software Manual for
the Elementary Functions", 1980), and ``2^k`` is made from the bits of a sum that rounds to `k`.
The error stays below four units in the last place. NaN, infinities, signed zeros and subnormal
numbers give what the C library gives.
"""

from __future__ import annotations

from collections.abc import Callable
from math import factorial, log
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

# Adding this number to k, with |k| small, leaves k in the lowest bits of the mantissa.
_ROUND_64 = 1.5 * 2.0**52
_ROUND_32 = np.float32(1.5 * 2.0**23)
_LOG2_E = 1 / log(2)
_LN2_HIGH_64 = float.fromhex("0x1.62e42fefa3800p-1")
_LN2_LOW_64 = float.fromhex("0x1.ef35793c76730p-45")
_LN2_HIGH_32 = np.float32(0.693359375)
_LN2_LOW_32 = np.float32(-2.12194440e-4)
_C = tuple(1 / factorial(n) for n in range(15))
_F = tuple(np.float32(c) for c in _C)


@intrinsic
def _power_of_two(typingctx: Any, rounded: Any) -> Any:
    """Return ``2**k`` for a sum ``k + 1.5 * 2**52`` (float64) or ``k + 1.5 * 2**23``."""
    mantissa, bias, width = (52, 1023, 64) if rounded == types.float64 else (23, 127, 32)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = ir.IntType(width)
        bits = builder.bitcast(arguments[0], integer)
        shifted = builder.shl(bits, ir.Constant(integer, mantissa))
        biased = builder.add(shifted, ir.Constant(integer, bias << mantissa))
        return builder.bitcast(biased, arguments[0].type)

    return rounded(rounded), codegen


@njit(fastmath=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
def tanh_float64(x: float) -> float:
    """Return the hyperbolic tangent of a float64."""
    size = abs(x)
    y = 2.0 * (20.0 if size > 20.0 else size)
    rounded = y * _LOG2_E + _ROUND_64
    k = rounded - _ROUND_64
    r = (y - k * _LN2_HIGH_64) - k * _LN2_LOW_64
    r2 = r * r
    r4 = r2 * r2
    low = (_C[2] + _C[3] * r) + (_C[4] + _C[5] * r) * r2
    middle = (_C[6] + _C[7] * r) + (_C[8] + _C[9] * r) * r2
    high = (_C[10] + _C[11] * r) + (_C[12] + _C[13] * r) * r2
    p = r + r2 * (low + r4 * (middle + r4 * high))
    scale = _power_of_two(rounded)
    e = scale * p + (scale - 1.0)
    result = e / (e + 2.0)
    result = -result if x < 0.0 else result
    return x if size < 1e-8 else result


@njit(fastmath=False, error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
def tanh_float32(x: Any) -> Any:
    """Return the hyperbolic tangent of a float32."""
    one, two, limit = np.float32(1), np.float32(2), np.float32(10)
    size = abs(x)
    y = two * (limit if size > limit else size)
    rounded = y * np.float32(_LOG2_E) + _ROUND_32
    k = rounded - _ROUND_32
    r = (y - k * _LN2_HIGH_32) - k * _LN2_LOW_32
    r2 = r * r
    low = (_F[2] + _F[3] * r) + (_F[4] + _F[5] * r) * r2
    p = r + r2 * (low + (_F[6] + _F[7] * r) * (r2 * r2))
    scale = _power_of_two(rounded)
    e = scale * p + (scale - one)
    result = e / (e + two)
    result = -result if x < np.float32(0) else result
    return x if size < np.float32(1e-4) else result


VECTOR_TANH: dict[str, Callable[..., Any]] = {"float64": tanh_float64, "float32": tanh_float32}
