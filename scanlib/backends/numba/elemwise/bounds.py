"""What scans may compose: bounds of coefficients and of values, tested by their bits.

Without the sign, the words of real numbers order like the numbers; infinities and NaN come last. A
difference of two such words is negative where the first is smaller, and the signs of all
differences are collected by `or`: the cheapest test that every vector unit has. Scans in vectors
look at what they read and write as they go (`Found`); a pass of its own takes a third as long as
the scan.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

# Bounds of coefficients by the bits of a real number: products of eight are normal numbers.
LOWEST: dict[int, Any] = {64: 2.0**-120, 32: np.float32(2.0**-15)}
HIGHEST: dict[int, Any] = {64: 2.0**120, 32: np.float32(2.0**15)}
# Below this, a value times a coefficient, and sums of some of these, do not overflow.
MODERATE: dict[int, Any] = {64: 2.0**800, 32: np.float32(2.0**100)}

WORDS: dict[int, Any] = {64: np.int64, 32: np.int32}
ALL_BUT_SIGN: dict[int, Any] = {64: np.int64(2**63 - 1), 32: np.int32(2**31 - 1)}


def bits_of(value: float, width: int) -> Any:
    """Return the bits of a real number of so many, as an integer."""
    number: Any = np.float64(value) if width == 64 else np.float32(value)
    return number.view(WORDS[width])


class Found:
    """Writes tests of vectors of real numbers, whose outcomes are collected."""

    def __init__(self, builder: Any, lanes: int, width: int) -> None:
        self.builder, self.width = builder, width
        self.kind, self.mask = ir.VectorType(ir.IntType(width), lanes), ir.IntType(lanes)
        self.place = cgutils.alloca_once_value(builder, self._all(0))
        # The largest of two integers takes one instruction, but of 64 bits in short registers.
        self.has_largest = width == 32 or lanes * width == 512
        self.largest = cgutils.alloca_once_value(builder, self._all(0))

    def _all(self, number: Any) -> Any:
        return ir.Constant(self.kind, [int(number)] * self.kind.count)

    def _bits(self, vector: Any) -> Any:
        bits = self.builder.bitcast(vector, self.kind)
        return self.builder.and_(bits, self._all(ALL_BUT_SIGN[self.width]))

    def _add(self, words: Any) -> None:
        builder = self.builder
        builder.store(builder.or_(builder.load(self.place), words), self.place)

    def coefficients(self, vector: Any) -> None:
        """Look for coefficients whose products may leave the range of their dtype."""
        builder, bits = self.builder, self._bits(vector)
        low, high = (self._all(bits_of(edge[self.width], self.width)) for edge in (LOWEST, HIGHEST))
        below = builder.and_(  # zero is allowed
            builder.sub(bits, low), builder.not_(builder.sub(bits, self._all(1)))
        )
        self._add(builder.or_(below, builder.sub(high, bits)))

    def values(self, vector: Any) -> None:
        """Look for values that are near to overflow or not finite."""
        builder, bits = self.builder, self._bits(vector)
        if not self.has_largest:
            self._add_above(bits)
            return
        largest = builder.load(self.largest)
        is_larger = builder.icmp_signed(">", bits, largest)
        builder.store(builder.select(is_larger, bits, largest), self.largest)

    def _add_above(self, bits: Any) -> None:
        highest = self._all(bits_of(MODERATE[self.width], self.width))
        self._add(self.builder.sub(highest, bits))

    def anything(self) -> Any:
        """Return whether something was found."""
        builder = self.builder
        if self.has_largest:
            self._add_above(builder.load(self.largest))
        signs = builder.icmp_signed("<", builder.load(self.place), self._all(0))
        return builder.icmp_unsigned("!=", builder.bitcast(signs, self.mask), self.mask(0))
