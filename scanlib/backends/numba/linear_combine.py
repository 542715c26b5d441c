"""Combinations of rows, ``new = add + Σ_j factor_j row_j``: products of larger matrices.

They run over the items of the result in tiles of a few vectors that stay in registers while `j`
runs. The order in which an item's terms are added depends on sizes alone, so results are the same
at every run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from scanlib.backends.numba.linear_vectors import VectorWriter

VERSION = "scanlib-linear-combine-1"
# Tiles of one line of the result, from wide to narrow: how many vectors, the part of a full
# vector, and how many terms are summed apart, so that additions need not wait for one another.
_TILES = ((4, 1, 2), (1, 1, 4), (1, 2, 4))
# Tiles of several lines: each row that is read serves all of them.
_TILES_OF_LINES = ((2, 1, 1), (1, 1, 1), (1, 2, 1))
LINES = 4
_VECTOR_BYTES = 64


@cache
def combine(lines: int, has_addend: bool) -> Callable[..., Any]:
    """Return the function that writes combinations of rows, for some lines of a result at once.

    Its arguments are the result and the position of its first item, the factors and theirs, the
    rows, the position of the first one and their distance, the number of rows and of items of
    each, the addend and its position (ignored without `has_addend`); a line of the result, and of
    the addend, starts `width` items after the one before, a line of factors `count` items.
    """

    @intrinsic
    def combined(
        context, out, out_at, factors, factors_at, rows, rows_at, step, count, width, add, add_at
    ):
        signature = types.void(
            out, out_at, factors, factors_at, rows, rows_at, step, count, width, add, add_at
        )

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = signature.args[0].dtype

            def start(array: int, position: int) -> Any:
                made = context.make_array(signature.args[array])
                data = made(context, builder, arguments[array]).data
                return builder.gep(data, [arguments[position]])

            _Combination(
                builder=builder,
                number=context.get_value_type(number),
                itemsize=number.bitwidth // 8,
                lines=lines,
                out=start(0, 1),
                factors=start(2, 3),
                rows=start(4, 5),
                add=start(9, 10) if has_addend else None,
                distance=arguments[6],
                count=arguments[7],
                width=arguments[8],
            ).write()
            return context.get_dummy_value()

        return signature, codegen

    return combined


@dataclass
class _Combination:
    """Writes the code of `combine`."""

    builder: Any
    number: Any
    itemsize: int
    lines: int
    out: Any
    factors: Any
    rows: Any
    add: Any
    distance: Any
    count: Any
    width: Any

    def integer(self, value: int) -> Any:
        return ir.Constant(ir.IntType(64), value)

    def write(self) -> None:
        done: Any = self.integer(0)
        full = _VECTOR_BYTES // self.itemsize
        tiles = _TILES if self.lines == 1 else _TILES_OF_LINES
        for vectors, part, apart in (*tiles, (1, full, 4 if self.lines == 1 else 1)):
            done = self.tiles(done, vectors, full // part, apart)

    def tiles(self, start: Any, vectors: int, size: int, apart: int) -> Any:
        """Write tiles of one size as long as they fit, and return where they end."""
        builder = self.builder
        step = self.integer(vectors * size)
        tiles = builder.sdiv(builder.sub(self.width, start), step)
        end = builder.add(start, builder.mul(tiles, step))
        with cgutils.for_range_slice(builder, start, end, step, step.type) as (place, _):
            self.tile(place, vectors, size, apart)
        return end

    def tile(self, place: Any, vectors: int, size: int, apart: int) -> None:
        """Write one tile; its sums are ``[part][line][vector]``."""
        builder, lines = self.builder, range(self.lines)
        writer = VectorWriter(builder, self.number, size, self.itemsize)
        zero = ir.Constant(writer.type, [0.0] * size)
        columns = [builder.add(place, self.integer(v * size)) for v in range(vectors)]
        places = [
            [builder.add(builder.mul(self.width, self.integer(k)), at) for at in columns]
            for k in lines
        ]
        sums = [
            [[cgutils.alloca_once(builder, writer.type) for _ in columns] for _ in lines]
            for _ in range(apart)
        ]
        for part, totals in enumerate(sums):
            for line in lines:
                for total, at in zip(totals[line], places[line], strict=True):
                    first = zero if part or self.add is None else writer.load(self.add, at)
                    builder.store(first, total)
        whole = builder.mul(builder.sdiv(self.count, self.integer(apart)), self.integer(apart))
        step, one = self.integer(apart), self.integer(1)
        with cgutils.for_range_slice(builder, self.integer(0), whole, step, one.type) as (j, _):
            for part, totals in enumerate(sums):
                self.term(writer, builder.add(j, self.integer(part)), columns, totals)
        with cgutils.for_range_slice(builder, whole, self.count, one, one.type) as (j, _):
            self.term(writer, j, columns, sums[0])
        for line in lines:
            for v, at in enumerate(places[line]):
                parts = [builder.load(totals[line][v]) for totals in sums]
                while len(parts) > 1:
                    pairs = zip(parts[::2], parts[1::2], strict=True)
                    parts = [builder.fadd(a, b) for a, b in pairs]
                writer.store(parts[0], self.out, at)

    def term(
        self, writer: VectorWriter, j: Any, columns: list[Any], totals: list[list[Any]]
    ) -> None:
        """Write the addition of row `j` times its factors."""
        builder = self.builder
        row = builder.mul(j, self.distance)
        items = [writer.load(self.rows, builder.add(row, at)) for at in columns]
        for line, own in enumerate(totals):
            at = builder.add(builder.mul(self.count, self.integer(line)), j)
            factor = writer.repeated(builder.load(builder.gep(self.factors, [at])))
            for item, total in zip(items, own, strict=True):
                builder.store(writer.fma(item, factor, builder.load(total)), total)
