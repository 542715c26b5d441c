"""``h[t] = a[t] * h[t-1] + b[t]`` and the discounted sum, which has one coefficient.

Arrays are indexed by all their axes: taking a row of each at every step costs more than the step
where there are few channels.
"""

import numpy as np
from numba import njit

from benchmarks.model import Array


@njit(cache=True)
def narrow(a: Array, b: Array, start: float, h: Array) -> None:
    """One channel."""
    state = start
    for t in range(b.shape[0]):
        state = a[t] * state + b[t]
        h[t] = state


@njit(cache=True)
def narrow_gradient(
    a: Array, b: Array, start: float, cotangent: Array, h: Array, d_a: Array, d_b: Array
) -> None:
    """One channel, with the derivatives by `a` and `b`."""
    narrow(a, b, start, h)
    steps = b.shape[0]
    adjoint = cotangent[steps - 1]
    for t in range(steps - 1, 0, -1):
        d_b[t] = adjoint
        d_a[t] = adjoint * h[t - 1]
        adjoint = cotangent[t - 1] + a[t] * adjoint
    d_b[0] = adjoint
    d_a[0] = adjoint * start


@njit(cache=True)
def wide(a: Array, b: Array, start: Array, h: Array) -> None:
    """Many channels, the last axis."""
    steps, channels = b.shape
    state = start.copy()
    for t in range(steps):
        for c in range(channels):
            value = a[t, c] * state[c] + b[t, c]
            state[c] = value
            h[t, c] = value


@njit(cache=True)
def wide_gradient(
    a: Array, b: Array, start: Array, cotangent: Array, h: Array, d_a: Array, d_b: Array
) -> None:
    """Many channels, with the derivatives by `a` and `b`."""
    wide(a, b, start, h)
    steps, channels = b.shape
    adjoint = np.zeros_like(start)
    for t in range(steps - 1, 0, -1):
        for c in range(channels):
            total = cotangent[t, c] + adjoint[c]
            d_b[t, c] = total
            d_a[t, c] = total * h[t - 1, c]
            adjoint[c] = total * a[t, c]
    for c in range(channels):
        total = cotangent[0, c] + adjoint[c]
        d_b[0, c] = total
        d_a[0, c] = total * start[c]


@njit(cache=True)
def discounted(x: Array, gamma: float, y: Array) -> None:
    """``y[t] = x[t] + gamma * y[t-1]``."""
    total = x.dtype.type(0)
    for t in range(x.shape[0]):
        total = x[t] + gamma * total
        y[t] = total


@njit(cache=True)
def discounted_gradient(x: Array, gamma: float, cotangent: Array, y: Array, d_x: Array) -> None:
    """The discounted sum with its derivative by `x`."""
    discounted(x, gamma, y)
    adjoint = x.dtype.type(0)
    for t in range(x.shape[0] - 1, -1, -1):
        adjoint = cotangent[t] + gamma * adjoint
        d_x[t] = adjoint
