"""Chunks of the steps in threads that compose all steps before: extremes, sums, logarithms."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.kernels.thread_parts import system_has_threads
from scanlib.ops.logaddexp import logaddexp
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.thread_splits import chunks_by
from tests.c_loops import trace, uniform
from tests.checks import assert_same
from tests.kernels.test_threads import SMALL, STEPS, assert_repeats, compiled, in_forked_process
from tests.modes import MODES

pytestmark = pytest.mark.skipif(not system_has_threads(), reason="no such threads here")

LENGTHS = (1, 2, 1024, 4095, 4096, 4097, 2 * 4096 - 1, STEPS, 30_011)
PLACES = (0, 1023, 2500, 4095, 4096, 8000, STEPS - 1)


def series(dtype="float64"):
    """Extremes and a sum in one loop, logarithms, a last row and a loop that walks back."""
    x, a, start = (pt.vector(n, dtype=dtype) for n in ("x", "a", "start"))
    top, low, total = trace(
        lambda x, top, low, total: [pt.maximum(top, 2 * x), pt.minimum(low, x), total + x],
        sequences=x,
        outputs_info=[start[0], start[1], start[2]],
    )
    logs = trace(logaddexp_step, sequences=x, outputs_info=start[3])
    shifted = trace(lambda a, x, h: logaddexp(h + a, x), sequences=[a, x], outputs_info=start[3])
    back = scanlib.cummin(pt.exp(x), reverse=True)
    return [x, a, start], [top, low, total, logs, shifted[-1], back]


def logaddexp_step(x, h):
    return logaddexp(h, x)


def plain(x, a, start):
    """The same by NumPy, and step by step."""
    with np.errstate(all="ignore"):
        top = np.maximum.accumulate(np.concatenate([start[:1], 2 * x]))[1:]
        low = np.minimum.accumulate(np.concatenate([start[1:2], x]))[1:]
        total = np.add.accumulate(np.concatenate([start[2:3], x]))[1:]
        logs = np.logaddexp.accumulate(np.concatenate([start[3:], x]))[1:]
        last = start[3]
        for a_t, x_t in zip(a, x, strict=True):
            last = np.logaddexp(last + a_t, x_t)
        back = np.minimum.accumulate(np.exp(x[::-1]))[::-1]
    return [top, low, total, logs, last, back]


def data(steps=STEPS, seed=0, dtype="float64"):
    generator = np.random.default_rng(seed)
    x = np.cumsum(generator.normal(size=steps)) / 50
    a, start = generator.uniform(-0.02, 0.01, steps), np.array([0.1, -0.1, 0.3, 0.2])
    return x.astype(dtype), a.astype(dtype), start.astype(dtype)


@pytest.fixture(scope="module", params=["numba", "c"])
def call(request):
    return compiled(*series(), 3, request.param)


def check(call, values):
    assert_repeats(call, values, plain(*values), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("steps", LENGTHS)
def test_lengths(call, steps):
    check(call, data(steps))


@pytest.mark.slow
def test_strides(call):
    x, a, start = data(2 * STEPS)
    check(call, (x[::-2], a[::2], start))


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(call, value):
    for place in PLACES:
        x, a, start = data()
        x[place] = value
        check(call, (x, a, start))
        check(call, (x, data()[1], np.array([np.inf, -np.inf, 0.1, -np.inf])))
    for k in range(4):
        x, a, start = data()
        start[k] = value
        check(call, (x, a, start))


def test_shifts_that_are_not_finite(call):
    for place in PLACES:
        x, a, start = data()
        a[place] = -np.inf
        check(call, (x, a, start))
        a[place] = 1e308
        check(call, (x, a, start))


def test_nothing_but_minus_infinity(call):
    x, a, _ = data()
    for first, last in ((0, STEPS), (0, 6000), (3000, STEPS)):
        own = x.copy()
        own[first:last] = -np.inf
        check(call, (own, a, np.array([-np.inf, np.inf, 0.0, -np.inf])))


def test_sums_that_overflow_on_the_way(call):
    """All steps of a chunk together are finite, and one after the other they are not."""
    for first in (0, 2000, 5000):
        x, a, start = data()
        x[first : first + 4] = 1.7e308, 1.7e308, -1.7e308, -1.7e308
        (_, _, total, *_), expected = call(x, a, start), plain(x, a, start)[2]
        assert np.isinf(expected[first + 1])
        np.testing.assert_array_equal(np.isfinite(total), np.isfinite(expected))
        assert_repeats(call, (x, a, start), plain(x, a, start), rtol=1e-9, atol=1e-9)


def test_zero_steps(call):
    with pytest.raises(IndexError):  # there is no last row
        call(*data(0))


def test_forked_process(call):
    in_forked_process(call, data())


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["numba", "c"])
def test_one_thread_and_two(mode):
    """Extremes are the same; sums are not, bit by bit: so it shows that there are chunks."""
    inputs, outputs = series("float32")
    one, two = (compiled(inputs, outputs, count, mode) for count in (1, 2))
    values = data(40_000, dtype="float32")
    first, second = one(*values), two(*values)
    for k in (0, 1, 5):
        assert np.array_equal(first[k], second[k])
    assert not np.array_equal(first[2], second[2])
    assert_same(second, first, rtol=1e-4, atol=1e-4)
    expected = [np.asarray(value, "float32") for value in plain(*data(40_000))]
    assert_repeats(two, values, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["numba", "c"])
def test_gradients(mode):
    x, w = pt.dvector("x"), pt.dvector("w")
    cost = pt.sum(scanlib.cummax(x) * w) + pt.sum(pt.sin(scanlib.cumlogsumexp(x)))
    outputs = [cost, pytensor.grad(cost, x)]
    one, two = (compiled([x, w], outputs, count, mode) for count in (1, 3))
    for steps in (1, 5000, STEPS):
        values = data(steps)[0], uniform(steps)
        assert_repeats(two, values, one(*values), rtol=1e-9, atol=1e-9)


def test_explained():
    _, outputs = series()
    for mode in ("numba", "c"):
        with pytensor.config.change_flags(scanlib__threads=2, **SMALL):
            explanation = scanlib.explain(outputs[3], MODES[mode])
        (loop,) = explanation.loops
        assert loop.threads == 2
        assert "first composes all steps before" in " ".join(explanation.details().split())
        assert scanlib.explain(outputs[3], MODES[mode]).loops[0].threads == 1


@pytest.mark.slow
def test_which_loops_are_chunks():
    x, a, start = pt.dvector("x"), pt.dvector("a"), pt.dscalar("start")

    def how(step, *sequences):
        y = trace(step, sequences=list(sequences), outputs_info=start)
        function = pytensor.function([x, a, start], y, mode=MODES["c"], on_unused_input="ignore")
        (op,) = (n.op for n in function.maker.fgraph.apply_nodes if isinstance(n.op, ElemwiseScan))
        return chunks_by(op)

    assert how(lambda x, y: pt.maximum(y, pt.exp(x)), x) == "all steps"
    assert how(lambda x, y: y - pt.exp(x), x) == "all steps"
    assert how(lambda x, a, y: logaddexp(y + a, x), x, a) == "all steps"
    assert how(lambda x, a, y: a * y + x, x, a) == "decay"
    assert how(lambda x, y: pt.maximum(y, x), x) is None  # it waits for the memory
    assert how(lambda x, y: y - x, x) is None
    assert how(lambda x, y: pt.clip(y + x, 0, 1), x) is None
    assert how(lambda x, y: pt.tanh(y + x), x) is None
