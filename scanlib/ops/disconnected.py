"""Ops through which nothing is differentiated."""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.gradient as pg
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op


class DisconnectedOp(Op):
    """Base of Ops of one input whose result has no derivative by it."""

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[False]]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        cotangents: Sequence[Variable],
    ) -> list[Variable]:
        return [pg.disconnected_type()]

    def pushforward(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        tangents: Sequence[Variable],
    ) -> list[Variable]:
        return [pg.disconnected_type()]
