"""SIR: an epidemic, fitted to daily counts of new cases.

Susceptible people are infected at the rate ``beta``, the infected recover at the rate ``gamma``.
The counts are simulated, with a fixed seed; both rates and the number of first infections are found
again by maximum likelihood. Three states, each of which reads the others.

Source: W. Kermack and A. McKendrick, "A contribution to the mathematical theory of epidemics",
Proceedings of the Royal Society A 115, 1927.
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
PEOPLE = 10_000.0
DAYS = 100


def epidemic(
    beta: TensorVariable,
    gamma: TensorVariable,
    first: TensorVariable,
    people: float = PEOPLE,
    days: int = DAYS,
) -> list[TensorVariable]:
    """Susceptible, infected and recovered people, and new cases, day by day."""

    def step(people_in: Any, _: None) -> Any:
        susceptible, infected, recovered = people_in
        cases, recoveries = beta * susceptible * infected / people, gamma * infected
        after = susceptible - cases, infected + cases - recoveries, recovered + recoveries
        return after, [*after, cases]

    start = people - first, first, pt.zeros_like(first)
    return scanlib.loop(step, start, length=days)[1]


def log_likelihood(counts: TensorVariable, cases: TensorVariable) -> TensorVariable:
    """Poisson log-likelihood of counts, without the part that no parameter enters."""
    return pt.sum(counts * pt.log(cases) - cases)


def simulate(seed: int = 11) -> Array:
    """Counts of new cases for beta 0.35, gamma 0.1 and 5 first infections."""
    susceptible, infected, cases = PEOPLE - 5.0, 5.0, np.zeros(DAYS)
    for day in range(DAYS):
        cases[day] = 0.35 * susceptible * infected / PEOPLE
        susceptible, infected = susceptible - cases[day], 0.9 * infected + cases[day]
    return np.random.default_rng(seed).poisson(cases).astype(float)


def fit(counts: Array) -> tuple[Array, list[Array]]:
    """Return ``beta, gamma, first`` and the fitted epidemic."""
    free = pt.dvector("free")
    beta, gamma, first = (pt.exp(free[i]) for i in range(3))
    traces = epidemic(beta, gamma, first, days=len(counts))
    cost = -log_likelihood(pt.constant(counts), traces[-1]) / counts.sum()
    compiled = pytensor.function([free], [cost, pytensor.grad(cost, free)])
    found = minimize(lambda v: tuple(compiled(v)), np.log([0.3, 0.15, 10.0]), jac=True, tol=1e-9)
    return np.exp(found.x), pytensor.function([free], traces)(found.x)


def draw(path: str | Path) -> None:
    """Fit the rates and draw the epidemic."""
    from matplotlib import pyplot as plt

    counts = simulate()
    (beta, gamma, first), (susceptible, infected, recovered, cases) = fit(counts)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    left.bar(np.arange(DAYS), counts, color="0.75", width=1.0, label="simulated counts")
    left.plot(cases, color="tab:red", label="fitted")
    left.set(xlabel="day", title=f"new cases: β = {beta:.3f}, γ = {gamma:.3f}, {first:.1f} first")
    left.title.set_fontsize(10)
    left.legend(frameon=False, fontsize=8)
    for trace, name in (
        (susceptible, "susceptible"),
        (infected, "infected"),
        (recovered, "recovered"),
    ):
        right.plot(trace, label=name)
    right.set(xlabel="day", title="people")
    right.title.set_fontsize(10)
    right.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    draw(sys.argv[1] if len(sys.argv) > 1 else "sir.png")
