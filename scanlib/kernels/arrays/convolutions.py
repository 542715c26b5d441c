"""Convolutions of vectors and matrices: rows are multiplied with what they meet of other rows."""

from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.signal.conv import Convolve1d, Convolve2d

from scanlib.kernels.arrays.algebra import as_matrix, size_operand
from scanlib.kernels.arrays.array_step import Step, rule
from scanlib.kernels.arrays.nests import contiguous, write_copy
from scanlib.kernels.arrays.sizes import Size, if_equal, minimum, product, total
from scanlib.kernels.arrays.workspace import Place
from scanlib.kernels.language import INT64, Value
from scanlib.kernels.linalg import products
from scanlib.kernels.linalg.matrices import Matrix
from scanlib.kernels.scalars import NoKernelError, added

EMPTY = "the arrays of a convolution must not be empty"
LARGER = "one array of a convolution must be at least as large as the other along all axes"


@rule(Convolve1d, Convolve2d)
def write_convolution(step: Step, node: Apply) -> None:
    """Write ``Σ_i a_i b_(j - i)`` for each ``j`` at which all of the smaller array meets the larger
    one or, if the last input is true, a part of it.

    Vectors are matrices of one row. What a row of the smaller matrix and one of the larger one give
    is added to a row of the result, which vectors write at once.
    """
    (one, other, full), (out,), w = node.inputs, node.outputs, step.writer
    if out.type.dtype == "bool":
        raise NoKernelError("a convolution of truth values has no kernel")
    is_full = step.size_of(full)
    first, second = (_as_given(step, variable, out.type.dtype) for variable in (one, other))
    long, short = _by_size(step, first, second, is_full)
    # How often a part of the smaller array meets the larger one, on either side, and all of it.
    beside, meeting, sizes = [], [], []
    for n, k in zip(long.sizes, short.sizes, strict=True):
        beside.append(if_equal(is_full, 1, total(k, -1), 0))
        meeting.append(total(n, product(-1, k), 1))
        sizes.append(total(meeting[-1], product(2, beside[-1])))
        step.require_not_below(sizes[-1], 1, "ValueError", LARGER)
    last = step.moved(short.pointer, total(short.sizes[1], -1), short.strides[1])
    turned = step.fresh(short.dtype, short.sizes)
    turns = [short.strides[0], product(-1, short.strides[1])]
    write_copy(step, short.view(short.sizes, turns, last), turned)
    target = step.target(out, sizes[-out.type.ndim :])
    row = target if target.ndim == 1 else step.fresh(target.dtype, sizes[1:])
    if row is not target:
        write_copy(step, step.scalars.constant(0, target.dtype), target)
    hidden = step.value(total(short.sizes[0], product(-1, beside[0]), -1))
    zero, counts = w.constant(0, INT64), (short.sizes[0], total(meeting[0], beside[0]))
    with w.loop(zero, step.value(counts[0])) as i, w.loop(zero, step.value(counts[1])) as j:
        is_full_row = hidden.equals(0)
        met = step.moved(long.pointer, j + w.select(is_full_row, zero, hidden - i), long.strides[0])
        weights = step.moved(turned.pointer, i, turned.strides[0])
        _write_row(step, (weights, short.sizes[1]), (met, long.sizes[1]), row, beside[1])
        if row is not target:
            to = step.moved(target.pointer, j + w.select(is_full_row, i, zero), target.strides[0])
            write_copy(step, row, target.view(sizes[1:], target.strides[1:], to), added)
    step.bind_place(out, target)


def _as_given(step: Step, variable: Variable, dtype: str) -> Place:
    """Return an array of a dtype in order of memory, as a matrix."""
    place = contiguous(step, variable)
    if place.dtype != dtype:
        place, source = step.fresh(dtype, place.sizes), place
        write_copy(step, source, place)
    return as_matrix(place, is_row=True)


def _by_size(step: Step, one: Place, other: Place, is_full: Size) -> tuple[Place, Place]:
    """Return the larger matrix, and the smaller one; where parts may meet, that with more columns
    is the larger one."""
    w, is_second = step.writer, if_equal(is_full, 1, 0, 1)
    is_second = if_equal(minimum(one.sizes[0], other.sizes[0]), other.sizes[0], 0, is_second)
    is_second = if_equal(minimum(one.sizes[1], other.sizes[1]), other.sizes[1], is_second, 1)
    for size in (*one.sizes, *other.sizes):
        step.require_not_below(size, 1, "ValueError", EMPTY)
    found = []
    for chosen, left in ((other, one), (one, other)):
        pointer = w.select(step.value(is_second).equals(1), chosen.pointer, left.pointer)
        pairs = zip(chosen.sizes, left.sizes, strict=True)
        sizes = tuple(if_equal(is_second, 1, *pair) for pair in pairs)
        found.append(step.contiguous(pointer, one.dtype, sizes))
    return found[0], found[1]


def _write_row(
    step: Step, weights: tuple[Value, Size], met: tuple[Value, Size], row: Place, beside: Size
) -> None:
    """Write the products of weights with what they meet of a longer row; `beside`: how often a part
    of them meets its beginning, and its end."""
    w, dtype, item = step.writer, row.dtype, row.itemsize
    (one, count), (other, length) = weights, met
    stride = size_operand(step, row.strides[0])

    def write(first: Value, start: Value, terms: Any, place: Value, results: Any) -> None:
        """Write some results, from a place on."""
        factors = Matrix(w.offset(one, first * item), dtype, 1, terms, item, item)
        rows = Matrix(w.offset(other, start * item), dtype, terms, results, item, item)
        to = step.moved(row.pointer, place, row.strides[0])
        products.multiply(w, factors, rows, Matrix(to, dtype, 1, results, stride, stride))

    zero, parts, whole = (
        w.constant(0, INT64),
        step.value(beside),
        total(length, product(-1, count), 1),
    )
    write(zero, zero, size_operand(step, count), parts, size_operand(step, whole))
    last_weight, last = step.value(total(count, -1)), step.value(total(length, -1))
    with w.loop(0, parts) as k:
        write(last_weight - k, zero, k + 1, k, 1)
        write(zero, last - k, k + 1, last_weight + last - k, 1)
