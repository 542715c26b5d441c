"""Cheaper to compile: what feeds a loop, written so that numba needs less time for it."""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import DimShuffle

from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.initial import AsRow, Filled
from scanlib.ops.scan import Scan


def _feeds_only_loops(fgraph: FunctionGraph, variable: Variable) -> bool:
    clients = fgraph.clients.get(variable, ())
    loops = Scan | ElemwiseScan
    return bool(clients) and all(isinstance(client.op, loops) for client, _ in clients)


@node_rewriter([Alloc])
def fill_before_loops(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Turn an `Alloc` of one number that only loops read into a `Filled`."""
    value, *sizes = node.inputs
    out = node.outputs[0]
    if not sizes or not _feeds_only_loops(fgraph, out):
        return None
    if value.type.ndim:
        if not isinstance(value, Constant) or np.asarray(value.data).size != 1:
            return None
        value = pt.constant(np.asarray(value.data).reshape(()), dtype=value.type.dtype)
    return [Filled(out.type.shape)(value, *sizes)]


@node_rewriter([DimShuffle])
def row_before_loops(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Turn an ``expand_dims(value, 0)`` that only loops read into an `AsRow`."""
    value = node.inputs[0]
    if node.op.new_order != ("x", *range(value.type.ndim)):
        return None
    return [AsRow()(value)] if _feeds_only_loops(fgraph, node.outputs[0]) else None


prepare_inputs = dfs_rewriter(fill_before_loops, row_before_loops)
