"""Loops on CUDA tensors under PyTorch, on the emulated device: the tensors are the CPU's."""

import contextlib
import ctypes
import warnings
from types import SimpleNamespace

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from tests.families import both
from tests.modes import MODES
from tests.ops.test_linear_scan import make_values

torch = pytest.importorskip("torch", reason="torch is not installed")
if not pytensor.config.cxx:
    pytest.skip("no C++ compiler", allow_module_level=True)

from scanlib.backends import torch as _  # noqa: E402, F401
from scanlib.backends.cuda import launch as launching  # noqa: E402
from scanlib.backends.cuda.linear import kernels_of  # noqa: E402
from scanlib.backends.cuda.nvidia import NoCompilerError  # noqa: E402
from scanlib.backends.torch import loops  # noqa: E402
from tests.backends.cuda.test_cuda_kernels import channels, values_of_channels  # noqa: E402
from tests.cuda_device import (  # noqa: E402
    check_long_series,
    compile_for_host,
    emulated_driver,
    launches,
)
from tests.linear import Recurrence  # noqa: E402


@contextlib.contextmanager
def tensors_on_device(monkeypatch):
    """CPU tensors count as CUDA tensors; `torch.compile`, which takes seconds, is left out."""
    stance = torch.compiler.set_stance("force_eager")
    monkeypatch.setattr(loops, "is_on_cpu", lambda tensors: False)
    monkeypatch.setattr(loops, "is_cuda", lambda device: True)
    monkeypatch.setattr(loops, "find_driver", emulated_driver)
    properties, stream = SimpleNamespace(multi_processor_count=2), SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launching, "compile_kernels", compile_for_host())
    with stance, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*not writable")
        yield


def test_loops_and_gradients(torch_on_device):
    inputs, outputs = channels()
    function, plain = both(inputs, outputs, "PYTORCH")
    ops = [node.op for node in function.maker.fgraph.toposort()]
    count = sum(isinstance(op, ElemwiseScan) for op in ops)
    assert count >= 2
    for steps, rows, columns in [(1, 1, 1), (40, 2, 3), (600, 1, 5)]:
        values = values_of_channels(steps, rows, columns)
        before = launches()
        actual = function(*values)
        assert launches() >= before + count
        for mine, expected in zip(actual, plain(*values), strict=True):
            np.testing.assert_allclose(np.asarray(mine), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.slow
def test_long_series(torch_on_device, monkeypatch):
    """In one pass or in several, twice: the same bits at every run."""
    check_long_series("PYTORCH", monkeypatch)


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "op",
    [
        Recurrence("real", "steps", "right", reverse=True),
        Recurrence("real", "fixed", vector=False, untraced=True),
        Recurrence("log", "steps"),
        Recurrence("real", "fixed", has_offset=False, has_n_steps=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [3, 10])
def test_matrix_recurrences(torch_on_device, op, size):
    steps = 700 if op.coefficient == "steps" else 20
    values = [value for value in make_values(op, steps, size, batch=(2,)) if value is not None]
    inputs = [pt.tensor(dtype=v.dtype, shape=(None,) * v.ndim) for v in values]
    given = [*([pt.constant(steps)] if op.has_n_steps else []), *inputs]
    outputs = [op(*given), op.reversed()(*given)]
    function = pytensor.function(inputs, outputs, mode="PYTORCH")
    count = sum(isinstance(n.op, LinearScan) for n in function.maker.fgraph.apply_nodes)
    with pytensor.config.change_flags(scanlib__perform="python"):
        expected = pytensor.function(inputs, outputs, mode=MODES["py"])(*values)
    before = launches()
    found = [np.asarray(result) for result in function(*values)]
    assert launches() >= before + count >= before + 2
    for mine, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-9, atol=1e-10)


def test_matrix_recurrences_without_kernels(torch_on_device):
    """Large matrices run by functions of tensors; what does not fit raises what it always does."""
    op = Recurrence("real", "steps")
    inputs = [pt.tensor(dtype="float64", shape=(None,) * n) for n in (3, 2, 2)]
    function = pytensor.function(inputs, op(*inputs), mode="PYTORCH")
    before = launches()
    values = make_values(op, 3, 65)
    with pytensor.config.change_flags(scanlib__perform="python"):
        expected = pytensor.function(inputs, op(*inputs), mode=MODES["py"])(*values)
    np.testing.assert_allclose(np.asarray(function(*values)), expected, rtol=1e-10, atol=1e-12)
    assert launches() == before
    matrix, offset, initial = make_values(op, 5, 3)
    with pytest.raises(SequenceLengthError, match="another sequence of the loop has 4"):
        function(matrix[:4], offset, initial)


def affine(factor=1.0):
    a, b = pt.matrix("a"), pt.matrix("b")
    return [a, b], scanlib.scan(
        lambda a, b, h: a * h + factor * b, [a, b], pt.zeros(3), return_updates=False
    )


VALUES = np.full((9, 3), 0.5), np.ones((9, 3))
EXPECTED = 2 - 2.0 ** -np.arange(9)[:, None] * np.ones(3)


def test_wrong_lengths(torch_on_device):
    function = pytensor.function(*affine(), mode="PYTORCH")
    with pytest.raises(ValueError, match="Incompatible Elemwise input shapes"):
        function(VALUES[0], np.ones((9, 4)))


def test_the_flag(torch_on_device):
    before = launches()
    with pytensor.config.change_flags(scanlib__cuda=False):
        function = pytensor.function(*affine(), mode="PYTORCH")
        np.testing.assert_allclose(np.asarray(function(*VALUES)), EXPECTED)
    assert launches() == before
    function = pytensor.function(*affine(), mode="PYTORCH")
    np.testing.assert_allclose(np.asarray(function(*VALUES)), EXPECTED)
    assert launches() > before


def test_no_compiler(torch_on_device, monkeypatch):
    def refuse(source, architecture):
        raise NoCompilerError("there is none")

    monkeypatch.setattr(launching, "compile_kernels", refuse)
    # Not a loop that another test has compiled: torch keeps functions for longer than tests.
    function = pytensor.function(*affine(2.0), mode="PYTORCH")
    with pytest.warns(UserWarning, match="runs without its CUDA kernel: there is none"):
        result = function(*VALUES)
    np.testing.assert_allclose(np.asarray(result), 2 * EXPECTED)


def test_a_loop_without_a_kernel_is_written_once(torch_on_device, monkeypatch):
    """So many past values have no kernel, which is found out at the first call."""
    asked = []

    def kernels(op):
        asked.append(op)
        return kernels_of(op)

    monkeypatch.setattr(loops, "kernels_of", kernels)
    x, start = pt.dvectors("x", "start")
    h = scanlib.scan(
        lambda x, h: x + h / 2, [x], {"initial": start, "taps": [-9]}, return_updates=False
    )
    function = pytensor.function([x, start], h, mode="PYTORCH")
    given = np.arange(9.0)
    for values in [np.ones(9), np.zeros(9)]:
        np.testing.assert_array_equal(np.asarray(function(values, given)), values + given / 2)
    assert len(asked) == 1


def test_tensors_of_a_device_without_kernels():
    """A real CPU tensor that is not the kernel's business takes the portable way."""
    (inputs, output) = affine()
    function = pytensor.function(inputs, output, mode="CVM")
    (op,) = [n.op for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]
    tensors = [torch.tensor(value) for value in VALUES]
    assert loops.CudaRunner(op)(tensors) is None


def test_a_thread_that_has_not_used_the_device(torch_on_device):
    """It has no context; kernels are loaded and launched in that of the device."""
    strict = ctypes.c_int.in_dll(emulated_driver().library, "strict")
    function = pytensor.function(*affine(3.0), mode="PYTORCH")
    before = launches()
    strict.value = 1
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*without its CUDA kernel")
            result = function(*VALUES)
    finally:
        strict.value = 0
    np.testing.assert_allclose(np.asarray(result), 3 * EXPECTED)
    assert launches() > before


def test_tensors_of_other_dtypes_than_the_graph_says(torch_on_device):
    """Torch's roots of integers are float32, PyTensor's are float64; kernels read memory."""
    i = pt.lvector("i")
    x = pt.cumsum(pt.sqrt(i))
    h = scanlib.scan(lambda x, h: 0.5 * h + x, x, pt.constant(0.0), return_updates=False)
    function, plain = both([i], [h], "PYTORCH")
    before = launches()
    (actual,), (expected,) = (f(np.arange(9)) for f in (function, plain))
    assert np.asarray(actual).dtype == "float64"
    np.testing.assert_allclose(np.asarray(actual), expected, rtol=1e-6)
    assert launches() > before
