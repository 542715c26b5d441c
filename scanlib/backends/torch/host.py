"""What PyTensor computes without torch: Ops that its PyTorch linker does not convert.

A step may hold any Op, because numba compiles it. What does not need the steps one after the other
leaves the loop, and is then a node that torch has to run. Where torch has nothing for it, it runs
on the CPU as under PyTensor's other linkers, on the memory of the tensors: as an operator in the
graph that `torch.compile` sees if its inputs and results are arrays, and between two such graphs
if they are not. Random generators travel as `Held` objects.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify, pytorch_typify
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.random.type import RandomType

from scanlib.backends.handler import functions
from scanlib.backends.handler.programs import program_of_node
from scanlib.backends.handler.thunks import runner
from scanlib.backends.torch.operator import Run, Shapes, device_of, operator_of, torch_dtype
from scanlib.ops.graph import is_dense, is_numeric

refuse = pytorch_funcify.dispatch(object)


class Held:
    """A random generator beside tensors, with the methods that PyTensor's linker calls."""

    def __init__(self, value: np.random.Generator) -> None:
        self.value = value

    def cpu(self) -> "Held":
        return self

    def clone(self) -> "Held":
        return Held(copy.deepcopy(self.value))

    def numpy(self) -> np.random.Generator:
        return self.value


@pytorch_typify.register(np.random.Generator)
@pytorch_typify.register(Held)
def typify_generator(data: Any, **kwargs: Any) -> Held:
    """Return a generator as the linker's functions hand it on."""
    return data if isinstance(data, Held) else Held(data)


def to_tensor(value: Any, others: Sequence[np.ndarray]) -> torch.Tensor:
    """Return a result as a tensor of its own: torch takes operators at their word on that."""
    array = np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value)
    shared = any(np.may_share_memory(array, other) for other in others)
    return torch.from_numpy(array.copy() if shared else array)


def performed(node: Apply) -> Callable[[Sequence[Any]], list[Any]]:
    """Return what an Op computes in Python, from tensors on the CPU and generators to such."""
    node.op.prepare_node(node, None, None, "py")
    compute = functions.performed(node)

    def run(inputs: Sequence[Any]) -> list[Any]:
        values = [x.value if isinstance(x, Held) else x for x in inputs]
        values = [x.numpy(force=True) if isinstance(x, torch.Tensor) else x for x in values]
        found = compute(*values)
        arrays = [x for x in values if isinstance(x, np.ndarray)]
        results: list[Any] = []
        for out, value in zip(node.outputs, found if node.outputs[1:] else [found], strict=True):
            results.append(to_tensor(value, arrays) if is_numeric(out) else Held(value))
            if is_numeric(out):
                arrays.append(results[-1].numpy())
        return results

    return run


def beside_tensors(node: Apply) -> Callable[..., Any]:
    """Return the function of a node with inputs or results that are no arrays: torch knows no
    operators of those, so that it runs between two graphs."""
    run = performed(node)

    def call(*inputs: Any) -> Any:
        tensors = [x for x in inputs if isinstance(x, torch.Tensor)]
        device = device_of(tensors) if tensors else torch.device("cpu")
        results = tuple(x.to(device) if isinstance(x, torch.Tensor) else x for x in run(inputs))
        return results[0] if len(results) == 1 else results

    return torch.compiler.disable(call)


def compiled(op: Any, node: Apply) -> Run:
    """Return the function of tensors on the CPU that runs a node: its kernel, if it has one.

    Elementwise Ops without a function of NumPy or SciPy would run in Python for each item: they
    are compiled like loops. Other Ops that are no loops have functions of their own.
    """
    program = None
    if config.scanlib__perform == "auto" and not getattr(op, "nfunc_spec", None):
        program = program_of_node(node)
    if program is None:
        return performed(node)
    run_program = runner(program)  # whose results are arrays of their own

    def run(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        values = [tensor.numpy(force=True) for tensor in inputs]
        return [torch.from_numpy(result) for result in run_program(*values)]

    return run


def on_host(op: Any, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function that runs a node as PyTensor's other linkers do; `NotImplementedError` if
    an input or a result has no counterpart beside tensors, a sparse matrix say."""
    variables = [*node.inputs, *node.outputs]
    if all(map(is_dense, variables)) and node.inputs:
        elementwise = isinstance(op, Elemwise)
        run = compiled(op, node) if elementwise else performed(node)
        dtypes = [torch_dtype(out.type.dtype) for out in node.outputs]

        def anywhere(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            device = device_of(inputs)
            return [x.to(device, dtype) for x, dtype in zip(run(inputs), dtypes, strict=True)]

        types = [variable.type for variable in variables]
        content = "\n".join(["PyTensor", repr(op), *map(str, types)])
        shapes = _broadcast(node) if elementwise else None
        return operator_of(node, content, (op, types), anywhere, shapes)
    for variable in variables:
        is_generator = isinstance(variable.type, RandomType)
        # Constants are handed on by torch: an axis, a slice.
        if not (is_dense(variable) or is_generator or isinstance(variable, Constant)):
            return refuse(op, node=node, **kwargs)
    return beside_tensors(node)


def _broadcast(node: Apply) -> Shapes:
    """Return the rule for the results of an elementwise Op."""

    def shapes(inputs: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
        shape = tuple(torch.broadcast_shapes(*(x.shape for x in inputs)))
        return [shape] * len(node.outputs)

    return shapes
