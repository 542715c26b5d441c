r"""The log-affine family: the affine one with positive numbers, in logarithms.

    h[t] = logaddexp(h[t-1] + a[t], b[t])

Composition: ``(a₂ + a₁, logaddexp(b₁ + a₂, b₂))``. A block is scanned by exponentials and
logarithms of many steps at once. With the running maximum `m`, ``p[t] = m[t-1] + a[t]`` and
``h = m + log s``,

    m[t] = max(p[t], b[t]),                m = h, s = 1 before the block
    E[t] = exp(-|b[t] - p[t]|)
    s[t] = E[t] s[t-1] + 1   where b[t] > p[t],   s[t-1] + E[t]   elsewhere

so that only `m`, a recurrence of the max-affine family, and `s`, of the affine one, wait for the
step before. Since ``1 ≤ s ≤ n + 1``, nothing overflows and nothing underflows that counts, for any
range of values. Rounding a difference changes `E` by no more than its product with that difference
does, and a step adds about one unit in the last place to `s`, whose logarithm is part of `h`: the
errors are those of the loop itself. (The rescaled sum is the one of P. Blanchard, D. Higham and N.
Higham, "Accurately computing the log-sum-exp and softmax functions", 2021, with a maximum that
grows.)

Equal infinities are taken to differ by zero, as in `logaddexp`; ``E = 0`` where one is infinite.
NaN stays in `s` and so in `h`. So all values can be trusted that come of numbers below infinity.
The `a` or `b` of a step may be a sum, of ``logaddexp(h, b) + a`` for one, that the loop adds up
in another order: where one is NaN or infinity, the caller takes the steps one by one.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytensor.scalar as ps
from pytensor.graph.basic import Apply, Variable

from scanlib.kernels.elementary import compute
from scanlib.kernels.language import Value
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.spans import Span
from scanlib.ops.logaddexp import LogAddExp
from scanlib.ops.lowered.elemwise_scan import Recurrence, Term
from scanlib.recurrences import affine
from scanlib.recurrences.block_scans import Arithmetic, Formulas, LaneScan, StepBlock, Steps
from scanlib.recurrences.clamp import MAXIMUM
from scanlib.recurrences.form import (
    Component,
    Elements,
    NotInFamilyError,
    form_of_one,
    free_inputs,
    shifted,
)
from scanlib.recurrences.trust import not_below_infinity, some

# Recognition


@dataclass(frozen=True)
class LogAffineForm:
    """``logaddexp(h + shift, bound)``; a shift of None is zero, no bound none."""

    shift: Variable | None
    bound: Variable | None

    def shifted(self, by: Variable) -> "LogAffineForm":
        bound = None if self.bound is None else ps.add(self.bound, by)
        return LogAffineForm(by if self.shift is None else ps.add(self.shift, by), bound)


def recognize(component: Component) -> Recurrence:
    """Return the log-affine recurrence of a component of one state of depth one;
    `NotInFamilyError` if it is none."""
    part, dtype, form = form_of_one(component, LogAffineForm(None, None), _step)
    if form is None or form.bound is None:
        raise NotInFamilyError("no logarithm of a sum is taken")
    elements = Elements(dtype)
    term = Term(part, -1, elements.add(form.shift))
    return elements.recurrence("log-affine", component, ((term,),), (elements.add(form.bound),))


def _step(node: Apply, given: list[LogAffineForm | None]) -> list[LogAffineForm]:
    op = node.op
    linear = [form for form in given if form is not None]
    total = shifted(node, given)
    if total is not None:
        return [total]
    if len(linear) == 1 and isinstance(op, LogAddExp):
        (form,), (bound,) = linear, free_inputs(node, given)
        return [replace(form, bound=bound if form.bound is None else op(form.bound, bound))]
    raise NotInFamilyError(f"{op} is not log-affine")


# Formulas and scan

LOGS = Formulas(
    lambda m, first, later: (first[0] + later[0], m.logaddexp(first[1] + later[0], later[1])),
    lambda m, function, state: m.logaddexp(state + function[0], function[1]),
    lambda dtype: (0.0, -np.inf),
)


def scan(block: StepBlock, steps: Steps) -> Value:
    """Write the scan by shifts, which may be None, and bounds; return whether it can be trusted."""
    w, (a, b), h = block.writer, steps.elements, steps.h
    assert steps.buffer is not None
    scale, sums = steps.buffer(), steps.buffer()
    good = ~some(w, b, block.size, not_below_infinity)
    if a is not None:
        good = good & ~some(w, a, block.size, not_below_infinity)
    with w.when(good):
        if a is None:  # NaN may get lost: `s` keeps it
            running = replace(steps, elements=(b,))
            LaneScan(block, MAXIMUM, running, (None,)).write()
        else:
            _shifted_maximum(block, steps)
        lanes = register_bytes() // h.itemsize
        block.for_all(lanes, lambda j, lanes: _elements(steps, scale, sums, (j, lanes)))
        # Products of scales that underflow belong to terms that do not count beside ``s ≥ 1``.
        one = w.constant(1.0, steps.before.type)
        affine.scan(StepBlock(w, block.size, block.reverse), Steps((scale, sums), sums, one))

        def add_logarithm(j: Value, lanes: int) -> None:
            log = compute(w, "log", sums.real(j, lanes))
            h.store(j, h.real(j, lanes) + log)

        block.for_all(lanes, add_logarithm)
    return good


def _shifted_maximum(block: StepBlock, steps: Steps) -> None:
    """Write ``m = max(m + a, b)``, each sum rounded as the loop itself rounds it."""
    w, m, (a, b) = block.writer, Arithmetic(block.writer), steps.elements
    state = w.local(steps.before)
    with w.loop(0, block.size) as k:
        j = block.step(k)
        w.assign(state, m.maximum(b.real(j), w.copy(state) + a.real(j)))
        steps.h.store(j, w.copy(state))


def _elements(steps: Steps, scale: Span, sums: Span, place: tuple[Value, int]) -> None:
    """Write the coefficients of ``s = scale * s + added`` at some steps."""
    w, (a, b) = steps.h.w, steps.elements
    assert steps.old is not None
    b, p = b.real(*place), steps.old.real(*place)
    if a is not None:
        p = p + a.real(*place)
    distance = w.select(b.equals(p), 0.0, abs(b - p))
    e = compute(w, "exp", -distance)
    larger = b > p
    scale.store(place[0], w.select(larger, e, 1.0))
    sums.store(place[0], w.select(larger, w.constant(1.0, e.type), e))
