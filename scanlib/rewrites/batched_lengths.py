"""Lengths in a batch, which are the same for all of it.

`vectorize_graph` makes an array of a length, ``x.shape[0]``: the same number for each member of the
batch. A slice by it is then a `Blockwise` slice, whose length nothing knows any more. Where a loop
has several sequences they are all cut to the shortest, so batches are full of these. The one number
is found again (`scanlib.ops.common_steps`), and the slice is that of all members at once.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.features import ReplaceValidate
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import _vectorize_node
from pytensor.graph.rewriting.basic import GraphRewriter, dfs_rewriter, node_rewriter
from pytensor.tensor.basic import Alloc
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib.ops.common_steps import common
from scanlib.ops.scan import Scan

SIZED = Alloc | IncSubtensor | Subtensor


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
            number = common(value, value.type.ndim)
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
