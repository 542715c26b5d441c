"""A hidden Markov chain: calm and turbulent weeks of the S&P 500, by forward and Viterbi.

Each week the market is in one of two regimes with a mean and a deviation of their own. The forward
loop adds up the probabilities of all paths, in logarithms, and gives the likelihood that is
maximized; the Viterbi loop keeps the best path to every regime, and a second loop, backwards, reads
that path. Prices are those that the ``arch`` package ships.

Sources: L. Rabiner, "A tutorial on hidden Markov models", Proceedings of the IEEE 77, 1989;
A. Viterbi, "Error bounds for convolutional codes", IEEE Transactions on Information Theory 13,
1967.
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


def forward(
    log_start: TensorVariable, log_move: TensorVariable, log_emission: TensorVariable
) -> TensorVariable:
    """Log-probability of the data up to each time, with the chain in each regime."""

    def step(expected: TensorVariable, emission: TensorVariable) -> Any:
        now = expected + emission
        return pt.logsumexp(now[:, None] + log_move, axis=0), now

    return scanlib.loop(step, log_start, log_emission)[1]


def viterbi(
    log_start: TensorVariable, log_move: TensorVariable, log_emission: TensorVariable
) -> TensorVariable:
    """The most probable regimes."""

    def step(best: TensorVariable, emission: TensorVariable) -> Any:
        paths = best[:, None] + log_move
        return emission + paths.max(axis=0), paths.argmax(axis=0)

    def back(regime: TensorVariable, came_from: TensorVariable) -> Any:
        return came_from[regime], came_from[regime]

    best, came_from = scanlib.loop(step, log_start + log_emission[0], log_emission[1:])
    _, earlier = scanlib.loop(back, best.argmax(), came_from, reverse=True)
    return pt.concatenate([earlier, best.argmax()[None]])


def normal_emissions(y: TensorVariable, mean: Any, log_deviation: Any) -> TensorVariable:
    """Log-density of each observation in each regime."""
    score = (y[:, None] - mean) / pt.exp(log_deviation)
    return -0.5 * score**2 - log_deviation - 0.5 * np.log(2 * np.pi)


def two_regimes(logits: TensorVariable) -> tuple[TensorVariable, TensorVariable]:
    """Start and transitions of a chain that stays with the probabilities of the logits."""
    stay = pt.sigmoid(logits)
    move = pt.stack([pt.stack([stay[0], 1 - stay[0]]), pt.stack([1 - stay[1], stay[1]])])
    return pt.log(pt.constant([0.5, 0.5])), pt.log(move)


def load_weeks() -> Any:
    """Weekly returns of the S&P 500 in percent, as a series."""
    from arch.data import sp500

    return 100 * sp500.load()["Adj Close"].resample("W").last().pct_change().dropna()


def fit(y: Array) -> tuple[Array, Array, Array]:
    """Return means and deviations of the regimes, and the most probable path."""
    free = pt.dvector("free")
    emissions = normal_emissions(pt.constant(y), free[:2], free[2:4])
    chain = two_regimes(free[4:6])
    cost = -pt.logsumexp(forward(*chain, emissions)[-1]) / len(y)
    compiled = pytensor.function([free], [cost, pytensor.grad(cost, free)])
    start = np.array([0.2, -0.2, np.log(0.7 * y.std()), np.log(1.5 * y.std()), 3.0, 3.0])
    found = minimize(lambda v: tuple(compiled(v)), start, jac=True)
    path = pytensor.function([free], viterbi(*chain, emissions))(found.x)
    return found.x[:2], np.exp(found.x[2:4]), path


def draw(path: str | Path) -> None:
    """Fit the chain and mark the turbulent weeks."""
    from matplotlib import pyplot as plt

    returns = load_weeks()
    means, deviations, regimes = fit(returns.to_numpy())
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    axes.plot(returns.index, returns, color="0.3", linewidth=0.6)
    low, high = axes.get_ylim()
    axes.fill_between(
        returns.index, low, high, where=regimes == 1, color="tab:red", alpha=0.2, linewidth=0
    )
    text = [f"{mean:.2f} ± {sd:.2f}" for mean, sd in zip(means, deviations, strict=True)]
    axes.set(ylim=(low, high), ylabel="% a week")
    axes.set_title(f"S&P 500: calm weeks {text[0]}, turbulent weeks (red) {text[1]}", fontsize=10)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "hidden_markov.png")
