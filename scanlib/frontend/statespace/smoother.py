r"""The Kalman smoother, and draws of the states given all observations.

Backwards, with what the filter kept (`C` the innovation's factor, ``W = C⁻¹ Z P``, ``G = C⁻¹ Z``)::

    u = Fᵀ r[t],    U = Fᵀ N[t] F,    A = I - Wᵀ G
    r[t-1] = Gᵀ e + Aᵀ u          smoothed mean        a + P r[t-1]
    N[t-1] = Gᵀ G + Aᵀ U A        smoothed covariance  P - P N[t-1] P

from ``r[T-1] = 0``, ``N[T-1] = 0``: no covariance is inverted, so that they may be singular. P. de
Jong, "Smoothing and interpolation with the state-space model", JASA 84, 1989; draws as in J.
Durbin, S. J. Koopman, "A simple and efficient simulation smoother for state space time series
analysis", Biometrika 89, 2002.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.frontend.associative_functions import associative_scan
from scanlib.frontend.scan_function import scan
from scanlib.frontend.statespace.filter import Parts, Walk
from scanlib.frontend.statespace.model import StateSpace, is_timed


def smoothed(model: StateSpace, walk: Walk, has_cov: bool = True) -> list[Variable]:
    """Return the mean, and with `has_cov` the covariance, of all states given all observations."""
    owed = _walk_back(model, walk, has_cov)
    return _with_what_is_owed(walk, owed)


def smoothed_in_parallel(model: StateSpace, walk: Walk) -> list[Variable]:
    """Return the same as a scan of elements: ``r -> M r + s`` and ``N -> M N Mᵀ + S`` compose."""
    dtype = walk.mean.type.dtype
    move = pt.cast(model.transition, dtype)
    g, across = walk.z, pt.swapaxes(walk.z, 1, 2)
    keep = pt.eye(walk.mean.shape[1], dtype=dtype) - pt.swapaxes(walk.w, 1, 2) @ g
    back = pt.swapaxes(move @ keep, 1, 2)

    def compose(later: Sequence[Variable], then: Sequence[Variable]) -> tuple[Variable, ...]:
        (m1, s1, n1), (m2, s2, n2) = later, then
        return m2 @ m1, m2 @ s1 + s2, m2 @ n1 @ m2.T + n2

    elements = (back, (across @ walk.e[:, :, None])[:, :, 0], across @ g)
    _, *owed = associative_scan(compose, elements, reverse=True)
    return _with_what_is_owed(walk, owed)


def _with_what_is_owed(walk: Walk, owed: Sequence[Variable]) -> list[Variable]:
    """Return the smoothed moments, given `r` and, if it is there, `N`."""
    before, spread = walk.predicted_mean[:-1], walk.predicted_cov[:-1]
    results = [before + (spread @ owed[0][:, :, None])[:, :, 0]]
    return [*results, *(spread - spread @ information @ spread for information in owed[1:])]


def _walk_back(model: StateSpace, walk: Walk, has_cov: bool) -> list[Variable]:
    """Return `r` and, with `has_cov`, `N` before each step."""
    dtype = walk.mean.type.dtype
    move = pt.cast(model.transition, dtype)
    timed = is_timed("transition", model.transition)
    start = pt.zeros_like(walk.predicted_mean[0])

    def step(w: Variable, e: Variable, z: Variable, *rest: Variable) -> list[Variable]:
        own, *states = rest if timed else (move, *rest)
        keep = pt.eye(w.shape[1], dtype=dtype) - w.T @ z
        found = [z.T @ e + keep.T @ (own.T @ states[0])]
        if has_cov:
            moved = own @ keep
            found.append(z.T @ z + moved.T @ states[1] @ moved)
        return found

    starts = [start, *([pt.zeros_like(walk.predicted_cov[0])] if has_cov else [])]
    owed = scan(
        step,
        [walk.w, walk.e, walk.z, *([move] if timed else [])],
        starts,
        go_backwards=True,
        return_list=True,
        return_updates=False,
        name="kalman_smoother",
    )
    return [rows[::-1] for rows in owed]


def simulated(model: StateSpace, parts: Parts, noise: Sequence[Variable]) -> list[Variable]:
    """Return states and observations that the model makes of standard normal numbers.

    `noise` are those of the first state, of all steps' states, and of their observations.
    """
    first, of_states, of_observations = noise
    mean = pt.cast(model.initial_mean, first.type.dtype)
    own = {**parts.fixed, **parts.timed}
    start = mean + root(pt.cast(model.initial_cov, first.type.dtype)) @ first
    pushed = _times(root(own["process_noise"]), of_states)
    if "state_intercept" in own:
        pushed = pushed + own["state_intercept"]
    move, is_one = own["transition"], "transition" in parts.timed

    def step(push: Variable, *rest: Variable) -> Variable:
        matrix, state = rest if is_one else (move, *rest)
        return matrix @ state + push

    states = scan(
        step,
        [pushed, *([move] if is_one else [])],
        start,
        return_updates=False,
        name="simulated_states",
    )
    states = pt.concatenate([start[None], states[:-1]])
    seen = _times(own["observation"], states) + _times(
        root(own["observation_cov"]), of_observations
    )
    return [states, seen + own.get("observation_intercept", 0)]


def root(covariance: Variable) -> Variable:
    """Return a matrix whose square is a covariance, which may be singular.

    In double precision: PyTensor's rewrite of eigenvectors of diagonal matrices knows no other.
    """
    values, vectors = pt.linalg.eigh(pt.cast(covariance, "float64"))
    return pt.cast(vectors * pt.sqrt(pt.maximum(values, 0))[..., None, :], covariance.type.dtype)


def _times(matrix: Variable, rows: Variable) -> Variable:
    """Return a matrix, or one for each row, times rows."""
    if matrix.type.ndim == 2:
        return rows @ matrix.T
    return (matrix @ rows[:, :, None])[:, :, 0]
