"""Loops on CUDA devices under JAX: the lowered program, and the custom call on the emulated device.

XLA's CPU client calls the same handler, with the emulated driver and no stream.
"""

import contextlib
from types import SimpleNamespace

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from tests.backends.cuda.test_cuda_kernels import channels, values_of_channels
from tests.families import both
from tests.modes import MODES
from tests.ops.test_linear_scan import make_values

jax = pytest.importorskip("jax", reason="jax is not installed")
if not pytensor.config.cxx:
    pytest.skip("no C++ compiler", allow_module_level=True)

from scanlib.backends.jax import compiled_loops, cuda  # noqa: E402
from scanlib.backends.jax.platforms import on_platforms  # noqa: E402
from tests.cuda_device import (  # noqa: E402
    check_long_series,
    compile_for_host,
    emulated_driver,
    launches,
)
from tests.linear import Recurrence  # noqa: E402


def lowered(function, *values, platform):
    """Return the text of a compiled function's program for a platform."""
    traced = jax.jit(function.vm.jit_fn).trace(*values)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def affine(dtype="float64"):
    a, b, h0 = (pt.tensor(name, dtype=dtype, shape=(None,) * n) for name, n in
                (("a", 2), ("b", 2), ("h0", 1)))  # fmt: skip
    h = scanlib.scan(lambda a, b, h: a * h + b, [a, b], h0, return_updates=False)
    return [a, b, h0], h


VALUES = np.full((9, 3), 0.5), np.ones((9, 3)), np.zeros(3)


class TestProgram:
    def test_the_program_for_cuda_calls_the_kernels(self):
        function = pytensor.function(*affine(), mode="JAX")
        text = lowered(function, *VALUES, platform="cuda")
        assert text.count(f"@{cuda.TARGET}") == 1
        assert "while" not in text
        assert cuda.TARGET not in lowered(function, *VALUES, platform="cpu")
        other = lowered(function, *VALUES, platform="tpu")
        assert cuda.TARGET not in other
        assert "while" in other

    def test_gradients_call_them_as_well(self):
        inputs, outputs = channels()
        function = pytensor.function(inputs, outputs, mode="JAX")
        values = np.ones((4, 2, 3)), np.ones((4, 2)), np.array(1.0), np.ones(3)
        assert lowered(function, *values, platform="cuda").count(f"@{cuda.TARGET}") >= 2

    def test_half_precision(self):
        function = pytensor.function(*affine("float16"), mode="JAX")
        values = [value.astype("float16") for value in VALUES]
        assert cuda.TARGET in lowered(function, *values, platform="cuda")

    def test_the_flag(self):
        with pytensor.config.change_flags(scanlib__cuda=False):
            function = pytensor.function(*affine(), mode="JAX")
            text = lowered(function, *VALUES, platform="cuda")
        assert cuda.TARGET not in text


def linear(op, size=3, steps=20):
    """A matrix recurrence in both directions, and values for it."""
    values = [value for value in make_values(op, steps, size, batch=(2,)) if value is not None]
    inputs = [pt.tensor(dtype=v.dtype, shape=(None,) * v.ndim) for v in values]
    given = [*([pt.constant(steps)] if op.has_n_steps else []), *inputs]
    return inputs, [op(*given), op.reversed()(*given)], values


class TestProgramOfMatrixRecurrences:
    @pytest.mark.slow
    def test_forms(self):
        for op in (Recurrence("real", "steps"), Recurrence("log", "fixed", untraced=True)):
            inputs, outputs, values = linear(op)
            function = pytensor.function(inputs, outputs, mode="JAX")
            count = sum(isinstance(n.op, LinearScan) for n in function.maker.fgraph.apply_nodes)
            assert count >= 2
            text = lowered(function, *values, platform="cuda")
            assert text.count(f"@{cuda.TARGET}") == count
            assert cuda.TARGET not in lowered(function, *values, platform="cpu")

    @pytest.mark.parametrize("dtype", ["float16", "complex64"])
    def test_dtypes_without_compiled_code(self, dtype):
        op = Recurrence("real", "steps")
        values = make_values(op, 5, 3, dtype=dtype)
        inputs = [pt.tensor(dtype=dtype, shape=(None,) * v.ndim) for v in values]
        function = pytensor.function(inputs, op(*inputs), mode="JAX")
        assert cuda.TARGET in lowered(function, *values, platform="cuda")

    def test_large_matrices_have_no_kernel(self):
        op = Recurrence("real", "steps")
        inputs, (history, *_), _ = linear(op)
        function = pytensor.function(inputs, history, mode="JAX")
        for size, wanted in ((64, True), (65, False)):
            *_, values = linear(op, size, 2)
            text = lowered(function, *values, platform="cuda")
            assert (cuda.TARGET in text) == wanted
            assert ("while" in text) != wanted

    def test_the_flag(self):
        inputs, outputs, values = linear(Recurrence("real", "fixed"))
        with pytensor.config.change_flags(scanlib__cuda=False):
            function = pytensor.function(inputs, outputs, mode="JAX")
            assert cuda.TARGET not in lowered(function, *values, platform="cuda")


@contextlib.contextmanager
def arrays_on_device(monkeypatch):
    """XLA's CPU client runs what is meant for CUDA."""
    target = f"{cuda.TARGET}_emulated"
    cuda.register(emulated_driver().path, "cpu", target)
    monkeypatch.setattr(cuda, "TARGET", target)
    device = SimpleNamespace(compute_capability="9.0", core_count=2)
    monkeypatch.setattr(cuda, "cuda_devices", lambda: (device,))
    monkeypatch.setattr(cuda, "compile_kernels", compile_for_host())

    def as_on_cuda(portable, results=None, on_cpu=None, on_cuda=None, factors=None):
        return on_platforms(portable, results, on_cuda, factors=factors)

    monkeypatch.setattr(compiled_loops, "on_platforms", as_on_cuda)
    yield


def test_loops_and_gradients(jax_on_device):
    inputs, outputs = channels()
    function, plain = both(inputs, outputs, "JAX")
    loops = [n for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]
    assert len(loops) >= 2
    for steps, rows, columns in [(1, 1, 1), (40, 2, 3), (600, 1, 5)]:
        values = values_of_channels(steps, rows, columns)
        before = launches()
        actual = [np.asarray(result) for result in function(*values)]  # waits for them
        assert launches() >= before + len(loops)
        for mine, expected in zip(actual, plain(*values), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_long_series(jax_on_device, monkeypatch):
    """In one pass or in several, twice: the same bits at every run."""
    check_long_series("JAX", monkeypatch)


@pytest.mark.parametrize(
    "op",
    [
        Recurrence("real", "steps", "right", reverse=True),
        Recurrence("real", "fixed", vector=False),
        Recurrence("max", "steps", untraced=True),
        Recurrence("real", "fixed", has_offset=False, has_n_steps=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [3, 10])
def test_matrix_recurrences(jax_on_device, op, size):
    steps = 700 if op.coefficient == "steps" else 20
    inputs, outputs, values = linear(op, size, steps)
    function = pytensor.function(inputs, outputs, mode="JAX")
    count = sum(isinstance(n.op, LinearScan) for n in function.maker.fgraph.apply_nodes)
    with pytensor.config.change_flags(scanlib__perform="python"):
        plain = pytensor.function(inputs, outputs, mode=MODES["py"])
        expected = plain(*values)
    before = launches()
    found = [np.asarray(result) for result in function(*values)]
    assert launches() >= before + count
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-9, atol=1e-10)


def test_a_matrix_recurrence_of_wrong_lengths(jax_on_device):
    op = Recurrence("real", "steps")
    matrix, offset, initial = make_values(op, 5, 3)
    inputs = [pt.tensor(dtype="float64", shape=(None,) * n) for n in (3, 2, 2)]
    function = pytensor.function(inputs, op(*inputs), mode="JAX")
    with pytest.raises(
        SequenceLengthError,
        match="`offset` gives 5 rows, but another",
    ):
        function(matrix[:4], offset, initial)


def test_a_number_of_steps(jax_on_device):
    x, n = pt.dvector("x"), pt.iscalar("n")
    y = scanlib.scan(lambda y: 0.5 * y + 1, None, x, n_steps=n, return_updates=False)
    function = pytensor.function([x, n], y, mode="JAX")
    before = launches()
    result = np.asarray(function(np.zeros(2), 3))
    np.testing.assert_allclose(result, [[1, 1], [1.5, 1.5], [1.75, 1.75]])
    assert launches() == before + 1


def test_an_error_of_the_driver_is_an_error_of_the_call(jax_on_device, monkeypatch):
    monkeypatch.setattr(cuda, "compile_kernels", lambda source, architecture: b"/no/such/file")
    inputs, h = affine("float32")
    function = pytensor.function(inputs, h * 2, mode="JAX")
    values = [value.astype("float32") for value in VALUES]
    with pytest.raises(Exception, match="scanlib: a loop was not loaded, status 200"):
        np.asarray(function(*values))


def test_devices_of_two_architectures(jax_on_device, monkeypatch):
    """The handler has code for both; a device loads what is its own."""
    devices = [SimpleNamespace(compute_capability=c, core_count=2) for c in ("8.0", "9.0")]
    monkeypatch.setattr(cuda, "cuda_devices", lambda: devices)
    own, asked = compile_for_host(), []

    def compile_kernels(source, architecture):
        asked.append(architecture)
        return own(source, architecture) if architecture == "sm_90" else b"/no/such/file"

    monkeypatch.setattr(cuda, "compile_kernels", compile_kernels)
    y0 = pt.dvector("y0")
    y = scanlib.scan(lambda y: 0.5 * y + 3, None, y0, n_steps=3, return_updates=False)
    function = pytensor.function([y0], y, mode="JAX")
    before = launches()
    np.testing.assert_allclose(np.asarray(function(np.zeros(1))), [[3], [4.5], [5.25]])
    assert launches() == before + 1
    assert {*asked} == {"sm_80", "sm_90"}


def test_vmap(jax_on_device):
    function = pytensor.function(*affine(), mode="JAX").vm.jit_fn
    a, b, _ = VALUES
    batched = jax.vmap(function, in_axes=(None, None, 0))(a, b, np.arange(6.0).reshape(2, 3))
    result = np.asarray(jax.tree.leaves(batched)[0])
    assert result.shape == (2, 9, 3)
    expected = 2 + (np.arange(6.0).reshape(2, 1, 3) - 2) * 0.5 ** np.arange(1, 10)[:, None]
    np.testing.assert_allclose(result, expected)
