"""Products around loops in numba mode, in one node that one kernel computes."""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.math import Dot

from scanlib._compat import features
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.linker_features import CompilesStepProducts
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.scan import Scan
from scanlib.ops.step_products import StepProducts

FLOATS = ("float32", "float64")


class AllowStepProducts(LoopRewrite):
    """Let later rewrites write the products of all steps as one `StepProducts`."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        fgraph.attach_feature(CompilesStepProducts(_has_loops(fgraph)))


def _has_loops(fgraph: FunctionGraph) -> bool:
    """Whether a graph has loops; others are left as PyTensor compiles them."""
    loops = Scan | ElemwiseScan | LinearScan
    return any(isinstance(node.op, loops) for node in fgraph.apply_nodes)


def _had_loops(fgraph: FunctionGraph) -> bool:
    """Whether a graph in numba mode had loops before they were taken apart."""
    return any(mark.has_loops for mark in features(fgraph, CompilesStepProducts))


@node_rewriter([BatchedDot])
def products_of_loops(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Turn a `BatchedDot` in a graph with loops into `StepProducts`."""
    left, right = node.inputs
    same = left.type.dtype == right.type.dtype == node.outputs[0].type.dtype
    if not same or left.type.dtype not in FLOATS or not _has_loops(fgraph):
        return None
    return [StepProducts()(left, right)]


@node_rewriter([Dot])
def product_of_loops(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Turn a product of two matrices in a graph with loops into `StepProducts`."""
    left, right = node.inputs
    same = left.type.dtype == right.type.dtype == node.outputs[0].type.dtype
    if not same or left.type.dtype not in FLOATS or not _has_loops(fgraph):
        return None
    return [StepProducts()(left, right)] if left.type.ndim == right.type.ndim == 2 else None


@node_rewriter([Dot, BatchedDot, Blockwise])
def integer_products_of_loops(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Turn a product of integers, also one that was in a loop before, into `StepProducts`.

    PyTensor's compiled functions compute it in floating point.
    """
    (out,) = node.outputs[:1]
    op = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    if not isinstance(op, Dot | BatchedDot) or np.dtype(out.type.dtype).kind not in "iu":
        return None
    if not _had_loops(fgraph):
        return None
    left, right = (pt.cast(inp, out.type.dtype) for inp in node.inputs)
    if not isinstance(node.op, Blockwise):
        return [StepProducts()(left, right)]
    lead = pt.broadcast_shape(left.shape[:-2], right.shape[:-2], arrays_are_shapes=True)
    left, right = (
        pt.broadcast_to(side, (*lead, *side.shape[-2:])).reshape((pt.prod(lead), *side.shape[-2:]))
        for side in (left, right)
    )
    product = StepProducts()(left, right).reshape((*lead, left.shape[-2], right.shape[-1]))
    return [pt.specify_shape(product, out.type.shape)]


PREPARATIONS = (products_of_loops, product_of_loops, integer_products_of_loops)
