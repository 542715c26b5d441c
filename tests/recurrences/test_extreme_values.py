"""Recurrence families where composing steps could do harm: overflow, underflow, NaN, infinity.

A lowered loop has NaN and infinity exactly where the plain loop has them, and otherwise the same
values up to rounding errors, relative to the magnitude of the terms:

    m_t = |a_t| m_{t-1} + |b_t|,    f_t = |a_t| f_{t-1} + (smallest number)

where `f` bounds what underflow does.
"""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import scanlib
from tests.families import assert_lowered, kernels
from tests.modes import MODES

# Sums of few of these do not cancel just below the largest number, where rounding decides.
COEFFICIENTS = [
    0.0, -0.0, 1.0, -1.0, 0.5, 1.05, -0.9, 1e-5, 1e10, 1e-17, 1e-40, 1e200, -1e200, 1e-200, 1e300,
    1e-310, 5e-324, np.inf, -np.inf, np.nan,
]  # fmt: skip
VALUES = [
    0.0, 1.0, -1.0, 0.3, 1e-8, 1e-300, 5e-324, -1e-310, 1e30, -1e150, 1e300, -1e300,
    np.inf, -np.inf, np.nan,
]  # fmt: skip
LENGTHS = (1, 2, 3, 5, 8, 9, 16, 33, 64)
TINY = {"float64": 5e-324, "float32": 1.4e-45}


@pytest.fixture(params=["numba", "C"], autouse=True, scope="module")
def backend(request):
    with kernels(request.param):
        yield request.param


def compiled(step, n_sequences, dtype="float64", starts=1, taps=None):
    """Return a function of sequences and initial values, and check that it is lowered."""
    rows = [pt.vector(f"x{i}", dtype=dtype) for i in range(n_sequences)]
    first = [pt.tensor(f"h{i}", dtype=dtype, shape=(None,) * (taps is not None))
             for i in range(starts)]  # fmt: skip
    info = first if taps is None else [{"initial": h, "taps": taps} for h in first]
    traces, _ = scanlib.scan(step, rows, info, return_list=True)
    function = pytensor.function([*rows, *first], traces, mode=MODES["c"])
    (op,) = assert_lowered(function)
    assert op.recurrences
    return function


@pytest.fixture(scope="module")
def affine(backend):
    return compiled(lambda a, b, h: a * h + b, 2)


@pytest.fixture(scope="module")
def affine32(backend):
    return compiled(lambda a, b, h: a * h + b, 2, "float32")


@pytest.fixture(scope="module")
def product(backend):
    return compiled(lambda a, h: a * h, 1)


@pytest.fixture(scope="module")
def fixed(backend):
    x, w, h = pt.vector("x"), pt.scalar("w"), pt.scalar("h")
    trace = scanlib.scan(lambda x, h, w: w * h + x, x, h, w, return_updates=False)
    function = pytensor.function([x, w, h], trace, mode=MODES["c"])
    assert_lowered(function)
    return function


@pytest.fixture(scope="module")
def second_order(backend):
    return compiled(lambda a, b, x, h1, h2: a * h1 + b * h2 + x, 3, taps=[-1, -2])


@pytest.fixture(scope="module")
def backwards(backend):
    """The gradient of an affine loop: its cotangents, walking from the last step to the first."""
    a, h0, w = pt.vector("a"), pt.scalar("h0"), pt.vector("w")
    trace = scanlib.scan(lambda a, h: a * h, a, h0, return_updates=False)
    x = pytensor.grad((trace * w).sum(), h0)
    function = pytensor.function([a, w, h0], x, mode=MODES["c"], on_unused_input="ignore")
    assert_lowered(function)
    return lambda a, w: function(a, w, 1.0)


def plain_affine(a, b, h):
    """Return the trace of ``h = a h + b`` and the size of errors that rounding may cause."""
    dtype = np.asarray(h).dtype
    h, size, floor = dtype.type(h), abs(np.float64(h)), 0.0
    trace, sizes = [], []
    with np.errstate(all="ignore"):
        for x, y in zip(a, b, strict=True):
            # A fused multiplication and addition has no infinite product to subtract from.
            assume(not (np.isinf(y) and np.isinf(x * h) and np.isfinite(x) and np.isfinite(h)))
            h = x * h + y
            size = abs(np.float64(x)) * size + abs(np.float64(y))
            floor = abs(np.float64(x)) * floor + 3 * TINY[dtype.name]
            trace.append(h)
            sizes.append((1e-12 if dtype == "float64" else 1e-5) * size + floor)
    return np.array(trace, dtype), np.array(sizes)


def assert_same_kind(actual, expected, allowed):
    """Compare where there is NaN and infinity, and the numbers within what is allowed."""
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(expected))
    infinite = np.isinf(expected)
    np.testing.assert_array_equal(actual[infinite], expected[infinite])
    assert not np.isinf(actual[~infinite]).any()
    finite = np.isfinite(expected)
    allowed = np.where(np.isnan(allowed), np.inf, allowed)[finite]
    wrong = np.abs(actual[finite].astype("float64") - expected[finite]) > allowed
    assert not wrong.any(), (actual[finite][wrong], expected[finite][wrong], allowed[wrong])


def drawn(values, dtype="float64"):
    pool = np.unique(np.asarray(values).astype(dtype))
    return st.sampled_from(LENGTHS).flatmap(
        lambda n: arrays(dtype, n, elements=st.sampled_from(pool.tolist()), fill=st.nothing())
    )


@st.composite
def loops_of(draw, coefficients=COEFFICIENTS, values=VALUES, mild=None):
    """Mostly ordinary numbers with a few extreme ones among them, or extreme ones throughout."""
    n = draw(st.sampled_from(LENGTHS))
    extreme = draw(st.booleans()) if mild is None else not mild
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    a, b = rng.uniform(-1.1, 1.1, n), rng.uniform(-1, 1, n)
    share = 0.6 if extreme else 0.08
    for array, pool in ((a, coefficients), (b, values)):
        where = rng.random(n) < share
        array[where] = rng.choice(pool, where.sum())
    h = draw(st.sampled_from([0.0, 1.0, -0.5, *values]))
    return a, b, np.float64(h)


@given(loops_of())
def test_affine(affine, drawn):
    a, b, h = drawn
    assert_same_kind(affine(a, b, h)[0], *plain_affine(a, b, h))


@given(loops_of())
def test_affine_in_single_precision(affine32, drawn):
    with np.errstate(over="ignore"):
        a, b, h = (np.asarray(value).astype("float32") for value in drawn)
    assert_same_kind(affine32(a, b, h)[0], *plain_affine(a, b, h))


@given(loops_of())
def test_product(product, drawn):
    a, _, h = drawn
    expected = plain_affine(a, np.zeros_like(a), h)
    assert_same_kind(product(a, h)[0], *expected)


@given(loops_of(), st.sampled_from(COEFFICIENTS))
def test_fixed_coefficient(fixed, drawn, w):
    _, b, h = drawn
    assert_same_kind(fixed(b, w, h), *plain_affine(np.full(len(b), w), b, h))


@given(loops_of(), st.integers(0, 2**32))
def test_second_order(second_order, drawn, seed):
    a, x, h = drawn
    rng = np.random.default_rng(seed)
    b = np.where(rng.random(len(a)) < 0.1, rng.choice(COEFFICIENTS, len(a)), 0.3)
    older, old, size_older, size_old, floor_older, floor_old = 0.25, h, 0.25, abs(h), 0.0, 0.0
    trace, allowed = [], []
    with np.errstate(all="ignore"):
        for i in range(len(a)):
            terms = np.array([a[i] * old, b[i] * older, x[i]])
            assume(np.isinf(terms).sum() < 2)  # the order of additions decides
            older, old = old, terms.sum()
            sizes = abs(a[i]) * size_old + abs(b[i]) * size_older + abs(x[i])
            floors = abs(a[i]) * floor_old + abs(b[i]) * floor_older + 1e-322
            size_older, size_old, floor_older, floor_old = size_old, sizes, floor_old, floors
            trace.append(old)
            allowed.append(1e-12 * sizes + floors)
    actual = second_order(a, b, x, np.array([0.25, h]))[0]
    assert_same_kind(actual, np.array(trace), np.array(allowed))


@given(loops_of(mild=True))
def test_backwards(backwards, drawn):
    a, w, _ = drawn
    g, size, floor = 0.0, 0.0, 0.0
    with np.errstate(all="ignore"):
        for x, y in zip(a[::-1], w[::-1], strict=True):
            g, size, floor = x * (g + y), abs(x) * (size + abs(y)), abs(x) * floor + 2e-323
    allowed = np.array([1e-12 * size + floor])
    assert_same_kind(np.atleast_1d(backwards(a, w)), np.array([g]), allowed)


class TestTraps:
    def test_growth_that_a_reset_forgets(self, affine):
        """Products of all coefficients overflow long before the reset makes them zero."""
        steps = 20_000
        rng = np.random.default_rng(1)
        for resets in ([steps // 2], [0], [1023, 1024], range(500, steps, 501), [13_001]):
            a, b = np.full(steps, 1.05), rng.normal(size=steps) * 1e-12
            a[list(resets)] = 0.0
            expected, allowed = plain_affine(a, b, np.float64(0.0))
            assert_same_kind(affine(a, b, 0.0)[0], expected, allowed)

    @pytest.mark.all_forms
    @pytest.mark.parametrize("shift", range(9))
    def test_overflow_that_the_next_step_would_undo(self, affine, product, shift):
        a = np.ones(24)
        a[4 + shift], a[5 + shift] = 1e200, 1e-200
        expected, allowed = plain_affine(a, np.zeros(24), np.float64(1e300))
        assert np.isinf(expected[-1])
        assert_same_kind(affine(a, np.zeros(24), 1e300)[0], expected, allowed)
        assert_same_kind(product(a, 1e300)[0], expected, allowed)

    @pytest.mark.parametrize("shift", range(9))
    def test_infinite_state_before_a_reset(self, shift):
        reset, a, h = pt.bvector("reset"), pt.vector("a"), pt.scalar("h")
        trace = scanlib.scan(
            lambda r, a, h: pt.switch(r, 0.0, a * h), [reset, a], h, return_updates=False
        )
        function = pytensor.function([reset, a, h], trace, mode=MODES["c"])
        (op,) = assert_lowered(function)
        assert [r.family for r in op.recurrences] == ["affine"]
        r = np.zeros(12, "int8")
        r[shift] = 1
        expected = np.where(np.arange(12) < shift, np.inf, 0.0)
        np.testing.assert_array_equal(function(r, np.full(12, 0.5), np.inf), expected)

    def test_tiny_coefficients(self, affine):
        a, b = np.full(3000, 1e-150), np.ones(3000)
        np.testing.assert_array_equal(affine(a, b, 1.0)[0], np.ones(3000))
        a[::2] = 1e150
        expected, allowed = plain_affine(a, np.zeros(3000), np.float64(1.0))
        assert_same_kind(affine(a, np.zeros(3000), 1.0)[0], expected, allowed)

    def test_a_state_that_decays_to_nothing(self, fixed):
        expected, allowed = plain_affine(np.full(9000, 0.9), np.zeros(9000), np.float64(1.0))
        assert_same_kind(fixed(np.zeros(9000), 0.9, 1.0), expected, allowed)

    def test_only_one_block_is_not_finite(self, affine):
        a, b = np.full(5000, 0.5), np.ones(5000)
        b[1500], a[2100] = np.nan, 0.0
        expected, allowed = plain_affine(a, b, np.float64(0.0))
        assert np.isnan(expected[-1])
        assert_same_kind(affine(a, b, 0.0)[0], expected, allowed)


@given(drawn(VALUES), st.sampled_from(VALUES))
def test_extremes_keep_nan(running_extremes, x, h):
    low = high = np.float64(h)
    expected = []
    for item in x:
        high, low = np.maximum(high, item), np.minimum(low, item)
        expected.append((high, low))
    with np.errstate(invalid="ignore"):
        actual = running_extremes(x, h, h)
    for mine, wanted in zip(actual, np.array(expected).T, strict=True):
        np.testing.assert_array_equal(mine, wanted)


@pytest.fixture(scope="module")
def running_extremes(backend):
    step = lambda x, h, g: [pt.maximum(h, x), pt.minimum(g, x)]  # noqa: E731
    return compiled(step, 1, starts=2)


def test_log_affine():
    from scanlib.ops.logaddexp import logaddexp

    function = compiled(lambda a, b, h: logaddexp(h + a, b), 2)
    pool = [0.0, -1.0, 700.0, 1e5, -1e5, 1e300, -1e300, -np.inf, np.nan]
    rng = np.random.default_rng(2)
    for share in (0.05, 0.5):
        for _ in range(200):
            n = int(rng.choice(LENGTHS))
            a, b = (
                np.where(rng.random(n) < share, rng.choice(pool, n), rng.normal(size=n))
                for _ in range(2)
            )
            h = rng.choice([0.0, -np.inf, 1e4])
            trace, error, allowed = [], 0.0, []
            last = h
            for x, y in zip(a, b, strict=True):
                terms = np.array([last, x, y])
                error += 1e-12 * np.abs(terms[np.isfinite(terms)]).max(initial=1.0)
                with np.errstate(invalid="ignore"):
                    last = np.logaddexp(last + x, y)
                trace.append(last)
                allowed.append(error)
            assert_same_kind(function(a, b, h)[0], np.array(trace), np.array(allowed))


SUMS_IN_LOGARITHMS = {
    "added after": (lambda f, a, b, h: f(h, b) + a, (np.inf, 0.0), (-np.inf, 1.0), 0.5),
    "added twice": (lambda f, a, b, h: f(h + a + a, b), (1e308, 0.0), (0.0, 1.0), -1e308),
    "added and taken away": (
        lambda f, a, b, h: f(h + a - b, b),
        (np.inf, 0.0),
        (1.0, 2.0),
        -np.inf,
    ),
    "infinite bounds": (lambda f, a, b, h: f(h + a, b), (0.0, -np.inf), (np.inf, 1.0), 0.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 5, 30])
@pytest.mark.parametrize("name", SUMS_IN_LOGARITHMS)
def test_sums_that_a_log_affine_step_adds_in_its_own_order(name, place):
    from scanlib.ops.logaddexp import logaddexp

    step, shifts, bounds, start = SUMS_IN_LOGARITHMS[name]
    function = compiled(lambda a, b, h: step(logaddexp, a, b, h), 2)
    a, b = np.full(40, shifts[1]), np.full(40, bounds[1])
    a[place], b[place] = shifts[0], bounds[0]
    expected, h = [], start
    with np.errstate(all="ignore"):
        for x, y in zip(a, b, strict=True):
            h = step(np.logaddexp, x, y, h)
            expected.append(h)
    np.testing.assert_allclose(function(a, b, start)[0], expected, rtol=1e-12)


STEPS_OF_ZEROS = [
    lambda a, b, h: h + b,
    lambda a, b, h: b + np.asarray(0.5, b.dtype) * h,
    lambda a, b, h: a * h + b,
    lambda a, b, h: a * h,
    lambda a, b, h: pt.maximum(h, b),
    lambda a, b, h: pt.maximum(pt.minimum(h + b, a), -a),
]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("step", STEPS_OF_ZEROS)
def test_negative_zeros_stay_negative(step, dtype):
    """Lanes without a step before them must not add +0 to -0, which is +0."""
    function = compiled(step, 2, dtype)
    for n in (*LENGTHS, 600):
        (h,) = function(np.full(n, 0.5, dtype), np.full(n, -0.0, dtype), np.asarray(-0.0, dtype))
        assert h.shape == (n,)
        assert not h.any()
        assert np.signbit(h).all()


# Steps whose coefficient is a product, a quotient or a sum; numbers for one step, and a state, with
# which that coefficient is not what the step meets on the way. `KEEPS` has what keeps a state.
KEEPS = {"cancelling sum": (0.5, 0.5), "difference": (1.5, 0.5)}
COMPOSED_COEFFICIENTS = {
    "vanishing product": (lambda a, b, h: h * a * b, 1e-200, 1e-200, 1e300),
    "product after overflow": (lambda a, b, h: h * a * b, 1e200, 1e-200, 1e200),
    "product after underflow": (lambda a, b, h: h * a * b, 1e-200, 1e200, 1e-200),
    "product with an offset": (lambda a, b, h: (h * a + 0.5) * b, 1e-170, 1e-170, 1e300),
    "product of three": (lambda a, b, h: h * a * b * a, 1e-120, 1e-120, 1e300),
    "zero after overflow": (lambda a, b, h: h * a * b, 1e200, 0.0, 1e200),
    "quotient": (lambda a, b, h: h * a / b, 1e250, 1e250, 1e100),
    "two quotients": (lambda a, b, h: h / a / b, 1e170, 1e170, 1e300),
    "cancelling sum": (lambda a, b, h: a * h + b * h, 1e300, -1e300, 1e10),
    "difference": (lambda a, b, h: h * a - h * b, 1e305, 1e305, 1e10),
}


@pytest.mark.parametrize("place", [0, 5, 30])
@pytest.mark.parametrize("name", COMPOSED_COEFFICIENTS)
def test_coefficients_that_a_step_does_not_compute(name, place, backend):
    step, *special, state = COMPOSED_COEFFICIENTS[name]
    if backend == "C" and name in KEEPS:
        pytest.skip("a fused multiplication and addition has no infinite product to subtract")
    # By default, numba may regroup products and sums itself; see `numba__fastmath`.
    with pytensor.config.change_flags(numba__fastmath=False):
        function = compiled(step, 2)
        a, b = np.full(40, 0.5), np.full(40, 0.5)
        a[place], b[place] = special
        a[:place], b[:place] = KEEPS.get(name, (1.0, 1.0))
        expected, h = [], np.float64(state)
        with np.errstate(all="ignore"):
            for x, y in zip(a, b, strict=True):
                h = step(x, y, h)
                expected.append(h)
        np.testing.assert_allclose(function(a, b, state)[0], expected, rtol=1e-12, atol=1e-300)
