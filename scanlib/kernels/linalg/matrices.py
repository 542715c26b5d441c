"""Matrices in memory, as what linear algebra takes and fills."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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

    def moved(self, w: Writer, count: Size) -> Matrix:
        """Return the matrix some bytes on."""
        return replace(self, pointer=w.offset(self.pointer, count))

    def values(self, w: Writer) -> list[Value]:
        """Return the operands by which a function gets it: a pointer and both strides."""
        return [self.pointer, *sized(w, self.row_stride, self.column_stride)]


@contextmanager
def each(
    w: Writer, sizes: Sequence[Size], matrices: Sequence[tuple[Matrix, Sequence[Size]]]
) -> Iterator[list[Matrix]]:
    """Write loops over the places of a batch; yield the matrices that are there.

    Parameters
    ----------
    w : Writer
    sizes : sequence of Value or int
        Of the batch.
    matrices : sequence of tuple
        The matrices at the first place, and how many bytes they are from the next ones along each
        axis of the batch: none if they are the same there.
    """
    if not sizes:
        yield [matrix for matrix, _ in matrices]
        return
    with w.loop(0, sizes[0]) as i:
        moved = [(matrix.moved(w, i * steps[0]), steps[1:]) for matrix, steps in matrices]
        with each(w, sizes[1:], moved) as found:
            yield found


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
