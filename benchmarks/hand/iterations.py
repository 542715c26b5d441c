"""Iterations of which only the last value counts: a power, and Newton's method for a root."""

from numba import njit

from benchmarks.loops.iterations import NEWTON_TOLERANCE
from benchmarks.model import Array


@njit(cache=True)
def power(A: Array, k: int, result: Array) -> None:
    """``A**k`` by `k` elementwise products."""
    for c in range(A.shape[0]):
        result[c] = 1.0
    for _ in range(k):
        for c in range(A.shape[0]):
            result[c] *= A[c]


@njit(cache=True)
def power_gradient(
    A: Array, k: int, powers: Array, adjoint: Array, d_A: Array
) -> tuple[float, Array]:
    """Sum of ``A**k`` with its derivative by `A`: every product stored, then walked back."""
    width = A.shape[0]
    for c in range(width):
        powers[0, c] = adjoint[c] = 1.0
        d_A[c] = 0.0
    for t in range(k):
        for c in range(width):
            powers[t + 1, c] = powers[t, c] * A[c]
    for t in range(k - 1, -1, -1):
        for c in range(width):
            d_A[c] += adjoint[c] * powers[t, c]
            adjoint[c] *= A[c]
    return powers[k].sum(), d_A


@njit(cache=True)
def newton(target: float, start: float) -> float:
    """Cube root of `target` by Newton's iteration from `start`, until the step is negligible."""
    root = start
    for _ in range(100):
        previous = root
        root = previous - (previous**3 - target) / (3.0 * previous**2)
        if abs(root - previous) <= NEWTON_TOLERANCE * abs(root):
            break
    return root


@njit(cache=True)
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
