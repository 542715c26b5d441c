"""Integers wrap around as NumPy's do, beyond the range of their dtype and of floating point.

Expected values are those of the same step in NumPy, one step after the other.
"""

import warnings
from collections.abc import Callable

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from numpy.testing import assert_allclose, assert_array_equal

import scanlib
from tests.modes import MODES

DTYPES = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
STEPS = 20


def each_dtype(*quick: str) -> list:
    """Return all dtypes, of which those that are named are no slow tests."""
    return [d if d in quick else pytest.param(d, marks=pytest.mark.slow) for d in DTYPES]


rng = np.random.default_rng(0)


def numbers(dtype: str, *shape: int) -> np.ndarray:
    """Return numbers of all sizes, the largest and the smallest of a dtype among them."""
    info = np.iinfo(dtype)
    values = rng.integers(info.min, info.max, shape, dtype, endpoint=True)
    ends = np.array([info.min, info.max, info.max - 1, 0, 1, 3], dtype)
    return np.where(rng.random(shape) < 0.4, rng.choice(ends, shape), values).astype(dtype)


def in_numpy(step: Callable, sequences: list, states: list) -> list[np.ndarray]:
    """Return the traces of a step that NumPy computes, in the dtypes of the states."""
    kept: list[list] = [[] for _ in states]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore", RuntimeWarning)
        for row in zip(*sequences, strict=True):
            results = step(np, *row, *states)
            states = [np.asarray(r).astype(s.dtype) for r, s in zip(results, states, strict=True)]
            for trace, state in zip(kept, states, strict=True):
                trace.append(state)
    return [np.array(trace) for trace in kept]


def check(step: Callable, sequences: list, states: list, mode: object) -> None:
    """Compare the traces of a loop with those of its step in NumPy."""
    types = [pt.TensorType(v.dtype, shape=(None,) * v.ndim) for v in [*sequences, *states]]
    inputs = [kind() for kind in types]

    def in_dtype(*args):
        results = step(pt, *args)
        return [pt.cast(r, s.dtype) for r, s in zip(results, states, strict=True)]

    traces = scanlib.scan(
        in_dtype,
        inputs[: len(sequences)],
        inputs[len(sequences) :],
        return_updates=False,
        return_list=True,
    )
    found = pytensor.function(inputs, traces, mode=mode)(*sequences, *states)
    for trace, expected in zip(found, in_numpy(step, sequences, states), strict=True):
        assert trace.dtype == expected.dtype
        if trace.dtype.kind == "f":
            assert_allclose(trace, expected, rtol=1e-12)
        else:
            assert_array_equal(trace, expected)


def products(lib, a, b, h, m):
    """Products with a state, of two rows, and of batches."""
    return [a @ h + b[:, 0], m * (a @ a) + b @ m]


def check_products(dtype: str, mode: object) -> None:
    a, b = numbers(dtype, STEPS, 3, 3), numbers(dtype, STEPS, 3, 3)
    check(products, [a, b], [numbers(dtype, 3), numbers(dtype, 3, 3)], mode)


@pytest.mark.parametrize("dtype", each_dtype("int32", "uint64"))
def test_matrices_of_integers_are_multiplied_exactly(dtype):
    check_products(dtype, "NUMBA")


@pytest.mark.parametrize("mode", ["CVM", "FAST_COMPILE"])
def test_products_are_exact_where_numba_runs_inside_of_other_linkers(mode):
    check_products("int64", mode)


@pytest.mark.parametrize("linker", ["JAX", "PYTORCH"])
def test_products_are_exact_under_other_linkers(linker):
    pytest.importorskip({"JAX": "jax", "PYTORCH": "torch"}[linker])
    check_products("int64", linker)


def test_products_of_loops_that_are_gone_are_exact():
    a, b = numbers("int64", STEPS, 2, 3, 3), numbers("int64", 2, 3, 2)
    one, many = pt.tensor("a", dtype="int64", shape=(None,) * 4), pt.ltensor3("b")
    steps = scanlib.map(lambda a, b: [a @ b, a[0] @ b[1]], one, many, return_updates=False)
    function = pytensor.function([one, many], steps, mode="NUMBA")
    for found, expected in zip(function(a, b), (a @ b, a[:, 0] @ b[1]), strict=True):
        assert_array_equal(found, expected)


def arithmetic(lib, x, y, g, h, k, m, q):
    """Choices by numbers that may have wrapped around, extremes, quotients and powers."""
    where = lib.switch if lib is pt else np.where
    quotient, rest = (lib.int_div, lib.mod) if lib is pt else (np.floor_divide, np.mod)
    one, three = np.array([1, 3], x.dtype)
    return [
        where(g > 0, x, one - x) + y,
        lib.sign(h) * x + y if np.dtype(x.dtype).kind == "i" else h * x + y,
        lib.maximum(k - x, lib.minimum(y, k)),
        quotient(m * x, y | one) + where(m * m < x, one, y),
        rest(q * y, x | one) + abs(q) + q**three,
    ]


@pytest.mark.parametrize("mode", ["numba", "c"])
@pytest.mark.parametrize("dtype", each_dtype("int64", "uint64"))
@pytest.mark.parametrize("width", [(), pytest.param((2,), marks=pytest.mark.slow)])
def test_what_wraps_around_is_what_later_steps_read(dtype, width, mode):
    x, y = numbers(dtype, STEPS, *width), numbers(dtype, STEPS, *width)
    check(arithmetic, [x, y], [numbers(dtype, *width) for _ in range(5)], MODES[mode])


@pytest.mark.parametrize("direction", ["cummax", "cummin"])
@pytest.mark.parametrize("linker", ["c", "JAX"])
@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_running_extremes_are_exact(direction, linker, dtype):
    if linker == "JAX":
        pytest.importorskip("jax")
    x = pt.vector("x", dtype=dtype)
    function = pytensor.function(
        [x], getattr(scanlib, direction)(x), mode=MODES.get(linker, linker)
    )
    values = np.array([2**53 + 1, 2**53 + 3, 2**53 - 1, 2**53 + 5, 2**53 - 3], dtype)
    ufunc = {"cummax": np.maximum, "cummin": np.minimum}[direction]
    assert_array_equal(function(values), ufunc.accumulate(values))


def mixed(lib, i, u, s, w, f, h, k):
    """Numbers of several dtypes: NumPy converts them to that of the result."""
    where = lib.switch if lib is pt else np.where
    return [
        where(i < u, lib.maximum(i, u), i - u) + h,
        where(s < w, 1.0, 2.0) + i * f + u / f + where(w >= s, i, u) + 0.5 * k,
    ]


@pytest.mark.parametrize("mode", ["numba", "c"])
def test_numbers_of_several_dtypes_are_converted_as_in_numpy(mode):
    dtypes = ("int32", "uint32", "int64", "uint64")
    integers = [numbers(dtype, STEPS) for dtype in dtypes]
    floats = rng.choice([0.1, 3.0, -7.7], STEPS).astype("float32")
    states = [np.array(3), np.array(0.25)]
    check(mixed, [*integers, floats], states, MODES[mode])


@pytest.mark.parametrize("mode", ["numba", "c"])
@pytest.mark.parametrize("chosen", [lambda h, x, y: h * y, lambda h, x, y: h + y])
def test_a_state_that_is_replaced_keeps_the_sign_of_zero(chosen, mode):
    x, y = pt.dvectors("x", "y")
    h = scanlib.scan(
        lambda x, y, h: pt.switch(x > 0, chosen(h, x, y), x), [x, y], [np.array(1.0)],
        return_updates=False,
    )  # fmt: skip
    rows = rng.normal(size=(2, 40))
    rows[0, ::3] = -0.0
    found = pytensor.function([x, y], h, mode=MODES[mode])(*rows)
    assert_array_equal(np.signbit(found[::3]), True)


@pytest.mark.parametrize("mode", ["numba", "c"])
def test_products_near_overflow_keep_their_order(mode):
    x, a = pt.dvector("x"), pt.dscalar("a")
    h = scanlib.scan(
        lambda x, h, a: pt.tanh(a * h + x), x, [np.array(0.0)], a, return_updates=False
    )
    gradient = pytensor.function([x, a], pt.grad((h**2).sum(), x), mode=MODES[mode])
    # After the first step tanh is one, and its derivative zero.
    first = 2 * np.tanh(0.3) * (1 - np.tanh(0.3) ** 2)
    assert_allclose(gradient(np.full(3, 0.3), 1e308), [first, 0, 0], atol=1e-15)


@pytest.mark.all_forms
@pytest.mark.parametrize("mode", ["numba", "c"])
def test_products_of_integers_wrap_before_they_are_added_to_floats(mode):
    """Two channels, which take several steps at once: ``a h + b`` of floats is one operation."""
    sequences = [np.ones((40, 2)), np.full((40, 2), 7, "int8")]
    states = [np.array([100, -90], "int8"), np.zeros(2)]
    check(lambda xp, y, k, c, h: [c + k, c * k + y], sequences, states, MODES[mode])


@pytest.mark.parametrize("dtype", ["uint64", "int64"])
def test_multipliers_of_64_bits_are_exact(dtype, mode):
    """A linear congruential generator; PyTensor's rewrites round its constant to a double."""
    start, factor, shift = (np.array(v, dtype) for v in (42, 6364136223846793005, 2**60 + 1))
    h = pt.scalar("h", dtype=dtype)
    _, ys = scanlib.loop(lambda h, _: (factor * h + shift,) * 2, h, None, length=5)
    expected = []
    with np.errstate(over="ignore"):
        for _ in range(5):
            start = factor * start + shift
            expected.append(start)
    start = np.array(42, dtype)
    assert_array_equal(pytensor.function([h], ys, mode=mode)(start), expected)
