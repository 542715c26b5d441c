"""The affine family: every next value is a linear combination of past ones, plus a constant.

    y_p[t] = Σ_{q,k} a_{pqk}[t] · y_q[t-k] + b_p[t]

One state of depth one is ``a h + b``; several states, or one with more taps (AR(p), ARMA, IIR
filters), are a coupled system. The composition of two affine functions is affine:

    (a₂, b₂) ∘ (a₁, b₁) = (a₂ a₁, a₂ b₁ + b₂)

G. Blelloch, "Prefix sums and their applications", 1990.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Variable

from scanlib.ops.lowered.elemwise_scan import Recurrence, Term
from scanlib.recurrences.coefficients import Coefficient, added, narrowed, replaced
from scanlib.recurrences.form import (
    Component,
    Elements,
    NotInFamilyError,
    common_dtype,
    kind,
)

Key = tuple[int, int]


@dataclass(frozen=True)
class AffineForm:
    """``Σ coefficients[part, tap] · y_part[t + tap] + constant``.

    A coefficient of None is one; a constant of None is zero.
    """

    coefficients: dict[Key, Coefficient | None]
    constant: Variable | None


ARITHMETIC = (ps.Add, ps.Sub, ps.Neg, ps.Mul, ps.TrueDiv)


def recognize(component: Component) -> Recurrence:
    """Return the affine recurrence of a component.

    Raises
    ------
    NotInFamilyError
        If a next value is not affine in the component's past values.
    """
    dtype = common_dtype(component)
    if dtype == "bool":
        raise NotInFamilyError("arithmetic on truth values is no affine recurrence")
    forms = component.propagate(
        lambda part, tap: AffineForm({(part, tap): None}, None), _Step(component, dtype).forms
    )
    elements = Elements(dtype)
    terms, constants = [], []
    for own, value in component.nexts.items():
        form = forms[own] or AffineForm({}, value)
        keys = sorted(form.coefficients, key=lambda key: (key[0], -key[1]))
        terms.append(
            tuple(
                Term(part, tap, elements.add(_element(form.coefficients[part, tap], dtype)))
                for part, tap in keys
            )
        )
        constants.append(elements.add(form.constant))
    return elements.recurrence("affine", component, tuple(terms), tuple(constants))


@dataclass
class _Step:
    """From the forms of a node's inputs to those of its outputs."""

    component: Component
    dtype: str

    def forms(self, node: Apply, given: list[AffineForm | None]) -> list[AffineForm]:
        op, dtype = node.op, node.outputs[0].type.dtype
        if isinstance(op, ps.Cast | ps.Identity) and self.keeps_numbers(node):
            assert given[0] is not None
            return [given[0]]
        if isinstance(op, ps.Switch) and given[0] is None:
            return [self.switch(node, given)]
        if not isinstance(op, ARITHMETIC):
            raise NotInFamilyError(f"{op} of {self.named(node, given)} is not affine")
        # An operation converts what it is given first: int8 products in an int64 sum do not wrap.
        inputs = [_cast(inp, dtype) for inp in node.inputs]
        if isinstance(op, ps.Add):
            return [self.add(inputs, given)]
        if isinstance(op, ps.Sub):
            left, right = (self.lift(*pair) for pair in zip(inputs, given, strict=True))
            return [_plus(left, _scaled(right, _number(-1, dtype)))]
        if isinstance(op, ps.Neg):
            return [_scaled(self.lift(inputs[0], given[0]), _number(-1, dtype))]
        if isinstance(op, ps.Mul):
            return [self.multiply(node, inputs, given)]
        if isinstance(op, ps.TrueDiv) and given[1] is None and given[0] is not None:
            return [_divided(given[0], inputs[1])]
        raise NotInFamilyError(f"{op} of {self.named(node, given)} is not affine")

    def named(self, node: Apply, given: list[AffineForm | None]) -> str:
        for form in given:
            if form is not None:
                part = next(iter(form.coefficients), None)
                if part is not None:
                    return self.component.name(self.component.taps[part[0]][part[1]])
        return "a state"

    def keeps_numbers(self, node: Apply) -> bool:
        """Whether a cast rounds no more than every operation on the states does."""
        before, after = node.inputs[0].type.dtype, node.outputs[0].type.dtype
        if kind(node.inputs[0]) in "biu" or kind(node.outputs[0]) in "biu":
            return before == after
        return np.can_cast(before, after) or np.can_cast(self.dtype, after)

    def lift(self, value: Variable, form: AffineForm | None) -> AffineForm:
        return AffineForm({}, value) if form is None else form

    def add(self, inputs: list[Variable], given: list[AffineForm | None]) -> AffineForm:
        total = AffineForm({}, None)
        for value, form in zip(inputs, given, strict=True):
            total = _plus(total, self.lift(value, form))
        return total

    def multiply(
        self, node: Apply, inputs: list[Variable], given: list[AffineForm | None]
    ) -> AffineForm:
        linear = [form for form in given if form is not None]
        if len(linear) > 1:
            raise NotInFamilyError(
                f"a coefficient of {self.named(node, given)} reads a state itself"
            )
        # What stands before the state is multiplied first.
        place = next(k for k, form in enumerate(given) if form is not None)
        before, after = inputs[:place], inputs[place + 1 :]
        result = linear[0]
        if before:
            result = _scaled(result, before[0] if len(before) == 1 else ps.mul(*before))
        for value in after:
            result = _scaled(result, value)
        return result

    def switch(self, node: Apply, given: list[AffineForm | None]) -> AffineForm:
        condition = node.inputs[0]
        left, right = (self.lift(*pair) for pair in zip(node.inputs[1:], given[1:], strict=True))
        dtype = node.outputs[0].type.dtype
        zero, one = _number(0, dtype), _number(1, dtype)
        # What changes no number, not even -0.0.
        nothing = _number(-0.0, dtype) if kind(node.outputs[0]) == "f" else zero

        def pick(a: Variable | None, b: Variable | None) -> Variable:
            return ps.switch(condition, nothing if a is None else a, nothing if b is None else b)

        def coefficient(form: AffineForm, key: Key) -> Variable:
            if key in form.coefficients:
                return _guarded(form.coefficients[key], one)
            return replaced(form.constant, zero)

        coefficients: dict[Key, Coefficient | None] = {}
        for key in {**left.coefficients, **right.coefficients}:
            if all(form.coefficients.get(key, zero) is None for form in (left, right)):
                coefficients[key] = None
            else:
                either = pick(coefficient(left, key), coefficient(right, key))
                coefficients[key] = Coefficient(either)
        if left.constant is None and right.constant is None:
            return AffineForm(coefficients, None)
        return AffineForm(coefficients, pick(left.constant, right.constant))


def _number(value: float, dtype: str) -> Variable:
    """Return a constant; minus one of an unsigned dtype is its largest number."""
    return ps.ScalarConstant(ps.get_scalar_type(dtype), np.asarray(value).astype(dtype)[()])


def _cast(value: Variable, dtype: str) -> Variable:
    return value if value.type.dtype == dtype else ps.cast(value, dtype)


def _guarded(coefficient: Coefficient | None, one: Variable) -> Variable:
    return one if coefficient is None else coefficient.guarded()


def _element(coefficient: Coefficient | None, dtype: str) -> Variable | None:
    """Return a coefficient as an element of states of a dtype."""
    if coefficient is None:
        return None
    value = coefficient.guarded()
    return value if value.type.dtype == dtype else narrowed(value, dtype)


def _plus(a: AffineForm, b: AffineForm) -> AffineForm:
    coefficients = dict(a.coefficients)
    for key, value in b.coefficients.items():
        if key not in coefficients:
            coefficients[key] = value
            continue
        mine = coefficients[key]
        like = mine if mine is not None else value
        if like is None:
            raise NotInFamilyError("a state is added to itself")
        one = _number(1, like.value.type.dtype)
        coefficients[key] = Coefficient(added(_guarded(mine, one), _guarded(value, one)))
    if a.constant is None or b.constant is None:
        return AffineForm(coefficients, b.constant if a.constant is None else a.constant)
    return AffineForm(coefficients, ps.add(a.constant, b.constant))


def _scaled(form: AffineForm, factor: Variable) -> AffineForm:
    return AffineForm(
        {
            key: Coefficient(factor) if known is None else known.times(factor)
            for key, known in form.coefficients.items()
        },
        None if form.constant is None else ps.mul(form.constant, factor),
    )


def _divided(form: AffineForm, divisor: Variable) -> AffineForm:
    return AffineForm(
        {
            key: Coefficient(ps.reciprocal(divisor)) if known is None else known.over(divisor)
            for key, known in form.coefficients.items()
        },
        None if form.constant is None else ps.true_div(form.constant, divisor),
    )
