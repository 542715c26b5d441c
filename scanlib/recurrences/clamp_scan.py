"""Shifts between bounds: ``h = min(max(h + a, low), high)``, four steps composed at a time."""

from __future__ import annotations

from dataclasses import dataclass

from scanlib.kernels.language import BOOL, Value
from scanlib.kernels.spans import Items, Same, Span
from scanlib.recurrences.extremes_scan import picking
from scanlib.recurrences.lanes import Block
from scanlib.recurrences.trust import above, is_nan, some

_LARGE = {"float64": 2.0**1000, "float32": 2.0**120}  # of shifts: sums of a few do not overflow


@dataclass(frozen=True)
class ClampSteps:
    """The steps of one block: shifts, bounds, where the new values go, the state before."""

    a: Items
    low: Items
    high: Items
    h: Span
    before: Value


def _is_out(block: Block, items: Items, limit: float) -> Value:
    """Return whether an element is above a limit in size, or NaN."""
    if isinstance(items, Same):
        return ~(abs(items.real(0)) <= limit)
    return some(block.writer, items, block.size, above(limit, items.dtype))


def scan_clamp(block: Block, steps: ClampSteps) -> Value:
    """Write the scan; return whether all values can be trusted."""
    w, n = block.writer, block.size
    larger, smaller = picking(w, True), picking(w, False)

    def clamped(value: Value, low: Value, high: Value) -> Value:
        return smaller(larger(value, low), high)

    infinity = float("inf")
    bad = is_nan(w, steps.before) | _is_out(block, steps.a, _LARGE[steps.h.dtype])
    bad = bad | _is_out(block, steps.low, infinity) | _is_out(block, steps.high, infinity)
    trusted = w.local(False, BOOL)
    with w.when(~bad):
        w.assign(trusted, True)
        local = w.local(steps.before)
        done = n & -4
        with w.loop(0, done, 4) as first:
            j = [block.step(first + k if k else first) for k in range(4)]
            a, low, high = (
                [items.real(place) for place in j] for items in (steps.a, steps.low, steps.high)
            )
            state = w.copy(local)
            early = a[0] + a[1]
            low_early = larger(low[0] + a[1], low[1])
            high_early = clamped(high[0] + a[1], low[1], high[1])
            late = a[2] + a[3]
            low_late = larger(low[2] + a[3], low[3])
            high_late = clamped(high[2] + a[3], low[3], high[3])
            low_all = larger(low_early + late, low_late)
            high_all = clamped(high_early + late, low_late, high_late)
            second = clamped(state + early, low_early, high_early)
            values = [
                clamped(state + a[0], low[0], high[0]),
                second,
                clamped(second + a[2], low[2], high[2]),
                clamped(state + (early + late), low_all, high_all),
            ]
            for place, value in zip(j, values, strict=True):
                steps.h.store(place, value)
            w.assign(local, values[3])
        with w.loop(done, n) as k:
            j_one = block.step(k)
            a_one, low_one, high_one = (
                items.real(j_one) for items in (steps.a, steps.low, steps.high)
            )
            value = clamped(w.copy(local) + a_one, low_one, high_one)
            w.assign(local, value)
            steps.h.store(j_one, value)
    return w.copy(trusted)
