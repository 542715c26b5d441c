"""Corners of the CUDA kernels, run on the CPU: nothing to do, and NaN that does not stay."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.cuda.launch import KernelLoop
from scanlib.backends.cuda.schedule import choose
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.cuda_device import check_calls, emulated, forced
from tests.families import both

pytestmark = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")

LONG = {
    "rows": forced("rows", lanes=1),
    "look-back": forced("look-back", lanes=1),
}


@pytest.fixture(params=list(LONG))
def device(request):
    with emulated(LONG[request.param]) as (mode, ran):
        yield mode
        assert ran, "no loop ran on the device"


def sums():
    """A loop with a sum over steps and channels, sums of rows, and their gradients."""
    x, w = pt.dtensor3("x"), pt.dscalar("w")

    def step(x, h, total, w):
        h = 0.5 * h + w * x
        return h, total + h.sum(), h.sum(axis=1)

    start = [pt.zeros(x.shape[1:]), pt.constant(3.0), None]
    h, total, rows = scanlib.scan(step, x, start, w, return_updates=False)
    cost = (h**2).sum() + total[-1]
    return [x, w], [h, total[-1], rows, *pytensor.grad(cost, [x, w])]


NOTHING = [(np.zeros(shape), np.array(2.0)) for shape in
           [(5, 3, 0), (5, 0, 3), (5, 0, 0), (100, 3, 0), (2000, 0, 1)]]  # fmt: skip


def test_sums_over_no_channels():
    """Such sums are zero."""
    with emulated() as (mode, ran):
        function, plain = both(*sums(), mode)
        check_calls(function, plain, NOTHING)
        assert ran


@pytest.mark.slow
@pytest.mark.usefixtures("torch_on_device")
def test_sums_over_no_channels_under_torch():
    function, plain = both(*sums(), "PYTORCH")
    check_calls(function, plain, NOTHING)


def test_sums_over_no_channels_under_jax(jax_on_device):
    function, plain = both(*sums(), "JAX")
    check_calls(function, plain, NOTHING)


@pytest.mark.all_forms
@pytest.mark.parametrize("steps", [0, 100, 10**6])
def test_no_channels_have_a_schedule(steps):
    assert choose(steps, 0, 132, True, 256, 16).kind == "serial"


def affine():
    a, h0 = pt.dmatrix("a"), pt.dvector("h0")
    return [a, h0], scanlib.scan(lambda a, h: a * h + 1, a, h0, return_updates=False)


OTHER_SIZES = np.zeros((0, 50)), np.ones(3)


def test_no_steps_of_other_sizes():
    """Without steps arrays need not fit, and no kernel may take the channels of one for all."""
    inputs, trace = affine()
    function = pytensor.function(inputs, trace, mode="CVM")
    (op,) = [n.op for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]
    with pytest.raises(NoCCodeError, match="of no steps"):
        KernelLoop(op).sizes([(0, 50), (1, 3)])


@pytest.mark.usefixtures("torch_on_device")
def test_no_steps_of_other_sizes_under_torch():
    inputs, trace = affine()
    function = pytensor.function(inputs, trace, mode="PYTORCH")
    assert np.shape(function(*OTHER_SIZES)) == (0, 3)


def test_no_steps_of_other_sizes_under_jax(jax_on_device):
    inputs, trace = affine()
    function = pytensor.function(inputs, trace, mode="JAX")
    with pytest.raises((TypeError, ValueError), match=r"(?i)incompatible shapes"):
        function(*OTHER_SIZES)


def test_what_is_read_for_its_size_alone_may_be_empty():
    x, y = pt.dvector("x"), pt.dmatrix("y")
    trace = scanlib.scan(
        lambda x, y, h: 0.5 * h + x * y.shape[0], [x, y], pt.zeros(()), return_updates=False
    )
    with emulated(LONG["rows"]) as (mode, _):
        function, plain = both([x, y], [trace], mode)
        check_calls(
            function, plain, [(np.ones(n), np.ones((n, k))) for n in (5, 99) for k in (0, 2)]
        )


STEPS = 9001


@pytest.mark.parametrize("reverse", [False, True])
def test_nan_that_a_step_forgets(device, reverse):
    """A step that takes another value than the state's ends a NaN, also one from long before."""
    rng = np.random.default_rng(0)
    taken = np.zeros(STEPS, bool)
    taken[[1000, 4500, 8000]] = True
    a, b = rng.uniform(-0.9, 0.9, STEPS), rng.normal(size=STEPS)
    b[[300, 3000, 6000, 8500]] = np.inf, np.nan, np.nan, np.inf
    inputs = [pt.vector("taken", dtype="bool"), pt.dvector("a"), pt.dvector("b"), pt.dscalar("h")]
    *rows, start = inputs
    trace = scanlib.scan(
        lambda taken, a, b, h: pt.switch(taken, b, a * h + b), rows, start,
        go_backwards=reverse, return_updates=False,
    )  # fmt: skip
    function, plain = both(inputs, [trace], device)
    check_calls(function, plain, [(taken, one, b, np.array(0.5)) for one in (a, np.ones(STEPS))])


@pytest.mark.parametrize("value", [complex(np.nan, 1), complex(1, np.nan), complex(np.nan, np.nan)])
def test_a_part_of_a_complex_number_that_is_nan(device, value):
    """Sums keep the other part, where a product would lose it."""
    x, start = pt.zvector("x"), pt.zscalar("start")
    trace = scanlib.scan(lambda x, h: h + x, x, start, return_updates=False)
    values = np.arange(STEPS) * (1 - 2j)
    values[700] = value
    actual = pytensor.function([x, start], trace, mode=device)(values, np.array(1j))
    expected = np.cumsum(values) + 1j
    np.testing.assert_allclose(actual.real, expected.real, rtol=1e-12)
    np.testing.assert_allclose(actual.imag, expected.imag, rtol=1e-12)
