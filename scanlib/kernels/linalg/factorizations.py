r"""Factorizations of matrices, solves, inverses and determinants.

* Cholesky's factor ``A = Uᵀ U``: ``U[i, j] = (A[i, j] - Σ_k U[k, i] U[k, j]) / U[i, i]``;
* substitution forwards and backwards, several right-hand sides of a row in one vector;
* elimination with the largest pivot of each column, for general matrices;
* reflections of Householder's for the triangular factor of any matrix, ``A = Q R``
  (G. Golub and C. Van Loan, "Matrix Computations", 4th ed. 2013, sections 3.1, 3.4, 4.2 and 5.2).

Each is one function for each dtype, of matrices of any layout. It fills a result that is `packed`;
`spare` is memory for ``n (n + 1)`` numbers where a matrix has `n` rows. A matrix that is not
positive definite, or is singular, gives NaN everywhere; `inverse` returns what is wrong.
"""

from dataclasses import replace

from scanlib.kernels.elementary import compute
from scanlib.kernels.lanes import sum_of_lanes
from scanlib.kernels.language import BOOL, INT64, Local, Type, Value, Writer
from scanlib.kernels.linalg.matrices import Matrix, copy, packed, shared, sized
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.spans import walk

NOT_FINITE, SINGULAR = 1, 2  # what `inverse` returns; zero if all is well
LONG_LINE = 16  # factors of one number of a solution that are multiplied several at once


@shared
def _fill(w: Writer, out: Matrix, value: Value) -> None:
    assert out.is_packed, "a result whose rows lie one behind the other is packed"
    with w.loop(0, out.rows * out.columns) as i:
        w.store(out.pointer, i * out.itemsize, value)


def _write_nan_unless(w: Writer, done: Value, out: Matrix) -> None:
    with w.when(~done):
        _fill(w, out, w.constant(float("nan"), out.type))


# Cholesky's factor


@shared
def _factor(w: Writer, a: Matrix, out: Matrix) -> Value:
    """Write the upper factor of the upper triangle of a matrix; return whether there is one.

    What is below its diagonal stays undefined.
    """
    (n,), place, done = sized(w, out.rows), w.local(0, INT64), w.local(True, BOOL)
    with w.loop(0, n) as i, w.loop(i, n) as j:
        out.store(w, i, j, a.load(w, i, j))
    with w.loop_while(lambda: (w.copy(place) < n) & w.copy(done)):
        i = w.copy(place)
        rest = w.local(out.load(w, i, i))
        with w.loop(0, i) as k:
            factor = out.load(w, k, i)
            w.assign(rest, w.fma(-factor, factor, w.copy(rest)))
        w.assign(done, w.copy(rest) > 0.0)
        with w.when(w.copy(done)):
            pivot = w.apply("sqrt", w.copy(rest))
            out.store(w, i, i, pivot)
            terms = w.constant(0, INT64), i
            _write_row(w, out, i, (out.turned, *terms), (i + 1, n), pivot)
        w.assign(place, i + 1)
    return w.copy(done)


def _write_row(
    w: Writer,
    x: Matrix,
    i: Value,
    terms: tuple[Matrix, Value, Value],
    ends: tuple[Value, Value],
    pivot: Value,
) -> None:
    """Write ``x[i, j] = (x[i, j] - Σ_k factors[i, k] x[k, j]) / pivot`` for all j between `ends`.

    `terms` are the factors, and the numbers between which k is.
    """
    factors, first, last = terms
    row = x.row(w, i)

    def write(j: Value, count: int) -> None:
        kind, at = Type(x.dtype, count), j * x.itemsize
        above, total = w.offset(x.pointer, at), w.local(w.load(kind, row, at))
        rest = first if count > 1 else _subtract_line(w, above, x, i, terms, total)
        with w.loop(rest, last) as k:
            factor = -w.as_value(factors.load(w, i, k), kind)
            value = w.load(kind, above, x.row_stride * k)
            w.assign(total, w.fma(factor, value, w.copy(total)))
        w.store(row, at, w.copy(total) / pivot)

    walk(w, *ends, _counts(x.type), write)


def _subtract_line(
    w: Writer, column: Value, x: Matrix, i: Value, terms: tuple[Matrix, Value, Value], total: Local
) -> Value:
    """Subtract products from the item of one column of `x` in row `i`, several at once where both
    factors lie side by side; return the first that is left."""
    factors, first, last = terms
    begin, count = w.local(first), (last - first) & -(register_bytes() // x.itemsize)
    is_line = last - first >= LONG_LINE
    for stride in sized(w, x.row_stride, factors.column_stride):
        is_line &= stride.equals(x.itemsize)
    with w.when(is_line):
        line, column = (w.offset(p, first * x.itemsize) for p in (factors.row(w, i), column))
        (found,) = _product_of_lines(w, line, column, count, dtype=x.dtype)
        w.assign(total, w.copy(total) - found)
        w.assign(begin, first + count)
    return w.copy(begin)


@shared
def _product_of_lines(w: Writer, x: Value, y: Value, count: Value, *, dtype: str) -> Value:
    """Return the sum of products of numbers that fill registers."""
    kind = Type(dtype, register_bytes() // Type(dtype).itemsize)
    total = w.local(0, kind)
    with w.loop(0, count, kind.lanes) as k:
        one, other = (w.load(kind, start, k * Type(dtype).itemsize) for start in (x, y))
        w.assign(total, w.fma(one, other, w.copy(total)))
    return sum_of_lanes(w, w.copy(total))


def _counts(kind: Type) -> list[int]:
    """Return how many numbers are taken at once: several registers of them, or one."""
    lanes = register_bytes() // kind.itemsize
    return [4 * lanes, lanes]


@shared
def cholesky(w: Writer, a: Matrix, out: Matrix, lower: Value) -> None:
    """Write Cholesky's lower, or upper, factor of a matrix, of which the upper triangle is read."""
    (done,) = _factor(w, a, out)
    with w.when(done) as choice, w.loop(0, out.rows) as i, w.loop(i + 1, out.rows) as j:
        value = out.load(w, i, j)
        out.store(w, j, i, w.select(lower, value, 0))
        out.store(w, i, j, w.select(lower, 0, value))
    with w.otherwise(choice):
        _fill(w, out, w.constant(float("nan"), out.type))


# Solves


@shared
def _substitute(w: Writer, t: Matrix, lower: Value, unit: Value, x: Matrix) -> Value:
    """Solve ``T X = X`` in place; return whether the diagonal of T has no zero."""
    done, (n, m) = w.local(True, BOOL), sized(w, x.rows, x.columns)
    with w.loop(0, n) as i:
        w.assign(done, w.copy(done) & (unit | t.load(w, i, i).differs(0.0)))
    with w.loop(0, w.select(w.copy(done), n, 0)) as s:
        i = w.select(lower, s, n - 1 - s)
        terms = t, w.select(lower, 0, i + 1), w.select(lower, i, n)
        pivot = w.select(unit, 1.0, t.load(w, i, i))
        _write_row(w, x, i, terms, (w.constant(0, INT64), m), pivot)
    return w.copy(done)


@shared
def solve_triangular(
    w: Writer, a: Matrix, b: Matrix, out: Matrix, lower: Value, unit: Value
) -> None:
    """Write the solution of ``A X = B``; with `unit`, the diagonal of `A` is taken for ones."""
    copy(w, b, out)
    (done,) = _substitute(w, a, lower, unit, out)
    _write_nan_unless(w, done, out)


@shared
def solve_cholesky(w: Writer, upper: Matrix, b: Matrix, out: Matrix) -> None:
    """Write the solution with a matrix that is given by Cholesky's upper factor."""
    copy(w, b, out)
    _write_nan_unless(w, _write_both(w, upper, out), out)


def _write_both(w: Writer, upper: Matrix, x: Matrix) -> Value:
    """Write the solution of ``Uᵀ U X = X``; return whether the diagonal of U has no zero."""
    (done,) = _substitute(w, upper.turned, True, False, x)
    _substitute(w, replace(upper, is_packed=False), False, False, x)
    return done


@shared
def factor_positive(w: Writer, a: Matrix, spare: Value) -> Value:
    """Write the upper factor of a positive definite matrix, of which the upper triangle is read;
    return whether there is one."""
    (done,) = _factor(w, a, packed(spare, a.dtype, a.rows, a.rows))
    return done


@shared
def solve_positive(w: Writer, spare: Value, done: Value, b: Matrix, out: Matrix) -> None:
    """Write the solution with a positive definite matrix that was factorized; NaN if it is not."""
    copy(w, b, out)
    with w.when(done):
        _write_both(w, packed(spare, out.dtype, out.rows, out.rows), out)
    _write_nan_unless(w, done, out)


# Elimination


@shared
def _eliminate(w: Writer, f: Matrix, pivots: Value) -> Value:
    """Write triangular factors into a matrix, and pivots; return whether it is not singular."""
    (n,), done = sized(w, f.rows), w.local(True, BOOL)
    with w.loop(0, n) as k:
        mine = f.row(w, k)
        best, largest = w.local(k), w.local(abs(f.load(w, k, k)))
        with w.loop(k + 1, n) as i:
            size = abs(f.load(w, i, k))
            is_larger = size > w.copy(largest)
            w.assign(best, w.select(is_larger, i, w.copy(best)))
            w.assign(largest, w.select(is_larger, size, w.copy(largest)))
        w.store(pivots, k * 4, w.cast(w.copy(best), "int32"))
        is_zero = w.copy(largest).equals(0.0)
        w.assign(done, w.copy(done) & ~is_zero)
        with w.when(~is_zero):
            _write_exchange(w, f.type, mine, f.row(w, w.copy(best)), n)
            pivot = f.load(w, k, k)
            with w.loop(k + 1, n) as i:
                ratio = f.load(w, i, k) / pivot
                f.store(w, i, k, ratio)
                _write_difference(w, f.row(w, i), mine, ratio, (k + 1, n))
    return w.copy(done)


def _write_difference(
    w: Writer, row: Value, other: Value, factor: Value, ends: tuple[Value, Value]
) -> None:
    """Write ``row[j] -= factor other[j]`` for all j between `ends`."""
    opposite = -factor

    def write(j: Value, count: int) -> None:
        kind, at = Type(factor.type.dtype, count), j * factor.type.itemsize
        several = w.as_value(opposite, kind)
        w.store(row, at, w.fma(several, w.load(kind, other, at), w.load(kind, row, at)))

    walk(w, *ends, _counts(factor.type), write)


def _write_exchange(w: Writer, kind: Type, x: Value, y: Value, count: Value) -> None:
    """Write that two rows change places, which may be the same."""
    with w.loop(0, count) as j:
        at = j * kind.itemsize
        kept, other = w.load(kind, x, at), w.load(kind, y, at)
        w.store(x, at, other)
        w.store(y, at, kept)


@shared
def eliminate(w: Writer, a: Matrix, spare: Value) -> Value:
    """Write the triangular factors of a square matrix; return whether it is not singular.

    `spare` is memory for a row more than the matrix has: pivots stand behind the factors.
    """
    factors = packed(spare, a.dtype, a.rows, a.rows)
    copy(w, a, factors)
    (done,) = _eliminate(w, factors, factors.row(w, a.rows))
    return done


@shared
def solve_eliminated(w: Writer, spare: Value, done: Value, b: Matrix, out: Matrix) -> None:
    """Write the solution with a matrix that was eliminated; NaN if it is singular."""
    copy(w, b, out)
    with w.when(done):
        _write_solution(w, spare, out)
    _write_nan_unless(w, done, out)


def _write_solution(w: Writer, spare: Value, x: Matrix) -> None:
    """Write the solution of ``F X = X`` by the factors of F and their pivots."""
    factors, (m,) = packed(spare, x.dtype, x.rows, x.rows), sized(w, x.columns)
    pivots = factors.row(w, x.rows)
    with w.loop(0, x.rows) as k:
        other = w.cast(w.load(Type("int32"), pivots, k * 4), "int64")
        with w.when(other.differs(k)):
            _write_exchange(w, x.type, x.row(w, k), x.row(w, other), m)
    factors = replace(factors, is_packed=False)
    _substitute(w, factors, True, True, x)
    _substitute(w, factors, False, False, x)


@shared
def inverse(w: Writer, a: Matrix, out: Matrix, spare: Value) -> Value:
    """Write the inverse of a matrix; return zero, `NOT_FINITE` or `SINGULAR`."""
    kind, n = out.type, out.rows
    code, limit = w.local(0, INT64), w.constant(float("inf"), kind)
    with w.loop(0, n) as i, w.loop(0, n) as j:
        is_finite = abs(a.load(w, i, j)) < limit
        w.assign(code, w.select(is_finite, w.copy(code), NOT_FINITE))
    with w.when(w.copy(code).equals(0)):
        (done,) = eliminate(w, a, spare)
        w.assign(code, w.select(done, w.constant(0, INT64), SINGULAR))
    with w.when(w.copy(code).equals(0)):
        _fill(w, out, w.constant(0, kind))
        with w.loop(0, n) as i:
            out.store(w, i, i, w.constant(1, kind))
        _write_solution(w, spare, out)
    return w.copy(code)


@shared
def triangular_factor(w: Writer, a: Matrix, out: Matrix, count: Value, spare: Value) -> None:
    """Write the rows of ``R``, with ``A = Q R``, that `out` has: no more than `A` has rows.

    The first `count` columns of A, which are rows of `spare`, memory for as many items as `A` has,
    are reflected one after the other, and others with them: of an identity behind them, ``Qᵀ``.

    The reflection that takes ``x`` to ``(α, 0 …)``, with ``α = -sign(x₀) ‖x‖``, takes another `z`
    to ``z - v (vᵀ z) / (‖x‖² - α x₀)``, where ``v = x - (α, 0 …)``. As in LAPACK, `x` is divided
    by its largest item first, and one that has no other item than ``x₀`` stays as it is.
    """
    (n, m), kind = sized(w, a.rows, a.columns), a.type
    turned = packed(spare, a.dtype, m, n)
    copy(w, a.turned, turned)
    zero, one = w.constant(0.0, kind), w.constant(1.0, kind)
    with w.loop(0, count) as i:
        mine = turned.row(w, i)
        largest, squares = w.local(zero), w.local(zero)
        with w.loop(i, n) as k:
            size = abs(turned.load(w, i, k))
            w.assign(largest, w.select(size > w.copy(largest), size, w.copy(largest)))
        unit = w.select(w.copy(largest) > zero, w.copy(largest), one)
        with w.loop(i, n) as k:
            value = turned.load(w, i, k) / unit
            turned.store(w, i, k, value)
            w.assign(squares, w.select(k > i, w.fma(value, value, w.copy(squares)), zero))
        first, is_alone = turned.load(w, i, i), w.copy(squares).equals(zero)
        whole = w.fma(first, first, w.copy(squares))
        norm = w.apply("sqrt", whole)
        end = w.select(is_alone, first, w.select(first < zero, norm, -norm))
        turned.store(w, i, i, first - end)
        scale = whole - end * first
        with w.when(~is_alone), w.loop(i + 1, m) as j:
            total = w.local(zero)
            with w.loop(i, n) as k:
                own, theirs = (turned.load(w, row, k) for row in (i, j))
                w.assign(total, w.fma(own, theirs, w.copy(total)))
            _write_difference(w, turned.row(w, j), mine, w.copy(total) / scale, (i, n))
        turned.store(w, i, i, end * unit)
    with w.loop(0, out.rows) as i, w.loop(0, m) as j:
        is_zero = (j < i) & (j < count)
        out.store(w, i, j, w.select(is_zero, zero, turned.load(w, j, i)))


@shared
def determinant(w: Writer, a: Matrix, spare: Value) -> tuple[Value, ...]:
    """Write the determinant of a matrix, its sign, and the logarithm of its absolute value.

    It is the product of the pivots, whose sign each exchange of rows turns.
    """
    eliminate(w, a, spare)
    factors = packed(spare, a.dtype, a.rows, a.rows)
    pivots = factors.row(w, a.rows)
    one, zero = w.constant(1.0, a.type), w.constant(0.0, a.type)
    whole, sign, size = w.local(one), w.local(one), w.local(zero)
    with w.loop(0, a.rows) as k:
        pivot = factors.load(w, k, k)
        is_exchanged = w.load(Type("int32"), pivots, k * 4).differs(w.cast(k, "int32"))
        turned = w.select(is_exchanged, -pivot, pivot)
        w.assign(whole, w.copy(whole) * turned)
        own = w.select(turned < 0.0, -one, w.select(turned.equals(0.0), 0.0, one))
        w.assign(sign, w.copy(sign) * own)
        w.assign(size, w.copy(size) + compute(w, "log", abs(pivot)))
    return w.copy(whole), w.copy(sign), w.copy(size)
