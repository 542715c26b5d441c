"""Elementwise loops under the C linker against the plain Python loop."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scanlib
from scanlib.backends.handler.programs import program_of
from scanlib.schedules.selection import BLOCK, schedule
from tests.c_loops import compiled, trace, uniform
from tests.checks import assert_same
from tests.families import FAMILIES, assert_close
from tests.reference import reference_scan

LENGTHS = 0, 1, 2, 3, 5, 7, 13, 64, 65, 129, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17


class TestOneChannel:
    @pytest.mark.parametrize(
        "name", ["three", "season", "mixed-taps", "minimum-i32", "reads-states"]
    )
    def test_families_in_blocks(self, name):
        family = FAMILIES[name]
        inputs, traces = family.render()
        call = compiled(inputs, traces)
        assert [schedule(op) for op in call.ops] == ["blocks"]
        for steps in LENGTHS:
            values = family.values(steps)
            for actual, expected in zip(call(*values), family.reference(values), strict=True):
                assert_close(actual, expected, f"{steps} steps")

    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    @pytest.mark.parametrize("backwards", [False, True])
    def test_every_length(self, dtype, backwards):
        a, b = pt.vector("a", dtype=dtype), pt.vector("b", dtype=dtype)
        w = pt.scalar("w", dtype=dtype)
        zero = np.zeros((), dtype)
        each = trace(
            lambda a, b, h: a * h + b, sequences=[a, b], outputs_info=zero, go_backwards=backwards
        )
        same = trace(
            lambda b, h, w: w * h + b,
            sequences=b,
            outputs_info=zero,
            non_sequences=w,
            go_backwards=backwards,
        )
        call = compiled([a, b, w], [each, same])
        for steps in LENGTHS:
            values = uniform(steps, dtype=dtype), uniform(steps, seed=1, dtype=dtype)
            weight = np.asarray(0.7, dtype)
            expected = [
                *reference_scan(
                    lambda a, b, h: [a * h + b], values, [zero], go_backwards=backwards
                ),
                *reference_scan(
                    lambda b, h, w: [w * h + b],
                    values[1:],
                    [zero],
                    [weight],
                    go_backwards=backwards,
                ),
            ]
            for actual, wanted in zip(call(*values, weight), expected, strict=True):
                assert_close(actual, wanted, f"{steps} steps")

    def test_gradients_walk_backwards(self):
        a, b, h0 = pt.dvector("a"), pt.dvector("b"), pt.dscalar("h0")
        h = trace(lambda a, b, h: a * h + b, sequences=[a, b], outputs_info=h0)
        call = compiled([a, b, h0], [h[-1], *pytensor.grad(pt.sum(h**2), [a, b, h0])])
        assert any(op.signature.reverse for op in call.ops)
        for steps in (1, 2, 9, BLOCK + 3):
            av, bv, start = uniform(steps), uniform(steps, seed=1), 0.4
            states = [start]
            for t in range(steps):
                states.append(av[t] * states[-1] + bv[t])
            owed, da, db = 0.0, np.zeros(steps), np.zeros(steps)
            for t in reversed(range(steps)):
                owed += 2 * states[t + 1]
                da[t], db[t] = owed * states[t], owed
                owed *= av[t]
            last, *gradients = call(av, bv, start)
            np.testing.assert_allclose(last, states[-1], rtol=1e-12)
            for actual, wanted in zip(gradients, [da, db, owed], strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=1e-11, atol=1e-13)

    @pytest.mark.parametrize(
        "taps", [(-1, -2, -5), (-1, -12), (-12,), (-3,)], ids=lambda taps: str(taps)
    )
    @pytest.mark.parametrize("nonlinear", [False, True])
    def test_taps(self, taps, nonlinear):
        x, start = pt.dvector("x"), pt.dvector("start")

        def step(x, *past, tanh=pt.tanh):
            total = x + sum(0.3 / (k + 1) * value for k, value in enumerate(past))
            return tanh(total) if nonlinear else total

        y = trace(step, sequences=x, outputs_info={"initial": start, "taps": list(taps)})
        call = compiled([x, start], [y, y[-2:]])
        for steps in (2, 3, 11, 12, 13, 40, BLOCK + 5):
            values = uniform(steps), uniform(-min(taps), seed=1)
            (expected,) = reference_scan(
                lambda x, *past: [step(x, *past, tanh=np.tanh)],
                values[:1],
                [{"initial": values[1], "taps": taps}],
            )
            actual = call(*values)
            assert_same(actual, [expected, expected[-2:]], rtol=1e-11)

    @pytest.mark.parametrize("taps", [(-1,), (-1, -2), (-12,)], ids=lambda taps: str(taps))
    def test_last_rows_only(self, taps):
        x, start = pt.dvector("x"), pt.dvector("start")
        initial = start[0] if taps == (-1,) else start
        y = trace(
            lambda x, *past: pt.sin(sum(past) + x),
            sequences=x,
            outputs_info={"initial": initial, "taps": list(taps)},
        )
        call = compiled([x, start], y[-1])
        assert all(op.signature.untraced == (True,) for op in call.ops)
        values = uniform(50), uniform(-min(taps), seed=1)
        first = values[1][0] if taps == (-1,) else values[1]
        (expected,) = reference_scan(
            lambda x, *past: [np.sin(sum(past) + x)],
            values[:1],
            [{"initial": first, "taps": taps}],
        )
        np.testing.assert_allclose(call(*values)[0], expected[-1], rtol=1e-12)
        with pytest.raises(IndexError, match="fewer than 1 step"):
            call(np.zeros(0), values[1])

    def test_until_grows_and_cuts(self):
        x, limit = pt.dscalar("x"), pt.lscalar("limit")
        y = trace(
            lambda i, y: (y * 1.01, scanlib.until(y > x)),
            sequences=pt.arange(limit),
            outputs_info=np.float64(1.0),
        )
        call = compiled([x, limit], y)
        for stop_at, limit_at in ((0.5, 10), (1.1, 1000), (5.0, 1000), (50.0, 1000), (9e9, 300)):
            values, value = [], 1.0
            for _ in range(limit_at):
                before, value = value, value * 1.01
                values.append(value)
                if before > stop_at:
                    break
            assert_same(call(stop_at, limit_at), [np.array(values)])
        assert call(1.0, 0)[0].shape == (0,)

    def test_stop_that_is_a_state(self):
        x = pt.ivector("x")
        y, done = scanlib.scan(
            lambda x, y, done: ([y + x, pt.eq(x, 3)], scanlib.until(done)),
            sequences=x,
            outputs_info=[np.int32(0), np.bool_(False)],
            return_updates=False,
        )
        call = compiled([x], [y, done])
        actual, stopped = call(np.array([1, 3, 1, 1, 1], "int32"))
        np.testing.assert_array_equal(actual, [1, 4, 5])
        np.testing.assert_array_equal(stopped, [False, True, False])

    @pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64"])
    def test_integers_wrap_around(self, dtype):
        x = pt.vector("x", dtype=dtype)
        one = np.ones((), dtype)
        y, z = scanlib.scan(
            lambda x, y, z: [y * x + x, y ^ z],
            sequences=x,
            outputs_info=[one, one],
            return_updates=False,
        )
        call = compiled([x], [y, z])
        values = np.random.default_rng(0).integers(0, 100, 60).astype(dtype)
        with np.errstate(over="ignore"):
            expected = reference_scan(lambda x, y, z: [y * x + x, y ^ z], [values], [one, one])
        assert_same(call(values), expected, rtol=0)

    def test_division_by_zero_gives_zero(self):
        """As in NumPy, and on all linkers."""
        x = pt.lvector("x")
        y = trace(lambda x, y: y // x, sequences=x, outputs_info=np.int64(1000))
        call = compiled([x], y)
        np.testing.assert_array_equal(call(np.array([3, -2]))[0], [333, -167])
        np.testing.assert_array_equal(call(np.array([3, 0, 2]))[0], [333, 0, 0])

    def test_numbers_that_are_not_finite(self):
        a, b = pt.dvectors("a", "b")
        h = trace(lambda a, b, h: a * h + b, sequences=[a, b], outputs_info=np.float64(1.0))
        m = trace(lambda b, m: pt.maximum(b, m), sequences=b, outputs_info=np.float64(-1.0))
        call = compiled([a, b], [h, m])
        rng = np.random.default_rng(0)
        special = [np.nan, np.inf, -np.inf, 1e308, -1e308, 5e-324, -0.0]
        for seed in range(60):
            steps = int(rng.integers(1, 40))
            av, bv = uniform(steps, seed=seed), uniform(steps, seed=seed + 100)
            av[rng.integers(steps)] = special[seed % len(special)]
            bv[rng.integers(steps)] = special[rng.integers(len(special))]
            with np.errstate(all="ignore"):
                expected = [
                    *reference_scan(lambda a, b, h: [a * h + b], [av, bv], [np.float64(1.0)]),
                    *reference_scan(lambda b, m: [np.maximum(b, m)], [bv], [np.float64(-1.0)]),
                ]
            for actual, wanted in zip(call(av, bv), expected, strict=True):
                largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0.0)
                np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-15 * largest)

    def test_a_reset_after_growth(self):  # products of all coefficients would overflow
        a = np.full(20_000, 1.05)
        a[::50] = 0.0
        b = np.full(20_000, 1e-12)
        x, y = pt.dvectors("x", "y")
        h = trace(lambda a, b, h: a * h + b, sequences=[x, y], outputs_info=np.float64(1.0))
        (actual,) = compiled([x, y], h)(a, b)
        (expected,) = reference_scan(lambda a, b, h: [a * h + b], [a, b], [np.float64(1.0)])
        np.testing.assert_allclose(actual, expected, rtol=1e-12)

    def test_complex(self):
        x, w = pt.zvector("x"), pt.zscalar("w")
        y = trace(lambda x, y, w: w * y + x, sequences=x, outputs_info=0j, non_sequences=w)
        call = compiled([x, w], y)
        values = uniform(30) + 1j * uniform(30, seed=1)
        expected = reference_scan(lambda x, y: [(0.3 + 0.4j) * y + x], [values], [0j])
        assert_same(call(values, 0.3 + 0.4j), expected)


class TestChannels:
    def test_two_axes_and_broadcasting(self):
        x, row, column = pt.dtensor3("x"), pt.drow("row"), pt.dcol("column")
        cell, start = pt.dscalar("cell"), pt.dmatrix("start")
        y, total = scanlib.scan(
            lambda x, y, r, c, s: [pt.tanh(x + r * y + c * s), pt.sum(x * y, axis=0)],
            sequences=x,
            outputs_info=[start, None],
            non_sequences=[row, column, cell],
            return_updates=False,
        )
        call = compiled([x, row, column, cell, start], [y, total])

        def step(x, y, r, c, s):
            return [np.tanh(x + r * y + c * s), np.sum(x * y, axis=0)]

        for steps, n, m in ((0, 3, 4), (1, 3, 4), (6, 3, 17), (5, 1, 8), (5, 9, 1), (4, 0, 3)):
            values = uniform(steps, n, m), uniform(1, m), uniform(n, 1), 0.5, uniform(n, m, seed=1)
            expected = reference_scan(
                step,
                [values[0]],
                [values[4], None],
                values[1:4],
                rows=[((n, m), "f8"), ((m,), "f8")],
            )
            assert_same(call(*values), expected)

    def test_strides(self):
        x, start = pt.dtensor3("x"), pt.dmatrix("start")
        y = trace(lambda x, y: x * y + 1, sequences=x, outputs_info=start)
        call = compiled([x, start], y)
        whole, first = uniform(12, 10, 14), uniform(10, 14, seed=1)
        views = [
            (whole, first),
            (whole[::2], first),
            (whole[::-1], first[::-1]),
            (whole[:, ::2, :], first[::2]),
            (whole[:, :, ::-1], first),
            (whole[:, ::-1, ::2], first[:, ::2]),
            (whole.transpose(0, 2, 1), first.T),
            (whole.transpose(2, 1, 0), first[:, :12]),
            (np.broadcast_to(whole[:1], (5, 10, 14)), np.broadcast_to(first[:, :1], (10, 14))),
        ]
        for xv, sv in views:
            expected = reference_scan(lambda x, y: [x * y + 1], [xv], [sv])
            assert_same(call(xv, sv), expected)

    @pytest.mark.all_forms
    @pytest.mark.parametrize("name", ["x[::2]", "x[::-1]", "column"])
    def test_strides_of_one_channel(self, name):
        x = pt.dvector("x")
        call = compiled([x], trace(lambda x, y: 0.5 * y + x, sequences=x, outputs_info=0.0))
        whole = uniform(3 * BLOCK)
        view = {"x[::2]": whole[::2], "x[::-1]": whole[::-1], "column": uniform(3000, 2)[:, 1]}[
            name
        ]
        expected = reference_scan(lambda x, y: [0.5 * y + x], [view], [0.0])
        assert_same(call(view), expected, atol=1e-13)

    def test_sums_of_every_kind(self):
        x, start = pt.tensor3("x", dtype="float32"), pt.matrix("start", dtype="float32")
        y, inner, outer, both = scanlib.scan(
            lambda x, y: [pt.tanh(x * y), pt.sum(x, axis=1), pt.sum(y, axis=0), pt.sum(x * y)],
            sequences=x,
            outputs_info=[start, None, None, None],
            return_updates=False,
        )
        w = pt.vector("w", dtype="float32")
        z = trace(
            lambda x, z, w: x * w + pt.cos(z), sequences=x, outputs_info=start, non_sequences=w
        )
        call = compiled([x, start, w], [y, inner, outer, both, pytensor.grad(z.sum(), w)])
        values = [uniform(*shape, dtype="float32") for shape in ((9, 4, 33), (4, 33), (33,))]

        def step(x, y):
            return [np.tanh(x * y), np.sum(x, axis=1), np.sum(y, axis=0), np.sum(x * y)]

        expected = reference_scan(step, values[:1], [values[1], None, None, None])
        xv, zv, wv = (value.astype("float64") for value in (values[0], values[1], values[2]))
        states = [zv]
        for row in xv:
            states.append(row * wv + np.cos(states[-1]))
        owed, gradient = np.zeros_like(zv), np.zeros_like(wv)
        for t in reversed(range(len(xv))):
            owed = owed + 1
            gradient += np.sum(owed * xv[t], axis=0)
            owed = -owed * np.sin(states[t])
        actual = call(*values)
        assert_same(actual, [*expected, gradient.astype("float32")], rtol=2e-5, atol=2e-5)

    def test_results_of_different_sizes(self):
        x, y = pt.dmatrices("x", "y")
        a, b = scanlib.scan(
            lambda x, y, a, b: [a + x, b * y],
            sequences=[x, y],
            outputs_info=[pt.zeros(x.shape[1]), pt.ones(y.shape[1])],
            return_updates=False,
        )
        call = compiled([x, y], [a, b])
        xv, yv = uniform(6, 5), uniform(6, 9)
        assert_same(call(xv, yv), [np.cumsum(xv, axis=0), np.cumprod(yv, axis=0)])

    def test_taps_and_last_rows(self):
        x, start = pt.dmatrix("x"), pt.dmatrix("start")
        y = trace(
            lambda x, far, near: 0.5 * far - 0.3 * near + x,
            sequences=x,
            outputs_info={"initial": start, "taps": [-12, -1]},
        )
        call = compiled([x, start], [y[-3:], y.sum(axis=1)])
        last = compiled([x, start], y[-1])
        assert all(op.signature.untraced == (True,) for op in last.ops)
        for steps in (3, 12, 30):
            values = uniform(steps, 7), uniform(12, 7, seed=1)
            (expected,) = reference_scan(
                lambda x, far, near: [0.5 * far - 0.3 * near + x],
                values[:1],
                [{"initial": values[1], "taps": (-12, -1)}],
            )
            assert_same(call(*values), [expected[-3:], expected.sum(axis=1)])
            assert_same(last(*values), [expected[-1]])

    def test_until(self):
        x, start = pt.dmatrix("x"), pt.dvector("start")
        count, y = scanlib.scan(
            lambda x, count, y: ([count + 1, y + x], scanlib.until(count >= 99)),
            sequences=x,
            outputs_info=[np.int64(0), start],
            return_updates=False,
        )
        call = compiled([x, start], [count, y])
        values = uniform(150, 6), uniform(6)
        expected = values[1] + np.cumsum(values[0], axis=0)[:100]
        assert_same(call(*values), [np.arange(1, 101), expected])
        assert_same(call(values[0][:70], values[1]), [np.arange(1, 71), expected[:70]])


def test_sums_of_single_floats_are_collected_in_double_precision():
    """As PyTensor's sums are: what cancels may be beyond the range, and small terms count."""
    x, w = pt.matrix("x", dtype="float32"), pt.scalar("w", dtype="float32")
    one = np.float32(1)
    states, sums = trace(
        lambda x, h, w: [h * w, (h * x).sum()], sequences=x, outputs_info=[one, None],
        non_sequences=w,
    )  # fmt: skip
    call = compiled([x, w], [states, sums])
    assert all(program_of(op) is not None for op in call.ops)
    values = np.array(
        [[3e38, 3e38, -3e38, -3e38], [1e8, 1, 1, 1 - 1e8], [1, 2, 3, 4]], dtype="float32"
    )
    expected = values.astype("float64").sum(axis=1).astype("float32")
    assert_same(call(values, one), [np.ones(3, "float32"), expected])


@settings(max_examples=40)
@given(
    steps=st.integers(0, 40),
    n=st.integers(0, 9),
    seed=st.integers(0, 1000),
    stride=st.sampled_from([1, 2, -1]),
)
def test_any_size(steps, n, seed, stride):
    call = _any_size()
    wide, start = uniform(steps, 2 * n, seed=seed), uniform(n, seed=seed)
    x = wide[:, ::2][:, ::-1] if stride == -1 else wide[:, :n] if stride == 1 else wide[:, ::2]

    def step(x, y, z):
        return [np.maximum(x, 0.5 * y - z), x + y, np.sum(y * x)]

    expected = reference_scan(
        step, [x], [start, start, None], rows=[((n,), "f8"), ((n,), "f8"), ((), "f8")]
    )
    assert_same(call(x, start), expected)


def _any_size(made=[]):  # noqa: B006 -- compiled once
    if not made:
        x, start = pt.dmatrix("x"), pt.dvector("start")
        results = scanlib.scan(
            lambda x, y, z: [pt.maximum(x, 0.5 * y - z), x + y, pt.sum(y * x)],
            sequences=x,
            outputs_info=[start, start, None],
            return_updates=False,
        )
        made.append(compiled([x, start], list(results)))
        assert all(program_of(op) is not None for op in made[0].ops)
    return made[0]
