"""Ops that are linear in their arrays: the derivatives follow from the adjoint."""

from __future__ import annotations

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op

from scanlib.ops.derivatives import Variables


class LinearOp(Op):
    """Base of Ops whose one result is linear in the first `arrays` inputs; the others are sizes.

    Through an Op without `arrays` nothing is differentiated.
    """

    arrays = 1

    def adjoint(self, inputs: Variables, cotangent: Variable) -> list[Variable]:
        """Return the cotangents of the arrays."""
        raise NotImplementedError

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[i < self.arrays] for i in range(len(node.inputs))]

    def pullback(
        self, inputs: Variables, outputs: Variables, cotangents: Variables
    ) -> list[Variable]:
        nothing = [pg.disconnected_type() for _ in inputs]
        if not self.arrays or isinstance(cotangents[0].type, DisconnectedType):
            return nothing
        return [*self.adjoint(inputs, cotangents[0]), *nothing[self.arrays :]]

    def pushforward(
        self, inputs: Variables, outputs: Variables, tangents: Variables
    ) -> list[Variable]:
        own = list(zip(inputs, tangents, strict=True))[: self.arrays]
        if all(isinstance(tangent.type, DisconnectedType) for _, tangent in own):
            return [pg.disconnected_type()]
        whole = [
            pt.zeros_like(value) if isinstance(tangent.type, DisconnectedType) else tangent
            for value, tangent in own
        ]
        return [self(*whole, *inputs[self.arrays :])]
