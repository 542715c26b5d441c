"""Matrix recurrences by CUDA kernels: NaN, infinity, underflow, overflow as in the plain loop."""

from unittest import mock

import numpy as np
import pytensor
import pytest

from scanlib.backends.cuda import linear
from tests.cuda_device import walked_again
from tests.cuda_linear import cut, kernels_of, run
from tests.linear import Recurrence
from tests.ops.test_linear_scan import make_values, reference

pytestmark = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")


@pytest.mark.all_forms
@pytest.mark.parametrize("size", [3, 9])
@pytest.mark.parametrize("semiring", ["real", "log", "max", "min"])
@pytest.mark.parametrize("coefficient", ["fixed", "steps"])
def test_special_items(semiring, coefficient, size, cuda_in_chunks):
    op = Recurrence(semiring, coefficient)
    for special in (0.0, 1e-310, 1e300, -1e300, np.inf, -np.inf, np.nan):
        values = make_values(op, 24, size)
        for place in range(3):
            given = [value.copy() for value in values]
            where = (..., 1) if place < 2 else (0, 1)
            given[place][where] = special
            if place == 1:
                given[1][:13] = values[1][:13]
            with np.errstate(all="ignore"):
                expected = reference(op, *given, 24)
            np.testing.assert_allclose(run(op, given), expected, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("size", [4, 12])
def test_powers_that_overflow_where_no_state_does(size, cuda_in_chunks):
    op = Recurrence("real", "fixed")
    matrix = np.zeros((size, size))
    matrix[0, 1] = matrix[1, 2] = 1e200
    matrix[3, 3] = 0.5
    offset = np.full((200, size), 1e-300)
    offset[:, 3] = 1.0
    offset[77, 3] = np.inf
    initial = np.zeros((1, size))
    initial[0, 2:4] = 1e-250, 1.0
    with np.errstate(all="ignore"):
        expected = reference(op, matrix, offset, initial, 200)
    assert np.isfinite(expected[:78]).all()
    np.testing.assert_allclose(run(op, [matrix, offset, initial]), expected, rtol=1e-12)


@pytest.mark.parametrize("size", [2, 9])
@pytest.mark.parametrize("place", [1, 5, 8, 9, 17, 40])
def test_overflow_that_a_later_step_would_undo(place, size, cuda_in_chunks):
    op = Recurrence("real", "steps", has_offset=False)
    matrix = np.tile(np.eye(size), (45, 1, 1))
    matrix[place, 0, 0], matrix[place + 1, 0, 0] = 1e200, 1e-200
    initial = np.full((1, size), 1e200)
    with np.errstate(all="ignore"):
        expected = reference(op, matrix, None, initial, 45)
    assert not np.isfinite(expected[-1, 0])
    np.testing.assert_array_equal(run(op, [matrix, initial]), expected)


@pytest.mark.parametrize("size", [2, 9])
@pytest.mark.parametrize("semiring", ["log", "max", "min"])
def test_huge_weights_absorb_the_state(semiring, size, cuda_in_chunks):
    op = Recurrence(semiring, "steps", has_offset=False)
    matrix = np.zeros((45, size, size))
    matrix[12], matrix[13] = 1e300, -1e300
    initial = np.full((1, size), 7.0)
    expected = reference(op, matrix, None, initial, 45)
    assert np.ptp(expected[:, 0]) > 1e299
    assert abs(expected[14, 0]) < 6
    np.testing.assert_allclose(run(op, [matrix, initial]), expected, rtol=1e-12)


@pytest.mark.parametrize("size", [2, 9])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_states_that_decay_and_grow_again(size, dtype, cuda_on_host):
    """Products of matrices vanish where the state itself, large at first, does not."""
    op = Recurrence("real", "steps")
    small, most, turn = (2.0**-9, 2.0**600, 120) if dtype == "float64" else (0.25, 2.0**90, 80)
    factors = np.repeat([1.0, small, 1 / small, 1.0], [3, turn, turn, 2 * turn])
    for mixed in (False, True):
        matrix = np.zeros((len(factors), size, size), dtype)
        matrix[:, range(size), range(size)] = 1
        matrix[:, 0, 0] = factors
        if mixed:
            matrix[:, 1, 0] = factors / 2
            matrix[:, 1, 1] = 0
        initial = np.ones((1, size), dtype)
        initial[0, 0] = most
        offset = np.zeros((len(factors), size), dtype)
        expected = reference(op, matrix, offset, initial, len(factors))
        assert expected[-1, 0] == initial[0, 0]
        assert np.prod(factors[: 3 + turn].astype(dtype)) == 0
        for chunks in (2, 5):
            with mock.patch.object(linear, "choose_linear", cut(chunks)):
                actual = run(op, [matrix, offset, initial])
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("size", [2, 9])
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_an_item_far_below_others_is_not_lost(size, dtype, cuda_on_host):
    """What a product of matrices that vanishes has lost shows beside its own row alone."""
    op = Recurrence("real", "steps", has_offset=False)
    small, most, turn = (2.0**-9, 2.0**600, 120) if dtype == "float64" else (0.25, 2.0**90, 80)
    factors = np.repeat([1.0, small, 1.0], [3, turn, turn + 3])
    matrix = np.zeros((len(factors), size, size), dtype)
    matrix[:, range(size), range(size)] = 1
    matrix[:, 0, 0] = factors
    initial = np.ones((1, size), dtype)
    initial[0, 0] = most
    expected = reference(op, matrix, None, initial, len(factors))
    assert np.prod(factors.astype(dtype)) == 0 < abs(expected[-1, 0]) < 2.0**-60
    with mock.patch.object(linear, "choose_linear", cut(2)):
        np.testing.assert_array_equal(run(op, [matrix, initial]), expected)


@pytest.mark.parametrize("size", [3, 9])
def test_logarithms_far_apart(size, cuda_in_chunks):
    op = Recurrence("log", "fixed")
    rng = np.random.default_rng(0)
    matrix = np.full((size, size), -np.inf)
    matrix[:3, :3] = [[0.0, -900.0, -np.inf], [-np.inf, -2.0, -800.0], [-900.0, 3.0, -np.inf]]
    offset = rng.normal(size=(60, size)) * 400
    offset[33] = -np.inf
    initial = np.full((1, size), -np.inf)
    initial[0, :3] = 0.0, -1000.0, -2000.0
    with np.errstate(all="ignore"):
        expected = reference(op, matrix, offset, initial, 60)
    np.testing.assert_allclose(run(op, [matrix, offset, initial]), expected, rtol=1e-12)


@pytest.mark.parametrize("size", [3, 9])
@pytest.mark.parametrize(
    "special, most", [(None, 0), ("decay", 0), ("nan", 2), ("growth", 9), ("empty", 0)]
)
def test_chunks_are_composed(size, special, most, cuda_in_chunks):
    """Steps are walked one by one only where they must be: not for ordinary numbers."""
    op = Recurrence("real", "steps")
    matrix, offset, initial = make_values(op, 2000, size, dtype="float32")
    if special == "decay":
        matrix *= 0.1
    elif special == "empty":
        matrix[:, 1:, 0] = matrix[:, 0, 1:] = 0
        offset[:, 0] = initial[:, 0] = 0
    elif special == "nan":
        offset[900, 1] = np.nan
    elif special == "growth":
        matrix *= 9
        offset *= 0
        initial *= 0
    kernels = kernels_of(op, [matrix, offset, initial])
    run(op, [matrix, offset, initial])
    walked_again(kernels)
    actual = run(op, [matrix, offset, initial])
    expected = reference(op, matrix, offset, initial, 2000)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert walked_again(kernels) <= most
