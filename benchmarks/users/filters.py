"""Filters: Kalman, hidden Markov models, particles, recursive least squares."""

from typing import Any

import numpy as np

from benchmarks.users.declared import Given, UserLoop, user_loop

TREND = np.array([[1.0, 1.0], [0.0, 1.0]])


@user_loop
def kalman_trend(rng: np.random.Generator) -> UserLoop:
    """Kalman filter, two states, one series."""

    def step(m: Any, y: Any, a: Any, P: Any, q: Any, r: Any) -> Any:
        a, P = m.dot(TREND, a), m.dot(m.dot(TREND, P), TREND.T) + m.diag(q)
        PH = P[:, 0]
        s, error = PH[0] + r, y - a[0]
        gain = PH / s
        score = -0.5 * (m.log(s) + error * error / s)
        return a + gain * error, P - m.outer(gain, PH), score

    return UserLoop(
        step,
        rows=[rng.normal(size=2_000)],
        states=[np.zeros(2), 10.0 * np.eye(2), None],
        parameters=[np.array([0.1, 0.01]), 1.0],
        keep=2,
    )


@user_loop
def kalman_general(rng: np.random.Generator) -> UserLoop:
    """Kalman filter, three states, one series, matrices as parameters."""

    def step(m: Any, y: Any, a: Any, P: Any, F: Any, Q: Any, H: Any, r: Any) -> Any:
        a, P = m.dot(F, a), m.dot(m.dot(F, P), F.T) + Q
        PH = m.dot(P, H)
        s, error = m.dot(H, PH) + r, y - m.dot(H, a)
        gain = PH / s
        score = -0.5 * (m.log(s) + error * error / s)
        return a + gain * error, P - m.outer(gain, PH), score

    transition = 0.9 * np.eye(3) + 0.1 * np.eye(3, k=1)
    return UserLoop(
        step,
        rows=[rng.normal(size=2_000)],
        states=[Given(np.zeros(3)), Given(np.eye(3)), None],
        parameters=[transition, 0.1 * np.eye(3), np.ones(3), 1.0],
        keep=2,
        sized=True,
    )


@user_loop
def kalman_batch(rng: np.random.Generator) -> UserLoop:
    """Kalman filters, two states, 50 series."""

    def step(m: Any, y: Any, a: Any, P: Any, q: Any) -> Any:
        a = m.matmul(a, TREND.T)
        P = m.matmul(m.matmul(TREND, P), TREND.T) + q * np.eye(2)
        PH = P[:, :, 0]
        s, error = PH[:, 0] + 1.0, y - a[:, 0]
        gain = PH / s[:, None]
        score = -0.5 * (m.log(s) + error * error / s)
        return a + gain * error[:, None], P - gain[:, :, None] * PH[:, None, :], score

    return UserLoop(
        step,
        rows=[rng.normal(size=(300, 50))],
        states=[np.zeros((50, 2)), np.tile(np.eye(2), (50, 1, 1)), None],
        parameters=[0.1],
        keep=2,
    )


@user_loop
def hmm_scaled(rng: np.random.Generator) -> UserLoop:
    """Hidden Markov model, 6 states, scaled, emissions from a table."""

    def step(m: Any, o: Any, a: Any, A: Any, B: Any) -> Any:
        z = m.dot(a, A) * B[:, o]
        scale = z.sum()
        return z / scale, m.log(scale)

    return UserLoop(
        step,
        rows=[rng.integers(0, 12, 1_000)],
        states=[np.ones(6) / 6, None],
        parameters=[rng.dirichlet(np.ones(6), 6), rng.dirichlet(np.ones(12), 6)],
        keep=1,
    )


@user_loop
def hmm_logarithms(rng: np.random.Generator) -> UserLoop:
    """Hidden Markov model, 4 states, in logarithms."""
    return UserLoop(
        lambda m, e, a, A: m.logsumexp(a[:, None] + A, axis=0) + e,
        rows=[rng.normal(size=(1_000, 4))],
        states=[np.zeros(4)],
        parameters=[np.log(rng.dirichlet(np.ones(4), size=4))],
        last=True,
    )


@user_loop
def viterbi(rng: np.random.Generator) -> UserLoop:
    """Viterbi, 10 states."""
    return UserLoop(
        lambda m, e, v, A: (v[:, None] + A).max(axis=0) + e,
        rows=[rng.normal(size=(2_000, 10))],
        states=[np.zeros(10)],
        parameters=[rng.normal(size=(10, 10))],
    )


@user_loop
def particle_filter(rng: np.random.Generator) -> UserLoop:
    """Particle filter of stochastic volatility, 100 particles."""

    def step(m: Any, y: Any, noise: Any, u: Any, h: Any) -> Any:
        h = 0.95 * h + 0.3 * noise
        weights = -0.5 * h - 0.5 * y * y * m.exp(-h)
        largest = weights.max()
        weights = m.exp(weights - largest)
        total = weights.sum()
        drawn = m.searchsorted(m.cumsum(weights / total), (np.arange(100) + u) / 100)
        return h[m.clip(drawn, 0, 99)], largest + m.log(total / 100)

    return UserLoop(
        step,
        rows=[rng.normal(size=200), rng.normal(size=(200, 100)), rng.random(200)],
        states=[np.zeros(100), None],
        keep=1,
    )


@user_loop
def recursive_least_squares(rng: np.random.Generator) -> UserLoop:
    """Recursive least squares, 6 weights."""

    def step(m: Any, x: Any, y: Any, w: Any, P: Any) -> Any:
        Px = m.dot(P, x)
        gain = Px / (1 + m.dot(x, Px))
        return w + gain * (y - m.dot(x, w)), P - m.outer(gain, Px)

    return UserLoop(
        step,
        rows=[rng.normal(size=(500, 6)), rng.normal(size=500)],
        states=[np.zeros(6), np.eye(6)],
    )


@user_loop
def growing_covariance(rng: np.random.Generator) -> UserLoop:
    """Discounted covariance, log-determinant by Cholesky, 8 variables."""

    def step(m: Any, v: Any, P: Any) -> Any:
        P = 0.95 * P + m.outer(v, v)
        return P, m.log(m.diag(m.cholesky(P))).sum()

    return UserLoop(step, rows=[rng.normal(size=(300, 8))], states=[np.eye(8), None], keep=1)
