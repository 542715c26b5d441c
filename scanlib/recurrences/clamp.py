"""The family of clamped shifts: max-affine, min-affine, clip.

    h_t = min(max(h_{t-1} + a_t, lo_t), hi_t)

with any of the three left out: CUSUM charts and queues (D. Lindley, "The theory of queues with a
single server", 1952) are ``max(h + a, 0)``, a stock of limited room has both bounds. Composition:

    a = a₁ + a₂,   lo = max(lo₁ + a₂, lo₂),   hi = min(max(hi₁ + a₂, lo₂), hi₂)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable

from scanlib.ops.lowered.elemwise_scan import Recurrence, Term
from scanlib.recurrences.form import (
    Component,
    Elements,
    NotInFamilyError,
    form_of_one,
    free_inputs,
)


@dataclass(frozen=True)
class ClampForm:
    """``min(max(h + shift, low), high)``; None where there is no such part."""

    shift: Variable | None = None
    low: Variable | None = None
    high: Variable | None = None

    def shifted(self, by: Variable) -> ClampForm:
        low, high = (None if b is None else ps.add(b, by) for b in (self.low, self.high))
        return ClampForm(by if self.shift is None else ps.add(self.shift, by), low, high)

    def at_least(self, bound: Variable) -> ClampForm:
        low = bound if self.low is None else ps.scalar_maximum(self.low, bound)
        high = None if self.high is None else ps.scalar_maximum(self.high, bound)
        return replace(self, low=low, high=high)

    def at_most(self, bound: Variable) -> ClampForm:
        high = bound if self.high is None else ps.scalar_minimum(self.high, bound)
        return replace(self, high=high)


def recognize(component: Component) -> Recurrence:
    """Return the clamped shift that a component of one state of depth one is.

    Raises
    ------
    NotInFamilyError
        If it is none. Integers are left alone: where a shift wraps around, the order of the
        operations matters.
    """
    part, dtype, form = form_of_one(component, ClampForm(), _step)
    if np.dtype(dtype).kind != "f":
        raise NotInFamilyError("shifts of integers may wrap around between the bounds")
    if form is None or (form.low is None and form.high is None):
        raise NotInFamilyError("nothing is clamped")
    elements = Elements(dtype)
    term = Term(part, -1, elements.add(form.shift))
    bounds = (elements.add(form.low), elements.add(form.high))
    return elements.recurrence("clamp", component, ((term,),), bounds)


def _step(node: Apply, given: list[ClampForm | None]) -> list[ClampForm]:
    op = node.op
    linear = [form for form in given if form is not None]
    free = free_inputs(node, given)
    if len(linear) != 1:
        raise NotInFamilyError(f"{op} reads the state more than once")
    form = linear[0]
    if isinstance(op, ps.Add):
        for value in free:
            form = form.shifted(value)
        return [form]
    if isinstance(op, ps.Sub) and given[0] is not None:
        return [form.shifted(ps.neg(free[0]))]
    if isinstance(op, ps.ScalarMaximum):
        return [form.at_least(free[0])]
    if isinstance(op, ps.ScalarMinimum):
        return [form.at_most(free[0])]
    if isinstance(op, ps.Clip) and given[0] is not None and _are_in_order(*free):
        return [form.at_least(free[0]).at_most(free[1])]
    if isinstance(op, ps.Identity):
        return [form]
    raise NotInFamilyError(f"{op} clamps no shift")


def _are_in_order(low: Variable, high: Variable) -> bool:
    """Whether bounds are known to be in order; otherwise a clip is no minimum of a maximum."""
    known = isinstance(low, Constant) and isinstance(high, Constant)
    return known and bool(low.data <= high.data)
