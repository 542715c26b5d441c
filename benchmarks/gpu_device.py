"""A CUDA device by its driver alone: memory, timing, and loops on NumPy arrays."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
from pytensor.compile.mode import Mode

from scanlib.backends.cuda.launch import Call, KernelLoop, launch
from scanlib.backends.cuda.nvidia import PROCESSORS, Driver
from scanlib.backends.cuda.parameters import contiguous
from scanlib.ops import execution
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan

POISON = 0xA5  # every byte of what a kernel will write


class Device:
    """The first device.

    Parameters
    ----------
    driver : Driver

    Raises
    ------
    DriverError
        If there is none.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        number, context = ctypes.c_int(), ctypes.c_void_p()
        driver.call("cuDeviceGet", ctypes.byref(number), 0)
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        driver.call("cuCtxSetCurrent", context)
        self.context = context.value or 0
        name = ctypes.create_string_buffer(256)
        driver.call("cuDeviceGetName", name, 256, number)
        self.name = name.value.decode()
        self.processors = driver.attribute(PROCESSORS)
        self.architecture = driver.architecture()

    def free_bytes(self) -> int:
        """Return how much memory is free."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.driver.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        return free.value

    @contextmanager
    def memory(self, sizes: Sequence[int]) -> Iterator[list[int]]:
        """Give memory of several sizes, in bytes, all of it poisoned; take it back at the end."""
        places: list[int] = []
        try:
            for size in sizes:
                place = ctypes.c_uint64()
                self.driver.call("cuMemAlloc_v2", ctypes.byref(place), ctypes.c_size_t(size or 1))
                places.append(place.value)
                self.poison(place.value, size)
            yield places
        finally:
            for address in places:
                self.driver.call("cuMemFree_v2", ctypes.c_uint64(address))

    def poison(self, place: int, size: int) -> None:
        self.driver.call(
            "cuMemsetD8_v2", ctypes.c_uint64(place), ctypes.c_ubyte(POISON), ctypes.c_size_t(size)
        )

    def write(self, place: int, array: np.ndarray) -> None:
        """Copy an array to the device."""
        if array.nbytes:
            source = np.ascontiguousarray(array)
            self.driver.call(
                "cuMemcpyHtoD_v2",
                ctypes.c_uint64(place),
                ctypes.c_void_p(source.ctypes.data),
                ctypes.c_size_t(source.nbytes),
            )

    def read(self, place: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Copy an array from the device."""
        array = np.empty(shape, dtype)
        if array.nbytes:
            self.driver.call(
                "cuMemcpyDtoH_v2",
                ctypes.c_void_p(array.ctypes.data),
                ctypes.c_uint64(place),
                ctypes.c_size_t(array.nbytes),
            )
        return array

    def copy(self, target: int, source: int, size: int) -> None:
        """Copy within the device."""
        self.driver.call(
            "cuMemcpyDtoDAsync_v2",
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size),
            None,
        )

    def seconds(self, run: Any, repeat: int = 7) -> float:
        """Return the median time of what `run` puts on the stream."""
        events = []
        for _ in range(2):
            event = ctypes.c_void_p()
            self.driver.call("cuEventCreate", ctypes.byref(event), 0)
            events.append(event)
        run()
        times = []
        for _ in range(repeat):
            self.driver.call("cuEventRecord", events[0], None)
            run()
            self.driver.call("cuEventRecord", events[1], None)
            self.driver.call("cuEventSynchronize", events[1])
            elapsed = ctypes.c_float()
            self.driver.call("cuEventElapsedTime", ctypes.byref(elapsed), *events)
            times.append(elapsed.value / 1e3)
        for event in events:
            self.driver.call("cuEventDestroy_v2", event)
        return float(np.median(times))

    def copy_bandwidth(self, size: int) -> float:
        """Return how many bytes per second are read and written by a copy of `size` bytes."""
        with self.memory([size, size]) as (target, source):
            return 2 * size / self.seconds(lambda: self.copy(target, source, size))


@dataclass
class Prepared:
    """A loop with arguments on the device, ready to run.

    Attributes
    ----------
    call : Call
    results : list of int
        Where the arrays are that the kernels write.
    """

    device: Device
    call: Call
    addresses: list[int]
    results: list[int]

    def run(self) -> None:
        """Launch the kernels."""
        handles = self.call.kernels.handles(self.device.driver, self.device.context)
        launch(self.device.driver, handles, self.call, self.addresses, 0)

    def read(self) -> list[np.ndarray]:
        """Return what the kernels have written."""
        outputs = self.call.kernels.parameters.outputs
        return [
            self.device.read(place, shape, output.dtype)
            for place, shape, output in zip(self.results, self.call.shapes, outputs, strict=True)
        ]

    def poison(self) -> None:
        outputs = self.call.kernels.parameters.outputs
        for place, shape, output in zip(self.results, self.call.shapes, outputs, strict=True):
            self.device.poison(place, int(np.prod(shape)) * np.dtype(output.dtype).itemsize)


@contextmanager
def prepared(
    device: Device, kernels: Any, shapes: Sequence[tuple[int, ...]], sizes: Any = None
) -> Iterator[tuple[Prepared, list[int]]]:
    """Give a loop whose arguments have these shapes, and where the arguments are.

    Parameters
    ----------
    device : Device
    kernels : KernelLoop or LinearKernels
    shapes : sequence of tuple of int
        Of the arguments, without the number of steps.
    sizes : Geometry or LinearGeometry, optional
        If the kernels are not to be asked for them.
    """
    sizes = kernels.sizes(shapes) if sizes is None else sizes
    arrays = [*kernels.parameters.inputs, *kernels.parameters.outputs]
    items = [np.dtype(array.dtype).itemsize for array in arrays]
    strides = [contiguous(shape, item) for shape, item in zip(shapes, items, strict=False)]
    call = kernels.call(sizes, strides, device.processors)
    every = [*shapes, *call.shapes]
    needed = [int(np.prod(shape)) * item for shape, item in zip(every, items, strict=True)]
    with device.memory([*needed, *call.works]) as places:
        results = places[len(shapes) : len(every)]
        loop = Prepared(device, call, places, results)
        yield loop, places[: len(shapes)]


def run_twice(
    device: Device, kernels: Any, arrays: Sequence[np.ndarray], sizes: Any
) -> list[np.ndarray]:
    """Return the results of a loop on contiguous arrays.

    Raises
    ------
    AssertionError
        If a second run does not give the same, bit by bit.
    """
    with prepared(device, kernels, [a.shape for a in arrays], sizes) as (loop, given):
        for place, array in zip(given, arrays, strict=True):
            device.write(place, array)
        loop.run()
        results = loop.read()
        loop.poison()
        loop.run()
        for first, second in zip(results, loop.read(), strict=True):
            if first.tobytes() != second.tobytes():
                raise AssertionError("two runs of a kernel differ")
    return results


def fill(device: Device, place: int, count: int, dtype: str, rng: np.random.Generator) -> None:
    """Write random numbers, a few million of them again and again."""
    some = rng.uniform(-0.95, 0.95, min(count, 1 << 22)).astype(dtype)
    for first in range(0, count, len(some)):
        part = some[: count - first]
        device.write(place + first * some.itemsize, part)


class DeviceLoop:
    """Runs a loop on NumPy arrays, twice: results must be the same, bit by bit."""

    def __init__(self, device: Device, op: ElemwiseScan) -> None:
        self.device, self.op = device, op
        self.kernels = KernelLoop(op)

    def __call__(self, *inputs: Any) -> list[np.ndarray]:
        has_steps = self.op.signature.has_n_steps
        arrays = [np.ascontiguousarray(value) for value in inputs[int(has_steps) :]]
        arrays = [a.reshape(np.shape(v)) for a, v in zip(arrays, inputs[has_steps:], strict=True)]
        steps = int(inputs[0]) if has_steps else None
        sizes = self.kernels.sizes([a.shape for a in arrays], steps)
        made = run_twice(self.device, self.kernels, arrays, sizes)
        results = self.kernels.results(arrays, made, sizes, lambda x, dtype: x.astype(dtype))
        return self.kernels.checked(results, sizes.steps)


@contextmanager
def on_device(device: Device) -> Iterator[tuple[Mode, list[ElemwiseScan]]]:
    """Run elementwise loops on the device; give a mode, and the loops that ran."""
    ran: list[ElemwiseScan] = []

    usual = execution.runner_for

    def runner(op: Any, node: Any) -> Any:
        if not isinstance(op, ElemwiseScan):
            return usual(op, node)
        ran.append(op)
        return DeviceLoop(device, op)

    execution.runner_for = runner
    try:
        yield Mode(linker="py", optimizer="fast_run"), ran
    finally:
        execution.runner_for = usual


def kernels_of(inputs: list[Any], output: Any) -> KernelLoop:
    """Return the kernels of the one elementwise loop of a graph."""
    function = pytensor.function(inputs, output, mode="CVM", on_unused_input="ignore")
    nodes = function.maker.fgraph.apply_nodes
    (op,) = [node.op for node in nodes if isinstance(node.op, ElemwiseScan)]
    return KernelLoop(op)
