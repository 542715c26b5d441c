"""The loops whose compile time `benchmarks.compile` takes, each with a cost and its gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.tensor.linalg import cho_solve, cholesky, pinv

from benchmarks.model import Array, Graph, Library

STATES, SERIES, UNITS, FEATURES = 4, 2, 32, 8


@dataclass(frozen=True)
class CompiledLoop:
    """A loop with a cost, and arrays to call it with; `benchmarks.compile_jax` has the same."""

    title: str
    build: Callable[[Library], Graph]
    data: Callable[[], list[Array]]


def build_affine(library: Library) -> Graph:
    """One coefficient for all steps."""
    a, x = pt.dscalar("a"), pt.dvector("x")
    trace = library.scan(lambda x, h, a: a * h + x, x, [pt.zeros(())], [a], return_updates=False)
    return Graph([a, x], trace, [a], cost=pt.sum(trace**2))


def affine_data() -> list[Array]:
    return [np.array(0.5), np.random.default_rng(0).normal(size=1_000)]


def build_garch(library: Library) -> Graph:
    """The variances of returns, and their loss."""
    weights, returns = pt.dvectors("weights", "returns")
    variances = library.scan(
        lambda y, h, w: w[0] + w[1] * y**2 + w[2] * h,
        sequences=[returns],
        outputs_info=[pt.ones(())],
        non_sequences=[weights],
        return_updates=False,
    )
    cost = pt.sum(pt.log(variances) + returns**2 / variances)
    return Graph([weights, returns], variances, [weights], cost=cost)


def garch_data() -> list[Array]:
    return [np.array([0.1, 0.1, 0.8]), np.random.default_rng(0).normal(size=1_000)]


def build_rnn(library: Library) -> Graph:
    """A network without a batch."""
    W, V, x = pt.dmatrices("W", "V", "x")
    hidden = library.scan(
        lambda x, h, W, V: pt.tanh(W @ h + V @ x),
        sequences=[x],
        outputs_info=[pt.zeros(UNITS)],
        non_sequences=[W, V],
        return_updates=False,
    )
    return Graph([W, V, x], hidden, [W, V], cost=pt.sum(hidden**2))


def rnn_data() -> list[Array]:
    rng = np.random.default_rng(0)
    shapes = [(UNITS, UNITS), (UNITS, FEATURES), (500, FEATURES)]
    return [rng.normal(size=shape) / 6 for shape in shapes]


def build_hmm(library: Library) -> Graph:
    """The log-likelihood by the forward recursion."""
    transition, emission = pt.dmatrices("transition", "emission")
    trace = library.scan(
        lambda e, a, transition: pt.logsumexp(a[:, None] + transition, axis=0) + e,
        sequences=[emission[1:]],
        outputs_info=[emission[0]],
        non_sequences=[transition],
        return_updates=False,
    )
    wrt = [transition, emission]
    return Graph(wrt, trace, wrt, cost=pt.logsumexp(trace[-1]))


def hmm_data() -> list[Array]:
    rng = np.random.default_rng(0)
    moves = rng.dirichlet(np.ones(STATES), size=STATES)
    return [np.log(moves), rng.normal(size=(300, STATES))]


def build_kalman(library: Library) -> Graph:
    """The log-likelihood by a Kalman filter whose covariances stay symmetric: Joseph's form."""
    F, H, Q, R, y = pt.dmatrices("F", "H", "Q", "R", "y")

    def step(y: Any, mean: Any, spread: Any, F: Any, H: Any, Q: Any, R: Any) -> list[Any]:
        mean, spread = F @ mean, F @ spread @ F.T + Q
        error, factor = y - H @ mean, cholesky(H @ spread @ H.T + R)
        gain = cho_solve((factor, True), H @ spread).T
        rest = pt.eye(STATES) - gain @ H
        distance = error @ cho_solve((factor, True), error)
        score = -0.5 * distance - pt.sum(pt.log(pt.diag(factor)))
        return [mean + gain @ error, rest @ spread @ rest.T + gain @ R @ gain.T, score]

    _, _, scores = library.scan(
        step,
        sequences=[y],
        outputs_info=[pt.zeros(STATES), pt.eye(STATES), None],
        non_sequences=[F, H, Q, R],
        return_updates=False,
    )
    return Graph([F, H, Q, R, y], scores, [F, H, Q, R], cost=scores.sum())


def kalman_data() -> list[Array]:
    rng = np.random.default_rng(0)
    H, y = rng.normal(size=(SERIES, STATES)), rng.normal(size=(200, SERIES))
    return [0.9 * np.eye(STATES), H, np.eye(STATES), np.eye(SERIES), y]


def build_states(library: Library, count: int) -> Graph:
    """Many states, of which each reads itself alone."""
    x, a = pt.dvector("x"), pt.dscalar("a")
    traces = library.scan(
        lambda x, *states: [pt.tanh(a * state + x) for state in states],
        sequences=[x],
        outputs_info=[np.float64(0.01 * k) for k in range(count)],
        return_updates=False,
    )
    cost = pt.add(*[pt.sum(trace**2) for trace in traces])
    return Graph([x, a], cost, [a], cost=cost)


def states_data() -> list[Array]:
    return [np.linspace(0, 1, 50), np.array(0.5)]


def build_without_kernel(library: Library, step: Callable[[Any, Any], Any], ndim: int) -> Graph:
    """A step with an operation that has no kernel; the state is like a row."""
    x = pt.tensor("x", shape=(None,) * (1 + ndim))
    start = pt.zeros(x.shape[1:])
    trace = library.scan(step, x, [start], return_updates=False)
    return Graph([x], trace, [x], cost=pt.sum(trace**2))


def rows_data(*shape: int) -> list[Array]:
    return [np.random.default_rng(1).normal(size=(1_000, *shape))]


def pseudoinverse(x: Any, h: Any) -> Any:
    return pt.tanh(pinv(0.5 * h + x))


def without_kernel(title: str, step: Callable[[Any, Any], Any], *shape: int) -> CompiledLoop:
    """Return the loop of a step over rows of a shape."""
    build = partial(build_without_kernel, step=step, ndim=len(shape))
    return CompiledLoop(title, build, partial(rows_data, *shape))


WITHOUT_KERNELS = {
    "pinv3": without_kernel("pinv, 3 × 3", pseudoinverse, 3, 3),
    "pinv20": without_kernel("pinv, 20 × 20", pseudoinverse, 20, 20),
}
COMPILED = {
    "affine": CompiledLoop("a h + x", build_affine, affine_data),
    "garch": CompiledLoop("GARCH(1,1)", build_garch, garch_data),
    "rnn": CompiledLoop(f"tanh RNN, {UNITS} × {FEATURES}", build_rnn, rnn_data),
    "hmm": CompiledLoop(f"HMM forward, {STATES} states", build_hmm, hmm_data),
    "kalman": CompiledLoop(
        f"Kalman filter, {STATES} states, {SERIES} series", build_kalman, kalman_data
    ),
}
MANY = {
    str(count): CompiledLoop(f"{count} states", partial(build_states, count=count), states_data)
    for count in (50, 200, 500)
}
