"""Long loops of `pytensor.scan`, and how much faster they should be with adoption on.

Most are the loops of :mod:`benchmarks.loops`, built with `pytensor.scan`; here are those that are
not timed against a hand-written loop. Each pass returns a cost, or a value, and its derivatives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt

import scanlib
from benchmarks.loops import LOOPS
from benchmarks.model import THEIRS, Array, Graph, Library, load_library

STEPS = 1_000


@dataclass(frozen=True)
class LongLoop:
    """A loop, its data, and how many times faster it should be; `gradient` is the pass."""

    title: str
    build: Callable[[Library], Graph]
    data: Callable[[], list[Array]]
    goal: float
    gradient: bool = True

    def compile(self, adopt: bool) -> Any:
        """Compile the pass of the loop of `pytensor.scan`, with adoption off or on."""
        with scanlib.enabled(adopt):
            return self.build(load_library(THEIRS)).compile(self.gradient)


def build_smoothing(library: Library) -> Graph:
    """Exponential smoothing, a scalar affine loop with one coefficient, and its squared errors."""
    y, (alpha, start) = pt.dvector("y"), pt.dscalars("alpha", "start")
    level = library.scan(
        lambda y, level, alpha: alpha * y + (1 - alpha) * level,
        sequences=[y[:-1]],
        outputs_info=[start],
        non_sequences=[alpha],
        strict=True,
        return_updates=False,
    )
    cost = pt.sum((y[1:] - level) ** 2)
    return Graph([y, alpha, start], level, [alpha, start], cost=cost)


def smoothing_data() -> list[Array]:
    """Noise of 100,000 steps."""
    y = np.random.default_rng(3).standard_normal(100_000)
    return [y, np.array(0.3), np.array(0.0)]


def build_trend(library: Library) -> Graph:
    """The Kalman filter of a local linear trend: two states, one observation at a time."""
    y, mean = pt.dvectors("y", "mean")
    covariance, shocks = pt.dmatrices("covariance", "shocks")
    noise = pt.dscalar("noise")
    move, seen = pt.constant([[1.0, 1.0], [0.0, 1.0]]), pt.constant([1.0, 0.0])

    def step(y: Any, mean: Any, covariance: Any, noise: Any, shocks: Any) -> Any:
        spread = covariance @ seen
        variance = seen @ spread + noise
        error = y - seen @ mean
        gain = spread / variance
        updated = mean + gain * error
        remaining = covariance - pt.outer(gain, spread)
        term = pt.log(variance) + error**2 / variance
        return move @ updated, move @ remaining @ move.T + shocks, term

    _, _, terms = library.scan(
        step,
        sequences=[y],
        outputs_info=[mean, covariance, None],
        non_sequences=[noise, shocks],
        strict=True,
        return_updates=False,
    )
    return Graph([y, mean, covariance, noise, shocks], terms, [noise, shocks], cost=terms.sum())


def trend_data() -> list[Array]:
    """A random walk of 1,000 steps."""
    y = np.cumsum(np.random.default_rng(4).standard_normal(STEPS))
    return [y, np.zeros(2), np.eye(2), np.array(0.5), np.diag([0.3, 0.1])]


def build_chain(library: Library) -> Graph:
    """The log-likelihood of a hidden Markov chain by the forward recursion, in logarithms."""
    emission, transition = pt.dmatrices("emission", "transition")
    start = pt.dvector("start")
    forward = library.scan(
        lambda e, a, transition: pt.logsumexp(a[:, None] + transition, axis=0) + e,
        sequences=[emission],
        outputs_info=[start],
        non_sequences=[transition],
        strict=True,
        return_updates=False,
    )
    cost = pt.logsumexp(forward[-1])
    return Graph([emission, transition, start], forward, [emission, transition], cost=cost)


def chain_data(states: int = 3) -> list[Array]:
    """Scores of 1,000 steps."""
    rng = np.random.default_rng(5)
    moves = rng.dirichlet(np.ones(states), size=states)
    emission = -0.5 * rng.standard_normal((STEPS, states)) ** 2
    return [emission, np.log(moves), np.full(states, -np.log(states))]


def timed(name: str, goal: float) -> LongLoop:
    """Return a loop of :mod:`benchmarks.loops`."""
    loop = LOOPS[name]
    return LongLoop(loop.title, loop.build, loop.data, goal)


LONG = {
    "affine": timed("affine_1e5", 20.0),
    "smoothing": LongLoop("exponential smoothing, 100,000", build_smoothing, smoothing_data, 20.0),
    "discounted": timed("discounted", 20.0),
    "garch": timed("garch", 10.0),
    "ar2": timed("ar2", 50.0),
    "trend": LongLoop("Kalman filter, 1,000 × 2 states", build_trend, trend_data, 2.0),
    "kalman": timed("kalman", 2.0),
    "chain": LongLoop("HMM forward, 1,000 × 3 states", build_chain, chain_data, 2.0),
}
