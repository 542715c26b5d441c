r"""Elementary functions made of plain arithmetic: `exp`, `log`, `tanh`, powers, `sin`, `erf`, more.

The C library's functions are called once per number; in a recurrent network that takes longer than
the matrix products. The functions here have no calls and no branches, but for rare numbers (angles
beyond 2³⁰, say), so that they work on as many lanes as their argument has. NaN, infinities, signed
zeros, subnormal numbers, overflow and underflow give what the C library gives.

Errors are at most 3 units in the last place, of powers, sines and cosines 1;
`tests/kernels/test_vector_math.py` measures them.

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

**Powers.** ``x^y = exp(y log x)`` multiplies the error of the logarithm by up to 745. So that is a
sum of two numbers, to 2⁻⁶⁴ of it: `s` and its square are such sums, in

    log(m) = 2 s + s³ (2/3 + s² P(s²)),

where 2/3 is one, too, and `P` is small enough to be rounded (Muller, chapter 11). What products
lose is what a fused multiply-add leaves of them; processors without it call the C library. Powers
that are whole numbers are exact. ``log2`` and ``log10`` are multiples of the same logarithm.

**Circular functions.** With `k` the integer nearest to ``2 x / π``, ``r = x - k π/2`` is a sum of
two numbers, from ``π/2`` in three parts (Cody and Waite). ``sin`` and ``cos`` of it are polynomials
found like `q`, to 2⁻⁵⁸. That holds up to ``|x| = 2³⁰``; larger numbers are left to the C library.

**Angles.** ``atan(y / x)`` in the first octants is one of

    atan(y / x),   π/4 + atan((y - x) / (y + x)),   π/2 - atan(x / y),

the one whose quotient is at most ``tan(π/8)`` in size; `atan` of it is a polynomial found like `q`.

**Error functions.** M. Shepherd and J. Laframboise ("Chebyshev approximation of (1 + 2x) exp(x²)
erfc x in 0 ≤ x < ∞", Mathematics of Computation 36, 1981) map all ``x ≥ 0`` to -1 up to 1:

    (1 + 2 x) exp(x²) erfc(x) = 1 + u Q(t),   u = 2 x / (x + 3.75),   t = u - 1

`Q` is the polynomial with the least relative error, 1.9e-18; ``x²`` is a sum of two numbers. Below
one ``erf(x) = x + x E(x²)``, and below one half ``erfc`` is one minus that.

**Remainders.** Where `q` is the whole part of ``x / y`` or one more, ``x - q y`` is a number: a
fused multiply-add has no error. The C library has the remainders of quotients beyond whole numbers.

Of single precision, powers, circular functions and their relatives are computed in double.

**Bits.** ``k + 1.5 · 2^p``, with `p` the number of bits of the mantissa, rounds `k` to an integer
and leaves it in the lowest bits; a shift moves it to where the exponent is. A shift the other way
and the bits of ``2^p`` make a number of an exponent. No instruction that turns integers into
numbers is needed: not every machine has it for lanes of 64 bits. Polynomials are summed in pairs,
pairs of pairs and so on (G. Estrin, "Organization of computer systems", 1960): fewer operations
wait for one another than in Horner's scheme.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, nan
from math import log as natural_log

from scanlib.kernels.lanes import any_lane, vector_of
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


def _numbers(table: str) -> tuple[float, ...]:
    """Return the coefficients of a polynomial, to the last bit, the lowest first."""
    return tuple(map(_hex, table.split()))


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
        q=_numbers(
            """
             0x1.0000000000005p-1  0x1.555555555555cp-3  0x1.5555555552093p-5  0x1.111111110e68ap-7
            0x1.6c16c17f51eb0p-10 0x1.a01a01b5f500fp-13 0x1.a019a631c4c6ap-16 0x1.71dde9bea790ap-19
            0x1.28a30304c559ap-22 0x1.af772447a6bafp-26
            """
        ),
        p=_numbers(
            """
            0x1.5555555555593p-1 0x1.999999997fb33p-2 0x1.2492494217975p-2 0x1.c71c51e7fdc22p-3
            0x1.7466462b67e72p-3 0x1.39a0f51c7299fp-3 0x1.2f0d8db6bcb10p-3
            """
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

# Of ``log(m) = 2 s + s³ (2/3 + s² p(s²))`` in twice the precision.
LONG_LOG = _numbers(
    """
    0x1.9999999999b33p-2 0x1.24924924577f9p-2 0x1.c71c722de44c3p-3 0x1.745ce9b67d7ffp-3
    0x1.3b1ef46cae11dp-3 0x1.0f7f1fb644cfap-3 0x1.0e4a38a43673dp-3
    """
)
TWO_THIRDS_LOW = 2.0**-54 * 2 / 3  # what 2/3 loses as a float64
# Of ``sin(r) = r + r³ S(r²)`` and ``cos(r) = 1 - r²/2 + r⁴ C(r²)`` up to half a right angle.
SINE = _numbers(
    """
     -0x1.5555555555549p-3   0x1.111111110f861p-7 -0x1.a01a019c0e4bep-13  0x1.71de3574ba3e7p-19
    -0x1.ae5e63cd7450fp-26  0x1.5d9246c8cff12p-33
    """
)
COSINE = _numbers(
    """
      0x1.555555555554cp-5 -0x1.6c16c16c15162p-10  0x1.a01a019caef33p-16 -0x1.27e4f807d5f0ap-22
     0x1.1ee9ea6c9c7cbp-29 -0x1.8fadd05bbe215p-37
    """
)
# Numbers as sums of float64: a right angle, ``ln 2``, ``1 / ln 2`` and ``1 / ln 10``.
RIGHT_ANGLE = (
    _hex("0x1.921fb54442d18p+0"),
    _hex("0x1.1a62633145c07p-54"),
    _hex("-0x1.f1976b7ed8fbcp-110"),
)
LN2 = (_hex("0x1.62e42fefa39efp-1"), _hex("0x1.abc9e3b39803fp-56"))
LOG2_E = (_hex("0x1.71547652b82fep+0"), _hex("0x1.777d0ffda0d24p-56"))
LOG10_E = (_hex("0x1.bcb7b1526e50ep-2"), _hex("0x1.95355baaafad3p-57"))
# Of ``Q(t)``, ``E(x²)`` and ``atan(r) = r + r³ A(r²)``.
SCALED_ERFC = _numbers(
    """
      0x1.e66d05aeaee14p-3  -0x1.82d1be1953bddp-2   0x1.867da34256726p-2  -0x1.323d48ce30d26p-2
      0x1.85a5f94f4cfd4p-3  -0x1.9137da14003c2p-4   0x1.419eb9ba216b5p-5  -0x1.651adfecf3f45p-7
     0x1.2dd51d9a1bcafp-10  0x1.3cc9e114b67f8p-11 -0x1.459898a4ec61bp-12  0x1.558fadec1efc1p-16
     0x1.067bbe1ccee79p-15 -0x1.2ada8ebbb588dp-17 -0x1.54971e1d33627p-19  0x1.a40706754cf16p-20
     0x1.9156d3de1ef99p-23 -0x1.07307a6fdbeb7p-22 -0x1.d0c432d110c69p-27  0x1.447dd3797f086p-25
     0x1.e3f0eb89b802cp-31 -0x1.6831d574b083bp-28  0x1.4a99bca3e7748p-34  0x1.f929de989d1fdp-32
    -0x1.394adbecbd9fcp-35
    """
)
ERF = _numbers(
    """
      0x1.06eba8214db68p-3  -0x1.812746b0379bdp-2   0x1.ce2f21a040d16p-4  -0x1.b82ce311fa93ep-6
      0x1.565bccf92b2fap-8 -0x1.c02db03dd71efp-11  0x1.f9a2baa8fef4dp-14 -0x1.f4ca4d6f3f2e1p-17
     0x1.b97fd3d99ab63p-20 -0x1.5c0726f07c684p-23  0x1.d71b0f1c497b5p-27 -0x1.abae491fc3595p-31
    """
)
ARC = _numbers(
    """
    -0x1.555555555553dp-2  0x1.99999999957cep-3 -0x1.24924922aa4fep-3  0x1.c71c70e50eae9p-4
    -0x1.745cf8c379b70p-4  0x1.3b11179536481p-4 -0x1.10eba8c68a76ap-4  0x1.df0e7ff4f2b22p-5
    -0x1.9ccf7da9c4e43p-5  0x1.37ce1c2ba7549p-5 -0x1.255b35da962dep-6
    """
)
ERFC_CENTER = 3.75  # the `x` that is mapped to zero
LARGEST_ANGLE = 2.0**30  # whose multiples of a right angle are subtracted without loss


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


def _reduced(w: Writer, x: Value, more: Value | None = None) -> tuple[Value, Value, Value]:
    """Return `k`, `r` and ``exp(r) - 1 - r`` of `x`, or of it and a little `more`."""
    form = FORMATS[x.type.dtype]
    k = w.fma(x, 1 / natural_log(2), form.rounding) - form.rounding
    high = w.fma(-k, form.ln2[0], x)
    low = k * form.ln2[1] if more is None else k * form.ln2[1] - more
    r = high - low
    lost = (high - r) - low
    return k, r, w.fma(r * r, polynomial(w, form.q, r), lost)


def _within(w: Writer, x: Value, low: float | None, high: float) -> Value:
    """Return a number no larger, and no smaller, than the limits; NaN as it is."""
    y = w.select(x > high, high, x)
    return y if low is None else w.select(y < low, low, y)


def exp(w: Writer, x: Value, more: Value | None = None) -> Value:
    form = FORMATS[x.type.dtype]
    k, r, rest = _reduced(w, _within(w, x, form.smallest, form.largest), more)
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


def _normalized(w: Writer, x: Value) -> tuple[Value, Value]:
    """Return `m` and `k` as `split` does, of subnormal numbers too."""
    form = FORMATS[x.type.dtype]
    subnormal = x < 2.0 ** (1 - form.bias)
    shift, zero = form.mantissa + 2, w.constant(0.0, x.type)
    m, k = split(w, x * w.select(subnormal, w.constant(2.0**shift, x.type), 1.0))
    return m, k - w.select(subnormal, float(shift), zero)


def log(w: Writer, x: Value) -> Value:
    return _log_at_ends(w, x, _joined(w, *_normalized(w, x), w.constant(0.0, x.type)))


def _log_at_ends(w: Writer, x: Value, found: Value) -> Value:
    """Return the logarithm that was found of positive numbers, and of others what it is there."""
    found = w.select(x > 0.0, found, nan)
    found = w.select(x.equals(0.0), -inf, found)
    return w.select(x.equals(inf), x, found)


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


# Powers


def _long_log(w: Writer, x: Value) -> tuple[Value, Value]:
    """Return ``log(x)`` of positive numbers in float64 as a sum of two, to 2⁻⁶⁴ of it."""
    m, k = _normalized(w, x)
    f, d = m - 1.0, m + 1.0
    inverse = 1.0 / d
    s = f * inverse
    s_low = (w.fma(-s, d, f) - s * (m - (d - 1.0))) * inverse
    z = s * s
    z_low = w.fma(s, s, -z) + 2.0 * s * s_low
    rest = z * polynomial(w, LONG_LOG, z)
    c = 2 / 3 + rest
    c_low = (2 / 3 - c) + rest + TWO_THIRDS_LOW
    u = z * c
    u_low = w.fma(z, c, -u) + w.fma(z, c_low, z_low * c)
    v = s * u
    v_low = w.fma(s, u, -v) + w.fma(s, u_low, s_low * u)
    whole = k * FORMATS["float64"].ln2[0]
    first = whole + 2.0 * s
    high = first + v
    lost = ((whole - first) + 2.0 * s) + ((first - high) + v)
    return high, lost + (w.fma(k, FORMATS["float64"].ln2[1], 2.0 * s_low) + v_low)


def power(w: Writer, x: Value, y: Value) -> Value:
    """Return ``x**y`` as C's `pow` defines it."""
    size, is_whole = abs(x), w.apply("floor", y).equals(y)
    log_high, log_low = _long_log(w, size)
    # What is larger has no power but zero, one and infinity.
    exponent = _within(w, y, -(2.0**65), 2.0**65)
    high = exponent * log_high
    low = w.fma(exponent, log_high, -high) + exponent * log_low
    result = exp(w, high, w.select(abs(high) < 800.0, low, 0.0))
    is_zero = x.equals(0.0)
    at_end = w.select(is_zero ^ (y < 0.0), w.constant(0.0, x.type), inf)
    result = w.select(is_zero | size.equals(inf), at_end, result)
    half = 0.5 * y
    is_odd = is_whole & w.apply("floor", half).differs(half)
    result = w.select(is_odd, w.apply("copysign", result, x), result)
    is_root = (x < 0.0) & ~is_whole & (size < inf)
    result = w.select(is_root | x.differs(x) | y.differs(y), nan, result)
    return w.select(y.equals(0.0) | x.equals(1.0), 1.0, result)


def exp2(w: Writer, x: Value) -> Value:
    x = _within(w, x, -1100.0, 1100.0)
    high = x * LN2[0]
    return exp(w, high, w.fma(x, LN2[0], -high) + x * LN2[1])


def _log_of(base: tuple[float, float]) -> Callable[[Writer, Value], Value]:
    """Return a logarithm, given the inverse of that of its base as a sum of two."""

    def logarithm(w: Writer, x: Value) -> Value:
        high, low = _long_log(w, x)
        first = high * base[0]
        found = first + (w.fma(high, base[0], -first) + w.fma(high, base[1], low * base[0]))
        return _log_at_ends(w, x, found)

    return logarithm


# Circular functions


def _angle(w: Writer, x: Value) -> tuple[Value, Value, Value]:
    """Return the number of right angles nearest to `x`, in the lowest bits, and the rest as a sum
    of two."""
    rounding = FORMATS["float64"].rounding
    whole = w.fma(x, 1 / RIGHT_ANGLE[0], rounding)
    k = whole - rounding
    first, second = w.fma(-k, RIGHT_ANGLE[0], x), k * RIGHT_ANGLE[1]
    high = first - second
    taken = first - high
    lost = (first - (high + taken)) + (taken - second)
    low = lost - w.fma(k, RIGHT_ANGLE[2], w.fma(k, RIGHT_ANGLE[1], -second))
    return w.bitcast(whole, "uint64"), high, low


def _sin_and_cos(w: Writer, high: Value, low: Value) -> tuple[Value, Value]:
    """Return both of the sum of two, up to half a right angle."""
    z = high * high
    sine = high + w.fma(high * z, polynomial(w, SINE, z), low)
    half = 0.5 * z
    first = 1.0 - half
    lost = (1.0 - first) - half
    return sine, first + (lost + w.fma(z * z, polynomial(w, COSINE, z), -(high * low)))


def _circular(name: str, turns: int) -> Callable[[Writer, Value], Value]:
    """Return the sine, behind which the cosine is one right angle."""

    def function(w: Writer, x: Value) -> Value:
        quarters, high, low = _angle(w, x)
        quarters = quarters + turns
        sine, cosine = _sin_and_cos(w, high, low)
        found = w.select((quarters & 1).equals(0), sine, cosine)
        found = w.select((quarters & 2).equals(0), found, -found)
        return _where_large(w, name, x, found)

    return function


def tan(w: Writer, x: Value) -> Value:
    quarters, high, low = _angle(w, x)
    sine, cosine = _sin_and_cos(w, high, low)
    is_even = (quarters & 1).equals(0)
    found = w.select(is_even, sine, cosine) / w.select(is_even, cosine, -sine)
    return _where_large(w, "tan", x, found)


def _where_large(w: Writer, name: str, x: Value, found: Value) -> Value:
    """Return what was found; of numbers so large that the rest of right angles would have lost
    digits, what the C library says, and zeros with their sign."""
    if name != "cos":
        found = w.select(x.equals(0.0), x, found)
    return _unless(w, (abs(x) > LARGEST_ANGLE) & (abs(x) < inf), found, name, x)


def _unless(w: Writer, rare: Value, found: Value, name: str, *values: Value) -> Value:
    """Return what was found, but all from the C library where a condition holds for a lane."""
    total, kind = w.local(found), found.type
    name += "f" if kind.dtype == "float32" else ""
    with w.when(any_lane(w, rare)):
        rows = [[w.lane(x, k) if kind.lanes > 1 else x for x in values] for k in range(kind.lanes)]
        exact = [w.call(name, *row, result=row[0].type)[0] for row in rows]
        w.assign(total, vector_of(w, exact))
    return w.copy(total)


# Angles


def atan2(w: Writer, y: Value, x: Value) -> Value:
    size, other = abs(y), abs(x)
    is_small, is_large = size <= 0.41421356 * other, size > 2.4142136 * other
    below = w.select(is_large, size, w.select(is_small, other, size + other))
    above = w.select(is_large, -other, w.select(is_small, size, size - other))
    r = above / below
    z = r * r
    rest = w.fma(r * z, polynomial(w, ARC, z), r)
    eighths = w.select(is_large, 1.0, w.select(is_small, 0.0, w.constant(0.5, x.type)))
    # Left of zero the angle is two right ones less this.
    sign = w.select(x < 0.0, -1.0, w.constant(1.0, x.type))
    turns = w.select(x < 0.0, 2.0 - eighths, eighths)
    found = w.fma(turns, RIGHT_ANGLE[0], w.fma(turns, RIGHT_ANGLE[1], sign * rest))
    found = w.apply("copysign", found, y)
    rare = (size > 1e300) | (other > 1e300) | found.differs(found)
    return _unless(w, rare, found, "atan2", y, x)


def asin(w: Writer, x: Value) -> Value:
    return atan2(w, x, w.apply("sqrt", w.fma(-x, x, 1.0)))


def acos(w: Writer, x: Value) -> Value:
    return atan2(w, w.apply("sqrt", w.fma(-x, x, 1.0)), x)


# Error functions


def _scaled_erfc(w: Writer, x: Value) -> Value:
    """Return ``exp(x²) erfc(x)`` of numbers not below zero."""
    size = _within(w, x, None, 1e17)
    u = (2.0 * size) / (size + ERFC_CENTER)
    rest = u * polynomial(w, SCALED_ERFC, u - 1.0)
    above, below = 1.0 + rest, 1.0 + 2.0 * x
    inverse = 1.0 / below
    found = above * inverse
    # What sums and quotient have lost.
    second = below - 2.0 * x
    below_low = (2.0 * x - (below - second)) + (1.0 - second)
    lost = w.fma(-found, below, above) + (((1.0 - above) + rest) - found * below_low)
    return w.select(x < 1e300, w.fma(lost, inverse, found), found)


def _exp_of_square(w: Writer, x: Value, sign: float) -> Value:
    """Return ``exp(x²)`` or ``exp(-x²)`` of numbers with a finite square."""
    high = x * x
    return exp(w, sign * high, sign * w.fma(x, x, -high))


def _erf_core(w: Writer, x: Value) -> Value:
    return w.fma(x, polynomial(w, ERF, x * x), x)


def _erfc_of_size(w: Writer, x: Value) -> Value:
    size = _within(w, abs(x), None, 30.0)
    return _scaled_erfc(w, size) * _exp_of_square(w, size, -1.0)


def erf(w: Writer, x: Value) -> Value:
    found = w.apply("copysign", 1.0 - _erfc_of_size(w, x), x)
    return w.select(abs(x) < 1.0, _erf_core(w, x), found)


def erfc(w: Writer, x: Value) -> Value:
    tail = _erfc_of_size(w, x)
    found = w.select(x < 0.0, 2.0 - tail, tail)
    return w.select(abs(x) < 0.5, 1.0 - _erf_core(w, x), found)


def erfcx(w: Writer, x: Value) -> Value:
    """Return ``exp(x²) erfc(x)``."""
    found = _scaled_erfc(w, abs(x))
    left = 2.0 * _exp_of_square(w, _within(w, x, -30.0, 0.0), 1.0) - found
    return w.select(x < 0.0, left, found)


# Remainders


def fmod(w: Writer, x: Value, y: Value) -> Value:
    size, unit = abs(x), abs(y)
    quotient = w.apply("trunc", size / unit)
    left = w.fma(-quotient, unit, size)
    left = w.apply("copysign", w.select(left < 0.0, left + unit, left), x)
    certain = (quotient < 2.0 ** FORMATS[x.type.dtype].mantissa) & (unit < inf)
    return _unless(w, ~certain, left, "fmod", x, y)


# As functions of kernels

_BY_NAME: dict[str, Callable[..., Value]] = {
    "acos": acos,
    "asin": asin,
    "atan": lambda w, x: atan2(w, x, w.constant(1.0, x.type)),
    "atan2": atan2,
    "cos": _circular("cos", 1),
    "erf": erf,
    "erfc": erfc,
    "erfcx": erfcx,
    "exp": exp,
    "exp2": exp2,
    "expm1": expm1,
    "fmod": fmod,
    "log": log,
    "log10": _log_of(LOG10_E),
    "log1p": log1p,
    "logaddexp": logaddexp,
    "log2": _log_of(LOG2_E),
    "power": power,
    "sigmoid": sigmoid,
    "sin": _circular("sin", 0),
    "softplus": softplus,
    "tan": tan,
    "tanh": tanh,
}
NAMES = frozenset(_BY_NAME)
_ANGLES = ("acos", "asin", "atan", "atan2", "cos", "sin", "tan")
_IN_DOUBLE = (*_ANGLES, "erf", "erfc", "erfcx", "exp2", "log10", "log2", "power")  # of float32, too
_OF_TWO = ("atan2", "fmod", "logaddexp", "power")


@cache
def vector_function(name: str, dtype: str, lanes: int = 1) -> Function:
    """Return one of `NAMES` as a function of a kernel."""
    kind = Type(dtype, lanes)
    types = [kind] * (2 if name in _OF_TWO else 1)
    whole = f"scanlib_{name}_{dtype}" + (f"x{lanes}" if lanes > 1 else "")

    def write(w: Writer, *values: Value) -> Value:
        wide = "float64" if name in _IN_DOUBLE else dtype
        return w.cast(_BY_NAME[name](w, *(w.cast(value, wide) for value in values)), dtype)

    return write_function(whole, types, write)


def compute(w: Writer, name: str, *values: Value) -> Value:
    """Write the call of one of `NAMES`, on as many lanes as the values have."""
    kind = values[0].type
    return w.call(vector_function(name, kind.dtype, kind.lanes), *values)[0]
