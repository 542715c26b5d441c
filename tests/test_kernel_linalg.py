"""Small linear algebra in kernels: LLVM and the interpreter against NumPy and SciPy."""

import ctypes

import numpy as np
import pytest

from scanlib.backends.handler.functions import function_address
from scanlib.kernels.language import INT64, POINTER, write_kernel
from scanlib.kernels.linalg.matrices import Matrix
from scanlib.kernels.linalg.products import multiply
from scanlib.kernels.program import Routine
from scanlib.kernels.scalars import NoKernelError
from scanlib.kernels.verifier import verify
from tests.kernel_runs import by_llvm, interpreted

WAYS = {"llvm": by_llvm, "interpreted": interpreted}
LAYOUTS = ("rows", "columns", "apart", "backwards", "apart columns")


def draw(rng, shape, dtype, layout="rows"):
    """Return random numbers that lie in memory in one of several ways."""
    if layout.endswith("columns"):
        return draw(rng, shape[::-1], dtype, layout.removesuffix("columns").strip() or "rows").T
    if np.dtype(dtype).kind == "f":
        values = rng.normal(size=shape).astype(dtype)
    else:
        info = np.iinfo(dtype)
        values = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    if layout == "apart":
        whole = np.zeros((*shape[:-1], 2 * shape[-1]), dtype)
        whole[..., ::2] = values
        return whole[..., ::2]
    return values[::-1, ::-1].copy()[::-1, ::-1] if layout == "backwards" else values


class Arguments:
    """Parameters of a kernel for arrays, whose sizes are known or not."""

    def __init__(self, static):
        self.static, self.types, self.values = static, {}, []

    def matrix(self, array):
        """Return a function from the parameters to the matrix of an array."""
        first = len(self.values)
        self.types[f"p{first}"] = POINTER
        self.values.append(array)
        numbers = [*array.shape, *array.strides]
        if not self.static:
            self.types.update({f"p{first}_{k}": INT64 for k in range(4)})
            self.values += numbers

        def made(parameters):
            pointer = parameters[first]
            sizes = numbers if self.static else parameters[first + 1 : first + 5]
            return Matrix(pointer, array.dtype.name, *sizes)

        return made

    def run(self, way, write):
        kernel = write_kernel("kernel", self.types, write)
        verify(kernel)
        code, _ = way(kernel, self.values)
        return code


def product(way, a, b, out, more=False, static=False, library=None):
    arguments = Arguments(static)
    made = [arguments.matrix(array) for array in (a, b, out)]
    addresses = {}
    for name in library or ():
        arguments.types[name] = POINTER
        addresses[name] = len(arguments.values)
        arguments.values.append((ctypes.c_char * 1).from_address(function_address(Routine(name))))

    def write(w, *parameters):
        matrices = [matrix(parameters) for matrix in made]
        found = None
        if library:

            def found(routine):
                return parameters[addresses[routine.name]]

        multiply(w, *matrices, more, found)

    arguments.values = [Address(v) if isinstance(v, ctypes.Array) else v for v in arguments.values]
    assert arguments.run(way, write) == 0


class Address:
    """What `kernel_runs` takes for a pointer, at a known address."""

    def __init__(self, memory):
        self.ctypes = type("", (), {"data": ctypes.addressof(memory)})


def check_product(way, m, depth, n, dtype, layouts, **options):
    rng = np.random.default_rng(m + 10 * depth + 100 * n)
    a, b, out = (
        draw(rng, shape, dtype, layout)
        for shape, layout in zip([(m, depth), (depth, n), (m, n)], layouts, strict=True)
    )
    expected = a @ b + (out if options.get("more") else 0)
    product(way, a, b, out, **options)
    if np.dtype(dtype).kind == "f":
        scale = np.abs(a) @ np.abs(b) + np.abs(expected) + 1
        eps = (depth + 2) * np.finfo(dtype).eps
        assert (np.abs(out - expected) <= eps * scale).all()
    else:
        np.testing.assert_array_equal(out, expected)


SIZES = [*range(10), 33]


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("more", [False, True], ids=["", "more"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_products(dtype, more, static):
    sizes = [(size, size, size) for size in SIZES]
    sizes += [(1, 9, 9), (9, 9, 1), (1, 33, 1), (5, 1, 7), (2, 9, 11), (3, 200, 5), (4, 3, 2)]
    rows = ("rows",) * 3
    for shape in sizes:
        check_product(by_llvm, *shape, dtype, rows, more=more, static=static)


@pytest.mark.parametrize("more", [False, True], ids=["", "more"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_of_matrices_in_any_layout(layout, more):
    others = "rows", "columns", layout
    for k, shape in enumerate(
        [(4, 3, 2), (1, 9, 5), (9, 6, 1), (3, 8, 17), (7, 70, 20), (2, 0, 3)]
    ):
        for dtype in ("float64", "float32"):
            for left in (layout, others[k % 3]):
                layouts = left, layout, others[(k + 1) % 3]
                check_product(by_llvm, *shape, dtype, layouts, more=more, static=k % 2 == 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64"])
def test_products_of_integers_wrap_around(dtype, way):
    for shape in [(3, 4, 5), (1, 6, 2), (4, 5, 1), (2, 9, 17)]:
        layouts = "rows", "columns", "rows"
        check_product(WAYS[way], *shape, dtype, layouts, more=True)


def test_products_in_the_interpreter():
    for layout in LAYOUTS:
        for shape in [(2, 3, 4), (5, 2, 9), (1, 5, 6), (6, 5, 1), (1, 9, 1)]:
            for static in (False, True):
                layouts = layout, layout, "rows"
                check_product(interpreted, *shape, "float64", layouts, more=True, static=static)


@pytest.mark.parametrize("more", [False, True], ids=["", "more"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_large_products_are_left_to_blas(dtype, more):
    library = ["sgemm" if dtype == "float32" else "dgemm"]
    for layouts in [("rows", "columns", "rows"), ("columns", "rows", "rows"), ("apart",) * 3]:
        check_product(by_llvm, 60, 50, 70, dtype, layouts, more=more, library=library)
        check_product(by_llvm, 5, 6, 7, dtype, layouts, more=more, library=library)


def test_products_of_several_dtypes():
    a, b = np.arange(12, dtype="int8").reshape(3, 4), np.linspace(0, 1, 8).reshape(4, 2)
    out = np.empty((3, 2))
    product(by_llvm, a, b, out)
    np.testing.assert_allclose(out, a @ b, rtol=1e-15)
    with pytest.raises(NoKernelError, match="bool"):
        product(by_llvm, a.astype(bool), b, out)
