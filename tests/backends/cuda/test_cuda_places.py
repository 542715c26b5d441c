"""Loops that read arrays at computed places, by CUDA kernels run on the CPU, and the linkers."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.cuda.launch import KernelLoop
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.errors import StepIndexError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.positions import has_positions
from tests.cuda_device import check_calls, emulated, launches
from tests.families import both

pytestmark = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")
RNG = np.random.default_rng(0)


def automaton():
    """States are places in a table, for one channel."""
    table, x, s = pt.lmatrix("table"), pt.lvector("x"), pt.lscalar("s")
    trace = scanlib.scan(lambda x, s, table: table[x, s], x, s, table, return_updates=False)
    return [table, x, s], [trace]


def regimes():
    """Channels with states of their own that choose parameters; the gradients' loops."""
    table, x, s, y = pt.lmatrix("table"), pt.lvector("x"), pt.lvector("s"), pt.dvector("y")
    mu, phi = pt.dvector("mu"), pt.dvector("phi")

    def step(x, s, y, table, mu, phi):
        s = table[x, s]
        return s, mu[s] + phi[s] * y

    trace = scanlib.scan(step, x, [s, y], [table, mu, phi], return_updates=False)[1]
    return [table, x, s, y, mu, phi], [trace]


def rows():
    """Places in rows of a sequence, and columns of a matrix along the channels."""
    i, x, w, h = pt.lvector("i"), pt.dmatrix("x"), pt.dmatrix("w"), pt.dvector("h")
    trace = scanlib.scan(
        lambda i, x, h, w: 0.5 * h + x[i] * w[i], [i, x], h, w, return_updates=False
    )
    return [i, x, w, h], [trace]


def until_accepted():
    """A walk through a table of successors that ends where it should."""
    table, s, goal = pt.lvector("table"), pt.lscalar("s"), pt.lscalar("goal")
    trace = scanlib.scan(
        lambda s, table, goal: (table[s], scanlib.until(pt.eq(table[s], goal))),
        outputs_info=s, non_sequences=[table, goal], n_steps=50, return_updates=False,
    )  # fmt: skip
    return [table, s, goal], [trace]


def buffers():
    """States that are written at a place."""
    i, x, h = pt.lvector("i"), pt.dvector("x"), pt.dvector("h")
    trace = scanlib.scan(
        lambda i, x, h: pt.set_subtensor((0.5 * h)[i], x), [i, x], h, return_updates=False
    )
    return [i, x, h], [trace, trace[-1]]


def integers(low, high, *shape):
    return RNG.integers(low, high, shape)


CASES = [
    (automaton, [(integers(-6, 6, 3, 6), integers(-3, 3, n), np.int64(2)) for n in (0, 1, 40)]),
    (regimes, [(integers(-3, 3, 2, 3), integers(0, 2, n), integers(0, 3, c), RNG.normal(size=c),
                RNG.normal(size=3), RNG.uniform(-0.9, 0.9, 3)) for n, c in ((1, 4), (30, 7))]),
    (rows, [(integers(-4, 4, n), RNG.normal(size=(n, 4))[:, ::-1], RNG.normal(size=(5, 4)).T,
             RNG.normal(size=5)) for n in (0, 1, 33)]),
    (until_accepted, [(np.roll(np.arange(9), -1), np.int64(2), np.int64(k)) for k in (8, 3, 1)]),
    (buffers, [(integers(-5, 5, n), RNG.normal(size=n), RNG.normal(size=5)) for n in (1, 2, 30)]),
]  # fmt: skip
cases = pytest.mark.parametrize("graph, data", CASES, ids=lambda v: getattr(v, "__name__", ""))


@cases
def test_kernels(graph, data):
    with emulated() as (mode, ran):
        function, plain = both(*graph(), mode)
        check_calls(function, plain, data)
        assert any(has_positions(op.body.outputs) for op in ran)


def test_places_outside_an_array():
    """Nothing outside is read, and the error names the first step."""
    with emulated() as (mode, _):
        function = pytensor.function(*automaton(), mode=mode)
        table = np.array([[1, 2, 0], [0, 0, 7], [0, 0, -9]])
        for x, step, index in (([0, 1, 0], 2, 7), ([0, 2, 0], 2, -9), ([0, 5], 1, 5)):
            with pytest.raises(StepIndexError, match=f"step {step} uses the index {index},"):
                function(table, np.array(x), np.int64(1))
        with pytest.raises(StepIndexError, match="step 0 uses the index 1,"):
            function(table[:, :0], np.array([0]), np.int64(1))
        assert len(function(table[:, :0], np.array([], "int64"), np.int64(1))[0]) == 0


def test_states_of_other_channels():
    x, i, h = pt.dmatrix("x"), pt.lvector("i"), pt.dvector("h")
    trace = scanlib.scan(lambda x, i, h: x + h[i], [x, i], h, return_updates=False)
    function = pytensor.function([x, i, h], trace, mode="CVM")
    (op,) = [n.op for n in function.maker.fgraph.apply_nodes if isinstance(n.op, ElemwiseScan)]
    with pytest.raises(NoCCodeError, match="need one another have no CUDA kernel"):
        KernelLoop(op)


@pytest.mark.usefixtures("torch_on_device")
class TestPyTorch:
    @pytest.mark.all_forms
    @cases
    def test_loops(self, graph, data):
        function, plain = both(*graph(), "PYTORCH")
        before = launches()
        check_calls(function, plain, data[1:])
        assert launches() >= before + len(data) - 1

    def test_a_place_outside_an_array(self):
        function = pytensor.function(*automaton(), mode="PYTORCH")
        with pytest.raises(IndexError, match="step 1 uses the index 9,"):
            function(np.array([[1, 9]]), np.array([0, 0, 0]), np.int64(1))


class TestJAX:
    @cases
    def test_loops(self, jax_on_device, graph, data):
        function, plain = both(*graph(), "JAX")
        before = launches()
        check_calls(function, plain, data[1:])
        assert launches() >= before + len(data) - 1

    def test_places_outside_an_array(self, jax_on_device):
        """As in JAX's own code: the nearest item is read, and no error is raised."""
        i, x = pt.lvector("i"), pt.dvector("x")
        trace = scanlib.scan(
            lambda i, h, x: 0.5 * h + x[i], i, pt.zeros(()), x, return_updates=False
        )
        function = pytensor.function([i, x], trace, mode="JAX")
        with pytensor.config.change_flags(scanlib__cuda=False, scanlib__perform="python"):
            other = pytensor.function([i, x], trace, mode="JAX")
        values = np.array([0, 5, -9, -1, 2]), np.array([1.0, 2.0, 4.0])
        np.testing.assert_allclose(np.asarray(function(*values)), np.asarray(other(*values)))
