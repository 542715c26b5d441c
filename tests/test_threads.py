"""Loops in several threads, as numba compiles them: slices of the channels.

The C linker's threads over channels are tested in `test_c_code`.
"""

import multiprocessing
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

from scanlib.backends.numba import threads
from scanlib.ops.elemwise_scan import ElemwiseScan
from tests.c_loops import trace, uniform
from tests.checks import assert_same
from tests.modes import MODES
from tests.reference import reference_scan

pytestmark = pytest.mark.skipif(not threads.system_has_threads(), reason="no such threads here")

SMALL = {"scanlib__parallel_channels": 1}


def compiled(inputs, outputs, count, mode="numba"):
    """Compile for a number of threads, even for small loops; inputs must not change."""
    with pytensor.config.change_flags(scanlib__threads=count, **SMALL):
        function = pytensor.function(inputs, outputs, mode=MODES[mode], on_unused_input="ignore")
        nodes = function.maker.fgraph.toposort()
        assert any(isinstance(node.op, ElemwiseScan) for node in nodes), "no loop was lowered"

    def call(*values):
        before = [np.asarray(value).tobytes() for value in values]
        results = function(*values)
        for value, held in zip(values, before, strict=True):
            assert np.asarray(value).tobytes() == held, "an input was changed"
        return results

    call.function = function
    return call


def assert_repeats(call, values, expected, **tolerance):
    """Two calls give the same bits, and what is expected."""
    first, second = call(*values), call(*values)
    assert_same(first, expected, **tolerance)
    for one, other in zip(first, second, strict=True):
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

    def test_several_callers(self, calls, alone):
        values = [(uniform(9, 7, 5, seed=k), uniform(7, 5), uniform(5), 0.3) for k in range(4)]
        expected = [alone(*v) for v in values]
        copies = [calls[3].function.copy(share_memory=False) for _ in values]
        with ThreadPoolExecutor(4) as pool:
            for _ in range(5):
                results = pool.map(lambda f, v: f(*v), copies, values)
                for got, wanted in zip(results, expected, strict=True):
                    assert_same(got, wanted, rtol=1e-11, atol=1e-13)

    @pytest.mark.skipif(sys.platform != "linux", reason="forks are safe on Linux alone")
    def test_forked_process(self, calls):
        values = uniform(9, 7, 5), uniform(7, 5), uniform(5), 0.3
        expected = calls[3](*values)
        reader, writer = multiprocessing.Pipe(duplex=False)
        child = multiprocessing.get_context("fork").Process(
            target=lambda: writer.send(calls[3](*values))
        )
        child.start()
        assert reader.poll(60), "the child does not answer"
        got = reader.recv()
        child.join()
        for one, other in zip(got, expected, strict=True):
            assert np.asarray(one).tobytes() == np.asarray(other).tobytes()

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


def test_one_thread_is_the_code_of_one_thread():
    """With one thread, the flags for more change nothing: what is cached stays valid."""
    from scanlib.backends.numba.elemwise import write_elemwise

    inputs, outputs = channels()
    function = compiled(inputs, outputs[:2], 1, "c").function
    (op,) = (n.op for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan))
    keys = set()
    for flags in ({}, SMALL):
        with pytensor.config.change_flags(scanlib__threads=1, **flags):
            keys.add(write_elemwise(op)[1])
    assert len(keys) == 1
    with pytensor.config.change_flags(scanlib__threads=2):
        assert write_elemwise(op)[1] not in keys


def test_errors_of_a_part(monkeypatch):
    """What a part raises in its thread, the caller raises."""
    from numba import njit

    def part(k, parts, values):
        if k == values[0]:
            raise ValueError("not this one")
        values[k + 1] = parts

    key = "scanlib test part"
    call = threads.in_threads(part, key, 3)

    @njit
    def run(values):
        call(3, (values,))
        return values

    assert run(np.array([-1, 0, 0, 0])).tolist() == [-1, 3, 3, 3]
    for k in range(3):
        values = np.array([k, 0, 0, 0])
        with pytest.raises(ValueError, match="not this one"):
            run(values)
        expected = [k, 3, 3, 3]
        expected[k + 1] = 0
        assert values.tolist() == expected


def test_systems_without_threads(monkeypatch):
    """Where the system has no such threads, loops use one."""
    monkeypatch.setattr(threads, "system_has_threads", lambda: False)
    with pytensor.config.change_flags(scanlib__threads=4):
        assert threads.wanted_threads() == 1
