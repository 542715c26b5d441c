"""Small linear algebra in kernels: LLVM and the interpreter against NumPy and SciPy."""

import ctypes

import numpy as np
import pytest

from scanlib.backends.handler.functions import function_address
from scanlib.kernels.language import INT64, POINTER
from scanlib.kernels.linalg import factorizations
from scanlib.kernels.linalg.matrices import Matrix, packed
from scanlib.kernels.linalg.products import multiply, multiply_packed, pack, panel_columns
from scanlib.kernels.scalars import NoKernelError
from scanlib.kernels.scipy_routines import Routine
from tests.kernel_runs import by_llvm, interpreted, write_kernel
from tests.kernel_verifier import verify

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


def product(way, a, b, out, static=False, library=None):
    arguments = Arguments(static)
    made = [arguments.matrix(array) for array in (a, b, out)]
    addresses = {}
    for name in library or ():
        arguments.types[name] = POINTER
        addresses[name] = len(arguments.values)
        arguments.values.append(routine(name))

    def write(w, *parameters):
        matrices = [matrix(parameters) for matrix in made]
        found = None
        if library:

            def found(routine):
                return parameters[addresses[routine.name]]

        multiply(w, *matrices, found)

    assert arguments.run(way, write) == 0


def routine(name):
    """Return what `kernel_runs` takes for a pointer, the address of a routine."""
    memory = (ctypes.c_char * 1).from_address(function_address(Routine(name)))
    return np.frombuffer(memory, np.uint8)


def check_product(way, m, depth, n, dtype, layouts, **options):
    rng = np.random.default_rng(m + 10 * depth + 100 * n)
    a, b, out = (
        draw(rng, shape, dtype, layout)
        for shape, layout in zip([(m, depth), (depth, n), (m, n)], layouts, strict=True)
    )
    expected = a @ b
    product(way, a, b, out, **options)
    if np.dtype(dtype).kind == "f":
        scale = np.abs(a) @ np.abs(b) + np.abs(expected) + 1
        eps = (depth + 2) * np.finfo(dtype).eps
        assert (np.abs(out - expected) <= eps * scale).all()
    else:
        np.testing.assert_array_equal(out, expected)


SIZES = [*range(10), 33]


@pytest.mark.parametrize("static", [True, False], ids=["static", "dynamic"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_products(dtype, static):
    sizes = [(size, size, size) for size in SIZES]
    sizes += [(1, 9, 9), (9, 9, 1), (1, 33, 1), (5, 1, 7), (2, 9, 11), (3, 200, 5), (4, 3, 2)]
    rows = ("rows",) * 3
    for shape in sizes:
        check_product(by_llvm, *shape, dtype, rows, static=static)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_products_of_matrices_in_any_layout(layout):
    others = "rows", "columns", layout
    for k, shape in enumerate(
        [(4, 3, 2), (1, 9, 5), (9, 6, 1), (3, 8, 17), (7, 70, 20), (2, 0, 3)]
    ):
        for dtype in ("float64", "float32"):
            for left in (layout, others[k % 3]):
                layouts = left, layout, others[(k + 1) % 3]
                check_product(by_llvm, *shape, dtype, layouts, static=k % 2 == 0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "uint64"])
def test_products_of_integers_wrap_around(dtype, way):
    for shape in [(3, 4, 5), (1, 6, 2), (4, 5, 1), (2, 9, 17)]:
        layouts = "rows", "columns", "rows"
        check_product(WAYS[way], *shape, dtype, layouts)


def test_products_in_the_interpreter():
    for layout in LAYOUTS:
        for shape in [(2, 3, 4), (5, 2, 9), (1, 5, 6), (6, 5, 1), (1, 9, 1)]:
            for static in (False, True):
                layouts = layout, layout, "rows"
                check_product(interpreted, *shape, "float64", layouts, static=static)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_large_products_are_left_to_blas(dtype):
    library = ["sgemm" if dtype == "float32" else "dgemm"]
    for layouts in [("rows", "columns", "rows"), ("columns", "rows", "rows"), ("apart",) * 3]:
        check_product(by_llvm, 130, 129, 131, dtype, layouts, library=library)
        check_product(by_llvm, 5, 6, 7, dtype, layouts, library=library)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_packed_products_have_the_bits_of_others(dtype):
    panel = panel_columns(dtype)
    sizes = [(33, 32, panel), (40, 130, panel - 1), (32, 260, 3 * panel // 2), (5, 3, 2)]
    for m, depth, n in sizes:
        rng = np.random.default_rng(n)
        a, b, out = (draw(rng, shape, dtype) for shape in [(m, depth), (depth, n), (m, n)])
        panels = np.full((depth, -(-n // panel) * panel), np.nan, dtype)
        wanted = out.copy()
        product(by_llvm, a, b, wanted)
        arguments = Arguments(False)
        made = [arguments.matrix(array) for array in (a, b, out, panels)]

        def write(w, *parameters):
            one, other, result, space = (matrix(parameters) for matrix in made)  # noqa: B023
            pack(w, other, space.pointer)
            multiply_packed(w, one, space.pointer, result)

        assert arguments.run(by_llvm, write) == 0
        if depth >= 32 and n >= panel // 2:  # those of others are made of the same tiles
            np.testing.assert_array_equal(out, wanted)
        else:
            np.testing.assert_allclose(out, wanted, rtol=1e-5)


def test_products_of_truth_values_have_no_kernel():
    a = np.ones((2, 2), dtype=bool)
    with pytest.raises(NoKernelError, match="bool"):
        product(by_llvm, a, a, a)


# Factorizations and solves


FACTORIZED = {"solve_eliminated": "eliminate", "solve_positive": "factor_positive"}


def computed(way, name, inputs, out, *flags, static=False, spare=True, turned=False):
    """Call a function of `factorizations`; return what it returns besides the result."""
    arguments = Arguments(static)
    made = [arguments.matrix(array) for array in (*inputs, out)]
    if spare:
        rows = inputs[0].shape[0]
        items = inputs[0].size if spare == "items" else rows * (rows + 1)
        arguments.types["spare"] = POINTER
        arguments.values.append(np.zeros(max(items, 1), out.dtype))
    arguments.types["code"] = POINTER
    arguments.values.append(np.zeros(1, "int64"))

    def write(w, *parameters):
        a, *others, result = (matrix(parameters) for matrix in made)
        result = packed(result.pointer, result.dtype, result.rows, result.columns)
        *rest, code = parameters[-1 - bool(spare) :]
        a = a.turned if turned else a
        if name in FACTORIZED:
            factor = getattr(factorizations, FACTORIZED[name])
            given = *rest, *factor(w, a, *rest), *others, result
        else:
            operands = (f if isinstance(f, bool) else w.constant(f, INT64) for f in flags)
            given = a, *others, result, *operands, *rest
        for value in getattr(factorizations, name)(w, *given):
            w.store(code, 0, value)

    assert arguments.run(way, write) == 0
    return int(arguments.values[-1][0])


def close(found, expected, dtype, factor=1.0):
    limit = 200 * factor * np.finfo(dtype).eps
    scale = np.abs(expected).max(initial=1)
    np.testing.assert_allclose(found, expected, rtol=limit, atol=limit * scale)


def positive(rng, n, dtype):
    x = rng.normal(size=(n, n + 3))
    return (x @ x.T / (n + 3) + np.eye(n)).astype(dtype)


ROWS = [0, 1, 2, 3, 4, 5, 8, 9, 33]
CASES = [(by_llvm, n, static) for n in ROWS for static in (True, False)]
CASES += [(interpreted, n, False) for n in (1, 2, 5)]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("lower", [True, False])
def test_cholesky(dtype, lower):
    rng = np.random.default_rng(0)
    for way, n, static in [*CASES, (by_llvm, 70, False)]:
        a = positive(rng, n, dtype)
        unread = np.triu(np.ones((n, n), bool), 1)
        kept = np.where(unread if lower else unread.T, np.dtype(dtype).type(np.nan), a)
        given = np.asfortranarray(kept) if n % 2 else kept
        expected = np.linalg.cholesky(a.astype("float64"))
        out = np.empty_like(a)
        computed(way, "cholesky", [given], out, lower, static=static, turned=lower, spare=False)
        close(out, expected if lower else expected.T, dtype)


def test_cholesky_of_what_is_not_positive_definite_is_nan():
    for a in ([[1.0, 2.0], [2.0, 1.0]], [[0.0]], [[np.nan, 0.0], [0.0, 1.0]]):
        for n in (len(a), 60):
            whole = np.eye(n)
            whole[-len(a) :, -len(a) :] = a
            out = np.zeros_like(whole)
            computed(by_llvm, "cholesky", [whole], out, True, spare=False)
            assert np.isnan(out).all()
            b = np.ones((n, 2))
            out = np.zeros_like(b)
            computed(by_llvm, "solve_positive", [whole, b], out)
            assert np.isnan(out).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["triangular", "cholesky", "positive", "general"])
def test_solves(name, dtype):
    rng = np.random.default_rng(1)
    for way, n, static in CASES:
        for columns in (0, 1, 3, 9):
            layout = LAYOUTS[(n + columns) % len(LAYOUTS)]
            lower = (n + columns) % 2 == 0
            b = draw(rng, (n, columns), dtype, layout)
            out = np.empty((n, columns), dtype)
            a = positive(rng, n, dtype)
            options = {"static": static, "spare": False}
            whole = a.astype("float64")
            if name == "triangular":
                unit = columns == 3
                whole = (np.tril if lower else np.triu)(a).astype("float64")
                given = a + 0
                if unit:
                    np.fill_diagonal(whole, 1)
                    whole[~np.eye(n, dtype=bool)] /= 9
                    given = whole.astype(dtype)
                    np.fill_diagonal(given, 0)
                computed(way, "solve_triangular", [given, b], out, lower, unit, **options)
            elif name == "cholesky":
                factor = np.linalg.cholesky(whole).astype(dtype)
                given = factor if lower else np.asfortranarray(factor.T)
                computed(way, "solve_cholesky", [given, b], out, turned=lower, **options)
            elif name == "positive":
                given = (np.tril if lower else np.triu)(a)
                computed(way, "solve_positive", [given, b], out, static=static, turned=lower)
            else:
                a = draw(rng, (n, n), dtype, layout)
                whole = a.astype("float64")
                computed(way, "solve_eliminated", [a, b], out, static=static)
            with np.errstate(all="ignore"):
                scale = np.linalg.cond(whole) if n else 1
            close(out, np.linalg.solve(whole, b.astype("float64")), dtype, max(scale, 1))


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_inverses(dtype):
    rng = np.random.default_rng(2)
    for way, n, static in CASES:
        a = draw(rng, (n, n), dtype, LAYOUTS[n % len(LAYOUTS)])
        out = np.empty((n, n), dtype)
        assert computed(way, "inverse", [a], out, static=static) == 0
        whole = a.astype("float64")
        close(out, np.linalg.inv(whole), dtype, np.linalg.cond(whole) if n else 1)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_triangular_factors(dtype):
    rng = np.random.default_rng(3)
    cases = [(way, n, m, static) for way, n, static in CASES for m in (1, 3, 9)]
    for way, n, m, static in cases:
        a = draw(rng, (n, m), dtype, LAYOUTS[(n + m) % len(LAYOUTS)])
        if n == 5:
            a[:, 0] = [2, 0, 0, 0, 0]
            a[1:, -1] = 0
        if n == 4:
            a *= np.dtype(dtype).type(1e-30)
        whole = a.astype("float64")
        expected = np.linalg.qr(whole, mode="r") if n else np.zeros((0, m))
        for rows in {min(n, m), n}:
            out = np.full((rows, m), np.nan, dtype)
            options = {"static": static, "spare": "items"}
            computed(way, "triangular_factor", [a], out, min(n, m), **options)
            scale = np.abs(whole).max(initial=0) or 1
            wanted = np.zeros((rows, m))
            wanted[: len(expected)] = expected
            # A column of nothing but rounding may be reflected, or not.
            close(out.astype("float64").T @ out / scale**2, wanted.T @ wanted / scale**2, dtype, 9)
            assert not np.tril(out, -1).any()
            if n != 5:
                close(out / scale, wanted / scale, dtype, 9)


def test_singular_matrices():
    zero, out = np.zeros((3, 3)), np.ones((3, 3))
    assert computed(by_llvm, "inverse", [zero], out) == factorizations.SINGULAR
    bad = np.full((3, 3), np.inf)
    assert computed(by_llvm, "inverse", [bad], out) == factorizations.NOT_FINITE
    b = np.ones((3, 2))
    for name in ("solve_eliminated", "solve_triangular", "solve_cholesky"):
        result = np.zeros((3, 2))
        flags = (True, False) if name == "solve_triangular" else ()
        computed(by_llvm, name, [zero, b], result, *flags, spare=name in FACTORIZED)
        assert np.isnan(result).all()


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_determinants(dtype):
    rng = np.random.default_rng(4)
    odd = np.eye(3)[[1, 0, 2]], np.zeros((2, 2)), np.full((2, 2), np.nan)
    for a in (*(rng.normal(size=(n, n)) for n in ROWS), *odd):
        a, out = a.astype(dtype), np.zeros(3, dtype)
        spare = np.zeros(len(a) * (len(a) + 1) + 1, dtype)

        def write(w, a, spare, n, line, out, dtype=dtype):
            item = np.dtype(dtype).itemsize
            matrix = Matrix(a, dtype, n, n, line, item)
            for k, value in enumerate(factorizations.determinant(w, matrix, spare)):
                w.store(out, k * item, value)

        names = {"a": POINTER, "spare": POINTER, "n": INT64, "line": INT64, "out": POINTER}
        kernel = write_kernel("kernel", names, write)
        assert by_llvm(kernel, [a, spare, len(a), a.strides[0], out])[0] == 0
        whole = a.astype("float64")
        limit = 100 * max(len(a), 1) * np.finfo(dtype).eps
        with np.errstate(invalid="ignore"):
            expected = [np.linalg.det(whole), *np.linalg.slogdet(whole)]
        np.testing.assert_allclose(out, expected, rtol=limit, atol=limit)
