"""Items that a mask selects: arrays of truth values as an index.

How many items there are, only the mask knows when it is there. What is written to them needs no
such number, if it can be computed for all items at once and is used for some::

    x[mask] = f(y[mask], z)        where(mask, f(y, z), x)
    sum(f(y[mask], z))             sum(where(mask, f(y, z), 0))

Everything else is an `UnknownLengthError` that says how a mask chooses among all items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.scalar.basic import Add
from pytensor.tensor.basic import Alloc, Nonzero
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import indices_from_subtensor
from pytensor.tensor.type import TensorType

from scanlib._compat import INDEX_READS, INDEX_WRITES
from scanlib.backends.jax.bounded import MASKED, UnknownLengthError
from scanlib.backends.jax.stand_in import StandIn

READS, WRITES = INDEX_READS[1:], INDEX_WRITES[1:]
REASON = "scanlib_masks"


class MaskedItems(StandIn):
    """Items that a mask selects, of which JAX does not know how many there are."""


@jax_funcify.register(MaskedItems)
def funcify_masked_items(op: MaskedItems, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return a function that says what to do instead."""

    def masked_items(*inputs: Any) -> Any:
        raise UnknownLengthError(
            f"JAX does not know when it compiles how many items a mask selects. {MASKED}"
        )

    return masked_items


def replace_masks(fgraph: FunctionGraph) -> None:
    """Have masks make choices where they can, and errors elsewhere."""
    for node in fgraph.toposort():
        chosen = _summed(node) if isinstance(node.op, CAReduce) else _chosen(node)
        if chosen is not None:
            out = node.outputs[0]
            fgraph.replace(out, out.type.filter_variable(chosen), reason=REASON)
    for node in fgraph.toposort():
        places = isinstance(node.op, Nonzero) and not isinstance(node.inputs[0], Constant)
        if places or any(_is_mask(part) for part in _index(node)):
            new = MaskedItems(node.op).make_node(*node.inputs).outputs
            fgraph.replace_all(list(zip(node.outputs, new, strict=True)), reason=REASON)


def _is_mask(part: Any) -> bool:
    if not isinstance(part, Variable) or isinstance(part, Constant):
        return False
    return isinstance(part.type, TensorType) and part.type.dtype == "bool"


def _index(node: Apply) -> Sequence[Any]:
    """Return what a node reads or writes an array at, if that may be a mask."""
    has_index, lead = isinstance(node.op, READS + WRITES), 2 if isinstance(node.op, WRITES) else 1
    return indices_from_subtensor(node.inputs[lead:], node.op.idx_list) if has_index else ()


def _replaces(node: Apply) -> bool:
    """Whether a node writes values in place of those of an array, and does not add them."""
    return bool(getattr(node.op, "set_instead_of_inc", False))


def _fitting(array: Variable, axis: int, mask: Variable) -> Variable:
    """Return an array that has the sizes of a mask; an error says so when JAX compiles."""
    sizes: list[Any] = [None] * array.type.ndim
    for k in range(mask.type.ndim):
        if array.type.shape[axis + k] is None or mask.type.shape[k] is None:
            sizes[axis + k] = Shape_i(k)(mask)
    return array if sizes == [None] * len(sizes) else pt.specify_shape(array, sizes)


def _chosen(node: Apply) -> Variable | None:
    """Return what a node writes as a choice for each item of the array, None if it is none."""
    index = _index(node)
    if not isinstance(node.op, WRITES) or len(index) != 1 or not _is_mask(index[0]):
        return None
    array, values = node.inputs[:2]
    (mask,) = index
    rows = array.type.ndim - mask.type.ndim
    new = _for_all(values, mask, rows)
    if new is None:
        return None
    array = _fitting(array, 0, mask)
    new = new if _replaces(node) else array + new
    return pt.switch(_of_rows(mask, rows), new.astype(array.type.dtype), array)


def _of_rows(mask: Variable, rows: int) -> Variable:
    """Return a mask with axes of length one behind its own."""
    return mask.dimshuffle(*range(mask.type.ndim), *["x"] * rows)


def _summed(node: Apply) -> Variable | None:
    """Return a sum over items that a mask selects as one over all items, None if it is none."""
    (values,), axes = node.inputs, node.op.axis
    mask = _mask_of(values) if isinstance(node.op.scalar_op, Add) else None
    if mask is None or mask.type.ndim > 1 or not (axes is None or 0 in axes):
        return None
    rows = values.type.ndim - 1
    new = _for_all(values, mask, rows)
    return None if new is None else node.op(pt.switch(_of_rows(mask, rows), new, 0))


def _mask_of(values: Variable) -> Variable | None:
    """Return the mask that selects what values are computed from."""
    node = values.owner
    if node is None:
        return None
    if isinstance(node.op, READS):
        index = _index(node)
        return index[0] if len(index) == 1 and _is_mask(index[0]) else None
    if not isinstance(node.op, Elemwise | DimShuffle):
        return None
    masks = map(_mask_of, node.inputs)
    return next((mask for mask in masks if mask is not None), None)


def _for_all(values: Variable, mask: Variable, rows: int) -> Variable | None:
    """Return values at the items that a mask selects as values at all items, None if they are not
    known there; `rows` is the number of axes behind those of the mask."""
    if values.type.ndim <= rows:
        return values
    if values.type.ndim > rows + 1:
        return None
    if values.type.broadcastable[0]:
        return values.dimshuffle(*range(1, rows + 1))
    node = values.owner
    if node is None:
        return None
    if isinstance(node.op, READS):
        index = _index(node)
        if len(index) != 1 or index[0] is not mask:
            return None
        return _fitting(node.inputs[0], 0, mask)
    if isinstance(node.op, Alloc):
        return _for_all(node.inputs[0], mask, rows)
    if mask.type.ndim == 1 and _keeps_items(node):
        new = _for_all(node.inputs[0], mask, node.inputs[0].type.ndim - 1)
        return None if new is None else node.op(new)
    if isinstance(node.op, Elemwise) and len(node.outputs) == 1:
        operands = [_for_all(operand, mask, rows) for operand in node.inputs]
        return None if None in operands else node.op.make_node(*operands).outputs[0]
    return None


def _keeps_items(node: Apply) -> bool:
    """Whether a node works on each item, the first axis, alone."""
    if isinstance(node.op, DimShuffle):
        return node.op.new_order[0] == 0
    return isinstance(node.op, CAReduce) and node.op.axis is not None and 0 not in node.op.axis
