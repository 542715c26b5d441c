"""Cheaper to compile: what feeds a loop or reads it, so that numba needs less time for it."""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.basic import Alloc
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot, Sum
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.special import Softmax
from pytensor.tensor.subtensor import Subtensor

from scanlib._compat import features
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.initial import AsRow, Filled
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.linker_features import CompilesStepProducts
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.reductions import AxesSum, SpecifiedSizes, StepProducts
from scanlib.ops.scan import Scan
from scanlib.ops.softmax import AxesSoftmax

FLOATS = ("float32", "float64")


class AllowStepProducts(LoopRewrite):
    """Let later rewrites write the products of all steps as one `StepProducts`."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        fgraph.attach_feature(CompilesStepProducts(_has_loops(fgraph)))


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


def _has_loops(fgraph: FunctionGraph) -> bool:
    """Whether a graph has loops; others are left as PyTensor compiles them."""
    loops = Scan | ElemwiseScan | LinearScan
    return any(isinstance(node.op, loops) for node in fgraph.apply_nodes)


def _had_loops(fgraph: FunctionGraph) -> bool:
    """Whether a graph in numba mode had loops before they were taken apart."""
    return any(mark.has_loops for mark in features(fgraph, CompilesStepProducts))


def _is_contiguous(variable: Variable) -> bool:
    """Whether an array surely has its items in the order of its axes, without gaps."""
    node = variable.owner
    while node is not None and (
        isinstance(node.op, Reshape | SpecifyShape)
        or (isinstance(node.op, Subtensor) and len(node.op.idx_list) == 1)
    ):
        node = node.inputs[0].owner
    return node is not None and isinstance(node.op, Scan | ElemwiseScan | LinearScan | Elemwise)


@node_rewriter([Sum])
def sum_of_loops(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Turn a `Sum` of what a loop computes into an `AxesSum`."""
    (x,), (out,) = node.inputs, node.outputs
    if not x.type.ndim or not _is_contiguous(x):
        return None
    acc_dtype = node.op.acc_dtype or out.type.dtype
    dtypes = {x.type.dtype, acc_dtype, out.type.dtype}
    if not dtypes <= set(FLOATS) or not _has_loops(fgraph):
        return None
    axes = range(x.type.ndim) if node.op.axis is None else node.op.axis
    axes = tuple(sorted(axis % x.type.ndim for axis in axes))
    if not axes:
        return None
    return [AxesSum(axes, out.type.dtype, acc_dtype)(x)]


@node_rewriter([Softmax])
def softmax_of_loops(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Turn a `Softmax` in a graph with loops into an `AxesSoftmax`."""
    (x,) = node.inputs
    if not x.type.ndim or x.type.dtype not in FLOATS or not _has_loops(fgraph):
        return None
    axes = range(x.type.ndim) if node.op.axis is None else node.op.axis
    return [AxesSoftmax(tuple(sorted(axis % x.type.ndim for axis in axes)))(x)]


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


@node_rewriter([SpecifyShape])
def sizes_of_loops(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Turn a `SpecifyShape` of known sizes in a graph with loops into `SpecifiedSizes`."""
    x, *sizes = node.inputs
    known = [size.data if isinstance(size, Constant) else size for size in sizes]
    if any(isinstance(size, Variable) for size in known) or not _has_loops(fgraph):
        return None
    return [SpecifiedSizes(tuple(None if n is None else int(n) for n in known))(x)]


PREPARATIONS = (
    fill_before_loops,
    row_before_loops,
    sum_of_loops,
    softmax_of_loops,
    products_of_loops,
    product_of_loops,
    integer_products_of_loops,
    sizes_of_loops,
)
