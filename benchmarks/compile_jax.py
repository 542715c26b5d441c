"""The loops of `benchmarks.compile_loops` in JAX.

Imported only where JAX is installed.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve

from benchmarks.compile_loops import STATES, UNITS

jax.config.update("jax_enable_x64", True)


def affine(a: Any, x: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = a * h + x
        return h, h

    return jnp.sum(jax.lax.scan(step, 0.0, x)[1] ** 2)


def garch(weights: Any, returns: Any) -> Any:
    def step(h: Any, y: Any) -> Any:
        h = weights[0] + weights[1] * y**2 + weights[2] * h
        return h, h

    variances = jax.lax.scan(step, 1.0, returns)[1]
    return jnp.sum(jnp.log(variances) + returns**2 / variances)


def rnn(W: Any, V: Any, x: Any) -> Any:
    def step(h: Any, x: Any) -> Any:
        h = jnp.tanh(W @ h + V @ x)
        return h, h

    return jnp.sum(jax.lax.scan(step, jnp.zeros(UNITS), x)[1] ** 2)


def hmm(transition: Any, emission: Any) -> Any:
    def step(a: Any, e: Any) -> Any:
        return jax.nn.logsumexp(a[:, None] + transition, axis=0) + e, None

    return jax.nn.logsumexp(jax.lax.scan(step, emission[0], emission[1:])[0])


def kalman(F: Any, H: Any, Q: Any, R: Any, y: Any) -> Any:
    def step(state: Any, y: Any) -> Any:
        mean, spread = F @ state[0], F @ state[1] @ F.T + Q
        error, factor = y - H @ mean, jnp.linalg.cholesky(H @ spread @ H.T + R)
        gain = cho_solve((factor, True), H @ spread).T
        rest = jnp.eye(STATES) - gain @ H
        distance = error @ cho_solve((factor, True), error)
        score = -0.5 * distance - jnp.sum(jnp.log(jnp.diag(factor)))
        return (mean + gain @ error, rest @ spread @ rest.T + gain @ R @ gain.T), score

    return jnp.sum(jax.lax.scan(step, (jnp.zeros(STATES), jnp.eye(STATES)), y)[1])


# The cost of each, and the positions of what it is differentiated by.
COSTS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "affine": (affine, (0,)),
    "garch": (garch, (0,)),
    "rnn": (rnn, (0, 1)),
    "hmm": (hmm, (0, 1)),
    "kalman": (kalman, (0, 1, 2, 3)),
}


def warm_up() -> None:
    """Compile something trivial."""
    jax.block_until_ready(jax.jit(lambda x: jnp.exp(x) + x.sum())(jnp.ones(3)))


def compiled(name: str, gradient: bool) -> Callable[..., Any]:
    """Return the cost of a loop, with its gradient or without, to be compiled when it is called."""
    cost, wrt = COSTS[name]
    function = jax.jit(jax.value_and_grad(cost, wrt) if gradient else cost)
    return lambda *data: jax.block_until_ready(function(*data))
