r"""Logarithms of growing sums, composed.

    h[t] = logaddexp(h[t-1] + a[t], b[t])

With the running maximum `m`, ``p[t] = m[t-1] + a[t]`` and ``h = m + log s``,

    m[t] = max(p[t], b[t]),                m = h, s = 1 before the block
    E[t] = exp(-|b[t] - p[t]|)
    s[t] = E[t] s[t-1] + 1   where b[t] > p[t],   s[t-1] + E[t]   elsewhere

so that exponentials and logarithms are computed for many steps at once, and only `m`, a recurrence
of the max-affine family, and `s`, of the affine one, wait for the step before. Since
``1 ≤ s ≤ n + 1``, nothing overflows and nothing underflows that counts, for any range of values.
Rounding a difference changes `E` by no more than its product with that difference does, and a step
adds about one unit in the last place to `s`, whose logarithm is part of `h`: the errors are those
of the loop itself. (The rescaled sum is the one of P. Blanchard, D. Higham and N. Higham,
"Accurately computing the log-sum-exp and softmax functions", 2021, with a maximum that grows.)

Equal infinities are taken to differ by zero, as in `logaddexp`; ``E = 0`` where one is infinite.
NaN stays in `s` and so in `h`. So all values can be trusted that come of numbers below infinity.
The `a` or `b` of a step may be a sum, of ``logaddexp(h, b) + a`` for one, that the loop adds up
in another order: where one is NaN or infinity, the caller takes the steps one by one.
"""

from __future__ import annotations

from dataclasses import dataclass

from scanlib.kernels.elementary import vector_function
from scanlib.kernels.language import BOOL, Type, Value
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.spans import Items, Same, Span
from scanlib.recurrences.affine_scan import AffineSteps, scan_affine
from scanlib.recurrences.extremes_scan import picking
from scanlib.recurrences.lanes import Block
from scanlib.recurrences.trust import any_lane


@dataclass(frozen=True)
class LogSteps:
    """The steps of one block.

    Attributes
    ----------
    a : Items, optional
        Shifts; None if there are none.
    b : Items
    h : Span
        Where the new values go; those before each, in the order of memory, are in `old`.
    old : Span
    before : Value
        The state before the block.
    scale, sums : Span
        Memory for as many numbers as the block has steps.
    """

    a: Items | None
    b: Items
    h: Span
    old: Span
    before: Value
    scale: Span
    sums: Span


def all_below_infinity(block: Block, items: Items) -> Value:
    """Return whether no element is infinity or NaN."""
    w, n = block.writer, block.size
    infinity = float("inf")
    if isinstance(items, Same):
        return items.real(0) < infinity
    lanes = register_bytes() // items.itemsize
    done = n & -lanes
    first = w.constant([True] * lanes, Type("bool", lanes))
    fine, rest = w.local(first), w.local(True, BOOL)
    with w.loop(0, done, lanes) as j:
        w.assign(fine, w.copy(fine) & (items.real(j, lanes) < infinity))
    with w.loop(done, n) as j:
        w.assign(rest, w.copy(rest) & (items.real(j) < infinity))
    return ~any_lane(w, ~w.copy(fine)) & w.copy(rest)


def scan_logs(block: Block, steps: LogSteps) -> Value:
    """Write the scan; return whether all values can be trusted."""
    w = block.writer
    good = all_below_infinity(block, steps.b)
    if steps.a is not None:
        good = good & all_below_infinity(block, steps.a)
    with w.when(good):
        if steps.a is None:
            _maximum(block, steps)
        else:
            _shifted_maximum(block, steps, steps.a)
        block.for_all(steps.h.itemsize, lambda j, lanes: _elements(steps, j, lanes))
        # Products of scales that underflow belong to terms that do not count beside ``s ≥ 1``.
        one = w.constant(1.0, steps.before.type)
        scan_affine(
            Block(w, block.size, block.reverse),
            AffineSteps(steps.scale, steps.sums, steps.sums, one),
        )

        def add_logarithm(j: Value, lanes: int) -> None:
            function = vector_function("log", steps.h.dtype, lanes)
            (log,) = w.call(function, steps.sums.real(j, lanes))
            steps.h.store(j, steps.h.real(j, lanes) + log)

        block.for_all(steps.h.itemsize, add_logarithm)
    return good


def _maximum(block: Block, steps: LogSteps) -> None:
    """Write the running maximum, four steps at a time. NaN may get lost: `s` keeps it."""
    w, n, pick = block.writer, block.size, picking(block.writer, True)
    state = w.local(steps.before)
    done = n & -4
    with w.loop(0, done, 4) as first:
        places = [block.step(first + k if k else first) for k in range(4)]
        b = [steps.b.real(place) for place in places]
        latest = w.copy(state)
        second = pick(b[0], b[1])
        firsts = [b[0], second, pick(second, b[2]), pick(second, pick(b[2], b[3]))]
        for place, value in zip(places, firsts, strict=True):
            found = pick(value, latest)
            steps.h.store(place, found)
        w.assign(state, found)
    with w.loop(done, n) as k:
        j = block.step(k)
        w.assign(state, pick(steps.b.real(j), w.copy(state)))
        steps.h.store(j, w.copy(state))


def _shifted_maximum(block: Block, steps: LogSteps, a: Items) -> None:
    """Write ``m = max(m + a, b)``, each sum rounded as the loop itself rounds it."""
    w, pick = block.writer, picking(block.writer, True)
    state = w.local(steps.before)
    with w.loop(0, block.size) as k:
        j = block.step(k)
        w.assign(state, pick(steps.b.real(j), w.copy(state) + a.real(j)))
        steps.h.store(j, w.copy(state))


def _elements(steps: LogSteps, j: Value, lanes: int) -> None:
    """Write the coefficients of ``s = scale * s + added`` at some steps."""
    w = steps.h.w
    b, p = steps.b.real(j, lanes), steps.old.real(j, lanes)
    if steps.a is not None:
        p = p + steps.a.real(j, lanes)
    distance = w.select(b.equals(p), 0.0, abs(b - p))
    (e,) = w.call(vector_function("exp", steps.h.dtype, lanes), -distance)
    larger = b > p
    steps.scale.store(j, w.select(larger, e, 1.0))
    steps.sums.store(j, w.select(larger, w.constant(1.0, e.type), e))
