"""The reference itself: the plain loop on loops known by heart, differences on polynomials."""

import numpy as np
import pytest

from tests.derivatives import (
    central_gradient,
    directional_derivative,
    second_directional_derivative,
)
from tests.reference import reference_scan


def test_fibonacci_numbers():
    info = [{"initial": np.array([1, 1]), "taps": [-2, -1]}]
    (numbers,) = reference_scan(lambda a, b: [a + b], outputs_info=info, n_steps=6)
    assert numbers.tolist() == [2, 3, 5, 8, 13, 21]


def test_order_of_taps():
    info = [{"initial": np.array([1.0, 10.0, 100.0]), "taps": [-1, -3]}]
    (rows,) = reference_scan(lambda last, third: [last - third], outputs_info=info, n_steps=2)
    assert rows.tolist() == [99.0, 89.0]


def test_taps_of_a_sequence():
    x = np.arange(10)
    (rows,) = reference_scan(
        lambda ahead, behind: [100 * ahead + behind], [{"input": x, "taps": [2, -1]}], [None]
    )
    assert rows.tolist() == [300, 401, 502, 603, 704, 805, 906]


def test_backwards_from_the_end_of_each_sequence():
    (rows,) = reference_scan(
        lambda x, y: [10 * x + y], [np.arange(5), np.arange(3)], [None], go_backwards=True
    )
    assert rows.tolist() == [42, 31, 20]


def test_the_step_that_stops_counts():
    (powers,) = reference_scan(
        lambda p, limit: [2 * p, 2 * p > limit],
        outputs_info=[1],
        non_sequences=[10],
        n_steps=100,
        until=True,
    )
    assert powers.tolist() == [2, 4, 8, 16]


def test_no_steps():
    rows, output = reference_scan(
        lambda x, h: [h + x, x],
        [np.ones((0, 3))],
        [np.ones(3), None],
        rows=[None, ((3,), "float64")],
    )
    assert (rows.shape, output.shape) == ((0, 3), (0, 3))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="2 steps, fewer than 3"):
        reference_scan(lambda x: [x], [np.ones(2)], [None], n_steps=3)
    with pytest.raises(ValueError, match="3 initial rows, got 2"):
        reference_scan(
            lambda h: [h], outputs_info=[{"initial": np.ones(2), "taps": [-3]}], n_steps=3
        )
    with pytest.raises(ValueError, match="returned 2 values"):
        reference_scan(lambda x: [x, x], [np.ones(2)], [None])


def test_differences_of_a_polynomial():
    def f(x, y):
        return np.sum(x**3) * y

    x, y = np.array([1.0, -2.0]), np.array(0.5)
    gradient = central_gradient(f, [x, y])
    np.testing.assert_allclose(gradient[0], 3 * x**2 * y, rtol=1e-8)
    np.testing.assert_allclose(gradient[1], np.sum(x**3), rtol=1e-8)
    u, v = [np.array([1.0, 0.5]), np.array(2.0)], [np.array([0.3, 0.0]), np.array(-1.0)]
    slope = 3 * np.sum(x**2 * u[0]) * y + np.sum(x**3) * u[1]
    np.testing.assert_allclose(directional_derivative(f, [x, y], u), slope, rtol=1e-8)
    curvature = np.sum(6 * x * u[0] * v[0]) * y
    curvature += 3 * np.sum(x**2 * u[0]) * v[1] + 3 * np.sum(x**2 * v[0]) * u[1]
    np.testing.assert_allclose(second_directional_derivative(f, [x, y], u, v), curvature, rtol=1e-6)
