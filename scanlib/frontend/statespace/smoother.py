r"""The Kalman smoother, and draws of the states given all observations.

Backwards, with what the filter kept (`M`, `u`, `J`: see `filter`)::

    r[t-1] = u + Mᵀ r[t]          smoothed mean        a + P r[t-1]
    N[t-1] = J + Mᵀ N[t] M        smoothed covariance  P - P N[t-1] P

from ``r[T-1] = 0``, ``N[T-1] = 0``: no covariance is inverted, so that they may be singular. P. de
Jong, "Smoothing and interpolation with the state-space model", JASA 84, 1989; draws as in J.
Durbin, S. J. Koopman, "A simple and efficient simulation smoother for state space time series
analysis", Biometrika 89, 2002.

Both are affine recurrences, of vectors and of covariances, for matrices ``M[t]``, ``t = 0 … T-1``,
from the first row ``v[0]``, or ``V[0]``, or from the last row to the first (`reverse`)::

    x[t+1] = M[t] x[t] + v[t+1]        X[t+1] = M[t] X[t] M[t]ᵀ + V[t+1]

As a scan of elements, ``(M₁, V₁)`` and then ``(M₂, V₂)`` are ``(M₂ M₁, M₂ V₁ M₂ᵀ + V₂)``. The
derivative of such a recurrence is another one in the other direction, with ``Mᵀ``: parallel in
time, of any order.
"""

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.frontend.associative_functions import associative_scan
from scanlib.frontend.loop_function import loop
from scanlib.frontend.statespace.filter import Moments, Row, Walk
from scanlib.ops.loop import Loop, Results
from scanlib.ops.lowered.found_results import FoundResults

Element = tuple[Variable, Variable]


def smoothed(walk: Walk, has_cov: bool = True, in_parallel: bool = False) -> list[Variable]:
    """Return the mean, and with `has_cov` the covariance, of all states given all observations."""
    back, before, spread = walk.move.mT, walk.predicted_mean, walk.predicted_cov
    pull = pt.concatenate([walk.pull, pt.zeros_like(before[:1])])
    owed = affine_history(False, back, pull, True, in_parallel)[:-1]
    results = [before[:-1] + (spread[:-1] @ owed[:, :, None])[:, :, 0]]
    if has_cov:
        information = pt.concatenate([walk.information, pt.zeros_like(spread[:1])])
        owed = affine_history(True, back, information, True, in_parallel)[:-1]
        results.append(spread[:-1] - spread[:-1] @ owed @ spread[:-1])
    return results


def simulated(
    timed: Row, fixed: Row, moments: Moments, noise: Sequence[Variable]
) -> list[Variable]:
    """Return states and observations that a model makes of standard normal numbers.

    `moments` and `noise` are those of the first state; `noise` then has those of all steps' states,
    and of their observations.
    """
    own = {**fixed, **timed}
    start = moments[0] + root(moments[1]) @ noise[0]
    pushed = _times(root(own["process_noise"]), noise[1])
    if own["state_intercept"] is not None:
        pushed = pushed + own["state_intercept"]
    rows = {"push": pushed} | {k: v for k, v in timed.items() if k == "transition"}

    def step(state: Variable, row: Row) -> tuple[Variable, Variable]:
        return row.get("transition", own["transition"]) @ state + row["push"], state

    _, states = loop(step, start, rows, name="simulated_states")
    seen = _times(own["observation"], states) + _times(root(own["observation_cov"]), noise[2])
    shift = own["observation_intercept"]
    return [states, seen if shift is None else seen + shift]


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


# Walks


def affine_history(
    is_square: bool, matrices: Variable, rows: Variable, reverse: bool, in_parallel: bool = True
) -> Variable:
    """Return the history of a recurrence of vectors, or of covariances (`is_square`).

    `matrices` are (T, …, m, m), `rows` (T + 1, …, m) or (T + 1, …, m, m). With `in_parallel` it is
    a scan of elements.
    """
    start, others = (rows[-1], rows[:-1]) if reverse else (rows[0], rows[1:])

    def step(before: Variable, row: Element) -> tuple[Variable, Variable]:
        after = _moved(is_square, row[0], before) + row[1]
        return after, after

    _, trace = loop(step, start, (matrices, others), reverse=reverse, name="kalman_affine")
    history = trace.owner.inputs[0]
    if not in_parallel:
        return history

    def compose(first: Element, then: Element) -> Element:
        return then[0] @ first[0], _moved(is_square, then[0], first[1]) + then[1]

    # Nothing comes before the first row, whatever its matrix is.
    edge = pt.zeros([1, *list(matrices.shape)[1:]], dtype=matrices.type.dtype)
    whole = pt.concatenate([matrices, edge] if reverse else [edge, matrices])
    _, found = associative_scan(compose, (whole, rows), reverse=reverse)
    op = FoundResults(history.owner.op, _owed_to_squares if is_square else _owed_to_vectors)
    return op.make_node(*history.owner.inputs, found).outputs[0]


def _moved(is_square: bool, matrix: Variable, value: Variable) -> Variable:
    """Return ``M x``, or ``M X Mᵀ``; of batches, where there are any."""
    if is_square:
        return matrix @ value @ matrix.mT
    if value.type.ndim == 1:
        return matrix @ value
    return (matrix @ value[..., None])[..., 0]


def _owed_to_vectors(loop: Loop, results: Results, cotangents: list[Variable]) -> list[Variable]:
    """Return the cotangents of all states: the recurrence in the other direction."""
    back = loop.sequences[0].outer.mT
    return [affine_history(False, back, cotangents[0], not loop.reverse)]


def _owed_to_squares(loop: Loop, results: Results, cotangents: list[Variable]) -> list[Variable]:
    """Return the same for covariances."""
    back = loop.sequences[0].outer.mT
    return [affine_history(True, back, cotangents[0], not loop.reverse)]
