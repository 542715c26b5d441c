"""Coefficients that a step does not compute: products and sums of those that it does.

``(h · a) · b`` has the coefficient ``a b``, which may give another value than the step: zero with
``a = b = 1e-200`` and ``h = 1e300``, and no infinity with ``a = h = 1e200``, ``b = 1e-200``. So
what a step meets on the way is compared with bounds. Outside of them the coefficient is infinite,
which no kernel composes: it runs such steps as they are written.

Within the bounds, products of what is met on the way with values that kernels trust (see
`scanlib.recurrences.trust`) do not overflow. What they lose to underflow is the
smallest number, times the other factors.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property, reduce

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Constant, Variable

from scanlib.recurrences.form import constant

# By the bits of a real number. Values that kernels compose are at most 2**800 and 2**100.
_MOST: dict[int, float] = {64: 2.0**200, 32: 2.0**25}
# Constants of this size leave others within their bounds if the product is.
_ORDINARY = 2.0**10


@dataclass(frozen=True)
class Coefficient:
    """What a state is multiplied by, one factor after the other.

    `partial` are products of the first factors, each of which must be within bounds; `zeros` are
    conditions of which one is true if the product really is zero, none if it cannot be anything
    else.
    """

    value: Variable
    partial: tuple[Variable, ...] = ()
    zeros: tuple[Variable, ...] = field(default=())

    def times(self, factor: Variable) -> "Coefficient":
        """Return the coefficient after one more factor."""
        product = ps.mul(self.value, factor)
        if not _may_leave_range(product) or (isinstance(factor, Constant) and factor.data == 0):
            return Coefficient(product)
        if _is_ordinary(factor, 1.0):
            return replace(self, value=product)
        if _is_ordinary(self.value, 1.0) and not self.partial:
            return Coefficient(product)
        partial, zeros = self.partial, self.zeros
        if not self.partial and not self.zeros and not isinstance(self.value, Constant):
            zeros = (_is_zero(self.value),)
        if not (_is_ordinary(factor) or _is_ordinary(self.value)):
            partial = (*partial, self.value)
        if not isinstance(factor, Constant):
            zeros = (*zeros, _is_zero(factor))
        return Coefficient(product, partial, zeros)

    @cached_property
    def guarded(self) -> Variable:
        """The product where it is what a step makes of its factors, else infinity."""
        if not self.partial and not self.zeros:
            return self.value
        most = _most(self.value)
        tests = [ps.le(ps.abs(value), _like(most, self.value)) for value in self.partial]
        kept = [ps.ge(ps.abs(value), _like(1 / most, self.value)) for value in self.partial]
        whole = reduce(ps.and_, [*kept, ps.invert(_is_zero(self.value))])
        return _where(reduce(ps.and_, [*tests, reduce(ps.or_, self.zeros, whole)]), self.value)


def added(one: Variable, two: Variable) -> Variable:
    """Return the sum of two coefficients where both are within bounds, else infinity."""
    total = ps.add(one, two)
    if not _may_leave_range(total) or _is_ordinary(one) or _is_ordinary(two):
        return total
    # If one is within its bounds and the sum is, so is the other.
    return _where(ps.le(ps.abs(one), _like(_most(total), total)), total)


def replaced(value: Variable | None, zero: Variable) -> Variable:
    """Return the coefficient of a state that is replaced by a value, or by nothing: `zero`.

    It is infinity where the value is -0.0, of which ``0 h`` and it are not the sum.
    """
    if value is None or np.dtype(zero.type.dtype).kind != "f":
        return zero
    if isinstance(value, Constant):
        return zero if value.data != 0 or not np.signbit(value.data) else _like(np.inf, zero)
    below = ps.lt(ps.reciprocal(value), _like(0, value))
    return _where(ps.invert(ps.and_(_is_zero(value), below)), zero)


def _may_leave_range(value: Variable) -> bool:
    return np.dtype(value.type.dtype).kind in "fc" and not isinstance(value, Constant)


def _most(value: Variable) -> float:
    dtype = np.dtype(value.type.dtype)
    bits = 8 * dtype.itemsize // (2 if dtype.kind == "c" else 1)
    return _MOST.get(bits, _MOST[32])


def _is_ordinary(value: Variable, least: float = 1 / _ORDINARY) -> bool:
    return isinstance(value, Constant) and bool(least <= np.abs(value.data) <= _ORDINARY)


def _is_zero(value: Variable) -> Variable:
    size = ps.abs(value) if value.type.dtype.startswith("complex") else value
    return ps.eq(size, _like(0, value))


def _like(number: float, value: Variable) -> Variable:
    return constant(number, np.zeros((), value.type.dtype).real.dtype.name)


def _where(condition: Variable, value: Variable) -> Variable:
    return ps.switch(condition, value, constant(np.inf, value.type.dtype))
