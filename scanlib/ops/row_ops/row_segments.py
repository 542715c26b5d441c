"""Rows cut into segments, and put together again.

With `n` segments of `s` rows each, ``SplitRows(x, n, s)[j, i] = x[j s + i]``, a view of shape
(n, s, …) of the first ``n s`` rows; `MergeRows` is its inverse.

They are no reshapes of PyTensor's. The inferred shape of one compares each size with -1, and where
segments are nested (`Memory`) all that arithmetic is fused with the numbers of steps, to more
operands than an elementwise function of NumPy's takes.
"""

from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import TensorType

from scanlib._compat import vectorize_rule
from scanlib.lengths.batches import common
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.graph import Variables
from scanlib.ops.row_ops.linear_op import LinearOp

FEW_ROWS = "a sequence has {} rows, but the loop takes {} steps or more"


class SplitRows(LinearOp):
    """The first ``count * length`` rows of an array, cut into segments: a view."""

    __props__ = ()
    view_map = {0: [0]}  # noqa: RUF012

    def make_node(self, value: Variable, count: Any, length: Any) -> Apply:
        value = pt.as_tensor_variable(value)
        count, length = (pt.cast(pt.as_tensor_variable(n), "int64") for n in (count, length))
        sizes = (constant_integer(count), constant_integer(length), *value.type.shape[1:])
        return Apply(self, [value, count, length], [TensorType(value.type.dtype, shape=sizes)()])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        node, shapes = arguments[-2:]
        return [(node.inputs[1], node.inputs[2], *shapes[0][1:])]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        value, count, length = inputs
        rows = int(count) * int(length)
        if rows > len(value):
            raise SequenceLengthError(FEW_ROWS.format(len(value), rows))
        output_storage[0][0] = value[:rows].reshape((int(count), int(length), *value.shape[1:]))

    def adjoint(self, inputs: Variables, cotangent: Variable) -> Variable:
        value, count, length = inputs
        rows = MergeRows()(cotangent)
        if rows.type.shape[0] is not None and rows.type.shape[0] == value.type.shape[0]:
            return rows
        zeros = pt.zeros_like(value, dtype=cotangent.type.dtype)
        return pt.set_subtensor(zeros[: count * length], rows)


class MergeRows(LinearOp):
    """Segments of rows, one above the other: (n, s, …) becomes (n s, …)."""

    __props__ = ()
    view_map = {0: [0]}  # noqa: RUF012

    def make_node(self, value: Variable) -> Apply:
        value = pt.as_tensor_variable(value)
        count, length, *rest = value.type.shape
        rows = None if count is None or length is None else count * length
        return Apply(self, [value], [TensorType(value.type.dtype, shape=(rows, *rest))()])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        ((count, length, *rest),) = arguments[-1]
        return [(count * length, *rest)]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        (value,) = inputs
        rows = value.shape[0] * value.shape[1]
        output_storage[0][0] = value.reshape((rows, *value.shape[2:]))

    def adjoint(self, inputs: Variables, cotangent: Variable) -> Variable:
        return SplitRows()(cotangent, inputs[0].shape[0], inputs[0].shape[1])


def _common(size: Variable) -> Variable:
    """Return the one size that all members of a batch have."""
    found = common(size, size.type.ndim)
    if found is None:
        raise NotImplementedError(
            "a batch of gradients of a checkpointed loop whose members take different numbers of "
            "steps; leave out `checkpoint`, or take the gradient of the batch"
        )
    return found


@vectorize_rule.register(SplitRows)
def vectorize_rows(
    op: SplitRows, node: Apply, batched: Variable, *sizes: Variable
) -> list[Variable]:
    """Cut a batch of arrays; the batch stands behind time meanwhile."""
    rank = batched.type.ndim - node.inputs[0].type.ndim
    timed = pt.moveaxis(batched, tuple(range(rank)), tuple(range(1, rank + 1)))
    cut = op(timed, *map(_common, sizes))
    return [pt.moveaxis(cut, tuple(range(2, rank + 2)), tuple(range(rank)))]


@vectorize_rule.register(MergeRows)
def vectorize_merged(op: MergeRows, node: Apply, batched: Variable) -> list[Variable]:
    """Put the segments of a batch of arrays together."""
    rank = batched.type.ndim - node.inputs[0].type.ndim
    timed = pt.moveaxis(batched, tuple(range(rank)), tuple(range(2, rank + 2)))
    merged = op(timed)
    return [pt.moveaxis(merged, tuple(range(1, rank + 1)), tuple(range(rank)))]
