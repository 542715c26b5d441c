"""Exponentials, orthogonal factors and spectra of matrices in steps, against SciPy."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import scipy.linalg
from pytensor.tensor.linalg.decomposition.eigen import Eigh

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
@pytest.mark.parametrize("name", ["exponential", "orthogonal", "spectral", "singular"])
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
            else:
                q, r = scipy.linalg.qr(matrix + np.outer(state, state))
                state = q @ state + 0.1 * r[0]
            total += np.sin(state).sum()
        return total

    assert_derivatives(cost, values, reference, MODES[linker], order=1)
