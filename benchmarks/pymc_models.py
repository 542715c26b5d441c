"""Models of PyMC and pymc-extras with a recurrence in them, written as their users write them.

Each function returns a model on simulated data of a given length. Nothing in them knows scanlib:
loops come from PyMC's distributions, from pymc-extras, or from ``pytensor.scan``. Those of
`WITH_DRAWS`, whose density PyMC derives from the draws of a loop, take the function that makes it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pymc as pm
import pytensor
import pytensor.tensor as pt


def noise(length: int, seed: int = 0) -> np.ndarray:
    """Return standard normal data."""
    return np.random.default_rng(seed).normal(size=length)


def autoregression(length: int) -> pm.Model:
    """AR(2); PyMC's density of it is a convolution, its draws are a loop."""
    with pm.Model() as model:
        rho = pm.Normal("rho", 0, 0.5, shape=2)
        sigma = pm.HalfNormal("sigma", 1)
        pm.AR("y", rho=rho, sigma=sigma, init_dist=pm.Normal.dist(0, 1), observed=noise(length))
    return model


def random_walk(length: int) -> pm.Model:
    """A Gaussian random walk seen through noise; density and draws have no loop."""
    with pm.Model() as model:
        step = pm.HalfNormal("step", 1)
        start = pm.Normal.dist(0, 1)
        level = pm.GaussianRandomWalk("level", sigma=step, init_dist=start, steps=length - 1)
        pm.Normal("y", level, 1.0, observed=np.cumsum(noise(length)))
    return model


def garch(length: int) -> pm.Model:
    """GARCH(1, 1) of PyMC."""
    with pm.Model() as model:
        omega = pm.HalfNormal("omega", 1)
        alpha, beta = pm.Beta("alpha", 1, 5), pm.Beta("beta", 5, 1)
        parameters = {"omega": omega, "alpha_1": alpha, "beta_1": beta, "initial_vol": 1.0}
        pm.GARCH11("y", **parameters, observed=noise(length))
    return model


def smoothing(length: int) -> pm.Model:
    """Exponential smoothing: the level is a weighted mean of the observation and itself."""
    y = noise(length)
    with pm.Model() as model:
        alpha = pm.Beta("alpha", 2, 2)
        start, sigma = pm.Normal("start", 0, 1), pm.HalfNormal("sigma", 1)
        level = pytensor.scan(
            lambda y, level, alpha: alpha * y + (1 - alpha) * level,
            sequences=pt.as_tensor(y[:-1]),
            outputs_info=[start],
            non_sequences=[alpha],
            return_updates=False,
        )
        pm.Normal("y", pt.concatenate([start[None], level]), sigma, observed=y)
    return model


def adstock(length: int, channels: int = 5) -> pm.Model:
    """Advertising that carries over from week to week, then saturates, for several channels."""
    rng = np.random.default_rng(1)
    spent = rng.gamma(2.0, 1.0, size=(length, channels))
    with pm.Model() as model:
        carried = pm.Beta("carried", 2, 2, shape=channels)
        effect = pm.HalfNormal("effect", 1, shape=channels)
        half = pm.Gamma("half", 2, 1, shape=channels)
        sigma = pm.HalfNormal("sigma", 1)
        stock = pytensor.scan(
            lambda spent, stock, carried: spent + carried * stock,
            sequences=pt.as_tensor(spent),
            outputs_info=[pt.zeros(channels)],
            non_sequences=[carried],
            return_updates=False,
        )
        sales = pt.dot(stock / (stock + half), effect)
        pm.Normal("y", sales, sigma, observed=rng.normal(2, 1, size=length))
    return model


def epidemic(length: int, people: float = 1e5) -> pm.Model:
    """SIR by explicit steps of a day, with counts of new cases."""
    rng = np.random.default_rng(2)
    with pm.Model() as model:
        contacts = pm.LogNormal("contacts", np.log(0.4), 0.3)
        recovery = pm.LogNormal("recovery", np.log(0.2), 0.3)
        infected = pm.LogNormal("infected", np.log(50.0), 0.5)

        def day(
            susceptible: Any, infected: Any, contacts: Any, recovery: Any
        ) -> tuple[Any, Any, Any]:
            new = contacts * susceptible * infected / people
            return susceptible - new, infected + new - recovery * infected, new

        *_, new = pytensor.scan(
            day,
            outputs_info=[people - infected, infected, None],
            non_sequences=[contacts, recovery],
            n_steps=length,
            return_updates=False,
        )
        pm.Poisson("cases", new, observed=rng.poisson(20.0, size=length))
    return model


def hidden_chain(length: int, states: int = 3) -> pm.Model:
    """A hidden Markov chain with normal emissions, its states marginalized by pymc-extras."""
    import pymc_extras as pmx

    with pm.Model() as model:
        moves = pm.Dirichlet("moves", np.ones((states, states)) + 4 * np.eye(states))
        means = pm.Normal("means", np.linspace(-2, 2, states), 1.0, shape=states)
        first = pm.Categorical.dist(p=np.full(states, 1 / states))
        chain = pmx.DiscreteMarkovChain("chain", P=moves, init_dist=first, shape=(length,))
        pm.Normal("y", means[chain], 1.0, observed=noise(length))
    return pmx.marginalize(model, ["chain"])


def state_space(length: int) -> pm.Model:
    """A local linear trend of pymc-extras: a Kalman filter with two states."""
    import pandas as pd
    from pymc_extras.statespace import structural

    trend = structural.LevelTrend(order=2, innovations_order=[0, 1])
    whole = (trend + structural.MeasurementError(name="obs")).build(verbose=False)
    index = pd.date_range("2000-01-01", periods=length, freq="D")
    data = pd.DataFrame({"y": np.cumsum(noise(length))}, index=index)
    with pm.Model(coords=whole.coords) as model:
        pm.Normal("initial_level_trend", 0, 1, dims="state_level_trend")
        pm.HalfNormal("sigma_level_trend", 1, dims="shock_level_trend")
        pm.HalfNormal("sigma_obs", 1)
        pm.Deterministic("P0", pt.eye(2), dims=("state", "state_aux"))
        whole.build_statespace_graph(data)
    return model


def drawn_autoregression(length: int, scan: Callable[..., Any] = pytensor.scan) -> pm.Model:
    """AR(2) by two taps, its initial values and coefficients unknown."""

    def dist(start: Any, rho: Any, sigma: Any, size: Any) -> Any:
        def step(before: Any, last: Any, rho: Any, sigma: Any) -> tuple[Any, Any]:
            y = rho[0] * last + rho[1] * before + pm.Normal.dist(0, sigma)
            return y, pm.pytensorf.collect_default_updates([y])

        ys, _ = scan(
            step,
            outputs_info=[{"initial": start, "taps": [-2, -1]}],
            non_sequences=[rho, sigma],
            n_steps=length,
        )
        return ys

    with pm.Model() as model:
        start, rho = pm.Normal("start", 0, 1, shape=2), pm.Normal("rho", 0, 0.5, shape=2)
        sigma = pm.HalfNormal("sigma", 1)
        shapes = {"ndims_params": [1, 1, 0], "ndim_supp": 1}
        pm.CustomDist("y", start, rho, sigma, dist=dist, observed=noise(length), **shapes)
    return model


def drawn_garch(length: int, scan: Callable[..., Any] = pytensor.scan) -> pm.Model:
    """GARCH(1, 1): of the two states, the variance is no draw."""

    def dist(omega: Any, alpha: Any, beta: Any, size: Any) -> Any:
        def step(y: Any, variance: Any, omega: Any, alpha: Any, beta: Any) -> tuple[Any, Any]:
            variance = omega + alpha * y**2 + beta * variance
            y = pm.Normal.dist(0, pt.sqrt(variance))
            return (y, variance), pm.pytensorf.collect_default_updates([y])

        (ys, _), _ = scan(
            step,
            outputs_info=[pt.zeros(()), pt.ones(())],
            non_sequences=[omega, alpha, beta],
            n_steps=length,
        )
        return ys

    with pm.Model() as model:
        omega = pm.HalfNormal("omega", 1)
        alpha, beta = pm.Beta("alpha", 1, 5), pm.Beta("beta", 5, 1)
        pm.CustomDist("y", omega, alpha, beta, dist=dist, ndim_supp=1, observed=noise(length))
    return model


def drawn_chain(length: int, scan: Callable[..., Any] = pytensor.scan) -> pm.Model:
    """A Markov chain of three states that is observed."""

    def dist(moves: Any, size: Any) -> Any:
        def step(state: Any, moves: Any) -> tuple[Any, Any]:
            state = pm.Categorical.dist(p=moves[state])
            return state, pm.pytensorf.collect_default_updates([state])

        first = pt.constant(0, dtype="int64")
        states, _ = scan(step, outputs_info=[first], non_sequences=[moves], n_steps=length)
        return states

    seen = np.random.default_rng(3).integers(0, 3, size=length)
    with pm.Model() as model:
        moves = pm.Dirichlet("moves", np.ones((3, 3)))
        pm.CustomDist(
            "state", moves, dist=dist, ndims_params=[2], ndim_supp=1, dtype="int64", observed=seen
        )
    return model


def drawn_walk(length: int, scan: Callable[..., Any] = pytensor.scan) -> pm.Model:
    """A random walk seen through noise: each level is a parameter."""

    def dist(scale: Any, size: Any) -> Any:
        def step(level: Any, scale: Any) -> tuple[Any, Any]:
            level = level + pm.Normal.dist(0, scale)
            return level, pm.pytensorf.collect_default_updates([level])

        start = pt.zeros(())
        levels, _ = scan(step, outputs_info=[start], non_sequences=[scale], n_steps=length)
        return levels

    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1)
        level = pm.CustomDist("level", scale, dist=dist, ndim_supp=1, shape=(length,))
        pm.Normal("y", level, 1.0, observed=np.cumsum(noise(length)))
    return model


MODELS: dict[str, Callable[[int], pm.Model]] = {
    "AR(2)": autoregression,
    "random walk": random_walk,
    "GARCH(1, 1)": garch,
    "exponential smoothing": smoothing,
    "adstock, 5 channels": adstock,
    "SIR": epidemic,
    "hidden Markov chain": hidden_chain,
    "linear trend, Kalman filter": state_space,
}
WITH_DRAWS: dict[str, Callable[..., pm.Model]] = {
    "AR(2), drawn in a loop": drawn_autoregression,
    "GARCH(1, 1), drawn in a loop": drawn_garch,
    "Markov chain, drawn in a loop": drawn_chain,
    "random walk, drawn in a loop": drawn_walk,
}
EXTRAS = (hidden_chain, state_space)
"""Models that need pymc-extras."""
