"""Lengths in a batch, which are the same for all of it.

`vectorize_graph` makes an array of a length, ``x.shape[0]``: the same number for each member of the
batch. A slice by it is then a `Blockwise` slice, whose length nothing knows any more. Where a loop
has several sequences they are all cut to the shortest, so batches are full of these. The one number
is found again (`scanlib.lengths.batches`), and the slice is that of all members at once.
"""

from __future__ import annotations

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.blockwise import Blockwise

from scanlib.lengths.batches import whole_batch


@node_rewriter([Blockwise])
def slice_whole_batch(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Slice, or write into slices of, all members of a batch at once, where bounds are equal."""
    new = whole_batch(node.outputs[0])
    return None if new is None else [new]
