"""Calls of BLAS, whose routines take pointers alone.

They store matrices by columns: rows that are contiguous are columns of the transposed matrix.
"""

from __future__ import annotations

from collections.abc import Callable

from scanlib.kernels.language import INT64, POINTER, Value, Writer
from scanlib.kernels.linalg.matrices import Matrix, sized
from scanlib.kernels.scipy_routines import Routine

# Gives the address of a routine.
Library = Callable[[Routine], Value]


def routine_of(name: str, dtype: str) -> Routine:
    """Return a routine by its name without the letter for its dtype."""
    return Routine(f"{'s' if dtype == 'float32' else 'd'}{name}")


def call_library(w: Writer, address: Value, *arguments: Value) -> None:
    """Write the call of a routine: pointers are given as they are, letters and numbers by the
    addresses of memory that holds them."""
    operands = []
    for argument in arguments:
        if argument.type != POINTER:
            number = w.cast(argument, "int32") if argument.type == INT64 else argument
            argument = w.scratch(number.type.dtype, 1)
            w.store(argument, 0, number)
        operands.append(argument)
    w.call(address, *operands)


def layout(w: Writer, matrix: Matrix) -> tuple[Value, Value, Value]:
    """Return how a routine reads a matrix: whether its rows are contiguous, how many items a row,
    or else a column, is from the next, and whether one of them is contiguous, so that it can be
    read at all."""
    row, column = sized(w, matrix.row_stride, matrix.column_stride)
    (rows, columns), item = sized(w, matrix.rows, matrix.columns), matrix.itemsize
    is_by_rows = column.equals(item) & (row >= columns * item)
    is_by_columns = row.equals(item) & (column >= rows * item)
    line = w.apply("quotient", w.select(is_by_rows, row, column), w.constant(item, INT64))
    return is_by_rows, line, is_by_rows | is_by_columns
