r"""Factorizations of matrices, solves, inverses and determinants.

* Cholesky's factor ``A = Uᵀ U``: ``U[i, j] = (A[i, j] - Σ_k U[k, i] U[k, j]) / U[i, i]``;
* substitution forwards and backwards, several right-hand sides of a row in one vector;
* elimination with the largest pivot of each column, for general matrices;
* reflections of Householder's for the triangular factor of any matrix, ``A = Q R``
  (G. Golub and C. Van Loan, "Matrix Computations", 4th ed. 2013, sections 3.1, 3.4, 4.2 and 5.2).

Each is one function for each dtype, of matrices of any layout, which fills a result whose rows lie
one behind the other. A matrix that is not positive definite, or is singular, gives NaN everywhere;
`inverse` returns what is wrong. Cholesky's factor of more than `LARGE` rows comes from LAPACK, if
there is an address of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from scanlib.kernels.elementary import vector_function
from scanlib.kernels.language import (
    BOOL,
    FLOATS,
    INT64,
    POINTER,
    Function,
    Local,
    Type,
    Value,
    Writer,
    write_function,
)
from scanlib.kernels.linalg.blas_calls import Library, call_library, routine_of
from scanlib.kernels.linalg.matrices import Matrix, known, sized
from scanlib.kernels.linalg.products import MATRIX
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.scalars import NoKernelError

LARGE = 48  # rows up to which LAPACK is not asked
NOT_FINITE, SINGULAR = 1, 2  # what `inverse` returns; zero if all is well
RIGHT = (*MATRIX, INT64, INT64, POINTER)  # right-hand sides, both sizes, and the result

Call = Callable[..., tuple[Value, ...]]


def spare_items(rows: int) -> int:
    """Return how many numbers the memory has that a solve or an inverse works in."""
    return rows * (rows + 1)


# Functions that kernels share


def _shared(*types: Type | None) -> Callable[[Callable[..., Any]], Call]:
    """Make what writes statements a function for each dtype, which all kernels share.

    Parameters
    ----------
    types : Type or None
        Of its parameters; None for a number of the matrices' dtype. Where there is one operand
        more, it is the address of a routine.

    Returns
    -------
    callable
        Makes, of the function that writes the statements, one that writes a call: it takes a
        `Writer`, the dtype and the operands.
    """

    def decorate(write: Callable[..., Any]) -> Call:
        name = write.__name__.strip("_")

        def statements(*values: Any, dtype: str) -> Any:
            found = write(*values, dtype=dtype)
            return () if found is None else found

        @cache
        def function(dtype: str, has_library: bool) -> Function:
            own = [Type(dtype) if kind is None else kind for kind in types]
            whole = f"{name}_{dtype}{'_library' * has_library}"
            own += [POINTER] * has_library
            return write_function(whole, own, partial(statements, dtype=dtype), is_shared=True)

        def call(w: Writer, dtype: str, *operands: Value) -> tuple[Value, ...]:
            return w.call(function(dtype, len(operands) > len(types)), *operands)

        return call

    return decorate


@_shared(*MATRIX, INT64, INT64, POINTER)
def _copy(w: Writer, *values: Value, dtype: str) -> None:
    """Write a matrix to where its rows lie one behind the other."""
    a, row, column, n, m, out = values
    kind = Type(dtype)
    with w.loop(0, n) as i, w.loop(0, m) as j:
        value = w.load(kind, a, i * row + j * column)
        w.store(out, (i * m + j) * kind.itemsize, value)


@_shared(POINTER, INT64, None)
def _fill(w: Writer, out: Value, count: Value, value: Value, dtype: str) -> None:
    with w.loop(0, count) as i:
        w.store(out, i * value.type.itemsize, value)


def _write_nan_unless(w: Writer, dtype: str, done: Value, out: Value, count: Value) -> None:
    with w.when(~done):
        _fill(w, dtype, out, count, w.constant(float("nan"), Type(dtype)))


# Cholesky's factor


@_shared(*MATRIX, INT64, POINTER)
def _factor(w: Writer, *values: Value, dtype: str) -> Value:
    """Write the upper factor of the upper triangle of a matrix; return whether there is one.

    What is below its diagonal stays undefined.
    """
    a, row, column, n, out, *address = values
    kind, item = Type(dtype), Type(dtype).itemsize
    line = n * item
    with w.loop(0, n) as i, w.loop(i, n) as j:
        w.store(out, i * line + j * item, w.load(kind, a, i * row + j * column))
    done = w.local(True, BOOL)
    if not address:
        _write_own_factor(w, dtype, n, out, done)
        return w.copy(done)
    with w.when(n > LARGE) as choice:
        # What is below the diagonal in columns is above it in rows.
        info = w.scratch("int32", 1)
        call_library(w, address[0], "L", n, out, n, info)
        # NaN, of which not every library speaks, goes on to the last pivot.
        last = w.load(kind, out, (n * n - 1) * item)
        w.assign(done, w.load(Type("int32"), info).equals(0) & (last > 0.0))
    with w.otherwise(choice):
        _write_own_factor(w, dtype, n, out, done)
    return w.copy(done)


def _write_own_factor(w: Writer, dtype: str, n: Value, out: Value, done: Local) -> None:
    kind, item = Type(dtype), Type(dtype).itemsize
    line = n * item
    place = w.local(0, INT64)
    with w.loop_while(lambda: (w.copy(place) < n) & w.copy(done)):
        i = w.copy(place)
        mine, above = w.offset(out, i * line), w.offset(out, i * item)
        rest = w.local(w.load(kind, mine, i * item))
        with w.loop(0, i) as k:
            factor = w.load(kind, above, k * line)
            w.assign(rest, w.fma(-factor, factor, w.copy(rest)))
        w.assign(done, w.copy(rest) > 0.0)
        with w.when(w.copy(done)):
            pivot = w.apply("sqrt", w.copy(rest))
            w.store(mine, i * item, pivot)
            zero = w.constant(0, INT64)
            _write_row(w, out, line, (above, line), (zero, i), mine, (i + 1, n), pivot)
        w.assign(place, i + 1)


def _write_row(
    w: Writer,
    x: Value,
    line: Value,
    factors: tuple[Value, Value],
    terms: tuple[Value, Value],
    row: Value,
    ends: tuple[Value, Value],
    pivot: Value,
) -> None:
    """Write ``row[j] = (row[j] - Σ_k factors[k] x[k, j]) / pivot`` for all j between `ends`."""
    item, dtype = pivot.type.itemsize, pivot.type.dtype
    start, stop = ends

    def write(j: Value, kind: Type, count: int) -> None:
        ends = [v * kind.lanes * item for v in range(count)]
        own, above = w.offset(row, j * item), w.offset(x, j * item)
        totals = [w.local(w.load(kind, own, at)) for at in ends]
        with w.loop(*terms) as k:
            factor = -w.load(Type(dtype), factors[0], k * factors[1])
            factor = factor if kind.lanes == 1 else w.splat(factor, kind.lanes)
            other = w.offset(above, k * line)
            for at, total in zip(ends, totals, strict=True):
                w.assign(total, w.fma(factor, w.load(kind, other, at), w.copy(total)))
        for at, total in zip(ends, totals, strict=True):
            w.store(own, at, w.copy(total) / pivot)

    _write_pieces(w, dtype, start, stop, write)


def _write_pieces(
    w: Writer,
    dtype: str,
    start: Value,
    stop: Value,
    write: Callable[[Value, Type, int], None],
) -> None:
    """Write loops over some numbers, several vectors, one vector, and one number at a time."""
    lanes = register_bytes() // Type(dtype).itemsize
    for count, kind in ((4, Type(dtype, lanes)), (1, Type(dtype, lanes)), (1, Type(dtype))):
        size = count * kind.lanes
        end = start + ((stop - start) & -size) if size > 1 else stop
        with w.loop(start, end, size) as j:
            write(j, kind, count)
        start = end


@_shared(*MATRIX, INT64, BOOL, POINTER)
def _cholesky(w: Writer, *values: Value, dtype: str) -> None:
    """Write the upper factor, and transpose it where the lower one is asked for."""
    a, row, column, n, lower, out, *address = values
    (done,) = _factor(w, dtype, a, row, column, n, out, *address)
    kind, item = Type(dtype), Type(dtype).itemsize
    with w.when(done) as choice, w.loop(0, n) as i, w.loop(i + 1, n) as j:
        above, below = (i * n + j) * item, (j * n + i) * item
        value = w.load(kind, out, above)
        w.store(out, below, w.select(lower, value, 0))
        w.store(out, above, w.select(lower, 0, value))
    with w.otherwise(choice):
        _fill(w, dtype, out, n * n, w.constant(float("nan"), kind))


# Solves


@_shared(*MATRIX, INT64, BOOL, BOOL, POINTER, INT64)
def _substitute(w: Writer, *values: Value, dtype: str) -> Value:
    """Solve ``T X = X`` in place; return whether the diagonal of T has no zero."""
    t, row, column, n, lower, unit, x, m = values
    kind, item = Type(dtype), Type(dtype).itemsize
    done, line = w.local(True, BOOL), m * item
    with w.loop(0, n) as i:
        is_zero = w.load(kind, t, i * row + i * column).equals(0.0)
        w.assign(done, w.copy(done) & (unit | ~is_zero))
    count = w.select(w.copy(done), n, 0)
    with w.loop(0, count) as s:
        i = w.select(lower, s, n - 1 - s)
        terms = w.select(lower, 0, i + 1), w.select(lower, i, n)
        mine, factors = w.offset(x, i * line), w.offset(t, i * row)
        pivot = w.select(unit, 1.0, w.load(kind, factors, i * column))
        _write_row(w, x, line, (factors, column), terms, mine, (w.constant(0, INT64), m), pivot)
    return w.copy(done)


@_shared(*MATRIX, BOOL, BOOL, *RIGHT)
def _solve_triangular(w: Writer, *values: Value, dtype: str) -> None:
    a, row, column, lower, unit, b, b_row, b_column, n, m, out = values
    _copy(w, dtype, b, b_row, b_column, n, m, out)
    (done,) = _substitute(w, dtype, a, row, column, n, lower, unit, out, m)
    _write_nan_unless(w, dtype, done, out, n * m)


@_shared(*MATRIX, *RIGHT)
def _solve_cholesky(w: Writer, *values: Value, dtype: str) -> None:
    u, row, column, b, b_row, b_column, n, m, out = values
    _copy(w, dtype, b, b_row, b_column, n, m, out)
    done = _write_both(w, dtype, (u, row, column), n, out, m)
    _write_nan_unless(w, dtype, done, out, n * m)


def _write_both(
    w: Writer, dtype: str, upper: tuple[Value, Value, Value], n: Value, x: Value, m: Value
) -> Value:
    """Write the solution of ``Uᵀ U X = X``; return whether the diagonal of U has no zero."""
    yes, no = w.constant(True, BOOL), w.constant(False, BOOL)
    u, row, column = upper
    (done,) = _substitute(w, dtype, u, column, row, n, yes, no, x, m)
    _substitute(w, dtype, u, row, column, n, no, no, x, m)
    return done


@_shared(*MATRIX, *RIGHT, POINTER)
def _solve_positive(w: Writer, *values: Value, dtype: str) -> None:
    a, row, column, b, b_row, b_column, n, m, out, spare, *address = values
    item = Type(dtype).itemsize
    (done,) = _factor(w, dtype, a, row, column, n, spare, *address)
    _copy(w, dtype, b, b_row, b_column, n, m, out)
    with w.when(done):
        _write_both(w, dtype, (spare, n * item, w.constant(item, INT64)), n, out, m)
    _write_nan_unless(w, dtype, done, out, n * m)


# Elimination


@_shared(POINTER, INT64, POINTER)
def _eliminate(w: Writer, *values: Value, dtype: str) -> Value:
    """Write triangular factors into a matrix, and pivots; return whether it is not singular."""
    f, n, pivots = values
    kind, item = Type(dtype), Type(dtype).itemsize
    line = n * item
    done = w.local(True, BOOL)
    with w.loop(0, n) as k:
        mine = w.offset(f, k * line)
        best, largest = w.local(k), w.local(abs(w.load(kind, mine, k * item)))
        with w.loop(k + 1, n) as i:
            size = abs(w.load(kind, f, i * line + k * item))
            is_larger = size > w.copy(largest)
            w.assign(best, w.select(is_larger, i, w.copy(best)))
            w.assign(largest, w.select(is_larger, size, w.copy(largest)))
        w.store(pivots, k * 4, w.cast(w.copy(best), "int32"))
        is_zero = w.copy(largest).equals(0.0)
        w.assign(done, w.copy(done) & ~is_zero)
        with w.when(~is_zero):
            _write_exchange(w, kind, mine, w.offset(f, w.copy(best) * line), n)
            pivot = w.load(kind, mine, k * item)
            with w.loop(k + 1, n) as i:
                other = w.offset(f, i * line)
                ratio = w.load(kind, other, k * item) / pivot
                w.store(other, k * item, ratio)
                _write_difference(w, other, mine, ratio, (k + 1, n))
    return w.copy(done)


def _write_difference(
    w: Writer, row: Value, other: Value, factor: Value, ends: tuple[Value, Value]
) -> None:
    """Write ``row[j] -= factor other[j]`` for all j between `ends`."""
    item, opposite = factor.type.itemsize, -factor

    def write(j: Value, kind: Type, count: int) -> None:
        several = opposite if kind.lanes == 1 else w.splat(opposite, kind.lanes)
        for v in range(count):
            at = (j + v * kind.lanes) * item
            value = w.fma(several, w.load(kind, other, at), w.load(kind, row, at))
            w.store(row, at, value)

    _write_pieces(w, factor.type.dtype, *ends, write)


def _write_exchange(w: Writer, kind: Type, x: Value, y: Value, count: Value) -> None:
    """Write that two rows change places, which may be the same."""
    with w.loop(0, count) as j:
        at = j * kind.itemsize
        kept, other = w.load(kind, x, at), w.load(kind, y, at)
        w.store(x, at, other)
        w.store(y, at, kept)


@_shared(POINTER, INT64, POINTER, INT64)
def _solve_in_place(w: Writer, *values: Value, dtype: str) -> Value:
    """Solve ``F X = X``, overwriting both; return whether F is not singular."""
    f, n, x, m = values
    kind, item = Type(dtype), Type(dtype).itemsize
    line = n * item
    pivots = w.offset(f, n * line)
    (done,) = _eliminate(w, dtype, f, n, pivots)
    with w.when(done):
        with w.loop(0, n) as k:
            other = w.cast(w.load(Type("int32"), pivots, k * 4), "int64")
            mine, found = (w.offset(x, i * m * item) for i in (k, other))
            with w.when(other.differs(k)):
                _write_exchange(w, kind, mine, found, m)
        yes, no = w.constant(True, BOOL), w.constant(False, BOOL)
        strides = line, w.constant(item, INT64)
        _substitute(w, dtype, f, *strides, n, yes, yes, x, m)
        _substitute(w, dtype, f, *strides, n, no, no, x, m)
    return done


@_shared(*MATRIX, *RIGHT, POINTER)
def _solve(w: Writer, *values: Value, dtype: str) -> None:
    a, row, column, b, b_row, b_column, n, m, out, spare = values
    _copy(w, dtype, a, row, column, n, n, spare)
    _copy(w, dtype, b, b_row, b_column, n, m, out)
    (done,) = _solve_in_place(w, dtype, spare, n, out, m)
    _write_nan_unless(w, dtype, done, out, n * m)


@_shared(*MATRIX, INT64, POINTER, POINTER)
def _inverse(w: Writer, *values: Value, dtype: str) -> Value:
    a, row, column, n, out, spare = values
    kind, item = Type(dtype), Type(dtype).itemsize
    _copy(w, dtype, a, row, column, n, n, spare)
    code, limit = w.local(0, INT64), w.constant(float("inf"), kind)
    with w.loop(0, n * n) as i:
        is_finite = abs(w.load(kind, spare, i * item)) < limit
        w.assign(code, w.select(is_finite, w.copy(code), NOT_FINITE))
    with w.when(w.copy(code).equals(0)):
        _fill(w, dtype, out, n * n, w.constant(0, kind))
        with w.loop(0, n) as i:
            w.store(out, (i * n + i) * item, w.constant(1, kind))
        (done,) = _solve_in_place(w, dtype, spare, n, out, n)
        w.assign(code, w.select(done, w.constant(0, INT64), SINGULAR))
    return w.copy(code)


@_shared(*MATRIX, INT64, INT64, INT64, POINTER, POINTER)
def _triangular_factor(w: Writer, *values: Value, dtype: str) -> None:
    """Reflect the columns of A, which are rows of `spare`, one after the other, and copy R.

    The reflection that takes ``x`` to ``(α, 0 …)``, with ``α = -sign(x₀) ‖x‖``, takes another `z`
    to ``z - v (vᵀ z) / (‖x‖² - α x₀)``, where ``v = x - (α, 0 …)``. As in LAPACK, `x` is divided
    by its largest item first, and one that has no other item than ``x₀`` stays as it is.
    """
    a, row, column, n, m, rows, out, spare = values
    kind, item = Type(dtype), Type(dtype).itemsize
    _copy(w, dtype, a, column, row, m, n, spare)
    line, zero, one = n * item, w.constant(0.0, kind), w.constant(1.0, kind)
    with w.loop(0, w.select(n < m, n, m)) as i:
        mine = w.offset(spare, i * line)
        largest, squares = w.local(zero), w.local(zero)
        with w.loop(i, n) as k:
            size = abs(w.load(kind, mine, k * item))
            w.assign(largest, w.select(size > w.copy(largest), size, w.copy(largest)))
        unit = w.select(w.copy(largest) > zero, w.copy(largest), one)
        with w.loop(i, n) as k:
            value = w.load(kind, mine, k * item) / unit
            w.store(mine, k * item, value)
            w.assign(squares, w.select(k > i, w.fma(value, value, w.copy(squares)), zero))
        first, is_alone = w.load(kind, mine, i * item), w.copy(squares).equals(zero)
        whole = w.fma(first, first, w.copy(squares))
        norm = w.apply("sqrt", whole)
        end = w.select(is_alone, first, w.select(first < zero, norm, -norm))
        w.store(mine, i * item, first - end)
        scale = whole - end * first
        with w.when(~is_alone), w.loop(i + 1, m) as j:
            other, total = w.offset(spare, j * line), w.local(zero)
            with w.loop(i, n) as k:
                own, theirs = (w.load(kind, x, k * item) for x in (mine, other))
                w.assign(total, w.fma(own, theirs, w.copy(total)))
            _write_difference(w, other, mine, w.copy(total) / scale, (i, n))
        w.store(mine, i * item, end * unit)
    with w.loop(0, rows) as i, w.loop(0, m) as j:
        value = w.load(kind, spare, (j * n + i) * item)
        w.store(out, (i * m + j) * item, w.select(j < i, zero, value))


@_shared(*MATRIX, INT64, POINTER)
def _determinant(w: Writer, *values: Value, dtype: str) -> tuple[Value, ...]:
    """Write the product of the pivots, whose sign each exchange of rows turns."""
    a, row, column, n, spare = values
    kind, item = Type(dtype), Type(dtype).itemsize
    pivots = w.offset(spare, n * n * item)
    _copy(w, dtype, a, row, column, n, n, spare)
    _eliminate(w, dtype, spare, n, pivots)
    whole, sign = w.local(1.0, kind), w.local(1.0, kind)
    size = w.local(0.0, kind)
    with w.loop(0, n) as k:
        pivot = w.load(kind, spare, k * (n + 1) * item)
        is_exchanged = w.load(Type("int32"), pivots, k * 4).differs(w.cast(k, "int32"))
        turned = w.select(is_exchanged, -pivot, pivot)
        w.assign(whole, w.copy(whole) * turned)
        one = w.constant(1.0, kind)
        own = w.select(turned < 0.0, -one, w.select(turned.equals(0.0), 0.0, one))
        w.assign(sign, w.copy(sign) * own)
        (more,) = w.call(vector_function("log", dtype, 1), abs(pivot))
        w.assign(size, w.copy(size) + more)
    return w.copy(whole), w.copy(sign), w.copy(size)


# Calls


def cholesky(
    w: Writer, a: Matrix, out: Matrix, lower: bool = True, library: Library | None = None
) -> None:
    """Write Cholesky's lower, or upper, factor of a matrix, of which that triangle is read."""
    source = a.turned if lower else a
    flag, address = w.constant(lower, BOOL), _routine(w, a, library)
    _cholesky(w, _dtype(a, out), *source.values(w), *sized(w, a.rows), flag, out.pointer, *address)


def solve_triangular(
    w: Writer, a: Matrix, b: Matrix, out: Matrix, lower: bool = True, unit: bool = False
) -> None:
    """Write the solution of ``A X = B``; with `unit`, the diagonal of `A` is taken for ones."""
    flags = [w.constant(flag, BOOL) for flag in (lower, unit)]
    _solve_triangular(w, _dtype(a, b, out), *a.values(w), *flags, *_right(w, b, out))


def solve_cholesky(w: Writer, factor: Matrix, b: Matrix, out: Matrix, lower: bool = True) -> None:
    """Write the solution with a matrix that is given by Cholesky's factor."""
    upper = factor.turned if lower else factor
    _solve_cholesky(w, _dtype(factor, b, out), *upper.values(w), *_right(w, b, out))


def solve_positive(
    w: Writer,
    a: Matrix,
    b: Matrix,
    out: Matrix,
    spare: Value,
    lower: bool = True,
    library: Library | None = None,
) -> None:
    """Write the solution with a positive definite matrix, of which one triangle is read.

    `spare` is memory for `spare_items`.
    """
    source, address = a.turned if lower else a, _routine(w, a, library)
    operands = [*source.values(w), *_right(w, b, out), spare, *address]
    _solve_positive(w, _dtype(a, b, out), *operands)


def solve(w: Writer, a: Matrix, b: Matrix, out: Matrix, spare: Value) -> None:
    """Write the solution with any square matrix; `spare` is memory for `spare_items`."""
    _solve(w, _dtype(a, b, out), *a.values(w), *_right(w, b, out), spare)


def inverse(w: Writer, a: Matrix, out: Matrix, spare: Value) -> Value:
    """Write the inverse of a matrix; return zero, `NOT_FINITE` or `SINGULAR`.

    `spare` is memory for `spare_items`.
    """
    return _inverse(w, _dtype(a, out), *a.values(w), *sized(w, a.rows), out.pointer, spare)[0]


def determinant(w: Writer, a: Matrix, spare: Value) -> tuple[Value, ...]:
    """Write the determinant of a matrix, its sign, and the logarithm of its absolute value.

    `spare` is memory for `spare_items`.
    """
    return _determinant(w, _dtype(a), *a.values(w), *sized(w, a.rows), spare)


def triangular_factor(w: Writer, a: Matrix, out: Matrix, spare: Value) -> None:
    """Write the rows of ``R``, with ``A = Q R``, that `out` has: no more than `A` has rows.

    `spare` is memory for as many items as `A` has.
    """
    sizes = sized(w, a.rows, a.columns, out.rows)
    _triangular_factor(w, _dtype(a, out), *a.values(w), *sizes, out.pointer, spare)


def _right(w: Writer, b: Matrix, out: Matrix) -> list[Value]:
    """Return the operands of `RIGHT`."""
    return [*b.values(w), *sized(w, b.rows, b.columns), out.pointer]


def _dtype(*matrices: Matrix) -> str:
    dtypes = {matrix.dtype for matrix in matrices}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS):
        raise NoKernelError(f"linear algebra with matrices of {', '.join(sorted(dtypes))}")
    return dtypes.pop()


def _routine(w: Writer, a: Matrix, library: Library | None) -> list[Value]:
    """Return the address of LAPACK's factorization where it may be needed."""
    rows = known(a.rows)
    if library is None or (rows is not None and rows <= LARGE):
        return []
    return [library(routine_of("potrf", _dtype(a)))]
