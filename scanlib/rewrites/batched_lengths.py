"""Lengths in a batch, which are the same for all of it.

`vectorize_graph` makes an array of a length, ``x.shape[0]``: the same number for each member of the
batch. A slice by it is then a `Blockwise` slice, whose length nothing knows any more. Where a loop
has several sequences they are all cut to the shortest, so batches are full of these. Here the one
number is found again, and the slice is that of all members at once.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.features import ReplaceValidate
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import _vectorize_node
from pytensor.graph.rewriting.basic import GraphRewriter, dfs_rewriter, node_rewriter
from pytensor.tensor.basic import Alloc
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib.ops.graph import constant_integer
from scanlib.ops.scan import Scan

SIZED = Alloc | IncSubtensor | Subtensor


def common_number(variable: Variable) -> Variable | None:
    """Return the number that all items of an array are, None if that is not known."""
    if variable.type.ndim == 0:
        return variable
    if isinstance(variable, Constant):
        items = variable.data.reshape(-1)
        same = items.size and (items == items[0]).all()
        return pt.constant(items[0], dtype=variable.type.dtype) if same else None
    node = variable.owner
    if node is None:
        return None
    if isinstance(node.op, DimShuffle | Alloc):
        return common_number(node.inputs[0])
    if isinstance(node.op, Subtensor):
        return _item_of_all(node)
    if isinstance(node.op, Elemwise) and len(node.outputs) == 1:
        numbers = [common_number(inp) for inp in node.inputs]
        if None not in numbers:
            return Elemwise(node.op.scalar_op)(*numbers)
    return None


def _item_of_all(node: Apply) -> Variable | None:
    """Return item `k` of a vector that was repeated for a batch: ``vectors[..., k]``."""
    *batch, item = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
    repeated, place = node.inputs[0], None if isinstance(item, slice) else constant_integer(item)
    if place is None or len(batch) + 1 < repeated.type.ndim:
        return None
    if any(index != slice(None) for index in batch):
        return None
    source = repeated.owner
    if source is None or not isinstance(source.op, Alloc) or source.inputs[0].type.ndim != 1:
        return None
    return source.inputs[0][place]


@node_rewriter([Blockwise])
def slice_whole_batch(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Slice, or write into slices of, all members of a batch at once, where bounds are equal."""
    op = node.op
    rank = op.batch_ndim(node)
    if not rank or not isinstance(op.core_op, SIZED):
        return None
    first = 2 if isinstance(op.core_op, IncSubtensor) else 1  # of the sizes and bounds
    inputs, found = [], False
    for k, (value, core) in enumerate(zip(node.inputs, op.inputs_sig, strict=True)):
        alone = value.type.broadcastable[:rank]
        if all(alone):
            value = value.squeeze(tuple(range(rank)))
        elif k >= first and not core:
            number = common_number(value)
            if number is None:
                return None
            value, found = number, True
        inputs.append(value)
    if not found:
        return None
    (new,) = _outputs(_vectorize_node(op.core_op, op._create_dummy_core_node(node.inputs), *inputs))
    (old,) = node.outputs
    if new.type.ndim < old.type.ndim:
        sizes = [_size(node, axis, rank) for axis in range(rank)]
        new = pt.broadcast_to(new, [*sizes, *new.shape])
    return [old.type.filter_variable(new)]


def _outputs(made: Apply | list[Variable]) -> list[Variable]:
    return made.outputs if isinstance(made, Apply) else made


def _size(node: Apply, axis: int, rank: int) -> Variable:
    """Return the size of a batch along one of its axes."""
    wide = (inp for inp in node.inputs if not inp.type.broadcastable[axis])
    return next((inp.shape[axis] for inp in wide), pt.constant(1, dtype="int64"))


_slice_whole_batches = dfs_rewriter(slice_whole_batch)


class SliceWholeBatches(GraphRewriter):
    """The same everywhere in a graph that has loops."""

    def add_requirements(self, fgraph: FunctionGraph) -> None:
        fgraph.attach_feature(ReplaceValidate())

    def apply(self, fgraph: FunctionGraph) -> None:
        if any(isinstance(node.op, Scan) for node in fgraph.apply_nodes):
            _slice_whole_batches.rewrite(fgraph)
