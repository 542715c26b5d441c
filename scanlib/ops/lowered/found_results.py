"""`FoundResults`: the results of a loop, found by other means than by walking.

Another algorithm may compute what a loop computes, such as a scan of associative elements.
`FoundResults` is given the loop's inputs and what was found, and returns that as it is; derivatives
are those of the loop at these values, of any order: one loop in the other direction, whatever is
not smooth in the other algorithm. A rewrite takes the Op out when functions are compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.traversal import toposort

from scanlib._compat import vectorize_rule
from scanlib.ops.batching import vectorize_scan
from scanlib.ops.derivatives import HasDerivatives, pullback_rule, pushforward_rule
from scanlib.ops.gradient.pullback import pull_back
from scanlib.ops.gradient.pushforward import pushforward_at
from scanlib.ops.graph import conform
from scanlib.ops.loop import Results
from scanlib.ops.scan import Scan
from scanlib.ops.signature import Signature


class FoundResults(HasDerivatives, Op):
    """The results of a loop, given its inputs and these results.

    Parameters
    ----------
    scan : Scan
        The loop, without carries and `until`.
    """

    __props__ = ("scan",)
    view_map: ClassVar[dict[int, list[int]]] = {}

    def __init__(self, scan: Scan) -> None:
        self.scan = scan

    def __str__(self) -> str:
        return f"Found{self.scan}"

    @property
    def signature(self) -> Signature:
        return self.scan.signature

    def make_node(self, *inputs: Variable) -> Apply:
        count = len(self.scan.outer_input_types())
        node = self.scan.make_node(*inputs[:count])
        found = [conform(v, out.type) for v, out in zip(inputs[count:], node.outputs, strict=True)]
        return Apply(self, [*node.inputs, *found], [v.type() for v in found])

    def infer_shape(self, *arguments: Any) -> list[Any]:
        node, shapes = arguments[-2:]
        return list(shapes[-len(node.outputs) :])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        for cell, value in zip(output_storage, inputs[-len(node.outputs) :], strict=True):
            cell[0] = value.copy()

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        count = len(node.outputs)
        own = self.scan.make_node(*node.inputs[:-count])
        return [*self.scan.connection_pattern(own), *([[False] * count] * count)]

    def results(self, outputs: Sequence[Variable]) -> Results:
        """Name the results by role."""
        return Results(*self.signature.split_outputs(outputs), outputs[0].owner)


@pullback_rule.register(FoundResults)
def pullback_found(
    op: FoundResults,
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    cotangents: Sequence[Variable],
) -> list[Variable]:
    """Return the cotangents of the loop's inputs; what was found has none."""
    own = inputs[: -len(outputs)]
    found = pull_back(op.scan, own, op.results(outputs), cotangents)
    return [*found, *(pg.disconnected_type() for _ in outputs)]


@pushforward_rule.register(FoundResults)
def pushforward_found(
    op: FoundResults,
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    tangents: Sequence[Variable],
) -> list[Variable]:
    """Return the tangents of the loop's results."""
    count = len(outputs)
    return pushforward_at(op.scan, inputs[:-count], op.results(outputs), tangents[:-count])


@vectorize_rule.register(FoundResults)
def vectorize_found(op: FoundResults, node: Apply, *batched: Variable) -> list[Variable]:
    """Return the results of a batch of loops, with those that were found for the batch."""
    count = len(node.outputs)
    own, found = batched[:-count], batched[-count:]
    outputs = vectorize_scan(op.scan, op.scan.make_node(*node.inputs[:-count]), *own)
    (loop,) = [n for n in toposort(outputs, blockers=list(own)) if isinstance(n.op, Scan)]
    ranks = [new.type.ndim - old.type.ndim for new, old in zip(outputs, node.outputs, strict=True)]
    moved = []
    for value, like, rank in zip(found, outputs, ranks, strict=True):
        value = value[(0,) * max(value.type.ndim - like.type.ndim, 0)]
        value = value if value.type.ndim == like.type.ndim else pt.broadcast_to(value, like.shape)
        moved.append(pt.moveaxis(value, rank, 0) if rank else value)
    results = FoundResults(loop.op).make_node(*loop.inputs, *moved).outputs
    return [pt.moveaxis(v, 0, rank) if rank else v for v, rank in zip(results, ranks, strict=True)]


@node_rewriter([FoundResults])
def take_found(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    """Put what was found in the place of the Op: derivatives have been taken by then."""
    return node.inputs[-len(node.outputs) :]
