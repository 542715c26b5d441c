"""Elementwise loops and matrix recurrences on CUDA tensors: kernels on torch's own memory."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from pytensor.configdefaults import config

from scanlib.backends.cuda.launch import Call, KernelLoop, launch
from scanlib.backends.cuda.linear import LinearLoop, kernels_of
from scanlib.backends.cuda.nvidia import (
    Driver,
    DriverError,
    KernelCompileError,
    NoCompilerError,
    find_driver,
)
from scanlib.backends.torch.operator import torch_dtype
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.execution import LoopOp

ALIGNED = 256  # bytes
MOST_BYTES = 1 << 30  # of the rows that a loop may write until its condition holds


def is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


class CudaRunner:
    """Runs an Op by its kernels."""

    def __init__(self, op: LoopOp) -> None:
        self.op = op
        self.first = int(op.has_n_steps)  # of the arguments that are arrays
        self.works = bool(config.scanlib__cuda) and config.scanlib__perform == "auto"

    @cached_property
    def loop(self) -> KernelLoop | LinearLoop | None:
        """The kernels, None if there are none."""
        return kernels_of(self.op)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor] | None:
        """Return the results; None where the Op has no kernel, or it cannot be compiled."""
        device = inputs[0].device
        driver = find_driver() if self.works and is_cuda(device) else None
        if driver is None:
            return None
        n_steps = int(inputs[0]) if self.first else None
        arrays = [tensor.resolve_conj().resolve_neg() for tensor in inputs[self.first :]]
        kernels: Any = self.loop
        if kernels is None:
            return None
        try:
            sizes = kernels.sizes([tuple(x.shape) for x in arrays], n_steps)
        except NoCCodeError:
            return None
        if self.op.signature.has_stop and not can_hold(kernels, sizes):
            return None  # a condition that may end it late
        strides = [tuple(s * x.element_size() for s in x.stride()) for x in arrays]
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        call = kernels.call(sizes, strides, processors)
        try:
            context = driver.primary_context(device.index or 0)
            handles = call.kernels.handles(driver, context)
        except (NoCompilerError, KernelCompileError, DriverError) as error:
            self.works = False
            warnings.warn(f"{self.op} runs without its CUDA kernel: {error}", stacklevel=2)
            return None
        with torch.cuda.device(device), driver.current(context):
            made = run_call(call, driver, handles, arrays)
            results = kernels.results(arrays, made, sizes, _converted)
        checked = kernels.checked(results, sizes.steps)
        # Some rows of a tensor are a view, which holds all of its memory.
        pairs = zip(checked, results, strict=False)
        return [x if x is whole else x.clone() for x, whole in pairs]


def can_hold(kernels: Any, sizes: Any) -> bool:
    """Whether all steps that a condition allows may be stored, and a thread sees it hold."""
    items = [np.dtype(array.dtype).itemsize for array in kernels.parameters.outputs]
    pairs = zip(sizes.outputs, items, strict=True)
    return sizes.channels > 0 and sum(prod(shape) * item for shape, item in pairs) <= MOST_BYTES


def run_call(
    call: Call, driver: Driver, handles: list[int], arrays: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Launch kernels on the device's stream and return what they write."""
    device = arrays[0].device
    outputs = [
        torch.empty(shape, dtype=torch_dtype(array.dtype), device=device)
        for shape, array in zip(call.shapes, call.kernels.parameters.outputs, strict=True)
    ]
    places = [0]
    for size in call.works:
        places.append(places[-1] + -(-size // ALIGNED) * ALIGNED)
    work = torch.empty(places[-1], dtype=torch.uint8, device=device)
    addresses = [x.data_ptr() for x in (*arrays, *outputs)]
    addresses += [work.data_ptr() + place for place in places[:-1]]
    launch(driver, handles, call, addresses, torch.cuda.current_stream(device).cuda_stream)
    return outputs


def _converted(tensor: torch.Tensor, dtype: str) -> torch.Tensor:
    return tensor.to(torch_dtype(dtype))
