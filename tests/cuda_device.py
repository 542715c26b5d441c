"""A CUDA device made of CPU code, to run kernels where there is none.

A library with the driver's functions stands in for the driver: "machine code" is the path of a
shared library that the C++ compiler made of the kernels' own source, and a launch is a call. So all
but the machine is what runs on a GPU: the source, the numbers it is given, the launches.
"""

import ctypes
import os
import subprocess
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from unittest import mock

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.compile.mode import Mode

import scanlib
from scanlib.backends.cuda import launch as launching
from scanlib.backends.cuda.launch import KernelLoop, Kernels
from scanlib.backends.cuda.nvidia import Driver
from scanlib.backends.cuda.printer import LoopWriter
from scanlib.backends.cuda.schedule import SLOTS, Schedule, choose
from scanlib.ops import execution
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.families import both

HOST = Path(__file__).with_name("cuda_host.h")  # what stands in for a GPU
DRIVER = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <dlfcn.h>
#include <mutex>
static std::mutex running; /* one block after the other: what they share is one memory */
typedef void (*kernel)(long long, long long, const void *);
extern "C" {
int launches = 0, pushed = 0;
int strict = 0; /* whether a thread needs a context, as it does on a device */
int cuInit(unsigned) { return 0; }
int cuGetErrorString(int, const char **text) {
  *text = "an error of the emulated driver";
  return 0;
}
int cuStreamGetCtx(void *stream, void **context) {
  *context = (void *)16;
  return strict && !stream && !pushed ? 201 : 0;
}
int cuCtxPushCurrent_v2(void *) { pushed++; return 0; }
int cuCtxPopCurrent_v2(void **) { pushed--; return 0; }
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int which, int) {
  *value = which == 75 ? 9 : which == 16 ? 2 : 0; /* the architecture, multiprocessors */
  return 0;
}
int cuDeviceGet(int *device, int) { *device = 0; return 0; }
int cuDeviceGetName(char *name, int size, int) { snprintf(name, size, "an emulator"); return 0; }
int cuDevicePrimaryCtxRetain(void **context, int) { *context = (void *)16; return 0; }
int cuCtxSetCurrent(void *) { return 0; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = *total = 1 << 24; return 0; }
int cuMemAlloc_v2(void **place, size_t size) { *place = malloc(size); return *place ? 0 : 2; }
int cuMemFree_v2(void *place) { free(place); return 0; }
int cuMemsetD8_v2(void *place, unsigned char value, size_t n) { memset(place, value, n); return 0; }
int cuMemcpyHtoD_v2(void *to, const void *from, size_t size) { memcpy(to, from, size); return 0; }
int cuMemcpyDtoH_v2(void *to, const void *from, size_t size) { memcpy(to, from, size); return 0; }
int cuMemcpyDtoDAsync_v2(void *to, const void *from, size_t size, void *) {
  memcpy(to, from, size);
  return 0;
}
int cuEventCreate(void **event, unsigned) { *event = malloc(sizeof(timespec)); return 0; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuEventRecord(void *event, void *) { return clock_gettime(CLOCK_MONOTONIC, (timespec *)event); }
int cuEventSynchronize(void *) { return 0; }
int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
  const timespec *a = (const timespec *)start, *b = (const timespec *)end;
  *milliseconds = (b->tv_sec - a->tv_sec) * 1e3f + (b->tv_nsec - a->tv_nsec) * 1e-6f;
  return 0;
}
int cuModuleLoadData(void **module, const void *path) {
  *module = dlopen((const char *)path, RTLD_NOW | RTLD_LOCAL);
  return *module ? 0 : 200;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = dlsym(module, name);
  return *function ? 0 : 500;
}
int cuLaunchKernel(void *function, unsigned x, unsigned, unsigned, unsigned threads, unsigned,
                   unsigned, unsigned, void *, void **arguments, void **) {
  if (!x) return 1; /* as a device would */
  if (strict && !pushed) return 201;
  std::lock_guard<std::mutex> lock(running);
  launches++;
  ((kernel)function)(x, threads, arguments[0]);
  return 0;
}
}
"""


def host_library(source: str, *flags: str) -> Path:
    """Compile C++ to a shared library, once."""
    folder = Path(pytensor.config.base_compiledir) / "scanlib_cuda_emulated"
    flags = (f'-DSCANLIB_HOST="{HOST}"', *flags)
    name = sha256("\n".join([*flags, HOST.read_text(), source]).encode()).hexdigest()[:24]
    library = folder / f"{name}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        given, made = folder / f"{name}.{os.getpid()}.cpp", folder / f"{name}.{os.getpid()}.so"
        given.write_text(source)
        command = [pytensor.config.cxx, "-shared", "-fPIC", "-O1", "-std=c++17", "-w", "-fwrapv"]
        command += [*flags, str(given), "-o", str(made), "-ldl"]
        subprocess.run(command, check=True, capture_output=True)
        given.unlink()
        os.replace(made, library)
    return library


def compile_for_host(*flags: str):
    """Return what stands in for `compile_kernels`."""

    def compile_kernels(source: str, architecture: str) -> bytes:
        assert architecture == "sm_90"
        return str(host_library(source, *flags)).encode() + b"\0"

    return compile_kernels


def walked_again(kernels: Kernels) -> int:
    """Return how many stretches were walked by one thread since the last question."""
    count = ctypes.c_longlong.in_dll(
        ctypes.CDLL(str(host_library(kernels.source))), "scanlib_walked_again"
    )
    found, count.value = count.value, 0
    return found


def emulated_driver() -> Driver:
    return Driver(str(host_library(DRIVER)))


def launches() -> int:
    """Return how many kernels the emulated driver has launched."""
    return ctypes.c_int.in_dll(emulated_driver().library, "launches").value


def forced(kind: str, lanes: int = 4):
    """Return a `choose` that always takes one schedule, however short the loop."""

    def choose_kind(steps, channels, processors, composes, threads, items):
        if not composes or kind == "serial":
            return choose(steps, channels, processors, False, threads, items)
        if kind == "rows":
            return Schedule("rows", lanes, max(steps, 1), 1, threads, 0)
        own = min(lanes, threads // SLOTS)
        stretch = threads // own * items
        return Schedule(kind, own, stretch, max(1, -(-steps // stretch)), threads, 0)

    return choose_kind


def small_blocks():
    """Make blocks that share steps small: 64 threads, and two steps of each at a time."""

    def block(loop):
        return (256, 1) if loop.composed is None else (64, 2)

    return mock.patch.object(LoopWriter, "_block", block)


def names_of_launches(monkeypatch) -> list[str]:
    """Return a list to which the names of the kernels of all further calls are added."""
    names, usual = [], KernelLoop.call

    def call(loop, *arguments):
        planned = usual(loop, *arguments)
        names.extend(planned.kernels.names[one.kernel] for one in planned.launches)
        return planned

    monkeypatch.setattr(KernelLoop, "call", call)
    return names


def long_series():
    """A series of many steps and its gradients, and what computes them: 20 stretches of a block."""
    x, a, h0 = pt.dvector("x"), pt.dscalar("a"), pt.dscalar("h0")
    h = scanlib.scan(lambda x, h, a: a * h + x, x, h0, a, return_updates=False)
    outputs = [h, *pytensor.grad((h**2).sum(), [x, a, h0])]
    return [x, a, h0], outputs, [np.sin(np.arange(40_000.0)), np.array(0.97), np.array(2.0)]


def check_long_series(mode, monkeypatch):
    """Call a function of that twice; compare with a plain one, the bits of both calls too."""
    inputs, outputs, values = long_series()
    function, plain = both(inputs, outputs, mode)
    names = names_of_launches(monkeypatch)
    first, second = ([np.asarray(x) for x in function(*values)] for _ in range(2))
    assert "look_back_dense" in names
    for mine, again, expected in zip(first, second, plain(*values), strict=True):
        np.testing.assert_array_equal(mine, again)
        np.testing.assert_allclose(mine, expected, rtol=1e-9, atol=1e-9)


class EmulatedLoop:
    """Runs an elementwise loop by its CUDA kernels; results are poisoned before."""

    def __init__(self, op, driver: Driver, processors: int) -> None:
        self.op, self.driver, self.processors = op, driver, processors
        self.kernels = KernelLoop(op)

    def __call__(self, *inputs):
        has_steps = self.op.signature.has_n_steps
        steps = int(inputs[0]) if has_steps else None
        arrays = [np.asarray(value) for value in inputs[int(has_steps) :]]
        sizes = self.kernels.sizes([array.shape for array in arrays], steps)
        call = self.kernels.call(sizes, [array.strides for array in arrays], self.processors)
        made = run_call(self.driver, call, arrays)
        results = self.kernels.results(arrays, made, sizes, lambda x, dtype: x.astype(dtype))
        return self.kernels.checked(results, sizes.steps)


def run_call(driver, call, arrays):
    """Launch kernels; return what they write, which is poisoned before."""
    outputs = zip(call.shapes, call.kernels.parameters.outputs, strict=True)
    made = [poisoned(shape, array.dtype) for shape, array in outputs]
    works = [np.full(size, 0xA5, np.uint8) for size in call.works]
    addresses = [array.ctypes.data for array in [*arrays, *made, *works]]
    handles = call.kernels.handles(driver, driver.primary_context(0))
    launching.launch(driver, handles, call, addresses, 0)
    return made


def poisoned(shape, dtype):
    """Return an array that no result is like."""
    array = np.empty(shape, dtype)
    array.view(np.uint8).fill(0xA5) if array.size and array.ndim else array.fill(77)
    return array


@contextmanager
def emulated(choose=None, processors: int = 2, flags: tuple[str, ...] = ()):
    """Run elementwise loops on the emulated device; yield a mode, and the Ops that ran."""
    driver = emulated_driver()
    ran = []
    usual = execution.runner_for

    def runner(op, node):
        if not isinstance(op, ElemwiseScan):
            return usual(op, node)
        try:
            loop = EmulatedLoop(op, driver, processors)
        except NoCCodeError as error:
            raise AssertionError(f"{op} has no kernel: {error}") from error
        ran.append(op)
        return loop

    patches = [
        mock.patch.object(execution, "runner_for", runner),
        mock.patch.object(launching, "compile_kernels", compile_for_host(*flags)),
    ]
    if choose is not None:
        patches.append(mock.patch.object(launching, "choose", choose))
    for patch in patches:
        patch.start()
    try:
        # Fused arithmetic on shapes overflows in PyTensor's Python code.
        yield Mode(linker="py", optimizer="fast_run").excluding("fusion"), ran
    finally:
        for patch in patches:
            patch.stop()
        assert ctypes.c_int.in_dll(driver.library, "pushed").value == 0


def check_calls(function, plain, data):
    """Compare a function with a plain one, dtypes and shapes too; inputs must come back the same.

    The tolerance leaves room for sums in another order.
    """
    for values in data:
        before = [np.copy(value) for value in values]
        for actual, expected in zip(function(*values), plain(*values), strict=True):
            actual = np.asarray(actual)
            assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)
        for value, copy in zip(values, before, strict=True):
            np.testing.assert_array_equal(value, copy)
