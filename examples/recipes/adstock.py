"""Adstock: how long advertising works, from weekly spending and sales.

What a channel spends goes on working: ``carried[t] = spend[t] + decay * carried[t-1]``, a linear
recurrence for each channel. Its effect saturates. Spending and sales are simulated, with a fixed
seed; decay, saturation and effect are found again by least squares.

Source: S. Broadbent, "One way TV advertisements work", Journal of the Market Research Society 21,
1979.
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
NAMES = ("television", "radio", "search")
DECAY = np.array([0.8, 0.5, 0.1])
HALF = np.array([6.0, 2.0, 1.0])
EFFECT = np.array([30.0, 15.0, 20.0])


def expected_sales(
    spend: TensorVariable,
    decay: TensorVariable,
    half: TensorVariable,
    effect: TensorVariable,
    base: TensorVariable,
) -> TensorVariable:
    """Sales over the weeks; rows of ``spend`` are weeks, its columns channels."""
    carried = scanlib.linear_scan(decay, spend)
    return base + (effect * carried / (carried + half)).sum(axis=1)


def simulate(weeks: int = 200, seed: int = 3) -> tuple[Array, Array]:
    """Spending in bursts, and sales with noise."""
    rng = np.random.default_rng(seed)
    spend = rng.gamma(2.0, 1.0, size=(weeks, 3)) * (rng.uniform(size=(weeks, 3)) < 0.3)
    carried = np.zeros((weeks, 3))
    for week in range(weeks):
        carried[week] = spend[week] + DECAY * carried[week - 1] * (week > 0)
    sales = 100.0 + (EFFECT * carried / (carried + HALF)).sum(axis=1)
    return spend, sales + 1.5 * rng.normal(size=weeks)


def fit(spend: Array, sales: Array) -> tuple[Array, Array]:
    """Return the decay of each channel, and the fitted sales."""
    free = pt.dvector("free")
    decay, half, effect = pt.sigmoid(free[:3]), pt.exp(free[3:6]), pt.exp(free[6:9])
    fitted = expected_sales(pt.constant(spend), decay, half, effect, free[9])
    cost = pt.mean((fitted - sales) ** 2)
    compiled = pytensor.function([free], [cost, pytensor.grad(cost, free)])
    start = np.concatenate([np.zeros(3), np.ones(3), np.full(3, 2.5), [sales.mean()]])
    found = minimize(lambda v: tuple(compiled(v)), start, jac=True, options={"maxiter": 2000})
    return tuple(pytensor.function([free], [decay, fitted])(found.x))


def draw(path: str | Path) -> None:
    """Fit the model and draw sales, and how long each channel works."""
    from matplotlib import pyplot as plt

    spend, sales = simulate()
    decay, fitted = fit(spend, sales)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8, 3.2), width_ratios=[2, 1], layout="constrained"
    )
    left.plot(sales, "o", color="0.6", markersize=2.5, label="simulated sales")
    left.plot(fitted, color="tab:blue", linewidth=1, label="fitted")
    left.set(xlabel="week")
    left.legend(frameon=False, fontsize=8)
    weeks = np.arange(12)
    for name, found, true, color in zip(NAMES, decay, DECAY, ("C0", "C1", "C2"), strict=True):
        right.plot(weeks, found**weeks, color=color, label=f"{name}: {found:.2f}")
        right.plot(weeks, true**weeks, ".", color=color, markersize=4)
    right.set(xlabel="weeks after", title="what is left (dots: simulated)")
    right.title.set_fontsize(9)
    right.legend(frameon=False, fontsize=8, title="decay")
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "adstock.png")
