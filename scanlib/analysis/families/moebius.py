"""The Möbius family: quotients of two affine functions of one state.

    h_t = (a_t h_{t-1} + b_t) / (c_t h_{t-1} + d_t)

Composition is the product of the matrices ``[[a, b], [c, d]]``. Continued fractions and the
variance of a scalar Kalman filter are of this family (W. T. Reid, "Riccati differential
equations", 1972).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Variable

from scanlib.analysis.families.form import (
    Component,
    Elements,
    NotInFamilyError,
    common_dtype,
    only_part,
)
from scanlib.ops.elemwise_scan import Recurrence, Term

Affine = tuple[Variable | None, Variable | None]


@dataclass(frozen=True)
class MoebiusForm:
    """``(a h + b) / (c h + d)``; no denominator is one."""

    numerator: Affine
    denominator: Affine | None = None


def recognize(component: Component) -> Recurrence:
    """Return the Möbius recurrence that a component of one state of depth one is.

    Raises
    ------
    NotInFamilyError
        If it is none.
    """
    part = only_part(component)
    dtype = common_dtype(component)
    if np.dtype(dtype).kind not in "fc":
        raise NotInFamilyError("a quotient of integers is rounded")
    steps = _Step(dtype)
    form = component.propagate(lambda part, tap: MoebiusForm((steps.one, None)), steps.forms)[part]
    if form is None or form.denominator is None:
        raise NotInFamilyError("nothing is divided by the state")
    elements = Elements(dtype)
    zero = steps.number(0)
    numbers = [zero if v is None else v for v in (*form.numerator, *form.denominator)]
    term = Term(part, -1, elements.add(numbers[0]))
    rest = tuple(elements.add(number) for number in numbers[1:])
    return elements.recurrence("Möbius", component, ((term,),), rest)


class _Step:
    """From the forms of a node's inputs to those of its outputs."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.one = self.number(1)

    def number(self, value: int) -> Variable:
        return ps.ScalarConstant(ps.get_scalar_type(self.dtype), value)

    def forms(self, node: Apply, given: list[MoebiusForm | None]) -> list[MoebiusForm]:
        op = node.op
        lifted = [
            MoebiusForm((None, inp)) if form is None else form
            for inp, form in zip(node.inputs, given, strict=True)
        ]
        if isinstance(op, ps.Add):
            total = lifted[0]
            for other in lifted[1:]:
                total = self.plus(total, other)
            return [total]
        if isinstance(op, ps.Sub):
            return [self.plus(lifted[0], self.scaled(lifted[1], self.number(-1)))]
        if isinstance(op, ps.Neg):
            return [self.scaled(lifted[0], self.number(-1))]
        if isinstance(op, ps.Mul):
            return [self.product(node, given)]
        if isinstance(op, ps.TrueDiv):
            return [self.quotient(*lifted)]
        if isinstance(op, ps.Reciprocal):
            return [self.quotient(MoebiusForm((None, self.one)), lifted[0])]
        if isinstance(op, ps.Identity):
            return [lifted[0]]
        raise NotInFamilyError(f"{op} is no quotient of affine functions")

    def product(self, node: Apply, given: list[MoebiusForm | None]) -> MoebiusForm:
        linear = [form for form in given if form is not None]
        if len(linear) > 1:
            raise NotInFamilyError("the state is multiplied by itself")
        result = linear[0]
        for inp, form in zip(node.inputs, given, strict=True):
            if form is None:
                result = self.scaled(result, inp)
        return result

    def scaled(self, form: MoebiusForm, factor: Variable) -> MoebiusForm:
        return MoebiusForm(_times(form.numerator, factor), form.denominator)

    def plus(self, x: MoebiusForm, y: MoebiusForm) -> MoebiusForm:
        if x.denominator is None and y.denominator is None:
            return MoebiusForm(_sum(x.numerator, y.numerator))
        if x.denominator is None:
            x, y = y, x
        if y.denominator is not None or y.numerator[0] is not None:
            raise NotInFamilyError("a quotient is added to a function of the state")
        assert x.denominator is not None
        assert y.numerator[1] is not None
        return MoebiusForm(_sum(x.numerator, _times(x.denominator, y.numerator[1])), x.denominator)

    def quotient(self, x: MoebiusForm, y: MoebiusForm) -> MoebiusForm:
        if y.denominator is not None:
            if x.denominator is not None or x.numerator[0] is not None:
                raise NotInFamilyError("a function of the state is divided by a quotient")
            assert x.numerator[1] is not None
            return MoebiusForm(_times(y.denominator, x.numerator[1]), y.numerator)
        if x.denominator is not None:
            if y.numerator[0] is not None or y.numerator[1] is None:
                raise NotInFamilyError("a quotient is divided by a function of the state")
            return MoebiusForm(x.numerator, _times(x.denominator, y.numerator[1]))
        return MoebiusForm(x.numerator, y.numerator)


def _times(affine: Affine, factor: Variable) -> Affine:
    a, b = (None if value is None else ps.mul(value, factor) for value in affine)
    return a, b


def _sum(x: Affine, y: Affine) -> Affine:
    a, b = (
        right if left is None else left if right is None else ps.add(left, right)
        for left, right in zip(x, y, strict=True)
    )
    return a, b
