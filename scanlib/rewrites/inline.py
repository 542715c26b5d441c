"""Graphs in the place of nodes that hold them.

The derivative of PyTensor's own composite functions (of a diagonal matrix, say) is an
`OpFromGraph`. Some releases compile it as a function of its own, whose nodes know no more than that
they have inputs: the two of a diagonal matrix take longer than many a loop. Written out, they are
simplified with everything around them, and in a step they hide nothing from the analysis. So do
batches of composite functions in a step, for each of which there is a `Blockwise` of such a graph.

Lengths in a batch, which are the same for all of it.

`vectorize_graph` makes an array of a length, ``x.shape[0]``: the same number for each member of the
batch. A slice by it is then a `Blockwise` slice, whose length nothing knows any more. Where a loop
has several sequences they are all cut to the shortest, so batches are full of these. The one number
is found again (`scanlib.lengths.batches`), and the slice is that of all members at once.
"""

import numpy as np
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.graph.traversal import ancestors
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import AllocDiag
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise

from scanlib._compat import inline_ofg_node
from scanlib.lengths.batches import whole_batch
from scanlib.ops.batching import batch_of
from scanlib.ops.composites import COMPOSITES, written_out
from scanlib.ops.graph import applies
from scanlib.ops.logaddexp import derivative_of_logs, logs_of_batch


@node_rewriter([OpFromGraph])
def write_out(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Put the graph of a node in its place; subclasses are Ops that other rewrites know."""
    if type(node.op) is not OpFromGraph or node.op.destroy_map:
        return None
    pairs = zip(node.outputs, node.op.fgraph.outputs, strict=True)
    read = [inner for out, inner in pairs if fgraph.clients[out]]
    if any(_computes(inner.owner) for inner in ancestors(read) if inner.owner is not None):
        return None
    return list(inline_ofg_node(node))


@node_rewriter([*COMPOSITES, Blockwise, OpFromGraph])
def write_out_in_step(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Put others in the place of graphs, and of Ops that only adopted loops hold, in a step.

    Derivatives of logarithms of sums stay: they are recognized, and written by their results.
    """
    if type(node.op) is not OpFromGraph:
        return written_out(node)
    if node.op.destroy_map or derivative_of_logs(node) is not None:
        return None
    return list(inline_ofg_node(node))


def _computes(node: Apply) -> bool:
    """Whether a node makes other numbers than it is given; places of numbers are integers."""
    if not isinstance(node.op, Elemwise) or applies(node, ps.Second):
        return False
    return np.dtype(node.outputs[0].type.dtype).kind in "fc"


@node_rewriter([Blockwise])
def write_out_batch(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Put the graph of an Op in the place of a batch of it, as that of all members.

    Batches of diagonal matrices have a kernel; logarithms of sums keep the form that is recognized.
    """
    op = node.op.core_op
    if not isinstance(op, OpFromGraph) or isinstance(op, AllocDiag) or not node.op.batch_ndim(node):
        return None
    if logs := logs_of_batch(node):
        return logs
    return batch_of(node, inline_ofg_node)


@node_rewriter([Blockwise])
def slice_whole_batch(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Slice, or write into slices of, all members of a batch at once, where bounds are equal."""
    return whole_batch(node)


write_out_graphs = dfs_rewriter(write_out_in_step, write_out_batch, slice_whole_batch)
