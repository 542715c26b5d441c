"""Filters and smoothers held against those of statsmodels and of pymc-extras."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from scanlib import StateSpace, kalman_smoother
from tests.checks import evaluate

rng = np.random.default_rng(1)
# What scanlib calls an argument, and statsmodels and pymc-extras.
NAMES = {
    "initial_mean": "initial_state",
    "initial_cov": "initial_state_cov",
    "state_intercept": "state_intercept",
    "observation_intercept": "obs_intercept",
    "transition": "transition",
    "observation": "design",
    "selection": "selection",
    "observation_cov": "obs_cov",
    "state_cov": "state_cov",
}
ONCE = {"initial_mean": 1, "state_intercept": 1, "observation_intercept": 1}  # dimensions, or 2


def sarimax(steps):
    """Return observations with gaps and the matrices that statsmodels has for a SARIMAX model.

    Seven of its eight states have no disturbance, and nothing is added to the observation.
    """
    module = pytest.importorskip("statsmodels.tsa.statespace.sarimax")
    y = np.cumsum(rng.normal(size=steps))
    y[steps // 3 : steps // 3 + 20] = np.nan
    model = module.SARIMAX(y, order=(2, 1, 1), seasonal_order=(1, 0, 1, 4))
    model.update([0.3, -0.2, 0.4, 0.5, 0.2, 1.3])
    size, given = model.k_states, {}
    for ours, theirs in NAMES.items():
        if ours not in ("initial_mean", "initial_cov"):
            value = np.asarray(model.ssm[theirs])
            core = ONCE.get(ours, 2)
            given[ours] = value[..., 0] if value.ndim > core else value
    return y[:, None], given | {"initial_mean": np.zeros(size), "initial_cov": 10.0 * np.eye(size)}


def varying(steps, m=3, p=2):
    """Return observations with gaps and matrices that vary; two disturbances for three states."""
    noise = rng.normal(size=(steps, p, p))
    given = {
        "initial_mean": rng.normal(size=m),
        "initial_cov": np.eye(m),
        "state_intercept": rng.normal(size=(steps, m)),
        "observation_intercept": rng.normal(size=(steps, p)),
        "transition": 0.4 * rng.normal(size=(steps, m, m)),
        "observation": rng.normal(size=(steps, p, m)),
        "selection": rng.normal(size=(steps, m, 2)),
        "observation_cov": noise @ noise.swapaxes(1, 2) + 0.3 * np.eye(p),
        "state_cov": np.eye(2) * rng.uniform(0.5, 2, size=(steps, 1, 1)),
    }
    y = rng.normal(size=(steps, p))
    y[rng.random(y.shape) < 0.1] = np.nan
    y[steps // 2] = np.nan
    return y, given


CASES = {"sarimax": sarimax, "varying": varying}


def by_statsmodels(y, given):
    """Return log densities, and moments: filtered, predicted, smoothed."""
    module = pytest.importorskip("statsmodels.tsa.statespace.kalman_smoother")
    m, r = given["selection"].shape[-2:]
    model = module.KalmanSmoother(y.shape[1], m, r)
    model.bind(np.ascontiguousarray(y))
    for ours, theirs in NAMES.items():
        if ours not in ("initial_mean", "initial_cov"):
            value = given[ours]
            value = np.moveaxis(value, 0, -1) if value.ndim > ONCE.get(ours, 2) else value
            model[theirs] = value if ours not in ONCE or value.ndim == 2 else value[:, None]
    model.initialize_known(given["initial_mean"], given["initial_cov"])
    model.tolerance = 0  # no step takes the gain of the one before
    found = model.smooth()
    moments = [
        np.moveaxis(getattr(found, f"{kind}_state{what}"), -1, 0)
        for kind in ("filtered", "predicted", "smoothed")
        for what in ("", "_cov")
    ]
    return [found.llf_obs, *moments]


def by_pymc_extras(y, given):
    """Return the same, of graphs that run in Python: there is nothing to compile."""
    filters = pytest.importorskip("pymc_extras.statespace.filters")
    smoothers = pytest.importorskip("pymc_extras.statespace.filters.kalman_smoother")
    timed = [NAMES[n] for n, v in given.items() if v.ndim > ONCE.get(n, 2) and "initial" not in n]
    symbols = [pt.TensorType("float64", given[name].shape)() for name in NAMES]
    data = pt.TensorType("float64", y.shape)()
    # Without the number that they add to diagonals.
    passed = filters.StandardFilter(timed, cov_jitter=0.0).build_graph(data, *symbols)
    smoother = smoothers.DisturbanceSmoother(timed, cov_jitter=0.0)
    smooth = smoother.build_graph(data, symbols, passed)
    order = (6, 0, 3, 1, 4)
    outputs = [*(passed[i] for i in order), *smooth]
    function = pytensor.function([data, *symbols], outputs, mode="FAST_COMPILE")
    return function(y, *(given[name] for name in NAMES))


def ours(y, given, method, mode):
    symbols = {name: pt.TensorType("float64", v.shape)(name) for name, v in given.items()}
    rows = pt.matrix("y")
    smooth = kalman_smoother(rows, StateSpace(**symbols), method=method)
    found = smooth.filtered
    outputs = [found.log_densities, found.mean, found.cov, found.predicted_mean]
    outputs += [found.predicted_cov, smooth.mean, smooth.cov]
    return evaluate(outputs, {rows: y} | {symbols[n]: v for n, v in given.items()}, mode)


def assert_close(found, expected, given):
    """Hold results to 1e-8, relative to the greatest of each; missing densities are zero."""
    for k, (own, other) in enumerate(zip(found, expected, strict=True)):
        own = own[: len(other)]  # pymc-extras leaves out the prediction of what follows
        scale = np.abs(other).max()
        np.testing.assert_allclose(own, other, rtol=1e-8, atol=1e-8 * scale, err_msg=f"result {k}")
    np.testing.assert_allclose(found[0].sum(), expected[0].sum(), rtol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sequential", "parallel", "square-root"])
@pytest.mark.parametrize("other", [by_statsmodels, by_pymc_extras])
@pytest.mark.parametrize("case", CASES)
def test_10_000_steps(case, other, method, fast_mode):
    y, given = CASES[case](10_000)
    assert_close(ours(y, given, method, fast_mode), other(y, given), given)
