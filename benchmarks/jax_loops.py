"""The timed loops in JAX, sequential by ``lax.scan`` and parallel by ``lax.associative_scan``.

Imported only where JAX is installed. The functions take the loop's inputs in order, without the
cotangent, and return the value; those in `COSTS` make the cost of it.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.loops.iterations import NEWTON_TOLERANCE

jax.config.update("jax_enable_x64", True)

Value = Callable[..., Any]


def affine(a: Any, b: Any, start: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        h = row[0] * h + row[1]
        return h, h

    return lax.scan(step, start, (a, b))[1]


def compose_affine(first: Any, second: Any) -> Any:
    return first[0] * second[0], second[0] * first[1] + second[1]


def affine_parallel(a: Any, b: Any, start: Any) -> Any:
    product, rest = lax.associative_scan(compose_affine, (a, b))
    return product * start + rest


def discounted(x: Any, gamma: Any) -> Any:
    def step(y: Any, row: Any) -> Any:
        y = row + gamma * y
        return y, y

    return lax.scan(step, jnp.zeros_like(gamma), x)[1]


def discounted_parallel(x: Any, gamma: Any) -> Any:
    return lax.associative_scan(compose_affine, (jnp.full_like(x, gamma), x))[1]


def cumulative(combine: Value, first: float) -> tuple[Value, Value]:
    def sequential(x: Any) -> Any:
        def step(h: Any, row: Any) -> Any:
            h = combine(h, row)
            return h, h

        return lax.scan(step, jnp.asarray(first, x.dtype), x)[1]

    def parallel(x: Any) -> Any:
        return lax.associative_scan(combine, x)

    return sequential, parallel


def garch_inputs(omega: Any, alpha: Any, squares: Any, first: Any) -> Any:
    return omega + alpha * jnp.concatenate([first[None], squares[:-1]])


def garch(omega: Any, alpha: Any, beta: Any, squares: Any, first: Any) -> Any:
    def step(variance: Any, row: Any) -> Any:
        variance = row + beta * variance
        return variance, variance

    return lax.scan(step, first, garch_inputs(omega, alpha, squares, first))[1]


def garch_parallel(omega: Any, alpha: Any, beta: Any, squares: Any, first: Any) -> Any:
    inputs = garch_inputs(omega, alpha, squares, first)
    return affine_parallel(jnp.full_like(inputs, beta), inputs, first)


def ar2(first: Any, second: Any, shocks: Any, start: Any) -> Any:
    def step(state: Any, shock: Any) -> Any:
        older, newer = state
        value = first * newer + second * older + shock
        return (newer, value), value

    return lax.scan(step, (start[0], start[1]), shocks)[1]


def compose_matrices(first: Any, second: Any) -> Any:
    A, b = second
    return A @ first[0], jnp.einsum("...ij,...j->...i", A, first[1]) + b


def matrix_per_step_parallel(A: Any, b: Any, start: Any) -> Any:
    product, rest = lax.associative_scan(compose_matrices, (A, b))
    return product @ start + rest


def matrix_parallel(A: Any, b: Any, start: Any) -> Any:
    return matrix_per_step_parallel(jnp.broadcast_to(A, (b.shape[0], *A.shape)), b, start)


def ar2_parallel(first: Any, second: Any, shocks: Any, start: Any) -> Any:
    companion = jnp.array([[first, second], [1.0, 0.0]])
    shifted = jnp.stack([shocks, jnp.zeros_like(shocks)], axis=-1)
    return matrix_parallel(companion, shifted, start[::-1])[:, 0]


def matrix(A: Any, b: Any, start: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        h = A @ h + row
        return h, h

    return lax.scan(step, start, b)[1]


def matrix_per_step(A: Any, b: Any, start: Any) -> Any:
    def step(h: Any, row: Any) -> Any:
        h = row[0] @ h + row[1]
        return h, h

    return lax.scan(step, start, (A, b))[1]


def newton(target: Any, start: Any) -> Any:
    def step(state: Any) -> Any:
        count, root, _ = state
        better = root - (root**3 - target) / (3.0 * root**2)
        settled = jnp.abs(better - root) <= NEWTON_TOLERANCE * jnp.abs(better)
        return count + 1, better, settled

    def unfinished(state: Any) -> Any:
        return (state[0] < 100) & ~state[2]

    return lax.while_loop(unfinished, step, (0, start, False))[1]


def power(A: Any, k: int) -> Any:
    def step(result: Any, _: None) -> Any:
        return result * A, None

    return lax.scan(step, jnp.ones_like(A), None, length=k)[0]


def power_parallel(A: Any, k: int) -> Any:
    return lax.associative_scan(jnp.multiply, jnp.broadcast_to(A, (k, *A.shape)))[-1]


def rnn(inputs: Any, start: Any, W_in: Any, W: Any, bias: Any) -> Any:
    def step(hidden: Any, row: Any) -> Any:
        hidden = jnp.tanh(row @ W_in + hidden @ W + bias)
        return hidden, hidden

    return lax.scan(step, start, inputs)[1]


def garch_cost(variances: Any, *inputs: Any) -> Any:
    return jnp.mean(jnp.log(variances) + inputs[3] / variances)


def mean_of_squares(value: Any, *inputs: Any) -> Any:
    return jnp.mean(value**2)


def gru(inputs: Any, start: Any, *weights: Any) -> Any:
    W_gates, U_gates, b_gates, W, U, b = weights
    units = start.shape[1]

    def step(hidden: Any, row: Any) -> Any:
        gates = jax.nn.sigmoid(row @ W_gates + hidden @ U_gates + b_gates)
        update, reset = gates[:, :units], gates[:, units:]
        candidate = jnp.tanh(row @ W + (reset * hidden) @ U + b)
        hidden = update * hidden + (1 - update) * candidate
        return hidden, hidden

    return lax.scan(step, start, inputs)[1]


def lstm(inputs: Any, start: Any, cell: Any, W: Any, U: Any, b: Any) -> Any:
    units = start.shape[1]

    def step(state: Any, row: Any) -> Any:
        hidden, cell = state
        joined = row @ W + hidden @ U + b
        parts = [joined[:, k * units : (k + 1) * units] for k in range(4)]
        write, forget, read = (jax.nn.sigmoid(part) for part in parts[:3])
        cell = forget * cell + write * jnp.tanh(parts[3])
        hidden = read * jnp.tanh(cell)
        return (hidden, cell), hidden

    return lax.scan(step, (start, cell), inputs)[1]


def kalman(observed: Any, mean: Any, covariance: Any, *matrices: Any) -> Any:
    transition, design, noise, shocks = matrices

    def step(state: Any, y: Any) -> Any:
        mean, covariance = state
        error = y - design @ mean
        spread = covariance @ design.T
        forecast = design @ spread + noise
        gain = jnp.linalg.solve(forecast, spread.T).T
        updated = mean + gain @ error
        kept = jnp.eye(len(mean)) - gain @ design
        remaining = kept @ covariance @ kept.T + gain @ noise @ gain.T
        distance = error @ jnp.linalg.solve(forecast, error)
        log_det = jnp.log(jnp.linalg.det(forecast))
        term = -0.5 * (len(y) * jnp.log(2 * jnp.pi) + log_det + distance)
        return (transition @ updated, transition @ remaining @ transition.T + shocks), term

    return lax.scan(step, (mean, covariance), observed)[1]


VALUES: dict[str, tuple[Value, Value | None]] = {
    "affine": (affine, affine_parallel),
    "discounted": (discounted, discounted_parallel),
    "cummax": cumulative(jnp.maximum, -jnp.inf),
    "cumprod": cumulative(jnp.multiply, 1.0),
    "cumlogsumexp": cumulative(jnp.logaddexp, -jnp.inf),
    "garch": (garch, garch_parallel),
    "ar2": (ar2, ar2_parallel),
    "matrix": (matrix, matrix_parallel),
    "matrix_sequential": (matrix, None),
    "matrix_per_step": (matrix_per_step, matrix_per_step_parallel),
    "newton": (newton, None),
    "power": (power, power_parallel),
    "rnn": (rnn, None),
    "gru": (gru, None),
    "lstm": (lstm, None),
    "kalman": (kalman, None),
}

# The cost of each loop that has one, and the positions of the inputs it is differentiated by.
COSTS: dict[str, tuple[Value, tuple[int, ...]]] = {
    "garch": (garch_cost, (0, 1, 2)),
    "ar2": (mean_of_squares, (0, 1)),
    "power": (lambda value, *inputs: jnp.sum(value), (0,)),
    "rnn": (mean_of_squares, (2, 3, 4)),
    "gru": (mean_of_squares, (2, 3, 4, 5, 6, 7)),
    "lstm": (mean_of_squares, (3, 4, 5)),
    "kalman": (lambda value, *inputs: jnp.sum(value), (3, 4, 5, 6)),
}

# Of the others, the inputs that the value is differentiated by.
DIFFERENTIATED: dict[str, tuple[int, ...]] = {
    "affine": (0, 1),
    "discounted": (0,),
    "cummax": (0,),
    "cumprod": (0,),
    "cumlogsumexp": (0,),
    "matrix": (0, 1),
    "matrix_sequential": (0, 1),
    "matrix_per_step": (0, 1),
}


def with_gradient(name: str, value: Value) -> Value:
    """The pass with the gradient, for the functions of `VALUES`."""
    if name == "newton":

        def root_and_derivative(target: Any, start: Any) -> Any:
            tangents = (jnp.ones_like(target), jnp.zeros_like(start))
            return jax.jvp(value, (target, start), tangents)

        return root_and_derivative
    if name in COSTS:
        cost, positions = COSTS[name]

        def cost_and_gradient(*inputs: Any) -> Any:
            total = jax.value_and_grad(lambda *args: cost(value(*args), *args), positions)
            result, gradients = total(*inputs)
            return (result, *gradients)

        return cost_and_gradient
    positions = DIFFERENTIATED[name]

    def value_and_pullback(*inputs: Any) -> Any:
        *arguments, cotangent = inputs
        result, pullback = jax.vjp(value, *arguments)
        gradients = pullback(cotangent)
        return (result, *(gradients[position] for position in positions))

    return value_and_pullback


def bind(name: str, parallel: bool, gradient: bool, data: Any) -> Callable[[], Any] | None:
    """A call of the compiled loop that returns when its results are there, or None."""
    value = VALUES[name][parallel]
    if value is None:
        return None
    function = with_gradient(name, value) if gradient else value
    # The number of steps of a loop is not a value in JAX.
    static = (1,) if name == "power" else ()
    arguments = [int(a) if i in static else jnp.asarray(a) for i, a in enumerate(data)]
    compiled = jax.jit(function, static_argnums=static)

    def call() -> Any:
        return jax.block_until_ready(compiled(*arguments))

    return call
