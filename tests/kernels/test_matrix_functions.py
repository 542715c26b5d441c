"""Exponentials and orthogonal factors of matrices in steps, against SciPy."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import scipy.linalg

import scanlib
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
@pytest.mark.parametrize("name", ["exponential", "orthogonal"])
def test_derivatives(name, linker):
    n, steps = 3, 2
    A, h = pt.tensor("A", shape=(n, n)), pt.dvector("h")

    def step(h, A):
        if name == "exponential":
            return pt.linalg.expm(A * h[0]) @ h
        q, r = pt.linalg.qr(A + pt.outer(h, h))
        return q @ h + 0.1 * r[0]

    cost = pt.sin(scanlib.scan(step, None, h, A, n_steps=steps, return_updates=False)).sum()
    values = {A: rng.normal(size=(n, n)), h: rng.normal(size=n)}

    def reference(matrix, state):
        total = 0.0
        for _ in range(steps):
            if name == "exponential":
                state = scipy.linalg.expm(matrix * state[0]) @ state
            else:
                q, r = scipy.linalg.qr(matrix + np.outer(state, state))
                state = q @ state + 0.1 * r[0]
            total += np.sin(state).sum()
        return total

    assert_derivatives(cost, values, reference, MODES[linker], order=1)
