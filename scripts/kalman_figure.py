"""Draw the figure of ``docs/kalman.md``: bands of filter and smoother on the flow of the Nile.

The data are those that statsmodels ships; two stretches of twenty years are taken out, as in
chapter 2 of Durbin and Koopman's book::

    python scripts/kalman_figure.py
"""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import numpy as np
import pytensor
import pytensor.tensor as pt
from matplotlib import pyplot as plt
from scipy.optimize import minimize
from statsmodels.datasets import nile

import scanlib

FILE = Path(__file__).resolve().parents[1] / "docs" / "figures" / "kalman-bands.png"


def fit(y: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return both variances at the greatest likelihood, and moments of filter and smoother."""
    free = pt.vector("free")
    drift, noise = pt.exp(free)[0], pt.exp(free)[1]
    one = np.ones((1, 1))
    model = scanlib.StateSpace(one, one, drift * one, noise * one, [np.nanmean(y)], 1e5 * one)
    smooth = scanlib.kalman_smoother(y, model)
    cost = -smooth.filtered.log_likelihood
    value = pytensor.function([free], [cost, pytensor.grad(cost, free)])

    def objective(point: np.ndarray) -> tuple[Any, Any]:
        return tuple(value(point))

    found = minimize(objective, np.log([1000.0, 10_000.0]), jac=True)
    moments = [smooth.filtered.mean, smooth.filtered.cov, smooth.mean, smooth.cov]
    return np.exp(found.x), pytensor.function([free], moments)(found.x)


def main() -> None:
    data = nile.load_pandas().data
    years, flow = data["year"].to_numpy(), data["volume"].to_numpy(dtype=float)
    seen = flow.copy()
    seen[20:40], seen[60:80] = np.nan, np.nan
    variances, moments = fit(seen)
    print(f"variances {variances.round(1)}")
    figure, panels = plt.subplots(1, 2, figsize=(9.6, 3.2), sharey=True, layout="constrained")
    for axes, title, mean, cov in zip(
        panels, ("filter", "smoother"), moments[::2], moments[1::2], strict=True
    ):
        level, deviation = mean[:, 0], np.sqrt(cov[:, 0, 0])
        axes.plot(years, flow, ".", color="0.8", ms=4, label="left out")
        axes.plot(years, seen, ".", color="0.25", ms=4, label="observed")
        axes.plot(years, level, color="tab:blue", lw=1.3, label="level")
        band = (level - 1.645 * deviation, level + 1.645 * deviation)
        axes.fill_between(years, *band, color="tab:blue", alpha=0.2, lw=0, label="90 %")
        axes.set(title=title, xlabel="year", ylim=(400, 1450))
    panels[0].set_ylabel("flow of the Nile, 10⁸ m³")
    panels[1].legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(FILE, facecolor="white", dpi=110)


if __name__ == "__main__":
    main()
