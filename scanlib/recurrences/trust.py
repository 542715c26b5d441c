"""What scans may compose: bounds of elements and of values, tested by their bits.

Without the sign, the words of real numbers order like the numbers; infinities and NaN come last. A
difference of two such words is negative where the first is smaller, and the signs of all
differences are collected by `or`: the cheapest test that every vector unit has. Scans in vectors
look at what they read and write as they go (`Found`); a pass of its own takes a third as long as
the scan. A *test* takes real numbers, in any lanes, and returns integers whose signs say whether it
holds.
"""

from collections.abc import Callable

import numpy as np

from scanlib.kernels.lanes import any_lane
from scanlib.kernels.language import BOOL, INT64, Local, Type, Value, Writer
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.spans import Items, Same, walk

# Bounds of coefficients by dtype: products of eight are normal numbers.
LOWEST = {"float64": 2.0**-120, "float32": 2.0**-15}
HIGHEST = {"float64": 2.0**120, "float32": 2.0**15}
# Below this, a value times a coefficient, and sums of some of these, do not overflow.
MODERATE = {"float64": 2.0**800, "float32": 2.0**100}

WORDS = {"float64": "int64", "float32": "int32"}
SIDE_BY_SIDE = 2  # vectors, of a pass that looks at all of a block

Test = Callable[[Writer, Value], Value]


def bits_of(value: float, dtype: str) -> int:
    """Return the bits of a real number as an integer."""
    return int(np.asarray(value, dtype).view(WORDS[dtype]))


def size_bits(w: Writer, value: Value) -> Value:
    """Return the bits of a number without its sign."""
    bits = w.bitcast(value, WORDS[value.type.dtype])
    return bits & (2 ** (8 * value.type.itemsize - 1) - 1)


def above(limit: float) -> Test:
    """Return the test for sizes above a limit; NaN is."""
    return lambda w, value: bits_of(limit, value.type.dtype) - size_bits(w, value)


def outside(lowest: float, highest: float) -> Test:
    """Return the test for sizes out of bounds, zero aside; NaN is."""

    def test(w: Writer, value: Value) -> Value:
        bits = size_bits(w, value)
        low, high = (bits_of(limit, value.type.dtype) for limit in (lowest, highest))
        return ((bits - low) & ~(bits - 1)) | (high - bits)

    return test


def extreme(w: Writer, value: Value) -> Value:
    """Test for coefficients whose products may leave the range of their dtype, zero aside."""
    return outside(LOWEST[value.type.dtype], HIGHEST[value.type.dtype])(w, value)


def not_below_infinity(w: Writer, value: Value) -> Value:
    """Test for infinity and NaN; minus infinity is neither."""
    word = value.type.of(WORDS[value.type.dtype])
    return w.select(value < float("inf"), w.constant(0, word), w.constant(-1, word))


def is_moderate(w: Writer, value: Value) -> Value:
    """Return whether a value is so far from overflow that no step from it overflows."""
    if not value.type.is_float:
        return w.constant(True, BOOL)
    return abs(value) <= MODERATE[value.type.dtype]


def is_extreme(w: Writer, value: Value) -> Value:
    """Return whether products of a coefficient may leave the range of its dtype, zero aside."""
    if not value.type.is_float:
        return w.constant(False, BOOL)
    return extreme(w, value) < 0


def is_nan(w: Writer, value: Value) -> Value:
    return value.differs(value) if value.type.is_float else w.constant(False, BOOL)


def some(w: Writer, items: Items, n: Value, test: Test) -> Value:
    """Write a pass over the first items, and return whether a test holds for any."""
    if isinstance(items, Same):
        return test(w, items.real(0)) < 0
    lanes = SIDE_BY_SIDE * register_bytes() // items.itemsize
    found = {count: Found(w, Type(items.dtype, count)) for count in (lanes, 1)}

    def look(j: Value, count: int) -> None:
        found[count].look(items.real(j, count), test)

    walk(w, w.constant(0, INT64), n, [lanes], look)
    return found[lanes].anything() | found[1].anything()


class Found:
    """Writes tests of real numbers, in as many lanes as `kind` has, and collects what they find.

    `most` is the largest size of `values` that is not found.
    """

    def __init__(self, w: Writer, kind: Type, most: float | None = None) -> None:
        self.w, self.most = w, most
        word = kind.of(WORDS.get(kind.dtype, "int8"))
        self.place: Local = w.local(w.constant(0, word))
        # The largest of two integers takes one instruction, but of 64 bits in short registers.
        self.largest: Local | None = None
        if most is not None and (word.itemsize == 4 or word.itemsize * word.lanes == 64):
            self.largest = w.local(w.constant(0, word))

    def add(self, words: Value) -> None:
        self.w.assign(self.place, self.w.copy(self.place) | words)

    def look(self, value: Value, test: Test | None) -> None:
        """Look for numbers for which a test holds."""
        if test is not None:
            self.add(test(self.w, value))

    def values(self, value: Value) -> None:
        """Look for numbers that are too large, or not finite."""
        if self.most is None:
            return
        if self.largest is None:
            self.look(value, above(self.most))
            return
        bits, largest = size_bits(self.w, value), self.w.copy(self.largest)
        self.w.assign(self.largest, self.w.select(bits > largest, bits, largest))

    def anything(self) -> Value:
        """Return whether something was found."""
        w = self.w
        if self.largest is not None and self.most is not None:
            dtype = {"int64": "float64", "int32": "float32"}[self.largest.type.dtype]
            self.add(bits_of(self.most, dtype) - w.copy(self.largest))
        return any_lane(w, w.copy(self.place) < 0)
