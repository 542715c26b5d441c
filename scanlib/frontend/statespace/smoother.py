r"""The Kalman smoother, and draws of the states given all observations.

Backwards, with what the filter kept (`M`, `u`, `J`: see `filter`)::

    r[t-1] = u + Mᵀ r[t]          smoothed mean        a + P r[t-1]
    N[t-1] = J + Mᵀ N[t] M        smoothed covariance  P - P N[t-1] P

from ``r[T-1] = 0``, ``N[T-1] = 0``: no covariance is inverted, so that they may be singular. P. de
Jong, "Smoothing and interpolation with the state-space model", JASA 84, 1989; draws as in J.
Durbin, S. J. Koopman, "A simple and efficient simulation smoother for state space time series
analysis", Biometrika 89, 2002.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.frontend.scan_function import scan
from scanlib.frontend.statespace.affine_walks import walk_squares, walk_vectors
from scanlib.frontend.statespace.filter import Parts, Walk
from scanlib.frontend.statespace.model import StateSpace


def smoothed(walk: Walk, has_cov: bool = True, in_parallel: bool = False) -> list[Variable]:
    """Return the mean, and with `has_cov` the covariance, of all states given all observations."""
    back, before, spread = pt.swapaxes(walk.move, 1, 2), walk.predicted_mean, walk.predicted_cov
    pull = pt.concatenate([walk.pull, pt.zeros_like(before[:1])])
    owed = walk_vectors(back, pull, True, in_parallel)[:-1]
    results = [before[:-1] + (spread[:-1] @ owed[:, :, None])[:, :, 0]]
    if has_cov:
        information = pt.concatenate([walk.information, pt.zeros_like(spread[:1])])
        owed = walk_squares(back, information, True, in_parallel)[:-1]
        results.append(spread[:-1] - spread[:-1] @ owed @ spread[:-1])
    return results


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
