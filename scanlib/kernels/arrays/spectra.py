"""Eigenvectors of symmetric matrices and singular vectors, by LAPACK's routines.

They are those that PyTensor and NumPy call, with matrices by columns as there: so vectors have the
same signs. Where a routine does not converge, results are no numbers.
"""

from pytensor.graph.basic import Apply
from pytensor.tensor.linalg.decomposition.eigen import Eigh
from pytensor.tensor.linalg.decomposition.svd import SVD

from scanlib.kernels.arrays.algebra import by_columns, check_done, check_real, square
from scanlib.kernels.arrays.array_step import Step, rule
from scanlib.kernels.arrays.nests import write_copy
from scanlib.kernels.arrays.sizes import minimum, product, total
from scanlib.kernels.arrays.workspace import Place
from scanlib.kernels.language import INT64, Type, Value
from scanlib.kernels.linalg.matrices import call_routine
from scanlib.kernels.scalars import NoKernelError
from scanlib.kernels.scipy_routines import Routine

BLOCK = 72  # columns that routines take at once, and what else they need for each


@rule(Eigh)
def write_eigenvectors(step: Step, node: Apply) -> None:
    """Write the eigenvalues and eigenvectors of a symmetric matrix."""
    check_real(node)
    op, w = node.op, step.writer
    if len(node.inputs) > 1 or op.driver != "evr":
        raise NoKernelError(f"{op} has no kernel")
    place = step.place(node.inputs[0])
    n, dtype = place.sizes[0], place.dtype
    square(step, place)
    a, vectors = by_columns(step, dtype, n, n), by_columns(step, dtype, n, n)
    values, found = step.fresh(dtype, [n]), step.fresh("int32", [product(2, n)])
    work, integers = step.fresh(dtype, [product(BLOCK, n)]), step.fresh("int32", [product(10, n)])
    write_copy(step, place, a)
    size, zero, none = step.value(n), w.constant(0, INT64), w.constant(0, Type(dtype))
    routine = step.library(Routine("ssyevr" if dtype == "float32" else "dsyevr"))
    with w.when(size > 0):
        failed, count = w.scratch("int32", 1), w.scratch("int32", 1)
        letters = (_letter(step, letter) for letter in ("V", "A", "L" if op.lower else "U"))
        given = (size, a.pointer, size, none, none, zero, zero, none, count, values.pointer)
        spare = (*_memory(step, work), *_memory(step, integers))
        vectors_at = (vectors.pointer, size, found.pointer)
        call_routine(w, routine, *letters, *given, *vectors_at, *spare, failed)
        check_done(step, failed, [values, vectors])
    for out, result in zip(node.outputs, (values, vectors), strict=True):
        step.bind_place(out, result)


@rule(SVD)
def write_singular_vectors(step: Step, node: Apply) -> None:
    """Write the singular values of a matrix, and its singular vectors if they are wanted."""
    check_real(node)
    op, w, place = node.op, step.writer, step.place(node.inputs[0])
    (m, n), dtype = place.sizes, place.dtype
    least = step.sizes.same(minimum(m, n))
    letter, rows, columns = ("A", m, n) if op.full_matrices else ("S", least, least)
    a, values = by_columns(step, dtype, m, n), step.fresh(dtype, [least])
    results, ends = [values], (step.value(1), step.value(1))
    left = right = values.pointer
    if op.compute_uv:
        u, v = by_columns(step, dtype, m, rows), by_columns(step, dtype, columns, n)
        results, ends = [u, values, v], (step.value(m), step.value(columns))
        left, right = u.pointer, v.pointer
    else:
        letter = "N"
    numbers = total(product(4, least, least), product(BLOCK, total(m, n)))
    work, integers = step.fresh(dtype, [numbers]), step.fresh("int32", [product(8, least)])
    write_copy(step, place, a)
    routine = step.library(Routine("sgesdd" if dtype == "float32" else "dgesdd"))
    with w.when(step.value(least) > 0) as choice:
        failed = w.scratch("int32", 1)
        given = (step.value(m), step.value(n), a.pointer, step.value(m), values.pointer)
        found = (left, ends[0], right, ends[1], *_memory(step, work), integers.pointer, failed)
        call_routine(w, routine, _letter(step, letter), *given, *found)
        check_done(step, failed, results)
    with w.otherwise(choice):
        for result in results:
            write_copy(step, step.scalars.constant(0, dtype), result)
    for out, result in zip(node.outputs, results, strict=True):
        step.bind_place(out, result)


def _letter(step: Step, letter: str) -> Value:
    return step.writer.constant(ord(letter), Type("uint8"))


def _memory(step: Step, place: Place) -> tuple[Value, Value]:
    """Return memory and how many items it holds."""
    return place.pointer, step.value(place.sizes[0])
