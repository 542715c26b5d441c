"""Products of a row of a matrix and a vector in a semiring, and whether two items agree.

Several steps are one map: its columns are what the steps make of the identity's columns, and, in
the real semiring, of zero with the offsets. In the other semirings offsets are factors, so a map
has no constant. Composed items may leave the range of their type where single steps do not, so the
state that a map gives is compared with what single steps give. They agree where NaN and infinity
are at the same places, and every other item differs by less than five eighths of the digits of its
own scale, the larger one of what it was after the last two steps. So an item that is small beside
others is not lost, and one that passes through zero is no alarm. Items that are near overflow must
be equal.
"""

from __future__ import annotations

from functools import reduce
from math import inf
from typing import Any

from scanlib.backends.cuda.scalar_code import Code, ScalarUnit, computed
from scanlib.kernels.elementary import FORMATS, vector_function
from scanlib.kernels.language import BOOL, Type, Value
from scanlib.kernels.linalg.semiring_products import better
from scanlib.kernels.printers.c import Source
from scanlib.kernels.scalars import Number, Pair, parts_of
from scanlib.kernels.spans import load_number, parts
from scanlib.recurrences.losses import LARGE, size


class RowProducts:
    """Writes functions of rows and vectors of `length` items, as methods of a recurrence; if
    `masked`, bits say which items of a row are there."""

    def __init__(self, semiring: str, dtype: str, length: int, masked: bool) -> None:
        self.semiring, self.length, self.masked = semiring, length, masked
        self.dtype = computed(dtype)
        self.real = parts_of(self.dtype) or self.dtype
        self.zero = {"real": 0.0, "min": inf}.get(semiring, -inf)
        self.unit, self.source = ScalarUnit(), Source()
        self.write_product()
        self.write_scale()
        self.write_agrees()

    def items(self, code: Code, name: str, dtype: str) -> list[Any]:
        """Return the items of an array."""
        pointer, kind = code.pointer(f"(char *){name}"), Type(self.real)
        itemsize = kind.itemsize * (2 if parts_of(dtype) else 1)
        return [
            load_number(code.writer, dtype, pointer, j * itemsize, 1) for j in range(self.length)
        ]

    def terms(self, code: Code) -> list[tuple[Any, ...]]:
        """Return the items of a row and of a vector."""
        arrays = [self.items(code, name, self.dtype) for name in ("a", "x")]
        return list(zip(*arrays, strict=True))

    def kept(self, code: Code, j: int, value: Any, other: Any) -> Any:
        """Return a value where item `j` is there, another one where it is not."""
        if not self.masked:
            return value
        w, bits = code.writer, code.parameter("kept", Type("uint64"))
        there = ((bits >> j) & 1).differs(0)
        if isinstance(value, Pair):
            return Pair(
                w.select(there, value.real, other.real), w.select(there, value.imag, other.imag)
            )
        return w.select(there, value, other)

    def method(self, head: str, name: str) -> Code:
        self.source.line(f"SCANLIB_METHOD static {head} {{")
        return Code(self.unit, f"scanlib_{name}")

    def end(self, code: Code, results: list[Number], *targets: str) -> None:
        code.write(self.source, results, [*targets])
        self.source.line("}")

    def write_product(self) -> None:
        code = self.method("Item product(const Item *a, const Item *x, uint64_t kept)", "product")
        w, terms = code.writer, self.terms(code)
        if self.semiring == "real":
            total: Any = code.scalars.constant(0, self.dtype)
            for j, (a, x) in enumerate(terms):
                total = self.kept(code, j, _times_plus(code, a, x, total), total)
            self.end(code, [total], "return")
            return
        sums = [a + x for a, x in terms]
        order = "min" if self.semiring == "min" else "max"
        most = reduce(lambda best, value: better(w, order, best, value), sums)
        if self.semiring == "log":  # shifted by the largest term, so that no exponential overflows
            exp, log = (vector_function(name, self.dtype, 1) for name in ("exp", "log"))
            shift = w.select(abs(most) < inf, most, 0.0)
            total = reduce(lambda x, y: x + y, [w.call(exp, value - shift)[0] for value in sums])
            most = shift + w.call(log, total)[0]
        self.end(code, [most], "return")

    def write_scale(self) -> None:
        """Write the larger one of a scale and of an item that is far from overflow."""
        code = self.method("Real scale(Item x, Real most)", "scale")
        new, most = size(code.read("x", self.dtype)), code.read("most", self.real)
        larger = (new > most) & (new < LARGE[self.real])
        self.end(code, [code.writer.select(larger, new, most)], "return")

    def write_agrees(self) -> None:
        """Write whether two items are the same, but for rounding at their scale."""
        code = self.method("bool agrees(Item x, Item y, Real scale)", "agrees")
        scale: Any = code.read("scale", self.real)
        room = scale * 2.0 ** -(FORMATS[self.real].mantissa * 5 // 8)
        good: Value = code.writer.constant(True, BOOL)
        for x, y in zip(*(parts(code.read(name, self.dtype)) for name in "xy"), strict=True):
            same = x.equals(y) | (x.differs(x) & y.differs(y))
            good = good & (same | (abs(x - y) <= room))
        self.end(code, [good], "return")


def _times_plus(code: Code, x: Any, y: Any, z: Any) -> Any:
    """Return a product and a sum, whose parts are rounded once for each product."""
    fma = code.writer.fma
    if isinstance(x, Pair):
        real = fma(x.real, y.real, fma(-x.imag, y.imag, z.real))
        return Pair(real, fma(x.real, y.imag, fma(x.imag, y.real, z.imag)))
    return fma(x, y, z)
