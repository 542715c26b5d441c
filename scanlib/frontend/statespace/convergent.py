r"""The Kalman filter of a model that does not vary, with the gain it settles at.

Covariances do not depend on the observations. A first loop computes them until they change no more;
from there on the gain is fixed and the predicted mean is a recurrence with one matrix::

    a[t+1] = F (I - Wᵀ G) a[t] + F Wᵀ C⁻¹ (y[t] - d) + c

(see `filter` for `C`, `W`, `G`). The derivatives are those of what is computed: a covariance that
has converged has derivatives that have, up to the tolerance times the number of steps it took.

A. C. Harvey, "Forecasting, structural time series models and the Kalman filter", 1989, section 3.3.
"""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.raise_op import CheckAndRaise

from scanlib.frontend.loop_function import loop
from scanlib.frontend.statespace.filter import (
    Row,
    Walk,
    first_moments,
    gain,
    predict,
    read_parts,
    sequential,
    solve,
)
from scanlib.frontend.statespace.model import Observations, StateSpace

# A covariance has settled if no item changes by more, relative to the greatest.
TOLERANCES = {"float64": 1e-13, "float32": 1e-6}
MISSING = (
    "kalman_filter: method 'convergent' takes observations of which none is missing; use method "
    "'sequential'"
)


def convergent(model: StateSpace, given: Observations) -> Walk:
    """Return the filter's results, with a fixed gain as soon as the covariances have settled.

    Raises
    ------
    ValueError
        If the model varies; when it runs, if an observation is missing.
    """
    if model.varies():
        raise ValueError(
            "kalman_filter: method 'convergent' is for models whose matrices do not vary over "
            "time; use method 'sequential'"
        )
    y, own = given.values, read_parts(model, given)[1]
    if given.seen is not None:
        seen = pt.neq(given.seen, 0)
        y = CheckAndRaise(ValueError, MISSING)(pt.switch(seen, y, np.nan), pt.all(seen))
    count = settling_steps(own, *first_moments(model, given), y.shape[0])
    first = sequential(model, Observations(y[:count], None, {}))
    # From here on the gain is that of the last covariance.
    y, cov = y[count:], first.predicted_cov[-1]
    z, transition = own["observation"], own["transition"]
    lower, w, g = gain(z, cov, own["observation_cov"])
    move = transition - transition @ w.T @ g
    if own["observation_intercept"] is not None:
        y = y - own["observation_intercept"]
    driven = solve(lower, y.T).T
    push = driven @ (transition @ w.T).T
    if own["state_intercept"] is not None:
        push = push + own["state_intercept"]

    def step(mean: Variable, push: Variable) -> tuple[Variable, Variable]:
        after = move @ mean + push
        return after, after

    _, means = loop(step, first.predicted_mean[-1], push, name="kalman_settled")
    before = pt.concatenate([first.predicted_mean[-1:], means])[:-1]
    e = driven - before @ g.T
    density = -0.5 * (pt.sum(e**2, axis=1) + z.shape[0] * np.log(2 * np.pi))
    density = density - pt.sum(pt.log(pt.diagonal(lower)))

    def always(value: Variable) -> Variable:
        return pt.broadcast_to(value, [y.shape[0], *value.shape])

    then = Walk(
        means,
        always(cov),
        before + e @ w,
        always(cov - w.T @ w),
        pt.cast(density, cov.type.dtype),
        always(move),
        e @ g,
        always(g.T @ g),
    )
    return Walk(*map(pt.concatenate, zip(vars(first).values(), vars(then).values(), strict=True)))


def settling_steps(own: Row, mean: Variable, cov: Variable, steps: Variable) -> Variable:
    """Return after how many steps covariances have settled."""
    tolerance = TOLERANCES.get(cov.type.dtype, 1e-6)

    def step(before: tuple[Variable, Variable], _: None) -> tuple[tuple, None, Variable]:
        count, cov = before
        _, w, _ = gain(own["observation"], cov, own["observation_cov"])
        _, after = predict(own, mean, cov - w.T @ w)
        change, size = pt.max(abs(after - cov)), pt.max(abs(after))
        return (count + 1, after), None, pt.le(change, tolerance * size)

    (count, _), *_ = loop(step, (0, cov), length=steps, name="kalman_covariances")
    return count
