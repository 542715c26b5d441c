"""Kalman filter and smoother: the trend of core prices in the United States.

A local linear trend: the logarithm of prices has a level and a slope, both of which drift; what is
observed is the level with noise. The filter goes forwards and gives the likelihood that is
maximized; the smoother goes backwards. The smoothed slope is a measure of trend inflation. Prices
are those that the ``arch`` package ships.

Sources: R. Kalman, "A new approach to linear filtering and prediction problems", Journal of Basic
Engineering 82, 1960; H. Rauch, F. Tung and C. Striebel, "Maximum likelihood estimates of linear
dynamic systems", AIAA Journal 3, 1965.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable
from scipy.optimize import minimize

import scanlib

Array = np.ndarray[Any, Any]
MOVE = np.array([[1.0, 1.0], [0.0, 1.0]])
READ = np.array([1.0, 0.0])


def kalman_filter(
    y: TensorVariable,
    move: TensorVariable,
    read: TensorVariable,
    drift: TensorVariable,
    noise: TensorVariable,
    mean: TensorVariable,
    spread: TensorVariable,
) -> list[TensorVariable]:
    """Filtered means and covariances, the predicted ones before them, and log-densities.

    The state moves as ``m -> move m`` with covariance ``drift``; an observation is ``read . m``
    with variance ``noise``. ``mean`` and ``spread`` are those before the first step.
    """

    def step(state: Any, y: TensorVariable) -> Any:
        mean, spread = state
        expected = move @ mean
        before = move @ spread @ move.T + drift
        error = y - read @ expected
        variance = read @ before @ read + noise
        gain = before @ read / variance
        mean = expected + gain * error
        spread = before - pt.outer(gain, read @ before)
        density = -0.5 * (pt.log(2 * np.pi * variance) + error**2 / variance)
        return (mean, spread), [mean, spread, expected, before, density]

    return scanlib.loop(step, (mean, spread), y)[1]


def kalman_smoother(
    move: TensorVariable,
    means: TensorVariable,
    spreads: TensorVariable,
    expected: TensorVariable,
    before: TensorVariable,
) -> list[TensorVariable]:
    """Means and covariances given all observations, from what the filter returned."""

    def step(later: Any, rows: Any) -> Any:
        mean, spread, expected, before = rows
        gain = spread @ move.T @ pt.linalg.inv(before)
        mean = mean + gain @ (later[0] - expected)
        smooth = mean, spread + gain @ (later[1] - before) @ gain.T
        return smooth, smooth

    last = means[-1], spreads[-1]
    rows = means[:-1], spreads[:-1], expected[1:], before[1:]
    _, (smooth, narrow) = scanlib.loop(step, last, rows, reverse=True)
    return [pt.concatenate([smooth, means[-1:]]), pt.concatenate([narrow, spreads[-1:]])]


def load_prices() -> tuple[Any, Array]:
    """Months, and 100 times the logarithm of core consumer prices."""
    from arch.data import core_cpi

    prices = core_cpi.load().iloc[:, 0].dropna()
    return prices.index, 100.0 * np.log(prices.to_numpy())


def fit(y: Array) -> tuple[Array, Array, Array]:
    """Return the three variances, and smoothed means and covariances."""
    free = pt.dvector("free")
    variances = pt.exp(free)
    move, read = pt.constant(MOVE), pt.constant(READ)
    start = [pt.constant(np.array([y[0], 0.0])), pt.constant(np.diag([1.0, 1.0]))]
    filtered = kalman_filter(
        pt.constant(y), move, read, pt.diag(variances[:2]), variances[2], *start
    )
    cost = -pt.mean(filtered[-1])
    compiled = pytensor.function([free], [cost, pytensor.grad(cost, free)])
    found = minimize(lambda v: tuple(compiled(v)), np.log([1e-2, 1e-3, 1e-2]), jac=True)
    smoothed = kalman_smoother(move, *filtered[:4])
    return tuple(pytensor.function([free], [variances, *smoothed])(found.x))


def draw(path: str | Path) -> None:
    """Fit the variances and draw the smoothed slope with its band."""
    from matplotlib import pyplot as plt

    months, y = load_prices()
    _, means, spreads = fit(y)
    slope, deviation = 12 * means[:, 1], 12 * np.sqrt(spreads[:, 1, 1])
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axes.plot(months[1:], 12 * np.diff(y), color="0.75", linewidth=0.7, label="month by month")
    axes.plot(months, slope, color="tab:blue", linewidth=1.2, label="smoothed slope")
    axes.fill_between(
        months, slope - 2 * deviation, slope + 2 * deviation, color="tab:blue", alpha=0.25, lw=0
    )
    axes.set(ylabel="% a year", title="Core inflation: local linear trend, ± 2 deviations")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "kalman.png")
