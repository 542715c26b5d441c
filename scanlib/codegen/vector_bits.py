r"""What the vectorizable functions share: number formats, bits of numbers, polynomials.

A function that a compiler shall vectorize has no calls and no branches. What plain arithmetic
cannot do, powers of two and exponents, is done with the bits of numbers:

* ``k + 1.5 · 2^p``, with `p` the number of bits of the mantissa, rounds `k` to an integer and
  leaves it in the lowest bits; a shift moves it to where the exponent is.
* A shift the other way and the bits of ``2^p`` make a number of an exponent. No instruction that
  turns integers into numbers is needed: not every machine has it for vectors of 64 bits.

Polynomials are summed in pairs, pairs of pairs and so on (G. Estrin, "Organization of computer
systems", 1960): fewer operations wait for one another than in Horner's scheme.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

# Fused multiplications only: sums must be computed in the order in which they are written.
OPTIONS = {
    "error_model": "numpy",
    "fastmath": {"contract"},
    "forceinline": True,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
}


@dataclass(frozen=True)
class Format:
    """A floating-point format.

    Attributes
    ----------
    dtype : type
        Turns numbers into numbers of this format.
    mantissa, bias, width : int
        How many bits the mantissa has, what is added to exponents, how many bits there are.
    ln2 : tuple of float
        The logarithm of two in two parts; the first times an exponent is exact.
    smallest, largest : float
        Arguments below and above these have exponentials of zero and infinity.
    """

    dtype: type
    mantissa: int
    bias: int
    width: int
    ln2: tuple[float, float]
    smallest: float
    largest: float

    def number(self, value: float) -> Any:
        """Return a number of this format."""
        return self.dtype(value)

    @property
    def log2_e(self) -> Any:
        return self.dtype(1 / log(2))

    @property
    def rounding(self) -> Any:
        """The number whose sum with `k` has `k` in its lowest bits."""
        return self.dtype(1.5 * 2.0**self.mantissa)

    @property
    def root(self) -> int:
        """The bits of the root of one half."""
        return 0x3FE6A09E667F3BCD if self.width == 64 else 0x3F3504F3

    @property
    def large(self) -> Any:
        """What a number with a biased exponent in its lowest bits exceeds the exponent by."""
        return self.dtype(2.0**self.mantissa + self.bias)


DOUBLE = Format(
    np.float64,
    52,
    1023,
    64,
    (float.fromhex("0x1.62e42fefa3800p-1"), float.fromhex("0x1.ef35793c76730p-45")),
    -746.0,
    710.0,
)
SINGLE = Format(np.float32, 23, 127, 32, (0.693359375, -2.12194440e-4), -104.0, 89.0)
FORMATS = (DOUBLE, SINGLE)


def _format(dtype: Any) -> Format:
    return DOUBLE if dtype == types.float64 else SINGLE


@intrinsic
def power_of_two(typingctx: Any, rounded: Any) -> Any:
    """Return ``2**k`` for a sum ``k + 1.5 * 2**52`` (float64) or ``k + 1.5 * 2**23``."""
    form = _format(rounded)

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer = ir.IntType(form.width)
        bits = builder.bitcast(arguments[0], integer)
        shifted = builder.shl(bits, ir.Constant(integer, form.mantissa))
        biased = builder.add(shifted, ir.Constant(integer, form.bias << form.mantissa))
        return builder.bitcast(biased, arguments[0].type)

    return rounded(rounded), codegen


@intrinsic
def split(typingctx: Any, x: Any) -> Any:
    """Return `m` and `k` with ``x = m * 2**k`` and ``sqrt(1/2) <= m < sqrt(2)``.

    Right for positive normal numbers; others give some number.
    """
    form = _format(x)
    root, one = form.root, form.bias << form.mantissa
    large = (form.bias + form.mantissa) << form.mantissa  # the bits of 2^p

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        integer, real = ir.IntType(form.width), arguments[0].type
        bits = builder.bitcast(arguments[0], integer)
        moved = builder.add(bits, ir.Constant(integer, one - root))
        exponent = builder.lshr(moved, ir.Constant(integer, form.mantissa))
        added = builder.bitcast(builder.or_(exponent, ir.Constant(integer, large)), real)
        k = builder.fsub(added, ir.Constant(real, float(form.large)))
        fraction = builder.and_(moved, ir.Constant(integer, (1 << form.mantissa) - 1))
        m = builder.bitcast(builder.add(fraction, ir.Constant(integer, root)), real)
        return context.make_tuple(builder, signature.return_type, [m, k])

    return types.UniTuple(x, 2)(x), codegen


def polynomial(coefficients: tuple[float, ...]) -> Callable[[Any], Any]:
    """Return a function for compiled code: the polynomial with the lowest coefficient first."""

    @intrinsic
    def value(typingctx: Any, x: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            (power,) = arguments
            terms = [ir.Constant(power.type, float(_format(x).number(c))) for c in coefficients]

            def together(low: Any, high: Any, power: Any) -> Any:
                product = builder.fmul(high, power, flags=["contract"])
                return builder.fadd(low, product, flags=["contract"])

            return pairwise(terms, power, together, lambda power: builder.fmul(power, power))

        return x(x), codegen

    _coefficients[value] = coefficients
    return value


_coefficients: dict[Any, tuple[float, ...]] = {}


def coefficients_of(function: Any) -> tuple[float, ...] | None:
    """Return the coefficients of a function that `polynomial` made, None for other functions."""
    return _coefficients.get(function)


def pairwise(
    terms: list[Any],
    power: Any,
    together: Callable[[Any, Any, Any], Any],
    squared: Callable[[Any], Any],
) -> Any:
    """Return a polynomial in pairs, given what ``low + high * power`` and a square are."""
    while len(terms) > 1:
        pairs = [
            together(low, high, power) for low, high in zip(terms[::2], terms[1::2], strict=False)
        ]
        terms = pairs + terms[len(terms) - len(terms) % 2 :]
        power = squared(power)
    return terms[0]
