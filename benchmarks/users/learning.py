"""Networks, optimizers and reinforcement learning."""

from typing import Any

import numpy as np

from benchmarks.users.declared import Given, UserLoop, user_loop


@user_loop
def rnn_float32(rng: np.random.Generator) -> UserLoop:
    """tanh network, 16 units, float32."""
    x, W = rng.normal(size=(1_000, 16)), 0.2 * rng.normal(size=(16, 16))
    return UserLoop(
        lambda m, x, h, W: m.tanh(m.dot(W, h) + x),
        rows=[x.astype("float32")],
        states=[np.zeros(16, "float32")],
        parameters=[W.astype("float32")],
        tolerance=1e-4,  # single precision
    )


@user_loop
def rnn_batch(rng: np.random.Generator) -> UserLoop:
    """tanh network, 16 units, batch of 32."""
    return UserLoop(
        lambda m, x, h, W, V: m.tanh(m.matmul(h, W) + m.matmul(x, V)),
        rows=[rng.normal(size=(300, 32, 8))],
        states=[np.zeros((32, 16))],
        parameters=[0.2 * rng.normal(size=(16, 16)), rng.normal(size=(8, 16))],
        last=True,
    )


@user_loop
def rnn_layer_norm(rng: np.random.Generator) -> UserLoop:
    """tanh network with layer normalization, 16 units."""

    def step(m: Any, x: Any, h: Any, W: Any) -> Any:
        z = m.dot(W, h) + x
        return m.tanh((z - z.mean()) / m.sqrt(z.var() + 1e-5))

    return UserLoop(
        step,
        rows=[rng.normal(size=(500, 16))],
        states=[np.zeros(16)],
        parameters=[0.2 * rng.normal(size=(16, 16))],
    )


@user_loop
def neural_ode(rng: np.random.Generator) -> UserLoop:
    """Neural differential equation, 8 – 32 – 8."""
    return UserLoop(
        lambda m, h, W, V: h + 0.05 * m.dot(V, m.tanh(m.dot(W, h))),
        states=[np.ones(8)],
        parameters=[0.1 * rng.normal(size=(32, 8)), 0.1 * rng.normal(size=(8, 32))],
        n_steps=500,
    )


@user_loop
def attention(rng: np.random.Generator) -> UserLoop:
    """Attention over a buffer of 32 × 8."""

    def step(m: Any, x: Any, buffer: Any) -> Any:
        buffer = m.concatenate([buffer[1:], x[None]])
        return buffer, m.dot(m.softmax(m.dot(buffer, x), axis=0), buffer)

    return UserLoop(
        step, rows=[rng.normal(size=(300, 8))], states=[np.zeros((32, 8)), None], keep=1
    )


@user_loop
def convolution(rng: np.random.Generator) -> UserLoop:
    """Convolution in a ring, 64 points, 5 weights, tanh."""

    def step(m: Any, u: Any, k: Any) -> Any:
        ring = m.concatenate([u[-2:], u, u[:2]])
        return m.tanh(sum(k[i] * ring[i : i + 64] for i in range(5)))

    return UserLoop(
        step,
        states=[Given(rng.random(64))],
        parameters=[0.3 * rng.normal(size=5)],
        n_steps=300,
    )


@user_loop
def gradient_descent(rng: np.random.Generator) -> UserLoop:
    """Gradient descent, logistic regression of 100 × 8."""

    def step(m: Any, w: Any, X: Any, y: Any) -> Any:
        def loss(w: Any) -> Any:
            z = m.dot(X, w)
            return (m.softplus(z) - y * z).sum()

        return w - 0.01 * m.gradient(loss, w)

    return UserLoop(
        step,
        states=[np.zeros(8)],
        parameters=[rng.normal(size=(100, 8)), 1.0 * (rng.random(100) < 0.5)],
        n_steps=200,
    )


@user_loop
def q_learning(rng: np.random.Generator) -> UserLoop:
    """Q-learning, a table of 10 × 4."""

    def step(m: Any, s: Any, a: Any, after: Any, reward: Any, Q: Any, rate: Any) -> Any:
        return m.add(Q, (s, a), rate * (reward + 0.9 * Q[after].max() - Q[s, a]))

    steps = 2_000
    states, actions, after = (rng.integers(0, n, steps) for n in (10, 4, 10))
    return UserLoop(
        step,
        rows=[states, actions, after, rng.normal(size=steps)],
        states=[np.zeros((10, 4))],
        parameters=[0.1],
        last=True,
    )


@user_loop
def td_lambda(rng: np.random.Generator) -> UserLoop:
    """Temporal differences with traces, 32 features."""

    def step(m: Any, x: Any, after: Any, reward: Any, w: Any, trace: Any, rate: Any) -> Any:
        error = reward + 0.9 * (after * w).sum() - (x * w).sum()
        trace = 0.8 * trace + x
        return w + rate * error * trace, trace

    features = 0.1 * rng.normal(size=(1_000, 32))
    return UserLoop(
        step,
        rows=[features[:-1], features[1:], rng.normal(size=999)],
        states=[np.zeros(32), np.zeros(32)],
        parameters=[0.01],
    )


@user_loop
def value_iteration(rng: np.random.Generator) -> UserLoop:
    """Value iteration, 20 states, 4 actions."""
    return UserLoop(
        lambda m, V, P, R: (R + 0.9 * m.matmul(P, V)).max(axis=0),
        states=[np.zeros(20)],
        parameters=[rng.dirichlet(np.ones(20), size=(4, 20)), rng.normal(size=(4, 20))],
        n_steps=200,
    )
