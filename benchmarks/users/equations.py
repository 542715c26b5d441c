"""Differential equations and mechanics, by explicit steps."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.users.declared import Given, UserLoop, user_loop

STEPS = 1_000
Field = Callable[..., Any]  # field(m, h, parameters)


def runge_kutta(field: Field, dt: float) -> Callable[..., Any]:
    """Return a step of Runge and Kutta's method of order four."""

    def step(m: Any, h: Any, p: Any) -> Any:
        k1 = field(m, h, p)
        k2 = field(m, h + dt / 2 * k1, p)
        k3 = field(m, h + dt / 2 * k2, p)
        k4 = field(m, h + dt * k3, p)
        return h + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)

    return step


@user_loop
def lotka_volterra(rng: np.random.Generator) -> UserLoop:
    """Lotka–Volterra, Runge–Kutta, stacked."""

    def field(m: Any, h: Any, p: Any) -> Any:
        meetings = h[0] * h[1]
        return m.stack([p[0] * h[0] - p[1] * meetings, -p[2] * h[1] + p[3] * meetings])

    return UserLoop(
        runge_kutta(field, 0.01),
        states=[Given(np.array([1.0, 2.0]))],
        parameters=[np.array([1.0, 0.5, 1.0, 0.3])],
        n_steps=STEPS,
    )


@user_loop
def seir(rng: np.random.Generator) -> UserLoop:
    """SEIR epidemic, Runge–Kutta, stacked, sizes known."""

    def field(m: Any, h: Any, p: Any) -> Any:
        infected, ill, well = p[0] * h[0] * h[2], p[1] * h[1], p[2] * h[2]
        return m.stack([-infected, infected - ill, ill - well, well])

    return UserLoop(
        runge_kutta(field, 0.1),
        states=[Given(np.array([0.99, 0.0, 0.01, 0.0]))],
        parameters=[np.array([0.5, 0.2, 0.1])],
        n_steps=STEPS,
        sized=True,
    )


@user_loop
def sir(rng: np.random.Generator) -> UserLoop:
    """SIR epidemic, three states."""

    def step(m: Any, s: Any, i: Any, r: Any, contact: Any, recovery: Any) -> Any:
        infected = contact * s * i
        return s - infected, i + infected - recovery * i, r + recovery * i

    return UserLoop(step, states=[0.99, 0.01, 0.0], parameters=[0.3, 0.1], n_steps=STEPS, keep=1)


@user_loop
def sir_batch(rng: np.random.Generator) -> UserLoop:
    """SIR epidemics, 64 stacked systems."""

    def step(m: Any, h: Any, contact: Any) -> Any:
        infected, well = contact * h[:, 0] * h[:, 1], 0.1 * h[:, 1]
        return h + 0.1 * m.stack([-infected, infected - well, well], axis=1)

    return UserLoop(
        step,
        states=[Given(rng.random((64, 3)))],
        parameters=[rng.random(64)],
        n_steps=STEPS // 2,
    )


def lorenz(m: Any, u: Any, v: Any, w: Any, p: Any) -> list[Any]:
    """One small step of Lorenz's equations."""
    return [
        u + 0.001 * p[0] * (v - u),
        v + 0.001 * (u * (p[1] - w) - v),
        w + 0.001 * (u * v - p[2] * w),
    ]


@user_loop
def lorenz_stacked(rng: np.random.Generator) -> UserLoop:
    """Lorenz, stacked, sizes known."""
    return UserLoop(
        lambda m, h, p: m.stack(lorenz(m, h[0], h[1], h[2], p)),
        states=[Given(np.array([1.0, 1.1, 1.2]))],
        parameters=[np.array([10.0, 28.0, 2.6])],
        n_steps=STEPS,
        sized=True,
    )


@user_loop
def lorenz_batch(rng: np.random.Generator) -> UserLoop:
    """Lorenz, 256 stacked systems."""
    return UserLoop(
        lambda m, h, p: m.stack(lorenz(m, h[:, 0], h[:, 1], h[:, 2], p), axis=1),
        states=[Given(rng.random((256, 3)))],
        parameters=[np.array([10.0, 28.0, 2.6])],
        n_steps=STEPS,
    )


@user_loop
def leapfrog(rng: np.random.Generator) -> UserLoop:
    """Leapfrog, 5 coordinates, gradient of the potential."""

    def energy(q: Any) -> Any:
        along = q[1:] - q[:-1]
        return 0.25 * (q**4).sum() + 0.5 * (along * along).sum()

    def step(m: Any, q: Any, p: Any) -> Any:
        p = p - 0.005 * m.gradient(energy, q)
        q = q + 0.01 * p
        return q, p - 0.005 * m.gradient(energy, q)

    return UserLoop(
        step, states=[Given(rng.normal(size=5)), Given(rng.normal(size=5))], n_steps=2 * STEPS
    )


@user_loop
def heat(rng: np.random.Generator) -> UserLoop:
    """Heat equation, 64 points, inner points replaced."""
    return UserLoop(
        lambda m, u, k: m.assign(u, slice(1, -1), u[1:-1] + k * (u[2:] - 2 * u[1:-1] + u[:-2])),
        states=[Given(rng.random(64))],
        parameters=[0.2],
        n_steps=2 * STEPS,
    )


@user_loop
def wave(rng: np.random.Generator) -> UserLoop:
    """Wave equation, 64 points in a ring, by roll."""

    def step(m: Any, u: Any, v: Any, k: Any) -> Any:
        return u + 0.1 * v, v + k * (m.roll(u, 1) - 2 * u + m.roll(u, -1))

    return UserLoop(
        step,
        states=[Given(rng.random(64)), np.zeros(64)],
        parameters=[0.1],
        n_steps=2 * STEPS,
    )


@user_loop
def pendulums(rng: np.random.Generator) -> UserLoop:
    """Pendulums, 64 of them, driven, speed clipped."""

    # Damped: without friction, rounding grows until values have nothing in common.
    def step(m: Any, push: Any, angle: Any, speed: Any) -> Any:
        speed = m.clip(0.9 * speed + 0.05 * (3 * push - 15 * m.sin(angle)), -8.0, 8.0)
        return angle + 0.05 * speed, speed

    return UserLoop(
        step,
        rows=[rng.normal(size=(STEPS, 64))],
        states=[Given(rng.random(64)), np.zeros(64)],
    )


@user_loop
def rotations(rng: np.random.Generator) -> UserLoop:
    """Rotation matrices, 3 × 3."""

    def step(m: Any, w: Any, R: Any) -> Any:
        zero = 0 * w[0]
        rows = [[zero, -w[2], w[1]], [w[2], zero, -w[0]], [-w[1], w[0], zero]]
        K = m.stack([m.stack(row) for row in rows])
        return m.dot(R, np.eye(3) + K + 0.5 * m.dot(K, K))

    return UserLoop(step, rows=[0.05 * rng.normal(size=(STEPS, 3))], states=[np.eye(3)])


@user_loop
def quaternions(rng: np.random.Generator) -> UserLoop:
    """Quaternions, normalized."""

    def step(m: Any, w: Any, q: Any) -> Any:
        change = m.stack(
            [
                -q[1] * w[0] - q[2] * w[1] - q[3] * w[2],
                q[0] * w[0] + q[2] * w[2] - q[3] * w[1],
                q[0] * w[1] - q[1] * w[2] + q[3] * w[0],
                q[0] * w[2] + q[1] * w[1] - q[2] * w[0],
            ]
        )
        q = q + 0.5 * change
        return q / m.sqrt((q * q).sum())

    return UserLoop(
        step, rows=[0.05 * rng.normal(size=(STEPS, 3))], states=[np.array([1.0, 0.0, 0.0, 0.0])]
    )
