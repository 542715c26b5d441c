"""Models of time series: GARCH and an autoregression, each with the gradient of its cost."""

import math

from numba import njit

from benchmarks.model import Array


@njit(cache=True)
def garch(
    omega: float, alpha: float, beta: float, squares: Array, first: float, variances: Array
) -> None:
    """Variances ``v[t] = omega + alpha * squares[t-1] + beta * v[t-1]``, both `first` before 0."""
    variance = first
    square = first
    for t in range(squares.shape[0]):
        variance = omega + alpha * square + beta * variance
        variances[t] = variance
        square = squares[t]


@njit(cache=True)
def garch_gradient(
    omega: float, alpha: float, beta: float, squares: Array, first: float, variances: Array
) -> tuple[float, float, float, float]:
    """Mean of ``log v + squares / v``, with its derivatives by omega, alpha and beta."""
    garch(omega, alpha, beta, squares, first, variances)
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


@njit(cache=True)
def ar2(first: float, second: float, shocks: Array, start: Array, trace: Array) -> None:
    """Trace ``y[t] = first * y[t-1] + second * y[t-2] + shocks[t]``, after two rows of `start`."""
    older, newer = start[0], start[1]
    for t in range(shocks.shape[0]):
        older, newer = newer, first * newer + second * older + shocks[t]
        trace[t] = newer


@njit(cache=True)
def ar2_gradient(
    first: float, second: float, shocks: Array, start: Array, trace: Array
) -> tuple[float, float, float]:
    """Mean of ``y**2``, with its derivatives by the two coefficients."""
    ar2(first, second, shocks, start, trace)
    steps = shocks.shape[0]
    cost = 0.0
    adjoint = later = d_first = d_second = 0.0
    for t in range(steps - 1, -1, -1):
        cost += trace[t] * trace[t]
        adjoint, later = 2.0 * trace[t] + first * adjoint + second * later, adjoint
        d_first += adjoint * (trace[t - 1] if t > 0 else start[1])
        d_second += adjoint * (trace[t - 2] if t > 1 else start[t])
    return cost / steps, d_first / steps, d_second / steps
