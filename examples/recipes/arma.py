"""ARMA: monthly core inflation in the United States, fitted and forecast.

``y[t] = sum_i ar[i] y[t-i] + e[t] + sum_j ma[j] e[t-j]``, where ``y`` is inflation without its
mean. The errors ``e`` are a loop over their own past; least squares needs its gradient. Without
``ma`` this is an AR model. Prices are those that the ``arch`` package ships.

Source: G. Box and G. Jenkins, "Time series analysis: forecasting and control", 1970.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable
from scipy.optimize import minimize

import scanlib

Array = np.ndarray[Any, Any]
Coefficients = Sequence[TensorVariable]


def weigh(coefficients: Coefficients, past: Any) -> TensorVariable:
    """Return the weighted sum of past values; the first weight goes to the latest one."""
    return sum(weight * value for weight, value in zip(coefficients, past, strict=True))


def arma_errors(y: TensorVariable, ar: Coefficients, ma: Coefficients) -> TensorVariable:
    """Errors of one-step forecasts from row ``len(ar)`` on; those before it count as zero."""
    p, q = len(ar), len(ma)

    def step(errors: Any, y: Any) -> Any:
        error = y[0] - weigh(ar, y[1:]) - weigh(ma, errors)
        return error, error

    return scanlib.loop(step, scanlib.lags(pt.zeros(q), q), scanlib.lags(y, p))[1]


def arma_forecast(
    y: TensorVariable, errors: TensorVariable, ar: Coefficients, ma: Coefficients, steps: int
) -> TensorVariable:
    """Expected values after the last row of ``y``."""

    def step(past: Any, _: None) -> Any:
        expected = weigh(ar, past[0]) + weigh(ma, past[1])
        return (expected, 0.0), expected

    past = scanlib.lags(y, len(ar)), scanlib.lags(errors, len(ma))
    return scanlib.loop(step, past, length=steps)[1]


def load_inflation() -> tuple[Any, Array]:
    """Months, and core inflation in percent a year."""
    from arch.data import core_cpi

    prices = core_cpi.load().iloc[:, 0].dropna()
    return prices.index[1:], 1200.0 * np.diff(np.log(prices.to_numpy()))


def fit(inflation: Array, ahead: int = 36) -> tuple[Array, Array, Array]:
    """Return mean and coefficients of an ARMA(1, 1) model, its errors, and a forecast."""
    free = pt.dvector("free")
    mean, phi, theta = free[0], free[1], free[2]
    y = pt.constant(inflation) - mean
    errors = arma_errors(y, [phi], [theta])
    cost = pt.mean(errors**2)
    compiled = pytensor.function([free], [cost, pytensor.grad(cost, free)])
    found = minimize(lambda v: tuple(compiled(v)), [inflation.mean(), 0.9, -0.5], jac=True)
    forecast = mean + arma_forecast(y, errors, [phi], [theta], ahead)
    return found.x, *pytensor.function([free], [errors, forecast])(found.x)


def draw(path: str | Path) -> None:
    """Fit the model and draw inflation, the forecasts of one month, and the next three years."""
    from matplotlib import pyplot as plt

    months, inflation = load_inflation()
    (mean, phi, theta), errors, forecast = fit(inflation)
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    future = months[-1] + np.arange(1, len(forecast) + 1) * np.timedelta64(30, "D")
    axes.plot(months, inflation, color="0.75", linewidth=0.8, label="monthly core inflation")
    axes.plot(months[1:], inflation[1:] - errors, color="tab:blue", lw=1, label="forecast before")
    axes.plot(future, forecast, color="tab:red", label="next 36 months")
    axes.axhline(mean, color="0.4", linewidth=0.6, linestyle=":")
    axes.set(ylabel="% a year", title=f"ARMA(1, 1): φ = {phi:.2f}, θ = {theta:.2f}")
    axes.legend(frameon=False, ncols=3, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "arma.png")
