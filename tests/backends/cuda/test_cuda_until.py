"""Loops with `until` by CUDA kernels, run on the CPU, and under both linkers."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.cuda_device import check_calls, emulated
from tests.families import both

pytestmark = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")


def scalars():
    """Two states, one of them in no result but the condition, and gradients."""
    x, h0 = pt.dvector("x"), pt.dscalar("h0")

    def step(x, h, g):
        new = 0.5 * h + x
        return [new, g + new], scanlib.until(new > 1.0)

    traces = scanlib.scan(step, x, [h0, 0.0], return_updates=False)
    gradients = pytensor.grad(sum((t**2).sum() for t in traces), [x, h0])
    return [x, h0], [*traces, *gradients]


def vectors():
    """Channels that all end by one condition; an output; a state of two taps; last rows."""
    x, y, h0 = pt.dmatrix("x"), pt.dvector("y"), pt.dmatrix("h0")

    def step(x, y, h, before, last):
        return [0.5 * h - 0.1 * before + x, last + h, x * y], scanlib.until(y > 0.95)

    states = [{"initial": h0, "taps": [-1, -2]}, h0[0], None]
    h, last, z = scanlib.scan(step, [x, y], states, return_updates=False)
    return [x, y, h0], [h, last[-1], z]


def newton():
    """A square root, to the last digit: the number of steps is the result's length."""
    x, n = pt.dscalar("x"), pt.lscalar("n")
    trace = scanlib.scan(
        lambda y, x: ((y + x / y) / 2, scanlib.until(abs(y * y - x) <= 1e-12 * x)),
        outputs_info=pt.ones(()), non_sequences=x, n_steps=n, return_updates=False,
    )  # fmt: skip
    return [x, n], [trace, trace[-1]]


def far_back():
    """The last row but two: a loop of fewer than three steps has none."""
    x, n = pt.dscalar("x"), pt.lscalar("n")
    h = scanlib.scan(
        lambda h, x: (h + x, scanlib.until(h > 3)), None, pt.zeros(()), x, n_steps=n,
        return_updates=False,
    )  # fmt: skip
    return [x, n], h[-3]


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-0.9, 0.9, shape)


SCALARS = [(np.r_[np.full(k, 0.1), 2.0, uniform(90)], np.array(0.0)) for k in (0, 1, 63, 64, 65)]
SCALARS += [(np.zeros(70), np.array(0.0))]  # the condition never holds


def vector_values():
    for stop in (0, 1, 5, 40, None):
        y = uniform(41)
        if stop is not None:
            y[stop] = 1.0
        yield uniform(41, 3), y, uniform(2, 3, seed=1)


def cases():
    """Graphs, arguments, and how many loops with a condition there are."""
    return [
        (scalars, [*SCALARS, (np.zeros(0), np.array(1.0))]),
        (vectors, list(vector_values())),
        (newton, [(np.array(x), n) for x in (2.0, 1e6, 1.0) for n in (1, 4, 500)]),
    ]


@pytest.mark.parametrize("graph, data", cases(), ids=lambda value: getattr(value, "__name__", ""))
def test_kernels(graph, data):
    with emulated() as (mode, ran):
        function, plain = both(*graph(), mode)
        check_calls(function, plain, data)
        assert any(op.signature.has_stop for op in ran)


def test_rows_that_no_step_wrote():
    x = pt.dvector("x")
    h = scanlib.scan(
        lambda x, h: (h + x, scanlib.until(h > 1)), x, pt.zeros(()), return_updates=False
    )
    with emulated() as (mode, ran):
        function = pytensor.function([x], h[-1], mode=mode)
        assert function(np.ones(9)) == 3.0
        with pytest.raises(IndexError, match="fewer than 1 step"):
            function(np.zeros(0))
        assert ran[0].signature.has_stop


@pytest.mark.usefixtures("torch_on_device")
class TestPyTorch:
    @pytest.mark.parametrize(
        "graph, data", cases(), ids=lambda value: getattr(value, "__name__", "")
    )
    def test_loops(self, graph, data):
        from tests.cuda_device import launches

        function, plain = both(*graph(), "PYTORCH")
        for values in data:
            before = launches()
            check_calls(function, plain, [values])
            assert launches() > before

    def test_a_row_that_no_step_wrote(self):
        function = pytensor.function(*far_back(), mode="PYTORCH")
        assert np.asarray(function(1.0, 9)) == 3.0
        with pytest.raises(IndexError, match="fewer than 3 step"):
            function(5.0, 9)

    def test_more_rows_than_a_device_should_hold(self, monkeypatch):
        """The buffers would be as long as the loop may get: then tensors grow step by step."""
        from scanlib.backends.torch import loops
        from tests.cuda_device import launches

        monkeypatch.setattr(loops, "MOST_BYTES", 1000)
        function, plain = both(*newton(), "PYTORCH")
        before = launches()
        check_calls(function, plain, [(np.array(2.0), 500)])
        assert launches() == before
        check_calls(function, plain, [(np.array(2.0), 50)])
        assert launches() == before + 1


class TestJAX:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "graph, data", cases(), ids=lambda value: getattr(value, "__name__", "")
    )
    def test_loops(self, jax_on_device, graph, data):
        from tests.cuda_device import launches

        function, plain = both(*graph(), "JAX")
        loops = [n.op for n in function.maker.fgraph.apply_nodes if isinstance(n.op, ElemwiseScan)]
        assert any(op.signature.has_stop for op in loops)
        for values in data[:-1] if graph is scalars else data:
            before = launches()
            check_calls(function, plain, [values])
            assert launches() > before

    def test_the_program(self):
        pytest.importorskip("jax", reason="jax is not installed")
        from scanlib.backends.jax import cuda
        from tests.backends.cuda.test_cuda_jax import lowered

        inputs, outputs = vectors()
        function = pytensor.function(inputs, outputs[1:2], mode="JAX")
        values = next(vector_values())
        assert lowered(function, *values, platform="cuda").count(f"@{cuda.TARGET}") == 1
        assert cuda.TARGET not in lowered(function, *values, platform="cpu")

    def test_a_row_that_no_step_wrote(self, jax_on_device):
        """Compiled code cannot raise an IndexError: the row is NaN."""
        function = pytensor.function(*far_back(), mode="JAX")
        assert np.asarray(function(1.0, 9)) == 3.0
        assert np.isnan(np.asarray(function(5.0, 9)))


@pytest.mark.parametrize("mode", ["JAX", "PYTORCH"])
def test_explain(mode):
    pytest.importorskip({"JAX": "jax", "PYTORCH": "torch"}[mode])
    function = pytensor.function(*newton(), mode=mode)
    (loop,) = scanlib.explain(function).loops
    assert "as kernels on CUDA devices" in loop.runs
    if mode == "JAX":
        assert "by lax.while_loop" in loop.runs
