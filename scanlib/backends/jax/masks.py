"""Items that a mask selects: arrays of truth values as an index.

How many items there are, only the mask knows when it is there. What is written to them needs no
such number, if it can be computed for all items at once and is used for some::

    x[mask] = f(y[mask], z)        where(mask, f(y, z), x)

Everything else reads and writes at the places of the items, arrays of unknown length whose room is
the size of the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.scalar.basic import Add
from pytensor.tensor.basic import Alloc, Nonzero
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import inc_subtensor, indices_from_subtensor, set_subtensor
from pytensor.tensor.type import TensorType

from scanlib._compat import INDEX_READS, INDEX_WRITES
from scanlib.backends.jax.bounded import SELECTED, Bounded

READS, WRITES = INDEX_READS[1:], INDEX_WRITES[1:]
REASON = "scanlib_masks"


class MaskPlaces(Op):
    """The places where a mask is true, as arrays of unknown length: one for each of its axes."""

    __props__ = ()

    def make_node(self, mask: Variable) -> Apply:
        places = TensorType("int64", shape=(None,))
        return Apply(self, [mask], [places() for _ in range(mask.type.ndim)])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        for storage, places in zip(output_storage, np.nonzero(inputs[0]), strict=True):
            storage[0] = places


@jax_funcify.register(MaskPlaces)
def funcify_mask_places(op: MaskPlaces, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function from a mask to places and how many of them count."""
    dtype = jax.dtypes.canonicalize_dtype("int64")

    def mask_places(mask: Any) -> Any:
        chosen = jnp.asarray(mask.filled(False) if isinstance(mask, Bounded) else mask) != 0
        count = chosen.sum(dtype=dtype)
        found = jnp.nonzero(chosen, size=chosen.size, fill_value=0)
        results = [Bounded(places.astype(dtype), count, SELECTED) for places in found]
        return results if len(results) > 1 else results[0]

    return mask_places


def replace_masks(fgraph: FunctionGraph) -> None:
    """Have masks make choices where they can, and say places elsewhere."""
    places: dict[Variable, Sequence[Variable]] = {}

    def places_of(mask: Variable) -> Sequence[Variable]:
        if mask not in places:
            places[mask] = MaskPlaces().make_node(mask).outputs
        return places[mask]

    for node in fgraph.toposort():
        if isinstance(node.op, Nonzero):
            if not isinstance(node.inputs[0], Constant):
                pairs = zip(node.outputs, places_of(node.inputs[0]), strict=True)
                fgraph.replace_all(list(pairs), reason=REASON)
        elif any(_is_mask(part) for part in _index(node)):
            chosen = _chosen(node)
            new = _at_places(node, places_of) if chosen is None else chosen
            out = node.outputs[0]
            fgraph.replace(out, out.type.filter_variable(new), reason=REASON)
    for mask, (first, *_) in places.items():
        for client, _ in list(fgraph.clients.get(mask, ())):
            if _counts(client):
                (out,) = client.outputs
                count = Shape_i(0)(first).astype(out.type.dtype)
                fgraph.replace(out, count, reason=REASON)


def _counts(node: Apply) -> bool:
    """Whether a node adds all items of an array, as where PyTensor asks how many a mask selects."""
    op = node.op
    return isinstance(op, CAReduce) and isinstance(op.scalar_op, Add) and not node.out.type.ndim


def _is_mask(part: Any) -> bool:
    if not isinstance(part, Variable) or isinstance(part, Constant):
        return False
    return isinstance(part.type, TensorType) and part.type.dtype == "bool"


def _index(node: Apply) -> Sequence[Any]:
    """Return what a node reads or writes an array at, if that may be a mask."""
    has_index, lead = isinstance(node.op, READS + WRITES), 2 if isinstance(node.op, WRITES) else 1
    return indices_from_subtensor(node.inputs[lead:], node.op.idx_list) if has_index else ()


def _at_places(node: Apply, places_of: Callable[[Variable], Sequence[Variable]]) -> Variable:
    """Return the result of a node with the places of masks in its index."""
    array, axis = node.inputs[0], 0
    index: list[Any] = []
    for part in _index(node):
        if _is_mask(part):
            array = _fitting(array, axis, part)
            index += places_of(part)
            axis += part.type.ndim
        else:
            index.append(part)
            axis += 1
    target = array[tuple(index)]
    if isinstance(node.op, READS):
        return target
    write = set_subtensor if _replaces(node) else inc_subtensor
    return write(target, node.inputs[1])


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
    if not isinstance(node.op, WRITES) or len(index) != 1:
        return None
    array, values = node.inputs[:2]
    (mask,) = index
    rows = array.type.ndim - mask.type.ndim
    new = _for_all(values, mask, rows)
    if new is None:
        return None
    array = _fitting(array, 0, mask)
    new = new if _replaces(node) else array + new
    chosen = mask.dimshuffle(*range(mask.type.ndim), *["x"] * rows)
    return pt.switch(chosen, new.astype(array.type.dtype), array)


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
    if isinstance(node.op, Elemwise) and len(node.outputs) == 1:
        operands = [_for_all(operand, mask, rows) for operand in node.inputs]
        return None if None in operands else node.op.make_node(*operands).outputs[0]
    return None
