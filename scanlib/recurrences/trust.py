"""What scans may compose: bounds of coefficients and of values, tested by their bits.

Without the sign, the words of real numbers order like the numbers; infinities and NaN come last. A
difference of two such words is negative where the first is smaller, and the signs of all
differences are collected by `or`: the cheapest test that every vector unit has. Scans in vectors
look at what they read and write as they go (`Found`); a pass of its own takes a third as long as
the scan.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from scanlib.kernels.language import BOOL, Local, Type, Value, Writer
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.scalars import Number, Pair
from scanlib.kernels.spans import Span

# Bounds of coefficients by dtype: products of eight are normal numbers.
LOWEST = {"float64": 2.0**-120, "float32": 2.0**-15}
HIGHEST = {"float64": 2.0**120, "float32": 2.0**15}
# Below this, a value times a coefficient, and sums of some of these, do not overflow.
MODERATE = {"float64": 2.0**800, "float32": 2.0**100}

WORDS = {"float64": "int64", "float32": "int32"}
SIGN = {"float64": 63, "float32": 31}
SIDE_BY_SIDE = 2  # vectors, of a pass that looks at all of a block


def bits_of(value: float, dtype: str) -> int:
    """Return the bits of a real number as an integer."""
    return int(np.asarray(value, dtype).view(WORDS[dtype]))


def size_bits(w: Writer, value: Value) -> Value:
    """Return the bits of a number without its sign."""
    dtype = value.type.dtype
    return w.bitcast(value, WORDS[dtype]) & (2 ** SIGN[dtype] - 1)


def is_moderate(w: Writer, value: Number) -> Value:
    """Return whether a value is so far from overflow that no step from it overflows."""
    if isinstance(value, Pair):
        return is_moderate(w, value.real) & is_moderate(w, value.imag)
    if not value.type.is_float:
        return w.constant(True, BOOL)
    return abs(value) <= MODERATE[value.type.dtype]


def is_extreme(w: Writer, value: Number) -> Value:
    """Return whether products of a coefficient may leave the range of its dtype, zero aside."""
    if isinstance(value, Pair):
        real, imag = abs(value.real), abs(value.imag)
        low, high = (edge[value.real.type.dtype] for edge in (LOWEST, HIGHEST))
        within = ((real >= low) | (imag >= low)) & (real <= high) & (imag <= high)
        return ~(within | (real.equals(0.0) & imag.equals(0.0)))
    if not value.type.is_float:
        return w.constant(False, BOOL)
    low, high = (edge[value.type.dtype] for edge in (LOWEST, HIGHEST))
    size = abs(value)
    return ~(((size >= low) & (size <= high)) | value.equals(0.0))


def is_nan(w: Writer, value: Value) -> Value:
    return value.differs(value) if value.type.is_float else w.constant(False, BOOL)


def any_lane(w: Writer, value: Value) -> Value:
    """Return whether a truth value is true in some lane."""
    while value.type.lanes > 1:
        half = value.type.lanes // 2
        low = w.shuffle(value, value, range(half)) if half > 1 else w.lane(value, 0)
        high = w.shuffle(value, value, range(half, 2 * half)) if half > 1 else w.lane(value, 1)
        value = low | high
    return value


def some(w: Writer, items: Span, n: Value, test: Callable[[Value], Value]) -> Value:
    """Write a pass over the first items, and return whether a test holds for any.

    `test` takes the bits of real numbers without their signs, in lanes, and returns integers whose
    signs say whether it holds.
    """
    word = WORDS[items.dtype]
    lanes = register_bytes() // items.itemsize
    size = SIDE_BY_SIDE * lanes
    found = [w.local(w.constant(0, Type(word, lanes))) for _ in range(SIDE_BY_SIDE)]
    rest = w.local(0, Type(word))
    middle = n & -size
    with w.loop(0, middle, size) as j:
        for k, own in enumerate(found):
            bits = size_bits(w, items.real(j + k * lanes, lanes))
            w.assign(own, w.copy(own) | test(bits))
    with w.loop(middle, n) as j:
        w.assign(rest, w.copy(rest) | test(size_bits(w, items.real(j))))
    whole: Value = w.copy(found[0])
    for own in found[1:]:
        whole = whole | w.copy(own)
    return any_lane(w, whole < 0) | (w.copy(rest) < 0)


def above(limit: float, dtype: str) -> Callable[[Value], Value]:
    """Return the test for sizes above a limit; NaN is."""
    return lambda bits: bits_of(limit, dtype) - bits


def outside(dtype: str) -> Callable[[Value], Value]:
    """Return the test for coefficients that are extreme."""
    low, high = bits_of(LOWEST[dtype], dtype), bits_of(HIGHEST[dtype], dtype)
    return lambda bits: ((bits - low) & ~(bits - 1)) | (high - bits)


def some_one_by_one(w: Writer, items: Span, n: Value, test: Callable[[Number], Value]) -> Value:
    """Return whether a test holds for any of the first numbers, which may be complex."""
    found = w.local(False, BOOL)
    with w.loop(0, n) as j:
        w.assign(found, w.copy(found) | test(items.load(j)))
    return w.copy(found)


class Found:
    """Writes tests of vectors of real numbers, whose outcomes are collected."""

    def __init__(self, w: Writer, kind: Type) -> None:
        self.w, self.dtype = w, kind.dtype
        word = kind.of(WORDS[kind.dtype])
        self.place: Local = w.local(w.constant(0, word))
        # The largest of two integers takes one instruction, but of 64 bits in short registers.
        self.largest: Local | None = None
        if word.itemsize == 4 or word.itemsize * word.lanes == 64:
            self.largest = w.local(w.constant(0, word))

    def _add(self, words: Value) -> None:
        self.w.assign(self.place, self.w.copy(self.place) | words)

    def coefficients(self, vector: Value) -> None:
        """Look for coefficients whose products may leave the range of their dtype."""
        self._add(outside(self.dtype)(size_bits(self.w, vector)))

    def values(self, vector: Value) -> None:
        """Look for values that are near to overflow or not finite."""
        w, bits = self.w, size_bits(self.w, vector)
        if self.largest is None:
            self._add(above(MODERATE[self.dtype], self.dtype)(bits))
            return
        largest = w.copy(self.largest)
        w.assign(self.largest, w.select(bits > largest, bits, largest))

    def anything(self) -> Value:
        """Return whether something was found."""
        w = self.w
        if self.largest is not None:
            self._add(above(MODERATE[self.dtype], self.dtype)(w.copy(self.largest)))
        return any_lane(w, w.copy(self.place) < 0)
