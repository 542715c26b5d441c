"""Fit a GARCH(1,1) model to daily S&P 500 returns, with the gradient that scanlib computes.

The model of the return ``r[t]``, in percent, is::

    r[t] = mu + e[t],    e[t] ~ Normal(0, v[t])
    v[t] = omega + alpha * e[t-1]**2 + beta * v[t-1]

``v`` is a loop over time, and its log-likelihood is maximized with an exact gradient, which is a
loop backwards over time. Before the first day both ``e**2`` and ``v`` are a weighted mean of the
first squared deviations, the convention of the ``arch`` package, whose own fit is printed next to
ours: the example exits with an error when the two differ.

Reference: T. Bollerslev, "Generalized autoregressive conditional heteroskedasticity", Journal of
Econometrics 31 (1986).
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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

Array = np.ndarray[Any, Any]

PARAMETERS = ("mu", "omega", "alpha", "beta")
TRADING_DAYS = 252
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Garch:
    """The compiled model: functions of the unconstrained parameters."""

    value_and_gradient: Callable[[Array], tuple[Array, Array]]
    describe: Callable[[Array], tuple[Array, Array, Array]]


@dataclass(frozen=True)
class Fit:
    """Maximum-likelihood estimate, its conditional variances and what finding it took."""

    parameters: dict[str, float]
    log_likelihood: float
    variances: Array
    evaluations: int
    iterations: int
    compile_seconds: float
    fit_seconds: float


def load_returns() -> pd.Series:
    """Daily percent returns of the S&P 500, from the prices that ``arch`` ships."""
    prices = sp500.load()["Adj Close"]
    return 100.0 * prices.pct_change().dropna()


def presample_variance(returns: Array) -> float:
    """Mean of the first 75 squared deviations, each day weighing 0.94 of the day before it."""
    squares = (returns[:75] - returns.mean()) ** 2
    return float(np.average(squares, weights=0.94 ** np.arange(squares.size)))


def constrain(free: TensorVariable) -> tuple[TensorVariable, ...]:
    """Map four real numbers to the parameters of a stationary model.

    ``omega`` is an exponential; ``alpha``, ``beta`` and what is missing to one are a softmax, so
    that all are positive and ``alpha + beta < 1``.
    """
    weights = pt.special.softmax(pt.concatenate([free[2:], [0.0]]))
    return free[0], pt.exp(free[1]), weights[0], weights[1]


def unconstrain(mu: float, omega: float, alpha: float, beta: float) -> Array:
    """Inverse of :func:`constrain`."""
    rest = 1.0 - alpha - beta
    return np.array([mu, np.log(omega), np.log(alpha / rest), np.log(beta / rest)])


def compile_model(returns: Array) -> Garch:
    """Build the log-likelihood with one loop over time and compile it with its gradient."""
    free = pt.dvector("free")
    mu, omega, alpha, beta = constrain(free)
    presample = pt.constant(presample_variance(returns))

    squares = (pt.constant(returns) - mu) ** 2
    variances = scanlib.scan(
        lambda square, variance, omega, alpha, beta: omega + alpha * square + beta * variance,
        sequences=[pt.concatenate([presample[None], squares[:-1]])],
        outputs_info=[presample],
        non_sequences=[omega, alpha, beta],
        return_updates=False,
    )
    log_likelihood = -0.5 * pt.sum(np.log(2.0 * np.pi) + pt.log(variances) + squares / variances)

    # The mean over days keeps the optimizer's tolerances independent of the length of the series.
    cost = -log_likelihood / returns.size
    return Garch(
        value_and_gradient=pytensor.function([free], (cost, pytensor.grad(cost, free))),
        describe=pytensor.function(
            [free], (pt.stack([mu, omega, alpha, beta]), log_likelihood, variances)
        ),
    )


def fit(returns: Array) -> Fit:
    """Maximize the log-likelihood from a usual starting point."""
    start = unconstrain(returns.mean(), omega=0.05 * returns.var(), alpha=0.10, beta=0.85)

    clock = perf_counter()
    model = compile_model(returns)
    model.value_and_gradient(start)  # the first calls compile
    model.describe(start)
    compile_seconds = perf_counter() - clock

    clock = perf_counter()
    found = minimize(
        lambda free: tuple(model.value_and_gradient(free)),
        start,
        jac=True,
        method="BFGS",
        options={"gtol": 1e-7},
    )
    fit_seconds = perf_counter() - clock

    parameters, log_likelihood, variances = model.describe(found.x)
    return Fit(
        parameters=dict(zip(PARAMETERS, parameters.tolist(), strict=True)),
        log_likelihood=float(log_likelihood),
        variances=variances,
        evaluations=int(found.nfev),
        iterations=int(found.nit),
        compile_seconds=compile_seconds,
        fit_seconds=fit_seconds,
    )


def fit_arch(returns: pd.Series) -> tuple[dict[str, float], float]:
    """The same model fitted by ``arch``: parameters and log-likelihood."""
    result = arch_model(returns, mean="Constant", vol="GARCH", p=1, q=1, dist="normal").fit(
        disp="off"
    )
    parameters = dict(zip(PARAMETERS, result.params.tolist(), strict=True))
    return parameters, float(result.loglikelihood)


def relative_difference(value: float, expected: float) -> float:
    """Difference as a fraction of the expected value."""
    return abs(value - expected) / abs(expected)


def draw(returns: pd.Series, variances: Array, path: Path) -> None:
    """Draw the returns inside their fitted two-sigma band, above the yearly volatility."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    deviation = pd.Series(np.sqrt(variances), index=returns.index)
    yearly = deviation * np.sqrt(TRADING_DAYS)
    band = 2.0 * deviation
    mean = returns.mean()

    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(11, 7), sharex=True, height_ratios=[3, 2], layout="constrained"
    )
    top.plot(returns.index, returns, color="0.35", linewidth=0.5, label="daily return")
    top.fill_between(
        returns.index,
        mean - band,
        mean + band,
        color="tab:orange",
        alpha=0.35,
        linewidth=0,
        label="mean ± 2 fitted standard deviations",
    )
    top.set_ylabel("daily return (%)")
    top.set_title("S&P 500: daily returns and the volatility fitted by GARCH(1,1)")
    top.legend(loc="upper right", ncols=2, frameon=False)

    bottom.plot(yearly.index, yearly, color="tab:orange", linewidth=1.0)
    bottom.set_ylabel("fitted volatility\n(% a year)")
    bottom.set_xlabel("date")
    bottom.set_ylim(0.0, 1.12 * yearly.max())
    peak = yearly.index[int(np.argmax(yearly.to_numpy()))]
    bottom.annotate(
        f"{peak:%d %b %Y}: {yearly[peak]:.0f} %",
        xy=(peak, yearly[peak]),
        xytext=(12, -4),
        textcoords="offset points",
    )
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.margins(x=0.01)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def compare(ours: Fit, theirs: dict[str, float], their_log_likelihood: float) -> bool:
    """Print both fits next to each other and tell whether the parameters agree."""
    print(f"{'':>14}  {'scanlib':>12}  {'arch':>12}  {'difference':>10}")
    agree = True
    for name in PARAMETERS:
        value, expected = ours.parameters[name], theirs[name]
        difference = relative_difference(value, expected)
        agree &= difference < TOLERANCE
        print(f"{name:>14}  {value:12.6f}  {expected:12.6f}  {difference:10.1e}")
    difference = relative_difference(ours.log_likelihood, their_log_likelihood)
    print(
        f"{'log-likelihood':>14}  {ours.log_likelihood:12.4f}  {their_log_likelihood:12.4f}"
        f"  {difference:10.1e}"
    )
    return agree


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the example; the exit status tells whether it agrees with ``arch``."""
    parser = argparse.ArgumentParser(description="GARCH(1,1) on the S&P 500, fitted with scanlib")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("garch_sp500.png"),
        help="where to draw the returns and the fitted volatility (default: %(default)s)",
    )
    parser.add_argument("--no-plot", action="store_true", help="draw nothing")
    options = parser.parse_args(arguments)

    returns = load_returns()
    first, last = returns.index[0], returns.index[-1]
    print(f"S&P 500, {returns.size} daily returns, {first:%Y-%m-%d} to {last:%Y-%m-%d}")

    ours = fit(returns.to_numpy())
    print(
        f"{ours.evaluations} evaluations of value and gradient in {ours.iterations} iterations: "
        f"{ours.fit_seconds:.3f} s, after {ours.compile_seconds:.1f} s to compile\n"
    )
    agree = compare(ours, *fit_arch(returns))

    if not options.no_plot:
        draw(returns, ours.variances, options.output)
        print(f"\ndrawn to {options.output}")
    if not agree:
        print(f"\nthe parameters differ from arch's by {TOLERANCE:g} or more", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
