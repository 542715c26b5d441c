"""Derivatives by central differences, for functions of several NumPy arrays.

For a scalar function ``f`` and directions ``u``, ``v`` ::

    Df(x)[u]      ~  (f(x + h u) - f(x - h u)) / 2h
    D2f(x)[u, v]  ~  (f(x + h u + h v) - f(x + h u - h v)
                      - f(x - h u + h v) + f(x - h u - h v)) / 4h^2

with truncation errors of order ``h^2``, which a second step, ``2 h``, removes from the second
derivative (L. F. Richardson, 1911). In double precision, ``h = 1e-6`` leaves about ten digits of
the first derivative and ``h = 1e-4`` about seven of the second, for values of order one.
"""

from collections.abc import Callable, Sequence

import numpy as np

Arrays = Sequence[np.ndarray]

FIRST_STEP = 1e-6
SECOND_STEP = 1e-4


def moved(arrays: Arrays, *directions: tuple[float, Arrays]) -> list[np.ndarray]:
    """Return the arrays plus the given multiples of the given directions."""
    result = [np.array(array, dtype="float64") for array in arrays]
    for scale, direction in directions:
        result = [x + scale * d for x, d in zip(result, direction, strict=True)]
    return result


def directional_derivative(
    f: Callable, arrays: Arrays, direction: Arrays, step: float = FIRST_STEP
) -> np.ndarray:
    """Differentiate `f`, scalar or array valued, along one direction in all its arguments."""
    ahead = np.asarray(f(*moved(arrays, (step, direction))))
    behind = np.asarray(f(*moved(arrays, (-step, direction))))
    return (ahead - behind) / (2 * step)


def second_directional_derivative(
    f: Callable, arrays: Arrays, u: Arrays, v: Arrays, step: float = SECOND_STEP
) -> np.ndarray:
    """Differentiate `f` along `u` and along `v`."""
    near, far = (_mixed_difference(f, arrays, u, v, h) for h in (step, 2 * step))
    return (4 * near - far) / 3


def _mixed_difference(f: Callable, arrays: Arrays, u: Arrays, v: Arrays, step: float) -> np.ndarray:
    total = np.zeros(())
    for along_u in (1, -1):
        for along_v in (1, -1):
            point = moved(arrays, (along_u * step, u), (along_v * step, v))
            total = total + along_u * along_v * np.asarray(f(*point))
    return total / (4 * step**2)


def central_gradient(f: Callable, arrays: Arrays, step: float = FIRST_STEP) -> list[np.ndarray]:
    """Return the gradient of a scalar function with respect to each of its arguments."""
    zeros = [np.zeros(np.shape(array)) for array in arrays]
    gradient = [np.zeros(np.shape(array)) for array in arrays]
    for k, array in enumerate(arrays):
        for index in np.ndindex(np.shape(array)):
            zeros[k][index] = 1.0
            gradient[k][index] = directional_derivative(f, arrays, zeros, step)
            zeros[k][index] = 0.0
    return gradient


def random_directions(arrays: Arrays, seed: int = 0) -> list[np.ndarray]:
    """Draw a direction: one normal array for each of the arrays."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=np.shape(array)) for array in arrays]
