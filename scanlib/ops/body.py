"""What Ops with a frozen body have in common."""

from __future__ import annotations

from typing import Any, Self

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FrozenFunctionGraph
from pytensor.graph.op import HasInnerGraph


class HasFrozenBody(HasInnerGraph):
    """The `body` of an Op, as PyTensor's printing and traversal expect it.

    Comes before `Op` among the bases: it replaces methods of it.
    """

    body: FrozenFunctionGraph

    @property
    def fgraph(self) -> FrozenFunctionGraph:
        return self.body

    @property
    def inner_inputs(self) -> list[Variable]:
        return list(self.body.inputs)

    @property
    def inner_outputs(self) -> list[Variable]:
        return list(self.body.outputs)

    @property
    def fn(self) -> Any:
        """None: a loop is compiled whole, there is no function of its body alone."""
        return None

    def clone(self) -> Self:
        return self

    def do_constant_folding(self, fgraph: Any, node: Apply) -> bool:
        """Loops are compiled with the function they are part of, not run while it is built."""
        return False
