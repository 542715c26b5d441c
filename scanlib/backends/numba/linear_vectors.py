r"""Small fixed matrices: several steps at once, columns in vector registers.

For ``h_t = A h_{t-1} + b_t`` one step takes as long as the chain of multiplications and additions
from one state to the next. With ``c_1 = b_1``, ``c_q = A c_{q-1} + b_q`` the next `k` states are

    h_q = A^q h_0 + c_q,    q = 1 … k

and the chain has one product for `k` steps; the `c_q` do not depend on it. A product is a sum of
columns of the matrix, each held in one vector, times one number of the state.

Composing may overflow where the steps one after the other do not: the function returned here says
whether all states it wrote are finite, and the caller repeats a block that has others step by
step, with ``k = 1``. (J. Kogge and H. Stone, "A parallel algorithm for the efficient solution of a
general class of recurrence equations", 1973, of which this is the sequential use.)

Larger products, ``new = add + Σ_j factor_j row_j``, run over the items of the result in tiles of a
few vectors that stay in registers while `j` runs; `combine` writes them. The order in which an
item's terms are added depends on sizes alone, so results are the same at every run.

The code is written as LLVM's intermediate representation, because loops over four numbers are not
reliably turned into vectors by compilers.
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

VERSION = "scanlib-linear-vectors-3"
WIDEST = 8  # columns longer than this do not fit the registers
BLOCK = 64  # steps after which finiteness is checked


def look_ahead(size: int) -> int:
    """Return how many steps to take at once for matrices of a size."""
    return 4 if size <= 4 else 2


class _Writer:
    """Writes vector code of one function."""

    def __init__(self, builder: Any, number: Any, size: int, itemsize: int) -> None:
        self.builder = builder
        self.size = size
        self.itemsize = itemsize
        self.type = ir.VectorType(number, size)
        name = f"llvm.fma.v{size}f{8 * itemsize}"
        kind = ir.FunctionType(self.type, [self.type] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, kind, name)

    def address(self, pointer: Any, index: Any) -> Any:
        return self.builder.bitcast(self.builder.gep(pointer, [index]), self.type.as_pointer())

    def load(self, pointer: Any, index: Any) -> Any:
        return self.builder.load(self.address(pointer, index), align=self.itemsize)

    def store(self, value: Any, pointer: Any, index: Any) -> None:
        self.builder.store(value, self.address(pointer, index), align=self.itemsize)

    def fma(self, a: Any, b: Any, c: Any) -> Any:
        return self.builder.call(self._fma, [a, b, c])

    def copies(self, vector: Any) -> list[Any]:
        """Return, for each item, a vector that repeats it."""
        undefined = ir.Constant(self.type, ir.Undefined)
        masks = ir.VectorType(ir.IntType(32), self.size)
        return [
            self.builder.shuffle_vector(vector, undefined, ir.Constant(masks, [j] * self.size))
            for j in range(self.size)
        ]

    def repeated(self, number: Any) -> Any:
        """Return a vector that repeats a number."""
        undefined = ir.Constant(self.type, ir.Undefined)
        first = self.builder.insert_element(undefined, number, ir.Constant(ir.IntType(32), 0))
        mask = ir.Constant(ir.VectorType(ir.IntType(32), self.size), [0] * self.size)
        return self.builder.shuffle_vector(first, undefined, mask)

    def product(self, columns: list[Any], items: list[Any], start: Any) -> Any:
        """Return ``start + Σ_j columns[j] items[j]``, in two chains."""
        half = self.size if self.size <= 2 else self.size // 2
        first = start
        for column, item in zip(columns[:half], items[:half], strict=True):
            first = self.fma(column, item, first)
        if half == self.size:
            return first
        second = self.builder.fmul(columns[half], items[half])
        for column, item in zip(columns[half + 1 :], items[half + 1 :], strict=True):
            second = self.fma(column, item, second)
        return self.builder.fadd(first, second)

    def all_ordered(self, vector: Any) -> Any:
        """Return whether no item is NaN."""
        bad = self.builder.fcmp_unordered("uno", vector, vector)
        result = self.builder.extract_element(bad, ir.Constant(ir.IntType(32), 0))
        for j in range(1, self.size):
            item = self.builder.extract_element(bad, ir.Constant(ir.IntType(32), j))
            result = self.builder.or_(result, item)
        return self.builder.not_(result)


@cache
def vector_steps(size: int, ahead: int, has_offset: bool) -> Callable[..., Any]:
    """Return the function that takes `ahead` steps `n` times.

    Its arguments are the history, the columns of the powers of the matrix (shape ``(ahead, size,
    size)``, columns in rows), the offset, then positions in items: of the row before the first
    step and the distance from row to row, both in the history, the same in the offset, and `n`.
    It returns whether all states are finite.
    """

    @intrinsic
    def steps(context, history, powers, offset, row, row_step, offset_row, offset_step, n):
        signature = types.boolean(
            history, powers, offset, row, row_step, offset_row, offset_step, n
        )

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = signature.args[0].dtype
            writer = _Writer(builder, context.get_value_type(number), size, number.bitwidth // 8)
            data = [
                context.make_array(signature.args[i])(context, builder, arguments[i]).data
                for i in range(3)
            ]
            return _write_steps(writer, data, arguments[3:], ahead, has_offset)

        return signature, codegen

    return steps


def _write_steps(
    writer: _Writer, data: list[Any], places: Any, ahead: int, has_offset: bool
) -> Any:
    history, powers, offset = data
    first_row, row_step, first_offset, offset_step, count = places
    builder, size = writer.builder, writer.size
    index = ir.IntType(64)
    columns = [
        [writer.load(powers, ir.Constant(index, (q * size + j) * size)) for j in range(size)]
        for q in range(ahead)
    ]
    zero = ir.Constant(writer.type, [0.0] * size)
    state = cgutils.alloca_once_value(builder, writer.load(history, first_row))
    check = cgutils.alloca_once_value(builder, zero)
    row = cgutils.alloca_once_value(builder, first_row)
    offset_row = cgutils.alloca_once_value(builder, first_offset)
    with cgutils.for_range(builder, count):
        constants: list[Any] = []
        place = builder.load(offset_row)
        for _ in range(ahead):
            if not has_offset:
                constants.append(zero)
                continue
            own = writer.load(offset, place)
            place = builder.add(place, offset_step)
            if constants:
                own = writer.product(columns[0], writer.copies(constants[-1]), own)
            constants.append(own)
        builder.store(place, offset_row)
        items = writer.copies(builder.load(state))
        place, total = builder.load(row), builder.load(check)
        for q in range(ahead):
            place = builder.add(place, row_step)
            new = writer.product(columns[q], items, constants[q])
            writer.store(new, history, place)
            total = writer.fma(new, zero, total)  # NaN as soon as a state is not finite
        builder.store(new, state)
        builder.store(place, row)
        builder.store(total, check)
    return writer.all_ordered(builder.load(check))


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
        writer = _Writer(builder, self.number, size, self.itemsize)
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

    def term(self, writer: _Writer, j: Any, columns: list[Any], totals: list[list[Any]]) -> None:
        """Write the addition of row `j` times its factors."""
        builder = self.builder
        row = builder.mul(j, self.distance)
        items = [writer.load(self.rows, builder.add(row, at)) for at in columns]
        for line, own in enumerate(totals):
            at = builder.add(builder.mul(self.count, self.integer(line)), j)
            factor = writer.repeated(builder.load(builder.gep(self.factors, [at])))
            for item, total in zip(items, own, strict=True):
                builder.store(writer.fma(item, factor, builder.load(total)), total)
