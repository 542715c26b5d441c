"""Loops of the log-affine family, ``h[t] = logaddexp(h[t-1] + a[t], b[t])``."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.logaddexp import logaddexp
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.schedules.selection import BLOCK
from tests.checks import assert_derivatives
from tests.families import kernels
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


@pytest.fixture(scope="module", params=["numba", "C"])
def loops(request):
    """Return compiled loops by kind and dtype, each compiled once."""
    made = {}

    def get(kind, dtype, grad=False):
        key = (kind, dtype, grad)
        if key not in made:
            made[key] = make(kind, dtype, MODES["c"], grad)
        return made[key]

    with kernels(request.param):
        yield get


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
        h0_value, (a_value, b_value, _) = np.float64(0.3), data(9, "float64", kind)
        if kind == "plain":
            h = trace(lambda b, h: logaddexp(h, b), [b], h0)
            inputs = {h0: h0_value, b: b_value}
        else:
            h = trace(lambda a, b, h: logaddexp(h + a, b), [a, b], h0)
            inputs = {h0: h0_value, a: a_value, b: b_value}

        def reference(h0, *rows):
            return float(np.sin(loop(h0, None if kind == "plain" else rows[0], rows[-1])).sum())

        assert_derivatives(pt.sin(h).sum(), inputs, reference, mode)


SPELLINGS = {
    "logaddexp": lambda h, a, b: pt.logaddexp(h + a, b),
    "log of a sum": lambda h, a, b: pt.log(pt.exp(b) + pt.exp(h + a)),
    "three terms": lambda h, a, b: pt.logaddexp(h + a, b, b - 800),
    "nested": lambda h, a, b: pt.logaddexp(pt.logaddexp(h + a, b), b - 800),
}


def in_parts(h0, rows, step, outputs, mode):
    """Compile what `outputs` makes of the trace of a loop."""
    h = trace(lambda a, b, h: step(h, a, b), rows, h0)
    return pytensor.function([h0, *rows], outputs(h), mode=mode, on_unused_input="ignore")


class TestSpellings:
    """Logarithms of sums as PyTensor writes them, with numbers whose exponentials overflow."""

    @pytest.mark.slow
    @pytest.mark.parametrize("name", SPELLINGS)
    def test_values_and_gradients(self, name, fast_mode):
        h0, a, b = pt.scalar("h0"), pt.vector("a"), pt.vector("b")
        f = in_parts(
            h0,
            [a, b],
            SPELLINGS[name],
            lambda h: [h, *pytensor.grad(h.sum(), [h0, a, b])],
            fast_mode,
        )
        families = {r.family for op in lowered(f) for r in op.recurrences}
        assert families == {"log-affine", "affine"}
        for start, scale in ((0.5, 1.0), (-INF, 1.0), (1000.0, 1000.0), (-5000.0, 10.0)):
            shifts, entries, _ = data(40, "float64", "shifted", scale)
            entries[3] = -INF
            states, *actual = f(start, shifts, entries)
            assert_near(states, start, shifts, entries, "float64")
            with np.errstate(invalid="ignore"):
                expected = gradients(start, shifts, entries, np.ones(40))
            for value, wanted in zip(actual, expected, strict=True):
                np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-9)

    @pytest.mark.slow
    def test_channels(self, fast_mode):
        h0, b = pt.vector("h0"), pt.matrix("b")
        h = trace(lambda b, h: pt.logaddexp(h, b), [b], h0)
        f = pytensor.function([h0, b], [h, pytensor.grad(h.sum(), b)], mode=fast_mode)
        value = np.random.default_rng(0).normal(scale=1000, size=(30, 3))
        states, by_b = f(np.zeros(3), value)
        for c in range(3):
            column = value[:, c]
            np.testing.assert_allclose(states[:, c], loop(0.0, None, column), rtol=1e-14)
            expected = gradients(0.0, None, column, np.ones(30))[2]
            np.testing.assert_allclose(by_b[:, c], expected, rtol=1e-10, atol=1e-10)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["logaddexp", "log of a sum", "nested"])
    def test_second_derivatives(self, name, fast_mode):
        """Those of scanlib's own operation, also for large numbers."""
        h0, a, b = pt.scalar("h0"), pt.vector("a"), pt.vector("b")

        def curvature(h):
            first = pytensor.grad(pt.sin(h).sum(), [h0, a, b])
            weighted = sum((g * pt.cos(g)).sum() for g in first)
            return pytensor.grad(weighted, [h0, a, b])

        def own_step(h, a, b):
            return logaddexp(h + a, b)

        given = in_parts(h0, [a, b], SPELLINGS[name], curvature, fast_mode)
        own = in_parts(h0, [a, b], own_step, curvature, fast_mode)
        for offset in (0.0, 900.0):
            shifts, entries, _ = data(20, "float64", "shifted")
            actual = given(offset, shifts, entries + offset)
            expected = own(offset, shifts, entries + offset)
            for value, wanted in zip(actual, expected, strict=True):
                np.testing.assert_allclose(value, wanted, rtol=1e-9, atol=1e-10)

    def test_what_is_no_logarithm_of_exponentials_stays(self, fast_mode):
        """A term that is no exponential, and a ratio with another sum."""
        x = pt.vector("x")
        for step, expected in (
            (lambda h, x: pt.log(pt.exp(x) + 2 + h**2), lambda h, x: np.log(np.exp(x) + 2 + h**2)),
            (
                lambda h, x: pt.exp(h) / (pt.exp(x) + pt.exp(2 * x)),
                lambda h, x: np.exp(h) / (np.exp(x) + np.exp(2 * x)),
            ),
        ):
            h = trace(lambda x, h, step=step: step(h, x), [x], np.float64(0.0))
            value = np.random.default_rng(2).uniform(1, 2, size=12)
            actual = pytensor.function([x], h, mode=fast_mode)(value)
            state = 0.0
            for t in range(12):
                state = expected(state, value[t])
                np.testing.assert_allclose(actual[t], state, rtol=1e-13)
