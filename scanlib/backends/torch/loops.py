"""`Scan`, `ElemwiseScan` and `LinearScan` as torch operators: kernels, on CUDA devices on torch's
own memory, or functions of tensors on devices without one."""

import warnings
from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from pytensor.compile.mode import get_mode
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify
from pytensor.printing import debugprint

from scanlib._compat import thaw_graph
from scanlib.backends.cuda.launch import Call, KernelLoop, launch
from scanlib.backends.cuda.linear import LinearLoop, kernels_of
from scanlib.backends.cuda.nvidia import (
    Driver,
    DriverError,
    KernelCompileError,
    NoCompilerError,
    find_driver,
)
from scanlib.backends.torch import host
from scanlib.backends.torch.operator import Run, device_of, operator_of, torch_dtype
from scanlib.backends.torch.static_sizes import shapes_of_loop
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.execution import LoopOp
from scanlib.ops.graph import is_numeric
from scanlib.ops.python_loop import PythonLoop

Rows = list[torch.Tensor]
ALIGNED = 256  # bytes
MOST_BYTES = 1 << 30  # of the rows that a loop may write until its condition holds


class TorchLoop(PythonLoop):
    """Runs any `Scan` on tensors, step by step: its body is PyTensor's own translation."""

    @cached_property
    def step(self) -> Callable[..., Rows]:
        """The body; translated before the first step, since a compiled kernel may do without."""
        fgraph = thaw_graph(self.op.body)
        get_mode("PYTORCH").optimizer.rewrite(fgraph)
        function = pytorch_funcify(fgraph)
        dtypes = [torch_dtype(out.type.dtype) for out in self.op.body.outputs]

        def step(*inputs: torch.Tensor) -> Rows:
            # Torch's rules for dtypes are not PyTensor's: a sum of int8 is int64.
            pairs = zip(function(*inputs), dtypes, strict=True)
            return [torch.as_tensor(value).to(dtype) for value, dtype in pairs]

        return step

    def as_array(self, value: Any) -> torch.Tensor:
        return torch.as_tensor(value)

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        return like.new_empty(shape)

    def copied(self, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    def past(self, row: str, ndim: int) -> str:
        # A row that the step may hand on must not change when the next one is written.
        return f"copied({row})"

    def _empty_outputs(self, inputs: Sequence[torch.Tensor]) -> Rows:
        arrays = super()._empty_outputs([value.cpu().numpy() for value in inputs])
        return [torch.from_numpy(array).to(inputs[0].device) for array in arrays]

    def _finish(
        self, histories: list, carries: list, stacks: list, done: int, capacity: int
    ) -> list[Any]:
        # A step may hand on one of the loop's inputs.
        return super()._finish(histories, list(map(self.copied, carries)), stacks, done, capacity)


# CUDA devices


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


# All devices


def is_on_cpu(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.is_cpu for tensor in tensors)


def on_any_device(op: Any, node: Apply, portable: Run) -> Run:
    """Return the function that runs a kernel where there is one, and `portable` elsewhere."""
    on_cpu = None if config.scanlib__perform == "python" else host.compiled(op, node)
    on_cuda = CudaRunner(op)

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if on_cpu is not None and is_on_cpu(inputs):
            return on_cpu(inputs)
        device = device_of(inputs)
        tensors = [tensor.to(device) for tensor in inputs]
        results = on_cuda(tensors)
        return portable(tensors) if results is None else results

    return run


def _content(op: Any, node: Apply) -> str:
    """Say all about what an Op computes."""
    body = getattr(op, "body", None)
    inside, constants = "", list[Any]()
    if body is not None:
        inside = debugprint(list(body.outputs), file="str", print_type=True)
        read = [inp for node in body.toposort() for inp in node.inputs if hasattr(inp, "data")]
        constants = [getattr(c.data, "tobytes", lambda c=c: c.data)() for c in read]
    types = [str(variable.type) for variable in [*node.inputs, *node.outputs]]
    properties = [getattr(op, name) for name in op.__props__ if name not in ("body", "scan")]
    return "\n".join(
        [type(op).__name__, repr(properties), repr(op.signature), inside, repr(constants), *types,
         config.scanlib__perform, str(config.scanlib__cuda)]
    )  # fmt: skip


@pytorch_funcify.register(LoopOp)
def funcify_loop(op: Any, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function of a loop's inputs, tensors, to its results."""
    loop = op.python_loop(TorchLoop)
    variables = [*node.inputs, *node.outputs]
    if not all(map(is_numeric, variables)):  # generators of random numbers, on the CPU only
        return host.beside_tensors(node)
    flags = config.scanlib__perform, config.scanlib__cuda
    numbers = [constant_integer(variable) for variable in node.inputs]
    types = [variable.type for variable in variables]
    run = on_any_device(op, node, lambda inputs: list(loop(*inputs)))
    identity = op, types, numbers, flags
    return operator_of(node, _content(op, node), identity, run, shapes_of_loop(op, node))
