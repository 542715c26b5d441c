"""What PyTensor's scalar Ops mean, as statements of kernels.

One table for all targets: `RULES` has, by the class of an Op, a function that writes it, given its
operands in the dtype of its result. The values are NumPy's, NaN and overflow included; integers
divided by zero give zero. Complex numbers are pairs of floats, which the language does not know:
they have a table of their own.

To add an Op, add a line. What no line is for is a call of a function that the target brings
(`Scalars.outside`), or has no kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from math import log as natural_log
from math import pi
from typing import Any

import numpy as np
import pytensor.scalar.basic as ps
import pytensor.scalar.math as psm
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.scalar.basic import Composite
from pytensor.scalar.loop import ScalarLoop

from scanlib._compat import ANGLE, DEG2RAD, RAD2DEG
from scanlib.kernels import language
from scanlib.kernels.elementary import NAMES, compute
from scanlib.kernels.language import BOOL, DTYPES, FLOATS, INT64, INTEGERS, Type, Value, Writer
from scanlib.kernels.processor import has_fused_multiply_add
from scanlib.ops.logaddexp import LogAddExp


class NoKernelError(NotImplementedError):
    """A body has an operation or a dtype that kernels do not have; the message names it, `node` is
    where it is, if that is known."""

    node: Apply | None = None


class LanesError(Exception):
    """An operation exists for single numbers only."""


@dataclass(frozen=True)
class Pair:
    """A complex number."""

    real: Value
    imag: Value

    def __add__(self, other: Pair) -> Pair:
        return Pair(self.real + other.real, self.imag + other.imag)

    def __mul__(self, other: Pair) -> Pair:
        x, y = self, other
        return Pair(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real)


Number = Value | Pair


def real(number: Number) -> Value:
    """Return a number that is known not to be complex."""
    assert isinstance(number, Value)
    return number


def parts(value: Number) -> list[Value]:
    """Return the parts of a number that may be complex."""
    return [value.real, value.imag] if isinstance(value, Pair) else [value]


def each_part(function: Callable[..., Value], *numbers: Number) -> Number:
    """Return what a function makes of numbers, or, one by one, of the parts of complex ones."""
    found = [function(*own) for own in zip(*map(parts, numbers), strict=True)]
    return Pair(*found) if len(found) == 2 else found[0]


Rule = Callable[..., Any]


def parts_of(dtype: str) -> str | None:
    """Return the dtype of the parts of complex numbers, None for others; `NoKernelError` for what
    kernels do not have."""
    if dtype in ("complex64", "complex128"):
        return "float32" if dtype == "complex64" else "float64"
    if dtype not in DTYPES:
        raise NoKernelError(f"kernels have no numbers of dtype {dtype}")
    return None


def limit(dtype: str, largest: bool) -> float:
    """Return the number that no other one of a real dtype is above, or below."""
    kind = np.dtype(dtype).kind
    if kind == "f":
        return np.inf if largest else -np.inf
    if kind == "b":
        return largest
    return int(np.iinfo(dtype).max if largest else np.iinfo(dtype).min)


def added(x: Number, y: Number) -> Number:
    """Return the sum of two numbers of one dtype; that of truth values says whether one is true."""
    if isinstance(x, Pair) and isinstance(y, Pair):
        return x + y
    one, other = real(x), real(y)
    return one | other if one.type.dtype == "bool" else one + other


def multiplied(x: Number, y: Number) -> Number:
    """Return the product of two numbers of one dtype; truth values say whether both are true."""
    if isinstance(x, Pair) and isinstance(y, Pair):
        return x * y
    one, other = real(x), real(y)
    return one & other if one.type.dtype == "bool" else one * other


def times_plus(w: Writer, x: Number, y: Number, z: Number) -> Number:
    """Return ``x y + z`` of numbers of one dtype: of floats, each product is rounded with a sum."""
    if isinstance(x, Pair) and isinstance(y, Pair) and isinstance(z, Pair):
        first = w.fma(x.real, y.real, w.fma(-x.imag, y.imag, z.real))
        return Pair(first, w.fma(x.real, y.imag, w.fma(x.imag, y.real, z.imag)))
    one, other, addend = map(real, (x, y, z))
    return w.fma(one, other, addend) if one.type.is_float else one * other + addend


# Numbers of one dtype


def _fold(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of an Op of any number of operands, taken two at a time."""
    return lambda w, *values: reduce(lambda x, y: rule(w, x, y), values)


def _extreme(operation: str) -> Callable[..., Value]:
    """Return the rule of a maximum, ``"gt"``, or a minimum; NaN wins."""

    def first_or_second(w: Writer, x: Value, y: Value) -> Value:
        if x.type.dtype == "bool":
            return w.select(w.apply(operation, w.cast(x, "int8"), w.cast(y, "int8")), x, y)
        chosen = w.apply(operation, x, y)
        return w.select(chosen | x.differs(x) if x.type.is_float else chosen, x, y)

    return _fold(first_or_second)


def _absolute(w: Writer, x: Value) -> Value:
    if x.type.is_float:
        return abs(x)
    return w.select(x < 0, -x, x) if x.type.is_signed else x


def _sign(w: Writer, x: Value) -> Value:
    zero = w.constant(0, x.type)
    if x.type.is_float:
        rest = w.select(x.equals(0.0), zero, x)  # NaN is no number's sign
        return w.select(x > 0.0, 1.0, w.select(x < 0.0, -1.0, rest))
    below = w.select(x < 0, -1, zero) if x.type.is_signed else zero
    return w.select(x > 0, 1, below)


def _divisor(w: Writer, x: Value, y: Value) -> tuple[Value, Value]:
    """Return a divisor that integers can be divided by, and whether the given one is."""
    usable = y.differs(0)
    if x.type.is_signed:
        usable = usable & y.differs(-1)  # the least number over minus one would overflow
    return w.select(usable, y, 1), usable


def _floor_quotient(w: Writer, x: Value, y: Value, of_floats: Rule) -> Value:
    if x.type.is_float:
        return _float_divmod(w, x, y, of_floats)[0]
    divisor, _ = _divisor(w, x, y)
    q = w.apply("quotient", x, divisor)
    if x.type.is_signed:
        rest = w.apply("remainder", x, divisor)
        q = w.select(rest.differs(0) & ((rest < 0) ^ (divisor < 0)), q - 1, q)
        q = w.select(y.equals(-1), -x, q)
    return w.select(y.equals(0), 0, q)


def _modulo(w: Writer, x: Value, y: Value, of_floats: Rule) -> Value:
    if x.type.is_float:
        return _float_divmod(w, x, y, of_floats)[1]
    divisor, usable = _divisor(w, x, y)
    rest = w.apply("remainder", x, divisor)
    if x.type.is_signed:
        rest = w.select(rest.differs(0) & ((rest < 0) ^ (divisor < 0)), rest + divisor, rest)
    return w.select(usable, rest, 0)


def _float_divmod(w: Writer, x: Value, y: Value, remainder: Rule) -> tuple[Value, Value]:
    """Return the floor of a quotient and what is left, as Python and NumPy define them."""
    left = remainder(w, x, y)
    quotient = (x - left) / y
    wrong = left.differs(0.0) & ((y < 0.0) ^ (left < 0.0))
    rest = w.select(wrong, left + y, left)
    rest = w.select(rest.equals(0.0), w.apply("copysign", rest, y), rest)
    quotient = w.select(wrong, quotient - 1.0, quotient)
    floor = w.apply("floor", quotient)
    floor = w.select(quotient - floor > 0.5, floor + 1.0, floor)
    zero = w.apply("copysign", w.constant(0.0, x.type), x / y)
    floor = w.select(quotient.equals(0.0), zero, floor)
    return w.select(y.equals(0.0), x / y, floor), w.select(y.equals(0.0), left, rest)


def _whole_power(x: Value, power: int) -> Value:
    """Multiply squares of squares."""
    if power == 1:
        return x
    half = _whole_power(x, power // 2)
    return half * half * x if power % 2 else half * half


def _root(w: Writer, x: Value) -> Value:
    """Return the root as a power has it: without a sign of zero, and infinite for `-inf`."""
    return w.select(x.equals(-np.inf), np.inf, abs(w.apply("sqrt", x)))


def _power_of_two(w: Writer, bits: int, x: Value, y: Value) -> Value:
    """Return ``x**y`` of ``x = 2**bits``, a shift; powers that the dtype does not hold are zero."""
    if not bits:
        return x
    too_large = y >= -(-8 * x.type.itemsize // bits)
    unit, shift = w.constant(1, x.type), w.select(too_large | (y < 0), 0, y) * bits
    return w.select(too_large, 0, unit << shift)


MOST_FACTORS = 64  # of a power with a known exponent: more would lose digits


def _power(w: Writer, x: Value, y: Value, of_floats: Rule) -> Value:
    if x.type.is_float:
        power = float(y.value) if isinstance(y, language.Constant) and not y.value.ndim else 0.0
        if not ((2 * power).is_integer() and 0 < abs(power) <= MOST_FACTORS):
            return of_floats(w, x, y)
        whole, half = divmod(abs(power), 1.0)
        result = _root(w, x) if half else _whole_power(x, int(whole))
        if half and whole:
            result = _whole_power(abs(x), int(whole)) * result
        return 1.0 / result if power < 0 else result
    known = int(x.value) if isinstance(x, language.Constant) and not x.value.ndim else 0
    if known > 0 and known.bit_count() == 1:
        return _power_of_two(w, known.bit_length() - 1, x, y)
    if x.type.lanes > 1:
        raise LanesError("powers of integers")
    # Squares of squares, one for each bit of the exponent.
    unsigned = f"uint{8 * x.type.itemsize}"
    result, base = w.local(1, x.type), w.local(x)
    rest = w.local(w.bitcast(y, unsigned) if y.type.is_signed else y)
    if y.type.is_signed:
        w.assign(rest, w.select(y < 0, 0, w.copy(rest)))
    with w.loop_while(lambda: w.copy(rest).differs(0)):
        factor = w.copy(base)
        odd = (w.copy(rest) & 1).differs(0)
        w.assign(result, w.copy(result) * w.select(odd, factor, 1))
        w.assign(base, factor * factor)
        w.assign(rest, w.copy(rest) >> 1)
    return w.copy(result)


def _round_away(w: Writer, x: Value) -> Value:
    size = abs(x)
    whole = w.apply("trunc", size)
    whole = w.select(size - whole >= 0.5, whole + 1.0, whole)
    return w.apply("copysign", whole, x)


def _operation(name: str) -> Rule:
    return lambda w, *values: w.apply(name, *values)


def library(w: Writer, symbol: str, *values: Value) -> Value:
    """Write a call of the C library; `LanesError` on several lanes."""
    if values[0].type.lanes > 1:
        raise LanesError(symbol)
    kind = values[0].type
    name = symbol + ("f" if kind.dtype == "float32" else "")
    return w.call(name, *values, result=kind)[0]


def _library(symbol: str) -> Rule:
    return lambda w, *values: library(w, symbol, *values)


def _vector(name: str) -> Rule:
    return lambda w, *values: compute(w, name, *values)


def _log1mexp(w: Writer, x: Value) -> Value:
    """Write ``log(1 - exp(x))``: whichever of two forms loses no digits."""
    near = compute(w, "log", -compute(w, "expm1", x))
    far = compute(w, "log1p", -compute(w, "exp", x))
    return w.select(x < -natural_log(2.0), far, near)


def _tri_gamma(w: Writer, x: Value) -> Value:
    """Write ``Σ_k 1 / (x + k)²``: ten terms, and the asymptotic series (of Bernoulli numbers) of
    those behind them; left of one half by the reflection ``π² / sin²(π x)``."""
    below = x < 0.5
    first = w.select(below, 1.0 - x, x)
    found = 1.0 / (first * first)
    for k in range(1, 10):
        term = first + float(k)
        found = found + 1.0 / (term * term)
    inverse = 1.0 / (first + 10.0)
    square = inverse * inverse
    series = square * (-691 / 2730)
    for number in (5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6):
        series = (series + number) * square
    found = found + inverse * (series + 0.5 * inverse + 1.0)
    ratio = pi / library(w, "sin", (x - w.apply("rint", x)) * pi)
    return w.select(below, ratio * ratio - found, found)


# By Op: all operands have the dtype of the result.
RULES: dict[type, Rule] = {
    ps.Add: _fold(lambda w, x, y: added(x, y)),
    ps.Mul: _fold(lambda w, x, y: multiplied(x, y)),
    ps.Sub: lambda w, x, y: x - y,
    ps.Neg: lambda w, x: -x,
    ps.Sqr: lambda w, x: multiplied(x, x),
    ps.Abs: _absolute,
    ps.Sign: _sign,
    **dict.fromkeys((ps.Maximum, ps.ScalarMaximum), _extreme("gt")),
    **dict.fromkeys((ps.Minimum, ps.ScalarMinimum), _extreme("lt")),
    ps.Clip: lambda w, x, low, high: w.select(x < low, low, w.select(x > high, high, x)),
    ps.Second: lambda w, x, y: y,
    ps.Identity: lambda w, x: x,
    ps.Cast: lambda w, x: x,
    ps.Conj: lambda w, x: x,
    ps.Real: lambda w, x: x,
    ps.IntDiv: partial(_floor_quotient, of_floats=_library("fmod")),
    ps.Mod: partial(_modulo, of_floats=_library("fmod")),
    ps.Pow: partial(_power, of_floats=_library("pow")),
    ps.AND: _fold(lambda w, x, y: x & y),
    ps.OR: _fold(lambda w, x, y: x | y),
    ps.XOR: _fold(lambda w, x, y: x ^ y),
    ps.Invert: lambda w, x: ~x,
}


# By Op: results that are floats; operands have the dtype of the result.
FLOAT_RULES: dict[type, Rule] = {
    ps.TrueDiv: lambda w, x, y: x / y,
    ps.Reciprocal: lambda w, x: 1.0 / x,
    ps.Sqrt: _operation("sqrt"),
    ps.Ceil: _operation("ceil"),
    ps.Floor: _operation("floor"),
    ps.Trunc: _operation("trunc"),
    ps.RoundHalfToEven: _operation("rint"),
    ps.RoundHalfAwayFromZero: _round_away,
    ps.Exp: _vector("exp"),
    ps.Expm1: _vector("expm1"),
    ps.Log: _vector("log"),
    ps.Log1p: _vector("log1p"),
    ps.Tanh: _vector("tanh"),
    psm.Sigmoid: _vector("sigmoid"),
    psm.Softplus: _vector("softplus"),
    psm.Log1mexp: _log1mexp,
    LogAddExp: _vector("logaddexp"),
    psm.TriGamma: _tri_gamma,
}

if DEG2RAD is not None and RAD2DEG is not None:
    FLOAT_RULES[DEG2RAD] = lambda w, x: x * (pi / 180.0)
    FLOAT_RULES[RAD2DEG] = lambda w, x: x * (180.0 / pi)

# By Op: functions of the C library.
LIBRARY: dict[type, str] = {
    ps.Exp2: "exp2",
    ps.Log2: "log2",
    ps.Log10: "log10",
    ps.Cos: "cos",
    ps.Sin: "sin",
    ps.Tan: "tan",
    ps.ArcCos: "acos",
    ps.ArcSin: "asin",
    ps.ArcTan: "atan",
    ps.ArcTan2: "atan2",
    ps.Cosh: "cosh",
    ps.Sinh: "sinh",
    ps.ArcCosh: "acosh",
    ps.ArcSinh: "asinh",
    ps.ArcTanh: "atanh",
    psm.Erf: "erf",
    psm.Erfc: "erfc",
}
FLOAT_RULES |= {kind: _library(name) for kind, name in LIBRARY.items()}

# By Op: rules for numbers that lie side by side, for which the C library has no functions. Where
# a step waits for one number alone, these take longer than its own.
SIDE_BY_SIDE: dict[type, Rule] = {}
if has_fused_multiply_add():
    SIDE_BY_SIDE = {
        **{kind: _vector(name) for kind, name in LIBRARY.items() if name in NAMES},
        ps.IntDiv: partial(_floor_quotient, of_floats=_vector("fmod")),
        ps.Mod: partial(_modulo, of_floats=_vector("fmod")),
        ps.Pow: partial(_power, of_floats=_vector("power")),
        psm.Erfcx: _vector("erfcx"),
    }

# By Op: comparisons, of operands of the dtype that both have in common.
COMPARISONS: dict[type, str] = {
    ps.EQ: "eq",
    ps.NEQ: "ne",
    ps.LT: "lt",
    ps.LE: "le",
    ps.GT: "gt",
    ps.GE: "ge",
}


# Complex numbers


def _pair_quotient(w: Writer, x: Pair, y: Pair) -> Pair:
    """Divide by the larger part of the divisor first, so that its square does not overflow.

    R. L. Smith, "Algorithm 116: complex division", Communications of the ACM 5, 1962.
    """
    first = abs(y.real) >= abs(y.imag)
    large, small = w.select(first, y.real, y.imag), w.select(first, y.imag, y.real)
    ratio = small / large
    size = large + small * ratio
    real = w.select(first, x.real + x.imag * ratio, x.real * ratio + x.imag)
    imag = w.select(first, x.imag - x.real * ratio, x.imag * ratio - x.real)
    return Pair(real / size, imag / size)


# By Op, complex result: operands are complex.
PAIR_RULES: dict[type, Callable[..., Number]] = {
    **{kind: RULES[kind] for kind in (ps.Add, ps.Mul, ps.Sqr, ps.Second, ps.Identity, ps.Cast)},
    ps.Sub: lambda w, x, y: each_part(operator.sub, x, y),
    ps.TrueDiv: _pair_quotient,
    ps.Neg: lambda w, x: each_part(operator.neg, x),
    ps.Conj: lambda w, x: Pair(x.real, -x.imag),
    ps.Reciprocal: lambda w, x: _pair_quotient(
        w, Pair(w.constant(1, x.real.type), w.constant(0, x.real.type)), x
    ),
}
# By Op, real result of one complex operand.
FROM_PAIRS: dict[type, Callable[[Writer, Pair], Value]] = {
    ps.Real: lambda w, x: x.real,
    ps.Imag: lambda w, x: x.imag,
    ps.Abs: lambda w, x: library(w, "hypot", x.real, x.imag),
}


if ANGLE is not None:
    FROM_PAIRS[ANGLE] = lambda w, x: library(w, "atan2", x.imag, x.real)

Outside = Callable[[Apply, list[Value]], list[Value]]


@dataclass(eq=False)
class Scalars:
    """Writes graphs of scalars into a kernel.

    `outside` writes a node that no rule is for, given its operands, or raises `NoKernelError`;
    `computed` are dtypes that are computed in others, by name. `side_by_side` says that there are
    several numbers, of which `lanes` are computed at once.
    """

    writer: Writer
    outside: Outside | None = None
    computed: Mapping[str, str] = field(default_factory=dict)
    lanes: int = field(default=1, init=False)
    side_by_side: bool = field(default=False, init=False)
    values: dict[Variable, Number] = field(default_factory=dict, init=False)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Forget, afterwards, what has become of variables."""
        values = dict(self.values)
        try:
            yield
        finally:
            self.values = values

    @contextmanager
    def taking(self, lanes: int) -> Iterator[None]:
        """Write for so many numbers at once; forget, afterwards, what has become of variables."""
        before = self.lanes, self.side_by_side
        self.lanes, self.side_by_side = lanes, True
        try:
            with self.scope():
                yield
        finally:
            self.lanes, self.side_by_side = before

    def bind(self, variable: Variable, value: Number) -> None:
        self.values[variable] = value

    def dtype(self, variable: Variable) -> str:
        """Return the dtype in which a variable is computed."""
        return self.computed.get(variable.type.dtype, variable.type.dtype)

    def number(self, variable: Variable) -> Number:
        """Return the value of a variable that is bound or constant."""
        if isinstance(variable, Constant):
            return self.constant(variable.data, self.dtype(variable))
        return self.values[variable]

    def constant(self, value: Any, dtype: str) -> Number:
        half, w = parts_of(dtype), self.writer
        if half is None:
            return w.constant(np.asarray(value).item(), Type(dtype, self.lanes))
        item, kind = complex(np.asarray(value).item()), Type(half, self.lanes)
        return Pair(w.constant(item.real, kind), w.constant(item.imag, kind))

    def emit(
        self, outputs: Iterable[Variable], special: Callable[[Apply], bool] = lambda node: False
    ) -> None:
        """Write the statements that compute `outputs` from what is bound.

        `special` may write and bind the outputs of a node that is no scalar Op; it returns whether
        it did.
        """
        bound = [variable for variable in self.values if not isinstance(variable, Constant)]
        for node in toposort(list(outputs), blockers=bound):
            if all(out in self.values for out in node.outputs) or special(node):
                continue
            results = self.apply(node, [self.number(inp) for inp in node.inputs])
            self.values.update(zip(node.outputs, results, strict=True))

    # One node

    def apply(self, node: Apply, inputs: list[Number]) -> list[Number]:
        """Write one node; return its results."""
        op, w = node.op, self.writer
        if isinstance(op, Composite):
            return self._composite(node, inputs)
        if isinstance(op, ScalarLoop):
            return self._loop(node, inputs)
        inputs = [self.spread(value) for value in inputs]
        dtypes = [self.dtype(variable) for variable in node.inputs]
        made = self.dtype(node.outputs[0])
        kind = type(op)
        if kind is ps.Switch:
            return [self._switch(node, inputs)]
        if kind in COMPARISONS:
            return [self._comparison(COMPARISONS[kind], inputs, dtypes)]
        if kind in (ps.IsNan, ps.IsInf):
            return [self._classified(kind is ps.IsNan, inputs[0], dtypes[0])]
        half = parts_of(made)
        if half is not None and kind is ps.Complex:
            return [Pair(*(self._value(value, half) for value in inputs))]
        if half is not None and kind in PAIR_RULES:
            pairs = [self.pair(value, half) for value in inputs]
            return [PAIR_RULES[kind](w, *pairs)]
        if half is None and any(isinstance(value, Pair) for value in inputs):
            if kind in FROM_PAIRS and isinstance(inputs[0], Pair):
                return [w.cast(FROM_PAIRS[kind](w, inputs[0]), made)]
            raise NoKernelError(f"{op} of complex numbers has no kernel")
        if half is None and kind is ps.Imag:
            return [w.constant(0, Type(made, self.lanes))]
        rule = RULES.get(kind)
        if rule is None and made in FLOATS:
            rule = FLOAT_RULES.get(kind)
        if self.side_by_side:
            rule = SIDE_BY_SIDE.get(kind, rule)
        no_numbers = made == "bool" and kind in _NO_TRUTHS
        no_bits = made in FLOATS and kind in _BITS
        if rule is None or half is not None or no_numbers or no_bits:
            return self._outside(node, inputs)
        return [rule(w, *(self._value(value, made) for value in inputs))]

    def _outside(self, node: Apply, inputs: list[Number]) -> list[Number]:
        values = [value for value in inputs if isinstance(value, Value)]
        if self.outside is None or len(values) < len(inputs):
            raise NoKernelError(f"{node.op} has no kernel")
        if self.lanes > 1:
            raise LanesError(str(node.op))
        return [*self.outside(node, values)]

    def _composite(self, node: Apply, inputs: list[Number]) -> list[Number]:
        graph = node.op.fgraph
        with self.scope():
            # Frozen graphs share variables: what stands around has the same names for others.
            self.values = dict(zip(graph.inputs, inputs, strict=True))
            self.emit(graph.outputs)
            return [self.number(out) for out in graph.outputs]

    def _loop(self, node: Apply, inputs: list[Number]) -> list[Number]:
        """Write a series: the values of each step from those before, until there are enough."""
        w, graph, steps = self.writer, node.op.fgraph, real(inputs[0])
        if self.lanes > 1 or any(isinstance(value, Pair) for value in inputs):
            raise LanesError(str(node.op))
        count = len(graph.outputs) - node.op.is_while
        results = [w.local(real(value)) for value in inputs[1 : 1 + count]]
        step, is_done = w.local(0, INT64), w.local(False, BOOL)
        with w.loop_while(lambda: (w.copy(step) < w.cast(steps, "int64")) & ~w.copy(is_done)):
            with self.scope():
                given: list[Number] = [*map(w.copy, results), *inputs[1 + count :]]
                self.values = dict(zip(graph.inputs, given, strict=True))
                self.emit(graph.outputs)
                found = [real(self.number(out)) for out in graph.outputs]
            for result, value in zip([*results, is_done], found, strict=False):
                w.assign(result, value)
            w.assign(step, w.copy(step) + 1)
        return [*map(w.copy, [*results, is_done][: len(graph.outputs)])]

    # Numbers of other dtypes

    def spread(self, value: Number) -> Number:
        """Return a number in as many lanes as are being written."""
        if parts(value)[0].type.lanes == self.lanes:
            return value
        return each_part(lambda part: self.writer.splat(part, self.lanes), value)

    def _value(self, value: Number, dtype: str) -> Value:
        """Return a real number as a dtype has it."""
        if isinstance(value, Pair):
            raise NoKernelError("a complex number is used as a real one")
        return self.convert(value, dtype)

    def convert(self, value: Value, dtype: str) -> Value:
        """Return a number as a dtype has it; what an integer cannot hold gives some integer."""
        w, old = self.writer, value.type
        parts_of(dtype)
        if not (old.is_float and dtype in INTEGERS):
            return w.cast(value, dtype)
        # As processors do it, that have one conversion: through 64 bits.
        if dtype == "uint64":
            # Numbers below zero wrap around.
            negative = (value < 0.0) & (value >= -(2.0**63))
            below = w.cast(w.cast(w.select(negative, value, 0.0), "int64"), dtype)
            inside = (value >= 0.0) & (value < 2.0**64)
            above = w.cast(w.select(inside, value, 0.0), dtype)
            least = w.constant(2**63, old.of(dtype))
            return w.select(inside, above, w.select(negative, below, least))
        inside = (value >= -(2.0**63)) & (value < 2.0**63)
        whole = w.cast(w.select(inside, value, 0.0), "int64")
        return w.cast(w.select(inside, whole, -(2**63)), dtype)

    def number_as(self, value: Number, dtype: str) -> Number:
        """Return a number as a dtype has it."""
        half = parts_of(dtype)
        return self._value(value, dtype) if half is None else self.pair(value, half)

    def pair(self, value: Number, half: str) -> Pair:
        """Return a number as a complex one whose parts have a dtype."""
        w = self.writer
        if isinstance(value, Pair):
            return Pair(w.cast(value.real, half), w.cast(value.imag, half))
        return Pair(w.cast(value, half), w.constant(0, value.type.of(half)))

    # Choices and comparisons

    def truth(self, value: Number) -> Value:
        """Return whether a number is not zero."""
        if isinstance(value, Pair):
            return value.real.differs(0) | value.imag.differs(0)
        return value if value.type.dtype == "bool" else self.writer.cast(value, "bool")

    def _switch(self, node: Apply, inputs: list[Number]) -> Number:
        made = self.dtype(node.outputs[0])
        choose = partial(self.writer.select, self.truth(inputs[0]))
        return each_part(choose, *(self.number_as(value, made) for value in inputs[1:]))

    def _comparison(self, operation: str, inputs: list[Number], dtypes: list[str]) -> Value:
        w = self.writer
        common = np.result_type(*dtypes).name
        half = parts_of(common)
        if half is not None:
            if operation not in ("eq", "ne"):
                raise NoKernelError("complex numbers have no order")
            first, second = (self.pair(value, half) for value in inputs)
            same = first.real.equals(second.real) & first.imag.equals(second.imag)
            return same if operation == "eq" else ~same
        kinds = {np.dtype(dtype).kind for dtype in dtypes}
        if kinds == {"i", "u"} and common == "float64":
            return self._mixed_comparison(operation, inputs, dtypes)
        if common == "bool" and operation not in ("eq", "ne"):
            common = "uint8"
        x, y = (self._value(value, common) for value in inputs)
        return w.apply(operation, x, y)

    def _mixed_comparison(self, operation: str, inputs: list[Number], dtypes: list[str]) -> Value:
        """Compare a signed integer with an unsigned one that no signed dtype holds."""
        w = self.writer
        x, y = map(real, inputs)
        if np.dtype(dtypes[0]).kind == "u":
            swapped = {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le"}.get(operation, operation)
            return self._mixed_comparison(swapped, [y, x], dtypes[::-1])
        sign = w.cast(x, "int64")
        negative = sign < 0
        found = w.apply(operation, w.cast(sign, "uint64"), w.cast(y, "uint64"))
        below = w.constant(operation in ("lt", "le", "ne"), found.type)
        return w.select(negative, below, found)

    def _classified(self, nan: bool, value: Number, dtype: str) -> Value:
        w = self.writer
        if isinstance(value, Pair):
            one, other = (self._classified(nan, own, own.type.dtype) for own in parts(value))
            return one | other
        if not value.type.is_float:
            return w.constant(False, value.type.of("bool"))
        return value.differs(value) if nan else abs(value).equals(float("inf"))


_BITS = (ps.AND, ps.OR, ps.XOR, ps.Invert)
# Operations that NumPy does not have for truth values, or has with another meaning.
_NO_TRUTHS = (ps.Clip, ps.Sub, ps.Neg, ps.Sign, ps.IntDiv, ps.Mod, ps.Pow)
