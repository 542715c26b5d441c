"""Vectors that a step makes of a few numbers, taken apart.

``stack([x, y])[0]`` is `x`, and the sum of ``exp(stack([x, y]))`` is ``exp(x) + exp(y)``: without
such vectors a body may be elementwise, or may be seen to belong to a recurrence family.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import MakeVector
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Sum as TensorSum
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

_LARGEST = 8  # vectors of more numbers are better left whole


def take_apart_stacks(fgraph: FunctionGraph) -> None:
    """Replace, in place, items and sums of vectors that a step makes of numbers."""
    if not any(isinstance(node.op, MakeVector) for node in fgraph.apply_nodes):
        return
    for node in fgraph.toposort():
        if node not in fgraph.apply_nodes or not isinstance(node.op, Subtensor | TensorSum):
            continue
        out = node.outputs[0]
        size = stack_size(node.inputs[0])
        if size is None or out.type.ndim > 0:
            continue
        places = list(range(size))
        if isinstance(node.op, Subtensor):
            number = _constant_place(node.inputs[1:], node.op, size)
            if number is None:
                continue
            places = [number]
        items = stack_items(node.inputs[0], places)
        if items is not None:
            # A sum of small integers or truth values is one of larger integers.
            items = [pt.cast(item, out.type.dtype) for item in items]
            new = pt.add(*items) if len(items) > 1 else items[0]
            fgraph.replace(out, new, reason="scanlib_stacks", import_missing=True)


def stack_size(vector: Variable) -> int | None:
    """Return the number of items of a vector of few numbers, None for anything else."""
    size = vector.type.shape[0] if getattr(vector.type, "ndim", 0) == 1 else None
    return size if size is not None and 0 < size <= _LARGEST else None


def stack_items(vector: Variable, places: Sequence[int]) -> list[Variable] | None:
    """Return items of a vector as expressions of numbers, None if one of them is none."""
    known: dict[tuple[Variable, int], Variable | None] = {}
    items = [_item(vector, place, known) for place in places]
    found = [item for item in items if item is not None]
    return found if len(found) == len(items) else None


def _constant_place(indices: Sequence[Variable], op: Subtensor, size: int) -> int | None:
    """Return the place that a constant index selects, counted from the start."""
    (place,) = indices_from_subtensor(indices, op.idx_list)
    if isinstance(place, Constant) and place.type.ndim == 0:
        place = int(place.data)
    return place % size if isinstance(place, int) and -size <= place < size else None


def _item(
    vector: Variable, place: int, known: dict[tuple[Variable, int], Variable | None]
) -> Variable | None:
    """Return one item of a vector as an expression of numbers, None if there is none."""
    key = (vector, place)
    if key not in known:
        known[key] = _find_item(vector, place, known)
    return known[key]


def _find_item(
    vector: Variable, place: int, known: dict[tuple[Variable, int], Variable | None]
) -> Variable | None:
    node = vector.owner
    if isinstance(vector, Constant):
        return pt.constant(vector.data[place])
    if node is None:
        return None
    if isinstance(node.op, MakeVector):
        return pt.cast(node.inputs[place], vector.type.dtype)
    if isinstance(node.op, DimShuffle) and node.inputs[0].type.ndim == 0:
        return node.inputs[0]
    if isinstance(node.op, IncSubtensor):
        return _written_item(node, place, known)
    if not isinstance(node.op, Elemwise) or len(node.outputs) > 1:
        return None
    if isinstance(node.op.scalar_op, ps.Second):  # a second value in the shape of the first
        at = 0 if node.inputs[1].type.broadcastable[0] else place
        return _item(node.inputs[1], at, known)
    places = [0 if inp.type.broadcastable[0] else place for inp in node.inputs]
    items = [_item(inp, at, known) for inp, at in zip(node.inputs, places, strict=True)]
    if any(item is None for item in items):
        return None
    return Elemwise(node.op.scalar_op)(*items)


def _written_item(
    node: Apply, place: int, known: dict[tuple[Variable, int], Variable | None]
) -> Variable | None:
    """Return one item of a vector of which one item was set or added to."""
    vector, value, *indices = node.inputs
    size = vector.type.shape[0]
    written = None if size is None else _constant_place(indices, node.op, size)
    if written is None or value.type.ndim > 0:
        return None
    before = _item(vector, place, known)
    if before is None or written != place:
        return before
    new = value if node.op.set_instead_of_inc else before + value
    return pt.cast(new, vector.type.dtype)
