"""`KernelGraph`: arrays around loops that the C linker has computed by one program.

PyTensor's C linker compiles a C++ module for every Op of a graph, a second each; a step that has
been taken apart has dozens around it. Those that have kernels become one node.
"""

from collections.abc import Sequence
from typing import Any

import pytensor.gradient as pg
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FrozenFunctionGraph

from scanlib._compat import copy_graph
from scanlib.ops.c_linker import PrintedOp
from scanlib.ops.frozen_body import HasFrozenBody
from scanlib.ops.graph import substitute


class KernelGraph(HasFrozenBody, PrintedOp):
    """A graph of arrays without loops, and its kernels (a `LoopProgram`) where they have been
    written."""

    __props__ = ("body",)

    def __init__(self, body: FrozenFunctionGraph, program: Any = None) -> None:
        self.body = body
        self.program = program

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"program": None}

    def __str__(self) -> str:
        return f"KernelGraph{{{len(self.body.toposort())} nodes}}"

    def make_node(self, *inputs: Variable) -> Apply:
        given = [
            inner.type.filter_variable(outer)
            for inner, outer in zip(self.body.inputs, inputs, strict=True)
        ]
        return Apply(self, given, [out.type() for out in self.body.outputs])

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        cotangents: Sequence[Variable],
    ) -> list[Variable]:
        own, results = copy_graph(self.body.inputs, self.body.outputs)
        pairs = zip(results, cotangents, strict=True)
        known = {out: g for out, g in pairs if not isinstance(g.type, pg.DisconnectedType)}
        found = pg.grad(
            None,
            own,
            known_grads=known,
            disconnected_inputs="ignore",
            return_disconnected="disconnected",
        )
        return substitute(found, dict(zip(own, inputs, strict=True)))

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        values = dict(zip(self.body.inputs, inputs, strict=True))

        def value(variable: Variable) -> Any:
            return variable.data if isinstance(variable, Constant) else values[variable]

        for inner in self.body.toposort():
            cells: list[list[Any]] = [[None] for _ in inner.outputs]
            inner.op.perform(inner, [value(inp) for inp in inner.inputs], cells)
            values.update((out, cell[0]) for out, cell in zip(inner.outputs, cells, strict=True))
        for storage, out in zip(output_storage, self.body.outputs, strict=True):
            storage[0] = value(out)
