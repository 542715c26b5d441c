"""The Kalman filter, the smoother, and draws of states: what users call."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.random.type import RandomGeneratorType

from scanlib.frontend.statespace.convergent import convergent
from scanlib.frontend.statespace.filter import Filtered, Walk, of_batch, read_parts, sequential
from scanlib.frontend.statespace.model import Observations, StateSpace, dtype_of, read_observations
from scanlib.frontend.statespace.parallel import parallel, smoothed_by_factors
from scanlib.frontend.statespace.smoother import simulated, smoothed
from scanlib.frontend.values import brief

METHODS: dict[str, Callable[[StateSpace, Observations], Walk]] = {
    "sequential": sequential,
    "parallel": parallel,
    "square-root": partial(parallel, form="square-root"),
    "convergent": convergent,
}


@dataclass(frozen=True, eq=False)
class Smoothed:
    """What `kalman_smoother` returns; with a batch of series, its dimensions come first.

    Attributes
    ----------
    mean, cov : TensorVariable, (T, m) and (T, m, m)
        Of each state, given all observations.
    filtered : Filtered
        What the filter found before.
    """

    mean: Variable
    cov: Variable
    filtered: Filtered


def kalman_filter(
    y: Any, model: StateSpace, observed: Any = None, method: str = "sequential"
) -> Filtered:
    """Return what the observations so far say of the states, and the likelihood.

    Parameters
    ----------
    y : tensor_like, (T,), (T, p) or (…, T, p)
        Observations; with more dimensions, of a batch of series.
    model : StateSpace
    observed : tensor_like of bool, or True, optional
        What of `y` is observed, in its shape. By default NaN is missing. True says that all is,
        which is less work, above all in a batch: covariances are then the same for all series.
    method : {"sequential", "parallel", "square-root", "convergent"}, optional
        How the states are computed. ``"sequential"``: from step to step, on a CPU the fastest.
        ``"parallel"``: by a scan of associative elements, in logarithmic depth under JAX.
        ``"square-root"``: the same with factors of covariances, which keeps single precision
        accurate. ``"convergent"``: for models that do not vary and observations of which none is
        missing; once the covariances have settled, what follows is a linear recurrence.

    Returns
    -------
    Filtered
        ``log_likelihood``, ``log_densities``, ``mean``, ``cov``, ``predicted_mean`` and
        ``predicted_cov``.

    Raises
    ------
    TypeError, ValueError
        If an argument is not as described, or `method` cannot be used for the model.

    Notes
    -----
    R. E. Kalman, "A new approach to linear filtering and prediction problems", Journal of Basic
    Engineering 82, 1960. docs/kalman.md has the sources of the other methods.

    Examples
    --------
    >>> import numpy as np, scanlib
    >>> model = scanlib.StateSpace([[1.0]], [[1.0]], [[0.5]], [[1.0]], [0.0], [[10.0]])
    >>> found = scanlib.kalman_filter([1.0, np.nan, 1.2], model)
    >>> found.mean.eval()[:, 0].round(4)
    array([0.9091, 0.9091, 1.1   ])
    """
    given = read_observations("kalman_filter", y, model, observed)
    return Filtered(*of_batch(given, _walk("kalman_filter", model, given, method).filtered()))


def kalman_smoother(
    y: Any, model: StateSpace, observed: Any = None, method: str = "sequential"
) -> Smoothed:
    """Return what all observations say of the states.

    Parameters
    ----------
    y, model, observed, method
        As in `kalman_filter`. With ``"parallel"`` and ``"square-root"`` the way back is a scan of
        associative elements, too.

    Returns
    -------
    Smoothed
        ``mean``, ``cov``, and ``filtered``, what the filter found.

    Raises
    ------
    TypeError, ValueError
        As `kalman_filter`.

    Examples
    --------
    >>> import numpy as np, scanlib
    >>> model = scanlib.StateSpace([[1.0]], [[1.0]], [[0.5]], [[1.0]], [0.0], [[10.0]])
    >>> scanlib.kalman_smoother([1.0, np.nan, 1.2], model).mean.eval()[:, 0].round(4)
    array([1.  , 1.05, 1.1 ])
    """
    given = read_observations("kalman_smoother", y, model, observed)
    walk = _walk("kalman_smoother", model, given, method)
    if method == "square-root":
        moments = smoothed_by_factors(model, given, walk)
    else:
        moments = smoothed(walk, in_parallel=method == "parallel")
    mean, cov, *filtered = of_batch(given, [*moments, *walk.filtered()])
    return Smoothed(mean, cov, Filtered(*filtered))


def kalman_sample(
    y: Any, model: StateSpace, rng: Any, observed: Any = None, draws: Any = None
) -> tuple[Variable, Variable]:
    """Draw the states, given all observations.

    Parameters
    ----------
    y, model, observed
        As in `kalman_filter`.
    rng : random generator
        A shared or symbolic generator, such as ``pytensor.shared(numpy.random.default_rng())``.
    draws : int or integer scalar, optional
        How many draws there are of each series, in a dimension in front; by default one, without.

    Returns
    -------
    next_rng : variable
        The generator after the draws: for `updates` of `pytensor.function`.
    states : TensorVariable, (draws, …, T, m)

    Raises
    ------
    TypeError, ValueError
        As `kalman_filter`; `TypeError` also if `rng` is no generator.

    Notes
    -----
    J. Durbin, S. J. Koopman, "A simple and efficient simulation smoother for state space time
    series analysis", Biometrika 89, 2002. Covariances may be singular.

    Examples
    --------
    >>> import numpy as np, pytensor, scanlib
    >>> model = scanlib.StateSpace([[1.0]], [[1.0]], [[0.5]], [[1.0]], [0.0], [[10.0]])
    >>> rng = pytensor.shared(np.random.default_rng(1))
    >>> next_rng, states = scanlib.kalman_sample([1.0, 1.5, 1.2], model, rng, draws=20_000)
    >>> draw = pytensor.function([], states, updates={rng: next_rng})
    >>> np.round(draw().mean(axis=0)[:, 0] - [1.1222, 1.2394, 1.2262], 1) + 0
    array([0., 0., 0.])
    """
    function = "kalman_sample"
    given = read_observations(function, y, model, observed)
    if not isinstance(getattr(rng, "type", None), RandomGeneratorType):
        raise TypeError(
            f"{function}: rng must be a random generator, such as "
            f"pytensor.shared(numpy.random.default_rng()), got {brief(rng)}"
        )
    dtype = dtype_of(given.values, model)
    size = model.initial_mean.shape[0]
    *batch, steps, width = given.batch.get(given.values, given.values).shape
    before = [*([] if draws is None else [draws]), *batch]
    noise, wide = [], {}
    for shape in ([size], [steps, size], [steps, width]):
        rng, drawn = pt.random.normal(size=[*before, *shape], rng=rng).owner.outputs
        own = pt.TensorType(dtype, (None,) * len(shape))()
        noise.append(own)
        wide[own] = pt.cast(drawn, dtype)
    states, values = simulated(*read_parts(model, given), noise)
    if given.seen is not None:
        values = values * given.seen
    centred = replace(
        model,
        initial_mean=pt.zeros_like(model.initial_mean),
        state_intercept=None,
        observation_intercept=None,
    )
    rest = Observations(given.values - values, given.seen, {})
    (mean,) = smoothed(sequential(centred, rest), has_cov=False)
    (result,) = vectorize_graph([states + mean], wide | given.batch)
    return rng, result


def _walk(function: str, model: StateSpace, given: Observations, method: Any) -> Walk:
    """Return the results of the filter by one of its methods."""
    if method not in METHODS:
        raise ValueError(f"{function}: method must be one of {tuple(METHODS)}, got {brief(method)}")
    return METHODS[method](model, given)
