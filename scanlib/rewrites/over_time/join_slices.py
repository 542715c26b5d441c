"""Slices written into zeros, one beside the other, become one join.

The gradient of taking a value apart, as the gates of a recurrent network are taken from one matrix
product, writes each slice's cotangent into zeros of the whole. Written as a join it is one pass
over memory instead of one for the zeros and one for each slice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.traversal import toposort
from pytensor.tensor.basic import Alloc, ScalarFromTensor
from pytensor.tensor.subtensor import IncSubtensor, indices_from_subtensor

from scanlib.lengths.numbers import constant_index
from scanlib.ops.graph import substitute
from scanlib.ops.loop import Loop


class _Slice(NamedTuple):
    """Rows `start` to `stop` of an axis, and what was written there; None is an end."""

    start: object
    stop: object
    value: Variable


def join_slices(loop: Loop) -> None:
    """Replace chains of slices written into zeros inside a body; `loop` is edited."""
    nodes = list(toposort(loop.body_outputs()))
    if not any(isinstance(node.op, IncSubtensor) for node in nodes):
        return
    found = {}
    for node in nodes:
        joined = _joined(node)
        if joined is not None and node.outputs[0].type.is_super(joined.type):
            found[node.outputs[0]] = joined
    if found:
        loop.substitute(_last_of_chains(found))


def _last_of_chains(found: dict[Variable, Variable]) -> dict[Variable, Variable]:
    """Return replacements whose values refer to one another where slices are joins, too."""
    done: dict[Variable, Variable] = {}
    for old, new in found.items():
        done[old] = substitute([new], done)[0]
    return done


def _joined(node: Apply) -> Variable | None:
    axis, slices = None, []
    out = node.outputs[0]
    current = out
    while current.owner is not None and isinstance(current.owner.op, IncSubtensor):
        place = _axis_slice(current.owner)
        if place is None or (axis is not None and place[0] != axis):
            return None
        axis = place[0]
        slices.append(place[1])
        current = current.owner.inputs[0]
    if axis is None or len(slices) < 2 or not _is_zeros(current):
        return None
    values = _in_order(slices)
    if values is None or any(value.type.dtype != out.type.dtype for value in values):
        return None
    whole = out.type.broadcastable
    for value in values:
        for k, (wide, narrow) in enumerate(zip(whole, value.type.broadcastable, strict=True)):
            if k != axis and narrow and not wide:
                return None
    return pt.join(axis, *values)


def _axis_slice(node: Apply) -> tuple[int, _Slice] | None:
    """Return the one axis along which a slice was written, and the slice."""
    target, value = node.inputs[:2]
    indices = indices_from_subtensor(node.inputs[2:], node.op.idx_list)
    if value.type.ndim != target.type.ndim or any(not isinstance(i, slice) for i in indices):
        return None
    cut = [k for k, index in enumerate(indices) if index != slice(None)]
    if len(cut) != 1 or indices[cut[0]].step is not None:
        return None
    (axis,) = cut
    size = value.type.shape[axis]
    if size == 1:
        return None
    start, stop = (_place(end) for end in (indices[axis].start, indices[axis].stop))
    return axis, _Slice(None if start == 0 else start, stop, value)


def _place(end: object) -> object:
    """Return an end of a slice in a form that equal ends share."""
    if end is None:
        return None
    known = constant_index(end)
    if known is not None:
        return known
    owner = getattr(end, "owner", None)
    if owner is not None and isinstance(owner.op, ScalarFromTensor):
        return owner.inputs[0]
    return end


def _is_zeros(variable: Variable) -> bool:
    node = variable.owner
    source = node.inputs[0] if node is not None and isinstance(node.op, Alloc) else variable
    return isinstance(source, Constant) and not np.any(source.data)


def _in_order(slices: list[_Slice]) -> list[Variable] | None:
    """Return the values of slices that cover an axis without a gap, from its start to its end."""
    by_start = {part.start: part for part in slices}
    if len(by_start) < len(slices):
        return None
    values, place = [], None
    for _ in slices:
        part = by_start.get(place)
        if part is None:
            return None
        values.append(part.value)
        place = part.stop
        if isinstance(place, int) and place < 0:
            return None
        if place is None:
            break
    return values if place is None and len(values) == len(slices) else None
