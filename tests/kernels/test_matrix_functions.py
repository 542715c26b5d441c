"""Exponentials, factors, spectra and pseudoinverses of matrices, and convolutions in steps, against
NumPy and SciPy."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import scipy.linalg
from pytensor.tensor.linalg.decomposition.eigen import Eigh
from pytensor.tensor.signal import convolve1d, convolve2d
from scipy import signal

import scanlib
from scanlib.kernels.scalars import NoKernelError
from scanlib.rewrites.simplify.last_rows import is_loop
from scanlib.schedules.array_loops import array_program
from tests.checks import assert_derivatives
from tests.modes import MODES

rng = np.random.default_rng(8)


def steps_of(function, dtype, linker, outputs=1):
    """Return what computes a function of a matrix in each step of a loop, with a kernel."""
    A = pt.tensor("A", shape=(None, None, None), dtype=dtype)

    def step(a, h):
        return h + 1, *function(pt.switch(h >= 0, a, 2 * a))

    start = pt.zeros((), dtype=dtype)
    _, *traces = scanlib.scan(step, A, [start, *[None] * outputs], return_updates=False)
    f = pytensor.function([A], traces, mode=MODES[linker])
    (loop,) = (node for node in f.maker.fgraph.toposort() if is_loop(node))
    array_program(loop.op)  # which would raise
    return f


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_exponentials(dtype, linker):
    f = steps_of(lambda a: [pt.linalg.expm(a)], dtype, linker)
    limit = 1e-14 if dtype == "float64" else 3e-6
    for n in (0, 1, 2, 3, 5, 16, 40):
        for size in (0, 1e-8, 0.1, 1, 10, 30):
            a = rng.normal(size=(2, n, n)) / max(n, 1) ** 0.5 - np.eye(n)
            a = (size * a).astype(dtype)
            (found,) = f(a)
            assert found.shape == a.shape
            assert found.dtype == dtype
            if n:
                wanted = scipy.linalg.expm(a.astype("float64"))
                error = np.abs(found - wanted).max() / np.abs(wanted).max()
                assert error < limit * max(size, 1)
    for bad in (np.nan, np.inf):
        (found,) = f(np.full((1, 2, 2), bad, dtype))
        assert np.isnan(found).all()
    with pytest.raises(np.linalg.LinAlgError, match="must be square"):
        f(np.ones((1, 2, 3), dtype))


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("mode", ["full", "economic"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_orthogonal_factors(dtype, mode, linker):
    f = steps_of(lambda a: pt.linalg.qr(a, mode=mode), dtype, linker, outputs=2)
    limit = 1e-13 if dtype == "float64" else 1e-4
    for shape in ((3, 3), (5, 3), (3, 5), (1, 1), (1, 4), (4, 1), (0, 3), (3, 0), (20, 20)):
        a = rng.normal(size=(2, *shape)).astype(dtype)
        for q, r, matrix in zip(*f(a), a, strict=True):
            pairs = zip((q, r), scipy.linalg.qr(matrix, mode=mode), strict=True)
            for found, wanted in pairs:
                assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
                np.testing.assert_allclose(found, wanted, rtol=limit, atol=limit)


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_eigenvectors(dtype, lower, linker):
    f = steps_of(Eigh(lower=lower), dtype, linker, outputs=2)
    limit = 1e-12 if dtype == "float64" else 2e-4
    for n in (0, 1, 2, 4, 20):
        a = rng.normal(size=(3, n, n)).astype(dtype)  # whose other triangle is not read
        for values, vectors, matrix in zip(*f(a), a, strict=True):
            assert values.shape == (n,)
            assert vectors.shape == (n, n)
            assert values.dtype == vectors.dtype == dtype
            if not n:
                continue
            wanted, _ = scipy.linalg.eigh(matrix, lower=lower, driver="evr")
            np.testing.assert_allclose(values, wanted, rtol=limit, atol=limit)
            half = np.tril(matrix) if lower else np.triu(matrix)
            whole = half + half.T - np.diag(np.diag(matrix))
            again = (vectors * values) @ vectors.T
            np.testing.assert_allclose(again, whole, rtol=limit, atol=10 * limit)
    with pytest.raises(np.linalg.LinAlgError, match="must be square"):
        f(np.ones((1, 2, 3), dtype))


def test_generalized_eigenvectors_have_no_kernel():
    with pytest.raises(NoKernelError):
        steps_of(lambda a: Eigh()(a, pt.eye(2)), "float64", "numba", outputs=2)


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("wanted", ["full", "reduced", "values"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_singular_vectors(dtype, wanted, linker):
    options = {"full_matrices": wanted == "full", "compute_uv": wanted != "values"}

    def function(a):
        found = pt.linalg.svd(a, **options)
        return found if wanted != "values" else [found]

    f = steps_of(function, dtype, linker, outputs=1 if wanted == "values" else 3)
    limit = 1e-12 if dtype == "float64" else 1e-4
    for shape in ((3, 3), (5, 3), (3, 5), (1, 1), (1, 4), (30, 20), (0, 3), (3, 0)):
        a = rng.normal(size=(2, *shape)).astype(dtype)
        for *found, matrix in zip(*f(a), a, strict=True):
            expected = np.linalg.svd(matrix, **options)
            expected = [expected] if wanted == "values" else list(expected)
            assert [value.shape for value in found] == [value.shape for value in expected]
            values = found[0 if wanted == "values" else 1]
            k = min(shape)
            exact = expected[0 if wanted == "values" else 1]
            np.testing.assert_allclose(values, exact, rtol=limit, atol=limit)
            if wanted != "values":
                left, _, right = found
                again = (left[:, :k] * values) @ right[:k]
                np.testing.assert_allclose(again, matrix, rtol=limit, atol=10 * limit)


@pytest.mark.parametrize("linker", ["numba", "c"])
def test_spectra_of_what_is_no_number(linker):
    f = steps_of(lambda a: [pt.linalg.svd(a, compute_uv=False)], "float64", linker)
    a = np.stack([np.full((3, 3), np.nan), np.eye(3)])
    missing, found = f(a)[0]
    assert np.isnan(missing).all()
    np.testing.assert_allclose(found, 1)


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_pseudoinverses(dtype, linker):
    f = steps_of(lambda a: [pt.linalg.pinv(a)], dtype, linker)
    limit = 1e-11 if dtype == "float64" else 3e-3
    for shape in ((3, 3), (5, 3), (3, 5), (1, 1), (1, 4), (0, 3), (3, 0)):
        a = rng.normal(size=(2, *shape)).astype(dtype)
        (found,) = f(a)
        assert (found.shape, found.dtype) == ((2, *shape[::-1]), dtype)
        np.testing.assert_allclose(found, np.linalg.pinv(a), rtol=limit, atol=limit)
    a = np.stack([np.diag([2, 0, 0.5]), np.zeros((3, 3)), np.full((3, 3), np.nan)])
    (found,) = f(a.astype(dtype))
    np.testing.assert_allclose(found[0], np.diag([0.5, 0, 2]), atol=limit)
    np.testing.assert_array_equal(found[1], 0)
    assert np.isnan(found[2]).all()


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_pseudoinverses_of_symmetric_matrices(dtype, linker):
    """Which read the lower triangle only."""
    f = steps_of(lambda a: [pt.linalg.pinv(a, hermitian=True)], dtype, linker)
    limit = 1e-11 if dtype == "float64" else 3e-3
    for n in (0, 1, 3, 5):
        a = (rng.normal(size=(2, n, n)) + 4 * np.diag([1, -2, 3, -4, 5][:n])).astype(dtype)
        (found,) = f(a)
        np.testing.assert_allclose(found, np.linalg.pinv(a, hermitian=True), rtol=limit, atol=limit)
    (found,) = f(np.stack([np.diag([2, 0, -0.5]), np.zeros((3, 3))]).astype(dtype))
    np.testing.assert_allclose(found[0], np.diag([0.5, 0, -2]), atol=limit)
    np.testing.assert_array_equal(found[1], 0)


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("kind", ["tridiagonal", "banded"])
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_solves_with_bands(dtype, kind, linker):
    """Items off the bands of a tridiagonal matrix are not read."""
    f = steps_of(
        lambda a: [
            pt.linalg.solve(a, right, assume_a=kind, b_ndim=right.type.ndim)
            for right in (a.sum(axis=1), a[:, :3])
        ],
        dtype,
        linker,
        outputs=2,
    )
    for n in (0, 1, 2, 3, 30):
        a = rng.normal(size=(2, n, n)).astype(dtype)
        distance = np.abs(np.subtract.outer(np.arange(n), np.arange(n)))
        matrix = np.where(distance < 2, a, 0) if kind == "tridiagonal" else a
        rights = a.sum(axis=2, keepdims=True), a[:, :, :3]
        for found, right in zip(f(a), rights, strict=True):
            found = found.reshape(right.shape)
            rtol = 1e-9 if dtype == "float64" else 2e-2
            np.testing.assert_allclose(matrix @ found, right, rtol=rtol, atol=rtol)
    assert np.isnan(f(np.zeros((1, 3, 3), dtype))[0]).all()


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("name", ["expm", "pinv", "eigvalsh"])
@pytest.mark.parametrize("lead", [(3,), (1, 2), (0,)])
def test_batches(lead, name, linker):
    """Of functions that are written as graphs of others."""
    count = int(np.prod(lead))

    def function(a):
        several = pt.stack([a * (k + 1) for k in range(count)] or [a])[:count]
        arrays = pt.reshape(several, (*lead, *a.shape))
        if name == "eigvalsh":
            return [pt.vectorize(lambda a: pt.linalg.eigvalsh(a, None), "(n,n)->(n)")(arrays)]
        return [getattr(pt.linalg, name)(arrays)]

    f, one = steps_of(function, "float64", linker), getattr(scipy.linalg, name)
    for n in (0, 1, 4):
        a = rng.normal(size=(2, n, n))
        wanted = [[one(m * (k + 1)) for k in range(count)] for m in a] if n else []
        shape = (2, *lead, n) if name == "eigvalsh" else (2, *lead, n, n)
        np.testing.assert_allclose(f(a)[0], np.reshape(wanted, shape), rtol=1e-10)


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("mode", ["full", "valid", "same"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
def test_convolutions(dtype, mode, linker):
    kernel = pt.vector("kernel", dtype=dtype)
    x = pt.matrix("x", dtype=dtype)

    def step(x, h, kernel):
        return h + 1, convolve1d(pt.switch(h >= 0, x, 2 * x), kernel, mode=mode)

    start = pt.zeros((), dtype=dtype)
    _, trace = scanlib.scan(step, x, [start, None], [kernel], return_updates=False)
    f = pytensor.function([x, kernel], trace, mode=MODES[linker])
    (loop,) = (node for node in f.maker.fgraph.toposort() if is_loop(node))
    array_program(loop.op)  # which would raise
    for n, k in ((1, 1), (7, 1), (7, 3), (7, 4), (40, 9), (5, 5), (3, 7)):
        if mode == "same" and k > n:
            continue  # which NumPy centres otherwise
        rows, values = ((10 * rng.normal(size=s)).astype(dtype) for s in ((2, n), k))
        if dtype != "int64":
            values[0] = np.inf
        expected = [np.convolve(row, values, mode=mode) for row in rows]
        if mode == "same" and dtype != "int64":  # zeros are put beside the array
            wide = [np.pad(row, (k // 2, (k - 1) // 2)) for row in rows]
            with np.errstate(invalid="ignore"):
                expected = [np.convolve(row, values, mode="valid") for row in wide]
        np.testing.assert_allclose(f(rows, values), expected, rtol=1e-5, atol=1e-4)
    for n, k in ((0, 2), (2, 0)) if mode != "same" else ():
        with pytest.raises(ValueError, match="empty"):
            f(np.ones((1, n), dtype), np.ones(k, dtype))


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("mode", ["full", "valid", "same"])
@pytest.mark.parametrize("dtype", ["float64", "float32", "int64"])
def test_convolutions_of_matrices(dtype, mode, linker):
    x, kernel = pt.tensor3("x", dtype=dtype), pt.matrix("kernel", dtype=dtype)

    def step(x, h, kernel):
        return h + 1, convolve2d(pt.switch(h >= 0, x, 2 * x), kernel, mode=mode)

    start = pt.zeros((), dtype=dtype)
    _, trace = scanlib.scan(step, x, [start, None], [kernel], return_updates=False)
    f = pytensor.function([x, kernel], trace, mode=MODES[linker])
    (loop,) = (node for node in f.maker.fgraph.toposort() if is_loop(node))
    array_program(loop.op)  # which would raise
    sizes = [
        ((1, 1), (1, 1)),
        ((7, 5), (3, 2)),
        ((4, 9), (4, 1)),
        ((3, 3), (5, 4)),
        ((3, 8), (5, 2)),
    ]
    for n, k in sizes:
        if mode == "same" and max(k) > min(n):
            continue
        values, weights = ((10 * rng.normal(size=s)).astype(dtype) for s in ((2, *n), k))
        if mode == "valid" and n == (3, 8):
            with pytest.raises(ValueError, match="at least as large as the other"):
                f(values, weights)
            continue
        given = [values, weights]
        if mode == "same":  # zeros are put beside the matrix
            around = [(s // 2, (s - 1) // 2) for s in k]
            given[0] = np.pad(values, [(0, 0), *around])
        where = "full" if mode == "full" else "valid"
        expected = [signal.convolve(row, given[1], where, "direct") for row in given[0]]
        np.testing.assert_allclose(f(values, weights), expected, rtol=1e-5, atol=1e-4)
    for n, k in ((0, 2), (2, 0)) if mode != "same" else ():
        with pytest.raises(ValueError, match="empty"):
            f(np.ones((1, n, 2), dtype), np.ones((k, 2), dtype))


@pytest.mark.parametrize("boundary", ["fill", "wrap"])
@pytest.mark.parametrize("known", [True, False])
def test_cellular_automata_have_kernels(known, boundary):
    weights = np.array([[1.0, 1, 1], [1, 0, 1], [1, 1, 1]])
    start = pt.dmatrix("start")
    kernel = pt.tensor("kernel", shape=(3, 3) if known else (None, None))

    def step(h, kernel):
        return pt.tanh(convolve2d(h, kernel, mode="same", boundary=boundary) * 0.1 + h)

    last = scanlib.scan(step, None, start, kernel, n_steps=3, return_updates=False)[-1]
    outputs = [last, *pt.grad((last**2).sum(), [start, kernel])]
    f = pytensor.function([start, kernel], outputs, mode=MODES["numba"])
    loops = [node for node in f.maker.fgraph.toposort() if is_loop(node)]
    assert len(loops) == 2
    for node in loops:
        array_program(node.op)  # which would raise
    expected = values = rng.normal(size=(5, 6))
    for _ in range(3):
        met = signal.convolve2d(expected, weights, "same", boundary)
        expected = np.tanh(met * 0.1 + expected)
    found = f(values, weights)
    np.testing.assert_allclose(found[0], expected)
    plain = pytensor.function([start, kernel], outputs, mode="FAST_COMPILE")
    for own, wanted in zip(found, plain(values, weights), strict=True):
        np.testing.assert_allclose(own, wanted, rtol=1e-9)


@pytest.mark.parametrize("mode", ["full", "valid", "same"])
@pytest.mark.parametrize("known", [True, False])
def test_derivatives_of_convolutions(known, mode):
    n, k, steps = 6, 3, 2
    x, kernel = (pt.tensor(shape=(s if known else None,)) for s in (n, k))

    def convolved(x, kernel):
        return np.convolve(x, kernel, mode=mode)

    def step(h, x, kernel):
        return pt.tanh(convolve1d(x * h[:, None].sum(), kernel, mode=mode)).sum() * h

    cost = pt.sin(
        scanlib.scan(step, None, pt.ones(1), [x, kernel], n_steps=steps, return_updates=False)
    ).sum()

    def reference(x, kernel):
        h, total = 1.0, 0.0
        for _ in range(steps):
            h = np.tanh(convolved(x * h, kernel)).sum() * h
            total += np.sin(h)
        return total

    values = {x: rng.normal(size=n), kernel: rng.normal(size=k)}
    assert_derivatives(cost, values, reference, MODES["numba"], order=1)


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize(
    "name", ["exponential", "orthogonal", "spectral", "singular", "pseudoinverse"]
)
def test_derivatives(name, linker):
    n, steps = 3, 2
    A, h = pt.tensor("A", shape=(n, n)), pt.dvector("h")

    def step(h, A):
        if name == "exponential":
            return pt.linalg.expm(A * h[0]) @ h
        if name == "spectral":
            values, vectors = pt.linalg.eigh(A + A.T + pt.outer(h, h))
            return (vectors * pt.tanh(values)) @ (vectors.T @ h)
        if name == "singular":
            left, values, right = pt.linalg.svd(A + pt.outer(h, h), full_matrices=False)
            return (left * pt.tanh(values)) @ (right @ h)
        if name == "pseudoinverse":
            return pt.linalg.pinv(A + pt.outer(h, h)) @ h
        q, r = pt.linalg.qr(A + pt.outer(h, h))
        return q @ h + 0.1 * r[0]

    cost = pt.sin(scanlib.scan(step, None, h, A, n_steps=steps, return_updates=False)).sum()
    values = {A: rng.normal(size=(n, n)), h: rng.normal(size=n)}

    def reference(matrix, state):
        total = 0.0
        for _ in range(steps):
            if name == "exponential":
                state = scipy.linalg.expm(matrix * state[0]) @ state
            elif name == "spectral":
                values, vectors = np.linalg.eigh(matrix + matrix.T + np.outer(state, state))
                state = (vectors * np.tanh(values)) @ (vectors.T @ state)
            elif name == "singular":
                both = np.linalg.svd(matrix + np.outer(state, state))
                state = (both[0] * np.tanh(both[1])) @ (both[2] @ state)
            elif name == "pseudoinverse":
                state = np.linalg.pinv(matrix + np.outer(state, state)) @ state
            else:
                q, r = scipy.linalg.qr(matrix + np.outer(state, state))
                state = q @ state + 0.1 * r[0]
            total += np.sin(state).sum()
        return total

    assert_derivatives(cost, values, reference, MODES[linker], order=1)
