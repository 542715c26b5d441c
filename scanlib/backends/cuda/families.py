"""Recurrences that a kernel composes, and when what it composes is trusted.

Functions of one step, and of several steps one after the other, are a few numbers each: those that
select them (`scanlib.recurrences`), and bounds of what these have lost. NaN stays NaN, unless a step
chooses another value: then the first of its numbers is zero. Composed coefficients may leave the
range of their dtype where single steps do not. A result that is not trusted is thrown away, and the
steps are done one after the other.
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
from scanlib.kernels.scalars import RULES, Number, Pair, parts_of
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan, Recurrence
from scanlib.recurrences import CLASSES
from scanlib.recurrences.block_scans import Arithmetic, Formulas

Numbers = tuple[Any, ...]  # each real or complex
# Below these no product of a few numbers overflows.
LARGE = {"float32": 2.0**100, "float64": 2.0**900}
# The kinds of dtypes whose functions kernels compose.
KINDS = {"affine": "fciu", "log-affine": "f", "maximum": "fiu", "minimum": "fiu"}


class ScalarArithmetic(Arithmetic):
    """What formulas of recurrence classes are written with, as a single step computes it."""

    def maximum(self, a: Value, b: Value) -> Value:
        return RULES[ps.ScalarMaximum](self.w, a, b)

    def minimum(self, a: Value, b: Value) -> Value:
        return RULES[ps.ScalarMinimum](self.w, a, b)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        is_real = isinstance(a, Value) and a.type.is_float
        return self.w.fma(a, b, c) if is_real else a * b + c

    def logaddexp(self, a: Value, b: Value) -> Value:
        (result,) = self.w.call(vector_function("logaddexp", a.type.dtype, 1), a, b)
        return result


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

    Attributes
    ----------
    trusted : callable
        From a writer, a function, a value and what the function makes of it to whether that is right.
    moderate : callable
        Whether a value is so far from overflow that no composition that leads there can have hidden
        one.
    losses : callable, optional
        From a writer, a function, a later one and whether that is a single step to bounds of what
        the numbers of both in a row have lost.
    bounds : int
        How many: real numbers, which come after those that select a function.
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


@dataclass(frozen=True)
class Composed:
    """A recurrence that a kernel composes.

    Attributes
    ----------
    part : int
        The state or carry: states count first.
    dtype : str
        Of the state.
    family : str
    inputs : list of Variable
        A copy of the body's inputs.
    elements : list of (Variable or float)
        What selects its function; a number where the recurrence leaves one out.
    """

    part: int
    dtype: str
    family: str
    inputs: list[Variable]
    elements: list[Variable | float]

    @property
    def formulas(self) -> Formulas:
        return CLASSES[self.family].formulas

    @property
    def trust(self) -> Trust | None:
        """None where composing loses nothing: integers wrap around, extremes stay what they are."""
        return TRUST.get(self.family) if np.dtype(self.dtype).kind in "fc" else None

    @property
    def bounds(self) -> int:
        return 0 if self.trust is None else self.trust.bounds

    @property
    def members(self) -> list[str]:
        """The dtypes of the numbers of a composed function."""
        real = parts_of(computed(self.dtype)) or self.dtype
        return [self.dtype] * len(self.elements) + [real] * self.bounds

    def compose(self, w: Writer, first: Numbers, later: Numbers, one: bool) -> Numbers:
        """Return the function that does `first`, then `later`, which is `one` step or several."""
        count, trust = len(self.elements), self.trust
        both = self.formulas.compose(ScalarArithmetic(w), first[:count], later[:count])
        if trust is None or trust.losses is None:
            return both
        return (*both, *trust.losses(w, first, later, one))

    def apply(self, w: Writer, function: Numbers, state: Number) -> Number:
        m = ScalarArithmetic(w)
        return self.formulas.apply(m, function[: len(self.elements)], state)


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
    name = recurrence.family
    if np.dtype(dtype).kind not in KINDS.get(name, ""):
        return None
    identity = CLASSES[name].formulas.identity(dtype)
    return Composed(part, dtype, name, inputs, _elements(recurrence, identity, outputs))


def _elements(
    recurrence: Recurrence, identity: tuple[float, ...], outputs: list[Variable]
) -> list[Variable | float]:
    """Return what selects a step's function; what the recurrence leaves out changes nothing."""
    (term,) = recurrence.terms[0]
    given = (term.coefficient, recurrence.constants[0])[-len(identity) :]
    pairs = zip(given, identity, strict=True)
    return [otherwise if k is None else outputs[k] for k, otherwise in pairs]
