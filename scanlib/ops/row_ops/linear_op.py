"""Ops that are linear in an array, whose derivatives follow from the adjoint, and Ops without any.

Their other inputs are sizes.
"""

import pytensor.gradient as pg
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op

from scanlib.ops.graph import Variables


class UnconnectedOp(Op):
    """Base of Ops of one result, through which nothing is differentiated."""

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[False] for _ in node.inputs]

    def pullback(
        self, inputs: Variables, outputs: Variables, cotangents: Variables
    ) -> list[Variable]:
        return [pg.disconnected_type() for _ in inputs]

    def pushforward(
        self, inputs: Variables, outputs: Variables, tangents: Variables
    ) -> list[Variable]:
        return [pg.disconnected_type()]


class LinearOp(Op):
    """Base of Ops whose one result is linear in the first input; the others are sizes."""

    def adjoint(self, inputs: Variables, cotangent: Variable) -> Variable:
        """Return the cotangent of the first input."""
        raise NotImplementedError

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[i == 0] for i in range(len(node.inputs))]

    def pullback(
        self, inputs: Variables, outputs: Variables, cotangents: Variables
    ) -> list[Variable]:
        first, *others = (pg.disconnected_type() for _ in inputs)
        if not isinstance(cotangents[0].type, DisconnectedType):
            first = self.adjoint(inputs, cotangents[0])
        return [first, *others]

    def pushforward(
        self, inputs: Variables, outputs: Variables, tangents: Variables
    ) -> list[Variable]:
        if isinstance(tangents[0].type, DisconnectedType):
            return [pg.disconnected_type()]
        return [self(tangents[0], *inputs[1:])]
