"""When functions composed of many steps are trusted: what they have lost on the way.

For schedules that compose steps of a single channel one by one, as on GPUs; scans in registers have
bounds of their own (`scanlib.recurrences.trust`). A composed function is the numbers that select
it, and after them bounds of what these have lost. NaN stays NaN, unless a step chooses another
value: then the first of its numbers is zero. Composed coefficients may leave the range of their
dtype where single steps do not. A result that is not trusted is thrown away, and the steps are
taken one after the other.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.scalar.basic as ps

from scanlib.kernels.elementary import FORMATS, compute
from scanlib.kernels.language import Value, Writer
from scanlib.kernels.scalars import RULES, Number, Pair
from scanlib.recurrences.block_scans import Arithmetic

Numbers = tuple[Any, ...]  # each real or complex
# Below these no product of a few numbers overflows.
LARGE = {"float32": 2.0**100, "float64": 2.0**900}


class ScalarArithmetic(Arithmetic):
    """What formulas of recurrence classes are written with, as a single step computes it."""

    def maximum(self, a: Value, b: Value) -> Value:
        return RULES[ps.ScalarMaximum](self.w, a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        return RULES[ps.ScalarMinimum](self.w, a, b)

    def logaddexp(self, a: Value, b: Value) -> Value:
        return compute(self.w, "logaddexp", a, b)


def size(x: Number) -> Value:
    """Return a bound of a number's size, at most twice as large."""
    return abs(x.real) + abs(x.imag) if isinstance(x, Pair) else abs(x)


def is_some(x: Number) -> Value:
    """Return whether a number is not zero."""
    return x.real.differs(0) | x.imag.differs(0) if isinstance(x, Pair) else x.differs(0)


def is_nan(x: Number) -> Value:
    """Return whether a number is nothing but NaN: a complex one may have a part that is none."""
    if isinstance(x, Pair):
        return x.real.differs(x.real) & x.imag.differs(x.imag)
    return x.differs(x)


def below(x: Value) -> Value:
    return x <= LARGE[x.type.dtype]


@dataclass(frozen=True)
class Trust:
    """When a composed function is what single steps give.

    `trusted` takes a writer, a function, a value and what it makes of that, and says whether it is
    right; `moderate` whether a value is so far from overflow that no composition that leads there
    can have hidden one. `losses` takes a function, a later one and whether that is a single step to
    bounds of what the numbers of both in a row have lost: `bounds` real numbers, which come after
    those that select a function.
    """

    trusted: Callable[[Writer, Numbers, Number, Number], Value]
    moderate: Callable[[Any], Value]
    losses: Callable[[Writer, Numbers, Numbers, bool], Numbers] | None = None
    bounds: int = 0


# Products of coefficients below one vanish in time, and should: but what has been lost must not
# matter. Two bounds, of the errors of `a` and `b` in ``a h + b`` from underflow.


def _affine_losses(w: Writer, first: Numbers, later: Numbers, one: bool) -> Numbers:
    a, b, lost_a, lost_b = first
    c, _, lost_c, lost_d = later
    form = FORMATS[lost_a.type.dtype]
    least = 2.0 ** (1 - form.bias)  # smaller numbers lose digits
    scale = size(c)
    under = (size(c * a) < least) & is_some(a) & is_some(c)
    new = w.select(under, w.constant(least, lost_a.type), 0.0)
    if one:
        return w.fma(scale, lost_a, new), scale * lost_b
    return tuple(
        w.fma(scale, lost, w.fma(lost_c, size(own) + lost, more))
        for lost, own, more in ((lost_a, a, new), (lost_b, b, lost_d))
    )


def _affine_trusted(w: Writer, f: Numbers, before: Number, after: Number) -> Value:
    a, b, lost_a, lost_b = f
    digit = 2.0 ** -(FORMATS[lost_a.type.dtype].mantissa + 1)  # the relative error of rounding
    shown = w.fma(lost_a, size(before), lost_b) <= digit * size(after)
    return below(size(a)) & below(size(b)) & below(size(after)) & shown


def _logs_moderate(h: Any) -> Value:
    return below(h) & (below(-h) | h.equals(-np.inf))


def _logs_trusted(w: Writer, f: Numbers, before: Number, after: Number) -> Value:
    return _logs_moderate(f[0]) & _logs_moderate(f[1]) & _logs_moderate(after)


TRUST = {
    "affine": Trust(_affine_trusted, lambda h: below(size(h)), _affine_losses, bounds=2),
    "log-affine": Trust(_logs_trusted, _logs_moderate),
}
