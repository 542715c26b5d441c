r"""Factorizations and solves of the small matrices of a step, as plain loops over pointers.

* Cholesky's factor, row by row: ``L[i, j] = (A[i, j] - Σ_k L[i, k] L[j, k]) / L[j, j]``;
* substitution forwards and backwards, all right-hand sides of a row at once;
* elimination with the largest pivot of each column, for general matrices, inverses and factors
  (G. Golub and C. Van Loan, "Matrix Computations", 4th ed. 2013, sections 3.1, 3.4 and 4.2).

A matrix of a Kalman filter has a few rows; what a library does before it starts takes longer than
all of its arithmetic. From `LARGE` rows on, Cholesky's factor comes from LAPACK.

What fails does so as in PyTensor's own functions: a matrix that is not positive definite or is
singular gives NaN everywhere, an inverse raises `LinAlgError`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from scanlib._compat.numba import cgutils, ensure_lapack
from scanlib.backends.numba.pointers import load, shift, store
from scanlib.backends.numba.products import OPTIONS, SUMS, integer_product, zero_of  # noqa: F401
from scanlib.source_keys import source_key

VERSION = source_key(__name__)
LARGE = 48
# Not literals, for which functions are compiled once more.
_NO, _YES = np.int64(0), np.int64(1)

ensure_lapack()


@intrinsic
def _external(typingctx: Any, start: Any, n: Any) -> Any:
    """Call LAPACK's factorization of a matrix given by its lower triangle in rows."""
    from llvmlite import ir

    kind = ord("s") if start.dtype == types.float32 else ord("d")

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data, rows = arguments
        byte, word, code = ir.IntType(8), rows.type, ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(code, [byte, byte, word, data.type, word]),
            "numba_xxpotrf",
        )
        # Rows of a lower triangle are the columns of an upper one.
        result = builder.call(
            function,
            [ir.Constant(byte, kind), ir.Constant(byte, ord("U")), rows, data, rows],
        )
        return builder.sext(result, word)

    return types.intp(start, types.intp), codegen


@njit(**OPTIONS)
def fill(start: Any, n: int, value: Any) -> None:
    """Write a value into all items."""
    for i in range(n):
        store(start, i, value)


@njit(**SUMS)
def _inner(a: Any, b: Any, n: int) -> Any:
    total = zero_of(a)
    for k in range(n):
        total += load(a, k) * load(b, k)
    return total


@njit(**OPTIONS)
def _subtract(x: Any, y: Any, factor: Any, n: int) -> None:
    for j in range(n):
        store(x, j, load(x, j) - factor * load(y, j))


@njit(**OPTIONS)
def factor(a: Any, row: int, column: int, n: int, f: Any) -> bool:
    """Write Cholesky's lower factor of the lower triangle of a matrix; say if there is one."""
    for i in range(n):
        for j in range(n):
            store(f, i * n + j, load(a, i * row + j * column) if j <= i else zero_of(f))
    if n > LARGE:
        return _external(f, n) == 0
    for i in range(n):
        mine = shift(f, i * n)
        for j in range(i):
            other = shift(f, j * n)
            rest = load(mine, j) - _inner(mine, other, j)
            store(mine, j, rest / load(other, j))
        rest = load(mine, i) - _inner(mine, mine, i)
        if not rest > 0:
            return False
        store(mine, i, np.sqrt(rest))
    return True


@njit(**OPTIONS)
def substitute(t: Any, row: int, column: int, n: int, lower: int, unit: int, x: Any,
               m: int) -> bool:  # fmt: skip
    """Solve ``T X = X`` in place with a triangular matrix; say if its diagonal has no zero."""
    if unit == 0:
        for i in range(n):
            if load(t, i * row + i * column) == 0:
                return False
    for step in range(n):
        i = step if lower != 0 else n - 1 - step
        mine = shift(x, i * m)
        for k in range(0 if lower != 0 else i + 1, i if lower != 0 else n):
            _subtract(mine, shift(x, k * m), load(t, i * row + k * column), m)
        if unit == 0:
            pivot = load(t, i * row + i * column)
            for j in range(m):
                store(mine, j, load(mine, j) / pivot)
    return True


@njit(**OPTIONS)
def _pivot(f: Any, n: int, k: int) -> Any:
    """Return the row of the largest item of a column from its diagonal down, and its size."""
    best, largest = k, abs(load(f, k * n + k))
    for i in range(k + 1, n):
        size = abs(load(f, i * n + k))
        if size > largest:
            best, largest = i, size
    return best, largest


@njit(**OPTIONS)
def eliminate(f: Any, n: int, x: Any, m: int) -> bool:
    """Solve ``F X = X`` in place, overwriting both; say if F is not singular."""
    for k in range(n):
        best, largest = _pivot(f, n, k)
        if largest == 0:
            return False
        if best != k:
            _exchange(shift(f, k * n), shift(f, best * n), n)
            _exchange(shift(x, k * m), shift(x, best * m), m)
        pivot = load(f, k * n + k)
        for i in range(k + 1, n):
            ratio = load(f, i * n + k) / pivot
            _subtract(shift(f, i * n + k), shift(f, k * n + k), ratio, n - k)
            _subtract(shift(x, i * m), shift(x, k * m), ratio, m)
    return substitute(f, n, _YES, n, _NO, _NO, x, m)


@njit(**OPTIONS)
def _exchange(x: Any, y: Any, n: int) -> None:
    for j in range(n):
        kept = load(x, j)
        store(x, j, load(y, j))
        store(y, j, kept)


@njit(**OPTIONS)
def _copy(a: Any, row: int, column: int, n: int, m: int, x: Any) -> None:
    for i in range(n):
        for j in range(m):
            store(x, i * m + j, load(a, i * row + j * column))


@njit(**OPTIONS)
def cholesky(a: Any, row: int, column: int, n: int, lower: int, out: Any, spare: Any) -> None:
    """Write Cholesky's factor, lower or upper."""
    if lower != 0:
        done = factor(a, row, column, n, out)
    else:
        done = factor(a, column, row, n, spare)
        _copy(spare, _YES, n, n, n, out)
    if not done:
        fill(out, n * n, np.nan)


@njit(**OPTIONS)
def cholesky_solve(c: Any, row: int, column: int, n: int, lower: int, b: Any, b_row: int,
                   b_column: int, m: int, out: Any) -> None:  # fmt: skip
    """Solve with a factor of the matrix."""
    _copy(b, b_row, b_column, n, m, out)
    if lower == 0:
        row, column = column, row
    done = substitute(c, row, column, n, _YES, _NO, out, m)
    if not (done and substitute(c, column, row, n, _NO, _NO, out, m)):
        fill(out, n * m, np.nan)


@njit(**OPTIONS)
def triangular_solve(a: Any, row: int, column: int, n: int, lower: int, unit: int, b: Any,
                     b_row: int, b_column: int, m: int, out: Any) -> None:  # fmt: skip
    """Solve with a triangular matrix."""
    _copy(b, b_row, b_column, n, m, out)
    if not substitute(a, row, column, n, lower, unit, out, m):
        fill(out, n * m, np.nan)


@njit(**OPTIONS)
def positive_solve(a: Any, row: int, column: int, n: int, lower: int, b: Any, b_row: int,
                   b_column: int, m: int, out: Any, spare: Any) -> None:  # fmt: skip
    """Solve with a positive definite matrix, of which one triangle is read."""
    _copy(b, b_row, b_column, n, m, out)
    if lower == 0:
        row, column = column, row
    if factor(a, row, column, n, spare):
        substitute(spare, n, _YES, n, _YES, _NO, out, m)
        substitute(spare, _YES, n, n, _NO, _NO, out, m)
    else:
        fill(out, n * m, np.nan)


@njit(**OPTIONS)
def general_solve(a: Any, row: int, column: int, n: int, b: Any, b_row: int, b_column: int,
                  m: int, out: Any, spare: Any) -> None:  # fmt: skip
    """Solve with any square matrix."""
    _copy(a, row, column, n, n, spare)
    _copy(b, b_row, b_column, n, m, out)
    if not eliminate(spare, n, out, m):
        fill(out, n * m, np.nan)


@njit(**OPTIONS)
def inverse(a: Any, row: int, column: int, n: int, out: Any, spare: Any) -> None:
    """Write the inverse of a matrix."""
    _copy(a, row, column, n, n, spare)
    for i in range(n * n):
        if not np.isfinite(load(spare, i)):
            raise np.linalg.LinAlgError("Array must not contain infs or NaNs.")
    fill(out, n * n, 0)
    for i in range(n):
        store(out, i * n + i, 1)
    if not eliminate(spare, n, out, n):
        raise np.linalg.LinAlgError("Matrix is singular to machine precision.")


@njit(**OPTIONS)
def lu_factor(a: Any, row: int, column: int, n: int, out: Any, pivots: Any) -> None:
    """Write both triangular factors into one matrix, and with which row each row was exchanged."""
    _copy(a, row, column, n, n, out)
    singular = False
    for k in range(n):
        best, largest = _pivot(out, n, k)
        store(pivots, k, np.int32(best))
        if largest == 0:
            singular = True
            continue
        if best != k:
            _exchange(shift(out, k * n), shift(out, best * n), n)
        pivot = load(out, k * n + k)
        for i in range(k + 1, n):
            ratio = load(out, i * n + k) / pivot
            store(out, i * n + k, ratio)
            _subtract(shift(out, i * n + k + 1), shift(out, k * n + k + 1), ratio, n - k - 1)
    if singular:
        fill(out, n * n, np.nan)


@njit(**OPTIONS)
def permutation(pivots: Any, step: int, n: int, inverse: int, out: Any) -> None:
    """Write the permutation of rows that exchanges make, or the one that undoes it."""
    for i in range(n):
        store(out, i, i)
    for done in range(n):
        i = done if inverse != 0 else n - 1 - done
        other = load(pivots, i * step)
        kept = load(out, i)
        store(out, i, load(out, other))
        store(out, other, kept)


@njit(**OPTIONS)
def inverse_permutation(places: Any, step: int, n: int, out: Any) -> None:
    """Write which place each number of a permutation has."""
    for i in range(n):
        store(out, load(places, i * step), i)


@njit(**OPTIONS)
def rows_at(x: Any, row: int, column: int, n: int, m: int, places: Any, step: int, k: int,
            out: Any) -> None:  # fmt: skip
    """Write the rows of a matrix at some places, which may be counted from its end."""
    for i in range(k):
        place = load(places, i * step)
        if place < 0:
            place += n
        if place < 0 or place >= n:
            raise IndexError("index out of bounds")
        _copy(shift(x, place * row), row, column, _YES, m, shift(out, i * m))
