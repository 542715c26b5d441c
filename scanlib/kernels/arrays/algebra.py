"""Products, factorizations and solves of a step, by `scanlib.kernels.linalg`."""

from __future__ import annotations

from pytensor.graph.basic import Apply
from pytensor.tensor.math import Dot

from scanlib.kernels.arrays.places import Place
from scanlib.kernels.arrays.sizes import Size
from scanlib.kernels.arrays.step import Step, rule
from scanlib.kernels.language import Value
from scanlib.kernels.linalg.matrices import Matrix
from scanlib.kernels.linalg.products import multiply
from scanlib.kernels.scalars import NoKernelError, parts_of
from scanlib.kernels.spans import load_number

PRODUCT_SIZES = "incompatible array sizes for a matrix product inside a scan"


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
    step.sizes.require_equal(a.sizes[1], b.sizes[0], "ValueError", PRODUCT_SIZES)
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
