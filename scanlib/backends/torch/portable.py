"""Loops as functions of tensors, for devices without a compiled kernel.

`TorchLoop` walks the steps of any loop; its body is PyTensor's own translation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from pytensor.compile.mode import get_mode
from pytensor.link.pytorch.dispatch.basic import pytorch_funcify

from scanlib._compat import thaw_graph
from scanlib.backends.torch.operator import torch_dtype
from scanlib.ops.python_loop import PythonLoop

Rows = list[torch.Tensor]


class TorchLoop(PythonLoop):
    """Runs a `Scan` on tensors, step by step."""

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
