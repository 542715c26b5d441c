"""GARCH with leverage: the volatility of the NASDAQ, fitted by maximum likelihood.

``v[t] = omega + (alpha + gamma [e[t-1] < 0]) e[t-1]**2 + beta v[t-1]``: falls raise tomorrow's
variance more than rises do. Prices are those that the ``arch`` package ships.

Source: L. Glosten, R. Jagannathan and D. Runkle, "On the relation between the expected value and
the volatility of the nominal excess return on stocks", Journal of Finance 48, 1993.
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


def garch_variances(
    errors: TensorVariable,
    omega: TensorVariable,
    alpha: TensorVariable,
    gamma: TensorVariable,
    beta: TensorVariable,
    first: TensorVariable,
) -> TensorVariable:
    """Conditional variances of the errors, the first of which is given."""

    def step(variance: TensorVariable, error: TensorVariable) -> Any:
        return omega + (alpha + gamma * (error < 0)) * error**2 + beta * variance, variance

    return scanlib.loop(step, first, errors)[1]


def log_likelihood(errors: TensorVariable, variances: TensorVariable) -> TensorVariable:
    """The sum of normal log-densities."""
    return -0.5 * pt.sum(np.log(2 * np.pi) + pt.log(variances) + errors**2 / variances)


def load_returns() -> Any:
    """Daily returns of the NASDAQ in percent, as a series."""
    from arch.data import nasdaq

    return 100.0 * nasdaq.load()["Adj Close"].pct_change().dropna()


def fit(returns: Array) -> tuple[Array, Array]:
    """Return ``omega, alpha, gamma, beta`` and the fitted variances."""
    free = pt.dvector("free")
    omega, alpha, gamma, beta = (pt.exp(free[i]) for i in range(4))
    errors = pt.constant(returns - returns.mean())
    variances = garch_variances(errors, omega, alpha, gamma, beta, pt.constant(returns.var()))
    cost = -log_likelihood(errors, variances) / len(returns)
    compiled = pytensor.function([free], [cost, pytensor.grad(cost, free)])
    start = np.log([0.05 * returns.var(), 0.05, 0.05, 0.85])
    found = minimize(lambda v: tuple(compiled(v)), start, jac=True)
    return np.exp(found.x), pytensor.function([free], variances)(found.x)


def draw(path: str | Path) -> None:
    """Fit the model and draw the volatility."""
    from matplotlib import pyplot as plt

    returns = load_returns()
    (_, alpha, gamma, beta), variances = fit(returns.to_numpy())
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axes.plot(returns.index, returns, color="0.75", linewidth=0.5, label="daily return")
    axes.plot(returns.index, np.sqrt(variances), color="tab:red", lw=1, label="fitted volatility")
    title = f"NASDAQ: α = {alpha:.3f}, γ = {gamma:.3f}, β = {beta:.3f}"
    axes.set(ylabel="%", title=title)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "garch.png")
