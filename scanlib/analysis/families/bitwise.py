"""The family of and, or, xor: on truth values and on the bits of integers.

    h_t = (h_{t-1} ∧ m_t) ⊕ x_t

``h ∨ b`` has the mask ``¬b`` and the toggle `b`. Composition:

    m = m₁ ∧ m₂,   x = (x₁ ∧ m₂) ⊕ x₂
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
    free_inputs,
    only_part,
)
from scanlib.ops.elemwise_scan import Recurrence, Term


@dataclass(frozen=True)
class BitwiseForm:
    """``(h ∧ mask) ⊕ toggle``; a mask of None keeps all, a toggle of None changes nothing."""

    mask: Variable | None = None
    toggle: Variable | None = None


def recognize(component: Component) -> Recurrence:
    """Return the recurrence of and, or, xor that a component of one state of depth one is.

    Raises
    ------
    NotInFamilyError
        If it is none.
    """
    part = only_part(component)
    form = component.propagate(lambda part, tap: BitwiseForm(), _step)[part]
    if form is None:
        raise NotInFamilyError("no bits are combined")
    elements = Elements(common_dtype(component))
    term = Term(part, -1, elements.add(form.mask))
    return elements.recurrence("bitwise", component, ((term,),), (elements.add(form.toggle),))


def _step(node: Apply, given: list[BitwiseForm | None]) -> list[BitwiseForm]:
    op = node.op
    linear = [form for form in given if form is not None]
    free = free_inputs(node, given)
    if len(linear) != 1:
        raise NotInFamilyError(f"{op} reads the state more than once")
    form = linear[0]
    if isinstance(op, ps.Invert):
        return [BitwiseForm(form.mask, _flipped(form.toggle, node.outputs[0].type.dtype))]
    for value in free:
        if isinstance(op, ps.AND):
            form = _and(form, value)
        elif isinstance(op, ps.OR):
            kept = _and(form, ps.invert(value))
            form = BitwiseForm(kept.mask, _xor(kept.toggle, value))
        elif isinstance(op, ps.XOR):
            form = BitwiseForm(form.mask, _xor(form.toggle, value))
        else:
            raise NotInFamilyError(f"{op} combines no bits")
    if not free and not isinstance(op, ps.Identity):
        raise NotInFamilyError(f"{op} combines no bits")
    return [form]


def _and(form: BitwiseForm, value: Variable) -> BitwiseForm:
    mask = value if form.mask is None else ps.and_(form.mask, value)
    return BitwiseForm(mask, None if form.toggle is None else ps.and_(form.toggle, value))


def _xor(toggle: Variable | None, value: Variable) -> Variable:
    return value if toggle is None else ps.xor(toggle, value)


def _flipped(toggle: Variable | None, dtype: str) -> Variable:
    if toggle is None:
        ones = np.invert(np.zeros((), dtype))[()]
        return ps.ScalarConstant(ps.get_scalar_type(dtype), ones)
    return ps.invert(toggle)
