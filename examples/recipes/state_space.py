"""A diagonal state-space layer, trained to remember the last marked number of a sequence.

Each channel has a few states that decay at rates of their own, ``h[t] = exp(-d[t] r) h[t-1] +
d[t] B[t] u[t]``, and is read out by ``C[t]``. The step size ``d`` and the vectors ``B`` and ``C``
depend on the input, as in Mamba, but not on the state, so the layer is a linear recurrence: one
call of ``pscan``. At every step a number comes in, some are marked, and the output should be the
last marked one. Sequences are simulated, with a fixed seed.

Sources: J. Smith, A. Warrington and S. Linderman, "Simplified state space layers for sequence
modeling" (S5), 2023; A. Gu and T. Dao, "Mamba: linear-time sequence modeling with selective state
spaces", 2023.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

import scanlib

Array = np.ndarray[Any, Any]
CHANNELS, STATES = 4, 4


def layer(x: TensorVariable, weights: dict[str, Any]) -> TensorVariable:
    """Outputs ``(batch, length)`` for inputs ``(batch, length, features)``."""
    inner = x @ weights["enter"]  # (batch, length, channels)
    size = pt.softplus(x @ weights["size"] + weights["size_bias"])
    decay = pt.exp(-size[..., None] * pt.exp(weights["log_rates"]))
    drive = (size * inner)[..., None] * (x @ weights["B"])[:, :, None, :]
    states = scanlib.pscan(decay, drive)  # (batch, length, channels, states)
    read = (states * (x @ weights["C"])[:, :, None, :]).sum(axis=-1)
    return read @ weights["leave"]


def initial_weights(seed: int = 0, features: int = 3) -> dict[str, Array]:
    """Small random weights, and rates that are spread out."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        return rng.normal(size=shape) / np.sqrt(shape[0])

    return {
        "enter": normal(features, CHANNELS),
        "size": normal(features, CHANNELS),
        "size_bias": np.full(CHANNELS, -2.0),
        "log_rates": np.log(np.arange(1.0, STATES + 1)) * np.ones((CHANNELS, 1)),
        "B": normal(features, STATES),
        "C": normal(features, STATES),
        "leave": normal(CHANNELS),
    }


def sequences(rng: np.random.Generator, batch: int = 32, length: int = 40) -> tuple[Array, Array]:
    """Inputs ``(number, mark, 1)``, and the last marked number, zero before the first mark."""
    numbers = rng.uniform(-1, 1, size=(batch, length))
    marks = rng.uniform(size=(batch, length)) < 0.15
    target = np.zeros((batch, length))
    for t in range(length):
        target[:, t] = np.where(marks[:, t], numbers[:, t], target[:, t - 1] * (t > 0))
    return np.stack([numbers, marks, np.ones_like(numbers)], axis=-1), target


def adam(cost: TensorVariable, weights: list[Any], rate: float = 0.02) -> list[tuple[Any, Any]]:
    """Updates of shared variables by D. Kingma and J. Ba's rule."""
    count = pytensor.shared(np.array(0.0))
    updates = [(count, count + 1)]
    for weight, gradient in zip(weights, pytensor.grad(cost, weights), strict=True):
        first, second = (pytensor.shared(np.zeros_like(weight.get_value())) for _ in range(2))
        new_first = 0.9 * first + 0.1 * gradient
        new_second = 0.99 * second + 0.01 * gradient**2
        scale = rate * pt.sqrt(1 - 0.99 ** (count + 1)) / (1 - 0.9 ** (count + 1))
        step = scale * new_first / (pt.sqrt(new_second) + 1e-8)
        updates += [(first, new_first), (second, new_second), (weight, weight - step)]
    return updates


def train(rounds: int = 1500, seed: int = 1) -> tuple[Array, Any]:
    """Return the loss of each round, and a function from inputs to outputs."""
    weights = {name: pytensor.shared(value) for name, value in initial_weights().items()}
    x, target = pt.dtensor3("x"), pt.dmatrix("target")
    y = layer(x, weights)
    loss = pt.mean((y - target) ** 2)
    update = pytensor.function([x, target], loss, updates=adam(loss, list(weights.values())))
    rng = np.random.default_rng(seed)
    losses = np.array([update(*sequences(rng)) for _ in range(rounds)])
    return losses, pytensor.function([x], y)


def draw(path: str | Path) -> None:
    """Train the layer and draw the loss, and one sequence that it has not seen."""
    from matplotlib import pyplot as plt

    losses, predict = train()
    x, target = sequences(np.random.default_rng(99), batch=1, length=80)
    figure, (left, right) = plt.subplots(
        1, 2, figsize=(8, 3.2), width_ratios=[1, 2], layout="constrained"
    )
    left.semilogy(losses, color="0.7", linewidth=0.6)
    left.semilogy(np.convolve(losses, np.ones(50) / 50, mode="valid"), color="tab:blue")
    left.set(xlabel="updates", title="mean squared error")
    marked = np.flatnonzero(x[0, :, 1])
    right.plot(x[0, :, 0], ".", color="0.8", label="numbers")
    right.plot(marked, x[0, marked, 0], "o", color="tab:red", markersize=4, label="marked")
    right.step(np.arange(80), target[0], where="post", color="0.4", linewidth=0.8, label="wanted")
    right.plot(predict(x)[0], color="tab:blue", linewidth=1.2, label="layer")
    right.set(xlabel="step", title="a new sequence, twice as long")
    right.legend(frameon=False, fontsize=7, ncols=2)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "state_space.png")
