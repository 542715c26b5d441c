"""Elementwise loops and matrix recurrences on CUDA tensors: kernels on torch's own memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from pytensor.configdefaults import config

from scanlib.backends.cuda.compiler import KernelCompileError, NoCompilerError
from scanlib.backends.cuda.driver import Driver, DriverError, find_driver
from scanlib.backends.cuda.geometry import Geometry, geometry, raise_wrong_index, written_rows
from scanlib.backends.cuda.launch import KernelLoop, launch
from scanlib.backends.cuda.linear import linear_geometry, linear_kernels
from scanlib.backends.torch.operator import Run
from scanlib.backends.torch.portable import torch_dtype
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.messages import Messages
from scanlib.ops.python_loop import count_steps

ALIGNED = 256  # bytes
MOST_BYTES = 1 << 30  # of the rows that a loop may write until its condition holds


class Device:
    """What is asked of torch about a CUDA device."""

    def is_cuda(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def driver(self) -> Driver | None:
        return find_driver()

    def processors(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def stream(self, device: torch.device) -> int:
        return torch.cuda.current_stream(device).cuda_stream

    def current(self, device: torch.device) -> torch.cuda.device:
        return torch.cuda.device(device)


DEVICE = Device()


class CudaRunner:
    """Runs an Op by its kernels.

    Parameters
    ----------
    op : ElemwiseScan or LinearScan
    """

    def __init__(self, op: ElemwiseScan | LinearScan) -> None:
        self.op = op
        self.works = True

    def plan(self, inputs: Sequence[torch.Tensor]) -> Plan | None:
        """Return the kernels for these arguments and their sizes, None if there are none."""
        if isinstance(self.op, LinearScan):
            return plan_linear(self.op, inputs)
        return None if self.loop is None else plan_loop(self.op, self.loop, inputs)

    @cached_property
    def loop(self) -> KernelLoop | None:
        """The kernels of an elementwise loop, None if it has none."""
        assert isinstance(self.op, ElemwiseScan)
        try:
            return KernelLoop(self.op)
        except NoCCodeError:
            return None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the results; None where the Op has no kernel, or it cannot be compiled."""
        device = inputs[0].device
        if not self.works or not DEVICE.is_cuda(device):
            return None
        driver = DEVICE.driver()
        plan = None if driver is None else self.plan(inputs)
        if driver is None or plan is None:
            return None
        plan = plan._replace(kernels=plan.kernels.of(plan.sizes, DEVICE.processors(device)))
        try:
            context = driver.primary_context(device.index or 0)
            handles = plan.kernels.handles(driver, context)
        except (NoCompilerError, KernelCompileError, DriverError) as error:
            self.works = False
            warnings.warn(f"{self.op} runs without its CUDA kernel: {error}", stacklevel=2)
            return None
        with DEVICE.current(device), driver.current(context):
            results = run_plan(plan, driver, handles, DEVICE.stream(device))
        if isinstance(self.op, LinearScan):
            return results
        count = len(self.op.scan.body.outputs) - self.op.signature.has_stop
        raise_wrong_index(self.op, [value.cpu() for value in results[count:]])
        if self.op.signature.has_stop:
            return cut_rows(self.op, plan.sizes.steps, results[: count + 1])
        return results[:count]


def cut_rows(op: ElemwiseScan, steps: int, results: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the rows that a loop with a condition has written; their number comes last."""
    *found, number = results
    taken = int(number)  # waits for the device
    if taken < op.signature.required_steps:
        raise IndexError(Messages(op.signature, op.scan.labels, op.scan.name).missing_steps())
    if taken == steps:
        return found
    rows = written_rows(op.signature, steps, taken)
    return [result[own].clone() for result, own in zip(found, rows, strict=True)]


class Plan(NamedTuple):
    """Kernels, the sizes of a call, and its arguments without the number of steps."""

    kernels: Any  # KernelLoop or LinearKernels
    sizes: Any  # Geometry or LinearGeometry
    arrays: list[torch.Tensor]


def plan_loop(op: ElemwiseScan, kernels: KernelLoop, inputs: Sequence[torch.Tensor]) -> Plan | None:
    """Return how an elementwise loop runs on these arguments, None if not by its kernels."""
    messages = Messages(op.signature, op.scan.labels, op.scan.name)
    outer = op.signature.split_inputs(inputs)
    steps = count_steps(messages, outer)
    arrays = _plain(inputs[int(outer.n_steps is not None) :])
    try:
        sizes = geometry(kernels.writer, [tuple(x.shape) for x in arrays], steps)
    except NoCCodeError:
        return None
    if op.signature.has_stop and not can_hold(kernels, sizes):
        return None
    return Plan(kernels, sizes, arrays)


def can_hold(kernels: KernelLoop, sizes: Geometry) -> bool:
    """Whether all steps that a condition allows may be stored, and a thread sees it hold."""
    items = [np.dtype(array.dtype).itemsize for array in kernels.parameters.outputs]
    pairs = zip(sizes.outputs, items, strict=True)
    return sizes.channels > 0 and sum(prod(shape) * item for shape, item in pairs) <= MOST_BYTES


def plan_linear(op: LinearScan, inputs: Sequence[torch.Tensor]) -> Plan | None:
    """Return how a matrix recurrence runs on these arguments, None if it has no kernel."""
    sizes = linear_geometry(op, inputs)
    dtype = str(op.parts(inputs).initial.dtype).removeprefix("torch.")
    try:
        kernels = linear_kernels(op, inputs, dtype)
    except NoCCodeError:
        return None
    return Plan(kernels, sizes, _plain(inputs[int(op.has_n_steps) :]))


def _plain(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.resolve_conj().resolve_neg() for tensor in tensors]


def run_plan(plan: Plan, driver: Driver, handles: list[int], stream: int) -> list[torch.Tensor]:
    """Launch kernels on a stream and return their results."""
    kernels, sizes, arrays = plan
    device = arrays[0].device
    outputs = [
        torch.empty(shape, dtype=torch_dtype(array.dtype), device=device)
        for shape, array in zip(sizes.outputs, kernels.parameters.outputs, strict=True)
    ]
    tensors = [*arrays, *outputs]
    strides = [tuple(s * x.element_size() for s in x.stride()) for x in tensors]
    call = kernels.call(sizes, strides, DEVICE.processors(device))
    places = [0]
    for size in call.works:
        places.append(places[-1] + -(-size // ALIGNED) * ALIGNED)
    work = torch.empty(places[-1], dtype=torch.uint8, device=device)
    addresses = [x.data_ptr() for x in tensors]
    addresses += [work.data_ptr() + place for place in places[:-1]]
    launch(driver, handles, call, addresses, stream)
    return outputs


def with_kernels(op: object, portable: Run) -> Run:
    """Return the function of tensors on a device: kernels on CUDA tensors, else `portable`."""
    if not isinstance(op, ElemwiseScan | LinearScan) or not config.scanlib__cuda:
        return portable
    if config.scanlib__perform != "auto":
        return portable
    kernels = CudaRunner(op)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = kernels(inputs)
        return portable(inputs) if results is None else results

    return run
