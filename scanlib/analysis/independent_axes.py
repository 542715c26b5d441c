"""Axes of the states along which a step computes every item from its own past alone.

An axis `a` of the states is independent if the rows ``h[…, i, …]`` at place `i` of it are computed
from the rows of all states at place `i`, for all `i`: the members of a batch, or the channels of an
elementwise step. The step's Jacobian is then block diagonal, one block for each `i`.

One axis at a time is followed through the body: every value that depends on the states must have it
in one known place, up to the next values, which must have it where the states do. What is not known
here mixes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatch

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.graph.traversal import toposort
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, Join, Split
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape, Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib._compat import join_of, split_of

# Where an axis runs, by input; None for an input that does not depend on the states.
Places = list[int | None]


def independent_axes(states: Sequence[Sequence[Variable]], nexts: Sequence[Variable]) -> list[int]:
    """Return the axes along which a step's states are independent of one another.

    Parameters
    ----------
    states : sequence of sequence of Variable
        The body variables that hold the past values of each state.
    nexts : sequence of Variable
        Its next values.
    """
    rank = min((taps[0].type.ndim for taps in states), default=0)
    return [axis for axis in range(rank) if _is_independent(states, nexts, axis)]


def _is_independent(
    states: Sequence[Sequence[Variable]], nexts: Sequence[Variable], axis: int
) -> bool:
    found = {tap: axis for taps in states for tap in taps}
    if len({tap.type.broadcastable[axis] for tap in found}) > 1:
        return False
    for node in toposort(list(nexts), blockers=list(found)):
        places: Places = [found.get(inp) for inp in node.inputs]
        if isinstance(node.op, Shape | Shape_i) or all(place is None for place in places):
            continue
        place = rule(node.op, node, places)
        if place is None:
            return False
        found.update(dict.fromkeys(node.outputs, place))
    return all(found.get(value, axis) == axis for value in nexts)


def _one(places: Places) -> int | None:
    """Return the place that all dependent inputs share, None if they differ."""
    known = {place for place in places if place is not None}
    return known.pop() if len(known) == 1 else None


@singledispatch
def rule(op: Op, node: Apply, places: Places) -> int | None:
    """Return where the axis runs in the outputs of a node, None if the node mixes its items."""
    return None


@rule.register(Elemwise)
def _elemwise(op: Op, node: Apply, places: Places) -> int | None:
    place = _one(places)
    if place is None:
        return None
    own = {
        inp.type.broadcastable[place]
        for inp, known in zip(node.inputs, places, strict=True)
        if known is not None
    }
    return place if own == {node.outputs[0].type.broadcastable[place]} else None


@rule.register(DimShuffle)
def _dimshuffle(op: DimShuffle, node: Apply, places: Places) -> int | None:
    return op.new_order.index(places[0]) if places[0] in op.new_order else None


@rule.register(CAReduce)
def _reduction(op: CAReduce, node: Apply, places: Places) -> int | None:
    (place,) = places
    if op.axis is None or place is None or place in op.axis:
        return None
    return place - sum(axis < place for axis in op.axis)


@rule.register(Softmax)
@rule.register(LogSoftmax)
@rule.register(CumOp)
def _along_an_axis(op: Softmax | LogSoftmax | CumOp, node: Apply, places: Places) -> int | None:
    if op.axis is None or places[0] is None:
        return None
    axes = op.axis if isinstance(op.axis, tuple) else (op.axis,)
    ndim = node.inputs[0].type.ndim
    return None if places[0] in {axis % ndim for axis in axes} else places[0]


@rule.register(Dot)
def _dot(op: Op, node: Apply, places: Places, batch: int = 0) -> int | None:
    """Rows of what stands left, or columns of what stands right; `batch` axes come before."""
    first, second = (inp.type.ndim - batch for inp in node.inputs)
    left, right = places
    if right is None and left == batch and first == 2:
        return batch
    if left is None and right == batch + 1 and second == 2:
        return node.outputs[0].type.ndim - 1
    return None


@rule.register(Blockwise)
def _blockwise(op: Blockwise, node: Apply, places: Places) -> int | None:
    batch = op.batch_ndim(node)
    place = _one(places)
    if place is not None and place < batch:
        dependent = [i for i, known in enumerate(places) if known is not None]
        own = {node.inputs[i].type.broadcastable[place] for i in dependent}
        return place if own == {node.outputs[0].type.broadcastable[place]} else None
    return _dot(op, node, places, batch) if isinstance(op.core_op, Dot) else None


@rule.register(Subtensor)
def _part(op: Subtensor, node: Apply, places: Places) -> int | None:
    indices = indices_from_subtensor(node.inputs[1:], op.idx_list)
    return _place_of_part(indices, places[0]) if _one(places) == places[0] else None


def _place_of_part(indices: Sequence[object], place: int | None) -> int | None:
    """Return where an axis runs in a part of an array that has all of it."""
    if place is None or (place < len(indices) and indices[place] != slice(None)):
        return None
    return place - sum(not isinstance(index, slice) for index in indices[:place])


@rule.register(IncSubtensor)
def _write(op: IncSubtensor, node: Apply, places: Places) -> int | None:
    whole, part, *rest = places
    place = whole
    indices = indices_from_subtensor(node.inputs[2:], op.idx_list)
    if any(known is not None for known in rest):
        return None
    if part is not None:
        lacking = node.outputs[0].type.ndim - node.inputs[1].type.ndim
        lacking -= sum(not isinstance(index, slice) for index in indices)
        places_of_part = [_place_of_part(indices, k) for k in range(node.outputs[0].type.ndim)]
        if part + lacking not in places_of_part or node.inputs[1].type.broadcastable[part]:
            return None
        found = places_of_part.index(part + lacking)
        place = found if whole in (None, found) else None
    return None if _place_of_part(indices, place) is None else place


@rule.register(Join)
def _join(op: Join, node: Apply, places: Places) -> int | None:
    axis, _ = join_of(node)
    place = _one(places)
    return None if axis is None or axis == place else place


@rule.register(Split)
def _split(op: Split, node: Apply, places: Places) -> int | None:
    _, axis, _ = split_of(node)
    return None if axis is None or axis == places[0] else _one(places)


@rule.register(Alloc)
def _alloc(op: Alloc, node: Apply, places: Places) -> int | None:
    value = node.inputs[0]
    if places[0] is None or _one(places) is None or value.type.broadcastable[places[0]]:
        return None
    return places[0] + node.outputs[0].type.ndim - value.type.ndim


@rule.register(SpecifyShape)
@rule.register(CheckAndRaise)
def _same(op: Op, node: Apply, places: Places) -> int | None:
    return places[0] if _one(places) == places[0] else None
