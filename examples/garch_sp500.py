"""Fit a GARCH(1,1) model to daily S&P 500 returns, with the gradient that scanlib computes.

The model of the return ``r[t]``, in percent, is::

    r[t] = mu + e[t],    e[t] ~ Normal(0, v[t])
    v[t] = omega + alpha * e[t-1]**2 + beta * v[t-1]

``v`` is a loop over time, and its log-likelihood is maximized with an exact gradient. Before the
first day both ``e**2`` and ``v`` are a weighted mean of the first squared deviations, the
convention of the ``arch`` package, whose own fit is printed next to ours: the example exits with
an error when the two differ.

Reference: T. Bollerslev, "Generalized autoregressive conditional heteroskedasticity", Journal of
Econometrics 31 (1986).
"""

import argparse
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import pytensor
import pytensor.tensor as pt
from arch import arch_model
from arch.data import sp500
from pytensor.tensor.variable import TensorVariable
from scipy.optimize import minimize

import scanlib

PARAMETERS = ("mu", "omega", "alpha", "beta")
TOLERANCE = 1e-3


def presample_variance(returns: pd.Series) -> float:
    """Mean of the first 75 squared deviations, each day weighing 0.94 of the day before it."""
    squares = (returns[:75] - returns.mean()) ** 2
    return float(np.average(squares, weights=0.94 ** np.arange(squares.size)))


def garch(free: TensorVariable, returns: pd.Series) -> tuple[TensorVariable, ...]:
    """Return the parameters, the log-likelihood and the variances, given four real numbers.

    ``omega`` is an exponential; ``alpha``, ``beta`` and what is missing to one are a softmax, so
    that all are positive and ``alpha + beta < 1``.
    """
    weights = pt.special.softmax(pt.concatenate([free[2:], [0.0]]))
    mu, omega, alpha, beta = free[0], pt.exp(free[1]), weights[0], weights[1]

    def step(variance: TensorVariable, square: TensorVariable) -> tuple[TensorVariable, ...]:
        following = omega + alpha * square + beta * variance
        return following, following

    start = presample_variance(returns)
    squares = (pt.constant(returns.to_numpy()) - mu) ** 2
    before = pt.concatenate([[start], squares[:-1]])
    _, variances = scanlib.loop(step, start, before, name="variance")
    log_likelihood = -0.5 * pt.sum(np.log(2.0 * np.pi) + pt.log(variances) + squares / variances)
    return pt.stack([mu, omega, alpha, beta]), log_likelihood, variances


def fit(returns: pd.Series) -> tuple[dict[str, float], pd.Series]:
    """Maximize the log-likelihood; return the estimate, with its value, and the variances."""
    clock = perf_counter()
    free = pt.dvector("free")
    parameters, log_likelihood, variances = garch(free, returns)
    # The mean over days keeps the optimizer's tolerances independent of the length of the series.
    cost = -log_likelihood / returns.size
    value_and_gradient = pytensor.function([free], [cost, pytensor.grad(cost, free)])
    describe = pytensor.function([free], [parameters, log_likelihood, variances])
    # A usual starting point: alpha = 0.1, beta = 0.85, and 0.05 for the rest.
    begin = np.array([returns.mean(), np.log(0.05 * returns.var()), np.log(2.0), np.log(17.0)])
    value_and_gradient(begin)
    describe(begin)
    compiling = perf_counter() - clock

    clock = perf_counter()
    found = minimize(value_and_gradient, begin, jac=True, method="BFGS", options={"gtol": 1e-7})
    fitting = perf_counter() - clock
    print(f"{found.nfev} values with gradient in {found.nit} iterations: {fitting:.3f} s, ", end="")
    print(f"after {compiling:.1f} s to compile\n\n{scanlib.explain(value_and_gradient)}\n")

    numbers, total, path = describe(found.x)
    estimate = dict(zip(PARAMETERS, numbers.tolist(), strict=True))
    return estimate | {"log-likelihood": float(total)}, pd.Series(path, index=returns.index)


def fit_arch(returns: pd.Series) -> dict[str, float]:
    """Return the same model's parameters and log-likelihood as ``arch`` fits them."""
    model = arch_model(returns, mean="Constant", vol="GARCH", p=1, q=1, dist="normal")
    result = model.fit(disp="off")
    estimate = dict(zip(PARAMETERS, result.params.tolist(), strict=True))
    return estimate | {"log-likelihood": float(result.loglikelihood)}


def draw(returns: pd.Series, variances: pd.Series, path: Path) -> None:
    """Draw the returns inside their fitted two-sigma band, above the yearly volatility."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    deviation, mean, days = np.sqrt(variances), returns.mean(), returns.index
    yearly = deviation * np.sqrt(252.0)  # trading days
    figure, axes = plt.subplots(2, figsize=(11, 7), sharex=True, layout="constrained")
    axes[0].plot(days, returns, color="0.35", linewidth=0.5, label="daily return")
    band: dict[str, Any] = {"color": "tab:orange", "alpha": 0.35, "linewidth": 0}
    band["label"] = "mean ± 2 fitted standard deviations"
    axes[0].fill_between(days, mean - 2 * deviation, mean + 2 * deviation, **band)
    axes[0].set(title="S&P 500: volatility fitted by GARCH(1,1)", ylabel="daily return (%)")
    axes[0].legend(loc="upper right", ncols=2, frameon=False)
    axes[1].plot(days, yearly, color="tab:orange", linewidth=1.0)
    axes[1].set(ylabel="fitted volatility\n(% a year)", ylim=(0.0, 1.12 * yearly.max()))
    peak = yearly.idxmax()
    axes[1].annotate(f"  {peak:%d %b %Y}: {yearly[peak]:.0f} %", xy=(peak, yearly[peak]))
    for axis in axes:
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=140)


def main() -> int:
    """Run the example; the exit status tells whether it agrees with ``arch``."""
    parser = argparse.ArgumentParser(description="GARCH(1,1) on the S&P 500, fitted with scanlib")
    parser.add_argument("--output", type=Path, default=Path("garch_sp500.png"))
    parser.add_argument("--no-plot", action="store_true", help="draw nothing")
    options = parser.parse_args()

    returns = 100.0 * sp500.load()["Adj Close"].pct_change().dropna()
    first, last = returns.index[0], returns.index[-1]
    print(f"{returns.size} daily returns, {first:%Y-%m-%d} to {last:%Y-%m-%d}")
    (ours, variances), theirs = fit(returns), fit_arch(returns)
    print(f"{'':>14} {'scanlib':>12} {'arch':>12} {'difference':>10}")
    differences = {name: abs(ours[name] / theirs[name] - 1.0) for name in ours}
    for name, difference in differences.items():
        print(f"{name:>14} {ours[name]:12.6f} {theirs[name]:12.6f} {difference:10.1e}")
    if not options.no_plot:
        draw(returns, variances, options.output)
        print(f"\ndrawn to {options.output}")
    if max(differences.values()) < TOLERANCE:
        return 0
    print(f"\na difference is {TOLERANCE:g} or more", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
