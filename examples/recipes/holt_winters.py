"""Holt-Winters: level, trend and season of a monthly series, with fitted smoothing rates.

The season is a state that is read twelve steps back: a loop with one far tap. The series is
simulated, with a fixed seed.

Source: P. Winters, "Forecasting sales by exponentially weighted moving averages", Management
Science 6, 1960.
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
PERIOD = 12


def holt_winters(
    y: TensorVariable,
    rates: TensorVariable,
    level: TensorVariable,
    trend: TensorVariable,
    season: TensorVariable,
    period: int = PERIOD,
) -> list[TensorVariable]:
    """One-step forecasts, levels, trends and seasons; ``season`` has one row per month."""
    alpha, beta, gamma = rates[0], rates[1], rates[2]

    def step(carry: Any, y: TensorVariable) -> Any:
        level, trend, season = carry[0], carry[1], carry[2][period]
        new_level = alpha * (y - season) + (1 - alpha) * (level + trend)
        new_trend = beta * (new_level - level) + (1 - beta) * trend
        new = new_level, new_trend, gamma * (y - new_level) + (1 - gamma) * season
        return new, [level + trend + season, *new]

    return scanlib.loop(step, (level, trend, scanlib.lags(season, period)), y)[1]


def simulate(months: int = 144, seed: int = 5) -> Array:
    """A series whose trend and season drift."""
    rng = np.random.default_rng(seed)
    time = np.arange(months)
    trend = np.cumsum(0.4 + 0.03 * rng.normal(size=months).cumsum())
    swing = 8.0 + 0.05 * time
    return 60 + trend + swing * np.sin(2 * np.pi * time / PERIOD) + 2.0 * rng.normal(size=months)


def fit(y: Array, ahead: int = 24) -> tuple[Array, Array, Array]:
    """Return the three rates, the forecasts of one step, and those after the last row."""
    free = pt.dvector("free")
    start = y[:PERIOD]
    initial = [pt.constant(value) for value in (start.mean(), 0.0, start - start.mean())]
    rates = pt.sigmoid(free)
    expected, levels, trends, seasons = holt_winters(pt.constant(y), rates, *initial)
    cost = pt.mean((y[PERIOD:] - expected[PERIOD:]) ** 2)
    compiled = pytensor.function([free], [cost, pytensor.grad(cost, free)])
    found = minimize(lambda v: tuple(compiled(v)), np.array([-1.0, -3.0, -1.0]), jac=True)

    steps = np.arange(ahead)
    future = levels[-1] + (steps + 1) * trends[-1] + seasons[-PERIOD:][steps % PERIOD]
    describe = pytensor.function([free], [rates, expected, future])
    return tuple(describe(found.x))


def draw(path: str | Path) -> None:
    """Fit the rates and draw the series with its forecasts."""
    from matplotlib import pyplot as plt

    y = simulate()
    rates, expected, future = fit(y)
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axes.plot(y, "o", color="0.6", markersize=2.5, label="simulated series")
    axes.plot(expected, color="tab:blue", linewidth=1, label="forecast one month before")
    axes.plot(len(y) + np.arange(len(future)), future, color="tab:red", label="next 24 months")
    title = "Holt-Winters: α = {:.2f}, β = {:.2f}, γ = {:.2f}".format(*rates)
    axes.set(xlabel="month", title=title)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "holt_winters.png")
