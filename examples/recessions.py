"""Recessions in US output: a hidden Markov model of two regimes, fitted by maximum likelihood.

The growth of real output in quarter ``t`` is normal around a mean that depends on a hidden regime::

    growth[t] ~ Normal(mean[regime[t]], sd)      regime: a Markov chain with two states

The filter adds over the regimes of the quarter before, in logarithms; scanlib recognizes it as a
matrix recurrence over (logaddexp, +). The probability of a regime given all quarters is the
derivative of the log-likelihood by that quarter's log-density of the regime, so that the smoother
is the filter's gradient and nobody writes it.

Data: quarterly US real GDP, 1959 to 2009, which statsmodels ships (``macrodata``). Reference:
J. Hamilton, "A new approach to the economic analysis of nonstationary time series and the business
cycle", Econometrica 57 (1989).
"""

import argparse
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
import statsmodels.api as sm
from scipy.optimize import minimize

import scanlib

Array = np.ndarray[Any, Any]


def load_growth() -> tuple[Array, Array]:
    """Return the quarters, as years, and the growth of output in each, in percent."""
    data = sm.datasets.macrodata.load_pandas().data
    years = data["year"] + (data["quarter"] - 1) / 4
    return years.to_numpy()[1:], 100 * np.diff(np.log(data["realgdp"]))


def build(growth: Array) -> tuple[Any, Any]:
    """Compile the cost with its gradient, and the parameters with the regimes' probabilities."""
    free = pt.dvector("free")
    means = pt.stack([free[0], free[0] + pt.exp(free[1])])  # recession first
    sd = pt.exp(free[2])
    stay = pt.sigmoid(free[3:5])  # probabilities of staying in each regime
    chain = pt.stack([pt.stack([stay[0], 1 - stay[0]]), pt.stack([1 - stay[1], stay[1]])])
    density = -0.5 * ((growth[:, None] - means) / sd) ** 2 - pt.log(sd) - 0.5 * np.log(2 * np.pi)
    # The long-run share of each regime is the chance to start in it.
    start = pt.log(1 - stay[::-1]) - pt.log(2 - stay.sum())
    moves = pt.log(chain)

    def step(alpha: Any, now: Any) -> tuple[Any, None]:
        return pt.logsumexp(alpha[:, None] + moves, axis=0) + now, None

    alpha, _ = scanlib.loop(step, start + density[0], density[1:], name="filter")
    log_likelihood = pt.logsumexp(alpha)
    cost = -log_likelihood / len(growth)
    smoothed = pytensor.grad(log_likelihood, density)
    return (
        pytensor.function([free], [cost, pytensor.grad(cost, free)]),
        pytensor.function([free], [means, sd, stay, log_likelihood, smoothed]),
    )


def draw(years: Array, growth: Array, recession: Array, path: Path) -> None:
    """Draw growth, and the probability of a recession below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    ink = "#808890"  # readable on white and on black
    with plt.rc_context(dict.fromkeys(("text.color", "xtick.color", "ytick.color"), ink)):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(9, 4.6), sharex=True, height_ratios=[3, 2], layout="constrained"
        )
        top.bar(years, growth, width=0.2, color="#2f7ad1")
        top.set_title("growth of US real output, % a quarter", loc="left", fontsize=11)
        bottom.fill_between(years, recession, color="#c9562b", step="mid", linewidth=0)
        bottom.set_title("probability of the recession regime", loc="left", fontsize=11)
        bottom.set_ylim(0, 1)
        for axis in (top, bottom):
            axis.patch.set_alpha(0)
            for edge in axis.spines.values():
                edge.set_color(ink)
        figure.savefig(path, dpi=110, transparent=True)
        plt.close(figure)


def main() -> None:
    """Fit, print and draw."""
    parser = argparse.ArgumentParser(description="Fit a hidden Markov model to US output.")
    parser.add_argument("--figure", type=Path, default=Path("recessions.png"))
    options = parser.parse_args()
    years, growth = load_growth()
    begun = process_time()
    cost, describe = build(growth)
    first = np.array([-0.5, 0.3, -0.3, 1.0, 2.0])
    cost(first), describe(first)
    compiled = process_time()
    found = minimize(lambda free: tuple(cost(free)), first, jac=True, method="BFGS")
    fitted = process_time()
    means, sd, stay, log_likelihood, smoothed = describe(found.x)
    np.testing.assert_allclose(smoothed.sum(axis=1), 1, rtol=1e-8)  # they are probabilities
    recession = smoothed[:, 0]
    print(f"{len(growth)} quarters, {years[0]:.2f} to {years[-1]:.2f}")
    print(f"growth in % a quarter: {means[0]:.2f} in recessions, {means[1]:.2f} else; sd {sd:.2f}")
    lengths = 1 / (1 - stay)
    print(f"a recession lasts {lengths[0]:.1f} quarters, the other regime {lengths[1]:.1f}")
    print(f"log-likelihood {log_likelihood:.2f}")
    worst = sorted(years[recession > 0.9])
    print("surely in recession:", ", ".join(f"{year:.2f}" for year in worst))
    print(
        f"compiling took {compiled - begun:.1f} s, fitting {1000 * (fitted - compiled):.0f} ms "
        f"({found.nfev} likelihoods with gradient)"
    )
    print(scanlib.explain(cost))
    draw(years, growth, recession, options.figure)


if __name__ == "__main__":
    main()
