"""Matrix recurrences with `linear_scan` against plain loops."""

from functools import partial

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.checks import assert_derivatives
from tests.direct import LENGTHS, call, first_order_loop, python_loops
from tests.modes import MODES


def vectors(matrices, rows):
    """Multiply matrices by vectors, both with any batch dimensions."""
    return (matrices @ rows[..., None])[..., 0]


def matrix_loop(A, b, init=None, axis=0, reverse=False):
    """Compute ``h = A h + b`` step by step; `A` has a time axis unless it is one matrix."""
    holds_vectors = b.ndim == 2 if A.ndim == 2 else b.ndim == A.ndim - 1
    product = vectors if holds_vectors else np.matmul
    axis %= b.ndim
    parts = [None if A.ndim == 2 else np.moveaxis(A, axis, 0), np.moveaxis(b, axis, 0)]
    return first_order_loop(parts, (A, b), init, axis, reverse, product)


CASES = (
    # A, b, init, axis
    ((9, 3, 3), (9, 3), (3,), 0),
    ((9, 3, 3), (9, 3), None, -2),
    ((3, 3), (9, 3), (3,), 0),
    ((1, 3, 3), (9, 3), (3,), 0),
    ((9, 3, 3), (1, 3), (), 0),
    ((9, 3, 3), (9, 3, 2), (3, 2), 0),
    ((3, 3), (9, 3, 2), (3, 1), 0),
    ((3, 3), (2, 9, 3, 4), None, 1),
    ((2, 9, 3, 3), (2, 9, 3), (2, 3), 1),
    ((1, 9, 3, 3), (2, 9, 3), (3,), -2),
    ((2, 9, 3, 3), (1, 9, 3, 2), (2, 3, 2), 1),
    ((4, 2, 2), (4, 2), (2,), 0),
    ((5, 1, 1), (5, 1), (1,), 0),
)


class TestMatrices:
    def values(self, case):
        rng = np.random.default_rng(0)
        A, b, init, axis = case
        values = [0.5 * rng.normal(size=shape) for shape in (A, b, init) if shape is not None]
        return values, axis

    @pytest.mark.all_forms
    @pytest.mark.parametrize("case", CASES, ids=str)
    @pytest.mark.parametrize("reverse", [False, True])
    def test_agrees_with_the_loop(self, case, reverse):
        values, axis = self.values(case)
        expected = matrix_loop(*values, axis=axis, reverse=reverse)

        def build(*arguments):
            return scanlib.linear_scan(*arguments, axis=axis, reverse=reverse, matrix=True)

        with python_loops() as mode:
            for static in (False, True):
                actual = call(build, *values, mode=mode, static=static)
                assert actual.shape == expected.shape
                np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize("case", [CASES[k] for k in (0, 5, 8, 10)], ids=str)
    def test_compiled(self, mode, case):
        values, axis = self.values(case)
        build = partial(scanlib.linear_scan, axis=axis, matrix=True)
        actual = call(build, *values, mode=mode)
        np.testing.assert_allclose(actual, matrix_loop(*values, axis=axis), rtol=1e-10, atol=1e-12)

    def test_lengths(self, mode):
        A, b = pt.tensor3("A"), pt.matrix("b")
        f = pytensor.function([A, b], scanlib.linear_scan(A, b, matrix=True), mode=mode)
        rng = np.random.default_rng(1)
        for length in LENGTHS:
            values = 0.4 * rng.normal(size=(length, 3, 3)), rng.normal(size=(length, 3))
            np.testing.assert_allclose(f(*values), matrix_loop(*values), rtol=1e-10, atol=1e-12)

    @pytest.mark.slow
    def test_integers(self, mode):
        b = np.zeros((10, 2), dtype="int64")
        fibonacci = call(
            lambda b: scanlib.linear_scan([[0, 1], [1, 1]], b, [0, 1], matrix=True), b, mode=mode
        )
        assert fibonacci.dtype == "int64"
        assert fibonacci[:, 0].tolist() == [1, 1, 2, 3, 5, 8, 13, 21, 34, 55]

    def test_augmented_matrices(self, fast_mode):
        """``x[t] = x[t-1] W[t] + b[t]`` as products of matrices one row and column larger."""
        rng = np.random.default_rng(2)
        n, d = 20, 4
        x0 = rng.normal(size=d)
        W, b = rng.normal(size=(n, d, d)) / 2, rng.normal(size=(n, d))
        expected, x = [], x0
        for t in range(n):
            x = x @ W[t] + b[t]
            expected.append(x)
        augmented = np.zeros((n, d + 1, d + 1))
        augmented[:, :d, :d], augmented[:, d, :d], augmented[:, d, d] = W, b, 1
        products = call(
            lambda M: (
                scanlib.linear_scan(
                    M.mT, np.zeros((n, d + 1, d + 1)), np.eye(d + 1), matrix=True
                ).mT
            ),
            augmented,
            mode=fast_mode,
        )
        direct = call(
            lambda W, b: scanlib.linear_scan(W.mT, b, x0, matrix=True), W, b, mode=fast_mode
        )
        np.testing.assert_allclose((np.append(x0, 1) @ products)[:, :-1], expected, rtol=1e-9)
        np.testing.assert_allclose(direct, expected, rtol=1e-9)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "case", [((4, 2, 2), (4, 2), (2,), 0), ((2, 2), (3, 2, 1), (2, 1), 0)], ids=str
    )
    def test_derivatives(self, mode, case):
        values, axis = self.values(case)
        variables = [
            pt.tensor(dtype="float64", shape=tuple(1 if n == 1 else None for n in value.shape))
            for value in values
        ]
        h = scanlib.linear_scan(*variables, axis=axis, reverse=True, matrix=True)
        assert_derivatives(
            pt.sin(h).sum(),
            dict(zip(variables, values, strict=True)),
            lambda *values: np.sin(matrix_loop(*values, axis=axis, reverse=True)).sum(),
            mode,
            # Under the C linker the loops are compiled by numba too, and much quicker.
            order=1 if mode is MODES["numba"] else 2,
        )

    def test_static_shapes(self):
        A, b = pt.tensor(shape=(7, 3, 3)), pt.tensor(shape=(None, None))
        assert scanlib.linear_scan(A, b, matrix=True).type.shape == (7, 3)
        wide = pt.tensor(shape=(2, None, None, 5))
        assert scanlib.linear_scan(A[0], wide, axis=1, matrix=True).type.shape == (2, None, 3, 5)

    @pytest.mark.all_forms
    @pytest.mark.parametrize(
        "A, b, message",
        [
            ((3,), (5, 3), r"a must have shape \(d, d\)"),
            ((3, 3), (3,), "got a with 2 and b with 1"),
            ((5, 3, 3), (3,), "got a with 3 and b with 1"),
            ((5, 3, 3), (2, 5, 3, 1), "got a with 3 and b with 4"),
            ((5, 3, 2), (5, 3), "must be square, got 3 by 2"),
            ((5, 3, 3), (5, 4), "matrices of a have size 3, but the vectors of b have 4 rows"),
            ((5, 3, 3), (5, 4, 2), "the matrices of b have 4 rows"),
            ((5, 3, 3), (6, 3), "a gives 5, b gives 6"),
            ((2, 5, 3, 3), (3, 5, 3), "a has"),
        ],
    )
    def test_shapes_that_do_not_fit(self, A, b, message):
        axis = 1 if len(A) == 4 else 0
        with pytest.raises(ValueError, match=message):
            scanlib.linear_scan(np.ones(A), np.ones(b), axis=axis, matrix=True)

    def test_time_may_not_be_a_dimension_of_the_vectors(self):
        with pytest.raises(np.exceptions.AxisError, match="axis=1 is a dimension of the vectors"):
            scanlib.linear_scan(np.ones((5, 3, 3)), np.ones((5, 3)), axis=-1, matrix=True)
