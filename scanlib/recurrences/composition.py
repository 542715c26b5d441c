r"""The map of all steps of a block, for the value after them alone: nothing is stored.

**Affine steps**, from the last one backwards. The steps ``h ← a h + b`` from step `j` on are the
map ``h ↦ A h + B``; with the step before them,

    B ← A b + B,    A ← a A

Where the coefficients decay, `A` is soon so small that no value before step `j` counts, and `B`
alone is the value in the end. A block is cut in strips whose maps do not wait for one another, and
which are composed in the end. Rounding is no worse than that of the steps: with ``S[i]`` the
product of the coefficients after step `i`, the errors of `B` are units in the last place of
``Σ |S[i]| |B[i]|``, where ``B[i] = h[i] - A[i] h[j]``; the steps' are those of
``Σ |S[i]| |h[i]|``, and ``S[i] A[i] = A`` is small. What overflows is an infinity or NaN of `B`
from then on. Where the steps alone overflow, their last value is not finite: the caller looks at
it. Everything is computed in double precision.

**Extremes, sums and logarithms of sums**: the extreme or the sum of all elements.
"""

from __future__ import annotations

from scanlib.kernels.elementary import vector_function
from scanlib.kernels.language import FLOAT64, Local, Type, Value, Writer
from scanlib.kernels.spans import Items, Same, Span, sum_of_lanes
from scanlib.recurrences.extremes_scan import extreme_of_all
from scanlib.recurrences.lanes import Block
from scanlib.recurrences.logs import all_below_infinity
from scanlib.recurrences.trust import above, is_nan, some

SMALL = 2.0**-120  # coefficients of values that count no more
_UNDERFLOW = 2.0**-900  # what products may have lost
_ROUNDING = 2.0**-60  # of a value, in doubles: less than half a unit in the last place
_STRIPS = 8
_LANES = 8
_INFINITY = float("inf")


def log_of(w: Writer, value: Value) -> Value:
    """Return the logarithm of a number in double precision."""
    (log,) = w.call(vector_function("log", "float64", 1), value)
    return log


def _exp(w: Writer, value: Value) -> Value:
    (exp,) = w.call(vector_function("exp", "float64", 1), value)
    return exp


def is_forgotten(w: Writer, mul: Value, before: Value, value: Value) -> Value:
    """Return whether ``mul * before`` is nothing next to a value; not if one is not finite."""
    size = abs(mul)
    lost = w.select(size < _UNDERFLOW, _UNDERFLOW, size) * abs(before)
    enough = _ROUNDING * abs(value)
    return (lost <= enough) & (enough < _INFINITY)


def blocks_to_forget(w: Writer, mul: Value) -> Value:
    """Return how many blocks make a coefficient small if one makes it `mul`."""
    small = log_of(w, w.constant(SMALL, FLOAT64))
    return w.select(abs(mul) < 1.0, small / log_of(w, abs(mul)), _INFINITY)


def compose_affine(
    block: Block, a: Items, b: Items, mul: Local, add: Local, sum_first: bool
) -> None:
    """Write that the map of `mul` and `add` is composed with the steps of the block before it.

    The steps are ``h ← a h + b``, or ``h ← a (h + b)``.
    """
    w, n = block.writer, block.size

    def item(items: Items, j: Value) -> Value:
        return w.cast(items.real(j), "float64")

    size = w.apply("quotient", n, w.constant(_STRIPS, n.type))
    whole = size * _STRIPS
    with w.loop(whole, n) as k:
        j = block.step(n - 1 - (k - whole))
        factor = item(a, j) * w.copy(mul)
        if sum_first:
            w.assign(mul, factor)
            w.assign(add, w.fma(factor, item(b, j), w.copy(add)))
        else:
            w.assign(add, w.fma(w.copy(mul), item(b, j), w.copy(add)))
            w.assign(mul, factor)
    maps = [(w.local(1.0, FLOAT64), w.local(0.0, FLOAT64)) for _ in range(_STRIPS)]
    with w.loop(0, size) as k:
        for strip, (own, sum_) in enumerate(maps):
            j = block.step(k + size * strip if strip else k)
            factor, term = item(a, j), item(b, j)
            if sum_first:
                w.assign(sum_, (w.copy(sum_) + term) * factor)
            else:
                w.assign(sum_, w.fma(w.copy(sum_), factor, term))
            w.assign(own, w.copy(own) * factor)
    for own, sum_ in reversed(maps):
        w.assign(add, w.fma(w.copy(mul), w.copy(sum_), w.copy(add)))
        w.assign(mul, w.copy(mul) * w.copy(own))


def compose_extreme(block: Block, b: Items, value: Local, largest: bool) -> Value:
    """Write the extreme of a value and all elements; return whether none of them is NaN."""
    w = block.writer
    good = ~is_nan(w, w.copy(value))
    if value.type.is_float:
        if isinstance(b, Same):
            good = good & ~is_nan(w, b.real(0))
        else:
            good = good & ~some(w, b, block.size, above(_INFINITY, b.dtype))
    with w.when(good):
        w.assign(value, extreme_of_all(block, b, w.copy(value), largest))
    return good


def compose_sum(block: Block, b: Items, value: Local) -> Value:
    """Write the sum of a value and all elements; return whether it is finite."""
    w = block.writer
    total = w.copy(value) + _sum(block, b)
    w.assign(value, total)
    return abs(total) < _INFINITY


def _sum(block: Block, items: Items) -> Value:
    """Return the sum of all elements in double precision."""
    w = block.writer
    many, one = w.local(w.constant(0.0, Type("float64", _LANES))), w.local(0.0, FLOAT64)
    done = block.size & -_LANES
    with w.loop(0, done, _LANES) as j:
        w.assign(many, w.copy(many) + w.cast(items.real(j, _LANES), "float64"))
    with w.loop(done, block.size) as j:
        w.assign(one, w.copy(one) + w.cast(items.real(j), "float64"))
    return sum_of_lanes(w, w.copy(many)) + w.copy(one)


def compose_logs(
    block: Block, a: Items | None, b: Items, work: Span, largest: Local, total: Local
) -> Value:
    """Write that ``exp(largest) * total`` is composed with ``h ← logaddexp(h + a, b)``.

    `work` is memory for as many numbers as the block has steps. Returns whether it can be trusted.
    """
    w, n = block.writer, block.size
    if a is None:
        block.for_all(work.itemsize, lambda j, count: work.store(j, b.real(j, count)))
    else:
        # An element meets all later shifts.
        shift = w.local(0.0, Type(work.dtype))
        with w.loop(0, n) as k:
            j = block.step(n - 1 - k)
            work.store(j, b.real(j) + w.copy(shift))
            w.assign(shift, w.copy(shift) + a.real(j))
        w.assign(largest, w.copy(largest) + w.cast(w.copy(shift), "float64"))
    good = w.local(w.copy(largest) < _INFINITY)
    with w.when(w.copy(good)):
        fine = all_below_infinity(block, work)
        w.assign(good, fine)
        with w.when(fine):
            _add_terms(block, work, largest, total)
    return w.copy(good)


def _add_terms(block: Block, terms: Span, largest: Local, total: Local) -> None:
    """Write that the exponentials of terms, which are overwritten, are added."""
    w, least = block.writer, block.writer.constant(-_INFINITY, Type(terms.dtype))
    highest = extreme_of_all(block, terms, least, largest=True)
    with w.when(highest > -_INFINITY):

        def write(j: Value, count: int) -> None:
            function = vector_function("exp", terms.dtype, count)
            (value,) = w.call(function, terms.real(j, count) - highest)
            terms.store(j, value)

        block.for_all(terms.itemsize, write)
        added, wide = _sum(block, terms), w.cast(highest, "float64")
        old = w.copy(largest)
        larger = wide > old
        scale = _exp(w, w.select(larger, old - wide, wide - old))
        known = w.copy(total)
        w.assign(total, w.select(larger, w.fma(scale, known, added), w.fma(scale, added, known)))
        w.assign(largest, w.select(larger, wide, old))
