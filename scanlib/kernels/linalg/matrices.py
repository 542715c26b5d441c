"""Matrices in memory, as what linear algebra takes and fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from scanlib.kernels.language import INT64, Constant, Type, Value, Writer

Size = Value | int


@dataclass(frozen=True)
class Matrix:
    """A matrix in memory.

    Attributes
    ----------
    pointer : Value
        The address of its first item.
    dtype : str
    rows, columns : Value or int
    row_stride, column_stride : Value or int
        How many bytes a row, or a column, is from the next.
    """

    pointer: Value
    dtype: str
    rows: Size
    columns: Size
    row_stride: Size
    column_stride: Size

    @property
    def itemsize(self) -> int:
        return Type(self.dtype).itemsize

    @property
    def turned(self) -> Matrix:
        """The transposed matrix, in the same memory."""
        return replace(
            self,
            rows=self.columns,
            columns=self.rows,
            row_stride=self.column_stride,
            column_stride=self.row_stride,
        )

    def place(self, w: Writer, i: Size, j: Size) -> Value:
        """Return how many bytes after the first item another is."""
        row, column = sized(w, self.row_stride, self.column_stride)
        return row * i + column * j

    def load(self, w: Writer, i: Size, j: Size) -> Value:
        """Read an item, which is no complex number."""
        return w.load(Type(self.dtype), self.pointer, self.place(w, i, j))

    def values(self, w: Writer) -> list[Value]:
        """Return the operands by which a function gets it: a pointer and both strides."""
        return [self.pointer, *sized(w, self.row_stride, self.column_stride)]


def sized(w: Writer, *sizes: Size) -> list[Value]:
    """Return sizes as values."""
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
