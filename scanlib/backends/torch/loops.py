"""`Scan`, `ElemwiseScan` and `LinearScan` as torch operators: kernels, or functions of tensors on
devices without one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from pytensor.compile.mode import get_mode
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify
from pytensor.printing import debugprint

from scanlib._compat import thaw_graph
from scanlib.backends.torch import host
from scanlib.backends.torch.cuda import CudaRunner
from scanlib.backends.torch.operator import Run, device_of, operator_of, torch_dtype
from scanlib.backends.torch.static_sizes import shapes_of_loop
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.execution import LoopOp
from scanlib.ops.graph import is_numeric
from scanlib.ops.python_loop import PythonLoop

Rows = list[torch.Tensor]


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

    def row(self, history: torch.Tensor, place: int) -> torch.Tensor:
        # A row that the step may hand on must not change when the next one is written.
        return history[place].clone()

    def _empty_outputs(self, inputs: Sequence[torch.Tensor]) -> Rows:
        arrays = super()._empty_outputs([value.cpu().numpy() for value in inputs])
        return [torch.from_numpy(array).to(inputs[0].device) for array in arrays]

    def _finish(
        self, histories: list, carries: list, stacks: list, done: int, capacity: int
    ) -> list[Any]:
        # A step may hand on one of the loop's inputs.
        return super()._finish(histories, list(map(self.copied, carries)), stacks, done, capacity)


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
