"""Loops that only look linear or associative: they are left alone, or stay exact."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.families import assert_lowered
from tests.modes import MODES

F8, F4, I8, I4, L8, B1 = "float64", "float32", "int8", "int32", "int64", "bool"


def lower(step, dtypes, state):
    """Compile a loop of one state; return the function and its only Op."""
    rows = [pt.vector(f"x{i}", dtype=dtype) for i, dtype in enumerate(dtypes)]
    h = pt.scalar("h", dtype=state)
    trace = scanlib.scan(step, rows, h, return_updates=False)
    assert trace.dtype == state
    function = pytensor.function([*rows, h], trace, mode=MODES["c"])
    (op,) = assert_lowered(function)
    return function, op


def draw(dtype, steps, seed):
    rng = np.random.default_rng([steps, seed])
    if dtype == B1:
        return rng.integers(0, 2, steps).astype(bool)
    if dtype.startswith("int"):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, steps, dtype=dtype, endpoint=True)
    return rng.uniform(-2, 2, steps).astype(dtype)


def check(function, plain, dtypes, state):
    """Compare with ``h = plain(rows, h)``, exactly."""
    for steps in (0, 1, 2, 3, 4, 9, 33, 1025):
        rows = [draw(dtype, steps, i) for i, dtype in enumerate(dtypes)]
        h = draw(state, 1, 9)[0]
        actual, expected = function(*rows, h), []
        with np.errstate(all="ignore"):
            for items in zip(*rows, strict=True):
                h = np.asarray(plain(*items, h)).astype(state)[()]
                expected.append(h)
        np.testing.assert_allclose(actual, np.array(expected, state), rtol=3e-13, atol=1e-14)


NO_FAMILY = {
    "coefficient-reads-state": (lambda x, h: x * h * h + x, [F8], F8),
    "state-in-the-divisor": (lambda x, h: x / (h * h + 1.0), [F8], F8),
    "condition-reads-state": (lambda x, h: pt.switch(h > 0, h - x, h + x), [F8], F8),
    "floor": (lambda x, h: pt.floor(h) + x, [F8], F8),
    "round": (lambda x, h: pt.round(h + x) * 0.5, [F8], F8),
    "absolute-value": (lambda x, h: abs(h) + x, [F8], F8),
    "integer-division": (lambda x, h: h // 3 + x, [I4], I4),
    "remainder": (lambda x, h: (h + x) % 7, [I4], I4),
    "extremes-of-a-product": (lambda x, y, h: pt.minimum(h * x, y), [F8, F8], F8),
    "extremes-of-a-difference": (lambda x, y, h: pt.maximum(x - h, y), [F8, F8], F8),
    "minimum-then-affine": (lambda x, y, h: 0.5 * pt.minimum(h, x) + y, [F8, F8], F8),
    "maximum-of-itself": (lambda x, h: pt.maximum(h, x * h), [F8], F8),
    "through-int8": (lambda x, h: pt.cast(pt.cast(h, I8), L8) + x, [L8], L8),
    "through-integers": (lambda x, h: pt.cast(pt.cast(h * 0.7, L8), F8) + x, [F8], F8),
    "through-floats": (lambda x, h: pt.cast(pt.cast(h, F8) * 0.5, I4) + x, [I4], I4),
    "through-float32": (lambda x, h: pt.cast(pt.cast(h, F4), F8) * 0.9 + x, [F8], F8),
    "wider-sum-cast-back": (lambda x, h: pt.cast(pt.cast(h, L8) + x, I8), [L8], I8),
    "truth-values": (lambda x, h: pt.neq(h, x), [B1], B1),
    "power": (lambda x, h: h**2 * 0.1 + x, [F8], F8),
}
NUMPY = {
    "coefficient-reads-state": lambda x, h: x * h * h + x,
    "state-in-the-divisor": lambda x, h: x / (h * h + 1.0),
    "condition-reads-state": lambda x, h: h - x if h > 0 else h + x,
    "floor": lambda x, h: np.floor(h) + x,
    "round": lambda x, h: np.round(h + x) * 0.5,
    "absolute-value": lambda x, h: abs(h) + x,
    "integer-division": lambda x, h: h // np.int32(3) + x,
    "remainder": lambda x, h: (h + x) % np.int32(7),
    "extremes-of-a-product": lambda x, y, h: np.minimum(h * x, y),
    "extremes-of-a-difference": lambda x, y, h: np.maximum(x - h, y),
    "minimum-then-affine": lambda x, y, h: 0.5 * np.minimum(h, x) + y,
    "maximum-of-itself": lambda x, h: np.maximum(h, x * h),
    "through-int8": lambda x, h: np.int64(h.astype(I8)) + x,
    "through-integers": lambda x, h: np.float64(np.trunc(h * 0.7)) + x,
    "through-floats": lambda x, h: np.int32(np.trunc(h * 0.5)) + x,
    "through-float32": lambda x, h: np.float64(np.float32(h)) * 0.9 + x,
    "wider-sum-cast-back": lambda x, h: (np.int64(h) + x).astype(I8),
    "truth-values": lambda x, h: h != x,
    "power": lambda x, h: h**2 * 0.1 + x,
}


@pytest.mark.parametrize("name", NO_FAMILY)
def test_of_no_family(name):
    step, dtypes, state = NO_FAMILY[name]
    function, op = lower(step, dtypes, state)
    assert op.recurrences == ()
    assert len(op.notes) == 1
    assert op.notes[0] not in ("affine", "maximum", "minimum", "log-affine")
    check(function, NUMPY[name], dtypes, state)


EXACT = {
    # An operation converts its operands before it computes: none of these wraps in int8.
    "sum-of-small-integers": (lambda x, y, h: h + x + y, [I8, I8], L8, "affine"),
    "product-of-small-integers": (lambda x, y, h: h * x * y, [I8, I8], L8, "affine"),
    "difference": (lambda x, y, h: x - h - y, [I8, I8], L8, "affine"),
    "float-by-int8": (lambda x, y, h: h / (x * 1.0 + 0.5) + y, [I8, I8], F8, "affine"),
    "float-and-integers": (lambda x, h: h * 0.25 + x, [I4], F8, "affine"),
    "minimum-of-a-sum": (lambda x, y, h: pt.minimum(h + x, y), [F8, F8], F8, "clamp"),
    "sum-of-a-minimum": (lambda x, y, h: pt.minimum(h, x) + y, [F8, F8], F8, "clamp"),
    "maximum-then-minimum": (
        lambda x, y, h: pt.minimum(pt.maximum(h, x), y),
        [F8, F8],
        F8,
        "clamp",
    ),
    # This one does, before it is added.
    "wraps": (lambda x, y, h: h + pt.cast(x + y, I8), [I8, I8], L8, "affine"),
}
EXACT_NUMPY = {
    "sum-of-small-integers": lambda x, y, h: h + np.int64(x) + np.int64(y),
    "product-of-small-integers": lambda x, y, h: h * np.int64(x) * np.int64(y),
    "difference": lambda x, y, h: np.int64(x) - h - np.int64(y),
    "float-by-int8": lambda x, y, h: h / (np.float64(x) + 0.5) + y,
    "float-and-integers": lambda x, h: h * 0.25 + x,
    "minimum-of-a-sum": lambda x, y, h: np.minimum(h + x, y),
    "sum-of-a-minimum": lambda x, y, h: np.minimum(h, x) + y,
    "maximum-then-minimum": lambda x, y, h: np.minimum(np.maximum(h, x), y),
    "wraps": lambda x, y, h: h + np.int64(np.add(x, y, dtype=I8)),
}


@pytest.mark.parametrize("name", EXACT)
def test_values_stay_exact(name):
    step, dtypes, state, family = EXACT[name]
    function, op = lower(step, dtypes, state)
    assert [recurrence.family for recurrence in op.recurrences] == [family]
    check(function, EXACT_NUMPY[name], dtypes, state)


def test_products_of_single_precision_do_not_overflow():
    function, op = lower(lambda x, y, h: h * x * y, [F4, F4], F8)
    assert op.recurrences
    x, y = np.full(6, 1e30, F4), np.full(6, 1e20, F4)
    expected = np.cumprod(x.astype(F8) * y)
    np.testing.assert_allclose(function(x, y, 1.0), expected, rtol=1e-12)


def test_sums_of_rounded_terms():
    """A sum in float64 that is rounded at the end is no sum of rounded terms."""
    x = pt.matrix("x")
    trace, sums = scanlib.scan(
        lambda x, h: [0.5 * h + x, pt.cast(x.sum(), F4)], x, [pt.zeros(2), None],
        return_updates=False,
    )  # fmt: skip
    function = pytensor.function([x], [trace, sums], mode=MODES["c"])
    assert function([[1e8 + 1, -1e8]])[1].tolist() == [1.0]


def test_draws_stay_in_a_plain_loop():
    generator = pytensor.shared(np.random.default_rng(3))

    def step(state, h):
        new_state, draw = pt.random.normal(0, 1, rng=state).owner.outputs
        return [new_state, 0.5 * h + draw]

    _, trace = scanlib.scan(
        step, outputs_info=[generator, np.float64(1.0)], n_steps=5, return_updates=False
    )
    function = pytensor.function([], trace, mode=MODES["c"])
    with pytest.raises(AssertionError):
        assert_lowered(function)
    draws, h = np.random.default_rng(3).normal(size=5), 1.0
    for actual, item in zip(function(), draws, strict=True):
        h = 0.5 * h + item
        assert actual == pytest.approx(h)
