"""Clamped shifts: max-affine, min-affine, clip; without a shift, running maxima and minima.

    h_t = min(max(h_{t-1} + a_t, lo_t), hi_t)

with any of the three left out: CUSUM charts and queues (D. Lindley, "The theory of queues with a
single server", 1952) are ``max(h + a, 0)``, a stock of limited room has both bounds. Composition:

    a = a₁ + a₂,   lo = max(lo₁ + a₂, lo₂),   hi = min(max(hi₁ + a₂, lo₂), hi₂)

One bound alone is a running extreme, of any dtype that has an order; the bound of a composition is
the extreme of the bounds, exactly. A NaN would get lost among bounds, so what has one cannot be
trusted; nor can shifts whose sums may overflow.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Constant, Variable

from scanlib.kernels.language import Type, Value
from scanlib.kernels.scalars import limit
from scanlib.kernels.spans import Same
from scanlib.ops.lowered.elemwise_scan import Recurrence, Term
from scanlib.recurrences.block_scans import Formulas, Function, LaneScan, StepBlock, Steps
from scanlib.recurrences.form import (
    Component,
    Elements,
    NotInFamilyError,
    form_of_one,
    free_inputs,
    shifted,
)
from scanlib.recurrences.trust import above

_LARGE = {"float64": 2.0**1000, "float32": 2.0**120}  # of shifts: sums of a few do not overflow


# Recognition


@dataclass(frozen=True)
class ClampForm:
    """``min(max(h + shift, low), high)``; None where there is no such part."""

    shift: Variable | None = None
    low: Variable | None = None
    high: Variable | None = None

    def shifted(self, by: Variable) -> "ClampForm":
        low, high = (None if b is None else ps.add(b, by) for b in (self.low, self.high))
        return ClampForm(by if self.shift is None else ps.add(self.shift, by), low, high)

    def at_least(self, bound: Variable) -> "ClampForm":
        low = bound if self.low is None else ps.scalar_maximum(self.low, bound)
        high = None if self.high is None else ps.scalar_maximum(self.high, bound)
        return replace(self, low=low, high=high)

    def at_most(self, bound: Variable) -> "ClampForm":
        high = bound if self.high is None else ps.scalar_minimum(self.high, bound)
        return replace(self, high=high)


def recognize(component: Component) -> Recurrence:
    """Return the clamped shift or running extreme that a component of one state of depth one is.

    `NotInFamilyError` if it is none. Shifts of integers are left alone: where one wraps around, the
    order of the operations matters.
    """
    part, dtype, form = form_of_one(component, ClampForm(), _step)
    if form is None or (form.low is None and form.high is None):
        raise NotInFamilyError("nothing is clamped")
    elements, kind = Elements(dtype), np.dtype(dtype).kind
    if form.shift is None and (form.low is None or form.high is None) and kind != "c":
        name, bound = ("maximum", form.low) if form.high is None else ("minimum", form.high)
        term = Term(part, -1, None)
        return elements.recurrence(name, component, ((term,),), (elements.add(bound),))
    if kind != "f":
        raise NotInFamilyError("shifts of integers may wrap around between the bounds")
    term = Term(part, -1, elements.add(form.shift))
    bounds = (elements.add(form.low), elements.add(form.high))
    return elements.recurrence("clamp", component, ((term,),), bounds)


def _step(node: Apply, given: list[ClampForm | None]) -> list[ClampForm]:
    op = node.op
    linear = [form for form in given if form is not None]
    free = free_inputs(node, given)
    if len(linear) != 1:
        raise NotInFamilyError(f"{op} reads the state more than once")
    (form,), total = linear, shifted(node, given)
    if total is not None:
        return [total]
    if isinstance(op, ps.ScalarMaximum):
        return [form.at_least(free[0])]
    if isinstance(op, ps.ScalarMinimum):
        return [form.at_most(free[0])]
    if isinstance(op, ps.Clip) and given[0] is not None and _are_in_order(*free):
        return [form.at_least(free[0]).at_most(free[1])]
    raise NotInFamilyError(f"{op} clamps no shift")


def _are_in_order(low: Variable, high: Variable) -> bool:
    """Whether bounds are known to be in order; otherwise a clip is no minimum of a maximum."""
    known = isinstance(low, Constant) and isinstance(high, Constant)
    return known and bool(low.data <= high.data)


# Formulas and scans


def _compose(m: Any, first: Function, later: Function) -> Function:
    (a, low, high), (b, floor, top) = first, later
    low, high = m.maximum(low + b, floor), m.maximum(high + b, floor)
    return a + b, low, m.minimum(high, top)


MAXIMUM = Formulas(
    lambda m, first, later: (m.maximum(first[0], later[0]),),
    lambda m, function, state: m.maximum(function[0], state),
    lambda dtype: (limit(dtype, False),),
    idempotent=True,
)
MINIMUM = Formulas(
    lambda m, first, later: (m.minimum(first[0], later[0]),),
    lambda m, function, state: m.minimum(function[0], state),
    lambda dtype: (limit(dtype, True),),
    idempotent=True,
)
CLAMP = Formulas(
    _compose,
    lambda m, function, state: m.minimum(m.maximum(state + function[0], function[1]), function[2]),
    lambda dtype: (0.0, limit(dtype, False), limit(dtype, True)),
)


def _scan_extreme(formulas: Formulas, block: StepBlock, steps: Steps) -> Value:
    """Write the scan of a running extreme; return whether it can be trusted."""
    test = above(np.inf) if steps.before.type.is_float else None
    given = replace(steps, elements=steps.elements[1:])
    return LaneScan(block, formulas, given, (test,)).write()[1]


scan_maximum, scan_minimum = (partial(_scan_extreme, formulas) for formulas in (MAXIMUM, MINIMUM))


def scan(block: StepBlock, steps: Steps) -> Value:
    """Write the scan of clamped shifts, by a shift and two bounds of which some may be None."""
    w, kind = block.writer, Type(steps.h.dtype)
    elements = tuple(
        Same(w, w.constant(neutral, kind)) if items is None else items
        for items, neutral in zip(steps.elements, CLAMP.identity(kind.dtype), strict=True)
    )
    tests = (above(_LARGE[kind.dtype]), above(np.inf), above(np.inf))
    given = replace(steps, elements=elements)
    return LaneScan(block, CLAMP, given, tests).write()[1]
