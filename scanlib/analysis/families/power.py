"""The power family, the affine one in logarithms.

    h_t = c_t · h_{t-1}^{p_t}

Composition: ``c = c₂ c₁^{p₂}``, ``p = p₁ p₂``, for positive states.
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


@dataclass(frozen=True)
class PowerForm:
    """``factor · h^exponent``; None is one."""

    factor: Variable | None = None
    exponent: Variable | None = None


def recognize(component: Component) -> Recurrence:
    """Return the power recurrence that a component of one state of depth one is.

    Raises
    ------
    NotInFamilyError
        If it is none.
    """
    part = only_part(component)
    dtype = common_dtype(component)
    if np.dtype(dtype).kind != "f":
        raise NotInFamilyError("only real numbers have real powers")
    form = component.propagate(lambda part, tap: PowerForm(), _step)[part]
    if form is None or form.exponent is None:
        raise NotInFamilyError("no power is taken")
    elements = Elements(dtype)
    term = Term(part, -1, elements.add(form.exponent))
    return elements.recurrence("power", component, ((term,),), (elements.add(form.factor),))


def _step(node: Apply, given: list[PowerForm | None]) -> list[PowerForm]:
    op, dtype = node.op, node.outputs[0].type.dtype
    form = given[0]
    free = [inp for inp, known in zip(node.inputs, given, strict=True) if known is None]
    if isinstance(op, ps.Mul) and len(free) == len(given) - 1:
        form = next(known for known in given if known is not None)
        for value in free:
            form = PowerForm(
                value if form.factor is None else ps.mul(form.factor, value), form.exponent
            )
        return [form]
    if form is not None:
        if isinstance(op, ps.TrueDiv) and free:
            inverse = ps.reciprocal(free[0])
            factor = inverse if form.factor is None else ps.mul(form.factor, inverse)
            return [PowerForm(factor, form.exponent)]
        if isinstance(op, ps.Pow) and free:
            return [_raised(form, free[0])]
        exponent = {ps.Sqr: 2.0, ps.Sqrt: 0.5, ps.Reciprocal: -1.0}.get(type(op))
        if exponent is not None:
            return [_raised(form, ps.ScalarConstant(ps.get_scalar_type(dtype), exponent))]
        if isinstance(op, ps.Identity):
            return [form]
    raise NotInFamilyError(f"{op} is no power")


def _raised(form: PowerForm, exponent: Variable) -> PowerForm:
    factor = None if form.factor is None else ps.pow(form.factor, exponent)
    known = exponent if form.exponent is None else ps.mul(form.exponent, exponent)
    return PowerForm(factor, known)
