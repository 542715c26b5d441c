"""Cumulative maximum, product and logaddexp, each with its derivative by the sequence."""

import math

from numba import njit

from benchmarks.model import Array


@njit(cache=True)
def maximum(x: Array, h: Array) -> None:
    """``h[t] = max(h[t-1], x[t])``."""
    highest = -math.inf
    for t in range(x.shape[0]):
        highest = max(highest, x[t])
        h[t] = highest


@njit(cache=True)
def maximum_gradient(x: Array, cotangent: Array, h: Array, d_x: Array) -> None:
    """What is owed to a maximum goes to the row that set it."""
    maximum(x, h)
    adjoint = 0.0
    for t in range(x.shape[0] - 1, -1, -1):
        adjoint += cotangent[t]
        is_new = x[t] == h[t]
        d_x[t] = adjoint if is_new else 0.0
        adjoint = 0.0 if is_new else adjoint


@njit(cache=True)
def product(x: Array, h: Array) -> None:
    """``h[t] = h[t-1] * x[t]``."""
    result = 1.0
    for t in range(x.shape[0]):
        result *= x[t]
        h[t] = result


@njit(cache=True)
def product_gradient(x: Array, cotangent: Array, h: Array, d_x: Array) -> None:
    """The cotangents walk back through the same factors."""
    product(x, h)
    adjoint = 0.0
    for t in range(x.shape[0] - 1, 0, -1):
        adjoint += cotangent[t]
        d_x[t] = adjoint * h[t - 1]
        adjoint *= x[t]
    d_x[0] = adjoint + cotangent[0]


@njit(cache=True)
def logaddexp(x: Array, h: Array) -> None:
    """``h[t] = log(exp(h[t-1]) + exp(x[t]))``."""
    total = -math.inf
    for t in range(x.shape[0]):
        total = max(total, x[t]) + math.log1p(math.exp(-abs(total - x[t])))
        h[t] = total


@njit(cache=True)
def logaddexp_gradient(x: Array, cotangent: Array, h: Array, d_x: Array) -> None:
    """Each row splits what is owed in the proportions of ``exp(x[t])`` and ``exp(h[t-1])``."""
    logaddexp(x, h)
    adjoint = 0.0
    for t in range(x.shape[0] - 1, -1, -1):
        adjoint += cotangent[t]
        share = math.exp(x[t] - h[t])
        d_x[t] = adjoint * share
        adjoint *= 1.0 - share
