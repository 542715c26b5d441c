r"""Elementary functions made of plain arithmetic: `exp`, `log`, `tanh` and their relatives.

The C library's functions are called once per number; in a recurrent network that takes longer than
the matrix products. The functions here have no calls and no branches, so that they work on as many
lanes as their argument has. NaN, infinities, signed zeros, subnormal numbers, overflow and
underflow give what the C library gives.

Errors are at most 2.5 units in the last place; `tests/kernels/test_vector_math.py` measures them.

**Exponentials.** With `k` the integer nearest to ``x / ln 2``,

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

**Logarithms.** With ``x = 2^k m``, ``√½ ≤ m < √2``, ``f = m - 1`` and ``s = f / (2 + f)``,

    log(m) = 2 artanh(s) = 2 s + s³ p(s²) = f - (f²/2 - s (f²/2 + s² p(s²)))
    log(x) = k ln 2 + log(m)
    log1p(x) = log(u) + c / u,   u = 1 + x rounded, c = (1 + x) - u
    softplus(x) = max(x, 0) + log1p(exp(-|x|))
    logaddexp(x, y) = max(x, y) + log1p(exp(-|x - y|))

The second form of ``log(m)`` adds small terms to `f`, which is exact (Muller, chapter 11); `c` is
exact too (T. Dekker, "A floating-point technique for extending the available precision", 1971).
`p` is the polynomial that minimizes the largest error relative to ``log(m)``, found like `q`:
1.3e-18 with seven coefficients, 8e-10 with three. Subnormal numbers are scaled first.

**Bits.** ``k + 1.5 · 2^p``, with `p` the number of bits of the mantissa, rounds `k` to an integer
and leaves it in the lowest bits; a shift moves it to where the exponent is. A shift the other way
and the bits of ``2^p`` make a number of an exponent. No instruction that turns integers into
numbers is needed: not every machine has it for lanes of 64 bits. Polynomials are summed in pairs,
pairs of pairs and so on (G. Estrin, "Organization of computer systems", 1960): fewer operations
wait for one another than in Horner's scheme.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, nan
from math import log as natural_log

from scanlib.kernels.language import Function, Type, Value, Writer, write_function


@dataclass(frozen=True)
class Format:
    """A floating-point format, and what the functions need to know of it.

    The mantissa has `mantissa` bits, `bias` is added to exponents, all are `width` bits. `ln2` is
    the logarithm of two in two parts, of which the first times an exponent is exact. Arguments
    below `smallest` and above `largest` have exponentials of zero and infinity, those below
    `lowest` an `expm1` of minus one, those above `tanh_limit` a `tanh` of one, those below
    `tanh_tiny` of themselves. `root` are the bits of the root of one half, `q` and `p` the
    coefficients of the polynomials, the lowest first.
    """

    mantissa: int
    bias: int
    width: int
    ln2: tuple[float, float]
    smallest: float
    largest: float
    lowest: float
    tanh_limit: float
    tanh_tiny: float
    root: int
    q: tuple[float, ...]
    p: tuple[float, ...]

    @property
    def integer(self) -> str:
        """The dtype of the bits of a number."""
        return f"uint{self.width}"

    @property
    def rounding(self) -> float:
        """The number whose sum with `k` has `k` in its lowest bits."""
        return 1.5 * 2.0**self.mantissa


_hex = float.fromhex
FORMATS = {
    "float64": Format(
        mantissa=52,
        bias=1023,
        width=64,
        ln2=(_hex("0x1.62e42fefa3800p-1"), _hex("0x1.ef35793c76730p-45")),
        smallest=-746.0,
        largest=710.0,
        lowest=-40.0,
        tanh_limit=20.0,
        tanh_tiny=1e-8,
        root=0x3FE6A09E667F3BCD,
        q=(
            _hex("0x1.0000000000005p-1"),
            _hex("0x1.555555555555cp-3"),
            _hex("0x1.5555555552093p-5"),
            _hex("0x1.111111110e68ap-7"),
            _hex("0x1.6c16c17f51eb0p-10"),
            _hex("0x1.a01a01b5f500fp-13"),
            _hex("0x1.a019a631c4c6ap-16"),
            _hex("0x1.71dde9bea790ap-19"),
            _hex("0x1.28a30304c559ap-22"),
            _hex("0x1.af772447a6bafp-26"),
        ),
        p=(
            _hex("0x1.5555555555593p-1"),
            _hex("0x1.999999997fb33p-2"),
            _hex("0x1.2492494217975p-2"),
            _hex("0x1.c71c51e7fdc22p-3"),
            _hex("0x1.7466462b67e72p-3"),
            _hex("0x1.39a0f51c7299fp-3"),
            _hex("0x1.2f0d8db6bcb10p-3"),
        ),
    ),
    "float32": Format(
        mantissa=23,
        bias=127,
        width=32,
        ln2=(0.693359375, -2.12194440e-4),
        smallest=-104.0,
        largest=89.0,
        lowest=-20.0,
        tanh_limit=10.0,
        tanh_tiny=1e-4,
        root=0x3F3504F3,
        q=(0.500000006223, 0.16666542544, 0.0416662806616, 0.00836664411516, 0.00139465549235),
        p=(0.666667767254, 0.39977494736, 0.298730927949),
    ),
}


# Bits and polynomials


def polynomial(w: Writer, coefficients: Sequence[float], x: Value) -> Value:
    """Return a polynomial of `x` with the lowest coefficient first."""
    terms: list[Value] = [w.constant(c, x.type) for c in coefficients]
    power = x
    while len(terms) > 1:
        pairs = [
            w.fma(high, power, low) for low, high in zip(terms[::2], terms[1::2], strict=False)
        ]
        terms = pairs + terms[len(terms) - len(terms) % 2 :]
        if len(terms) > 1:
            power = power * power
    return terms[0]


def power_of_two(w: Writer, rounded: Value) -> Value:
    """Return ``2^k`` for a sum of `k` and `Format.rounding`."""
    form = FORMATS[rounded.type.dtype]
    shifted = w.bitcast(rounded, form.integer) << form.mantissa
    return w.bitcast(shifted + (form.bias << form.mantissa), rounded.type.dtype)


def split(w: Writer, x: Value) -> tuple[Value, Value]:
    """Return `m` and `k` with ``x = m · 2^k`` and ``√½ ≤ m < √2``.

    Right for positive normal numbers; others give some number.
    """
    form, dtype = FORMATS[x.type.dtype], x.type.dtype
    one = form.bias << form.mantissa
    large = (form.bias + form.mantissa) << form.mantissa  # the bits of 2^p
    moved = w.bitcast(x, form.integer) + (one - form.root)
    k = w.bitcast((moved >> form.mantissa) | large, dtype) - (2.0**form.mantissa + form.bias)
    fraction = moved & ((1 << form.mantissa) - 1)
    return w.bitcast(fraction + form.root, dtype), k


# Exponentials


def _reduced(w: Writer, x: Value) -> tuple[Value, Value, Value]:
    """Return `k`, `r` and ``exp(r) - 1 - r``."""
    form = FORMATS[x.type.dtype]
    k = w.fma(x, 1 / natural_log(2), form.rounding) - form.rounding
    high = w.fma(-k, form.ln2[0], x)
    low = k * form.ln2[1]
    r = high - low
    lost = (high - r) - low
    return k, r, w.fma(r * r, polynomial(w, form.q, r), lost)


def _within(w: Writer, x: Value, low: float | None, high: float) -> Value:
    """Return a number no larger, and no smaller, than the limits; NaN as it is."""
    y = w.select(x > high, high, x)
    return y if low is None else w.select(y < low, low, y)


def exp(w: Writer, x: Value) -> Value:
    form = FORMATS[x.type.dtype]
    k, r, rest = _reduced(w, _within(w, x, form.smallest, form.largest))
    first = w.fma(k, 0.5, form.rounding)
    second = (k - (first - form.rounding)) + form.rounding
    return ((1.0 + (r + rest)) * power_of_two(w, first)) * power_of_two(w, second)


def expm1(w: Writer, x: Value) -> Value:
    form = FORMATS[x.type.dtype]
    k, r, rest = _reduced(w, _within(w, x, form.lowest, form.largest))
    scale = power_of_two(w, (k - 1.0) + form.rounding)  # half of it, which does not overflow
    result = 2.0 * w.fma(scale, r + rest, scale - 0.5)
    return w.select(abs(x) < 2.0 ** -(form.mantissa + 2), x, result)


def tanh(w: Writer, x: Value) -> Value:
    form = FORMATS[x.type.dtype]
    size = abs(x)
    k, r, rest = _reduced(w, 2.0 * _within(w, size, None, form.tanh_limit))
    scale = power_of_two(w, k + form.rounding)
    e = w.fma(scale, r + rest, scale - 1.0)
    result = e / (e + 2.0)
    return w.select(size < form.tanh_tiny, x, w.select(x < 0.0, -result, result))


def sigmoid(w: Writer, x: Value) -> Value:
    e = exp(w, -abs(x))
    return w.select(x < 0.0, e, 1.0) / (1.0 + e)


# Logarithms


def _joined(w: Writer, m: Value, k: Value, small: Value | float) -> Value:
    """Return ``k ln 2 + log(m) + small``."""
    form = FORMATS[m.type.dtype]
    f = m - 1.0
    s = f / (2.0 + f)
    z = s * s
    square = 0.5 * f * f
    correction = w.fma(s, w.fma(z, polynomial(w, form.p, z), square), w.fma(k, form.ln2[1], small))
    return w.fma(k, form.ln2[0], f - (square - correction))


def log(w: Writer, x: Value) -> Value:
    form = FORMATS[x.type.dtype]
    subnormal = x < 2.0 ** (1 - form.bias)
    shift = form.mantissa + 2
    m, k = split(w, x * w.select(subnormal, w.constant(2.0**shift, x.type), 1.0))
    zero = w.constant(0.0, x.type)
    result = _joined(w, m, k - w.select(subnormal, float(shift), zero), zero)
    result = w.select(x > 0.0, result, nan)
    result = w.select(x.equals(0.0), -inf, result)
    return w.select(x.equals(inf), x, result)


def _log1p_core(w: Writer, x: Value) -> Value:
    """Return ``log(1 + x)`` for finite x above -1; the sign of zero is lost."""
    u = 1.0 + x
    c = w.select(x < 1.0, x - (u - 1.0), 1.0 - (u - x))
    m, k = split(w, u)
    return _joined(w, m, k, c / u)


def log1p(w: Writer, x: Value) -> Value:
    result = w.select(x > -1.0, _log1p_core(w, x), nan)
    result = w.select(x.equals(-1.0), -inf, result)
    return w.select(x.equals(inf) | x.equals(0.0), x, result)


def softplus(w: Writer, x: Value) -> Value:
    return w.select(x > 0.0, x, 0.0) + _log1p_core(w, exp(w, -abs(x)))


def logaddexp(w: Writer, x: Value, y: Value) -> Value:
    """Return ``log(exp(x) + exp(y))``; equal infinities have no difference."""
    distance = w.select(x.equals(y), 0.0, abs(x - y))
    return w.select(x > y, x, y) + _log1p_core(w, exp(w, -distance))


# As functions of kernels

_BY_NAME: dict[str, Callable[..., Value]] = {
    "exp": exp,
    "expm1": expm1,
    "log": log,
    "log1p": log1p,
    "logaddexp": logaddexp,
    "sigmoid": sigmoid,
    "softplus": softplus,
    "tanh": tanh,
}
NAMES = frozenset(_BY_NAME)


@cache
def vector_function(name: str, dtype: str, lanes: int = 1) -> Function:
    """Return one of `NAMES` as a function of a kernel."""
    kind = Type(dtype, lanes)
    types = [kind] * (2 if name == "logaddexp" else 1)
    whole = f"scanlib_{name}_{dtype}" + (f"x{lanes}" if lanes > 1 else "")
    return write_function(whole, types, _BY_NAME[name])


def compute(w: Writer, name: str, *values: Value) -> Value:
    """Write the call of one of `NAMES`, on as many lanes as the values have."""
    kind = values[0].type
    return w.call(vector_function(name, kind.dtype, kind.lanes), *values)[0]
