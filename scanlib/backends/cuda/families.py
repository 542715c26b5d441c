"""Recurrences that a kernel composes: functions of one state, closed under composition.

Functions of one step, and of several steps one after the other, are a few numbers each: of one step
the elements of the recurrence, or what is `neutral`, and zeros, as many as there are `bounds`. A
`Family` writes

``then(w, first, later, one)``
    those of the function that does `first`, then `later`, which is `one` step or several;
``of(w, f, h)``
    the function's value;
``trusted(w, f, before, after)``
    whether `after`, its value at `before`, is what single steps give;
``moderate(w, h)``
    whether a value is so far from overflow that no composition that leads there can have hidden
    one.

NaN stays NaN, unless a step `forgets` a value: it then chooses another one, and the first of its
numbers is zero. Composed coefficients may leave the range of their dtype where single steps do not.
A result that is not trusted is thrown away, and the steps are done one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.scalar.basic as ps
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors

from scanlib.backends.cuda.scalar_code import computed
from scanlib.kernels.elementary import FORMATS, vector_function
from scanlib.kernels.language import Value, Writer
from scanlib.kernels.scalars import PAIR_RULES, RULES, Number, Pair, pair_product, parts_of
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan, Recurrence

Numbers = tuple[Any, ...]  # each real or complex
# Below these no product of a few numbers overflows.
LARGE = {"float32": 2.0**100, "float64": 2.0**900}


def size(x: Number) -> Value:
    """Return a bound of a number's size, at most twice as large."""
    return abs(x.real) + abs(x.imag) if isinstance(x, Pair) else abs(x)


def times(w: Writer, x: Number, y: Number) -> Number:
    if isinstance(x, Pair) and isinstance(y, Pair):
        return pair_product(w, x, y)
    assert isinstance(x, Value)
    return x * y


def times_plus(w: Writer, x: Number, y: Number, z: Number) -> Number:
    """Return ``x y + z``, rounded once where numbers are real."""
    if isinstance(x, Pair):
        return PAIR_RULES[ps.Add](w, times(w, x, y), z)
    assert isinstance(y, Value)
    assert isinstance(z, Value)
    return w.fma(x, y, z) if x.type.is_float else x * y + z


def is_some(w: Writer, x: Number) -> Value:
    """Return whether a number is not zero."""
    return x.real.differs(0) | x.imag.differs(0) if isinstance(x, Pair) else x.differs(0)


def is_nan(w: Writer, x: Number) -> Value:
    """Return whether a number is nothing but NaN: a complex one may have a part that is none."""
    if isinstance(x, Pair):
        return x.real.differs(x.real) & x.imag.differs(x.imag)
    return x.differs(x)


def below(w: Writer, x: Value) -> Value:
    return x <= LARGE[x.type.dtype]


# h -> a h + b. Products of coefficients below one vanish in time, and should: but what has been
# lost must not matter. Two more numbers bound the errors of `a` and `b` from underflow.


def affine_then(w: Writer, first: Numbers, later: Numbers, one: bool) -> Numbers:
    a, b, lost_a, lost_b = first
    c, d, lost_c, lost_d = later
    form = FORMATS[lost_a.type.dtype]
    least = 2.0 ** (1 - form.bias)  # smaller numbers lose digits
    product, scale = times(w, c, a), size(c)
    under = (size(product) < least) & is_some(w, a) & is_some(w, c)
    new = w.select(under, w.constant(least, lost_a.type), 0.0)
    if one:
        return product, times_plus(w, c, b, d), w.fma(scale, lost_a, new), scale * lost_b
    lost_a, lost_b = (
        w.fma(scale, lost, w.fma(lost_c, size(own) + lost, more))
        for lost, own, more in ((lost_a, a, new), (lost_b, b, lost_d))
    )
    return product, times_plus(w, c, b, d), lost_a, lost_b


def affine_trusted(w: Writer, f: Numbers, before: Number, after: Number) -> Value:
    a, b, lost_a, lost_b = f
    digit = 2.0 ** -(FORMATS[lost_a.type.dtype].mantissa + 1)  # the relative error of rounding
    shown = w.fma(lost_a, size(before), lost_b) <= digit * size(after)
    return below(w, size(a)) & below(w, size(b)) & below(w, size(after)) & shown


# The same for integers, which wrap around and lose nothing.


def whole_then(w: Writer, first: Numbers, later: Numbers, one: bool) -> Numbers:
    (a, b), (c, d) = first, later
    return times(w, c, a), times_plus(w, c, b, d)


# h -> log(exp(h + a) + exp(b))


def logaddexp(w: Writer, x: Any, y: Any) -> Value:
    (result,) = w.call(vector_function("logaddexp", x.type.dtype, x.type.lanes), x, y)
    return result


def logs_then(w: Writer, first: Numbers, later: Numbers, one: bool) -> Numbers:
    (a, b), (c, d) = first, later
    return a + c, logaddexp(w, b + c, d)


def logs_of(w: Writer, f: Numbers, h: Any) -> Value:
    return logaddexp(w, h + f[0], f[1])


def logs_moderate(w: Writer, h: Any) -> Value:
    return below(w, h) & (below(w, -h) | h.equals(-np.inf))


def logs_trusted(w: Writer, f: Numbers, before: Number, after: Number) -> Value:
    return logs_moderate(w, f[0]) & logs_moderate(w, f[1]) & logs_moderate(w, after)


@dataclass(frozen=True)
class Family:
    """What is written for a family; see the head of this module."""

    then: Callable[[Writer, Numbers, Numbers, bool], Numbers]
    of: Callable[[Writer, Numbers, Number], Number]
    trusted: Callable[[Writer, Numbers, Number, Number], Value] | None = None
    moderate: Callable[[Writer, Number], Value] | None = None
    bounds: int = 0  # numbers beside those of the elements, real
    neutral: tuple[float, ...] = (1, 0)


def extremes(op: type) -> Family:
    """Return the family of h -> max(h, b) or min(h, b); NaN wins, as in a single step."""
    rule = RULES[op]
    return Family(
        then=lambda w, first, later, one: (rule(w, first[0], later[0]),),
        of=lambda w, f, h: rule(w, h, f[0]),
        neutral=(),
    )


AFFINE = Family(
    affine_then,
    of=lambda w, f, h: times_plus(w, f[0], h, f[1]),
    trusted=affine_trusted,
    moderate=lambda w, h: below(w, size(h)),
    bounds=2,
)
WHOLE = Family(whole_then, of=lambda w, f, h: times_plus(w, f[0], h, f[1]))
LOGS = Family(logs_then, logs_of, logs_trusted, logs_moderate, neutral=(0, -np.inf))
EXTREMES = {"maximum": extremes(ps.ScalarMaximum), "minimum": extremes(ps.ScalarMinimum)}


@dataclass(frozen=True)
class Composed:
    """A recurrence that a kernel composes.

    Attributes
    ----------
    part : int
        The state or carry: states count first.
    dtype : str
        Of the state.
    family : Family
    inputs : list of Variable
        A copy of the body's inputs.
    elements : list of (Variable or float)
        What `Family.make` takes; a number where the recurrence leaves one out.
    """

    part: int
    dtype: str
    family: Family
    inputs: list[Variable]
    elements: list[Variable | float]

    @property
    def members(self) -> list[str]:
        """The dtypes of the numbers of a composed function."""
        real = parts_of(computed(self.dtype)) or self.dtype
        return [self.dtype] * len(self.elements) + [real] * self.family.bounds


def composed_recurrences(op: ElemwiseScan) -> list[Composed] | None:
    """Return the recurrences of a loop, None if a kernel cannot compose its steps.

    It can where every recurrent part is of one of the families above, one step deep, and what
    selects its function depends on no recurrent part.
    """
    signature = op.signature
    parts = {part for recurrence in op.recurrences for part in recurrence.parts}
    carried = {i for i, is_sum in enumerate(op.layout.sums) if not is_sum}
    needed = set(range(signature.n_states)) | {signature.n_states + i for i in carried}
    if not op.recurrences or parts != needed or any(taps != (-1,) for taps in signature.taps):
        return None
    found = [_composed(op, number) for number in range(len(op.recurrences))]
    return [one for one in found if one is not None] if None not in found else None


def _composed(op: ElemwiseScan, number: int) -> Composed | None:
    recurrence = op.recurrences[number]
    if len(recurrence.parts) != 1:
        return None
    (part,) = recurrence.parts
    terms = recurrence.terms[0]
    if len(terms) != 1 or terms[0].tap != -1:
        return None
    inputs, outputs, scanned = op.elements_of(number)
    inner = op.signature.split_body_inputs(inputs)
    recurrent = {tap for taps in inner.taps for tap in taps} | set(inner.carries)
    if scanned or not recurrent.isdisjoint(ancestors(outputs)):
        return None
    results = op.signature.split_body_outputs(op.body.outputs)
    dtype = [*results.states, *results.carries][part].type.dtype
    family = _family(recurrence.family, dtype)
    if family is None:
        return None
    return Composed(part, dtype, family, inputs, _elements(recurrence, family, outputs))


def _family(name: str, dtype: str) -> Family | None:
    kind = np.dtype(dtype).kind
    if name == "affine" and kind in "fc":
        return AFFINE
    if name == "affine" and kind in "iu":
        return WHOLE
    if name == "log-affine" and kind == "f":
        return LOGS
    return EXTREMES.get(name) if kind in "fiu" else None


def _elements(
    recurrence: Recurrence, family: Family, outputs: list[Variable]
) -> list[Variable | float]:
    """Return what `Family.make` takes; what the recurrence leaves out is neutral."""
    constant = recurrence.constants[0]
    if not family.neutral:
        assert constant is not None
        return [outputs[constant]]
    (term,) = recurrence.terms[0]
    pairs = zip((term.coefficient, constant), family.neutral, strict=True)
    return [otherwise if k is None else outputs[k] for k, otherwise in pairs]
