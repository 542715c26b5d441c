"""Rows cut into segments, and rows at the starts of segments.

With `n` segments of `s` rows each:

* ``SplitRows(x, n, s)[j, i] = x[j s + i]``, a view of shape (n, s, …) of the first ``n s`` rows;
* ``MergeRows`` is its inverse, and ``JoinRows`` puts further rows behind;
* ``SegmentStarts(history, n, s)[j, k] = history[j s + k]`` for ``j = 0 … n`` and
  ``k = 0 … K-1``: of a history with `K` initial rows, what each segment starts from, and
  what comes after the last segment;
* ``PlacedStarts`` is its adjoint: rows added into zeros of the shape of the history.

A gradient of a checkpointed loop reads its history through `SegmentStarts` alone. So the
simplify rewrites can tell that the history need not be stored.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.type import TensorType

from scanlib._compat import vectorize_rule
from scanlib.lengths.batches import common
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.derivatives import Variables
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.row_ops.linear_op import LinearOp


def _integer(value: Any) -> Variable:
    return pt.cast(pt.as_tensor_variable(value), "int64")


class SplitRows(LinearOp):
    """The first ``count * length`` rows of an array, cut into segments: a view."""

    __props__ = ()
    view_map = {0: [0]}  # noqa: RUF012

    def make_node(self, value: Variable, count: Any, length: Any) -> Apply:
        value = pt.as_tensor_variable(value)
        count, length = _integer(count), _integer(length)
        sizes = (constant_integer(count), constant_integer(length), *value.type.shape[1:])
        return Apply(self, [value, count, length], [TensorType(value.type.dtype, shape=sizes)()])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        node, shapes = arguments[-2:]
        return [(node.inputs[1], node.inputs[2], *shapes[0][1:])]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        value, count, length = inputs
        rows = int(count) * int(length)
        if rows > len(value):
            raise SequenceLengthError(
                f"a sequence has {len(value)} rows, but the loop takes {rows} steps or more"
            )
        output_storage[0][0] = value[:rows].reshape((int(count), int(length), *value.shape[1:]))

    def adjoint(self, inputs: Variables, cotangent: Variable) -> list[Variable]:
        value, count, length = inputs
        zeros = pt.zeros_like(value[count * length :], dtype=cotangent.type.dtype)
        return [JoinRows()(cotangent, zeros)]


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

    def adjoint(self, inputs: Variables, cotangent: Variable) -> list[Variable]:
        return [SplitRows()(cotangent, inputs[0].shape[0], inputs[0].shape[1])]


class JoinRows(LinearOp):
    """Segments of rows one above the other, then the rows of a tail: (n s + r, …).

    If there are no segments, the sizes of their rows do not count: a loop of no steps need not
    know them.
    """

    __props__ = ()
    arrays = 2

    def make_node(self, segments: Variable, tail: Variable) -> Apply:
        segments, tail = pt.as_tensor_variable(segments), pt.as_tensor_variable(tail)
        if segments.type.dtype != tail.type.dtype or segments.type.ndim != tail.type.ndim + 1:
            raise TypeError(f"cannot join rows of {segments.type} and {tail.type}")
        pairs = zip(segments.type.shape[2:], tail.type.shape[1:], strict=True)
        row = [mine if theirs is None else theirs for mine, theirs in pairs]
        known = (*segments.type.shape[:2], tail.type.shape[0])
        rows = None if None in known else known[0] * known[1] + known[2]
        return Apply(self, [segments, tail], [TensorType(tail.type.dtype, shape=(rows, *row))()])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        # The sizes of rows are those of the tail: with no segments, those of theirs are unknown.
        ((count, length, *_), (rest, *row)) = arguments[-1]
        return [(count * length + rest, *row)]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        segments, tail = inputs
        rows = segments.shape[0] * segments.shape[1]
        if rows:
            whole = segments.reshape((rows, *segments.shape[2:]))
            output_storage[0][0] = np.concatenate([whole, tail]) if len(tail) else whole.copy()
        else:
            output_storage[0][0] = tail.copy()

    def adjoint(self, inputs: Variables, cotangent: Variable) -> list[Variable]:
        count, length = inputs[0].shape[0], inputs[0].shape[1]
        return [SplitRows()(cotangent, count, length), cotangent[count * length :]]


class SegmentStarts(LinearOp):
    """The rows of a history that its segments start from; see the module's text.

    Parameters
    ----------
    depth : int
        The number of initial rows of the history.
    """

    __props__ = ("depth",)

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def make_node(self, history: Variable, count: Any, length: Any) -> Apply:
        history = pt.as_tensor_variable(history)
        count, length = _integer(count), _integer(length)
        known = constant_integer(count)
        # As in the outer loop of a nest, the size of several rows is no part of the type.
        rows = 1 if self.depth == 1 else None
        sizes = (None if known is None else known + 1, rows, *history.type.shape[1:])
        out = TensorType(history.type.dtype, shape=sizes)()
        return Apply(self, [history, count, length], [out])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        node, shapes = arguments[-2:]
        return [(node.inputs[1] + 1, pt.constant(self.depth, dtype="int64"), *shapes[0][1:])]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        history, count, length = inputs
        stop = int(count) * int(length) + 1
        rows = [history[k : k + stop : int(length)] for k in range(self.depth)]
        output_storage[0][0] = np.stack(rows, axis=1)

    def adjoint(self, inputs: Variables, cotangent: Variable) -> list[Variable]:
        history, count, length = inputs
        return [PlacedStarts(self.depth)(cotangent, history.shape[0], count, length)]

    def as_slices(self, history: Variable, count: Variable, length: Variable) -> Variable:
        """Return the same rows by PyTensor's own Ops."""
        stop = count * length + 1
        rows = [history[k : k + stop : length] for k in range(self.depth)]
        return pt.expand_dims(rows[0], 1) if self.depth == 1 else pt.stack(rows, axis=1)


class PlacedStarts(LinearOp):
    """The adjoint of `SegmentStarts`: starts of segments added into zeros of `rows` rows."""

    __props__ = ("depth",)

    def __init__(self, depth: int) -> None:
        self.depth = depth

    def make_node(self, starts: Variable, rows: Any, count: Any, length: Any) -> Apply:
        starts = pt.as_tensor_variable(starts)
        out = TensorType(starts.type.dtype, shape=(None, *starts.type.shape[2:]))()
        return Apply(self, [starts, _integer(rows), _integer(count), _integer(length)], [out])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        node, shapes = arguments[-2:]
        return [(node.inputs[1], *shapes[0][2:])]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        starts, rows, count, length = inputs
        out = np.zeros((int(rows), *starts.shape[2:]), dtype=starts.dtype)
        stop = int(count) * int(length) + 1
        for k in range(self.depth):
            out[k : k + stop : int(length)] += starts[:, k]
        output_storage[0][0] = out

    def adjoint(self, inputs: Variables, cotangent: Variable) -> list[Variable]:
        return [SegmentStarts(self.depth)(cotangent, *inputs[2:])]

    def as_slices(
        self, starts: Variable, rows: Variable, count: Variable, length: Variable
    ) -> Variable:
        """Return the same array by PyTensor's own Ops."""
        sizes = [starts.shape[axis] for axis in range(2, starts.type.ndim)]
        out = pt.zeros([rows, *sizes], dtype=starts.type.dtype)
        stop = count * length + 1
        for k in range(self.depth):
            out = pt.inc_subtensor(out[k : k + stop : length], starts[:, k])
        return out


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
@vectorize_rule.register(SegmentStarts)
def vectorize_rows(op: Op, node: Apply, batched: Variable, *sizes: Variable) -> list[Variable]:
    """Cut a batch of arrays; the batch stands behind time meanwhile."""
    rank = batched.type.ndim - node.inputs[0].type.ndim
    timed = pt.moveaxis(batched, tuple(range(rank)), tuple(range(1, rank + 1)))
    cut = op(timed, *map(_common, sizes))
    return [pt.moveaxis(cut, tuple(range(2, rank + 2)), tuple(range(rank)))]


@vectorize_rule.register(MergeRows)
@vectorize_rule.register(PlacedStarts)
def vectorize_merged(op: Op, node: Apply, batched: Variable, *sizes: Variable) -> list[Variable]:
    """Put the segments of a batch of arrays together."""
    rank = batched.type.ndim - node.inputs[0].type.ndim
    timed = pt.moveaxis(batched, tuple(range(rank)), tuple(range(2, rank + 2)))
    merged = op(timed, *map(_common, sizes))
    return [pt.moveaxis(merged, tuple(range(1, rank + 1)), tuple(range(rank)))]


@vectorize_rule.register(JoinRows)
def vectorize_joined(
    op: JoinRows, node: Apply, segments: Variable, tail: Variable
) -> list[Variable]:
    """Join batches; a part without a batch is repeated for it."""
    ranks = [
        new.type.ndim - old.type.ndim
        for new, old in zip((segments, tail), node.inputs, strict=True)
    ]
    rank = max(ranks)
    if ranks[0] < rank:
        sizes = [tail.shape[axis] for axis in range(rank)]
        segments = pt.broadcast_to(segments, [*sizes, *segments.shape])
    elif ranks[1] < rank:
        sizes = [segments.shape[axis] for axis in range(rank)]
        tail = pt.broadcast_to(tail, [*sizes, *tail.shape])
    batch, axes = tuple(range(rank)), tuple(range(1, rank + 1))
    timed = pt.moveaxis(segments, batch, tuple(range(2, rank + 2)))
    return [pt.moveaxis(op(timed, pt.moveaxis(tail, batch, axes)), axes, batch)]
