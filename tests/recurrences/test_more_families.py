"""Families of one state beyond affine and extremes: clamped shifts, and states that are affine
after a change of variable. Beside them quotients, powers and bits, which run step by step."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops import ElemwiseScan
from tests.checks import assert_derivatives
from tests.modes import MODES


def cusum(x, h):
    return pt.maximum(h + x - 0.1, 0.0)


def stock(x, h):
    return pt.clip(h + x, -1.0, 2.0)


def band(x, h):
    return pt.minimum(pt.maximum(h - x, pt.sin(x)), pt.sin(x) + 1.0)


def volatility(x, h):
    return pt.sqrt(0.1 + 0.1 * x**2 + 0.8 * h**2)


def fraction(x, h):
    return 1.0 / (2.0 + x * x + h)


def kalman_variance(x, h):
    return h * (1.0 + x * x) / (h + 1.0 + x * x) + 0.1


def powers(x, h):
    return pt.exp(x) * pt.sqrt(h)


NUMPY = {
    cusum: lambda x, h: np.maximum(h + x - x.dtype.type(0.1), 0),
    stock: lambda x, h: np.clip(h + x, -1, 2),
    band: lambda x, h: np.minimum(np.maximum(h - x, np.sin(x)), np.sin(x) + x.dtype.type(1)),
    volatility: lambda x, h: np.sqrt(0.1 + 0.1 * x**2 + 0.8 * h**2),
    fraction: lambda x, h: 1 / (2 + x * x + h),
    kalman_variance: lambda x, h: h * (1 + x * x) / (h + 1 + x * x) + 0.1,
    powers: lambda x, h: np.exp(x) * np.sqrt(h),
}
FAMILY = {
    cusum: ["clamp"],
    stock: ["clamp"],
    band: ["clamp"],
    volatility: ["affine in squares"],
}
LENGTHS = (0, 1, 2, 3, 4, 5, 8, 1023, 1024, 1025, 2050)


def walk(step, x, start):
    """The plain loop, in the dtype of the data."""
    h, trace = x.dtype.type(start), np.empty_like(x)
    with np.errstate(all="ignore"):
        for t, row in enumerate(x):
            h = x.dtype.type(step(row, h))
            trace[t] = h
    return trace


def loops(function):
    return [n.op for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]


def compiled(step, dtype, mode):
    x, start = pt.vector("x", dtype=dtype), pt.scalar("start", dtype=dtype)
    y = scanlib.scan(step, sequences=x, outputs_info=start, return_updates=False)
    function = pytensor.function([x, start], y, mode=MODES[mode])
    (op,) = loops(function)
    assert [recurrence.family for recurrence in op.recurrences] == FAMILY.get(step, [])
    return function


@pytest.mark.parametrize("linker", ["numba", "c"])
@pytest.mark.parametrize("step", list(NUMPY))
def test_values(step, linker):
    function = compiled(step, "float64", linker)
    rng = np.random.default_rng(0)
    for steps in LENGTHS:
        x = rng.standard_normal(steps)
        kept = x.copy()
        np.testing.assert_allclose(
            function(x, 0.5), walk(NUMPY[step], x, 0.5), rtol=1e-11, atol=1e-11
        )
        np.testing.assert_array_equal(x, kept)


@pytest.mark.parametrize("step", [cusum, stock, band, volatility])
def test_extreme_values(step):
    """Not a number, infinite and huge values stand exactly where the plain loop has them."""
    function = compiled(step, "float64", "numba")
    rng = np.random.default_rng(1)
    for special in (np.nan, np.inf, -np.inf, 1e300, -1e300, 5e-324):
        for start in (0.5, special):
            x = rng.standard_normal(40)
            x[[3, 4, 17]] = special
            expected = walk(NUMPY[step], x, start)
            np.testing.assert_allclose(function(x, start), expected, rtol=1e-11, atol=1e-11)


def test_a_negative_square_is_not_a_number():
    """The root of a negative number is lost for good; the square alone would recover."""
    x, start = pt.dvector("x"), pt.dscalar("start")
    y = scanlib.scan(
        lambda x, h: pt.sqrt(x + 0.9 * h**2),
        sequences=x,
        outputs_info=start,
        return_updates=False,
    )
    function = pytensor.function([x, start], y, mode=MODES["numba"])
    assert loops(function)[0].recurrences[0].family == "affine in squares"
    values = np.ones(30)
    values[9] = -50.0
    trace = function(values, 1.0)
    assert np.isfinite(trace[:9]).all()
    assert np.isnan(trace[9:]).all()
    # A negative start counts by its square.
    np.testing.assert_array_equal(function(np.ones(3), -2.0), function(np.ones(3), 2.0))


@pytest.mark.parametrize("dtype", ["bool", "int8", "int64", "uint16"])
def test_bits(dtype):
    mask, toggle = pt.vector("mask", dtype=dtype), pt.vector("toggle", dtype=dtype)
    start = pt.scalar("start", dtype=dtype)
    y = scanlib.scan(
        lambda m, x, h: ~(((h & m) | x) ^ m),
        sequences=[mask, toggle],
        outputs_info=start,
        return_updates=False,
    )
    function = pytensor.function([mask, toggle, start], y, mode=MODES["numba"])
    assert loops(function)[0].recurrences == ()
    rng = np.random.default_rng(2)
    m, x = (rng.integers(0, 2 if dtype == "bool" else 100, 50).astype(dtype) for _ in range(2))
    h, expected = np.dtype(dtype).type(1), []
    for row in zip(m, x, strict=True):
        h = ~(((h & row[0]) | row[1]) ^ row[0])
        expected.append(h)
    np.testing.assert_array_equal(function(m, x, np.dtype(dtype).type(1)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("step", [stock, volatility, kalman_variance])
def test_derivatives(step):
    x, start = pt.dvector("x"), pt.dscalar("start")
    y = scanlib.scan(step, sequences=x, outputs_info=start, return_updates=False)
    values = {x: np.random.default_rng(3).standard_normal(7), start: np.array(0.4)}
    assert_derivatives(
        pt.sum(y**2), values, lambda x, s: np.sum(walk(NUMPY[step], x, s) ** 2), MODES["c"]
    )


def test_what_only_looks_like_a_family():
    """A maximum of two functions of the state, a shift of integers between bounds, and a square
    that is not the only reading."""
    x, k = pt.dvector("x"), pt.lvector("k")
    for sequence, start, step in (
        (x, 0.0, lambda x, h: pt.maximum(h + x, 2.0 * h)),
        (k, np.int64(0), lambda k, h: pt.maximum(h + k, 0)),
        (x, 1.0, lambda x, h: pt.sqrt(x**2 + h**2 + h)),
        (x, 1.0, lambda x, h: h / (h * h + x)),
    ):
        y = scanlib.scan(step, sequences=sequence, outputs_info=start, return_updates=False)
        function = pytensor.function([sequence], y, mode=MODES["c"])
        (op,) = loops(function)
        assert op.recurrences == ()
