"""Stacks of a few arrays that a step reduces: ``max(stack([a, b]), axis=0)`` is ``maximum(a, b)``.

A recurrence that is written so is elementwise, and is recognized without the stack; so is the
autoregression ``phi @ stack([y1, y2])``. Elementwise operations may stand in between, as in a
logarithm of a sum of exponentials.
"""

from dataclasses import dataclass
from functools import reduce

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.tensor.basic import Join, MakeVector, Split
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import All, Any, Dot, Max, Min, Prod, Sum
from pytensor.tensor.shape import Shape
from pytensor.tensor.special import Softmax
from pytensor.tensor.subtensor import Subtensor

from scanlib._compat import LOG_SUM_EXP, join_of, split_of
from scanlib.lengths.numbers import constant_place
from scanlib.ops.logaddexp import logaddexp

MOST_ARRAYS, MOST_OPERATIONS = 8, 8  # of a stack, and between it and what it is reduced by


@node_rewriter([Sum, Prod, Max, Min, All, Any])
def reduce_stacked(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Reduce what is stacked, array by array."""
    op, (stacked,), (out,) = node.op, node.inputs, node.outputs
    axes = range(stacked.type.ndim) if op.axis is None else op.axis
    arrays = _arrays(stacked, axes[0]) if len(axes) == 1 else []
    if not arrays:
        return None
    dtype = getattr(op, "acc_dtype", None) or out.type.dtype
    terms = [pt.cast(array, dtype) for array in arrays]
    return [pt.cast(reduce(Elemwise(op.scalar_op), terms), out.type.dtype)]


@node_rewriter([Dot])
def multiply_stacked(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Multiply a vector and a stack, array by array, as steps of autoregressions do."""
    left, right = node.inputs
    rows = left if left.type.ndim == 2 else left[None]
    columns = right if right.type.ndim == 2 else right[:, None]
    is_column = columns.type.shape[1] == 1
    arrays, axis = [], 0
    if rows.type.shape[0] == 1 and (is_column or _arrays(columns, 0)):
        arrays = _arrays(rows.T * columns, axis)
    elif is_column and _arrays(rows, 1):
        arrays, axis = _arrays(rows * columns.T, 1), 1
    if not arrays:
        return None
    found = pt.expand_dims(reduce(pt.add, arrays), axis)
    for place, side in ((1, right), (0, left)):
        if side.type.ndim == 1:
            found = found.squeeze(place)
    return [found]


@node_rewriter([LOG_SUM_EXP or Sum])
def add_stacked_logs(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Do the same to logarithms of sums where they are an Op."""
    if type(node.op) is not LOG_SUM_EXP or len(node.op.axis) != 1:
        return None
    arrays = _arrays(node.inputs[0], node.op.axis[0])
    return [reduce(pt.logaddexp, arrays)] if arrays else None


@node_rewriter([Subtensor])
def item_of_stack(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Take one array of a stack, on which elementwise operations may have been done."""
    stacked, index = node.inputs[0], constant_place(node)
    if index is None or len(index) != 1 or not isinstance(index[0], int):
        return None
    node, count = stacked.owner, stacked.type.shape[0]
    if node is not None and isinstance(node.op, Shape):  # which an item of is one size
        return None
    arrays = _arrays(stacked, 0)
    if not arrays and node is not None and isinstance(node.op, Elemwise) and count is not None:
        arrays = _elementwise(node, 0, count, {})
    return [arrays[index[0]]] if -len(arrays) <= index[0] < len(arrays) else None


@node_rewriter([Split])
def unstack(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Take a stack apart again, as derivatives do."""
    whole, axis, sizes = split_of(node)
    if axis is None or not isinstance(sizes, Constant) or not np.all(sizes.data == 1):
        return None
    arrays = _arrays(whole, axis)
    return [pt.expand_dims(array, axis) for array in arrays] or None


@node_rewriter([Shape])
def shape_of_stack(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Say how many arrays a stack has, by which a mean divides."""
    (stacked,), owner = node.inputs, node.inputs[0].owner
    if owner is None or not isinstance(owner.op, MakeVector | Join):
        return None
    axis, parts = join_of(owner) if isinstance(owner.op, Join) else (0, owner.inputs)
    if axis is None or not _arrays(stacked, axis):
        return None
    sizes = [len(parts) if k == axis else parts[0].shape[k] for k in range(stacked.type.ndim)]
    return [pt.cast(pt.stack(sizes), "int64")]


_stacks = dfs_rewriter(
    reduce_stacked, multiply_stacked, add_stacked_logs, item_of_stack, unstack, shape_of_stack
)


def without_stacks(body: FunctionGraph) -> bool:
    """Rewrite what a step does to stacks of few arrays; return whether there were any."""
    if not any(isinstance(node.op, Join | MakeVector | Shape) for node in body.apply_nodes):
        return False
    before = set(body.apply_nodes)
    _stacks.rewrite(body)
    return body.apply_nodes != before


def _arrays(stacked: Variable, axis: int) -> list[Variable]:
    """Return the arrays that a stack has along an axis, without it; none if they are not known."""
    return _Unstacking({})(stacked, axis, MOST_OPERATIONS)


@dataclass(frozen=True)
class _Unstacking:
    """Looks for the arrays of a stack; `found` are those along an axis of a variable."""

    found: dict[tuple[Variable, int], list[Variable]]

    def __call__(self, stacked: Variable, axis: int, most: int) -> list[Variable]:
        """Return the arrays, no more than so many operations above a stack."""
        if most == 0 or stacked.owner is None:
            return []
        if (stacked, axis) not in self.found:
            self.found[stacked, axis] = self.of_node(stacked.owner, axis, most)
        return self.found[stacked, axis]

    def of_node(self, node: Apply, axis: int, most: int) -> list[Variable]:
        dtype = node.outputs[0].type.dtype
        if isinstance(node.op, MakeVector):
            arrays = [pt.cast(number, dtype) for number in node.inputs]
            return arrays if len(arrays) <= MOST_ARRAYS else []
        if isinstance(node.op, Join):
            joined, arrays = join_of(node)
            patterns = {array.type.broadcastable for array in arrays}
            if joined != axis or len(arrays) > MOST_ARRAYS or len(patterns) > 1:
                return []
            is_stack = arrays[0].type.broadcastable[axis]
            return [pt.cast(array.squeeze(axis), dtype) for array in arrays] if is_stack else []
        if isinstance(node.op, Shape):
            return [node.outputs[0][k] for k in range(node.inputs[0].type.ndim)]
        if isinstance(node.op, DimShuffle):
            return self.of_turned(node, axis, most)
        if isinstance(node.op, Softmax) and node.op.axis == (axis,):  # of gradients
            arrays = self(node.inputs[0], axis, most - 1)
            whole = reduce(logaddexp, arrays) if arrays else None
            return [pt.exp(array - whole) for array in arrays]
        if not isinstance(node.op, Elemwise) or len(node.outputs) > 1:
            return []
        known = {inp: self(inp, axis, most - 1) for inp in node.inputs}
        counts = {len(arrays) for arrays in known.values() if arrays} or _few_integers(node)
        return _elementwise(node, axis, counts.pop(), known) if len(counts) == 1 else []

    def of_turned(self, node: Apply, axis: int, most: int) -> list[Variable]:
        """Return the arrays of a stack whose axes change places, or get others beside them."""
        place, order = node.op.new_order[axis], list(node.op.new_order)
        if place == "x":
            return []
        del order[axis]
        rest = [other if other == "x" or other < place else other - 1 for other in order]
        return [array.dimshuffle(rest) for array in self(node.inputs[0], place, most - 1)]


def _few_integers(node: Apply) -> set[int]:
    """Return the length of what a node makes of vectors of few integers, as sizes are."""
    kinds = {np.dtype(inp.type.dtype).kind for inp in node.inputs}
    shape = node.outputs[0].type.shape
    is_vector = len(shape) == 1 and kinds <= {"i", "u"}
    return {size for size in shape if is_vector and size is not None and size <= MOST_ARRAYS}


def _elementwise(
    node: Apply, axis: int, count: int, known: dict[Variable, list[Variable]]
) -> list[Variable]:
    """Return so many arrays that a node makes along an axis, of those that inputs have; none where
    the number of an input's is not known."""
    columns = [known.get(inp) or _items(inp, axis, count) for inp in node.inputs]
    return [node.op(*row) for row in zip(*columns, strict=True)] if all(columns) else []


def _items(variable: Variable, axis: int, count: int) -> list[Variable]:
    """Return so many items along an axis, or the one that is repeated; none if their number is not
    known, which would have to be checked."""
    if variable.type.shape[axis] == 1:
        return [variable.squeeze(axis)] * count
    if variable.type.shape[axis] != count:
        return []
    return [variable[(slice(None),) * axis + (k,)] for k in range(count)]
