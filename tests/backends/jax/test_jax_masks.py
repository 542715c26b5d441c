"""Masks and ranges under the JAX linker: items that truth values select, and numbers up to one."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.checks import assert_same, in_python
from tests.jax_loops import compiled

pytest.importorskip("jax", reason="jax is not installed")

from scanlib.backends.jax.bounded import UnknownLengthError

X = np.array([[1.0, np.nan, 3.0], [0.5, 1.0, 2.0], [np.nan] * 3, [1.0, np.nan, np.nan]])
H = np.arange(1.0, 7.0).reshape(3, 2) / 5


def scan(*arguments, **options):
    return scanlib.scan(*arguments, return_updates=False, **options)


def check(inputs, outputs, *arguments):
    f, expected = compiled(inputs, outputs), in_python(inputs, outputs)
    for values in arguments:
        assert_same([np.asarray(value) for value in f(*values)], expected(*values))


# Functions of a row, which of its items are there, and a matrix of as many rows.
STEPS = {
    "set to a number": lambda x, m, A: pt.set_subtensor(x[~m], 0.0),
    "sums": lambda x, m, A: x[m].sum() + (A[m] * x[m][:, None]).sum(axis=0) + (A[m] ** 2).sum(),
    "mean": lambda x, m, A: pt.switch(m.any(), x[m].sum() / pt.maximum(m.sum(), 1), -1.0),
    "rows set to a number": lambda x, m, A: pt.set_subtensor(A[~m], 0.0).T @ pt.ones(3),
    "a number added to rows": lambda x, m, A: pt.inc_subtensor(A[m], x[0]),
    "rows set": lambda x, m, A: pt.set_subtensor(A[m], A[::-1][m] - 2 * A[m]),
    "items set": lambda x, m, A: pt.set_subtensor(A[:, 0][m], x[m] ** 2),
    "items added": lambda x, m, A: pt.inc_subtensor(A[:, 0][m], x[m]),
    "largest": lambda x, m, A: A[A > 0.3].max(),
    "gradient": lambda x, m, A: pytensor.grad((A[m] ** 2).sum(), A),
}


def outputs_of(names):
    x, A = pt.dmatrix("x"), pt.dmatrix("A")
    loops = [
        scan(lambda x, A, name=name: STEPS[name](x, ~pt.isnan(x), A), x, None, A) for name in names
    ]
    return [x, A], loops


# A row for what a mask selects, and masks that are not the whole index.
REFUSED = {
    "a row added": lambda x, m, A: pt.inc_subtensor(A[m], A[0]),
    "columns": lambda x, m, A: pt.set_subtensor(A.T[:, m], x[m]),
    "mask and place": lambda x, m, A: pt.set_subtensor(A[m, 0], x[m]),
}


class TestMasks:
    @pytest.mark.parametrize("name", REFUSED)
    def test_what_cannot_be_compiled(self, name):
        x, A = pt.dmatrix("x"), pt.dmatrix("A")
        loop = scan(lambda x, A: REFUSED[name](x, ~pt.isnan(x), A), x, None, A)
        with pytest.raises(UnknownLengthError, match=r"pt.where\(mask, x, 0\)"):
            compiled([x, A], loop)(X, H)

    @pytest.mark.parametrize("part", range(2))
    def test_values(self, part):
        inputs, loops = outputs_of(list(STEPS)[part::2])
        check(inputs, loops, (X, H))

    def test_no_rows_and_outside_of_loops(self):
        x = pt.dmatrix("x")
        h = scan(lambda x, h: h + pt.set_subtensor(x[pt.isnan(x)], 0.0), x, pt.zeros(3))
        check([x], [h, h[h > 1], pt.set_subtensor(h[h[:, 0] > 1], 0.5)], (X,), (X[:0],))

    def test_masks_of_another_size(self):
        x, m = pt.dmatrix("x"), pt.bmatrix("m")
        for step in (
            lambda x, m: pt.set_subtensor(x[m > 0], 1.0),
            lambda x, m: x[m > 0].sum(),
        ):
            f = compiled([x, m], scan(step, [x, m]))
            with pytest.raises(Exception, match=r"(?i)shape|broadcast"):
                f(X, np.ones((4, 1), "int8"))

    def test_missing_observations(self):
        """A Kalman filter that keeps all rows; the one whose arrays shrink is told to."""
        y, A = pt.dmatrix("y"), pt.dmatrix("A")

        def step(y, s, A):
            m = ~pt.isnan(y)
            v = pt.set_subtensor(y[~m], 0.0) - pt.set_subtensor(A[~m], 0.0) @ s
            A = pt.set_subtensor(A[~m], 0.0)
            return 0.9 * s + A.T @ pt.linalg.solve(A @ A.T + pt.eye(3), v)

        def shrinking(y, s, A):
            m = ~pt.isnan(y)
            A = A[m]
            v = y[m] - A @ s
            return 0.9 * s + A.T @ pt.linalg.solve(A @ A.T + pt.eye(v.shape[0]), v)

        s, expected = np.zeros(2), []
        for row in X:
            m = ~np.isnan(row)
            B = H[m]
            s = 0.9 * s + B.T @ np.linalg.solve(B @ B.T + np.eye(m.sum()), row[m] - B @ s)
            expected.append(s)
        f = compiled([y, A], scan(step, y, pt.zeros(2), A))
        np.testing.assert_allclose(f(X, H), expected)
        f = compiled([y, A], scan(shrinking, y, pt.zeros(2), A))
        with pytest.raises(UnknownLengthError, match="ones on the diagonal"):
            f(X, H)


RANGES = {
    "of a length": lambda h: pt.arange(h.size, dtype="float64") * h,
    "from one": lambda h: pt.arange(1, h.shape[0] + 1, dtype="float32"),
    "of few bits": lambda h: pt.arange(h.size, dtype="uint8"),
}
KNOWN = {
    "from a half": lambda h: pt.arange(0.5, h.size, dtype="float64"),
    "of quarters": lambda h: pt.arange(0, h.size, 0.25),
    "of tenths": lambda h: pt.arange(-0.3, h.size / 7.0, 0.1, dtype="float32"),
    "downwards": lambda h: pt.arange(h.size, -1.5, -0.7),
}


class TestRanges:
    def test_of_lengths(self):
        x = pt.dvector("x")
        h = scan(lambda x, h: 0.5 * h + x, x, pt.constant(0.0))
        until = scan(lambda x, h: (0.5 * h + x, scanlib.until(h > 2)), x, pt.constant(0.0))
        outputs = [function(rows) for rows in (h, until) for function in RANGES.values()]
        outputs += [function(h) for function in KNOWN.values()]
        check([x], outputs, (np.arange(5.0),), (np.zeros(0),))

    def test_of_inputs(self):
        x, n = pt.dvector("x"), pt.lscalar("n")
        h = scan(lambda x, n: (pt.arange(n, dtype="float64") * x).sum(), x, None, n)
        check([x, n], [h, pt.arange(n + 0.5)], (np.arange(3.0), 4))

    def test_ragged(self):
        """Ranges whose lengths are data that cannot exceed something."""
        x, n = pt.dvector("x"), pt.lvector("n")

        def step(n, x):
            few = pt.clip(n, 0, 3)
            k = pt.minimum(n, x.shape[0])
            return [
                (pt.arange(few) ** 2).sum(),
                (x[:k] * pt.arange(k, dtype="float64")).sum(),
                pt.where(pt.arange(x.shape[0]) < n, x, 0.0).sum(),
            ]

        loops = scanlib.map(step, [n], [x], return_updates=False)
        cost = sum((loop**2).sum() for loop in loops)
        inputs = [x, n]
        check(inputs, [*loops, pytensor.grad(cost, x)], (np.arange(4.0), np.array([2, 0, 3, 1])))

    def test_without_a_bound(self):
        n = pt.lvector("n")
        f = compiled([n], scanlib.map(lambda n: pt.arange(n).sum(), [n], return_updates=False))
        with pytest.raises(UnknownLengthError, match="computes its size from data"):
            f([2, 3])
