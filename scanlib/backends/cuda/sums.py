"""Sums over steps and channels: the code of their partial sums and of their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scanlib.backends.cuda.scalars import item_type

if TYPE_CHECKING:
    from scanlib.backends.cuda.printer import LoopWriter


def total_type(dtype: str) -> str:
    """Return the type in which a sum is collected: wider than its items are."""
    kind = np.dtype(dtype).kind
    return {"f": "npy_float64", "i": "npy_int64", "u": "npy_uint64"}[kind]


class SumWriter:
    """Writes what the template asks about sums."""

    def __init__(self, loop: LoopWriter) -> None:
        self.loop = loop
        self.source = loop.source
        self.totals = {
            i: total_type(loop.result.carries[i].type.dtype) for i in loop.sums
        }

    def write_members(self) -> None:
        """Write the partial sums of a thread, and how they are added and kept."""
        line = self.source.line
        self.loop.struct("Sums", [(kind, f"s{i}") for i, kind in self.totals.items()])
        with self.source.block("SCANLIB_METHOD static void add(Sums &sums, const Sums &other)"):
            for i in self.totals:
                line(f"sums.s{i} += other.s{i};")
        head = "static void keep(const Params &p, npy_intp place, const Sums &sums)"
        with self.source.block(f"SCANLIB_METHOD {head}"):
            for i, kind in self.totals.items():
                line(f"(({kind} *)p.partial{i})[place] = sums.s{i};")

    def write_results(self) -> None:
        """Write one struct for each sum."""
        for number, i in enumerate(self.totals):
            with self.source.block(f"struct Sum{number}"):
                self.write_result(i)
            self.source.lines[-1] += ";"

    def write_result(self, i: int) -> None:
        line, loop, kind = self.source.line, self.loop, self.totals[i]
        reduced = loop.layout.carry_reductions[i]
        line(f"typedef {kind} Total;")
        line(
            f"SCANLIB_METHOD static const {kind} *partial(const Params &p) "
            f"{{ return (const {kind} *)p.partial{i}; }}"
        )
        product = " * ".join(["npy_intp(1)", *(f"p.n{axis}" for axis in reduced)])
        line(f"SCANLIB_METHOD static npy_intp reduced(const Params &p) {{ return {product}; }}")
        result = loop.arrays[f"c{i}"]
        kept = sorted(axis for _, axis in result.kept)
        head = "static npy_intp channel(const Params &p, npy_intp item, npy_intp inner)"
        with self.source.block(f"SCANLIB_METHOD {head}"):
            self._decode("item", kept)
            self._decode("inner", sorted(reduced))
            place = "0"
            for axis in range(loop.layout.ndim):
                place = f"({place}) * p.n{axis} + e{axis}"
            line(f"return {place};")
        head = "static void write(const Params &p, npy_intp item, Total total)"
        with self.source.block(f"SCANLIB_METHOD {head}"):
            self._decode("item", kept)
            given = loop.arrays[loop.plan.outer.carries[i]]
            places = [
                f"(char *)p.{array.name}"
                + "".join(f" + e{axis} * p.{array.name}_{axis}" for _, axis in array.kept)
                for array in (given, result)
            ]
            kind = item_type(result.dtype)
            memory = "scanlib_half" if result.dtype == "float16" else kind
            start = f"{kind}(*(const {memory} *)({places[0]}))"
            line(f"*({memory} *)({places[1]}) = {memory}({kind}({start} + total));")

    def _decode(self, number: str, axes: list[int]) -> None:
        for axis in reversed(axes):
            self.source.line(f"const npy_intp e{axis} = {number} % p.n{axis};")
            self.source.line(f"{number} /= p.n{axis};")
