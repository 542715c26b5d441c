"""The log-affine family: the affine one with positive numbers, in logarithms.

    h_t = logaddexp(h_{t-1} + a_t, b_t)

Composition: ``(a₂ + a₁, logaddexp(b₁ + a₂, b₂))``.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Variable

from scanlib.ops.logaddexp import LogAddExp
from scanlib.ops.lowered.elemwise_scan import Recurrence, Term
from scanlib.recurrences.form import (
    Component,
    Elements,
    NotInFamilyError,
    form_of_one,
    free_inputs,
)


@dataclass(frozen=True)
class LogAffineForm:
    """``logaddexp(h + shift, bound)``; a shift of None is zero, no bound none."""

    shift: Variable | None
    bound: Variable | None


def recognize(component: Component) -> Recurrence:
    """Return the log-affine recurrence of a component of one state of depth one.

    Raises
    ------
    NotInFamilyError
        If it is none.
    """
    part, dtype, form = form_of_one(component, LogAffineForm(None, None), _step)
    if form is None or form.bound is None:
        raise NotInFamilyError("no logarithm of a sum is taken")
    elements = Elements(dtype)
    term = Term(part, -1, elements.add(form.shift))
    return elements.recurrence("log-affine", component, ((term,),), (elements.add(form.bound),))


def _plus(a: Variable | None, b: Variable) -> Variable:
    return b if a is None else ps.add(a, b)


def _shifted(form: LogAffineForm, shift: Variable) -> LogAffineForm:
    return LogAffineForm(
        _plus(form.shift, shift), None if form.bound is None else ps.add(form.bound, shift)
    )


def _step(node: Apply, given: list[LogAffineForm | None]) -> list[LogAffineForm]:
    op = node.op
    linear = [form for form in given if form is not None]
    free = free_inputs(node, given)
    if len(linear) == 1 and isinstance(op, LogAddExp):
        (form,), (bound,) = linear, free
        if form.bound is not None:
            bound = op(form.bound, bound)
        return [LogAffineForm(form.shift, bound)]
    if len(linear) == 1 and isinstance(op, ps.Add):
        form = linear[0]
        for shift in free:
            form = _shifted(form, shift)
        return [form]
    if isinstance(op, ps.Sub) and given[0] is not None and given[1] is None:
        return [_shifted(given[0], ps.neg(free[0]))]
    if isinstance(op, ps.Identity):
        return [linear[0]]
    raise NotInFamilyError(f"{op} is not log-affine")
