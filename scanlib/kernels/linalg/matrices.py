"""Matrices in memory, as what linear algebra takes and fills."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from itertools import islice
from typing import Any

from scanlib.kernels.language import (
    BOOL,
    INT64,
    POINTER,
    Constant,
    Function,
    Type,
    Value,
    Writer,
    write_function,
)

Size = Value | int


@dataclass(frozen=True)
class Matrix:
    """A matrix in memory: the address of its first item, sizes, how many bytes a row and a column
    is from the next. In one that `is_packed` the rows are known to lie one behind the other."""

    pointer: Value
    dtype: str
    rows: Size
    columns: Size
    row_stride: Size
    column_stride: Size
    is_packed: bool = field(default=False, kw_only=True)

    @property
    def type(self) -> Type:
        """The type of an item, which is no complex number."""
        return Type(self.dtype)

    @property
    def itemsize(self) -> int:
        return Type(self.dtype).itemsize

    @property
    def turned(self) -> "Matrix":
        """The transposed matrix, in the same memory."""
        return replace(
            self,
            rows=self.columns,
            columns=self.rows,
            row_stride=self.column_stride,
            column_stride=self.row_stride,
            is_packed=False,
        )

    def place(self, w: Writer, i: Size, j: Size) -> Value:
        """Return how many bytes after the first item another is."""
        row, column = sized(w, self.row_stride, self.column_stride)
        return row * i + column * j

    def load(self, w: Writer, i: Size, j: Size) -> Value:
        """Read an item, which is no complex number."""
        return w.load(self.type, self.pointer, self.place(w, i, j))

    def store(self, w: Writer, i: Size, j: Size, value: Value) -> None:
        w.store(self.pointer, self.place(w, i, j), value)

    def row(self, w: Writer, i: Size) -> Value:
        return w.offset(self.pointer, sized(w, self.row_stride)[0] * i)

    def values(self, w: Writer) -> list[Value]:
        """Return the operands by which a function gets it: a pointer and both strides."""
        return [self.pointer, *sized(w, self.row_stride, self.column_stride)]


def packed(pointer: Value, dtype: str, rows: Size, columns: Size) -> Matrix:
    """Return a matrix whose rows lie one behind the other."""
    item = Type(dtype).itemsize
    return Matrix(pointer, dtype, rows, columns, columns * item, item, is_packed=True)


def shared(write: Callable[..., Any]) -> Callable[..., tuple[Value, ...]]:
    """Make what writes statements a function that all kernels share, one for each kind of operands.

    `write` takes a `Writer`, operands, and options by their names; what is returned takes the same,
    or Python's truth values in the place of operands, and writes a call. Of matrices that are
    packed, no strides are given.
    """

    # Of each operand, its type, and how many sizes and strides a matrix has after its address.
    @cache
    def function(kinds: tuple[tuple[Type, int], ...], **options: Any) -> Function:
        words = [write.__name__.strip("_"), *map(str, options.values())]
        words += [f"packed_{kind}" if count == 2 else str(kind) for kind, count in kinds]
        types = [t for kind, n in kinds for t in ([POINTER, *[INT64] * n] if n else [kind])]

        def statements(w: Writer, *values: Value) -> Any:
            rest, operands = iter(values), []
            for kind, count in kinds:
                first, sizes = next(rest), list(islice(rest, count))
                make = packed if count == 2 else Matrix
                operands.append(make(first, kind.dtype, *sizes) if sizes else first)
            found = write(w, *operands, **options)
            return () if found is None else found

        return write_function("_".join(words), types, statements, is_shared=True)

    @wraps(write)
    def call(w: Writer, *operands: Matrix | Value | bool, **options: Any) -> tuple[Value, ...]:
        kinds: list[tuple[Type, int]] = []
        values: list[Value] = []
        for operand in operands:
            if isinstance(operand, Matrix):
                sizes = [operand.rows, operand.columns]
                if not operand.is_packed:
                    sizes += [operand.row_stride, operand.column_stride]
                kinds.append((operand.type, len(sizes)))
                values += [operand.pointer, *sized(w, *sizes)]
            else:
                value = w.as_value(operand, BOOL)
                kinds.append((value.type, 0))
                values.append(value)
        return w.call(function(tuple(kinds), **options), *values)

    return call


@shared
def copy(w: Writer, a: Matrix, out: Matrix) -> None:
    """Write the items of a matrix into another one."""
    with w.loop(0, out.rows) as i, w.loop(0, out.columns) as j:
        out.store(w, i, j, a.load(w, i, j))


def sized(w: Writer, *sizes: Size) -> list[Value]:
    return [w.as_value(size, INT64) for size in sizes]


def known(size: Size) -> int | None:
    """Return a size that is known when the kernel is written, None for others."""
    if isinstance(size, int):
        return size
    return int(size.value) if isinstance(size, Constant) else None


def all_known(sizes: Sequence[Size]) -> list[int] | None:
    """Return sizes if all of them are known."""
    found = [known(size) for size in sizes]
    integers = [size for size in found if size is not None]
    return integers if len(integers) == len(found) else None


def call_routine(w: Writer, routine: Value, *arguments: Value) -> None:
    """Write the call of a routine of BLAS or LAPACK, which takes letters and numbers by their
    addresses."""

    def address(value: Value) -> Value:
        if value.type == POINTER:
            return value
        number = w.cast(value, "int32") if value.type == INT64 else value
        memory = w.scratch(number.type.dtype, 1)
        w.store(memory, 0, number)
        return memory

    w.call(routine, *map(address, arguments))
