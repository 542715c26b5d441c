r"""Small fixed matrices: several steps at once, columns in vector registers.

For ``h_t = A h_{t-1} + b_t`` one step takes as long as the chain of multiplications and additions
from one state to the next. With ``c_1 = b_1``, ``c_q = A c_{q-1} + b_q`` the next `k` states are

    h_q = A^q h_0 + c_q,    q = 1 … k

and the chain has one product for `k` steps; the `c_q` do not depend on it. A product is a sum of
columns of the matrix, each held in one vector, times one number of the state.

Composing may overflow where the steps one after the other do not: the function returned here says
whether all states it wrote are finite, and the caller repeats a block that has others step by
step, with ``k = 1``. Powers may also be zero where what they give of a large state is not: steps
are composed where the items of the matrix are in `powers_range`. (J. Kogge and H. Stone, "A
parallel algorithm for the efficient solution of a general class of recurrence equations", 1973, of
which this is the sequential use.)

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

VERSION = "scanlib-linear-vectors-6"
WIDEST = 8  # columns longer than this do not fit the registers
BLOCK = 64  # steps after which finiteness is checked


def look_ahead(size: int) -> int:
    """Return how many steps to take at once for matrices of a size."""
    return 4 if size <= 4 else 2


def powers_range(dtype: Any) -> tuple[float, float]:
    """Return the sizes of items, zero aside, whose products of four are no subnormal numbers."""
    power = 30 if dtype == "float32" else 250
    return 2.0**-power, 2.0**power


class VectorWriter:
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

    def transposed(self, rows: list[Any]) -> list[Any]:
        """Return the columns of a matrix given by rows."""
        builder, size = self.builder, self.size
        masks = ir.VectorType(ir.IntType(32), size)
        if size & (size - 1):
            lanes = [ir.Constant(ir.IntType(32), k) for k in range(size)]
            columns = []
            for j in range(size):
                column = ir.Constant(self.type, ir.Undefined)
                for i, row in enumerate(rows):
                    item = builder.extract_element(row, lanes[j])
                    column = builder.insert_element(column, item, lanes[i])
                columns.append(column)
            return columns
        rows, block = list(rows), 1
        while block < size:
            # Blocks off the diagonal change places.
            low = [k if not k & block else size + k - block for k in range(size)]
            high = [k + block if not k & block else size + k for k in range(size)]
            for i in range(size):
                if not i & block:
                    one, two = rows[i], rows[i + block]
                    rows[i] = builder.shuffle_vector(one, two, ir.Constant(masks, low))
                    rows[i + block] = builder.shuffle_vector(one, two, ir.Constant(masks, high))
            block *= 2
        return rows

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
            writer = VectorWriter(
                builder, context.get_value_type(number), size, number.bitwidth // 8
            )
            data = [
                context.make_array(signature.args[i])(context, builder, arguments[i]).data
                for i in range(3)
            ]
            return _write_steps(writer, data, arguments[3:], ahead, has_offset)

        return signature, codegen

    return steps


def _write_steps(
    writer: VectorWriter, data: list[Any], places: Any, ahead: int, has_offset: bool
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


@dataclass(frozen=True)
class StepKind:
    """What steps with a matrix for each do.

    The rows of a matrix are the columns of the product, unless it is `turned`. Where steps are
    `checked`, they say whether all states are finite. `outer` is what else is written: ``"after"``
    for the products ``s_i x_j`` of each state `s` and a row `x` of another array, ``"before"`` for
    ``x_i s_j``, or nothing.
    """

    turned: bool
    has_offset: bool
    checked: bool = False
    outer: str = ""


@cache
def matrix_steps(size: int, kind: StepKind) -> Callable[..., Any]:
    """Return the function that takes `n` steps, each with a matrix of its own.

    The arguments are the history, the matrices, the offset, the other array and the products (or
    anything, where there are none), then positions in items and distances: of the row before the
    first step, of the matrix, and of the row of the offset; and `n`.
    """

    @intrinsic
    def steps(
        context, history, matrices, offset, other, outer,
        row, row_step, place, place_step, add, add_step, n,
    ):  # fmt: skip
        result = types.boolean if kind.checked else types.void
        arrays = history, matrices, offset, other, outer
        signature = result(*arrays, row, row_step, place, place_step, add, add_step, n)

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = signature.args[0].dtype
            writer = VectorWriter(
                builder, context.get_value_type(number), size, number.bitwidth // 8
            )
            data = [
                context.make_array(signature.args[i])(context, builder, arguments[i]).data
                for i in range(len(arrays))
            ]
            check = _write_matrix_steps(writer, data, arguments[len(arrays) :], kind)
            return writer.all_ordered(check) if kind.checked else context.get_dummy_value()

        return signature, codegen

    return steps


def _write_matrix_steps(writer: VectorWriter, data: list[Any], places: Any, kind: StepKind) -> Any:
    history, matrices, offset, other, outer = data
    builder, size = writer.builder, writer.size

    def write_outer(value: Any, row: Any) -> None:
        pair = value, writer.load(other, row)
        left, right = pair if kind.outer == "after" else reversed(pair)
        first = builder.mul(row, ir.Constant(row.type, size))
        for i, item in enumerate(writer.copies(left)):
            place = builder.add(first, ir.Constant(row.type, i * size))
            writer.store(builder.fmul(item, right), outer, place)

    state = cgutils.alloca_once_value(builder, writer.load(history, places[0]))
    if kind.outer:
        write_outer(builder.load(state), places[0])
    row, matrix, add = (cgutils.alloca_once_value(builder, places[k]) for k in (0, 2, 4))
    zero = ir.Constant(writer.type, [0.0] * size)
    check = cgutils.alloca_once_value(builder, zero)
    with cgutils.for_range(builder, places[6]):
        start = zero
        if kind.has_offset:
            start = writer.load(offset, builder.load(add))
            builder.store(builder.add(builder.load(add), places[5]), add)
        at = builder.load(matrix)
        columns = [
            writer.load(matrices, builder.add(at, ir.Constant(at.type, j * size)))
            for j in range(size)
        ]
        if kind.turned:
            columns = writer.transposed(columns)
        new = writer.product(columns, writer.copies(builder.load(state)), start)
        builder.store(builder.add(at, places[3]), matrix)
        builder.store(builder.add(builder.load(row), places[1]), row)
        writer.store(new, history, builder.load(row))
        if kind.outer:
            write_outer(new, builder.load(row))
        builder.store(new, state)
        if kind.checked:
            builder.store(writer.fma(new, zero, builder.load(check)), check)
    return builder.load(check)
