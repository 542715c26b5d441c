"""Products, factorizations and solves of a step, by `scanlib.kernels.linalg`."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.linalg.decomposition.cholesky import Cholesky
from pytensor.tensor.linalg.decomposition.qr import QR
from pytensor.tensor.linalg.inverse import MatrixInverse
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.psd import CholeskySolve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.linalg.summary import Det, SLogDet
from pytensor.tensor.math import Dot

from scanlib.kernels.arrays.array_step import Step, rule
from scanlib.kernels.arrays.nests import copied, write_copy
from scanlib.kernels.arrays.sizes import (
    Size,
    changes,
    if_equal,
    minimum,
    pieces,
    product,
    quotient,
    total,
)
from scanlib.kernels.arrays.workspace import Place, is_contiguous
from scanlib.kernels.language import FLOATS, Type, Value
from scanlib.kernels.linalg import factorizations, products
from scanlib.kernels.linalg.matrices import Matrix, call_routine, packed
from scanlib.kernels.scalars import NoKernelError, parts_of
from scanlib.kernels.scipy_routines import Routine
from scanlib.kernels.spans import load_number
from scanlib.ops.messages import shape_text
from scanlib.ops.row_ops.step_products import LENGTHS, SIZES, StepProducts
from scanlib.ops.row_ops.triangular import TriangularFactor

SQUARE = "Last 2 dimensions of A must be square, got ({}, {})"
CONFORM = "Dimensions of A and B do not conform: "
FEW_COLUMNS = 12  # of matrices of all steps that are copied to be multiplied at once


def size_operand(step: Step, size: Size) -> Value | int:
    """Return a size as linear algebra takes it."""
    size = step.sizes.same(size)
    return size if isinstance(size, int) else step.value(size)


def matrix(step: Step, place: Place) -> Matrix:
    """Return an array of two axes as linear algebra takes it."""
    sizes = [size_operand(step, size) for size in (*place.sizes, *place.strides)]
    return Matrix(place.pointer, place.dtype, *sizes)


def as_matrix(place: Place, is_row: bool) -> Place:
    """Return a vector as a row or a column, a matrix as it is."""
    if place.ndim == 2:
        return place
    (size,), (stride,) = place.sizes, place.strides
    if is_row:
        return place.view([1, size], [place.itemsize, stride])
    return place.view([size, 1], [stride, place.itemsize])


@rule(Dot)
def write_dot(step: Step, node: Apply) -> None:
    """Write a product of matrices or vectors."""
    (left, right), (out,) = node.inputs, node.outputs
    dtypes = {variable.type.dtype for variable in (left, right, out)}
    if len(dtypes) > 1 or "bool" in dtypes:
        raise NoKernelError("products of several dtypes, or of truth values, have no kernel")
    a = as_matrix(step.place(left), is_row=True)
    b = as_matrix(step.place(right), is_row=False)
    shapes = [step.place(left).sizes, step.place(right).sizes]
    text = " times ".join(shape_text(len(shape)) for shape in shapes)
    step.require(a.sizes[1], b.sizes[0], "ValueError", text, [*shapes[0], *shapes[1]])
    sizes = [*a.sizes[: left.type.ndim - 1], *b.sizes[1 : right.type.ndim]]
    target = step.target(out, sizes) if sizes else step.fresh(out.type.dtype, [1])
    c = as_matrix(target, is_row=left.type.ndim == 1)
    if right in step.fixed and right.type.ndim == 2:
        write_product_of_fixed(step, a, b, c)
    else:
        write_product(step, a, b, c)
    if sizes:
        step.bind_place(out, target)
    else:
        step.bind_number(out, load_number(step.writer, target.dtype, target.pointer, 0))


def write_product(step: Step, a: Place, b: Place, c: Place) -> None:
    """Write ``c = a b``."""
    one, other, result = (matrix(step, place) for place in (a, b, c))
    if parts_of(c.dtype) is None:
        products.multiply(step.writer, one, other, result, step.library)
    else:
        products.write_product(step.writer, one, other, result)


@rule(StepProducts)
def write_sum_of_products(step: Step, node: Apply) -> None:
    """Write the sum of the products of all steps.

    It is one product of their columns and rows side by side, where these lie so or are copied; that
    pays for small matrices alone. Others are multiplied and added step by step.
    """
    (left, right), (out,) = node.inputs, node.outputs
    a, b, w = step.place(left), step.place(right), step.writer
    step.require(a.sizes[0], b.sizes[0], "ValueError", LENGTHS)
    step.require(a.sizes[2], b.sizes[1], "ValueError", SIZES)
    target = step.target(out, [a.sizes[1], b.sizes[2]])
    are_few = all(isinstance(size, int) and size <= FEW_COLUMNS for size in target.sizes)
    columns, rows = (_stacked(step, place, are_few) for place in (a.swapped(), b))
    if columns is not None and rows is not None:
        write_product(step, columns.swapped(), rows, target)
    else:
        write_copy(step, step.scalars.constant(0, target.dtype), target)
        with w.loop(0, step.value(a.sizes[0])) as t:
            one, other = (
                place.along([1, 2], step.moved(place.pointer, t, place.strides[0]))
                for place in (a, b)
            )
            products.add_product(w, *(matrix(step, place) for place in (one, other, target)))
    step.bind_place(out, target)


def _stacked(step: Step, place: Place, copies: bool) -> Place | None:
    """Return the matrices of all steps as one of more rows; if they do not lie so, None, or of a
    copy."""
    (steps, rows, columns), (far, near, side) = place.sizes, place.strides
    if step.sizes.same(rows) == 1:
        return place.view([steps, columns], [far, side])
    if step.sizes.same(far) != step.sizes.same(product(near, rows)):
        return _stacked(step, copied(step, place), False) if copies else None
    return place.view([product(steps, rows), columns], [near, side])


def write_product_of_fixed(step: Step, a: Place, b: Place, c: Place) -> None:
    """Write ``c = a b`` of a matrix that all steps have, packed before the first if that pays.

    A product packs a matrix that is not stored by rows again in every step.
    """
    (m, depth), n = map(step.sizes.same, a.sizes), step.sizes.same(b.sizes[1])
    panel = products.panel_columns(c.dtype) if c.dtype in FLOATS else 0
    fixed_in_rows, result_in_rows = (
        step.sizes.same(place.strides[1]) == place.itemsize for place in (b, c)
    )
    pays: Size = 0
    if panel and result_in_rows:
        fewest = products.MANY if fixed_in_rows else products.FEW
        rows = quotient(minimum(m, depth), fewest)
        columns = quotient(n, panel // products.VECTORS)
        too_large = quotient(product(m, depth, n), products.LARGEST + 1)
        pays = minimum(1, product(rows, columns))
        pays = step.sizes.same(if_equal(too_large, 0, pays, 0))
    if pays == 0 or changes(pays):
        write_product(step, a, b, c)
        return
    width = product(panel, pieces(n, panel))
    w, one, other, result = step.writer, *(matrix(step, place) for place in (a, b, c))
    with w.inside(step.before):
        panels = step.pinned(c.dtype, [product(pays, depth, width)]).pointer
        is_packed = step.value(pays) > 0
        with w.when(is_packed):
            products.pack(w, other, panels)
    if pays == 1:
        products.multiply_packed(w, one, panels, result)
        return
    with w.when(is_packed) as choice:
        products.multiply_packed(w, one, panels, result)
    with w.otherwise(choice):
        write_product(step, a, b, c)


# Factorizations and solves


def square(step: Step, place: Place) -> Matrix:
    rows, columns = place.sizes
    step.require(rows, columns, "LinAlgError", SQUARE, [rows, columns])
    return matrix(step, place)


def _result(step: Step, out: Variable, sizes: Sequence[Size]) -> tuple[Place, Matrix]:
    """Return memory in order for a result, and it as linear algebra fills it."""
    place = step.target(out, sizes)
    place = place if is_contiguous(step.sizes, place) else step.fresh(place.dtype, sizes)
    rows, columns = as_matrix(place, is_row=False).sizes
    whole = size_operand(step, rows), size_operand(step, columns)
    return place, packed(place.pointer, place.dtype, *whole)


# How a matrix is factorized, and how it is solved with: of any kind, and a positive definite one.
_FACTORIZATIONS = (
    (factorizations.eliminate, factorizations.solve_eliminated),
    (factorizations.factor_positive, factorizations.solve_positive),
)


def _spare(step: Step, dtype: str, rows: Size, pinned: bool = False) -> Value:
    """Return memory in which a square matrix is factorized."""
    take = step.pinned if pinned else step.fresh
    return take(dtype, [rows, total(rows, 1)]).pointer


def check_real(node: Apply) -> None:
    dtypes = {variable.type.dtype for variable in (*node.inputs, *node.outputs)}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS):
        raise NoKernelError(f"{node.op} of matrices of {', '.join(sorted(dtypes))} has no kernel")


@rule(Cholesky)
def write_cholesky(step: Step, node: Apply) -> None:
    check_real(node)
    (inp,), (out,) = node.inputs, node.outputs
    place = step.place(inp)
    target, result = _result(step, out, place.sizes)
    a, lower = square(step, place), bool(node.op.lower)
    factorizations.cholesky(step.writer, a.turned if lower else a, result, lower)
    step.bind_place(out, target)


@rule(QR)
def write_orthogonal_factors(step: Step, node: Apply) -> None:
    """Write the factors of a matrix, or the triangular one alone, whose rows are no more than the
    matrix has of either.

    What takes the matrix to its triangular factor takes an identity beside it to the other one.
    """
    check_real(node)
    (inp,), (out, *others), op, w = node.inputs, node.outputs, node.op, step.writer
    if op.pivoting or op.mode == "raw":
        raise NoKernelError(f"{op} has no kernel")
    place = step.place(inp)
    rows, columns = map(step.sizes.same, place.sizes)
    least = minimum(rows, columns)
    if not others and not isinstance(op, TriangularFactor) and step.sizes.same(least) != rows:
        raise NoKernelError(f"{op} of a matrix that may have more rows than columns has no kernel")
    count = step.value(least)
    if not others:
        target, result = _result(step, out, [least, columns])
        spare = step.fresh(place.dtype, [rows, columns])
        factorizations.triangular_factor(w, matrix(step, place), result, count, spare.pointer)
        step.bind_place(out, target)
        return
    width = total(columns, rows)
    both, found, spare = (step.fresh(place.dtype, [rows, width]) for _ in range(3))
    far, near = both.strides
    beside = step.moved(both.pointer, columns, near)
    zero, one = (step.scalars.constant(number, place.dtype) for number in (0, 1))
    write_copy(step, place, both.view([rows, columns], both.strides))
    write_copy(step, zero, both.view([rows, rows], both.strides, beside))
    write_copy(step, one, both.view([rows], [total(far, near)], beside))
    whole = packed(found.pointer, place.dtype, *map(partial(size_operand, step), found.sizes))
    factorizations.triangular_factor(w, matrix(step, both), whole, count, spare.pointer)
    kept = rows if op.mode == "full" else least
    beside = step.moved(found.pointer, columns, near)
    step.bind_place(out, found.view([rows, kept], [near, far], beside))
    step.bind_place(others[0], found.view([kept, columns], [far, near]))


@rule(MatrixInverse)
def write_inverse(step: Step, node: Apply) -> None:
    check_real(node)
    (inp,), (out,) = node.inputs, node.outputs
    place = step.place(inp)
    target, result = _result(step, out, place.sizes)
    spare = _spare(step, place.dtype, place.sizes[0])
    (found,) = factorizations.inverse(step.writer, square(step, place), result, spare)
    texts = {
        factorizations.SINGULAR: "Matrix is singular to machine precision.",
        factorizations.NOT_FINITE: "Array must not contain infs or NaNs.",
    }
    for code, text in texts.items():
        step.fail_when(found.equals(code), "LinAlgError", text)
    step.bind_place(out, target)


@rule(Det, SLogDet)
def write_determinant(step: Step, node: Apply) -> None:
    check_real(node)
    place = step.place(node.inputs[0])
    spare = _spare(step, place.dtype, place.sizes[0])
    whole, sign, size = factorizations.determinant(step.writer, square(step, place), spare)
    results = [whole] if isinstance(node.op, Det) else [sign, size]
    for out, result in zip(node.outputs, results, strict=True):
        step.bind_number(out, result)


def _mirrored(step: Step, place: Place, upper: Matrix) -> Matrix:
    """Return a symmetric matrix of the sizes of another, whose upper triangle is read."""
    w, whole = step.writer, matrix(step, step.fresh(place.dtype, place.sizes))
    with w.loop(0, whole.rows) as i, w.loop(0, whole.columns) as j:
        whole.store(w, i, j, upper.load(w, w.select(i < j, i, j), w.select(i < j, j, i)))
    return whole


@rule(SolveTriangular, CholeskySolve, Solve)
def write_solve(step: Step, node: Apply) -> None:
    """Write a solve; which one depends on what is known of the matrix."""
    check_real(node)
    op, (left, right), (out,), w = node.op, node.inputs, node.outputs, step.writer
    kind = getattr(op, "assume_a", "gen")
    place, b = step.place(left), step.place(right)
    text = f"{CONFORM}{shape_text(place.ndim)} and {shape_text(b.ndim)}"
    step.require(b.sizes[0], place.sizes[0], "LinAlgError", text, [*place.sizes, *b.sizes])
    (target, result), lower = _result(step, out, [place.sizes[0], *b.sizes[1:]]), bool(op.lower)
    a = square(step, place)
    upper, given = a.turned if lower else a, matrix(step, as_matrix(b, is_row=False))
    if isinstance(op, CholeskySolve):
        factorizations.solve_cholesky(w, upper, given, result)
    elif isinstance(op, SolveTriangular):
        factorizations.solve_triangular(w, a, given, result, lower, bool(op.unit_diagonal))
    elif kind == "tridiagonal":
        target = _solve_tridiagonal(step, a, b)
    else:
        factor, solve = _FACTORIZATIONS[kind == "pos"]
        is_fixed = left in step.fixed  # a matrix that all steps have is factorized once
        with w.inside(step.before) if is_fixed else nullcontext():
            if kind in ("sym", "her"):
                a = _mirrored(step, place, upper)
            spare = _spare(step, place.dtype, place.sizes[0], pinned=is_fixed)
            (done,) = factor(w, upper if kind == "pos" else a, spare)
        solve(w, spare, done, given, result)
    step.bind_place(out, target)


def _solve_tridiagonal(step: Step, a: Matrix, b: Place) -> Place:
    """Write the solution with a matrix of which three diagonals are read; NaN if it is singular."""
    w, (n, *columns), item = step.writer, b.sizes, b.itemsize
    below, diagonal, above = (step.fresh(b.dtype, [n]).pointer for _ in range(3))
    found = by_columns(step, b.dtype, n, *columns) if columns else step.fresh(b.dtype, [n])
    write_copy(step, b, found)
    with w.loop(0, a.rows) as i:
        w.store(diagonal, i * item, a.load(w, i, i))
    with w.loop(1, a.rows) as i:
        w.store(below, (i - 1) * item, a.load(w, i, i - 1))
        w.store(above, (i - 1) * item, a.load(w, i - 1, i))
    routine = step.library(Routine("sgtsv" if b.dtype == "float32" else "dgtsv"))
    size, failed = step.value(n), w.scratch("int32", 1)
    with w.when(size > 0):
        given = (size, step.value(*columns or (1,)), below, diagonal, above)
        call_routine(w, routine, *given, found.pointer, size, failed)
        check_done(step, failed, [found])
    return found


def by_columns(step: Step, dtype: str, rows: Size, columns: Size) -> Place:
    """Return memory for a matrix as LAPACK's routines have it."""
    return step.fresh(dtype, [columns, rows]).swapped()


def check_done(step: Step, failed: Value, results: Sequence[Place]) -> None:
    """Write no numbers where a routine says that it failed."""
    w = step.writer
    with w.when(~w.load(Type("int32"), failed).equals(0)):
        for result in results:
            write_copy(step, step.scalars.constant(float("nan"), result.dtype), result)
