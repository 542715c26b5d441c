"""Loads the PyTorch backend when PyTensor's PyTorch linker runs, and not before.

Registering a rule with PyTensor's PyTorch dispatch imports torch, and PyTensor has no rewrite that
only the PyTorch linker asks for. What is left is the linker's own first step, which imports the
dispatch: the backend is loaded just before.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from pytensor.link.pytorch.linker import PytorchLinker

from scanlib.ops.execution import register_loader

DISPATCH = "pytensor.link.pytorch.dispatch.basic"


def load_before_linking() -> None:
    """Have the linker load scanlib's rules before it converts a graph."""
    convert = PytorchLinker.fgraph_convert
    if hasattr(convert, "__wrapped__"):
        return

    @functools.wraps(convert)
    def fgraph_convert(self: PytorchLinker, *args: Any, **kwargs: Any) -> Any:
        from scanlib.backends import torch  # noqa: F401

        return convert(self, *args, **kwargs)

    PytorchLinker.fgraph_convert = fgraph_convert


def load_where_dispatch_is() -> None:
    """Import the backend if PyTensor's PyTorch dispatch has been imported already."""
    if DISPATCH in sys.modules:
        from scanlib.backends import torch  # noqa: F401


load_before_linking()
register_loader(load_where_dispatch_is)
