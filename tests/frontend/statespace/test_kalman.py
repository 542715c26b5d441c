"""The Kalman filter and smoother against the textbook's formulas in NumPy, and statsmodels."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib import StateSpace, kalman_filter, kalman_sample, kalman_smoother
from tests.checks import assert_derivatives, assert_same, evaluate

rng = np.random.default_rng(1)
STEPS = 12
FIELDS = (
    "transition",
    "observation",
    "state_cov",
    "observation_cov",
    "initial_mean",
    "initial_cov",
    "state_intercept",
    "observation_intercept",
    "selection",
)


def covariance(size, rank=None):
    root = rng.normal(size=(size, size if rank is None else rank))
    return root @ root.T / size


def parts(kind, m=3, p=2, r=3):
    """Return the arrays of a model."""
    timed = (STEPS,) if kind == "varying" else ()
    given = {
        "transition": 0.5 * rng.normal(size=(*timed, m, m)),
        "observation": rng.normal(size=(*timed, p, m)),
        "state_cov": covariance(r),
        "observation_cov": covariance(p) + 0.2 * np.eye(p),
        "initial_mean": rng.normal(size=m),
        "initial_cov": covariance(m),
    }
    if kind in ("varying", "intercepts"):
        given["state_intercept"] = rng.normal(size=(*timed, m))
        given["observation_intercept"] = rng.normal(size=p)
        given["selection"] = rng.normal(size=(*timed, m, r))
    if kind == "singular":
        given["state_cov"] = np.diag([1.0, 0.0, 0.0])
        given["initial_cov"] = np.zeros((m, m))
    return given


def at(given, name, t, default):
    value = given.get(name)
    if value is None:
        return default
    core = {"initial_mean": 1, "state_intercept": 1, "observation_intercept": 1}.get(name, 2)
    return value[t] if value.ndim > core else value


def textbook(y, given):
    """Return the log density of each step, filtered, predicted and smoothed moments."""
    a, cov = given["initial_mean"], given["initial_cov"]
    m = len(a)
    before, after, densities, moves = [], [], [], []
    for t, row in enumerate(y):
        z, h = at(given, "observation", t, None), at(given, "observation_cov", t, None)
        d = at(given, "observation_intercept", t, np.zeros(len(row)))
        before.append((a, cov))
        seen = ~np.isnan(row)
        density = 0.0
        if seen.any():
            z, h, d = z[seen], h[np.ix_(seen, seen)], d[seen]
            s = z @ cov @ z.T + h
            v = row[seen] - z @ a - d
            gain = cov @ z.T @ np.linalg.inv(s)
            density = -0.5 * (
                v @ np.linalg.solve(s, v) + np.linalg.slogdet(s)[1] + len(v) * np.log(2 * np.pi)
            )
            a, cov = a + gain @ v, cov - gain @ s @ gain.T
        densities.append(density)
        after.append((a, cov))
        f, q = at(given, "transition", t, None), at(given, "state_cov", t, None)
        c, r = at(given, "state_intercept", t, np.zeros(m)), at(given, "selection", t, np.eye(m))
        moves.append(f)
        a, cov = f @ a + c, f @ cov @ f.T + r @ q @ r.T
    before.append((a, cov))
    smooth = [after[-1]] if after else []
    for t in range(len(after) - 2, -1, -1):
        gain = after[t][1] @ moves[t].T @ np.linalg.pinv(before[t + 1][1], rcond=1e-12)
        mean = after[t][0] + gain @ (smooth[0][0] - before[t + 1][0])
        spread = after[t][1] + gain @ (smooth[0][1] - before[t + 1][1]) @ gain.T
        smooth.insert(0, (mean, spread))
    stacked = [np.stack(column) for pairs in (after, before, smooth) for column in zip(*pairs)]
    return [np.array(densities), *stacked]


def results(filtered, smooth=None):
    found = [
        filtered.log_densities,
        filtered.mean,
        filtered.cov,
        filtered.predicted_mean,
        filtered.predicted_cov,
    ]
    return found if smooth is None else [*found, smooth.mean, smooth.cov]


def observations(kind, p=2):
    y = rng.normal(size=(STEPS, p))
    if kind == "missing":
        y[2], y[5, 0], y[-1, 1] = np.nan, np.nan, np.nan
    return y


KINDS = ["plain", "varying", "intercepts", "singular", "missing"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_filter_and_smoother(kind, mode):
    given, y = parts(kind), observations(kind)
    symbols = {pt.TensorType("float64", v.shape)(name): v for name, v in given.items()}
    model = StateSpace(**dict(zip(given, symbols, strict=True)))
    rows = pt.matrix("y")
    smooth = kalman_smoother(rows, model)
    found = evaluate(results(smooth.filtered, smooth), {rows: y, **symbols}, mode)
    assert_same(found, textbook(y, given), rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["parallel", "square-root"])
def test_associative_elements(kind, method, mode):
    given, y = parts(kind), observations(kind)
    smooth = kalman_smoother(y, StateSpace(**given), method=method)
    found = evaluate(results(smooth.filtered, smooth), {}, mode)
    assert_same(found, textbook(y, given), rtol=1e-8, atol=1e-9)
