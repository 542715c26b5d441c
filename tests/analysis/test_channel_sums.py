"""Sums over channels that a step multiplies or divides: factors stay outside."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.modes import MODES
from tests.reference import reference_scan

STEPS = 5
# Factors by which a sum is no sum of products: 0 · ∞, and products that overflow.
FACTORS = [np.inf, -np.inf, np.nan, 0.0, 1e-200, 5e-324, 2.0, 1e200]
CHANNELS = np.array([[0.0, 1.0, 2.0], [1e200, -1e200, 1.0], [1e308, 1e308, -1e308]])
OUTPUTS = {
    "product": lambda x, f, h: [x * h, h.sum() * f],
    "quotient": lambda x, f, h: [x * h, h.sum() / f],
    "of products": lambda x, f, h: [x * h, (x * h).sum() * f],
    "of the opposite": lambda x, f, h: [x * h, -h.sum() * f],
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_factors_of_outputs(name):
    step = OUTPUTS[name]
    x, f, h = pt.matrix("x"), pt.vector("f"), pt.vector("h")
    traces, _ = scanlib.scan(step, [x, f], [h, None], return_list=True)
    function = pytensor.function([x, f, h], traces, mode=MODES["c"])
    rows = np.tile([1.0, -1.0, 0.5], (STEPS, 1))
    for start in CHANNELS:
        for factor in FACTORS:
            given = [rows, np.full(STEPS, factor)]
            with np.errstate(all="ignore"):
                expected = reference_scan(step, given, [start, None])
            for actual, wanted in zip(function(*given, start), expected, strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=1e-12, atol=1e-320)


def test_a_negated_sum_is_added_up_over_time():
    """The gradient of a parameter that all channels share is such a sum."""
    x, h = pt.matrix("x"), pt.vector("h")
    traces, _ = scanlib.scan(
        lambda x, h, c: [x * h, c + (-(x * h).sum())], x, [h, np.float64(0)], return_list=True
    )
    function = pytensor.function([x, h], [traces[0], traces[1][-1]], mode=MODES["c"])
    rng = np.random.default_rng(0)
    rows, start = rng.normal(size=(STEPS, 3)), rng.normal(size=3)
    products = np.cumprod(rows, axis=0) * start
    trace, total = function(rows, start)
    np.testing.assert_allclose(trace, products, rtol=1e-12)
    np.testing.assert_allclose(total, -products.sum(), rtol=1e-12)
