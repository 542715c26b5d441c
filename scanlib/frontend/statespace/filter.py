r"""The Kalman filter, step by step.

With the prediction ``x[t] ~ N(a, P)`` before the observation `y`, and ``C Cᵀ = Z P Zᵀ + H``::

    W = C⁻¹ Z P        G = C⁻¹ Z        e = C⁻¹ (y - Z a - d)
    filtered           a + Wᵀ e,    P - Wᵀ W
    log density        -(eᵀe + p log 2π) / 2 - Σ log C[i, i]
    predicted          F (a + Wᵀ e) + c,    F (P - Wᵀ W) Fᵀ + R Q Rᵀ

What moves `a` moves the next prediction by ``M = F (I - Wᵀ G)`` times as much, and what moves `P`
by ``M dP Mᵀ``; smoothers and gradients walk back with `M`, ``u = Gᵀ e`` and ``J = Gᵀ G``.

What is missing has a row of zeros in `Z` and a one on the diagonal of `H`: it moves nothing and has
density one. Covariances stay symmetric, bit by bit.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.replace import vectorize_graph

from scanlib.frontend.loop_function import loop
from scanlib.frontend.statespace.model import Observations, StateSpace, dtype_of, is_timed

# What a step reads, by name: the matrices of a model, `y`, `seen`; what is not there is None.
Row = dict[str, Any]
Moments = tuple[Variable, Variable]
NAMES = ("transition", "observation", "observation_cov", "process_noise")
INTERCEPTS = ("state_intercept", "observation_intercept")


@dataclass(frozen=True, eq=False)
class Filtered:
    """What `kalman_filter` returns; with a batch of series, its dimensions come first.

    Attributes
    ----------
    log_likelihood : TensorVariable, scalar
        The sum of `log_densities`: the logarithm of the density of the observations.
    log_densities : TensorVariable, (T,)
        Of each step's observations, given those before.
    mean, cov : TensorVariable, (T, m) and (T, m, m)
        Of the state, given the observations up to its own.
    predicted_mean, predicted_cov : TensorVariable, (T + 1, m) and (T + 1, m, m)
        Of the state, given the observations before its own; the last is the state that follows.
    """

    log_likelihood: Variable
    log_densities: Variable
    mean: Variable
    cov: Variable
    predicted_mean: Variable
    predicted_cov: Variable


def read_parts(model: StateSpace, given: Observations) -> tuple[Row, Row, Moments]:
    """Return a model's parts in one dtype: those with a row for each step, the others, and mean and
    covariance of the first state."""
    dtype = dtype_of(given.values, model)
    timed: Row = {}
    fixed: Row = dict.fromkeys(INTERCEPTS)
    for name in (*NAMES, *INTERCEPTS):
        is_noise = name == "process_noise"
        value = model.process_noise() if is_noise else getattr(model, name)
        if value is not None:
            is_one = is_timed("transition" if is_noise else name, value)
            (timed if is_one else fixed)[name] = pt.cast(value, dtype)
    return timed, fixed, (pt.cast(model.initial_mean, dtype), pt.cast(model.initial_cov, dtype))


def factor(covariance: Variable) -> Variable:
    """Return the lower factor of a covariance; of one observation, a square root."""
    if covariance.type.shape == (1, 1):
        return pt.sqrt(covariance)
    return pt.linalg.cholesky(covariance)


def solve(lower: Variable, right: Variable) -> Variable:
    """Return what a lower factor takes to a vector or to a matrix."""
    if lower.type.shape == (1, 1):
        return right / lower[0, 0]
    return pt.linalg.solve_triangular(lower, right, lower=True, b_ndim=right.type.ndim)


def masked(own: Row, mean: Variable) -> tuple[Variable, Variable]:
    """Return `Z` and the error of a prediction, where what is missing tells nothing."""
    z, seen = own["observation"], own["seen"]
    error = own["y"] - z @ mean
    if own["observation_intercept"] is not None:
        error = error - own["observation_intercept"]
    return (z, error) if seen is None else (z * seen[:, None], error * seen)


def masked_noise(own: Row) -> Variable:
    """Return `H`, with a one on the diagonal for what is missing."""
    noise, seen = own["observation_cov"], own["seen"]
    return noise if seen is None else noise * seen[:, None] * seen + pt.diag(1 - seen)


def gain(z: Variable, cov: Variable, noise: Variable) -> tuple[Variable, Variable, Variable]:
    """Return `C`, `W` and `G` of a step, given the predicted covariance of its state."""
    spread = z @ cov
    lower = factor(spread @ z.T + noise)
    return lower, solve(lower, spread), solve(lower, z)


def innovation(
    own: Row, mean: Variable, cov: Variable
) -> tuple[Variable, Variable, list[Variable]]:
    """Return what is added to the mean, `W`, and the log density, `M`, `u` and `J` of a step."""
    (z, error), seen = masked(own, mean), own["seen"]
    count: Any = z.type.shape[0] or z.shape[0]
    count = count if seen is None else pt.sum(seen)
    lower, w, g = gain(z, cov, masked_noise(own))
    e = solve(lower, error)
    density = -0.5 * (pt.sum(e**2) + count * np.log(2 * np.pi))
    density = density - pt.sum(pt.log(pt.diagonal(lower)))
    density, move = pt.cast(density, mean.type.dtype), own["transition"]
    return w.T @ e, w, [density, move - (move @ w.T) @ g, g.T @ e, g.T @ g]


def predict(own: Row, mean: Variable, cov: Variable) -> tuple[Variable, Variable]:
    """Return mean and covariance of the state that follows one of these."""
    move = own["transition"]
    mean = move @ mean
    if own["state_intercept"] is not None:
        mean = mean + own["state_intercept"]
    return mean, move @ cov @ move.T + own["process_noise"]


@dataclass
class Walk:
    """What the filter computes of one series; see the module's text."""

    predicted_mean: Variable
    predicted_cov: Variable
    mean: Variable
    cov: Variable
    density: Variable
    move: Variable  # M
    pull: Variable  # u
    information: Variable  # J

    def filtered(self) -> list[Variable]:
        """Return what `Filtered` holds."""
        found = [self.mean, self.cov, self.predicted_mean, self.predicted_cov]
        return [pt.sum(self.density), self.density, *found]


def sequential(model: StateSpace, given: Observations) -> Walk:
    """Return the filter's results, computed from step to step."""
    timed, fixed, first = read_parts(model, given)

    def step(before: Moments, row: Row) -> Any:
        own = {**fixed, **row}
        change, w, rest = innovation(own, *before)
        mean, cov = before[0] + change, before[1] - w.T @ w
        after = predict(own, mean, cov)
        return after, [*after, mean, cov, *rest]

    _, found = loop(step, first, timed | given.rows(), name="kalman_filter")
    histories = [trace.owner.inputs[0] for trace in found[:2]]
    return Walk(*histories, *found[2:])


def of_batch(given: Observations, values: list[Variable]) -> list[Variable]:
    """Return results for all series, given those of one."""
    if not given.batch:
        return values
    found = vectorize_graph(values, given.batch)
    batch = next(iter(given.batch.values()))
    sizes = list(batch.shape)[:-2]
    return [
        pt.broadcast_to(new, [*sizes, *new.shape]) if new.type.ndim == old.type.ndim else new
        for old, new in zip(values, found, strict=True)
    ]
