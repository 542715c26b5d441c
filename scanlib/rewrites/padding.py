"""The gradient of a loop's sequence: rows in an array of zeros that is nearly always full."""

from __future__ import annotations

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.scan import Scan


@node_rewriter([IncSubtensor])
def pad_rows_of_loops(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Turn ``zeros[:n] += rows`` into a `PaddedRows`, where rows come from a loop.

    They are its results, or elementwise functions of them, as the outer products are that a matrix
    of each step gets.
    """
    zeros, rows = node.inputs[:2]
    index = node.op.idx_list
    if len(index) != 1 or not isinstance(index[0], slice):
        return None
    if index[0].start is not None or index[0].step is not None or index[0].stop is None:
        return None
    if not is_of_loop(rows):
        return None
    length = _length_of_zeros(zeros)
    if length is None or rows.type.dtype != zeros.type.dtype:
        return None
    # A single row may be written to many places.
    if rows.type.broadcastable != (False, *zeros.type.broadcastable[1:]):
        return None
    new = PaddedRows()(rows, length)
    return [new] if node.outputs[0].type.is_super(new.type) else None


def is_of_loop(variable: Variable) -> bool:
    """Whether a loop computes a variable, or elementwise operations on parts of its results."""
    node = variable.owner
    if node is None:
        return False
    if isinstance(node.op, Elemwise | DimShuffle | Subtensor):
        return any(is_of_loop(inp) for inp in node.inputs)
    return isinstance(node.op, Scan | ElemwiseScan | LinearScan)


def _length_of_zeros(variable: Variable) -> Variable | None:
    """Return the length of an array of zeros, None if it is no such array."""
    alloc = variable.owner
    if alloc is None or not isinstance(alloc.op, Alloc) or len(alloc.inputs) < 2:
        return None
    value = alloc.inputs[0]
    if not isinstance(value, Constant) or np.any(np.asarray(value.data) != 0):
        return None
    return alloc.inputs[1]
