"""Gradients of recurrences under the C linker: sums that come first, in registers of two widths."""

from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import product
from unittest import mock

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scanlib
from scanlib._compat import thaw_graph
from scanlib.ops.lowered.sums_first import sums_first
from scanlib.recurrences import block_scans, logaffine, trust
from scanlib.schedules import blocks
from scanlib.schedules.selection import BLOCK
from tests.c_loops import compiled, trace, uniform
from tests.checks import assert_derivatives
from tests.modes import MODES
from tests.recurrences.test_extreme_values import COEFFICIENTS, TINY, VALUES, assert_same_kind

LENGTHS = (0, 1, 2, 7, 8, 9, 17, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1)


@contextmanager
def registers(width):
    """Compile for registers of so many bytes."""
    with ExitStack() as stack:
        for module in (blocks, block_scans, logaffine, trust):
            stack.enter_context(mock.patch.object(module, "register_bytes", return_value=width))
        yield


@cache
def affine(dtype, width=64, fixed=False):
    """The loop ``h = a h + b`` and its derivatives by all inputs, as a function of a cotangent."""
    a = pt.scalar("a", dtype=dtype) if fixed else pt.vector("a", dtype=dtype)
    b, seed = (pt.vector(name, dtype=dtype) for name in ("b", "seed"))
    start = pt.scalar("start", dtype=dtype)
    h = (
        trace(lambda b, h, a: a * h + b, sequences=b, outputs_info=start, non_sequences=a)
        if fixed
        else trace(lambda a, b, h: a * h + b, sequences=[a, b], outputs_info=start)
    )
    gradients = pytensor.grad(None, [a, b, start], known_grads={h: seed})
    with registers(width):
        call = compiled([a, b, start, seed], [h, *gradients])
    backward = [op for op in call.ops if op.signature.reverse]
    assert sums_first(backward[0], thaw_graph(backward[0].body))
    return call


def plain_affine(a, b, start, seed):
    """The same in double precision, step by step, and the sizes of what is added up."""
    a, b, seed = (np.asarray(x, "float64") for x in (a, b, seed))
    n, per_step = len(b), a.ndim > 0
    a = np.broadcast_to(a, n)
    history, sizes = np.empty(n + 1), np.empty(n + 1)
    history[0], sizes[0] = start, abs(start)
    for t in range(n):
        history[t + 1] = a[t] * history[t] + b[t]
        sizes[t + 1] = abs(a[t]) * sizes[t] + abs(b[t])
    sums, sums_size, owed, size = np.empty(n), np.empty(n), 0.0, 0.0
    for t in reversed(range(n)):
        sums[t], sums_size[t] = owed + seed[t], size + abs(seed[t])
        owed, size = a[t] * sums[t], abs(a[t]) * sums_size[t]
    by_a, by_a_size = sums * history[:-1], sums_size * sizes[:-1]
    if not per_step:
        by_a, by_a_size = by_a.sum(), by_a_size.sum()
    values = [history[1:], by_a, sums, np.float64(owed)]
    return list(zip(values, [sizes[1:], by_a_size, sums_size, np.float64(size)], strict=True))


def assert_within(actual, expected, dtype):
    """Compare with the plain loop: rounding errors are relative to what is added up."""
    for value, (wanted, size) in zip(actual, expected, strict=True):
        assert value.dtype == dtype
        assert value.shape == np.shape(wanted)
        assert np.all(np.abs(value - wanted) <= 40 * np.finfo(dtype).eps * size)


class TestAffine:
    @pytest.mark.parametrize(
        "dtype, width, fixed",
        [
            *product(["float64", "float32"], [64], [False, True]),
            *product(["float64"], [32], [False]),
            *product(["float32"], [32], [True]),
        ],
    )
    def test_against_a_plain_loop(self, dtype, width, fixed):
        call = affine(dtype, width, fixed)
        for n in LENGTHS:
            a, b, seed = (uniform(n, seed=k, dtype=dtype) for k in range(3))
            a[n // 2 :: 100] = 0
            first = np.asarray(0.97 if fixed else a, dtype)
            values = first, b, np.asarray(0.5, dtype), seed
            actual = call(*values)
            assert_within(actual, plain_affine(*values), dtype)
            for one, other in zip(actual, call(*values), strict=True):
                assert one.tobytes() == other.tobytes()

    @settings(max_examples=60)
    @given(
        n=st.integers(0, 2 * BLOCK + 40),
        seed=st.integers(0, 2**32 - 1),
        stride=st.sampled_from([1, 2, -1]),
        dtype=st.sampled_from(["float64", "float32"]),
    )
    def test_any_length_and_stride(self, n, seed, stride, dtype):
        rng = np.random.default_rng(seed)
        wide = [rng.uniform(-1, 1, 2 * n).astype(dtype) for _ in range(3)]
        a, b, cotangent = (x[::2] if stride == 2 else x[:n][::stride] for x in wide)
        values = a, b, np.asarray(rng.uniform(), dtype), cotangent
        assert_within(affine(dtype)(*values), plain_affine(*values), dtype)

    @pytest.mark.slow
    def test_second_order(self):
        a, b, start = pt.dvector("a"), pt.dvector("b"), pt.dscalar("start")
        h = trace(lambda a, b, h: a * h + b, sequences=[a, b], outputs_info=start)
        weights = np.random.default_rng(3).standard_normal(21)

        def reference(a, b, start):
            values, h = [], start
            for x, y in zip(a, b, strict=True):
                h = x * h + y
                values.append(h)
            return np.sum(weights * np.array(values) ** 2)

        inputs = {a: uniform(21), b: uniform(21, seed=1), start: np.float64(0.7)}
        assert_derivatives((weights * h**2).sum(), inputs, reference, MODES["c"])

    @pytest.mark.slow
    def test_complex_numbers(self):
        a, g = pt.zvector("a"), pt.zvector("g")
        h, s = scanlib.scan(
            lambda a, g, h: [a * (h + g), h + g], [a, g], [1j, None], return_updates=False
        )
        call = compiled([a, g], [h[-1], s])
        for n in (1, 9, BLOCK, BLOCK + 1):
            av, gv = (uniform(n, seed=k) + 1j * uniform(n, seed=k + 5) for k in range(2))
            state, expected = 1j, np.empty(n, complex)
            for t in range(n):
                expected[t] = state + gv[t]
                state = av[t] * expected[t]
            for actual, wanted in zip(call(av, gv), (state, expected), strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=1e-11, atol=1e-11)


@cache
def sums(dtype, width):
    """The loop ``h = a (h + g)``: its sums, and the state after the last step."""
    a, g, start = pt.vector("a", dtype=dtype), pt.vector("g", dtype=dtype), pt.scalar(dtype=dtype)
    h, s = scanlib.scan(
        lambda a, g, h: [a * (h + g), h + g], [a, g], [start, None], return_updates=False
    )
    with registers(width):
        call = compiled([a, g, start], [h[-1], s])
    assert sums_first(call.ops[0], thaw_graph(call.ops[0].body))
    return call


class TestExtremeValues:
    """NaN and infinity are exactly where the plain loop has them."""

    @pytest.mark.slow
    @pytest.mark.parametrize("width", [64, 32])
    @settings(max_examples=60)
    @given(
        n=st.sampled_from([1, 2, 8, 9, 16, 33, BLOCK + 24]),
        start=st.sampled_from([0.0, 1.0, *VALUES]),
        share=st.sampled_from([0.01, 0.1, 0.6]),
        dtype=st.sampled_from(["float64", "float32"]),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_sums_first(self, width, n, start, share, dtype, seed):
        rng = np.random.default_rng(seed)
        a, g = rng.uniform(-1.1, 1.1, n), rng.uniform(-1, 1, n)
        for array, pool in ((a, COEFFICIENTS), (g, VALUES)):
            where = rng.random(n) < share
            array[where] = rng.choice(pool, where.sum())
        with np.errstate(all="ignore"):
            a, g, start = (np.asarray(x).astype(dtype) for x in (a, g, start))
            expected, allowed = np.empty(n, dtype), np.empty(n)
            h, size, floor = start[()], abs(np.float64(start)), 0.0
            for t in range(n):
                expected[t] = h + g[t]
                size, floor = size + abs(np.float64(g[t])), floor + 3 * TINY[dtype]
                allowed[t] = 100 * np.finfo(dtype).eps * size + floor
                h = a[t] * expected[t]
                size, floor = abs(np.float64(a[t])) * size, abs(np.float64(a[t])) * floor
        assert_same_kind(sums(dtype, width)(a, g, start)[1], expected, allowed)


@cache
def extreme(name, dtype, width=64):
    """A running maximum or minimum and its derivative by the numbers."""
    x, start, seed = pt.vector("x", dtype=dtype), pt.scalar(dtype=dtype), pt.vector(dtype=dtype)
    pick = {"maximum": pt.maximum, "minimum": pt.minimum}[name]
    h = trace(lambda x, h: pick(h, x), sequences=x, outputs_info=start)
    inputs = [x, start, seed]
    if not dtype.startswith("float"):
        with registers(width):
            return compiled([x, start], h)
    gradients = pytensor.grad(None, [x, start], known_grads={h: seed})
    with registers(width):
        return compiled(inputs, [h, *gradients])


class TestExtremes:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "name, dtype, width",
        [
            ("maximum", "float64", 64),
            ("minimum", "float32", 64),
            ("minimum", "float64", 32),
            ("maximum", "float32", 32),
        ],
    )
    def test_against_a_plain_loop(self, name, dtype, width):
        """The cotangents of a run belong to the number that began it, exactly where it did."""
        call, pick = extreme(name, dtype, width), getattr(np, name)
        for n in LENGTHS:
            rng = np.random.default_rng(n)
            x, seed = rng.permutation(n + 1)[:n].astype(dtype), rng.integers(-9, 9, n).astype(dtype)
            start = np.asarray(n / 3 + 0.5, dtype)
            history = pick.accumulate(np.concatenate([start[None], x]))
            owed, by_x = 0.0, np.empty(n, dtype)
            for t in reversed(range(n)):
                owed += seed[t]
                new = history[t + 1] != history[t]
                by_x[t], owed = (owed, 0.0) if new else (0.0, owed)
            for actual, expected in zip(
                call(x, start, seed), (history[1:], by_x, owed), strict=True
            ):
                assert actual.dtype == dtype
                np.testing.assert_array_equal(actual, expected)

    @pytest.mark.parametrize("dtype", ["int64", "uint16", "int8", "bool"])
    def test_integers(self, dtype):
        call = extreme("maximum", dtype)
        for n in LENGTHS:
            x = np.random.default_rng(n).integers(0, 2 if dtype == "bool" else 99, n).astype(dtype)
            (actual,) = call(x, np.zeros((), dtype))
            np.testing.assert_array_equal(actual, np.maximum.accumulate(x))

    @pytest.mark.parametrize("width", [64, 32])
    def test_nan_and_infinity(self, width):
        call = extreme("maximum", "float64", width)
        for place in (0, 7, 8, 300, BLOCK - 1, BLOCK, 600):
            for value in (np.nan, np.inf, -np.inf):
                x = uniform(700)
                x[place] = value
                history = call(x, np.float64(-1.0), np.ones(700))[0]
                expected = np.maximum(np.maximum.accumulate(x), -1.0)
                np.testing.assert_array_equal(history, expected)


class TestProducts:
    @pytest.mark.parametrize("dtype, width", [("float64", 64), ("float32", 32)])
    def test_against_a_plain_loop(self, dtype, width):
        x, seed = pt.vector("x", dtype=dtype), pt.vector("seed", dtype=dtype)
        h = trace(lambda x, h: x * h, sequences=x, outputs_info=np.ones((), dtype))
        gradient = pytensor.grad(None, x, known_grads={h: seed})
        with registers(width):
            call = compiled([x, seed], [h, gradient])
        for n in LENGTHS:
            rng = np.random.default_rng(n)
            factors = rng.uniform(0.98, 1.02, n).astype(dtype)
            cotangent = rng.uniform(0.5, 1, n).astype(dtype)
            history, by_x, _, _ = plain_affine(factors, np.zeros(n), 1.0, cotangent)
            assert_within(call(factors, cotangent), [history, by_x], dtype)


@pytest.mark.slow
def test_a_few_channels_take_turns():
    x, seed = pt.dmatrix("x"), pt.dmatrix("seed")
    h = trace(lambda x, h: x * h + 1, sequences=x, outputs_info=pt.ones((x.shape[1],)))
    call = compiled([x, seed], pytensor.grad(None, x, known_grads={h: seed}))
    for steps, channels in ((0, 2), (300, 1), (600, 2), (1025, 3), (600, 7)):
        values, cotangents = uniform(steps, channels), uniform(steps, channels, seed=1)
        history = np.ones((steps + 1, channels))
        for t in range(steps):
            history[t + 1] = values[t] * history[t] + 1
        expected, owed = np.empty((steps, channels)), np.zeros(channels)
        for t in reversed(range(steps)):
            owed = owed + cotangents[t]
            expected[t], owed = owed * history[t], owed * values[t]
        np.testing.assert_allclose(call(values, cotangents)[0], expected, rtol=1e-11, atol=1e-13)


def test_truth_values_as_numbers():
    """They are choices in sums and products, and stay what they are everywhere else."""
    x, y = pt.dvector("x"), pt.vector("y", dtype="bool")
    count, mixed, both = scanlib.scan(
        lambda x, y, h: [
            0.5 * h + (x > 0) * x + y,
            (1 - pt.eq(x, h)) / (2.0 - y) - (x > h) * pt.cast(y, "float32"),
            (x > 0) & y | (x > h),
        ],
        sequences=[x, y],
        outputs_info=[np.float64(0.25), None, None],
        return_updates=False,
    )
    call = compiled([x, y], [count, mixed, both])
    for n in (1, 9, BLOCK + 1):
        xs = uniform(n)
        ys = uniform(n, seed=1) > 0
        h, expected = 0.25, []
        for a, b in zip(xs, ys, strict=True):
            new = 0.5 * h + (a > 0) * a + b
            expected.append((new, (1 - (a == h)) / (2 - b) - (a > h) * b, (a > 0) & b | (a > h)))
            h = new
        for actual, wanted in zip(call(xs, ys), zip(*expected, strict=True), strict=True):
            np.testing.assert_allclose(actual, np.array(wanted), rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("depth", [2, 4, 5, 8, 9])
def test_far_taps(depth):
    """What is owed to a far tap moves through as many carries, one place at every step."""
    x, start = pt.dvector("x"), pt.dvector("start")
    h = trace(
        lambda x, h: 0.5 * h + x, sequences=x, outputs_info={"initial": start, "taps": [-depth]}
    )
    call = compiled([x, start], [h, *pytensor.grad(pt.sum(h**2), [x, start])])
    for steps in (0, 1, depth, 2 * depth + 1, 4 * depth + 3, BLOCK + 3):
        values, first = uniform(steps), uniform(depth)
        rows, owed = [*first], np.zeros(steps + depth)
        for t in range(steps):
            rows.append(0.5 * rows[t] + values[t])
        for t in reversed(range(steps)):
            owed[t + depth] += 2 * rows[t + depth]
            owed[t] += 0.5 * owed[t + depth]
        got, by_x, by_start = call(values, first)
        np.testing.assert_allclose(got, rows[depth:], rtol=1e-12)
        np.testing.assert_allclose(by_x, owed[depth:], rtol=1e-12)
        np.testing.assert_allclose(by_start, owed[:depth], rtol=1e-12)


@pytest.mark.parametrize("count", [3, 5, 7])
def test_states_that_rotate(count):
    x = pt.dvector("x")
    traces = trace(
        lambda x, *h: [*h[1:], 0.5 * h[0] + x],
        sequences=x,
        outputs_info=[np.float64(i) for i in range(count)],
    )
    call = compiled([x], traces)
    values = uniform(4 * count + 3)
    states, rows = [float(i) for i in range(count)], []
    for value in values:
        states = [*states[1:], 0.5 * states[0] + value]
        rows.append(states)
    np.testing.assert_allclose(call(values), np.transpose(rows), rtol=1e-12)
