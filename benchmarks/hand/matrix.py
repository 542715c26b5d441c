"""``h[t] = A h[t-1] + b[t]`` with one matrix or one per step, by loops and by matrix products.

Small matrices are faster in plain loops, large ones with BLAS; each pair gives the same results.
"""

import numpy as np
from numba import njit

from benchmarks.model import Array


@njit(cache=True)
def loops(A: Array, b: Array, start: Array, h: Array) -> None:
    """One matrix, three nested loops."""
    steps, size = b.shape
    state = start.copy()
    for t in range(steps):
        for i in range(size):
            total = b[t, i]
            for j in range(size):
                total += A[i, j] * state[j]
            h[t, i] = total
        for i in range(size):
            state[i] = h[t, i]


@njit(cache=True)
def loops_gradient(
    A: Array, b: Array, start: Array, cotangent: Array, h: Array, d_A: Array, d_b: Array
) -> None:
    """One matrix, three nested loops each way."""
    loops(A, b, start, h)
    steps, size = b.shape
    adjoint = np.zeros_like(start)
    for i in range(size):
        for j in range(size):
            d_A[i, j] = 0.0
    for t in range(steps - 1, -1, -1):
        previous = h[t - 1] if t > 0 else start
        for i in range(size):
            d_b[t, i] = cotangent[t, i] + adjoint[i]
            adjoint[i] = 0.0
        for i in range(size):
            owed = d_b[t, i]
            for j in range(size):
                d_A[i, j] += owed * previous[j]
                adjoint[j] += A[i, j] * owed


@njit(cache=True)
def products(A: Array, b: Array, start: Array, h: Array) -> None:
    """One matrix, a product with BLAS at each step."""
    previous = start
    for t in range(b.shape[0]):
        row, b_t = h[t], b[t]
        np.dot(A, previous, row)
        for i in range(b.shape[1]):
            row[i] += b_t[i]
        previous = row


@njit(cache=True)
def products_gradient(
    A: Array, b: Array, start: Array, cotangent: Array, h: Array, d_A: Array, d_b: Array
) -> None:
    """One matrix: a product at each step, and a single large one for the derivative by it."""
    products(A, b, start, h)
    steps, size = b.shape
    transposed = A.T.copy()
    adjoint = np.zeros_like(start)
    for t in range(steps - 1, -1, -1):
        row, g_t = d_b[t], cotangent[t]
        for i in range(size):
            row[i] = g_t[i] + adjoint[i]
        np.dot(transposed, row, adjoint)
    np.dot(d_b[1:].T, h[:-1], d_A)
    for i in range(size):
        for j in range(size):
            d_A[i, j] += d_b[0, i] * start[j]


@njit(cache=True)
def step_loops(A: Array, b: Array, start: Array, h: Array) -> None:
    """A matrix per step, three nested loops."""
    steps, size = b.shape
    state = start.copy()
    for t in range(steps):
        for i in range(size):
            total = b[t, i]
            for j in range(size):
                total += A[t, i, j] * state[j]
            h[t, i] = total
        for i in range(size):
            state[i] = h[t, i]


@njit(cache=True)
def step_loops_gradient(
    A: Array, b: Array, start: Array, cotangent: Array, h: Array, d_A: Array, d_b: Array
) -> None:
    """A matrix per step, three nested loops each way."""
    step_loops(A, b, start, h)
    steps, size = b.shape
    adjoint = np.zeros_like(start)
    for t in range(steps - 1, -1, -1):
        previous = h[t - 1] if t > 0 else start
        for i in range(size):
            d_b[t, i] = cotangent[t, i] + adjoint[i]
            adjoint[i] = 0.0
        for i in range(size):
            owed = d_b[t, i]
            for j in range(size):
                d_A[t, i, j] = owed * previous[j]
                adjoint[j] += A[t, i, j] * owed


@njit(cache=True)
def step_products(A: Array, b: Array, start: Array, h: Array) -> None:
    """A matrix per step, a product with BLAS at each step."""
    previous = start
    for t in range(b.shape[0]):
        row, b_t = h[t], b[t]
        np.dot(A[t], previous, row)
        for i in range(b.shape[1]):
            row[i] += b_t[i]
        previous = row


@njit(cache=True)
def step_products_gradient(
    A: Array, b: Array, start: Array, cotangent: Array, h: Array, d_A: Array, d_b: Array
) -> None:
    """A matrix per step: a product with BLAS at each step, outer products in loops."""
    step_products(A, b, start, h)
    steps, size = b.shape
    adjoint = np.zeros_like(start)
    for t in range(steps - 1, -1, -1):
        previous = h[t - 1] if t > 0 else start
        row, g_t, d_A_t = d_b[t], cotangent[t], d_A[t]
        for i in range(size):
            row[i] = g_t[i] + adjoint[i]
        np.dot(row, A[t], adjoint)
        for i in range(size):
            for j in range(size):
                d_A_t[i, j] = row[i] * previous[j]
