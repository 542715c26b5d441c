"""Solves in steps, with a matrix that all steps have."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.modes import MODES

SOLVES = {
    "general": lambda A, b: pt.linalg.solve(A, b, b_ndim=b.ndim),
    "turned": lambda A, b: pt.linalg.solve(A.T, b, b_ndim=b.ndim),
    "symmetric": lambda A, b: pt.linalg.solve(A + A.T, b, b_ndim=b.ndim, assume_a="sym"),
    "positive": lambda A, b: pt.linalg.solve(A @ A.T, b, b_ndim=b.ndim, assume_a="pos"),
    "lower": lambda A, b: pt.linalg.solve_triangular(A, b, b_ndim=b.ndim, lower=True),
}
MATRICES = {
    "general": lambda A: A,
    "turned": lambda A: A.T,
    "symmetric": lambda A: A + A.T,
    "positive": lambda A: A @ A.T,
    "lower": np.tril,
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("columns", [None, 2])
@pytest.mark.parametrize("name", SOLVES)
@pytest.mark.parametrize("mode", ["numba", "c"])
def test_solves_with_a_matrix_that_all_steps_have(mode, name, columns, dtype):
    """It is factorized once; without steps nothing is wrong with one that is singular."""
    ndim = 1 if columns is None else 2
    A, x = pt.matrix("A", dtype=dtype), pt.tensor("x", dtype=dtype, shape=(None,) * (ndim + 1))
    h = pt.tensor("h", dtype=dtype, shape=(None,) * ndim)
    trace = scanlib.scan(
        lambda x, h, A: SOLVES[name](A, pt.tanh(h) + x),
        sequences=[x],
        outputs_info=[h],
        non_sequences=[A],
        return_updates=False,
    )
    outputs = [trace, pytensor.grad(trace.sum(), h)]
    f = pytensor.function([A, x, h], outputs, mode=MODES[mode])
    rng = np.random.default_rng(6)
    for n, steps in ((1, 3), (3, 0), (3, 4), (21, 3), (40, 2)):
        row = (n,) if columns is None else (n, columns)
        matrix = (rng.normal(size=(n, n)) / (3 * n**0.5) + 2 * np.eye(n)).astype(dtype)
        values, start = rng.normal(size=(steps, *row)).astype(dtype), np.ones(row, dtype)
        found, derivative = f(matrix, values, start)
        whole = MATRICES[name](matrix.astype("float64"))
        state, expected, slopes = start.astype("float64"), [], []
        for value in values:
            slopes.append(1 - np.tanh(state) ** 2)
            state = np.linalg.solve(whole, np.tanh(state) + value)
            expected.append(state)
        owed = np.zeros(row)
        for slope in slopes[::-1]:
            owed = slope * np.linalg.solve(whole.T, owed + 1)
        limit = 1e-10 if dtype == "float64" else 1e-3
        np.testing.assert_allclose(found, np.reshape(expected, (steps, *row)), rtol=limit)
        np.testing.assert_allclose(derivative, owed, rtol=limit, atol=limit)
        found, _ = f(np.zeros_like(matrix), values, start)
        assert found.shape == (steps, *row)
        assert np.isnan(found).all()
