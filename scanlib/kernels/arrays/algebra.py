"""Products, factorizations and solves of a step, by `scanlib.kernels.linalg`."""

from __future__ import annotations

from pytensor.graph.basic import Apply
from pytensor.tensor.math import Dot

from scanlib.kernels.arrays.nests import write_copy
from scanlib.kernels.arrays.places import Place
from scanlib.kernels.arrays.sizes import Size, product
from scanlib.kernels.arrays.step import Step, rule
from scanlib.kernels.language import Value
from scanlib.kernels.linalg.matrices import Matrix
from scanlib.kernels.linalg.products import multiply
from scanlib.kernels.scalars import NoKernelError, parts_of
from scanlib.kernels.spans import load_number
from scanlib.ops import reductions
from scanlib.ops.reductions import StepProducts

PRODUCT_SIZES = "incompatible array sizes for a matrix product"


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
    if len(dtypes) > 1 or parts_of(out.type.dtype) is not None or "bool" in dtypes:
        raise NoKernelError("products of complex numbers, or of several dtypes, have no kernel")
    a = as_matrix(step.place(left), is_row=True)
    b = as_matrix(step.place(right), is_row=False)
    step.sizes.require_equal(a.sizes[1], b.sizes[0], "ValueError", PRODUCT_SIZES + step.where)
    sizes = [
        *([a.sizes[0]] if left.type.ndim == 2 else []),
        *([b.sizes[1]] if right.type.ndim == 2 else []),
    ]
    target = step.target(out, sizes) if sizes else step.fresh(out.type.dtype, [1])
    c = target
    if target.ndim < 2:
        c = as_matrix(target, is_row=left.type.ndim == 1)
    one, other, result = (matrix(step, place) for place in (a, b, c))
    multiply(step.writer, one, other, result, library=step.library)
    if sizes:
        step.bind_place(out, target)
    else:
        step.bind_number(out, load_number(step.writer, target.dtype, target.pointer, 0))


@rule(StepProducts)
def write_step_products(step: Step, node: Apply) -> None:
    """Write the products of the matrices of all steps, as few of them as possible.

    Matrices whose rows follow one another from step to step are one matrix of more rows; so are
    columns and rows in ``Σ_t x_t y_t`` where each step has one.
    """
    (x, y), (out,) = map(step.place, node.inputs), node.outputs
    if parts_of(out.type.dtype) is not None or out.type.dtype == "bool":
        raise NoKernelError("products of complex numbers have no kernel")
    same = step.sizes.same
    if x.ndim == y.ndim == 3:
        step.sizes.require_equal(x.sizes[0], y.sizes[0], "ValueError", reductions.LENGTHS)
    step.sizes.require_equal(x.sizes[-1], y.sizes[-2], "ValueError", reductions.SIZES)
    sizes = [x.sizes[-2], y.sizes[-1]]
    total = node.op.total
    if not total and max(x.ndim, y.ndim) == 3:
        sizes = [x.sizes[0] if x.ndim == 3 else y.sizes[0], *sizes]
    z = step.target(out, sizes)
    plan = _whole_product(step, x, y, z, total)
    if plan is not None:
        one, other, result = (matrix(step, place) for place in plan)
        multiply(step.writer, one, other, result, library=step.library)
    else:
        if total:
            write_copy(step, step.scalars.constant(0, out.type.dtype), z)
        count = same(x.sizes[0] if x.ndim == 3 else y.sizes[0])
        with step.writer.loop(0, step.value(count)) as t:
            one, other, result = (matrix(step, _at_step(step, place, t)) for place in (x, y, z))
            multiply(step.writer, one, other, result, more=total, library=step.library)
    step.bind_place(out, z)


def _at_step(step: Step, place: Place, t: Value) -> Place:
    if place.ndim == 2:
        return place
    pointer = step.writer.offset(place.pointer, step.bytes(t, place.strides[0]))
    return place.view(list(place.sizes[1:]), list(place.strides[1:]), pointer)


def _stacked(step: Step, place: Place) -> Place | None:
    """Return the matrices of all steps as one of more rows, if their rows follow one another."""
    same, (count, rows, columns) = step.sizes.same, place.sizes
    if same(rows) == 1:
        return place.view([count, columns], [place.strides[0], place.strides[2]])
    if same(place.strides[0]) != same(product(rows, place.strides[1])):
        return None
    return place.view([product(count, rows), columns], list(place.strides[1:]))


def _turned(place: Place) -> Place:
    """Return an array whose matrices are transposed."""
    (*first, rows, columns), (*lead, row, column) = place.sizes, place.strides
    return place.view([*first, columns, rows], [*lead, column, row])


def _whole_product(
    step: Step, x: Place, y: Place, z: Place, total: bool
) -> tuple[Place, Place, Place] | None:
    """Return the matrices of one product that is all of them, if there is one."""
    if x.ndim == y.ndim == 2:
        return x, y, z
    if total:
        # The columns of all `x`, and the rows of all `y`.
        columns, rows = _stacked(step, _turned(x)), _stacked(step, y)
        return None if columns is None or rows is None else (_turned(columns), rows, z)
    if y.ndim == 2:
        one, result = _stacked(step, x), _stacked(step, z)
        return None if one is None or result is None else (one, y, result)
    if x.ndim == 2:
        one, result = _stacked(step, _turned(y)), _stacked(step, _turned(z))
        return None if one is None or result is None else (one, _turned(x), result)
    return None
