"""What compiled functions with loops return: arrays of NumPy's own where they are small."""

import gc
import sys
import weakref

import numba
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib

DTYPES = ("float64", "float32", "int64", "int8", "bool", "complex128", "complex64")


def delayed(x):
    """A loop that returns its sequence: what the results hold is known to the bit."""
    return scanlib.scan(
        lambda x_t, before: [x_t, before],
        sequences=x,
        outputs_info=[x[0], None],
        return_updates=False,
    )[0]


def accumulated(x):
    return scanlib.scan(
        lambda x_t, h: h + x_t,
        sequences=x,
        outputs_info=pt.zeros((), dtype=x.dtype),
        return_updates=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 7, 128, 129, 1024, 1025])
def test_values_shapes_and_dtypes(dtype, count):
    x = pt.tensor("x", dtype=dtype, shape=(None,))
    y = delayed(x)
    outputs = [y[-1], pt.outer(y, y[:3]), y.dimshuffle("x", 0, "x"), y[:0], y]
    function = pytensor.function([x], outputs)
    values = (np.random.default_rng(count).normal(size=count) * 50).astype(dtype)
    expected = [
        values[-1],
        np.outer(values, values[:3]),
        values[None, :, None],
        values[:0],
        values,
    ]
    for result, value in zip(function(values), expected, strict=True):
        assert type(result) is np.ndarray
        assert result.dtype == np.dtype(dtype)
        assert result.shape == value.shape
        assert result.flags.writeable
        assert result.flags.aligned
        np.testing.assert_array_equal(result, value)


def test_one_number_does_not_keep_an_array():
    x = pt.dvector("x")
    function = pytensor.function([x], [accumulated(x)[-1], accumulated(x) * 2])
    total, many = function(np.ones(1000))
    assert total.base is None
    np.testing.assert_array_equal(many, 2 * np.arange(1, 1001))


def test_large_results_begin_with_a_line_of_the_cache():
    x = pt.dvector("x")
    function = pytensor.function([x], accumulated(x) * 2)
    result = function(np.ones(5000) / 2)
    assert result.ctypes.data % 64 == 0
    assert result.flags.owndata
    expected = np.arange(1.0, 5001)
    np.testing.assert_array_equal(result, expected)
    # NumPy gives it other memory, and keeps what was there.
    result.resize(7000, refcheck=False)
    np.testing.assert_array_equal(result[:5000], expected)
    result.resize(3000, refcheck=False)
    np.testing.assert_array_equal(result, expected[:3000])


def test_results_of_two_calls_share_nothing():
    x = pt.dvector("x")
    function = pytensor.function([x], [accumulated(x)[-1], accumulated(x) * 1.0])
    first = function(np.ones(4))
    second = function(np.ones(4))
    for result in first:
        result += 1
    assert second[0] == 4
    np.testing.assert_array_equal(second[1], [1, 2, 3, 4])


def test_an_input_that_is_returned_is_not_the_callers():
    x, w = pt.dvector("x"), pt.dscalar("w")
    function = pytensor.function([x, w], [w, x, accumulated(x)])
    given = np.arange(3.0), np.array(2.0)
    same = function(*given)
    for result in same:
        result += 1
    np.testing.assert_array_equal(given[0], np.arange(3.0))
    assert given[1] == 2


def test_shared_variables_and_generators():
    state = pytensor.shared(np.array(1.5), name="state")
    rng = pytensor.shared(np.random.default_rng(3), name="rng")
    x = pt.dvector("x")
    next_rng, draw = pt.random.normal(rng=rng).owner.outputs
    total = accumulated(x)[-1]
    updates = {state: state + total, rng: next_rng}
    function = pytensor.function([x], [total, draw * 1.0], updates=updates)
    expected = np.random.default_rng(3)
    for _ in range(2):
        result, drawn = function(np.ones(3))
        assert result == 3
        assert drawn == expected.normal()
    assert state.get_value() == 7.5
    assert rng.get_value().normal() == expected.normal()


@pytest.mark.slow
def test_nothing_is_kept():
    """Neither arrays nor dtypes gain references from call to call."""
    x = pt.dvector("x")
    function = pytensor.function([x], [accumulated(x)[-1], accumulated(x) * 2.0])
    data, dtype = np.ones(5), np.dtype("float64")
    for _ in range(3):
        function(data)
    gc.collect()
    before = sys.getrefcount(dtype), sys.getrefcount(np.ndarray)
    for _ in range(1000):
        result = function(data)[1]
    gone = weakref.ref(result)
    del result
    gc.collect()
    assert gone() is None
    after = sys.getrefcount(dtype), sys.getrefcount(np.ndarray)
    assert max(abs(a - b) for a, b in zip(before, after, strict=True)) < 100


def test_compiled_code_may_call_the_function():
    """It gets a tuple of arrays: to unpack, to index, to pass on, to return."""
    x = pt.dvector("x")
    cost = (accumulated(x) ** 2).sum()
    function = pytensor.function([x], [cost, pytensor.grad(cost, x)])
    raw = function.vm.jit_fn

    @numba.njit
    def unpack(x, out):
        value, gradient = raw(x)
        out[:] = gradient
        return value.item() + gradient[0]

    @numba.njit
    def pick(x):
        results = raw(x)
        return results[0][()], results[1].sum(), len(results)

    @numba.njit
    def hand_on(x):
        return raw(x)

    data = np.linspace(-1, 2, 6)
    value, gradient = function(data)
    out = np.empty(6)
    assert unpack(data, out) == value + gradient[0]
    np.testing.assert_array_equal(out, gradient)
    assert pick(data) == (value, gradient.sum(), 2)
    for mine, expected in zip(hand_on(data), (value, gradient), strict=True):
        np.testing.assert_array_equal(mine, expected)
