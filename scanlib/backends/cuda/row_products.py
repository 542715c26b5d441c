"""Products of a row of a matrix and a vector in a semiring, and whether several steps are trusted.

Several steps are one map: its columns are what the steps make of the identity's columns, and, in
the real semiring, of zero with the offsets. Composed items may leave the range of their type where
single steps do not, so each has two bounds: of the largest number on the way (`peak`), and of the
error from underflow (`lost`). From both follow bounds for the true state. What is not trusted is
thrown away, and the steps are done one after the other.

In the other semirings offsets are factors, so a map has no constant. A value is ordinary if it is
zero, an infinity there, or far from overflow: then no sum on the way was NaN.
"""

from __future__ import annotations

from functools import reduce
from math import inf
from typing import Any

from scanlib.backends.cuda.scalar_code import Code, ScalarUnit, Source, computed
from scanlib.kernels.elementary import FORMATS, vector_function
from scanlib.kernels.language import BOOL, Type, Value, Writer
from scanlib.kernels.linalg.semiring_products import better
from scanlib.kernels.scalars import Number, Pair, parts_of
from scanlib.kernels.spans import load_number, parts
from scanlib.recurrences.losses import LARGE, is_some, size


class RowProducts:
    """Writes functions of rows and vectors of one size, as methods of a recurrence.

    Parameters
    ----------
    semiring : {"real", "log", "max", "min"}
    dtype : str
        Of the state.
    length : int
        How many items rows have.
    masked : bool
        Whether bits say which of them are there.
    """

    def __init__(self, semiring: str, dtype: str, length: int, masked: bool) -> None:
        self.semiring, self.length, self.masked = semiring, length, masked
        self.dtype = computed(dtype)
        self.real = parts_of(self.dtype) or self.dtype
        self.zero = {"real": 0.0, "min": inf}.get(semiring, -inf)
        self.unit, self.source = ScalarUnit(), Source()
        self.write_product()
        self.write_watch()
        self.write_trusted()

    def items(self, code: Code, name: str, dtype: str) -> list[Any]:
        """Return the items of an array."""
        pointer, kind = code.pointer(f"(char *){name}"), Type(self.real)
        itemsize = kind.itemsize * (2 if parts_of(dtype) else 1)
        return [
            load_number(code.writer, dtype, pointer, j * itemsize, 1) for j in range(self.length)
        ]

    def terms(self, code: Code, *more: str) -> list[tuple[Any, ...]]:
        """Return the items of a row, of a vector, and of further arrays of real numbers."""
        arrays = [self.items(code, name, self.dtype) for name in ("a", "x")]
        return list(
            zip(*arrays, *(self.items(code, name, self.real) for name in more), strict=True)
        )

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

    def ordinary(self, value: Any) -> Value:
        return value.equals(self.zero) | (abs(value) < LARGE[self.real])

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

    def write_watch(self) -> None:
        """Write what one step does to the bounds of one item; `carried` are the errors of `x`."""
        code = self.method(
            "Real watch(const Item *a, const Item *x, const Real *carried, uint64_t kept, "
            "Item offset, Item value, Real &peak)",
            "watch",
        )
        w: Writer = code.writer
        peak: Any = code.read("peak", self.real)
        offset = code.read("offset", self.dtype)
        if self.semiring != "real":
            watched = [*self.items(code, "a", self.dtype), offset, code.read("value", self.dtype)]
            good = reduce(lambda x, y: x & y, map(self.ordinary, watched))
            zero = w.constant(0, Type(self.real))
            self.end(code, [w.select(good, peak, inf), zero], "peak =", "return")
            return
        form = FORMATS[self.real]
        least, digit = 2.0 ** (1 - form.bias), 2.0 ** -(form.mantissa + 1)
        scale: Any = w.constant(0, Type(self.real))
        lost = scale
        terms = self.terms(code, "carried")
        for j, (a, x, error) in enumerate(terms):
            scale = self.kept(code, j, w.fma(size(a), size(x), scale), scale)
            lost = self.kept(code, j, w.fma(size(a), error, lost), lost)
        found = w.local(lost)
        with w.when(scale < least / digit):  # only sums of tiny terms can have lost what shows
            under: Value = w.constant(False, BOOL)
            for j, (a, x, _) in enumerate(terms):
                tiny = is_some(a) & is_some(x) & (size(a) * size(x) < least)
                under = under | self.kept(code, j, tiny, w.constant(False, BOOL))
            w.assign(found, w.select(under, lost + self.length * least, lost))
        scale = scale + size(offset)
        peak = w.select(scale > peak, scale, peak)
        peak = w.select(scale < LARGE[self.real], peak, inf)  # of NaN as well
        self.end(code, [peak, w.copy(found)], "peak =", "return")

    def write_trusted(self) -> None:
        """Write whether an item of several steps is what single steps give.

        It is where a vector holds NaN, as all further ones then do, unless items are left out.
        `peaks` and `losts` are those of the item in each column, `peak` and `lost` of the column
        that starts at zero.
        """
        code = self.method(
            "bool trusted(const Real *peaks, const Real *losts, const Item *x, Real peak, "
            "Real lost, Item result)",
            "trusted",
        )
        w, large = code.writer, LARGE[self.real]
        peaks, x = self.items(code, "peaks", self.real), self.items(code, "x", self.dtype)
        result = code.read("result", self.dtype)
        settled: Value = w.constant(False, BOOL)
        for part in [] if self.masked else [part for item in x for part in parts(item)]:
            settled = settled | part.differs(part)
        if self.semiring != "real":
            good = reduce(lambda x, y: x & y, map(self.ordinary, [result, *x]))
            good = reduce(lambda x, y: x & y, [value < large for value in peaks], good)
            self.end(code, [settled | good], "return")
            return
        peak: Any = code.read("peak", self.real)
        lost: Any = code.read("lost", self.real)
        for one, error, item in zip(peaks, self.items(code, "losts", self.real), x, strict=True):
            peak, lost = w.fma(one, size(item), peak), w.fma(error, size(item), lost)
        digit = 2.0 ** -(FORMATS[self.real].mantissa + 1)
        good = (peak < large) & (lost <= digit * size(result))
        self.end(code, [settled | good], "return")


def _times_plus(code: Code, x: Any, y: Any, z: Any) -> Any:
    """Return a product and a sum, whose parts are rounded once for each product."""
    fma = code.writer.fma
    if isinstance(x, Pair):
        real = fma(x.real, y.real, fma(-x.imag, y.imag, z.real))
        return Pair(real, fma(x.real, y.imag, fma(x.imag, y.real, z.imag)))
    return fma(x, y, z)
