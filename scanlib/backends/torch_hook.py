"""Loads the PyTorch backend when PyTensor's PyTorch linker runs, and not before.

Registering a rule with PyTensor's PyTorch dispatch imports torch, and PyTensor has no rewrite that
only the PyTorch linker asks for. What is left is the linker's own first step, which imports the
dispatch: the backend is loaded just before. Code that rewrites a graph in the PyTorch mode, and
hands it to `pytorch_funcify` itself, has imported the dispatch when the rewrites run.
"""

import sys

from pytensor.compile.mode import optdb
from pytensor.graph.fg import FunctionGraph

from scanlib._compat.torch import before_linking
from scanlib.ops.execution import register_loader
from scanlib.ops.linker_features import holds_scanlib_ops
from scanlib.ops.loop_rewrite import LoopRewrite

DISPATCH = "pytensor.link.pytorch.dispatch.basic"


def load_torch() -> None:
    """Import the PyTorch backend."""
    from scanlib.backends import torch  # noqa: F401


def load_where_dispatch_is() -> None:
    """Import the backend if PyTensor's PyTorch dispatch has been imported already."""
    if DISPATCH in sys.modules:
        load_torch()


class LoadTorch(LoopRewrite):
    """Import the backend where the dispatch is there and the graph has loops."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if holds_scanlib_ops(fgraph):
            load_where_dispatch_is()


optdb.register("scanlib_load_torch", LoadTorch(), "fast_run", "fast_compile", position=0.042)
before_linking(load_torch)
register_loader(load_where_dispatch_is)
