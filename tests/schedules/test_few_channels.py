"""Loops over few channels: strips of steps, or blocks of steps of one channel after the other."""

import os
import subprocess
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scanlib
from scanlib.schedules.selection import (
    LONGEST_STRIP_ROW,
    MANY_STEPS,
    STRIP_OPERATIONS,
    few_channels,
    schedule,
    strip_steps,
)
from tests.checks import assert_derivatives
from tests.families import FAMILIES, SYMBOLIC, assert_close, assert_lowered, kernels
from tests.modes import MODES
from tests.recurrences.test_extreme_values import (
    COEFFICIENTS,
    VALUES,
    assert_same_kind,
    plain_affine,
)
from tests.reference import reference_scan

LENGTHS = (0, 1, 2, 9, 31, 32, 33, MANY_STEPS - 1, MANY_STEPS, MANY_STEPS + 1, 1023, 1025, 2050)
WIDTHS = (*range(10), 17, 24, 31, 32, 33, 40, 64, 65)  # rows of up to and more than 256 bytes
LAYOUTS = {
    "C": np.ascontiguousarray,
    "F": np.asfortranarray,
    "strided": lambda x: np.repeat(np.repeat(x, 2, 0), 3, 1)[::2, ::3],
    "reversed": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "one-axis": lambda x: np.ascontiguousarray(x.T)[::-1].T[:, ::-1],
}


@pytest.fixture(params=["numba", "C"], scope="module")
def backend(request):
    with kernels(request.param):
        yield request.param


def trace(step, **arguments):
    return scanlib.scan(step, **arguments, return_updates=False)


def compiled(inputs, outputs, chosen="channels", n_loops=1):
    """Compile for the C linker; all loops run with the schedule `chosen`."""
    function = pytensor.function(inputs, outputs, mode=MODES["c"], on_unused_input="ignore")
    ops = assert_lowered(function, n_loops)
    assert {schedule(op) for op in ops} == {chosen}

    def call(*values):
        before = [np.asarray(value).tobytes() for value in values]
        results = function(*values)
        for value, held in zip(values, before, strict=True):
            assert np.asarray(value).tobytes() == held, "an input was changed"
        for result, again in zip(results, function(*values), strict=True):
            assert result.tobytes() == again.tobytes(), "a second call differs"
        return results

    call.ops = ops
    return call


def gradient_loop(x, phi, seed):
    """Return the trace of ``h = phi h + x`` per channel, and what `seed` weighs it to."""
    h, owed = np.zeros_like(x), np.zeros_like(x)
    for t in range(len(x)):
        h[t] = (phi * h[t - 1] if t else 0) + x[t]
    for t in reversed(range(len(x))):
        owed[t] = seed[t] + (phi * owed[t + 1] if t + 1 < len(x) else 0)
    before = np.concatenate([np.zeros_like(x[:1]), h])[: len(x)]
    return h, owed, (owed * before).sum(axis=0)


@pytest.fixture(scope="module")
def weighted(backend):
    """For a dtype: the trace, and derivatives with respect to rows and a weight per channel."""
    functions = {}

    def get(dtype):
        if dtype not in functions:
            x, seed = pt.matrix("x", dtype=dtype), pt.matrix("seed", dtype=dtype)
            phi = pt.vector("phi", dtype=dtype)
            h = trace(
                lambda x, h, phi: phi * h + x,
                sequences=x,
                outputs_info=pt.zeros(x.shape[1], dtype=dtype),
                non_sequences=phi,
            )
            gradients = pytensor.grad((h * seed).sum(), [x, phi])
            functions[dtype] = compiled([x, phi, seed], [h, *gradients], n_loops=2)
        return functions[dtype]

    return get


class TestAffine:
    @pytest.mark.slow
    @settings(max_examples=60)
    @given(data=st.data())
    def test_all_widths_lengths_and_layouts(self, weighted, data):
        dtype = data.draw(st.sampled_from(["float64", "float32"]))
        steps, width = data.draw(st.sampled_from(LENGTHS)), data.draw(st.sampled_from(WIDTHS))
        lay_out = [LAYOUTS[data.draw(st.sampled_from(sorted(LAYOUTS)))] for _ in range(2)]
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        x, seed = (rng.uniform(-1, 1, (steps, width)).astype(dtype) for _ in range(2))
        phi = rng.uniform(-0.99, 0.99, width).astype(dtype)
        actual = weighted(dtype)(lay_out[0](x), phi, lay_out[1](seed))
        wide = (array.astype("float64") for array in (x, phi, seed))
        tolerance = 1e-11 if dtype == "float64" else 2e-4
        for result, expected in zip(actual, gradient_loop(*wide), strict=True):
            assert result.dtype == dtype
            assert result.shape == expected.shape
            scale = 1 + np.abs(expected).max(initial=0)
            np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance * scale)

    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_strips(self, weighted, dtype):
        """Of several steps where rows are short; a lane, a vector and more of channels."""
        function = weighted(dtype)
        assert all(strip_steps(op) > 1 for op in function.ops)
        longest = LONGEST_STRIP_ROW // np.dtype(dtype).itemsize
        rng = np.random.default_rng(7)
        for width in (1, 3, 9, longest, longest + 1):
            for steps in (0, 1, STRIP_OPERATIONS // 2, 50):
                x, seed = (rng.uniform(-1, 1, (steps, width)).astype(dtype) for _ in range(2))
                phi = rng.uniform(-0.99, 0.99, width).astype(dtype)
                wide = (array.astype("float64") for array in (x, phi, seed))
                expected = gradient_loop(*wide)
                for result, wanted in zip(function(x, phi, seed), expected, strict=True):
                    np.testing.assert_allclose(result, wanted, rtol=2e-4, atol=2e-4)

    @pytest.mark.slow
    @pytest.mark.parametrize("printed", [pytest.param("numba", marks=pytest.mark.slow), "C"])
    def test_derivatives_to_second_order(self, printed):
        x, phi = pt.matrix("x"), pt.vector("phi")
        h = trace(
            lambda x, h, phi: phi * h + x,
            sequences=x, outputs_info=pt.zeros(x.shape[1]), non_sequences=phi,
        )  # fmt: skip
        repeated = pt.concatenate([x] * 64)  # as many steps as blocks need
        long = trace(
            lambda x, h, phi: phi * h + x * x,
            sequences=repeated, outputs_info=pt.zeros(x.shape[1]), non_sequences=phi,
        )  # fmt: skip
        rng = np.random.default_rng(8)
        values = {x: rng.normal(size=(4, 2)), phi: np.array([0.5, -0.7])}

        def reference(x, phi):
            short, state = 0.0, np.zeros(2)
            for row in x:
                state = phi * state + row
                short += (state**3).sum()
            total, state = 0.0, np.zeros(2)
            for row in np.concatenate([x] * 64):
                state = phi * state + row**2
                total += (state**2).sum()
            return short + total / 64

        cost = (h**3).sum() + (long**2).sum() / 64
        with kernels(printed):
            assert_derivatives(cost, values, reference, MODES["c"])

    def test_sizes_that_differ_are_errors(self, backend):
        x, y, h0 = pt.matrix("x"), pt.matrix("y"), pt.vector("h0")
        h = trace(lambda x, y, h: x * h + y, sequences=[x, y], outputs_info=h0)
        function = pytensor.function([x, y, h0], h, mode=MODES["c"])
        for width in (2, 9):
            good, bad = np.zeros((300, width)), np.zeros((300, width + 1))
            for values in ((good, bad, good[0]), (bad, good, good[0]), (good, good, bad[0])):
                with pytest.raises(ValueError, match="shape"):
                    function(*values)


SOME = [
    "affine-fixed-f32", "cumprod", "geometric", "ar2", "season", "arma", "two", "mixed-taps",
    "long-delay", "reads-states", "minimum-i32", "extremes", "affine-u8", "far", "log-affine",
    "affine-complex",
]  # fmt: skip
NOT_IN_C = {"affine-complex"}
BY_WIDTH = {"log-affine"}


def render(family):
    """Return the inputs and traces of a family, every row and state with an axis of channels."""
    rows = [pt.matrix(f"x{i}", dtype=family.dtype) for i in range(family.n_rows)]
    weights = [pt.scalar(f"w{i}", dtype=family.dtype) for i in range(len(family.weights))]
    starts, info = [], []
    for k, taps in enumerate(family.taps):
        if taps is None:
            info.append(None)
            continue
        start = pt.tensor(f"h{k}", dtype=family.dtype, shape=(None,) * (1 + (taps != (-1,))))
        starts.append(start)
        info.append(start if taps == (-1,) else {"initial": start, "taps": list(taps)})
    traces, _ = scanlib.scan(
        lambda *arguments: family.step(SYMBOLIC, *arguments),
        sequences=rows, outputs_info=info, non_sequences=weights, return_list=True,
    )  # fmt: skip
    last = [h[-1] for h, taps in zip(traces, family.taps, strict=True) if taps is not None]
    return [*rows, *weights, *starts], traces, last


@pytest.mark.slow
@pytest.mark.parametrize("name", SOME)
@pytest.mark.parametrize("printed", [pytest.param("numba", marks=pytest.mark.slow), "C"])
def test_families(printed, name):
    """All rows, and in a second function the last rows alone, which keep no history."""
    family = FAMILIES[name]
    inputs, traces, last = render(family)
    chosen = "by width" if name in BY_WIDTH else "channels"
    with kernels("numba" if name in NOT_IN_C else printed):
        functions = compiled(inputs, traces, chosen), compiled(inputs, last, chosen)
        for steps, width in ((300, 1), (1025, 3), (300, 9), (257, 2)):
            channels = [family.values(steps, seed) for seed in range(width)]
            values = [
                channels[0][i] if i in range(family.n_rows, family.n_rows + len(family.weights))
                else np.stack([channel[i] for channel in channels], axis=-1)
                for i in range(len(inputs))
            ]  # fmt: skip
            expected = [family.reference(channel) for channel in channels]
            rows = [np.stack(parts, axis=-1) for parts in zip(*expected, strict=True)]
            for actual, wanted in zip(functions[0](*values), rows, strict=True):
                assert_close(actual, wanted, f"{steps} steps, {width} channels")
            kept = [r[-1] for r, taps in zip(rows, family.taps, strict=True) if taps is not None]
            for actual, wanted in zip(functions[1](*values), kept, strict=True):
                assert_close(actual, wanted, f"last of {steps} steps, {width} channels")


class TestAxes:
    @pytest.mark.slow
    def test_two_axes_with_sums_over_some(self, backend):
        """Weights along either axis, one for all, and sums over time and channels."""
        x = pt.tensor3("x")
        a, b, c = pt.vector("a"), pt.col("b"), pt.scalar("c")
        h = trace(
            lambda x, h, a, b, c: (a * b * c) * h + x,
            sequences=x, outputs_info=pt.zeros(x.shape[1:]), non_sequences=[a, b, c],
        )  # fmt: skip
        gradients = pytensor.grad((h**2).sum(), [x, a, b, c])
        function = compiled([x, a, b, c], [h, *gradients], n_loops=2)
        rng = np.random.default_rng(3)
        for steps, m, n in ((300, 1, 3), (300, 2, 1), (1030, 1, 1), (300, 3, 2), (20, 1, 2)):
            x, a, b = rng.normal(size=(steps, m, n)), rng.normal(size=n), rng.normal(size=(m, 1))
            a, b, c = a / 2, b / 2, 0.8
            states, owed = np.zeros((steps + 1, m, n)), np.zeros((steps + 1, m, n))
            for t in range(steps):
                states[t + 1] = a * b * c * states[t] + x[t]
            for t in reversed(range(steps)):
                owed[t] = 2 * states[t + 1] + a * b * c * owed[t + 1]
            weight = (owed[:-1] * states[:-1]).sum(axis=0)
            expected = [
                states[1:], owed[:-1], (weight * b * c).sum(axis=0),
                (weight * a * c).sum(axis=1, keepdims=True), (weight * a * b).sum(),
            ]  # fmt: skip
            for actual, wanted in zip(function(x, a, b, c), expected, strict=True):
                assert actual.shape == wanted.shape
                np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-9)

    @pytest.mark.slow
    def test_which_loops_stay_together(self):
        """Channels that take turns must be independent, and as many for all results."""
        x, y, u = pt.matrix("x"), pt.matrix("y"), pt.vector("u")
        zeros = pt.zeros(x.shape[1])
        add = pt.logaddexp
        total = lambda x, h: [add(h, x), (h * x).sum()]  # noqa: E731
        both = lambda x, y, h, g: [add(h, x), add(g, y)]  # noqa: E731
        scalar = lambda x, u, h, g: [add(h, x), add(g, u)]  # noqa: E731
        for loops in (
            scanlib.scan(total, x, [zeros, None], return_updates=False),
            scanlib.scan(both, [x, y], [zeros, pt.zeros(y.shape[1])], return_updates=False),
            scanlib.scan(scalar, [x, u], [zeros, 0.0], return_updates=False),
            [trace(lambda x, h: pt.tanh(h) + x, sequences=x, outputs_info=zeros)],
        ):
            function = pytensor.function(
                [x, y, u], loops, mode=MODES["c"], on_unused_input="ignore"
            )
            assert [schedule(op) for op in assert_lowered(function)] == ["channels"]

    @pytest.mark.parametrize(
        "step, dtype, most",
        [
            (lambda x, h: h + x, "float32", 1),
            (lambda x, h: x * h + 1, "float64", 1),
            (lambda x, h: pt.logaddexp(h, x), "float32", 8),
            (lambda x, h: pt.logaddexp(h, x), "float64", 7),
        ],
    )
    def test_sizes_that_types_tell(self, step, dtype, most):
        for width, chosen in ((most, "blocks"), (most + 1, "channels")):
            x = pt.tensor("x", dtype=dtype, shape=(None, width))
            h = trace(step, sequences=x, outputs_info=np.zeros(width, dtype))
            function = pytensor.function([x], h, mode=MODES["c"])
            (op,) = assert_lowered(function)
            assert (schedule(op), few_channels(op)) == (chosen, most)


@pytest.fixture(scope="module")
def two(backend):
    """``h = a h + b`` for two channels, as types tell."""
    a, b = (pt.tensor(name, dtype="float64", shape=(None, 2)) for name in "ab")
    h0 = pt.tensor("h0", dtype="float64", shape=(2,))
    h = trace(lambda a, b, h: a * h + b, sequences=[a, b], outputs_info=h0)
    return compiled([a, b, h0], [h])


class TestNumbers:
    @settings(max_examples=80)
    @given(st.sampled_from([1, 5, 8, 9, 33, 64]), st.sampled_from([0.08, 0.6]), st.integers(0))
    def test_extreme_values(self, two, steps, share, seed):
        rng = np.random.default_rng(seed)
        a, b = rng.uniform(-1.1, 1.1, (steps, 2)), rng.uniform(-1, 1, (steps, 2))
        for array, pool in ((a, COEFFICIENTS), (b, VALUES)):
            where = rng.random(array.shape) < share
            array[where] = rng.choice(pool, where.sum())
        h0 = rng.choice([0.0, 1.0, -0.5, *VALUES], 2)
        (actual,) = two(a, b, h0)
        for k in range(2):
            assert_same_kind(actual[:, k], *plain_affine(a[:, k], b[:, k], h0[k]))

    def test_a_channel_that_is_not_finite_leaves_others_alone(self, two):
        a, b = np.full((5000, 2), 0.5), np.ones((5000, 2))
        b[1500, 0], a[2100, 0] = np.nan, 0.0
        a[3000, 1] = 1e200
        (actual,) = two(a, b, np.zeros(2))
        for k in range(2):
            assert_same_kind(actual[:, k], *plain_affine(a[:, k], b[:, k], np.float64(0.0)))


SCRIPT = """
import numpy as np, pytensor, pytensor.tensor as pt, scanlib
x = pt.matrix("x")
y = scanlib.cumlogsumexp(x)
f = pytensor.function([x], y, mode="NUMBA")
rng = np.random.default_rng(0)
for shape in ((300, 2), (300, 50), (5, 3), (300, 2)):
    values = rng.normal(size=shape)
    np.testing.assert_allclose(f(values), np.logaddexp.accumulate(values), rtol=1e-12)
print("fine")
"""


@pytest.mark.slow
def test_code_from_the_disk_finds_its_schedules(tmp_path):
    """A second process loads the loop, and what it calls, from numba's cache."""
    flags = f"base_compiledir={tmp_path}"
    environment = os.environ | {"PYTENSOR_FLAGS": flags}
    saved = []
    for _ in range(2):
        before = saved
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True
        )
        assert done.stdout == "fine\n", done.stderr
        saved = sorted(tmp_path.glob("**/*.nbc"))
    assert saved == before, "the second process compiled anew"


def test_the_plain_loop_agrees():
    """The reference of this module against the reference of all others."""
    rng = np.random.default_rng(0)
    x, phi = rng.normal(size=(9, 2)), np.array([0.5, -0.3])
    (expected,) = reference_scan(lambda x, h, p: [p * h + x], [x], [np.zeros(2)], [phi])
    np.testing.assert_allclose(gradient_loop(x, phi, x)[0], expected)
