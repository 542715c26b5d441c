"""Items at an index that differs from step to step, for all steps at once.

A step that reads ``A[z_t]`` reads, over all steps, ``A[z]``: rows gathered by a vector of
indices. One that adds to ``s[z_t]`` in an accumulator scatters its addends: ``s[z] += v``, where
equal indices add up.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import Alloc, ScalarFromTensor
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib.ops.graph import is_tensor
from scanlib.ops.loop import Loop, NonSequence
from scanlib.ops.row_ops.checked_rows import checked_places

Value = Callable[[Variable], tuple[Variable, bool]]


def varying_index(node: Apply, differs: Callable[[Variable], bool]) -> bool:
    """Whether a node reads or writes at one place along the first axis that differs by step.

    The other indices take all of their axes.
    """
    if not isinstance(node.op, Subtensor | IncSubtensor):
        return False
    places = node.inputs[1:] if isinstance(node.op, Subtensor) else node.inputs[2:]
    if len(places) != 1 or not differs(places[0]) or not _from_integer(places[0]):
        return False
    first, *rest = indices_from_subtensor(places, node.op.idx_list)
    return first is places[0] and all(index == slice(None) for index in rest)


def _from_integer(place: Variable) -> bool:
    return place.owner is not None and isinstance(place.owner.op, ScalarFromTensor)


def gathered(node: Apply, value: Value, length: Variable) -> Variable:
    """Return what a node reads at all steps."""
    (array, varies), (places, _) = value(node.inputs[0]), value(node.inputs[1])
    if not varies:
        return array[checked_places(places, array.shape[0])]
    return array[pt.arange(length), checked_places(places, array.shape[1])]


def written(
    node: Apply, rows: Callable[[Variable], Variable], value: Value, length: Variable
) -> Variable:
    """Return the arrays in which a node writes at all steps."""
    arrays, (places, _) = rows(node.inputs[0]), value(node.inputs[2])
    change = pt.set_subtensor if node.op.set_instead_of_inc else pt.inc_subtensor
    target = arrays[pt.arange(length), checked_places(places, arrays.shape[1])]
    return change(target, _like(rows(node.inputs[1]), target))


def scattered(node: Apply, rows: Callable[[Variable], Variable], value: Value) -> Variable:
    """Return an array to which a node adds at every step, with the addends of all steps."""
    array = value(node.inputs[0])[0]
    places = checked_places(value(node.inputs[2])[0], array.shape[0])
    values = _like(rows(node.inputs[1]), array)
    # PyTensor takes a single row for one that is to be broadcast, and refuses it.
    missing = pt.eq(places.shape[0], 1).astype("int64")
    zeros = pt.zeros((missing, *tuple(values.shape)[1:]), dtype=values.type.dtype)
    values = pt.concatenate([values, zeros])
    places = pt.concatenate([places, pt.zeros((missing,), dtype=places.type.dtype)])
    return pt.inc_subtensor(array[places], values)


def all_zeros(variable: Variable) -> bool:
    """Whether an array is known to hold zeros alone."""
    node = variable.owner
    if isinstance(variable, Constant):
        return not np.any(variable.data)
    if node is None:
        return False
    if isinstance(node.op, Alloc | DimShuffle | SpecifyShape):
        return all_zeros(node.inputs[0])
    is_filled = isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Second)
    return is_filled and all_zeros(node.inputs[1])


def _like(values: Variable, target: Variable) -> Variable:
    missing = target.type.ndim - values.type.ndim
    return pt.expand_dims(values, tuple(range(1, 1 + missing))) if missing else values


def additions_as_sums(loop: Loop) -> None:
    """Write accumulators ``c[z] += v`` as ``c + (0, but v at z)``, in place."""
    for carry in loop.carries:
        if not is_tensor(carry.value):
            continue
        base, additions = _additions(carry.next, carry.value)
        if base is not carry.value or not additions:
            continue
        whole = carry.value.type()
        zeros = pt.zeros_like(whole)
        parts = [node.op(zeros, *node.inputs[1:]) for node in additions]
        loop.non_sequences.append(NonSequence(carry.initial, whole))
        carry.next = pt.add(carry.value, *parts)


def _additions(variable: Variable, value: Variable) -> tuple[Variable, list[Apply]]:
    """Take apart what is added to parts of a value, one addition after the other."""
    found: list[Apply] = []
    while variable is not value:
        node = variable.owner
        if node is None or not isinstance(node.op, IncSubtensor) or node.op.set_instead_of_inc:
            break
        found.append(node)
        variable = node.inputs[0]
    return variable, found
