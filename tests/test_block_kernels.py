"""Kernels that scan one block of steps, called by themselves, against NumPy and plain loops."""

import numba
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.numba.elemwise import bounds, lanes, steps, sums, vectors
from tests.modes import MODES

LENGTHS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 100, 1024)
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])


def numbers(dtype, n):
    """Numbers of a dtype, some of them equal."""
    rng = np.random.default_rng(n)
    if dtype == "bool":
        return rng.integers(0, 2, n).astype(dtype)
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(n).round(1).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True)


def run_from(kernel, reverse, *rest):
    """Return a function of elements and a state that returns the new values and their trust.

    `rest` are arguments of the kernel that follow the others.
    """

    @numba.njit
    def call(elements, h, start, n):
        return kernel(*elements, h, start, n, *rest)

    def run(elements, state):
        n = elements[0].size
        h = np.zeros(n + 1, elements[0].dtype)
        h[n if reverse else 0] = state
        trusted = call(elements, h, 0 if reverse else 1, n)
        return (h[:n] if reverse else h[1:]), bool(trusted)

    return run


class TestExtremes:
    @pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint16", "int8", "bool"])
    @pytest.mark.parametrize("name", ["maximum", "minimum"])
    def test_against_numpy(self, name, dtype):
        reverse = name == "minimum"  # a compilation for each: every name and direction once
        run, extreme = run_from(steps.KERNELS[name, reverse], reverse, ()), getattr(np, name)
        for n in LENGTHS:
            b = numbers(dtype, n)
            for state in (b[n // 2], b.min(), b.max()):
                values, trusted = run((b,), state)
                in_order = extreme.accumulate(b[::-1] if reverse else b)
                expected = extreme(in_order, state)[:: -1 if reverse else 1]
                assert trusted
                np.testing.assert_array_equal(values, expected)

    @DIRECTIONS
    def test_infinities_count_and_nan_does_not(self, reverse):
        run = run_from(steps.KERNELS["maximum", reverse], reverse, ())
        b = numbers("float64", 40)
        b[[3, 30]] = -np.inf
        values, trusted = run((b,), -np.inf)
        in_order = np.maximum.accumulate(b[::-1] if reverse else b)
        assert trusted
        np.testing.assert_array_equal(values, in_order[:: -1 if reverse else 1])
        for place in (0, 17, 39):
            assert not run((np.where(np.arange(40) == place, np.nan, b),), 0.0)[1]
        assert not run((b,), np.nan)[1]


class TestAffine:
    @DIRECTIONS
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_against_a_plain_loop(self, dtype, reverse):
        run = run_from(steps.KERNELS["affine", reverse], reverse, ())
        for n in LENGTHS:
            rng = np.random.default_rng(n)
            a, b = rng.uniform(-1.1, 1.1, n).astype(dtype), rng.standard_normal(n).astype(dtype)
            a[n // 2] = 0
            values, trusted = run((a, b), 2.0)
            state, size, expected, sizes = 2.0, 2.0, np.empty(n), np.empty(n)
            for t in reversed(range(n)) if reverse else range(n):
                state = float(a[t]) * state + float(b[t])
                size = abs(float(a[t])) * size + abs(float(b[t]))
                expected[t], sizes[t] = state, size
            assert trusted
            assert np.all(np.abs(values - expected) <= 20 * np.finfo(dtype).eps * sizes)

    @DIRECTIONS
    def test_the_same_bits_at_every_run(self, reverse):
        run = run_from(steps.KERNELS["affine", reverse], reverse, ())
        a, b = np.random.default_rng(0).standard_normal((2, 100))
        assert run((a, b), 1.0)[0].tobytes() == run((a, b), 1.0)[0].tobytes()

    @DIRECTIONS
    def test_what_is_not_trusted(self, reverse):
        run = run_from(steps.KERNELS["affine", reverse], reverse, ())
        pairs = ((1e200, 0), (1e-200, 0), (np.nan, 0), (1, np.inf), (1, np.nan), (1, 1e300))
        for place in (0, 16, 20, 39):
            for factor, term in pairs:
                a, b = np.ones(40), np.zeros(40)
                assert run((a, b), 1.0)[1]
                a[place], b[place] = factor, term
                assert not run((a, b), 1.0)[1], (place, factor, term)


def walked(a, b, state, reverse, sum_first):
    """Return the values of all steps, one after the other, and bounds of their rounding errors."""
    n = b.size
    values, sizes = np.empty(n), np.empty(n)
    size = abs(state)
    for t in reversed(range(n)) if reverse else range(n):
        if sum_first:
            values[t], sizes[t] = state + b[t], size + abs(b[t])
            state, size = a[t] * values[t], abs(a[t]) * sizes[t]
        else:
            state, size = a[t] * state + b[t], abs(a[t]) * size + abs(b[t])
            values[t], sizes[t] = state, size
    return values, 50 * np.finfo("float64").eps * sizes


class TestRegisters:
    """All kernels, compiled as for machines with long and with short vector registers."""

    @pytest.fixture(params=[False, True], ids=["short", "long"])
    def registers(self, request, monkeypatch):
        for module in (lanes, vectors):
            monkeypatch.setattr(module, "has_wide_registers", lambda context: request.param)

    def check(self, run, reverse, fixed=False, product=False, sum_first=False):
        """Compare with one step after the other, and look for numbers that are not trusted."""
        for n in (1, 3, 4, 5, 8, 15, 16, 17, 33, 100):
            rng = np.random.default_rng(n)
            a, b = rng.uniform(-1.1, 1.1, n), rng.standard_normal(n)
            a[n // 2] = 0.0
            if fixed:
                a[:] = 0.9
            if product:
                b[:] = 0.0
            values, trusted = run(a, b, 2.0)
            expected, errors = walked(a, b, 2.0, reverse, sum_first)
            assert trusted
            assert np.all(np.abs(values - expected) <= errors)
            for place in {0, n // 3, n - 1}:
                for bad in (np.nan, np.inf, 1e300):
                    other = np.where(np.arange(n) == place, bad, a)
                    assert fixed or not run(other, b, 2.0)[1]
                    other = np.where(np.arange(n) == place, bad, b)
                    assert product or not run(a, other, 2.0)[1]
            assert not run(a, b, np.inf)[1]

    @DIRECTIONS
    def test_affine(self, registers, reverse):
        run = run_from(steps._affine(reverse, fixed=False), reverse, ())
        self.check(lambda a, b, state: run((a, b), state), reverse)

    @DIRECTIONS
    def test_product(self, registers, reverse):
        run = run_from(steps._product(reverse), reverse, ())
        self.check(lambda a, b, state: run((a,), state), reverse, product=True)

    @DIRECTIONS
    def test_one_coefficient(self, registers, reverse):
        kernel = steps._affine(reverse, fixed=True)

        @numba.njit
        def call(a, b, h, start, n):
            return kernel(a, b, h, start, n, ())

        def run(a, b, state):
            h = np.zeros(b.size + 1)
            h[-1 if reverse else 0] = state
            trusted = call(a[0], b, h, 0 if reverse else 1, b.size)
            return (h[:-1] if reverse else h[1:]), trusted

        self.check(run, reverse, fixed=True)

    @DIRECTIONS
    @pytest.mark.parametrize("fixed", [False, True])
    def test_sums_first(self, registers, reverse, fixed):
        kernel = sums._sums_first(reverse, fixed)

        @numba.njit
        def call(a, b, s, n, state):
            return kernel(a, b, s, n, state, ())

        def run(a, b, state):
            s = np.zeros(b.size)
            after, trusted = call(a[0] if fixed else a, b, s, b.size, state)
            if trusted:
                last = 0 if reverse else -1
                np.testing.assert_allclose(after, a[last] * s[last], rtol=1e-9, atol=1e-9)
            return s, trusted

        self.check(run, reverse, fixed, sum_first=True)


@numba.njit
def answers(a):
    n = a.size
    return (
        steps.some_extreme(a, n),
        steps.all_moderate(a, 0, n),
        steps.some_nan(a, n),
        steps.some_large(a, n),
    )


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_ranges_are_tested_as_comparisons_would(dtype):
    width = np.dtype(dtype).itemsize * 8
    low, high = bounds.LOWEST[width], bounds.HIGHEST[width]
    moderate, large = bounds.MODERATE[width], steps._LARGE[width]
    infinity = dtype(np.inf)
    ends = [dtype(value) for value in (low, high, moderate, large)]
    ends += [np.nextafter(end, dtype(0)) for end in ends] + [
        np.nextafter(e, infinity) for e in ends
    ]
    info = np.finfo(dtype)
    ends += [dtype(0), info.smallest_subnormal, info.tiny, info.max, infinity, dtype(np.nan)]
    for end in ends:
        for value in (end, -end):
            for n in (1, 3, 70):
                a = np.ones(n, dtype)
                a[n // 2] = value
                size = np.abs(a)
                expected = (
                    bool(np.any((size != 0) & ~((size >= low) & (size <= high)))),
                    bool(np.all(size <= moderate)),
                    bool(np.any(np.isnan(a))),
                    not np.all(size <= large),
                )
                assert answers(a) == expected, (value, n)


def test_rows_that_lie_apart_or_backwards():
    """Sequences that are slices of others reach the kernels as they are, or block by block."""
    x, y = pt.dvector("x"), pt.dmatrix("y")
    trace = scanlib.scan(
        lambda a, b, c, h: a * h + b * c,
        sequences=[x[::-1], y[::3, 1], y[::3][:, 0]],
        outputs_info=[np.float64(1.0)],
        return_updates=False,
    )
    function = pytensor.function([x, y], trace, mode=MODES["numba"])
    rng = np.random.default_rng(0)
    for n in (1, 2, 1024, 2500):
        x_value, y_value = rng.uniform(-1, 1, n), rng.standard_normal((3 * n, 2))
        before = x_value.copy(), y_value.copy()
        state, expected = 1.0, []
        for t in range(n):
            state = x_value[n - 1 - t] * state + y_value[3 * t, 1] * y_value[3 * t, 0]
            expected.append(state)
        np.testing.assert_allclose(function(x_value, y_value), expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(before[0], x_value)
        np.testing.assert_array_equal(before[1], y_value)


@pytest.mark.parametrize("width", [None, 3], ids=["one channel", "channels"])
def test_histories_of_loops_with_until_grow(width):
    start = pt.tensor("start", dtype="float64", shape=() if width is None else (width,))
    limit, n_steps = pt.dscalar("limit"), pt.lscalar("n_steps")
    first = start if width is None else start[0]
    trace = scanlib.scan(
        lambda count, h, limit: (
            [count + 1, pt.sqrt(h * h + 1.0)],
            scanlib.until(count + 1 >= limit),
        ),
        outputs_info=[first * 0, start],
        non_sequences=[limit],
        n_steps=n_steps,
        return_updates=False,
    )[1]
    function = pytensor.function([start, limit, n_steps], trace, mode=MODES["numba"])
    value = np.array(2.0) if width is None else np.array([2.0, -1.0, 0.5])
    for stop in (1, 63, 64, 65, 128, 129, 300, 1000):
        for most in (1, 64, 100, 300):
            steps_run = min(stop, most)
            state, expected = value, []
            for _ in range(steps_run):
                state = np.sqrt(state * state + 1.0)
                expected.append(state)
            np.testing.assert_allclose(function(value, stop, most), expected, rtol=1e-13)
