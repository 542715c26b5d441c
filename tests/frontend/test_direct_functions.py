"""`linear_scan`, `pscan` and discounted sums against plain loops."""

from functools import partial

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pytensor.graph.replace import vectorize_graph

import scanlib
from tests.checks import assert_derivatives, evaluate
from tests.direct import LENGTHS, call, linear_loop, python_loops

DTYPES = ("float64", "float64", "float32", "int64", "int8", "complex128")


def numbers(rng, shape, dtype):
    """Draw numbers of order one; integers are small, so that they do not overflow at once."""
    if np.dtype(dtype).kind in "iu":
        return rng.integers(-2, 3, size=shape).astype(dtype)
    values = 0.9 * rng.normal(size=shape)
    if np.dtype(dtype).kind == "c":
        values = values + 0.3j * rng.normal(size=shape)
    return np.asarray(values, dtype=dtype)


def assert_close(actual, expected):
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    rtol = 1e-4 if actual.dtype == "float32" else 1e-10
    np.testing.assert_allclose(actual, expected, rtol=rtol, atol=rtol)


@st.composite
def diagonal_cases(draw):
    """Draw shapes of `a`, `b` and `init` that broadcast in every way that is allowed."""
    row = tuple(draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2)))
    length = draw(st.sampled_from(LENGTHS[:11]))
    axis = draw(st.integers(-len(row) - 1, len(row)))
    at = axis % (len(row) + 1)
    full = (*row[:at], length, *row[at:])

    def ones(shape):
        return tuple(1 if draw(st.integers(0, 3)) == 0 else size for size in shape)

    choices = [full, full, ones(full), row, ones(row), ()]
    a = draw(st.sampled_from(choices))
    b = draw(st.sampled_from([full, full, full, ones(full)]))
    if len(a) == len(full) and draw(st.integers(0, 4)) == 0:
        a, b = b, draw(st.sampled_from(choices))
    init = draw(st.sampled_from([None, None, row, ones(row), ()]))
    dtypes = [draw(st.sampled_from(DTYPES)) for _ in range(3)]
    seed, static, reverse = draw(st.integers(0, 99)), draw(st.booleans()), draw(st.booleans())
    rng = np.random.default_rng(seed)
    values = [
        numbers(rng, shape, dtype)
        for shape, dtype in zip((a, b, init), dtypes, strict=True)
        if shape is not None
    ]
    return values, {"axis": axis, "reverse": reverse}, static


class TestLinearScan:
    @given(diagonal_cases())
    def test_agrees_with_the_loop(self, case):
        values, options, static = case
        a, b, *init = values
        expected = linear_loop(a, b, *init, **options)
        with python_loops() as mode:
            actual = call(
                partial(scanlib.linear_scan, **options), *values, mode=mode, static=static
            )
        assert_close(actual, expected)

    @pytest.mark.parametrize("reverse", [False, True])
    def test_lengths(self, mode, reverse):
        a, b = pt.matrices("a", "b")
        init = pt.vector("init")
        h = scanlib.linear_scan(a, b, init, axis=1, reverse=reverse)
        f = pytensor.function([a, b, init], h, mode=mode)
        rng = np.random.default_rng(0)
        for length in LENGTHS:
            values = [numbers(rng, shape, "float64") for shape in ((3, length), (3, length), 3)]
            assert_close(f(*values), linear_loop(*values, axis=1, reverse=reverse))

    @pytest.mark.parametrize("dtype", ["float32", "int64", "complex128"])
    def test_dtypes(self, mode, dtype):
        rng = np.random.default_rng(1)
        a, b = (numbers(rng, (9, 2), dtype) for _ in range(2))
        assert_close(call(scanlib.linear_scan, a, b, mode=mode), linear_loop(a, b))

    def test_extreme_values(self, mode):
        """What composing steps could spoil: overflow between small values, and inf * 0."""
        a, b, init = pt.vector("a"), pt.vector("b"), pt.scalar("init")
        f = pytensor.function([a, b, init], scanlib.linear_scan(a, b, init), mode=mode)
        reset = np.full(20_000, 1.05)
        reset[[3_000, 17_001]] = 0.0
        jump = np.tile([1e200, 1e200, 1e-200, 1e-200], 25)
        spike = np.zeros(64)
        spike[5] = np.inf
        missing = np.zeros(64)
        missing[9] = np.nan
        cases = {
            "growth with resets": (reset, np.full(20_000, 1e-300), 0.0),
            "overflow of the coefficients alone": (jump, np.zeros(100), 1e-100),
            "decay through the subnormal numbers": (np.full(1_200, 0.5), np.zeros(1_200), 1.0),
            "growth to infinity": (np.full(1_100, 2.0), np.ones(1_100), 0.0),
            "infinity, then a reset": (np.where(np.arange(64) == 30, 0.0, 0.5), spike, 0.0),
            "NaN, then a reset": (np.where(np.arange(64) == 30, 0.0, 0.5), missing, 1.0),
            "an infinite coefficient of zero": (
                np.where(np.arange(64) == 9, np.inf, 1.0),
                np.zeros(64),
                0.0,
            ),
            "opposite infinities": (np.full(64, -1.0), spike, 0.0),
        }
        for name, values in cases.items():
            expected = linear_loop(*values)
            np.testing.assert_allclose(f(*values), expected, rtol=1e-9, atol=1e-320, err_msg=name)

    def test_what_has_a_time_axis(self, fast_mode):
        """As many dimensions as the result: a time axis. Fewer: the same at every step."""
        b = np.ones((2, 2))
        rates = np.array([0.0, 1.0])
        per_channel = call(scanlib.linear_scan, rates, b, mode=fast_mode)
        per_step = call(scanlib.linear_scan, rates[:, None], b, mode=fast_mode)
        per_row = call(partial(scanlib.linear_scan, axis=1), rates, b, mode=fast_mode)
        assert per_channel.tolist() == [[1, 1], [1, 2]]
        assert per_step.tolist() == [[1, 1], [2, 2]]
        assert per_row.tolist() == [[1, 1], [1, 2]]

    def test_constant_drive(self, fast_mode):
        powers = call(
            lambda a: scanlib.linear_scan(a, 0.0, init=1.0), [2.0, 3.0, 4.0], mode=fast_mode
        )
        assert powers.tolist() == [2.0, 6.0, 24.0]

    @pytest.mark.slow
    def test_derivatives(self, mode):
        rng = np.random.default_rng(2)
        a, b, init = pt.matrix("a"), pt.matrix("b"), pt.vector("init")
        inputs = {a: rng.normal(size=(2, 5)), b: rng.normal(size=(2, 5)), init: rng.normal(size=2)}
        h = scanlib.linear_scan(a, b, init, axis=1, reverse=True)
        assert_derivatives(
            pt.sin(h).sum(),
            inputs,
            lambda a, b, init: np.sin(linear_loop(a, b, init, 1, True)).sum(),
            mode,
        )

    @pytest.mark.all_forms
    @pytest.mark.parametrize("shape", [(), (3,), (1, 3), (5, 1)], ids=str)
    def test_derivatives_of_broadcast_coefficients(self, shape):
        rng = np.random.default_rng(3)
        values = [0.3 * rng.normal(size=shape), rng.normal(size=(5, 3)), rng.normal(size=())]
        a = pt.tensor("a", dtype="float64", shape=tuple(1 if n == 1 else None for n in shape))
        b, init = pt.matrix("b"), pt.scalar("init")
        h = scanlib.linear_scan(a, b, init)
        with python_loops() as mode:
            assert_derivatives(
                pt.sin(h).sum(),
                dict(zip((a, b, init), values, strict=True)),
                lambda a, b, init: np.sin(linear_loop(a, b, init)).sum(),
                mode,
            )

    def test_gradient_of_no_steps(self, mode):
        a, b, init = pt.matrix("a"), pt.matrix("b"), pt.vector("init")
        h = scanlib.linear_scan(a, b, init)
        gradient = pytensor.grad(h.sum() + (init**2).sum(), [a, b, init])
        empty = np.zeros((0, 2))
        results = evaluate(gradient, {a: empty, b: empty, init: [1.0, 2.0]}, mode)
        assert [r.shape for r in results] == [(0, 2), (0, 2), (2,)]
        assert results[2].tolist() == [2.0, 4.0]

    def test_static_shapes(self):
        b = pt.tensor("b", shape=(None, 4, 3))
        fixed = pt.tensor("b", shape=(7, 4, 3))
        init = pt.tensor("init", shape=(4, 3))
        assert scanlib.linear_scan(0.5, b).type.shape == (None, 4, 3)
        assert scanlib.linear_scan(0.5, fixed).type.shape == (7, 4, 3)
        assert scanlib.linear_scan(0.5, fixed, axis=-1, reverse=True).type.shape == (7, 4, 3)
        assert scanlib.linear_scan(pt.tensor3(), fixed).type.shape == (7, 4, 3)
        assert scanlib.linear_scan(pt.tensor3(), pt.tensor3(), init).type.shape == (None, 4, 3)
        assert scanlib.linear_scan(pt.tensor(shape=(7, 1, 1)), b).type.shape == (7, 4, 3)

    def test_python_numbers_take_the_precision_of_arrays(self):
        x = pt.fvector("x")
        assert scanlib.linear_scan(0.9, x).dtype == "float32"
        assert scanlib.linear_scan(2, x, init=1).dtype == "float32"
        assert scanlib.linear_scan(np.float64(0.9), x).dtype == "float64"
        assert scanlib.linear_scan(0.9, pt.lvector()).dtype == "float64"
        assert scanlib.linear_scan(2, pt.vector(dtype="int8")).dtype == "int8"
        assert scanlib.linear_scan(300, pt.vector(dtype="int8")).dtype != "int8"
        assert scanlib.linear_scan(1j, x).dtype == "complex64"

    def test_lists_and_variables_in_lists(self, fast_mode):
        x = pt.dscalar("x")
        h = scanlib.linear_scan([1, x, 2], [1.0, 2.0, 3.0])
        assert evaluate(h, {x: 3.0}, fast_mode).tolist() == [1.0, 5.0, 13.0]

    def test_batches(self, fast_mode):
        rng = np.random.default_rng(4)
        values = rng.normal(size=(3, 5)), rng.normal(size=(3, 5))
        a, b = pt.vectors("a", "b")
        many_a, many_b = pt.matrices("A", "B")
        h = vectorize_graph(scanlib.linear_scan(a, b), {a: many_a, b: many_b})
        result = evaluate(h, {many_a: values[0], many_b: values[1]}, fast_mode)
        assert_close(result, linear_loop(*values, axis=1))


class TestPscan:
    @pytest.mark.parametrize("shape", [(2, 7, 3, 2), (5, 3, 2), (2, 1, 0, 3, 2), (1, 2, 9, 1, 2)])
    def test_agrees_with_the_loop(self, mode, shape):
        rng = np.random.default_rng(5)
        A, X = rng.normal(size=(2, *shape))
        expected = linear_loop(A, X, axis=-3)
        assert_close(call(scanlib.pscan, A, X, mode=mode), expected)

    def test_the_first_coefficient_multiplies_zero(self, fast_mode):
        A, X = np.random.default_rng(6).normal(size=(2, 4, 3, 2))
        other = A.copy()
        other[0] = 100.0
        first, second = (call(scanlib.pscan, value, X, mode=fast_mode) for value in (A, other))
        np.testing.assert_array_equal(first, second)
        np.testing.assert_array_equal(first[0], X[0])

    @pytest.mark.slow
    def test_derivatives(self, mode):
        A, X = pt.tensor4("A"), pt.tensor4("X")
        a, x = np.random.default_rng(7).normal(size=(2, 2, 4, 1, 2))
        assert_derivatives(
            pt.sin(scanlib.pscan(A, X)).sum(),
            {A: a, X: x},
            lambda A, X: np.sin(linear_loop(A, X, axis=1)).sum(),
            mode,
        )


class TestDiscountedCumsum:
    @pytest.mark.slow
    @given(
        shape=st.sampled_from([(5,), (0,), (2, 7), (3, 3), (2, 3, 4), (2, 1, 9)]),
        per=st.sampled_from(["number", "row", "element"]),
        axis=st.integers(-3, 2),
        reverse=st.booleans(),
        with_init=st.booleans(),
    )
    def test_agrees_with_the_loop(self, shape, per, axis, reverse, with_init):
        axis = axis % len(shape)
        rng = np.random.default_rng(8)
        row = shape[:axis] + shape[axis + 1 :]
        x = rng.normal(size=shape)
        gamma = rng.uniform(size={"number": (), "row": row, "element": shape}[per])
        init = [rng.normal(size=row)] if with_init else []
        whole = gamma if per == "element" else np.expand_dims(np.broadcast_to(gamma, row), axis)
        whole = np.broadcast_to(whole, shape)
        expected = linear_loop(whole, x, *init, axis=axis, reverse=reverse)

        def build(x, gamma, init=None):
            return scanlib.discounted_cumsum(x, gamma, axis, reverse, init)

        with python_loops() as mode:
            assert_close(call(build, x, gamma, *init, mode=mode), expected)

    @pytest.mark.slow
    def test_left_and_right(self, mode):
        x = np.arange(8.0).reshape(2, 4)
        gamma = np.array([0.5, 2.0])
        left = call(scanlib.discounted_cumsum, x, gamma, mode=mode)
        right = call(partial(scanlib.discounted_cumsum, reverse=True), x, gamma, mode=mode)
        assert left.tolist() == [[0, 1, 2.5, 4.25], [4, 13, 32, 71]]
        assert right.tolist() == [[1.375, 2.75, 3.5, 3], [94, 45, 20, 7]]

    def test_of_ones(self, fast_mode):
        right = call(
            lambda x: scanlib.discounted_cumsum(x, 0.99, reverse=True),
            np.ones((1, 8)),
            mode=fast_mode,
        )
        expected = [[7.7255, 6.7935, 5.8520, 4.9010, 3.9404, 2.9701, 1.9900, 1.0000]]
        np.testing.assert_allclose(right, expected, atol=5e-5)

    @pytest.mark.slow
    def test_derivatives(self, mode):
        rng = np.random.default_rng(9)
        x, gamma, init = pt.matrix("x"), pt.vector("gamma"), pt.vector("init")
        y = scanlib.discounted_cumsum(x, gamma, reverse=True, init=init)
        assert_derivatives(
            pt.sin(y).sum(),
            {x: rng.normal(size=(2, 5)), gamma: rng.uniform(size=2), init: rng.normal(size=2)},
            lambda x, gamma, init: np.sin(linear_loop(gamma, x, init, 1, True)).sum(),
            mode,
        )


class TestSinglePrecision:
    """The errors of discounted sums of 10,000 float32 numbers with gamma = 0.99.

    The reference is the sum in float64 with the same discount, 0.99 rounded to float32.
    """

    def errors(self, mode):
        x = pt.fmatrix("x")
        f = pytensor.function([x], scanlib.discounted_cumsum(x, 0.99, reverse=True), mode=mode)
        gamma = float(np.float32(0.99))
        noise = np.random.default_rng(10).normal(size=(1, 10_000)).astype("float32")
        result = []
        for values in (np.ones((1, 10_000), dtype="float32"), noise):
            exact = linear_loop(gamma, values.astype("float64"), axis=1, reverse=True)
            result.append(np.abs(f(values) - exact).max())
        return result

    def test_no_worse_than_rounding_every_step(self, mode):
        """Half a unit in the last place of 100, or of 32, at every step, discounted."""
        ones, noise = self.errors(mode)
        assert ones <= 100 * 2.0**-18
        assert noise <= 100 * 2.0**-20

    def test_blocks_of_one_series_are_better(self):
        """One series is summed in groups of steps, with a state in double precision between."""
        rng = np.random.default_rng(0)
        gamma = np.float32(0.99)
        x = pt.fvector("x")
        function = pytensor.function([x], scanlib.discounted_cumsum(x, gamma), mode="NUMBA")
        noise = rng.standard_normal(10_000).astype("float32")
        for values, bound in ((np.ones(10_000, "float32"), 2.7e-5), (noise, 5.0e-6)):
            exact, total = np.empty(len(values)), 0.0
            for t, value in enumerate(values):
                total = float(gamma) * total + float(value)
                exact[t] = total
            assert np.abs(function(values) - exact).max() <= bound
