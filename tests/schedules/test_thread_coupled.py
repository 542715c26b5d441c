"""Chunks of the steps in threads where steps read several past values: coupled states, taps."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.kernels.thread_parts import system_has_threads
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.schedules.selection import can_chunk
from tests.c_loops import trace
from tests.checks import assert_same
from tests.modes import MODES
from tests.schedules.test_threads import SMALL, STEPS, assert_repeats, compiled, in_forked_process

pytestmark = pytest.mark.skipif(not system_has_threads(), reason="no such threads here")

LENGTHS = (1, 2, 1024, 4095, 4096, 4097, 2 * 4096 - 1, STEPS, 30_011)
MODELS = pytest.mark.parametrize("mode", ["numba", "c"])


def series(dtype="float64"):
    """Two taps, a level with its trend, of which the last is kept, and the gradient."""
    x, a, start = (pt.vector(name, dtype=dtype) for name in ("x", "a", "start"))
    y = trace(
        lambda x, a, near, far: a * near - np.asarray(0.3, dtype) * far + x,
        sequences=[x, a],
        outputs_info={"initial": start[:2], "taps": [-1, -2]},
    )
    keep = np.asarray(0.7, dtype)
    level, trend = trace(
        lambda x, a, level, trend: [keep * (level + trend) + x, a * trend + x - level * (1 - keep)],
        sequences=[x, a],
        outputs_info=[start[0], start[1]],
    )
    cost = pt.sum(y**2)
    return [x, a, start], [y, level, trend[-1], *pytensor.grad(cost, [x, a, start])]


def plain(x, a, start):
    """The same, step by step."""
    y, level, trend, levels = list(start[:2]), start[0], start[1], []
    with np.errstate(all="ignore"):
        for x_t, a_t in zip(x, a, strict=True):
            y.append(a_t * y[-1] - 0.3 * y[-2] + x_t)
            level, trend = 0.7 * (level + trend) + x_t, a_t * trend + x_t - level * (1 - 0.7)
            levels.append(level)
        d_x, d_a = np.zeros(len(x)), np.zeros(len(x))
        near, far = 0.0, 0.0  # what later steps owe to the last value, and to the one before
        for t in range(len(x) - 1, -1, -1):
            owed = near + 2 * y[t + 2]
            d_x[t], d_a[t] = owed, owed * y[t + 1]
            near, far = far + a[t] * owed, -0.3 * owed
    return [np.array(y[2:]), np.array(levels), trend, d_x, d_a, np.array([far, near])]


def data(steps=STEPS, seed=0, dtype="float64"):
    generator = np.random.default_rng(seed)
    values = generator.normal(size=steps), generator.uniform(-0.9, 0.9, steps), [0.4, -0.3]
    return tuple(np.asarray(value, dtype) for value in values)


@pytest.fixture(scope="module", params=["numba", "c"])
def call(request):
    return compiled(*series(), 3, request.param)


def check(call, values, count=6, **tolerance):
    expected = plain(*values)
    first, second = call(*values), call(*values)
    assert_same(first[:count], expected[:count], **({"rtol": 1e-9, "atol": 1e-11} | tolerance))
    for one, other in zip(first, second, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("steps", LENGTHS)
def test_lengths(call, steps):
    check(call, data(steps))


@pytest.mark.slow
def test_strides(call):
    x, a, start = data(2 * STEPS)
    check(call, (x[::-2], a[::2], start))


def test_coefficients_that_do_not_decay_everywhere(call):
    """The block that is looked at first decays, and others do not."""
    for first, last in ((0, 8000), (3000, 4000), (4096, 7000), (8190, STEPS)):
        x, a, start = data()
        a[first:last] = 1.3 - 1e-5
        check(call, (x, a, start), atol=1e-6)


def test_large_values_are_not_forgotten(call):
    """What the composed steps leave of a value may be small, and yet all there is."""
    x, a = np.zeros(STEPS), np.full(STEPS, 1.27)
    for size in (0.4, 1e140, 1e300):
        (y, *_), expected = call(x, a, np.array([size, size])), plain(x, a, np.array([size, size]))
        np.testing.assert_allclose(y, expected[0], rtol=1e-9)
        check(call, (x, a, np.array([size, size])), 3, rtol=1e-6, atol=1e-15 * size)


def test_overflow_that_composing_hides(call):
    x, a, start = data()
    x[3071], a[3072:3080], a[3080] = 1e300, 1e6, 0.0
    check(call, (x, a, start), 3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite(call, value):
    for place in (0, 3000, 4095, 4096, 8000, STEPS - 1):
        for which in (0, 1):
            values = data()
            values[which][place] = value
            check(call, values, 3)


def test_growth(call):
    x, _, start = data()
    check(call, (x, np.full(STEPS, 2.5), start), 3)
    check(call, (x, np.full(STEPS, 1.3), start), 3, rtol=1e-6)


def test_zero_steps(call):
    with pytest.raises(IndexError):  # there is no last row
        call(*data(0))


def test_forked_process(call):
    in_forked_process(call, data())


@pytest.mark.slow
@MODELS
def test_one_thread_and_two(mode):
    """Chunks start from what those before them end with: the bits are those of one thread."""
    inputs, outputs = series("float32")
    one, two = (compiled(inputs, outputs[:2], count, mode) for count in (1, 2))
    x, _, start = data(40_000, dtype="float32")
    values = x, np.full_like(x, 1.05), start
    for first, second in zip(one(*values), two(*values), strict=True):
        assert first.tobytes() == second.tobytes()


@pytest.mark.slow
@MODELS
def test_walks_backwards(mode):
    x, start = pt.dvector("x"), pt.dvector("start")
    loop = {"outputs_info": {"initial": start, "taps": [-1, -2, -3]}, "go_backwards": True}
    y = trace(lambda x, p, q, r: 0.5 * p - 0.3 * q + 0.1 * r + x, sequences=x, **loop)
    outputs = [y, pytensor.grad(pt.sum(pt.sin(y)), start)]
    one, two = (compiled([x, start], outputs, count, mode) for count in (1, 3))
    for steps in (3, STEPS):
        values = data(steps)[0], np.array([0.1, 0.2, 0.3])
        assert_repeats(two, values, one(*values), rtol=1e-10, atol=1e-12)


@pytest.mark.slow
def test_which_loops_are_chunks():
    x, start = pt.dvector("x"), pt.dvector("start")

    def how(step, *taps):
        y = trace(step, sequences=x, outputs_info={"initial": start, "taps": list(taps)})
        function = pytensor.function([x, start], y, mode=MODES["c"])
        (op,) = (n.op for n in function.maker.fgraph.apply_nodes if isinstance(n.op, ElemwiseScan))
        return can_chunk(op)

    assert how(lambda x, p, q: 0.5 * p - 0.3 * q + x, -1, -2)
    assert how(lambda x, p, q: 0.5 * p - 0.3 * q + x, -1, -12)
    assert how(lambda x, p, q: p + q + x, -1, -2)
    assert not how(lambda x, p: p + x, -1)  # nothing is forgotten
    assert not how(lambda x, p: pt.maximum(p, x), -1)


def test_explained():
    _, (y, *_) = series()
    for mode in ("numba", "c"):
        with pytensor.config.change_flags(scanlib__threads=2, **SMALL):
            (loop,) = scanlib.explain(y, MODES[mode]).loops
        assert loop.threads == 2
        assert "if coefficients decay" in loop.shares
