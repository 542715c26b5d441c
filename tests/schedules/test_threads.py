"""Loops in several threads: slices of the channels, chunks of the steps.

The C linker's threads over channels are tested in `test_c_code`.
"""

import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest
from pytensor.tensor.elemwise import Elemwise

import scanlib
from scanlib.backends.handler.programs import program_of
from scanlib.kernels import thread_parts
from scanlib.kernels.compiled import program_key
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.c_loops import trace, uniform
from tests.checks import assert_same, keeping_inputs
from tests.modes import MODES
from tests.reference import reference_scan

pytestmark = pytest.mark.skipif(
    not thread_parts.system_has_threads(), reason="no such threads here"
)

SMALL = {"scanlib__parallel_channels": 1, "scanlib__parallel_steps": 1}


def compiled(inputs, outputs, count, mode="numba"):
    """Compile for a number of threads, even for small loops; inputs must not change."""
    with pytensor.config.change_flags(scanlib__threads=count, **SMALL):
        function = pytensor.function(inputs, outputs, mode=MODES[mode], on_unused_input="ignore")
        nodes = function.maker.fgraph.toposort()
        assert any(isinstance(node.op, ElemwiseScan) for node in nodes), "no loop was lowered"

    call = keeping_inputs(function)

    def copy():
        with pytensor.config.change_flags(scanlib__threads=count, **SMALL):
            return function.copy(share_memory=False)

    call.copy = copy
    return call


def assert_repeats(call, values, expected, **tolerance):
    """Two calls give the same bits, and what is expected."""
    first, second = call(*values), call(*values)
    assert_same(first, expected, **tolerance)
    for one, other in zip(first, second, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def in_forked_process(call, values):
    """Call in a process forked after a call here."""
    if sys.platform != "linux":
        pytest.skip("forks are safe on Linux alone")
    expected = call(*values)
    reader, writer = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: writer.send(call(*values)))
    child.start()
    assert reader.poll(60), "the child does not answer"
    got = reader.recv()
    child.join()
    for one, other in zip(got, expected, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


def channels():
    """A loop with sums over channels and over time, its last row, and its gradient."""
    x, start, w, s = pt.dtensor3("x"), pt.dmatrix("start"), pt.dvector("w"), pt.dscalar("s")
    y, sums = trace(
        lambda x, y, w, s: [pt.tanh(x * y + w * s), pt.sum(x * y, axis=0)],
        sequences=x,
        outputs_info=[start, None],
        non_sequences=[w, s],
    )
    last = trace(
        lambda x, near, far: x * near + 0.5 * far,
        sequences=x,
        outputs_info={"initial": pt.stack([start, -start]), "taps": [-1, -2]},
    )[-1]
    cost = pt.sum(y**2) + pt.sum(sums)
    return [x, start, w, s], [y, sums, last, *pytensor.grad(cost, [x, start, w, s])]


def sizes():
    for n, m in ((7, 5), (1, 3), (2, 64), (0, 4)):
        for steps in (9, 1):
            yield uniform(steps, n, m), uniform(n, m), uniform(m), np.float64(0.3)
    x, start, w, s = uniform(9, 7, 6), uniform(7, 6), uniform(6), np.float64(0.3)
    yield x[:, :, ::-2], start[:, ::2], w[::2], s
    x[4, 2, 1], start[3, 3], x[0, 6] = np.nan, np.inf, -np.inf
    yield x, start, w, s


@pytest.fixture(scope="module")
def calls():
    inputs, outputs = channels()
    return {2: compiled(inputs, outputs[:2], 2), 3: compiled(inputs, outputs, 3)}


@pytest.fixture(scope="module")
def alone():
    return compiled(*channels(), 1, "c")


class TestChannels:
    @pytest.mark.slow
    def test_results(self, calls, alone):
        for values in sizes():
            x, start, w, s = values
            with np.errstate(invalid="ignore"):
                y, sums = reference_scan(
                    lambda x, y, w, s: [np.tanh(x * y + w * s), (x * y).sum(axis=0)],
                    [x],
                    [start, None],
                    [w, s],
                )
            expected = alone(*values)
            assert_same(expected[:2], [y, sums], rtol=1e-12, atol=1e-14)
            assert_repeats(calls[2], values, expected[:2], rtol=1e-12, atol=1e-14)
            assert_repeats(calls[3], values, expected, rtol=1e-11, atol=1e-13)

    def test_no_steps(self, calls):
        values = uniform(0, 7, 5), uniform(7, 5), uniform(5), np.float64(0.3)
        y, sums = calls[2](*values)
        assert y.shape == (0, 7, 5)
        assert sums.shape == (0, 5)
        with pytest.raises(IndexError):  # there is no last row
            calls[3](*values)

    @pytest.mark.slow
    def test_several_callers(self, calls, alone):
        values = [(uniform(9, 7, 5, seed=k), uniform(7, 5), uniform(5), 0.3) for k in range(4)]
        expected = [alone(*v) for v in values]
        copies = [calls[3].copy() for _ in values]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                results = pool.map(lambda f, v: f(*v), copies, values)
                for got, wanted in zip(results, expected, strict=True):
                    assert_same(got, wanted, rtol=1e-11, atol=1e-13)

    def test_forked_process(self, calls):
        in_forked_process(calls[3], (uniform(9, 7, 5), uniform(7, 5), uniform(5), 0.3))

    def test_sizes_of_their_own(self):
        """Results that share nothing have loops of their own, each of which is cut."""
        a, b, n = pt.dvector("a"), pt.dvector("b"), pt.lscalar("n")
        y, z, total = trace(
            lambda y, z: [pt.sin(y) + 0.1, pt.cos(z), pt.sum(y * 2.0)],
            outputs_info=[a, b, None],
            n_steps=n,
        )
        call = compiled([a, b, n], [y, z, total], 3)
        for p, q in ((10, 3), (1, 1), (2, 50)):
            expected = reference_scan(
                lambda y, z: [np.sin(y) + 0.1, np.cos(z), np.sum(y * 2.0)],
                [],
                [uniform(p), uniform(q), None],
                n_steps=6,
            )
            assert_repeats(call, (uniform(p), uniform(q), 6), expected, rtol=1e-13)


def series():
    """Loops of one channel: a history, a last row, a root of an affine state, the gradient."""
    a, b, start, g = pt.dvector("a"), pt.dvector("b"), pt.dscalar("start"), pt.dscalar("g")
    y = trace(lambda a, b, y: a * y + b, sequences=[a, b], outputs_info=start)
    z = trace(lambda b, z, g: g * z + b, sequences=b, outputs_info=start, non_sequences=g)
    s = trace(
        lambda b, s, g: pt.sqrt(0.1 + 0.2 * b**2 + g**2 * s**2),
        sequences=b,
        outputs_info=start,
        non_sequences=g,
    )
    cost = pt.sum(y**2) + z[-1]
    return [a, b, start, g], [y, z[-1], s, *pytensor.grad(cost, [a, b, start, g])]


def plain_series(a, b, start, g):
    """The values and the gradient of `series`, step by step."""
    y, s = [start], [start]
    with np.errstate(all="ignore"):
        for a_t, b_t in zip(a, b, strict=True):
            y.append(a_t * y[-1] + b_t)
            s.append(np.sqrt(0.1 + 0.2 * b_t**2 + g**2 * s[-1] ** 2))
        owed, d_z, d_g = np.zeros(len(a) + 1), np.float64(1.0), np.float64(0.0)
        d_a, d_b = np.empty(len(a)), np.empty(len(a))
        values = [start]
        for b_t in b:
            values.append(g * values[-1] + b_t)
        for t in range(len(a) - 1, -1, -1):
            d_b[t] = owed[t + 1] + 2 * y[t + 1]
            d_a[t] = d_b[t] * y[t]
            owed[t] = a[t] * d_b[t]
            d_g, d_b[t], d_z = d_g + d_z * values[t], d_b[t] + d_z, d_z * g
    return [np.array(y[1:]), values[-1], np.array(s[1:]), d_a, d_b, owed[0] + d_z, d_g]


STEPS = 3 * 4096 + 5  # chunks have four blocks at least


def decaying(steps=STEPS, seed=0):
    generator = np.random.default_rng(seed)
    a, b = generator.uniform(-0.9, 0.99, steps), generator.normal(size=steps)
    return a, b, np.float64(0.4), np.float64(0.98)


@pytest.fixture(scope="module", params=["numba", "c"])
def call(request):
    return compiled(*series(), 3, request.param)


class TestSteps:
    def check(self, call, values, **tolerance):
        """The gradient by `a` and `g` squares what it computes: infinities are not compared."""
        expected = plain_series(*values)
        assert_repeats(call, values, expected, **({"rtol": 1e-9, "atol": 1e-11} | tolerance))

    @pytest.mark.slow
    @pytest.mark.parametrize("steps", [1, 1024, 2 * 4096 - 1, STEPS, 30_011])
    def test_lengths(self, call, steps):
        self.check(call, decaying(steps))

    @pytest.mark.slow
    def test_strides(self, call):
        a, b, start, g = decaying(2 * STEPS)
        self.check(call, (a[::-2], b[::2], start, g))

    @pytest.mark.slow
    def test_random_walk(self, call):
        """Nothing is forgotten; one thread runs the loop."""
        _, b, start, _ = decaying()
        self.check(call, (np.ones(STEPS), b, start, np.float64(1.0)))

    def test_coefficients_that_do_not_decay_everywhere(self, call):
        """The block that is looked at first decays, and others do not."""
        a, b, start, g = decaying()
        for first, last in ((0, 8000), (3000, 4000), (4096, 7000), (8190, STEPS)):
            slow = a.copy()
            slow[first:last] = 1.0 - 1e-5
            self.check(call, (slow, b, start, g), atol=1e-6)

    def test_large_values_are_not_forgotten(self, call):
        """What the composed steps leave of a value may be small, and yet all there is."""
        a, b = np.full(STEPS, 0.92), np.zeros(STEPS)
        for start in (0.4, 1e140, 1e300):
            expected = plain_series(a, b, np.float64(start), np.float64(0.98))
            got = call(a, b, start, 0.98)
            assert 0 < abs(got[0][4096]) < np.inf
            assert_same(got[:3], expected[:3], rtol=1e-9, atol=1e-300)

    def test_overflow_that_composing_hides(self, call):
        """The last steps before a chunk give a number, whatever was before: but not infinity."""
        a, b = np.full(STEPS, 0.5), np.ones(STEPS)
        b[3071], a[3072:4000], a[4000], a[4001], b[4002] = 1e300, 1.0, 1e20, 0.0, 1e120
        expected = plain_series(a, b, np.float64(0.0), np.float64(0.5))[0]
        assert np.isnan(expected[-1])
        np.testing.assert_allclose(call(a, b, 0.0, 0.5)[0], expected, rtol=1e-9)

    @pytest.mark.slow
    def test_nothing_before_steps_that_do_not_decay(self, call):
        a, b = np.full(STEPS, 0.5), np.zeros(STEPS)
        a[:5000], b[4090:] = 1.0, 1.0
        self.check(call, (a, b, np.float64(0.0), np.float64(0.5)))

    @pytest.mark.slow
    def test_resets(self, call):
        """Growth that a reset ends: it overflows in the steps, or not."""
        steps = 20_000
        b, start, g = np.full(steps, 1e-300), np.float64(1e-300), np.float64(0.5)
        for first in (4000, 8000, 19_000):
            for length in (900, 5000):
                a = np.full(steps, 0.9)
                a[first : first + length] = 1.05
                a[first + length : first + length + 1] = 0.0
                a = a[:steps]
                expected = plain_series(a, b, start, g)
                for got, wanted in zip(call(a, b, start, g)[:3], expected[:3], strict=True):
                    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=0)

    def test_growth_to_the_end(self, call):
        steps = 20_000
        a, b = np.full(steps, 1.05), np.full(steps, 1e-300)
        expected = plain_series(a, b, np.float64(0.0), np.float64(0.5))
        (got, *_) = call(a, b, 0.0, 0.5)
        np.testing.assert_allclose(got, expected[0], rtol=1e-9)

    @pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
    def test_values_that_are_not_finite(self, call, value):
        for place in (0, 3000, 4095, 4096, 8000, STEPS - 1):
            for which in (0, 1):
                values = decaying()
                values[which][place] = value
                expected = plain_series(*values)
                for got, wanted in zip(call(*values)[:3], expected[:3], strict=True):
                    np.testing.assert_allclose(got, wanted, rtol=1e-9, atol=1e-11)

    def test_zero_steps(self, call):
        with pytest.raises(IndexError):  # there is no last row
            call(*decaying(0))

    @pytest.mark.slow
    @pytest.mark.parametrize("mode", ["numba", "c"])
    def test_single_precision(self, mode):
        """Chunks start from what those before them end with: the bits are those of one thread."""
        a, b, start = pt.fvector("a"), pt.fvector("b"), pt.fscalar("start")
        y = trace(lambda a, b, y: a * y + b, sequences=[a, b], outputs_info=start)
        calls = [compiled([a, b, start], [y], count, mode) for count in (1, 2)]
        for factor in (0.97, 1.0):
            values = np.full(40_000, factor, "float32"), uniform(40_000, dtype="float32")
            (one,), (two,) = (call(*values, np.float32(1)) for call in calls)
            assert one.tobytes() == two.tobytes()

    def test_forked_process(self, call):
        in_forked_process(call, decaying())

    def test_several_callers(self, call):
        values = [decaying(seed=k) for k in range(3)]
        expected = [call(*v) for v in values]
        copies = [call.copy() for _ in values]
        with ThreadPoolExecutor(3) as pool:
            results = pool.map(lambda f, v: f(*v), copies, values)
            for got, wanted in zip(results, expected, strict=True):
                assert_same(got, wanted, rtol=0, atol=0)


def test_explained():
    x, start = pt.dvector("x"), pt.dscalar("start")
    wide = trace(lambda x, y: pt.tanh(x + y), sequences=pt.dmatrix("w"), outputs_info=pt.dvector())
    cheap = trace(lambda x, y: x + y * y, sequences=pt.dmatrix("w"), outputs_info=pt.dvector())
    decays = trace(lambda x, y: 0.5 * y + x, sequences=x, outputs_info=start)
    walk = trace(lambda x, y: y + x, sequences=x, outputs_info=start)
    for graph, mode, words in (
        (wide, "numba", "250,000 channels times steps, and 256 channels"),
        (cheap, "numba", "250,000 channels times steps, and 1,024 channels"),
        (wide, "c", "some of the channels"),
        (decays, "numba", "each for some of the steps, 250,000 at least"),
        (decays, "c", "each for some of the steps, 250,000 at least"),
        (walk, "numba", None),
    ):
        with pytensor.config.change_flags(scanlib__threads=3):
            explanation = scanlib.explain(graph, MODES[mode])
        (loop,) = explanation.loops
        assert loop.threads == (3 if words else 1)
        assert ("up to 3" in explanation.details()) == bool(words)
        assert words is None or words in loop.shares
        assert scanlib.explain(graph, MODES[mode]).loops[0].threads == 1


def test_one_thread_is_the_code_of_one_thread():
    """With one thread, the flags for more change nothing: what is cached stays valid."""
    inputs, outputs = channels()
    function = pytensor.function(inputs, outputs[:2], mode=MODES["c"], on_unused_input="ignore")
    (op,) = (n.op for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan))
    keys = set()
    for flags in ({}, SMALL):
        with pytensor.config.change_flags(scanlib__threads=1, **flags):
            keys.add(program_key(program_of(op)))
    assert len(keys) == 1
    with pytensor.config.change_flags(scanlib__threads=2):
        assert program_key(program_of(op)) not in keys


@pytest.mark.slow
def test_python_stays_out_of_threads():
    """The caller waits with Python's lock: an operation that runs in Python would wait forever."""

    class Half(ps.UnaryScalarOp):
        def impl(self, x):
            return x / 2

    half = Elemwise(Half(ps.upgrade_to_float, name="half"))
    for ndim in (1, 0):  # slices, chunks
        x, start = pt.tensor("x", shape=(None,) * (ndim + 1)), pt.tensor("s", shape=(None,) * ndim)
        y = trace(lambda x, y: 0.5 * y + half(x), sequences=x, outputs_info=start)
        values = uniform(*(20_000, 4)[: ndim + 1]), uniform(*(4,)[:ndim])
        expected = reference_scan(lambda x, y: [0.5 * y + x / 2], values[:1], values[1:])
        assert_same(compiled([x, start], [y], 2)(*values), expected)


def test_systems_without_threads(monkeypatch):
    """Where the system has no such threads, loops use one."""
    monkeypatch.setattr(thread_parts, "system_has_threads", lambda: False)
    with pytensor.config.change_flags(scanlib__threads=4):
        assert thread_parts.wanted_threads() == 1
