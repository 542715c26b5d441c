"""The loops of :mod:`benchmarks.loops` written by hand, values and gradients.

They check the values of both libraries, and those compiled by numba give the scale: what the loop
costs with nothing around it. Each forward function returns the same array as the loop's forward
pass, and each ``*_gradient`` returns the cost followed by its derivatives. All take the loop's
inputs in order, with scalars as Python numbers.
"""

import math
from typing import Any

import numpy as np
from numba import njit

Array = np.ndarray[Any, Any]

NEWTON_TOLERANCE = 1e-12


@njit
def garch(omega: float, alpha: float, beta: float, squares: Array, first: float) -> Array:
    """Variances ``v[t] = omega + alpha * squares[t-1] + beta * v[t-1]``, both `first` before 0."""
    variances = np.empty_like(squares)
    variance = first
    square = first
    for t in range(squares.shape[0]):
        variance = omega + alpha * square + beta * variance
        variances[t] = variance
        square = squares[t]
    return variances


@njit
def garch_gradient(
    omega: float, alpha: float, beta: float, squares: Array, first: float
) -> tuple[float, float, float, float]:
    """Mean of ``log v + squares / v``, with its derivatives by omega, alpha and beta."""
    variances = garch(omega, alpha, beta, squares, first)
    steps = squares.shape[0]
    cost = 0.0
    adjoint = d_omega = d_alpha = d_beta = 0.0
    for t in range(steps - 1, -1, -1):
        variance = variances[t]
        cost += math.log(variance) + squares[t] / variance
        adjoint = (1.0 - squares[t] / variance) / variance + beta * adjoint
        d_omega += adjoint
        d_alpha += adjoint * (squares[t - 1] if t > 0 else first)
        d_beta += adjoint * (variances[t - 1] if t > 0 else first)
    return cost / steps, d_omega / steps, d_alpha / steps, d_beta / steps


@njit
def ar2(first: float, second: float, shocks: Array, start: Array) -> Array:
    """Trace ``y[t] = first * y[t-1] + second * y[t-2] + shocks[t]``, after two rows of `start`."""
    trace = np.empty_like(shocks)
    older, newer = start[0], start[1]
    for t in range(shocks.shape[0]):
        older, newer = newer, first * newer + second * older + shocks[t]
        trace[t] = newer
    return trace


@njit
def ar2_gradient(
    first: float, second: float, shocks: Array, start: Array
) -> tuple[float, float, float]:
    """Mean of ``y**2``, with its derivatives by the two coefficients."""
    trace = ar2(first, second, shocks, start)
    steps = shocks.shape[0]
    cost = 0.0
    adjoint = later = d_first = d_second = 0.0
    for t in range(steps - 1, -1, -1):
        cost += trace[t] * trace[t]
        adjoint, later = 2.0 * trace[t] + first * adjoint + second * later, adjoint
        d_first += adjoint * (trace[t - 1] if t > 0 else start[1])
        d_second += adjoint * (trace[t - 2] if t > 1 else start[t])
    return cost / steps, d_first / steps, d_second / steps


def rnn(inputs: Array, start: Array, W_in: Array, W: Array, bias: Array) -> Array:
    """Hidden states ``h[t] = tanh(inputs[t] @ W_in + h[t-1] @ W + bias)``, in NumPy."""
    trace = np.empty((inputs.shape[0], *start.shape), dtype=inputs.dtype)
    hidden = start
    for t, row in enumerate(inputs):
        hidden = np.tanh(row @ W_in + hidden @ W + bias)
        trace[t] = hidden
    return trace


def rnn_gradient(
    inputs: Array, start: Array, W_in: Array, W: Array, bias: Array
) -> tuple[float, Array, Array, Array]:
    """Mean of ``h**2``, with its derivatives by both weight matrices and the bias."""
    trace = rnn(inputs, start, W_in, W, bias)
    adjoint = np.zeros_like(start)
    d_W_in, d_W, d_bias = np.zeros_like(W_in), np.zeros_like(W), np.zeros_like(bias)
    for t in range(inputs.shape[0] - 1, -1, -1):
        hidden = trace[t]
        inner = (adjoint + 2.0 * hidden / trace.size) * (1.0 - hidden**2)
        inner = inner.astype(hidden.dtype)
        d_W_in += inputs[t].T @ inner
        d_W += (trace[t - 1] if t > 0 else start).T @ inner
        d_bias += inner.sum(axis=0)
        adjoint = inner @ W.T
    return float(np.mean(trace**2)), d_W_in, d_W, d_bias


@njit
def power(A: Array, k: int) -> Array:
    """``A**k`` by `k` elementwise products."""
    result = np.ones_like(A)
    for _ in range(k):
        result = result * A
    return result


@njit
def power_gradient(A: Array, k: int) -> tuple[float, Array]:
    """Sum of ``A**k`` with its derivative by `A`: every product stored, then walked back."""
    powers = np.empty((k + 1, A.shape[0]))
    powers[0] = 1.0
    for t in range(k):
        powers[t + 1] = powers[t] * A
    adjoint = np.ones_like(A)
    d_A = np.zeros_like(A)
    for t in range(k - 1, -1, -1):
        d_A += adjoint * powers[t]
        adjoint *= A
    return powers[k].sum(), d_A


@njit
def newton(target: float, start: float) -> float:
    """Cube root of `target` by Newton's iteration from `start`, until the step is negligible."""
    root = start
    for _ in range(100):
        previous = root
        root = previous - (previous**3 - target) / (3.0 * previous**2)
        if abs(root - previous) <= NEWTON_TOLERANCE * abs(root):
            break
    return root


@njit
def newton_gradient(target: float, start: float) -> tuple[float, float]:
    """The root, with its derivative by `target` carried forward through the steps that ran."""
    root, tangent = start, 0.0
    for _ in range(100):
        previous = root
        excess = previous**3 - target
        root = previous - excess / (3.0 * previous**2)
        tangent = 2.0 * excess * tangent / (3.0 * previous**3) + 1.0 / (3.0 * previous**2)
        if abs(root - previous) <= NEWTON_TOLERANCE * abs(root):
            break
    return root, tangent
