"""The GPU benchmark: what it says without a device, and all of it on the emulated one."""

import numpy as np
import pytensor
import pytest

from benchmarks import gpu, gpu_linear, gpu_results
from benchmarks.gpu_device import Device
from scanlib.backends.cuda import launch as launching
from scanlib.backends.cuda.nvidia import DriverError
from tests.cuda_device import compile_for_host, emulated_driver

needs_compiler = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")


def test_without_a_device(monkeypatch, capsys):
    def refuse():
        raise OSError("libcuda.so.1: there is no such file")

    monkeypatch.setattr(gpu, "Driver", refuse)
    assert gpu.main([]) == 0
    printed = capsys.readouterr().out
    assert "No CUDA device can be used here: libcuda.so.1: there is no such file" in printed
    assert "Nothing was checked or timed" in printed


@pytest.fixture
def device(monkeypatch):
    monkeypatch.setattr(launching, "compile_kernels", compile_for_host())
    return Device(emulated_driver())


@pytest.mark.slow
@needs_compiler
def test_checks_and_times(device, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_device", lambda: device)
    monkeypatch.setattr(gpu, "SHAPES", [(0, 3), (37, 3), (600, 200)])
    monkeypatch.setattr(gpu, "TIMED", [("affine", 500_000, 12, "float32"),
                                       ("affine", 400_000, 1, "float32"),
                                       ("tanh", 50, 7, "float32")])  # fmt: skip
    monkeypatch.setattr(gpu, "LONG", [(70_000, 1)])
    loops = ["affine", "tanh", "until"]
    assert gpu.main(["--loops", *loops, "--no-peers"]) == 0
    printed = capsys.readouterr().out
    assert "an emulator, 2 multiprocessors, sm_90" in printed
    assert "28 checks, all passed." in printed
    assert "| affine | float32 | 400,000 x 1 | look-back |" in printed
    assert "| tanh | float32 | 50 x 7 |" in printed
    # The emulator has 16 MiB: three arrays of 500,000 rows would not fit.
    (steps,) = [line.split("|")[3] for line in printed.splitlines() if "x 12 |" in line]
    assert int(steps.split("x")[0].replace(",", "")) < 100_000


@pytest.mark.slow
@needs_compiler
def test_matrix_recurrences(device, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_device", lambda: device)
    monkeypatch.setattr(gpu_linear, "SHAPES", [(0, 2, 3), (5, 3, 8), (777, 1, 2), (40, 2, 17)])
    monkeypatch.setattr(gpu_linear, "TIMED", [("matrix", 500_000, 12, 3, "float32"),
                                              ("log-matrix", 30, 1, 4, "float64")])  # fmt: skip
    forms = list(gpu_linear.FORMS)
    assert gpu.main(["--loops", *forms, "--no-peers"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(forms) * 4 * 3} checks, all passed." in printed
    assert "| log-matrix | float64 | 30 x 1 x 4 |" in printed
    (steps,) = [line.split("|")[3] for line in printed.splitlines() if " x 12 x 3 |" in line]
    assert 0 < int(steps.split("x")[0].replace(",", "")) < 100_000


@needs_compiler
def test_wrong_results_are_found(device, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "find_device", lambda: device)
    monkeypatch.setattr(gpu, "SHAPES", [(20, 3)])
    monkeypatch.setattr(gpu, "LONG", [])
    monkeypatch.setitem(gpu_results.TOLERANCE, "float32", 1e-12)
    arguments = ["--loops", "affine", "--no-peers", "--no-times"]
    assert gpu.main(arguments) == 1
    printed = capsys.readouterr().out
    assert "WRONG: affine float32 (20, 3)" in printed
    assert "SOME FAILED" in printed


@needs_compiler
def test_runs_that_differ_are_found(device, monkeypatch):
    count = 0

    def launch(driver, handles, call, addresses, stream):
        nonlocal count
        count += 1
        device.driver.call("cuMemsetD8_v2", *_bytes(addresses[3], count, 8))

    monkeypatch.setattr("benchmarks.gpu_device.launch", launch)
    monkeypatch.setattr(gpu, "LONG", [])
    with pytest.raises(AssertionError, match="two runs of a kernel differ"):
        list(gpu.check(device, ["affine"], [(2, 3)]))


def _bytes(place, value, size):
    import ctypes

    return ctypes.c_uint64(place), ctypes.c_ubyte(value), ctypes.c_size_t(size)


def test_errors_of_the_driver_have_its_words():
    if not pytensor.config.cxx:
        pytest.skip("no C++ compiler")
    with pytest.raises(DriverError, match="an error of the emulated driver"):
        emulated_driver().call("cuLaunchKernel", None, 0, 0, 0, 0, 0, 0, 0, None, None, None)


def test_errors_are_relative_to_the_largest_value():
    one = np.array([1.0, 99.0])
    error_of = gpu_results.error_of
    assert error_of(np.array([1.0, 100.0]), one) == pytest.approx(0.01)
    assert error_of(np.array([1.0, np.nan]), one) == np.inf
    assert error_of(one[:1], one) == np.inf
