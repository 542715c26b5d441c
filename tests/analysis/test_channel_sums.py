"""Sums over channels that a step multiplies, divides or adds up: factors stay outside."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.families import loops
from tests.modes import MODES
from tests.reference import reference_scan

STEPS = 5
# Factors by which a sum is no sum of products: 0 · ∞, and products that overflow.
FACTORS = [np.inf, -np.inf, np.nan, 0.0, 1e-200, 5e-324, 2.0]
HUGE = 1e200  # not where products are added up: fused additions have no infinite product
CHANNELS = np.array([[0.0, 1.0, 2.0], [1e200, -1e200, 1.0], [1e308, 1e308, -1e308]])


@pytest.fixture(params=["numba", "c"])
def mode(request):
    return MODES[request.param]


def compiled(step, inputs, mode, **options):
    """Return a function of the arguments of `scan`, whose loops are all elementwise."""
    sequences, states, weights = inputs
    traces, _ = scanlib.scan(step, sequences, states, weights, return_list=True, **options)
    given = [v for v in [*sequences, *states, *weights] if v is not None]
    function = pytensor.function(given, traces, mode=mode)
    found = loops(function)
    assert found
    assert all(isinstance(op, ElemwiseScan) for op in found)
    return function


def check(function, step, sequences, states, weights=(), **options):
    """Compare with the plain loop, where there is NaN and infinity as well."""
    with np.errstate(all="ignore"):
        expected = reference_scan(step, sequences, states, weights, **options)
    given = [v for v in [*sequences, *states, *weights] if v is not None]
    for actual, wanted in zip(function(*given), expected, strict=True):
        np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-320)


OUTPUTS = {
    "product": lambda x, f, h: [x * h, h.sum() * f],
    "quotient": lambda x, f, h: [x * h, h.sum() / f],
    "of products": lambda x, f, h: [x * h, (x * h).sum() * f],
    "inside": lambda x, f, h: [x * h, (h * f).sum()],
    "both": lambda x, f, h: [x * h, -(h * f).sum() * f * 0.5],
    "of a state": lambda x, f, h: [x * h, h.sum() * h[0] * f],
}


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "of a state"])
def test_factors_of_outputs(name, mode):
    step = OUTPUTS[name]
    inputs = [pt.matrix("x"), pt.vector("f")], [pt.vector("h"), None], []
    function = compiled(step, inputs, mode)
    inside = name in ("inside", "both")  # where products are added up, rounding decides
    for start in CHANNELS[:1] if inside else CHANNELS:
        for factor in [*FACTORS, HUGE]:
            rows = np.tile([1.0, -1.0, 0.5], (STEPS, 1))
            check(function, step, [rows, np.full(STEPS, factor)], [start, None])
    check(function, step, [np.ones((1, 3)), np.ones(1)], [np.ones(3), None])
    none = function(np.ones((0, 3)), np.ones(0), np.ones(3))
    assert [value.shape for value in none] == [(0, 3), (0,)]


ADDED = {
    "product": lambda x, f, h, w: [x * h, f * h.sum()],
    "fixed factor": lambda x, f, h, w: [x * h, w * h.sum()],
    "several terms": lambda x, f, h, w: [x * h, h.sum() / f + w + f],
    "two sums": lambda x, f, h, w: [x * h, h.sum() * f + (x * h).sum()],
    "mean": lambda x, f, h, w: [x * h, h.mean() * f],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ADDED)
def test_factors_of_accumulated_sums(name, mode):
    """Totals over time of what has factors at each step."""
    step = ADDED[name]
    x, f, h, w = pt.matrix("x"), pt.vector("f"), pt.vector("h", shape=(3,)), pt.scalar("w")
    traces, _ = scanlib.scan(step, [x, f], [h, None], w, return_list=True)
    function = pytensor.function(
        [x, f, h, w], [traces[0], traces[1].sum()], mode=mode, on_unused_input="ignore"
    )
    assert all(isinstance(op, ElemwiseScan) for op in loops(function))
    for start in CHANNELS:
        for factor in FACTORS:
            rows = np.tile([1.0, -1.0, 0.5], (STEPS, 1))
            given = [rows, np.full(STEPS, factor), start, factor]
            with np.errstate(all="ignore"):
                expected = reference_scan(step, given[:2], [start, None], given[3:])
                expected[1] = np.cumsum(expected[1])[-1]
            for actual, wanted in zip(function(*given), expected, strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-320)


def test_factors_that_are_states(mode):
    step = lambda x, f, h, g: [x * h, g * f, h.sum() * g]  # noqa: E731
    inputs = [pt.matrix("x"), pt.vector("f")], [pt.vector("h"), pt.scalar("g"), None], []
    function = compiled(step, inputs, mode)
    for start in CHANNELS:
        for factor in (2.0, np.inf, HUGE):
            rows = np.tile([1.0, -1.0, 0.5], (STEPS, 1))
            check(function, step, [rows, np.full(STEPS, 1.5)], [start, np.float64(factor), None])


@pytest.mark.slow
def test_factors_of_sums_over_some_channels(mode):
    step = lambda x, f, h: [x * h, h.sum(axis=1) * f, h.sum(axis=0) * 1e-200]  # noqa: E731
    inputs = [pt.tensor3("x"), pt.matrix("f")], [pt.matrix("h"), None, None], []
    function = compiled(step, inputs, mode)
    rng = np.random.default_rng(1)
    for factor in FACTORS:
        rows, factors = rng.normal(size=(STEPS, 2, 3)), np.full((STEPS, 2), factor)
        check(function, step, [rows, factors], [CHANNELS[:2].copy(), None, None])


def test_factors_in_a_loop_that_stops(mode):
    """The second loop takes as many steps as the first."""

    def symbolic(x, f, h):
        return [x * h, h.sum() * f], scanlib.until(pt.gt(f, 3.5))

    step = lambda x, f, h: [x * h, h.sum() * f, f > 3.5]  # noqa: E731
    inputs = [pt.matrix("x"), pt.vector("f")], [pt.vector("h"), None], []
    function = compiled(symbolic, inputs, mode)
    rows, factors = np.tile([1.0, -1.0, 0.5], (STEPS, 1)), np.array([np.inf, 1e200, 4.0, 1.0, 9.0])
    check(function, step, [rows, factors], [CHANNELS[1], None], until=True)


def test_gradients_of_products_with_sums(mode):
    """Cotangents walk backwards, and add up sums over channels times what they are owed."""
    x, f, h = pt.matrix("x"), pt.vector("f"), pt.vector("h")
    w = pt.scalar("w")
    traces, _ = scanlib.scan(
        lambda x, f, h, w: [w * x * h, h.sum() * f], [x, f], [h, None], w, return_list=True
    )
    wanted = pytensor.grad((traces[1] ** 2).sum(), [x, f, h, w])
    function = pytensor.function([x, f, h, w], wanted, mode=mode)
    with pytensor.config.change_flags(scanlib__lower=False):
        plain = pytensor.function([x, f, h, w], wanted, mode=MODES["py"])
    rng = np.random.default_rng(2)
    given = [rng.normal(size=(7, 3)), rng.normal(size=7), rng.normal(size=3), 0.9]
    for factor in (1.0, 1e-150, 1e150, np.inf):
        scaled = [given[0], given[1] * factor, *given[2:]]
        for actual, expected in zip(function(*scaled), plain(*scaled), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-11)
