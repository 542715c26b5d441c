"""Zeros into which parts are written: computed where they belong, not copied there.

The derivative of slices ``x[:, :n]``, ``x[:, n:]`` is written as zeros to which one part after the
other is added. Where the parts do not overlap, the whole gets memory of its own that is cleared
before the loop; steps write the parts, and what computes a part writes it into the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.subtensor import IncSubtensor, indices_from_subtensor

from scanlib.backends.numba.array_indices import ArrayIndices, integer_of
from scanlib.backends.numba.array_values import Destination
from scanlib.backends.numba.places import Place

SHAPES = "raise ValueError('cannot assign an array of another shape to a slice')"
Chain = list[Apply]  # the zeros, and what writes the parts one after the other


def find_chains(fgraph: FunctionGraph) -> list[Chain]:
    """Return the chains of a body whose parts do not overlap."""
    chains = []
    for node in fgraph.toposort():
        if isinstance(node.op, Alloc) and _is_zero(node.inputs[0]):
            chain = _chain(fgraph, node)
            if len(chain) > 1 and _are_apart(chain[1:]):
                chains.append(chain)
    return chains


def _is_zero(variable: Variable) -> bool:
    return isinstance(variable, Constant) and not np.any(variable.data)


def _chain(fgraph: FunctionGraph, node: Apply) -> Chain:
    chain = [node]
    while True:
        clients = fgraph.clients[chain[-1].outputs[0]]
        if len(clients) != 1:
            return chain
        following, position = clients[0]
        if not isinstance(following.op, IncSubtensor) or position != 0:
            return chain
        if following.inputs[1].type.dtype != node.outputs[0].type.dtype:
            return chain
        chain.append(following)


def _are_apart(nodes: Sequence[Apply]) -> bool:
    """Whether the parts are slices of one axis that cannot overlap."""
    spans = []
    axes = set()
    for node in nodes:
        found = _span(node)
        if found is None:
            return False
        axes.add(found[0])
        spans.append(found[1:])
    spans.sort()
    return len(axes) == 1 and all(stop <= start for (_, stop), (start, _) in pairwise(spans))


def _span(node: Apply) -> tuple[int, float, float] | None:
    """Return axis, start and stop of the slice that a node writes, if they are plain."""
    indices = indices_from_subtensor(node.inputs[2:], node.op.idx_list)
    chosen = None
    for axis, index in enumerate(indices):
        if not isinstance(index, slice) or index.step is not None:
            return None
        if index.start is None and index.stop is None:
            continue
        numbers = []
        for bound, default in ((index.start, 0), (index.stop, float("inf"))):
            if bound is None:
                numbers.append(default)
            elif isinstance(bound, Constant | int) and integer_of(bound) >= 0:
                numbers.append(integer_of(bound))
            else:
                return None
        if chosen is not None:
            return None
        chosen = (axis, numbers[0], numbers[1])
    return chosen


class ArrayJoins(ArrayIndices):
    """Knows which values of a step are zeros with parts written into them."""

    def plan_joins(self, fgraph: FunctionGraph, nodes: list[Apply]) -> list[Apply]:
        """Choose the chains, and return the nodes with their zeros as early as they can be."""
        self.joined: dict[Variable, Chain] = {}
        self.parts: dict[Variable, Place] = {}
        first: list[Apply] = []
        for chain in find_chains(fgraph):
            above = [
                variable.owner
                for variable in ancestors(chain[0].inputs)
                if variable.owner is not None
            ]
            if any(out.type.ndim > 1 for node in above for out in node.outputs):
                continue
            self.joined.update({node.outputs[0]: chain for node in chain})
            first += [node for node in nodes if node in above or node is chain[0]]
        early = list(dict.fromkeys(first))
        return [*early, *(node for node in nodes if node not in set(early))]

    def forget_joined(self, out: Variable) -> None:
        """Treat a chain as separate nodes after all."""
        for node in self.joined.get(out, []):
            self.joined.pop(node.outputs[0], None)

    def give_parts_destinations(self, out: Variable, whole: Place) -> None:
        """Let what computes the parts write them into the whole."""
        for node in self.joined[out][1:]:
            part = node.inputs[1]
            made_here = part.owner is not None and isinstance(part.owner.op, Elemwise)
            if not made_here or part in self.destinations or part.type.ndim != whole.ndim:
                continue
            if any(known == 1 for known in part.type.shape):
                continue
            indices = indices_from_subtensor(node.inputs[2:], node.op.idx_list)
            place = self.indexed(whole, indices)
            self.destinations[part] = Destination(place, lambda *_: (SHAPES, SHAPES))
            self.parts[part] = place
