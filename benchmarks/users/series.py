"""Time series: autoregressions, volatility, smoothing, regimes."""

from typing import Any

import numpy as np

from benchmarks.users.declared import Lagged, UserLoop, user_loop

STEPS = 2_000


@user_loop
def ar2_companion(rng: np.random.Generator) -> UserLoop:
    """AR(2), both lags in one state."""
    return UserLoop(
        lambda m, x, h, p: m.stack([p[0] * h[0] + p[1] * h[1] + x, h[0]]),
        rows=[rng.normal(size=STEPS)],
        states=[np.zeros(2)],
        parameters=[np.array([0.5, 0.3])],
    )


@user_loop
def ar5_buffer(rng: np.random.Generator) -> UserLoop:
    """AR(5), a buffer of lags."""
    return UserLoop(
        lambda m, x, h, p: m.concatenate([(m.dot(p, h) + m.tanh(x))[None], h[:-1]]),
        rows=[rng.normal(size=STEPS)],
        states=[np.zeros(5)],
        parameters=[np.full(5, 0.15)],
    )


@user_loop
def narma(rng: np.random.Generator) -> UserLoop:
    """NARMA, a buffer of 12 lags."""

    def step(m: Any, x: Any, h: Any) -> Any:
        new = m.tanh(0.3 * h[0] + 0.05 * h[0] * h.sum() + 1.5 * x * h[-1] + 0.1)
        return m.concatenate([new[None], h[:-1]])

    return UserLoop(step, rows=[0.1 * rng.normal(size=STEPS)], states=[np.zeros(12)])


@user_loop
def garch_stacked(rng: np.random.Generator) -> UserLoop:
    """GARCH(1, 1), variance and return in one state."""
    return UserLoop(
        lambda m, x, h, p: m.stack([p[0] + p[1] * h[1] ** 2 + p[2] * h[0], x]),
        rows=[rng.normal(size=STEPS)],
        states=[np.ones(2)],
        parameters=[np.array([0.1, 0.1, 0.8])],
    )


@user_loop
def dcc_garch(rng: np.random.Generator) -> UserLoop:
    """DCC-GARCH of two series."""

    def step(m: Any, e: Any, h: Any, Q: Any, p: Any) -> Any:
        h = p[0] + p[1] * e**2 + p[2] * h
        u = e / m.sqrt(h)
        Q = (1 - p[3] - p[4]) * np.eye(2) + p[3] * m.outer(u, u) + p[4] * Q
        d = 1 / m.sqrt(m.diag(Q))
        R = Q * d[:, None] * d[None, :]
        det = R[0, 0] * R[1, 1] - R[0, 1] * R[1, 0]
        distance = (u[0] ** 2 - 2 * R[0, 1] * u[0] * u[1] + u[1] ** 2) / det
        return h, Q, m.log(h).sum() + m.log(det) + distance

    return UserLoop(
        step,
        rows=[rng.normal(size=(STEPS // 2, 2))],
        states=[np.ones(2), np.eye(2), None],
        parameters=[np.array([0.1, 0.1, 0.8, 0.05, 0.9])],
        keep=2,
    )


@user_loop
def holt_winters(rng: np.random.Generator) -> UserLoop:
    """Holt–Winters, a season of 12 by a lag."""

    def step(m: Any, x: Any, season: Any, level: Any, trend: Any, p: Any) -> Any:
        new = p[0] * (x - season) + (1 - p[0]) * (level + trend)
        trend = p[1] * (new - level) + (1 - p[1]) * trend
        return p[2] * (x - new) + (1 - p[2]) * season, new, trend

    return UserLoop(
        step,
        rows=[rng.normal(size=STEPS)],
        states=[Lagged(np.zeros(12)), 0.0, 0.0],
        parameters=[np.array([0.3, 0.1, 0.2])],
        keep=1,
    )


@user_loop
def seasonal_buffer(rng: np.random.Generator) -> UserLoop:
    """Exponential smoothing, a season of 7 in a buffer."""

    def step(m: Any, x: Any, level: Any, season: Any, p: Any) -> Any:
        error = x - level - season[0]
        last = (season[0] + p[1] * error)[None]
        return level + p[0] * error, m.concatenate([season[1:], last]), error

    return UserLoop(
        step,
        rows=[rng.normal(size=STEPS // 2)],
        states=[0.0, np.zeros(7), None],
        parameters=[np.array([0.2, 0.1])],
        keep=2,
    )


@user_loop
def switching_ar(rng: np.random.Generator) -> UserLoop:
    """AR(1), coefficients from a table by regime."""
    return UserLoop(
        lambda m, x, s, h, P: P[s, 0] * h + P[s, 1] * x,
        rows=[rng.normal(size=STEPS // 2), rng.integers(0, 3, STEPS // 2)],
        states=[0.0],
        parameters=[0.3 * rng.normal(size=(3, 2))],
    )


@user_loop
def threshold_ar(rng: np.random.Generator) -> UserLoop:
    """AR(1), one coefficient above a threshold, one below."""
    return UserLoop(
        lambda m, x, h, a, b: m.where(h > 0, a * h, b * h) + x,
        rows=[rng.normal(size=STEPS // 2)],
        states=[0.0],
        parameters=[0.5, -0.4],
    )


@user_loop
def poisson_counts(rng: np.random.Generator) -> UserLoop:
    """Counts, discounted gamma prior."""

    def step(m: Any, k: Any, a: Any, b: Any, discount: Any) -> Any:
        a, b = discount * a + k, discount * b + 1
        return a, b, m.gammaln(a) - m.gammaln(a - k) + a * m.log(b)

    return UserLoop(
        step,
        rows=[rng.poisson(3, STEPS)],
        states=[1.0, 1.0, None],
        parameters=[0.9],
        keep=2,
    )


@user_loop
def median_filter(rng: np.random.Generator) -> UserLoop:
    """Running median of 9."""

    def step(m: Any, x: Any, buffer: Any) -> Any:
        buffer = m.concatenate([buffer[1:], x[None]])
        return buffer, m.sort(buffer)[4]

    return UserLoop(step, rows=[rng.normal(size=STEPS // 2)], states=[np.zeros(9), None], keep=1)
