"""Running maxima and minima, as many steps at a time as a vector register has lanes."""

from __future__ import annotations

from collections.abc import Callable

from scanlib.kernels.language import BOOL, Type, Value, Writer
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.spans import Items, Span
from scanlib.recurrences.lanes import Block, Lanes
from scanlib.recurrences.trust import WORDS, above, any_lane, is_nan, size_bits

MOST_LANES = 16
SIDE_BY_SIDE = 4  # vectors, of which none waits for another

Pick = Callable[[Value, Value], Value]


def picking(w: Writer, largest: bool) -> Pick:
    """Return what writes the choice of one of two values, the second one where neither is."""

    def pick(a: Value, b: Value) -> Value:
        if a.type.dtype == "bool":
            wide = [w.cast(value, "int8") for value in (a, b)]
            return w.select(wide[0] > wide[1] if largest else wide[0] < wide[1], a, b)
        return w.select(a > b if largest else a < b, a, b)

    return pick


def scan_extremes(block: Block, b: Items, h: Span, before: Value, largest: bool) -> Value:
    """Write ``h = max(h, b)`` or `min`; return whether there is no NaN, which it would lose."""
    w, n = block.writer, block.size
    pick, real = picking(w, largest), before.type.is_float
    lanes = min(MOST_LANES, register_bytes() // h.itemsize)
    v = Lanes(w, h.dtype, block.reverse, lanes, lanes)
    state = w.local(w.splat(before, lanes))
    # What is looked at as it is read: the signs of the outcomes say whether it is a NaN.
    test = above(float("inf"), h.dtype) if real else None
    word = WORDS.get(h.dtype, h.dtype)
    found = w.local(w.constant(0, Type(word, lanes)))
    rest = w.local(0, Type(word))
    done = n & -lanes
    with w.loop(0, done, lanes) as k:
        place = n - lanes - k if block.reverse else k
        block.fetch(place, lanes)
        values = b.real(place, lanes)
        if test is not None:
            w.assign(found, w.copy(found) | test(size_bits(w, values)))
        by = 1
        while by < lanes:  # lanes without an earlier one are compared with themselves
            values = pick(v.earlier_or_same(values, by), values)
            by *= 2
        latest = w.copy(state)
        h.store(place, pick(values, latest))
        w.assign(state, pick(v.splat_last(values, 0), latest))
    one = w.local(w.lane(w.copy(state), 0))
    with w.loop(done, n) as k:
        j = block.step(k)
        item = b.real(j)
        if test is not None:
            w.assign(rest, w.copy(rest) | test(size_bits(w, item)))
        value = pick(item, w.copy(one))
        w.assign(one, value)
        h.store(j, value)
    if not real:
        return w.constant(True, BOOL)
    return ~(is_nan(w, before) | any_lane(w, w.copy(found) < 0) | (w.copy(rest) < 0))


def extreme_of_all(block: Block, b: Items, value: Value, largest: bool) -> Value:
    """Write the extreme of a real number and all elements of a block; return it."""
    w, n = block.writer, block.size
    lanes = register_bytes() // value.type.itemsize
    v = Lanes(w, value.type.dtype, False, lanes, lanes)
    pick, size = picking(w, largest), SIDE_BY_SIDE * lanes
    found = [w.local(w.splat(value, lanes)) for _ in range(SIDE_BY_SIDE)]
    done = n & -size
    with w.loop(0, done, size) as place:
        for k, own in enumerate(found):
            w.assign(own, pick(b.real(place + k * lanes, lanes), w.copy(own)))
    most: Value = w.copy(found[0])
    for own in found[1:]:
        most = pick(w.copy(own), most)
    by = 1
    while by < lanes:
        most = pick(v.earlier(most, by), most)
        by *= 2
    result = w.local(v.last(most, 0))
    with w.loop(done, n) as j:
        w.assign(result, pick(b.real(j), w.copy(result)))
    return w.copy(result)
