"""Policy gradients: returns for REINFORCE, and advantages (GAE) for a policy with a critic.

A walker in a corridor steps left or right until it finds the exit at the right end, or time is up;
every step costs one. Both methods need discounted sums of what is to come, over a batch of episodes
with different ends: one call of ``discounted_cumsum``, with a discount of zero where an episode
ends. Episodes are simulated, with a fixed seed.

Sources: R. Williams, "Simple statistical gradient-following algorithms for connectionist
reinforcement learning", Machine Learning 8, 1992; J. Schulman et al., "High-dimensional continuous
control using generalized advantage estimation", 2016.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.tensor.variable import TensorVariable

import scanlib

Array = np.ndarray[Any, Any]
CELLS, STEPS, EPISODES = 8, 40, 32
GAMMA, LAMBDA = 0.97, 0.9


def discounted_returns(
    rewards: TensorVariable, going_on: TensorVariable, gamma: float = GAMMA
) -> TensorVariable:
    """Discounted rewards from each step on; ``going_on`` is zero at the last step of an episode."""
    return scanlib.discounted_cumsum(rewards, gamma * going_on, reverse=True)


def advantages(
    rewards: TensorVariable,
    going_on: TensorVariable,
    values: TensorVariable,
    gamma: float = GAMMA,
    lam: float = LAMBDA,
) -> TensorVariable:
    """Generalized advantages; ``values`` has one more column than ``rewards``."""
    errors = rewards + gamma * going_on * values[:, 1:] - values[:, :-1]
    return scanlib.discounted_cumsum(errors, gamma * lam * going_on, reverse=True)


def losses(critic: bool) -> tuple[list[TensorVariable], list[TensorVariable]]:
    """Inputs of one update, and the gradients by the policy's logits and the critic's values."""
    logits, table = pt.dmatrix("logits"), pt.dvector("table")
    cells, actions = pt.lmatrix("cells"), pt.lmatrix("actions")
    rewards, going_on, valid = pt.dmatrices("rewards", "going_on", "valid")
    chosen = pt.special.log_softmax(logits, axis=-1)[cells[:, :-1], actions]
    returns = discounted_returns(rewards, going_on)
    weight = advantages(rewards, going_on, table[cells]) if critic else returns
    policy = -pt.sum(valid * chosen * pytensor.gradient.disconnected_grad(weight)) / EPISODES
    value = pt.sum(valid * (table[cells[:, :-1]] - returns) ** 2) / valid.sum()
    gradients = [pytensor.grad(policy, logits), pytensor.grad(value, table)]
    return [logits, table, cells, actions, rewards, going_on, valid], gradients


def play(logits: Array, rng: np.random.Generator) -> list[Array]:
    """A batch of episodes from the left end: cells, actions, rewards and what is valid."""
    right = 1.0 / (1.0 + np.exp(logits[:, 0] - logits[:, 1]))
    cells = np.zeros((EPISODES, STEPS + 1), dtype="int64")
    actions = np.zeros((EPISODES, STEPS), dtype="int64")
    for t in range(STEPS):
        actions[:, t] = rng.uniform(size=EPISODES) < right[cells[:, t]]
        moved = np.clip(cells[:, t] + 2 * actions[:, t] - 1, 0, CELLS - 1)
        cells[:, t + 1] = np.where(cells[:, t] == CELLS - 1, CELLS - 1, moved)
    valid = (cells[:, :-1] < CELLS - 1).astype(float)
    going_on = (cells[:, 1:] < CELLS - 1).astype(float)
    return [cells, actions, -valid, going_on, valid]


def train(update: Callable[..., list[Array]], seed: int, rounds: int = 60) -> Array:
    """Follow the gradients; return the mean length of the episodes of each round."""
    rng = np.random.default_rng(seed)
    logits, table = np.zeros((CELLS, 2)), np.zeros(CELLS)
    lengths = np.zeros(rounds)
    for number in range(rounds):
        batch = play(logits, rng)
        lengths[number] = batch[-1].sum() / EPISODES
        by_logits, by_table = update(logits, table, *batch)
        logits -= 0.05 * by_logits
        table -= 2.0 * by_table
    return lengths


def draw(path: str | Path) -> None:
    """Train both ways from eight seeds and draw how long the walker needs."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    for critic, name, color in ((False, "REINFORCE", "tab:orange"), (True, "GAE", "tab:blue")):
        update = pytensor.function(*losses(critic), on_unused_input="ignore")
        lengths = np.array([train(update, seed) for seed in range(8)])
        axes.plot(lengths.T, color=color, linewidth=0.5, alpha=0.4)
        axes.plot(lengths.mean(axis=0), color=color, linewidth=2, label=name)
    axes.axhline(CELLS - 1, color="0.4", linestyle=":", linewidth=1)
    axes.set(xlabel="updates", ylabel="steps to the exit", title="A walker in a corridor, 8 seeds")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "policy_gradient.png")
