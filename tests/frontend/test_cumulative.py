"""Running extremes and running logarithms of sums against NumPy's `accumulate`."""

from functools import partial

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import scanlib
from scanlib.ops.logaddexp import logaddexp
from tests.checks import assert_derivatives, evaluate
from tests.direct import LENGTHS, call, python_loops, running

FUNCTIONS = {
    "cummax": (scanlib.cummax, np.maximum),
    "cummin": (scanlib.cummin, np.minimum),
    "cumlogsumexp": (scanlib.cumlogsumexp, np.logaddexp),
}
EXTREMES = {"cummax": FUNCTIONS["cummax"], "cummin": FUNCTIONS["cummin"]}
DTYPES = ("float64", "float32", "int64", "int8", "uint8", "bool")
INF, NAN, TINY = np.inf, np.nan, 5e-324


def assert_close(actual, expected, name=""):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    rtol = 1e-5 if actual.dtype == "float32" else 1e-12
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol, err_msg=name)


@st.composite
def cases(draw, dtypes):
    """Draw an array with any values of its dtype, an axis and a direction."""
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17]), min_size=1, max_size=3))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    x = draw(arrays(dtype, tuple(shape)))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    return x, {"axis": axis, "reverse": draw(st.booleans())}, draw(st.booleans())


class TestExtremes:
    @pytest.mark.parametrize("name", EXTREMES)
    @given(case=cases(DTYPES))
    def test_agrees_with_numpy(self, name, case):
        function, ufunc = EXTREMES[name]
        x, options, static = case
        with python_loops() as mode:
            actual = call(partial(function, **options), x, mode=mode, static=static)
        expected = running(ufunc, x, **options)
        assert actual.dtype == x.dtype
        np.testing.assert_array_equal(actual, expected)

    @pytest.mark.parametrize("dtype", ["float64", "int8", "uint8", "bool"])
    def test_dtypes(self, mode, dtype):
        x = np.random.default_rng(0).normal(scale=40, size=(3, 33)).astype(dtype)
        x[0, :5] = np.iinfo(dtype).min if np.dtype(dtype).kind in "iu" else 0
        for name, (function, ufunc) in EXTREMES.items():
            actual = call(partial(function, axis=1), x, mode=mode)
            np.testing.assert_array_equal(actual, running(ufunc, x, 1), err_msg=name)
            assert actual.dtype == dtype

    @pytest.mark.slow
    def test_derivatives(self, mode):
        x = pt.matrix("x")
        value = np.random.default_rng(1).normal(size=(2, 7))
        y, z = scanlib.cummax(x, axis=1), scanlib.cummin(x, axis=-1, reverse=True)
        assert_derivatives(
            pt.sin(y * z).sum(),
            {x: value},
            lambda x: np.sin(running(np.maximum, x, 1) * running(np.minimum, x, 1, True)).sum(),
            mode,
        )

    def test_where_the_derivative_goes(self, fast_mode):
        """To the row that holds the extreme, to the last of several, and to one of -inf too."""
        x = pt.vector("x")
        gradient = pytensor.grad(scanlib.cummax(x).sum(), x)
        f = pytensor.function([x], gradient, mode=fast_mode)
        assert f([1.0, 3.0, 2.0, 5.0]).tolist() == [1, 2, 0, 1]
        assert f([2.0, 2.0, 1.0]).tolist() == [1, 2, 0]
        assert f([-INF, -INF, 1.0]).tolist() == [1, 1, 1]


class TestLogSumExp:
    @given(case=cases(("float64", "float32")))
    def test_agrees_with_numpy(self, case):
        x, options, static = case
        with python_loops() as mode:
            actual = call(partial(scanlib.cumlogsumexp, **options), x, mode=mode, static=static)
        assert_close(actual, running(np.logaddexp, x, **options))

    def test_integers_become_floats(self, fast_mode):
        x = np.array([[1, 2, 3], [-100, 100, 0]], dtype="int8")
        actual = call(partial(scanlib.cumlogsumexp, axis=1), x, mode=fast_mode)
        assert_close(actual, running(np.logaddexp, x.astype("float64"), 1))

    @pytest.mark.slow
    def test_derivatives(self, mode):
        x = pt.matrix("x")
        value = np.random.default_rng(2).normal(size=(2, 6))
        value[1, 2] = value[1, 3]
        y = scanlib.cumlogsumexp(x, axis=1, reverse=True)
        assert_derivatives(
            pt.sin(y).sum(),
            {x: value},
            lambda x: np.sin(running(np.logaddexp, x, 1, True)).sum(),
            mode,
        )

    @pytest.mark.slow
    def test_derivatives_at_infinity_are_finite(self, mode):
        x = pt.vector("x")
        y = scanlib.cumlogsumexp(x)
        gradient = pytensor.grad((y * pt.arange(1, 6)).sum(), x)
        curvature = pytensor.grad((gradient * pt.cos(pt.arange(5))).sum(), x)
        f = pytensor.function([x], [gradient, curvature], mode=mode)
        for values in ([-INF, -INF, 0.0, 0.0, -INF], [1.0, INF, INF, -INF, 2.0], [-INF] * 5):
            first, second = f(values)
            assert np.isfinite(first).all()
            assert np.isfinite(second).all()
            # Every sum shares its derivative among its rows.
            np.testing.assert_allclose(first[1:].sum() + first[0], first.sum())
        first, _ = f([-INF, -INF, 0.0, 0.0, -INF])
        np.testing.assert_allclose(first[3:], [4.5, 0.0])


class TestLogAddExp:
    """The scalar operation in the body of `cumlogsumexp`."""

    PAIRS = np.array(
        [
            (0, 0), (1, 2), (-1e300, 1e300), (1e5, 1e5 + 1e-7), (-745, 0), (0, TINY),
            (-INF, 1), (1, -INF), (-INF, -INF), (INF, -INF), (INF, INF), (INF, 1),
            (NAN, 1), (1, NAN), (NAN, -INF), (INF, NAN), (1000, 999),
        ]
    )  # fmt: skip

    def test_values(self, mode):
        x, y = self.PAIRS.T
        with np.errstate(invalid="ignore"):
            expected = np.logaddexp(x, y)
        assert_close(call(logaddexp, x, y, mode=mode), expected)
        single = call(logaddexp, x[1:2].astype("float32"), y[1:2].astype("float32"), mode=mode)
        assert_close(single, expected[1:2].astype("float32"))

    def test_derivatives_keep_their_digits(self, mode):
        """The shares of two large numbers depend on their difference alone."""
        x, y = pt.vectors("x", "y")
        gradient = pytensor.grad(logaddexp(x, y).sum(), [x, y])
        large, small = evaluate(gradient, {x: [1e8, 1.0, -1e8], y: [1e8 - 1, 0.0, -1e8 - 1]}, mode)
        np.testing.assert_allclose(large, 1 / (1 + np.exp(-1.0)), rtol=1e-14)
        np.testing.assert_allclose(small, 1 / (1 + np.exp(1.0)), rtol=1e-14)


class TestAll:
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_lengths_and_special_values(self, mode, name):
        function, ufunc = FUNCTIONS[name]
        x = pt.matrix("x")
        f = pytensor.function([x], [function(x), function(x, axis=1, reverse=True)], mode=mode)
        rng = np.random.default_rng(3)
        special = [0.0, -0.0, TINY, -TINY, 1e300, -1e300, INF, -INF, NAN]
        for length in LENGTHS:
            value = rng.normal(size=(length, 2))
            down, across = f(value)
            assert_close(down, running(ufunc, value), f"{length} steps")
            assert_close(across, running(ufunc, value, 1, True), f"{length} rows")
        for k, number in enumerate(special):
            value = rng.normal(size=(40, 2))
            value[k : k + 9, 0] = number
            value[0, 1] = number
            down, across = f(value)
            assert_close(down, running(ufunc, value), f"{number}")
            assert_close(across, running(ufunc, value, 1, True), f"{number}")

    @pytest.mark.all_forms
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_static_shapes(self, name):
        function, _ = FUNCTIONS[name]
        for shape in [(7,), (None, 3), (2, 5, None), (0, 1)]:
            for axis in range(-len(shape), len(shape)):
                x = pt.tensor("x", shape=shape)
                assert function(x, axis=axis).type.shape == shape
                assert function(x, axis=axis, reverse=True).type.shape == shape
