"""Ops in the place of PyTensor's, which JAX is given another function for."""

from __future__ import annotations

from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op


class StandIn(Op):
    """Base of such Ops.

    Parameters
    ----------
    core : Op
        PyTensor's own.
    """

    __props__ = ("core",)

    def __init__(self, core: Op) -> None:
        self.core = core

    def __str__(self) -> str:
        return f"{type(self).__name__}{{{self.core}}}"

    def make_node(self, *inputs: Variable) -> Apply:
        node = self.core.make_node(*inputs)
        return Apply(self, node.inputs, [out.type() for out in node.outputs])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        self.core.perform(self.core.make_node(*node.inputs), inputs, output_storage)
