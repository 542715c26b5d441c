r"""The Kalman filter of a model that does not vary, with the gain it settles at.

Covariances do not depend on the observations. A first loop computes them until they change no more;
from there on the gain is fixed and the predicted mean is a recurrence with one matrix::

    a[t+1] = F (I - Wᵀ G) a[t] + F Wᵀ C⁻¹ (y[t] - d) + c

(see `filter` for `C`, `W`, `G`). The derivatives are those of what is computed: a covariance that
has converged has derivatives that have, up to the tolerance times the number of steps it took.

A. C. Harvey, "Forecasting, structural time series models and the Kalman filter", 1989, section 3.3.
"""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.raise_op import CheckAndRaise

from scanlib.frontend.scan_function import scan
from scanlib.frontend.statespace.filter import Row, Walk, gain, predict, read_parts, solve
from scanlib.frontend.statespace.model import Observations, StateSpace
from scanlib.frontend.step_function import until

# A covariance has settled if no item changes by more, relative to the greatest.
TOLERANCES = {"float64": 1e-13, "float32": 1e-6}
MISSING = (
    "kalman_filter: method 'convergent' takes observations of which none is missing; use method "
    "'sequential'"
)


def convergent(model: StateSpace, given: Observations) -> Walk:
    """Return the filter's results, with a fixed gain as soon as the covariances have settled.

    `ValueError` if the model varies; when it runs, if an observation is missing.
    """
    if model.varies():
        raise ValueError(
            "kalman_filter: method 'convergent' is for models whose matrices do not vary over "
            "time; use method 'sequential'"
        )
    _, own, (start, cov) = read_parts(model, given)
    z, move = own["observation"], own["transition"]
    y = given.values
    if given.seen is not None:
        seen = pt.neq(given.seen, 0)
        y = CheckAndRaise(ValueError, MISSING)(pt.switch(seen, y, np.nan), pt.all(seen))
    if own["observation_intercept"] is not None:
        y = y - own["observation_intercept"]
    steps = y.shape[0]
    covs, lower, w, g, half, filtered = _covariances(own, cov, steps)
    count = pt.minimum(w.shape[0], steps)

    def settle(y: Variable, lower: Variable, w: Variable, mean: Variable) -> list[Variable]:
        e = solve(lower, y - z @ mean)
        return [predict(own, mean + w.T @ e, covs[0])[0], e]

    rows = [y[:count], lower[:count], w[:count]]
    first, e = scan(settle, rows, [start, None], return_updates=False, name="kalman_settling")
    means = first.owner.inputs[0]
    direct = g[-1]
    driven = pt.linalg.solve_triangular(lower[-1], y[count:].T, lower=True, b_ndim=2).T
    push = driven @ (w[-1] @ move.T)
    if own["state_intercept"] is not None:
        push = push + own["state_intercept"]
    matrix = move - move @ w[-1].T @ direct
    settled = scan(
        lambda push, mean: matrix @ mean + push,
        push,
        means[-1],
        return_updates=False,
        name="kalman_settled",
    )
    means = pt.concatenate([means, settled])

    def followed(rows: Variable, total: Variable) -> Variable:
        """Return rows, and the last one again for all steps that follow."""
        last = rows[-1]
        return pt.concatenate([rows[:count], pt.broadcast_to(last, [total - count, *last.shape])])

    e = pt.concatenate([e, driven - means[count:-1] @ direct.T])
    gain, across = w.mT, g.mT

    def times(matrices: Variable) -> Variable:
        return (followed(matrices, steps) @ e[:, :, None])[:, :, 0]

    size = z.shape[0] * np.log(2 * np.pi)
    density = -0.5 * (pt.sum(e**2, axis=1) + size) - followed(half, steps)
    return Walk(
        means,
        pt.concatenate([covs[:1], followed(covs[1:], steps)]),
        means[:-1] + times(gain),
        followed(filtered, steps),
        pt.cast(density, start.type.dtype),
        followed(move - move @ gain @ g, steps),
        times(across),
        followed(across @ g, steps),
    )


def _covariances(own: Row, start: Variable, steps: Variable) -> list[Variable]:
    """Return, until they settle: predicted covariances, `C`, `W`, `G`, half of log det, filtered.

    There is at least one row, also where there are no steps.
    """
    z = own["observation"]
    tolerance = TOLERANCES.get(start.type.dtype, 1e-6)

    def step(cov: Variable) -> Any:
        lower, w, g = gain(z, cov, own["observation_cov"])
        filtered = cov - w.T @ w
        after = predict(own, pt.zeros_like(start[0]), filtered)[1]
        half = pt.sum(pt.log(pt.diagonal(lower)))
        change, size = pt.max(abs(after - cov)), pt.max(abs(after))
        return [after, lower, w, g, half, filtered], until(pt.le(change, tolerance * size))

    trace, *outputs = scan(
        step,
        outputs_info=[start, *[None] * 5],
        n_steps=pt.maximum(steps, 1),
        return_updates=False,
        name="kalman_covariances",
    )
    return [trace.owner.inputs[0], *outputs]
