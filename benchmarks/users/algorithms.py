"""Iterations of numerics and computer science."""

from typing import Any

import numpy as np

from benchmarks.users.declared import Given, UserLoop, user_loop


@user_loop
def power_iteration(rng: np.random.Generator) -> UserLoop:
    """Power iteration, 16 × 16."""

    def step(m: Any, v: Any, A: Any) -> Any:
        z = m.dot(A, v)
        return z / m.sqrt((z * z).sum())

    return UserLoop(
        step,
        states=[Given(rng.normal(size=16))],
        parameters=[rng.normal(size=(16, 16))],
        n_steps=2_000,
    )


@user_loop
def sinkhorn(rng: np.random.Generator) -> UserLoop:
    """Sinkhorn, 32 × 32, in logarithms."""

    def step(m: Any, f: Any, g: Any, C: Any) -> Any:
        f = -m.logsumexp(g[None, :] - C, axis=1)
        return f, -m.logsumexp(f[:, None] - C, axis=0)

    return UserLoop(
        step,
        states=[np.zeros(32), np.zeros(32)],
        parameters=[rng.random((32, 32))],
        n_steps=200,
    )


@user_loop
def mixture(rng: np.random.Generator) -> UserLoop:
    """EM of a mixture, 200 points, 3 components."""

    def step(m: Any, mean: Any, log_scale: Any, log_weight: Any, x: Any) -> Any:
        scaled = (x[:, None] - mean[None, :]) / m.exp(log_scale)[None, :]
        share = m.softmax(log_weight[None, :] - log_scale[None, :] - 0.5 * scaled**2, axis=1)
        total = share.sum(axis=0)
        mean = (share * x[:, None]).sum(axis=0) / total
        variance = (share * (x[:, None] - mean[None, :]) ** 2).sum(axis=0) / total + 1e-3
        return mean, 0.5 * m.log(variance), m.log(total / 200)

    return UserLoop(
        step,
        states=[np.array([-1.0, 0.0, 1.0]), np.zeros(3), np.zeros(3)],
        parameters=[rng.normal(size=200)],
        n_steps=100,
    )


@user_loop
def newton_solve(rng: np.random.Generator) -> UserLoop:
    """Newton's method, three equations, by solve."""

    def step(m: Any, b: Any, x: Any) -> Any:
        rest = m.tanh(x) + 0.1 * x**3 - b
        J = m.diag(1 - m.tanh(x) ** 2 + 0.3 * x**2) + 0.05 * np.ones((3, 3))
        return x - m.solve(J, rest)

    return UserLoop(step, rows=[rng.random((300, 3))], states=[Given(np.full(3, 0.5))])


@user_loop
def edit_distance(rng: np.random.Generator) -> UserLoop:
    """Edit distance, rows of 50 letters."""

    def step(m: Any, letter: Any, row: Any, word: Any) -> Any:
        replaced = m.minimum(row[:-1] + m.not_equal(word, letter), row[1:] + 1)
        costs = m.concatenate([(row[0] + 1)[None], replaced])
        return m.cummin(costs - np.arange(51.0)) + np.arange(51.0)

    return UserLoop(
        step,
        rows=[rng.integers(0, 4, 200)],
        states=[np.arange(51.0)],
        parameters=[rng.integers(0, 4, 50)],
        has_gradient=False,
    )


@user_loop
def game_of_life(rng: np.random.Generator) -> UserLoop:
    """Game of Life, 32 × 32, by roll."""

    def step(m: Any, g: Any) -> Any:
        around = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)]
        n = sum(m.roll(m.roll(g, i, 0), j, 1) for i, j in around)
        return m.where(m.equal(n, 3) | (m.equal(g, 1) & m.equal(n, 2)), m.ones_like(g), 0.0)

    return UserLoop(
        step, states=[Given(1.0 * (rng.random((32, 32)) < 0.3))], n_steps=200, has_gradient=False
    )


@user_loop
def written_path(rng: np.random.Generator) -> UserLoop:
    """A path written into an array, 2,000 rows of four."""

    def step(m: Any, t: Any, x: Any, path: Any, W: Any) -> Any:
        return m.assign(path, t, m.tanh(m.dot(W, path[t - 1]) + x))

    return UserLoop(
        step,
        rows=[np.arange(1, 2_000), rng.normal(size=(1_999, 4))],
        states=[np.zeros((2_000, 4))],
        parameters=[0.3 * rng.normal(size=(4, 4))],
        last=True,
    )


@user_loop
def written_window(rng: np.random.Generator) -> UserLoop:
    """An autoregression of twelve steps, written into an array of 2,000 numbers."""

    def step(m: Any, x: Any, t: Any, path: Any, phi: Any) -> Any:
        return t + 1, m.assign(path, t, m.tanh(m.dot(phi, m.before(path, t, 12)) + x))

    return UserLoop(
        step,
        rows=[rng.normal(size=1_988)],
        states=[np.int64(12), np.zeros(2_000)],
        parameters=[0.1 * rng.normal(size=12)],
        n_steps=1_988,
        keep=1,
        last=True,
    )


@user_loop
def moving_deviation(rng: np.random.Generator) -> UserLoop:
    """The standard deviation of the last 20 of 2,000 numbers."""

    def step(m: Any, t: Any, x: Any) -> Any:
        return t + 1, m.before(x, t, 20).std()

    return UserLoop(
        step,
        states=[np.int64(20), None],
        parameters=[rng.normal(size=2_000)],
        n_steps=1_980,
        sized=True,
        keep=1,
    )
