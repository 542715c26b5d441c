"""What is the same for all members of a batch: numbers of steps, and the ends of slices.

The length of an array is one number; that of a batch of arrays is, for `vectorize_graph`, a batch
of equal numbers. A loop takes one number of steps for the whole batch. `common` finds the number
that such a batch is made of. `whole_batch` makes one slice, range or shape of those of all members,
where their numbers are the same.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.basic import Alloc, ARange, Eye, Join, Split, join
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Reshape, Shape_i
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.type import integer_dtypes

from scanlib._compat import join_of, vectorize_rule
from scanlib.lengths.numbers import constant_index, indices_of

SIZED = Alloc | ARange | Eye | IncSubtensor | Reshape | Split | Subtensor


def common(variable: Variable, rank: int) -> Variable | None:
    """Return what all members of a batch have in common, None if they may differ; its axes are the
    first `rank` of the variable."""
    if not rank:
        return variable
    is_one = all(variable.type.broadcastable[:rank])
    if is_one and variable.type.dtype not in integer_dtypes:
        return without_axes(variable, rank)
    # Of numbers of steps and sizes not even an axis of one member is left anywhere: where sizes
    # are put side by side, PyTensor takes numbers of two axes for matrices.
    if isinstance(variable, Constant):
        data = np.asarray(variable.data)
        first = data[(0,) * rank] if data.size else None
        return pt.constant(first) if data.size and (data == first).all() else None
    found = _common_result(variable, rank)
    return without_axes(variable, rank) if found is None and is_one else found


def without_axes(variable: Variable, rank: int) -> Variable:
    """Return what `rank` axes of size one stand in front of."""
    node = variable.owner
    if node is not None and isinstance(node.op, DimShuffle):
        order = node.op.new_order
        if order[:rank] == ("x",) * rank:
            return node.inputs[0].dimshuffle(*order[rank:])
    return variable.squeeze(tuple(range(rank)))


def _common_result(variable: Variable, rank: int) -> Variable | None:
    """Return what all members have in common of what a node computes, if that can be told."""
    node = variable.owner
    if node is None:
        return None
    if isinstance(node.op, Alloc):
        return _common_fill(*node.inputs, rank=rank)
    if isinstance(node.op, Blockwise) and isinstance(node.op.core_op, Shape_i):
        return Shape_i(rank + node.op.core_op.i)(*node.inputs)
    found = of_one_member(node, rank, lambda part: common(part, rank))
    return None if found is None else found[node.outputs.index(variable)]


def of_one_member(
    node: Apply, rank: int, part_of: Callable[[Variable], Variable | None]
) -> list[Variable] | None:
    """Return what a node computes for one member of a batch, None if that cannot be told.

    The first `rank` axes of inputs and outputs are those of the batch; `part_of` gives an input of
    one member, None if it is not known.
    """
    op = node.op
    if isinstance(op, Elemwise):
        parts = [part_of(inp) for inp in node.inputs]
        return None if None in parts else Elemwise(op.scalar_op).make_node(*parts).outputs
    if isinstance(op, Join):
        axis, joined = join_of(node)
        if axis is None or axis < rank:
            return None
        parts = [part_of(inp) for inp in joined]
        numbers = [part[0] for part in parts if part is not None and part.type.shape == (1,)]
        if len(numbers) == len(parts):
            return [pt.stack(numbers)]  # which are read one by one
        return None if None in parts else [join(axis - rank, *parts)]
    if isinstance(op, DimShuffle) and op.new_order[:rank] == tuple(range(rank)):
        part = part_of(node.inputs[0])
        order = [axis if axis == "x" else axis - rank for axis in op.new_order[rank:]]
        return None if part is None else [part.dimshuffle(*order)]
    if isinstance(op, Subtensor):
        rest = behind_the_batch(node, rank)
        part = None if rest is None else part_of(node.inputs[0])
        return None if part is None else [part[rest]]
    return None


def behind_the_batch(node: Apply, rank: int) -> tuple[Any, ...] | None:
    """Return the index behind the axes of the batch, None if it does not take those whole."""
    indices = indices_of(node)
    if len(indices) < rank or any(index != slice(None) for index in indices[:rank]):
        return None
    return tuple(indices[rank:])


def _common_fill(value: Variable, *sizes: Variable, rank: int) -> Variable | None:
    """Return what an array is filled with along the axes behind those of the batch."""
    lead = value.type.ndim - (len(sizes) - rank)
    filled = common(value, max(lead, 0))
    return pt.alloc(filled, *sizes[rank:]) if filled is not None and len(sizes) > rank else filled


def whole_batch(node: Apply) -> list[Variable] | None:
    """Return slices, pieces, ranges or shapes of a batch, what it joins, or writes into slices, as
    those of the whole batch.

    `vectorize_graph` makes one for each member of the batch where the ends are a batch of numbers.
    None if the ends may differ, or if this is no batch of such.
    """
    op: Any = node.op
    if not isinstance(op, Blockwise):
        return None
    rank = op.batch_ndim(node)
    if rank and isinstance(op.core_op, SortOp | ArgSortOp) and len(node.inputs) > 1:
        # Releases before 3.3 have no gradient of an order along an axis that is an array.
        along = constant_index(common(node.inputs[1], rank))
        ndim = len(op.inputs_sig[0])
        return (
            None
            if along is None
            else op.core_op.make_node(node.inputs[0], along % ndim - ndim).outputs
        )
    if rank and isinstance(op.core_op, Join) and not op.inputs_sig[0]:
        # Releases before 3.3, whose axis is an input, join each member where a part is one for all.
        along = constant_index(common(node.inputs[0], rank))
        sizes, ndim = _batch_sizes(node), len(op.outputs_sig[0])
        wide = [pt.broadcast_to(v, [*sizes, *list(v.shape)[rank:]]) for v in node.inputs[1:]]
        return along if along is None else with_batch(node, [join(along % ndim + rank, *wide)])
    if not rank or not isinstance(op.core_op, SIZED):
        return None
    # Of the sizes and bounds.
    is_of_sizes = isinstance(op.core_op, ARange | Eye)
    first = 2 if isinstance(op.core_op, IncSubtensor) else int(not is_of_sizes)
    inputs, found = [], isinstance(op.core_op, Subtensor)
    for k, (value, core) in enumerate(zip(node.inputs, op.inputs_sig, strict=True)):
        is_one = all(value.type.broadcastable[:rank])
        if k >= first and (not core or isinstance(op.core_op, Reshape | Split)):
            number = common(value, rank)
            if number is None:
                return None
            # PyTensor makes no ranges where an end is one for all, but other shapes.
            value, found = number, found or not is_one or bool(core)
        elif is_one:
            value = without_axes(value, rank)
        inputs.append(value)
    if not found:
        return None
    made: Any
    if isinstance(op.core_op, Split):
        whole, *axes, lengths = inputs
        axis = constant_index(axes[0]) if axes else op.core_op.axis
        if axis is None:
            return None
        axis = axis % len(op.inputs_sig[0]) - len(op.inputs_sig[0])
        made = pt.split(whole, lengths, n_splits=len(node.outputs), axis=axis + whole.type.ndim)
        made = made if isinstance(made, list) else [made]
    elif is_of_sizes:
        made = op.core_op.make_node(*inputs)
    else:
        made = vectorize_rule(op.core_op, op._create_dummy_core_node(node.inputs), *inputs)
    return with_batch(node, made.outputs if isinstance(made, Apply) else made)


def _batch_sizes(node: Apply) -> list[Variable]:
    """Return the sizes of the axes of a batch."""
    sizes = []
    for axis in range(node.op.batch_ndim(node)):
        wide = (inp.shape[axis] for inp in node.inputs if not inp.type.broadcastable[axis])
        sizes.append(next(wide, pt.constant(1, dtype="int64")))
    return sizes


def with_batch(node: Apply, results: Sequence[Variable]) -> list[Variable]:
    """Return results of a batch with its axes, where one result stands for all members."""
    rank, sizes, found = node.op.batch_ndim(node), _batch_sizes(node), []
    for out, new in zip(node.outputs, results, strict=True):
        given = new.type.broadcastable[: max(new.type.ndim - out.type.ndim + rank, 0)]
        if given != out.type.broadcastable[:rank]:
            core = range(len(given), new.type.ndim)
            new = pt.broadcast_to(new, [*sizes, *(new.shape[axis] for axis in core)])
        found.append(out.type.filter_variable(new))
    return found
