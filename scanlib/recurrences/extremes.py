"""The families of extremes: running maximum and minimum.

    h_t = max(h_{t-1}, b_t)        or        h_t = min(h_{t-1}, b_t)

The bound of a composition is the extreme of the bounds, exactly, for every dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Variable

from scanlib.ops.lowered.elemwise_scan import Recurrence, Term
from scanlib.recurrences.form import (
    Component,
    Elements,
    NotInFamilyError,
    form_of_one,
)

_NAMES = {ps.ScalarMaximum: "maximum", ps.ScalarMinimum: "minimum"}


@dataclass(frozen=True)
class ExtremeForm:
    """``extreme(h, bound)``; no bound is the state itself."""

    extreme: type | None
    bound: Variable | None


def recognize(component: Component) -> Recurrence:
    """Return the running extreme that a component of one state of depth one is.

    Raises
    ------
    NotInFamilyError
        If it is none.
    """
    part, dtype, form = form_of_one(component, ExtremeForm(None, None), _step)
    if dtype.startswith("complex"):
        raise NotInFamilyError("complex numbers have no order")
    if form is None or form.extreme is None:
        raise NotInFamilyError("no extreme is taken")
    elements = Elements(dtype)
    bound = elements.add(form.bound)
    return elements.recurrence(
        _NAMES[form.extreme], component, ((Term(part, -1, None),),), (bound,)
    )


def _step(node: Apply, given: list[ExtremeForm | None]) -> list[ExtremeForm]:
    op = type(node.op)
    if op in _NAMES and sum(form is not None for form in given) == 1:
        form = next(form for form in given if form is not None)
        if form.extreme not in (None, op):
            raise NotInFamilyError("maximum and minimum are mixed")
        bounds = [inp for inp, own in zip(node.inputs, given, strict=True) if own is None]
        if form.bound is not None:
            bounds.append(form.bound)
        bound = bounds[0]
        for other in bounds[1:]:
            bound = node.op(bound, other)
        return [ExtremeForm(op, bound)]
    if isinstance(node.op, ps.Identity):
        assert given[0] is not None
        return [given[0]]
    raise NotInFamilyError(f"{node.op} is no running extreme")
