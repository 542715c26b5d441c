"""Sums over steps and channels: the code of their partial sums and of their results."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scanlib.backends.cuda.parameters import Array
from scanlib.backends.cuda.scalar_code import item_type, memory_type

if TYPE_CHECKING:
    from scanlib.backends.cuda.printer import LoopWriter


def total_type(dtype: str) -> str:
    """Return the type in which a sum is collected: wider than its items are."""
    kind = np.dtype(dtype).kind
    totals = {"f": "float64", "i": "int64", "u": "uint64", "c": "complex128"}
    return item_type(totals[kind])


class SumWriter:
    """Writes what the template asks about sums."""

    def __init__(self, loop: LoopWriter) -> None:
        self.loop = loop
        self.source = loop.source
        self.totals = {i: total_type(loop.result.carries[i].type.dtype) for i in loop.sums}

    def write_members(self) -> None:
        """Write the partial sums of a thread, and how they are added and kept."""
        line = self.source.line
        self.loop.struct("Sums", [(kind, f"s{i}") for i, kind in self.totals.items()])
        line(f"enum {{ SUMS = {int(bool(self.totals))} }};")
        with self.source.block("SCANLIB_METHOD static void add(Sums &sums, const Sums &other)"):
            for i in self.totals:
                line(f"sums.s{i} += other.s{i};")
        head = "static void keep(const Params &p, int64_t place, const Sums &sums)"
        with self.source.block(f"SCANLIB_METHOD {head}"):
            for i, kind in self.totals.items():
                line(f"(({kind} *)p.partial{i})[place] = sums.s{i};")

    def write_results(self) -> None:
        """Write one struct for each sum."""
        for number, i in enumerate(self.totals):
            with self.source.block(f"struct Sum{number}"):
                self.write_carry(i)
            self.source.lines[-1] += ";"
        for number, i in enumerate(self.loop.summed, len(self.totals)):
            with self.source.block(f"struct Sum{number}"):
                self.write_output(i)
            self.source.lines[-1] += ";"

    def write_carry(self, i: int) -> None:
        """Write the sum over steps that a carry is: of partial sums, and its value before."""
        result, given = self.loop.arrays[f"c{i}"], self.loop.plan.outer.carries[i]
        reduced = self.loop.layout.carry_reductions[i]
        self.write_parts(self.totals[i], self.totals[i], f"partial{i}", reduced)
        kept = sorted(axis for _, axis in result.kept)
        head = "static int64_t place(const Params &p, int64_t item, int64_t inner, int64_t chunk)"
        with self.source.block(f"SCANLIB_METHOD {head}"):
            self._decode("item", kept)
            self._decode("inner", sorted(reduced))
            self.source.line(f"return chunk * p.channels + {self._channel()};")
        self.write_counts("p.chunks", "1", kept)
        self.write_total(result, kept, given)

    def write_output(self, i: int) -> None:
        """Write the sum over channels that an output is, at every step."""
        result, reduced = self.loop.arrays[f"z{i}"], self.loop.layout.output_reductions[i]
        kind = item_type(result.dtype)
        self.write_parts(total_type(result.dtype), kind, f"whole{i}", reduced)
        kept = sorted(axis for _, axis in result.kept)
        head = "static int64_t place(const Params &p, int64_t item, int64_t inner, int64_t)"
        with self.source.block(f"SCANLIB_METHOD {head}"):
            self._decode("item", kept)
            self._decode("inner", sorted(reduced))
            self.source.line(f"return item * p.channels + {self._channel()};")
        self.write_counts("1", "p.steps", kept)
        self.write_total(result, kept, None)

    def write_counts(self, parts: str, rows: str, kept: list[int]) -> None:
        """Write how many partial sums there are of each item, and how many items."""
        items = " * ".join([f"int64_t({rows})", *(f"p.n{axis}" for axis in kept)])
        for name, count in (("parts", parts), ("items", items)):
            text = f"static int64_t {name}(const Params &p) {{ return {count}; }}"
            self.source.line(f"SCANLIB_METHOD {text}")

    def write_parts(self, total: str, kind: str, work: str, reduced: tuple[int, ...]) -> None:
        """Write where the terms are, and how many belong to one item."""
        line = self.source.line
        line(f"typedef {total} Total;")
        line(
            f"SCANLIB_METHOD static {kind} part(const Params &p, int64_t place) "
            f"{{ return ((const {kind} *)p.{work})[place]; }}"
        )
        product = " * ".join(["int64_t(1)", *(f"p.n{axis}" for axis in reduced)])
        line(f"SCANLIB_METHOD static int64_t reduced(const Params &p) {{ return {product}; }}")

    def write_total(self, result: Array, kept: list[int], given: str | None) -> None:
        """Write what becomes of a sum; `given` is the array of what it is added to."""

        def place(array: Array) -> str:
            terms = [f" + e{axis} * p.{array.name}_{axis}" for _, axis in array.kept]
            time = f" + item * p.{array.name}_t" if array.lead else ""
            return f"((char *)p.{array.name}{''.join(terms)}{time})"

        kind, memory = item_type(result.dtype), memory_type(result.dtype)
        head = "static void write(const Params &p, int64_t item, Total total)"
        with self.source.block(f"SCANLIB_METHOD {head}"):
            self._decode("item", kept)
            value = "total"
            if given is not None:
                value = f"{kind}(*(const {memory} *){place(self.loop.arrays[given])}) + total"
            self.source.line(f"*({memory} *){place(result)} = {memory}({kind}({value}));")

    def _channel(self) -> str:
        """Return the number of a channel, from its places along the axes."""
        place = "0"
        for axis in range(self.loop.layout.ndim):
            place = f"({place}) * p.n{axis} + e{axis}"
        return place

    def _decode(self, number: str, axes: list[int]) -> None:
        for axis in reversed(axes):
            self.source.line(f"const int64_t e{axis} = {number} % p.n{axis};")
            self.source.line(f"{number} /= p.n{axis};")
