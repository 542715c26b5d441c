"""What scanlib takes from torch, and from PyTensor's PyTorch linker, beyond public names."""

import functools
from collections.abc import Callable
from typing import Any

from pytensor.link.pytorch.linker import PytorchLinker


def before_linking(load: Callable[[], None]) -> None:
    """Have PyTensor's PyTorch linker call `load` before it converts a graph.

    Registering a rule with its dispatch imports torch, and no rewrite is asked for by this linker
    alone. What is left is the linker's own first step.
    """
    convert = PytorchLinker.fgraph_convert
    if hasattr(convert, "__wrapped__"):
        return

    @functools.wraps(convert)
    def fgraph_convert(self: PytorchLinker, *args: Any, **kwargs: Any) -> Any:
        load()
        return convert(self, *args, **kwargs)

    PytorchLinker.fgraph_convert = fgraph_convert


def differentiated_by_function(tensor: Any) -> bool:
    """Whether `torch.func.grad` or a relative differentiates by a tensor; nothing public tells."""
    import torch

    return bool(torch._C._functorch.is_gradtrackingtensor(tensor))


def without_derivatives() -> Any:
    """Return a context in which operators run below what records derivatives."""
    import torch

    return torch._C._AutoDispatchBelowAutograd()
