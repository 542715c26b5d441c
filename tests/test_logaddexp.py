"""Loops of the log-affine family, ``h[t] = logaddexp(h[t-1] + a[t], b[t])``."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.numba.elemwise.block import BLOCK
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.logaddexp import logaddexp
from tests.checks import assert_derivatives
from tests.modes import MODES

INF, NAN = np.inf, np.nan
LENGTHS = (*range(20), 31, 32, 33, 63, 64, 65, 70, BLOCK - 1, BLOCK, BLOCK + 1, 3000)
# Starts, and entries that are put into the arrays of a loop.
STARTS = (0.0, -INF, INF, NAN, 1e4, -1e4)


def loop(h0, a, b, dtype=np.longdouble):
    """Return the states of the plain loop; `a` None for no shifts."""
    h = dtype(h0)
    out = np.empty(len(b), dtype)
    with np.errstate(all="ignore"):
        for t in range(len(b)):
            h = np.logaddexp(h if a is None else h + dtype(a[t]), dtype(b[t]))
            out[t] = h
    return out


def gradients(h0, a, b, w):
    """Return the derivatives of ``sum(w * h)`` by the start, the shifts and the entries."""
    h = loop(h0, a, b)
    shifted = np.concatenate([[np.longdouble(h0)], h[:-1]])[: len(b)]
    shifted = shifted if a is None else shifted + a
    owed, by_a, by_b = np.longdouble(0), np.empty(len(b)), np.empty(len(b))
    for t in reversed(range(len(b))):
        owed += w[t]
        e = np.exp(-abs(shifted[t] - b[t]))
        larger, smaller = owed / (1 + e), owed * e / (1 + e)
        by_b[t], by_a[t] = (larger, smaller) if b[t] > shifted[t] else (smaller, larger)
        owed = np.longdouble(by_a[t]) if b[t] > shifted[t] else larger
    return float(owed), by_a, by_b


def trace(step, sequences, h0, **options):
    return scanlib.scan(step, sequences, h0, return_updates=False, **options)


def make(kind, dtype, mode, grad=False):
    """Return a compiled loop ``f(h0, a, b, w)``: its states, or its gradient."""
    h0 = pt.scalar("h0", dtype=dtype)
    a, b, w = (pt.vector(name, dtype=dtype) for name in "abw")
    if kind == "plain":
        h = trace(lambda b, h: logaddexp(h, b), [b], h0)
    elif kind == "constant shift":
        h = trace(lambda b, h, a: logaddexp(h + a, b), [b], h0, non_sequences=[a[0]])
    else:
        h = trace(lambda a, b, h: logaddexp(h + a, b), [a, b], h0)
    outputs = pytensor.grad((w * h).sum(), [h0, a, b], disconnected_inputs="ignore") if grad else h
    f = pytensor.function([h0, a, b, w], outputs, mode=mode, on_unused_input="ignore")
    families = [r.family for op in lowered(f) for r in op.recurrences]
    if mode is not MODES["py"]:
        assert families[0] == "log-affine"
    return f


def lowered(f):
    nodes = f.maker.fgraph.toposort()
    return [node.op for node in nodes if isinstance(node.op, ElemwiseScan)]


@pytest.fixture(scope="module")
def loops():
    """Return compiled loops by kind and dtype, each compiled once."""
    made = {}

    def get(kind, dtype, grad=False):
        key = (kind, dtype, grad)
        if key not in made:
            made[key] = make(kind, dtype, MODES["c"], grad)
        return made[key]

    return get


def data(length, dtype, kind, scale=2.0, seed=0):
    rng = np.random.default_rng([seed, length])
    a, b, w = (rng.normal(scale=s, size=length).astype(dtype) for s in (scale / 4, scale, 1.0))
    if kind == "constant shift" and length:
        a[:] = a[0]
    return a, b, w


def assert_near(actual, h0, a, b, dtype):
    """As near to the exact states as a small multiple of the plain loop's own error."""
    exact = loop(h0, a, b)
    own = loop(h0, a, b, np.dtype(dtype).type)
    assert actual.dtype == dtype
    finite = np.isfinite(exact)
    np.testing.assert_array_equal(actual[~finite], exact[~finite].astype(dtype))
    if finite.any():
        unit = np.finfo(dtype).eps
        error, own = (np.abs(values[finite] - exact[finite]) for values in (actual, own))
        # One step rounds a shifted state, a distance and a sum; errors of a state stay in it.
        size = np.maximum(1, np.maximum.accumulate(np.abs(exact[finite])))
        assert np.all(error <= 4 * np.maximum.accumulate(own) + 8 * unit * size)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("kind", ["plain", "shifted", "constant shift"])
class TestForward:
    def test_lengths(self, loops, kind, dtype):
        f = loops(kind, dtype)
        for length in LENGTHS[1:] if kind == "constant shift" else LENGTHS:
            a, b, w = data(length, dtype, kind)
            assert_near(f(0.5, a, b, w), 0.5, None if kind == "plain" else a, b, dtype)

    @pytest.mark.parametrize("start", STARTS)
    def test_starts_and_special_entries(self, loops, kind, dtype, start):
        f = loops(kind, dtype)
        for number in (None, -INF, INF, NAN, 1e4, -1e4, 80.0, -80.0):
            a, b, w = data(150, dtype, kind)
            if number is not None:
                b[[0, 3, 40, 41, 42, 43, 44, 45, 46, 47, 100]] = number
            assert_near(f(start, a, b, w), start, None if kind == "plain" else a, b, dtype)

    @pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0, 1e4])
    def test_ranges_inside_a_block(self, loops, kind, dtype, scale):
        f = loops(kind, dtype)
        start = np.dtype(dtype).type(-scale)
        cases = [data(1500, dtype, kind, scale, seed)[1] for seed in range(3)]
        ramp = np.linspace(-scale, scale, 1500).astype(dtype)
        for b in (*cases, ramp, ramp[::-1].copy(), np.full_like(ramp, scale)):
            a, _, w = data(1500, dtype, kind, min(scale, 4.0))
            assert_near(f(start, a, b, w), start, None if kind == "plain" else a, b, dtype)

    def test_only_minus_infinity(self, loops, kind, dtype):
        a, _, w = data(70, dtype, kind)
        b = np.full(70, -INF, dtype)
        np.testing.assert_array_equal(loops(kind, dtype)(-INF, a, b, w), b)

    def test_arguments_come_back_unchanged(self, loops, kind, dtype):
        given = data(3000, dtype, kind)
        kept = [value.copy() for value in given]
        loops(kind, dtype)(1.0, *given)
        for value, before in zip(given, kept, strict=True):
            np.testing.assert_array_equal(value, before)


def test_infinite_shifts(loops):
    """A state that a shift makes -inf is forgotten; infinity minus infinity is NaN."""
    f = loops("shifted", "float64")
    for shifts in ([-INF], [INF], [-INF, INF], [INF, -INF], [-1e308, 1e308, 1e308, -1e308], [NAN]):
        a, b, w = data(60, "float64", "shifted")
        a[20 : 20 + len(shifts)] = shifts
        assert_near(f(0.0, a, b, w), 0.0, a, b, "float64")


def test_every_mode(mode):
    for kind in ("plain", "shifted"):
        f = make(kind, "float64", mode)
        for length in (0, 1, 9, 70):
            a, b, w = data(length, "float64", kind)
            assert_near(f(-INF, a, b, w), -INF, None if kind == "plain" else a, b, "float64")


@pytest.mark.parametrize("kind", ["plain", "shifted"])
class TestGradient:
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_lengths(self, loops, kind, dtype):
        f = loops(kind, dtype, True)
        rtol = 2e-4 if dtype == "float32" else 1e-11
        for length in LENGTHS:
            a, b, w = data(length, dtype, kind)
            expected = gradients(0.5, None if kind == "plain" else a, b, w)
            for k, (value, wanted) in enumerate(zip(f(0.5, a, b, w), expected, strict=True)):
                if kind == "shifted" or k != 1:
                    np.testing.assert_allclose(value, wanted, rtol=rtol, atol=rtol)

    def test_wide_ranges_and_missing_entries(self, loops, kind):
        f = loops(kind, "float64", True)
        for scale in (100.0, 1e4):
            a, b, w = data(1500, "float64", kind, scale)
            a /= scale
            b[5:9] = -INF
            expected = gradients(-scale, None if kind == "plain" else a, b, w)
            actual = f(-scale, a, b, w)
            np.testing.assert_allclose(actual[0], expected[0], rtol=1e-9, atol=1e-9)
            np.testing.assert_allclose(actual[2], expected[2], rtol=1e-9, atol=1e-9)

    @pytest.mark.slow
    def test_second_order(self, kind, mode):
        h0, a, b = pt.scalar("h0"), pt.vector("a"), pt.vector("b")
        step = (lambda a, b, h: logaddexp(h, b) if kind == "plain" else logaddexp(h + a, b))  # fmt: skip
        h = trace(step, [a, b], h0)

        def reference(h0, a, b):
            return float(np.sin(loop(h0, None if kind == "plain" else a, b)).sum())

        values = data(9, "float64", kind)[:2]
        inputs = dict(zip([h0, a, b], [np.float64(0.3), *values], strict=True))
        cost = pt.sin(h).sum() + (0.0 * a).sum()
        assert_derivatives(cost, inputs, reference, mode)
