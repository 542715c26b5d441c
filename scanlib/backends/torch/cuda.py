"""Elementwise loops on CUDA tensors: scanlib's kernels on torch's memory and stream."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property

import torch
from pytensor.configdefaults import config

from scanlib.backends.cuda.compiler import KernelCompileError, NoCompilerError
from scanlib.backends.cuda.driver import Driver, DriverError, find_driver
from scanlib.backends.cuda.geometry import geometry
from scanlib.backends.cuda.launch import KernelLoop, launch
from scanlib.backends.torch.operator import Run
from scanlib.backends.torch.portable import torch_dtype
from scanlib.ops.c_code import NoCCodeError
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.messages import Messages
from scanlib.ops.python_loop import count_steps

ALIGNED = 256  # bytes


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
    """Runs an elementwise loop by its kernels.

    Parameters
    ----------
    op : ElemwiseScan
    """

    def __init__(self, op: ElemwiseScan) -> None:
        self.op = op
        self.messages = Messages(op.signature, op.scan.labels, op.scan.name)
        self.works = True

    @cached_property
    def kernels(self) -> KernelLoop | None:
        """The kernels, None if the loop has none."""
        try:
            return KernelLoop(self.op)
        except NoCCodeError:
            return None

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the results; None where the loop has no kernel, or it cannot be compiled."""
        device = inputs[0].device
        if not self.works or not DEVICE.is_cuda(device):
            return None
        driver = DEVICE.driver()
        if driver is None or self.kernels is None:
            return None
        try:
            with DEVICE.current(device):
                stream = DEVICE.stream(device)
                handles = self.kernels.handles(driver, driver.context_of(stream))
        except (NoCompilerError, KernelCompileError, DriverError) as error:
            self.works = False
            warnings.warn(f"{self.op} runs without its CUDA kernel: {error}", stacklevel=2)
            return None
        return self._run(driver, handles, inputs, stream)

    def _run(
        self, driver: Driver, handles: list[int], inputs: Sequence[torch.Tensor], stream: int
    ) -> list[torch.Tensor]:
        assert self.kernels is not None
        device = inputs[0].device
        outer = self.op.signature.split_inputs(inputs)
        steps = count_steps(self.op.signature, self.messages, outer)
        given = inputs[int(outer.n_steps is not None) :]
        arrays = [tensor.resolve_conj().resolve_neg() for tensor in given]
        sizes = geometry(self.kernels.writer, [tuple(array.shape) for array in arrays], steps)
        outputs = [
            torch.empty(shape, dtype=torch_dtype(array.dtype), device=device)
            for shape, array in zip(sizes.outputs, self.kernels.parameters.outputs, strict=True)
        ]
        tensors = [*arrays, *outputs]
        strides = [tuple(s * x.element_size() for s in x.stride()) for x in tensors]
        call = self.kernels.call(sizes, strides, DEVICE.processors(device))
        places = [0]
        for size in call.works:
            places.append(places[-1] + -(-size // ALIGNED) * ALIGNED)
        work = torch.empty(places[-1], dtype=torch.uint8, device=device)
        addresses = [x.data_ptr() for x in tensors]
        addresses += [work.data_ptr() + place for place in places[:-1]]
        with DEVICE.current(device):
            launch(driver, handles, call, addresses, stream)
        return outputs


def with_kernels(op: object, portable: Run) -> Run:
    """Return the function of tensors on a device: kernels on CUDA tensors, else `portable`."""
    if not isinstance(op, ElemwiseScan) or not config.scanlib__cuda:
        return portable
    if config.scanlib__perform != "auto":
        return portable
    kernels = CudaRunner(op)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = kernels(inputs)
        return portable(inputs) if results is None else results

    return run
