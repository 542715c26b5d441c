"""Slices and columns written into zeros.

The gradient of a loop which starts from the first row of an array and reads the others writes each
slice's cotangent into zeros of the whole. Written as a join it is one pass over memory instead of
one for the zeros and one for each slice; and so are all columns of a matrix. The gradient of a
loop's sequence is rows in an array of zeros that is nearly always full: a `PaddedRows`.
"""

from typing import NamedTuple

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.graph.traversal import walk
from pytensor.tensor.basic import Alloc, ScalarFromTensor
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib.lengths.arrays import Lengths
from scanlib.lengths.numbers import constant_index, indices_of, only_cut
from scanlib.ops.execution import LoopOp
from scanlib.ops.gradient.cotangents import is_zeros
from scanlib.ops.row_ops.checked_rows import CheckedValue
from scanlib.ops.row_ops.padded_rows import PaddedRows


class _Slice(NamedTuple):
    """Rows `start` to `stop` of an axis, and what was written there; None is an end."""

    start: object
    stop: object
    value: Variable


@node_rewriter([IncSubtensor])
def join_written_rows(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Replace slices added to zeros, and rows behind zeros, where a loop computes some of them."""
    if not _adds_rows_of_loops(node):
        return None
    joined = _behind_zeros(node)
    joined = _joined(node) if joined is None else joined
    fits = joined is not None and node.outputs[0].type.is_super(joined.type)
    return [joined] if fits else None


def _adds_rows_of_loops(node: Apply | None) -> bool:
    found, lengths = False, Lengths()
    while node is not None and isinstance(node.op, IncSubtensor):
        if node.op.set_instead_of_inc or not _fills(node, lengths):
            return False
        found |= is_of_loop(node.inputs[1])
        node = node.inputs[0].owner
    return found


def _fills(node: Apply, lengths: Lengths) -> bool:
    """Whether what is written to a slice is known to have its length; a row may be repeated."""
    target, value = node.inputs[:2]
    place = _axis_slice(node)
    if place is None:
        return False
    index = indices_of(node)[place[0]]
    if not isinstance(index, slice):
        return True
    rows = lengths.of(target, place[0])
    cut = lengths.cut(rows, index)
    return cut is not None and lengths.agrees(value, rows - cut[0] - cut[1], place[0])


def _rows_in_zeros(node: Apply) -> tuple[Apply, _Slice] | None:
    """Return what makes the zeros into which rows are written, and these; None for other writes."""
    whole, place, out = node.inputs[0].owner, _axis_slice(node), node.outputs[0].type
    if whole is None or not isinstance(whole.op, Alloc) or not is_zeros(node.inputs[0]):
        return None
    if place is None or place[0] != 0:
        return None
    kind = place[1].value.type
    # A single row may be written to many places.
    is_same = kind.broadcastable == (False, *out.broadcastable[1:]) and kind.dtype == out.dtype
    return (whole, place[1]) if is_same else None


def _behind_zeros(node: Apply) -> Variable | None:
    """Return the rows that are written at the end of an array of zeros, behind the other zeros."""
    found = _rows_in_zeros(node)
    if found is None:
        return None
    whole, (start, stop, rows) = found
    if stop is not None or not isinstance(start, int) or start < 1:
        return None
    return pt.join(0, _zeros(whole, 0, pt.minimum(start, whole.inputs[1])), rows)


def _joined(node: Apply) -> Variable | None:
    """Return slices written into zeros as a join, None where they leave some of the zeros."""
    found = _chain(node)
    if found is None or found.slices[-1].stop is not None:
        return None
    return pt.join(found.axis, *(part.value for part in found.slices))


class _Chain(NamedTuple):
    """Slices of an axis that were written into zeros, from its start on without a gap."""

    zeros: Variable
    axis: int
    slices: list[_Slice]


def _chain(node: Apply) -> _Chain | None:
    """Return what a node and those before it write into zeros, None if that is no such chain."""
    axis, slices = None, []
    out = node.outputs[0]
    current = out
    while current.owner is not None and isinstance(current.owner.op, IncSubtensor):
        place = _axis_slice(current.owner)
        is_set = current.owner.op.set_instead_of_inc  # by a user
        if is_set or place is None or (axis is not None and place[0] != axis):
            return None
        axis = place[0]
        slices.append(place[1])
        current = current.owner.inputs[0]
    if axis is None or not is_zeros(current):
        return None
    ordered = _in_order(slices)
    if ordered is None or any(part.value.type.dtype != out.type.dtype for part in ordered):
        return None
    whole = out.type.broadcastable
    for part in ordered:
        kinds = zip(whole, part.value.type.broadcastable, strict=True)
        if any(k != axis and narrow and not wide for k, (wide, narrow) in enumerate(kinds)):
            return None
    return _Chain(current, axis, ordered)


def _axis_slice(node: Apply) -> tuple[int, _Slice] | None:
    """Return the one axis along which a slice, or an item, was written, and the slice."""
    target, value = node.inputs[:2]
    cut = only_cut(node)
    if cut is None:
        return None
    axis, index = cut
    size = target.type.shape[axis]
    if not isinstance(index, slice):
        place = constant_index(index)
        is_item = 0 < value.type.ndim == target.type.ndim - 1
        if place is None or size is None or not is_item:
            return None
        item, end = place % size, place % size + 1
        return axis, _Slice(item or None, end % size or None, pt.expand_dims(value, axis))
    if value.type.ndim != target.type.ndim or index.step is not None:
        return None
    start, stop = (_place(end) for end in (index.start, index.stop))
    is_row = start in (None, 0) and stop == 1
    if value.type.shape[axis] == 1 and not is_row:  # it may be written to many places
        return None
    return axis, _Slice(None if start == 0 else start, stop, value)


def _place(end: object) -> object:
    """Return an end of a slice in a form that equal ends share."""
    if end is None:
        return None
    known = constant_index(end)
    if known is not None:
        return known
    owner = getattr(end, "owner", None)
    if owner is not None and isinstance(owner.op, ScalarFromTensor):
        return owner.inputs[0]
    return end


def _in_order(slices: list[_Slice]) -> list[_Slice] | None:
    """Return slices that follow one another from the start of an axis on in that order."""
    by_start = {part.start: part for part in slices}
    if len(by_start) < len(slices):
        return None
    ordered: list[_Slice] = []
    for _ in slices:
        part = by_start.get(ordered[-1].stop if ordered else None)
        if part is None or (isinstance(part.stop, int) and part.stop < 0):
            return None
        ordered.append(part)
        if part.stop is None:
            break
    return ordered if len(ordered) == len(slices) else None


def _zeros(whole: Apply, axis: int, size: Variable) -> Variable:
    """Return zeros of another size along an axis.

    Made by `pt.alloc`, they would have the graph of their sizes rewritten for static values.
    """
    zero, *sizes = whole.inputs
    sizes[axis] = size
    shape = list(whole.outputs[0].type.shape)
    shape[axis] = None
    return Apply(whole.op, [zero, *sizes], [whole.outputs[0].type.clone(shape=shape)()]).outputs[0]


@node_rewriter([IncSubtensor])
def join_slices(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Replace slices of known places that a step adds to zeros by a join, with the rest of the
    zeros, of which there may be none, behind them.

    The last one of a chain stands for all.
    """
    readers = [client.op for client, _ in fgraph.clients[node.outputs[0]]]
    if any(isinstance(op, IncSubtensor) for op in readers):
        return None
    found = _chain(node)
    if found is None or len(found.slices) < 2:
        return None
    whole, axis, slices = found.zeros.owner, found.axis, found.slices
    if whole is None or not isinstance(whole.op, Alloc):
        return None
    size, fit, end = whole.inputs[1 + axis], [], pt.constant(0, dtype="int64")
    for _, stop, value in slices:
        if not isinstance(stop, int | None):
            return None
        start, end = end, size if stop is None else pt.minimum(stop, size)
        fit.append(pt.eq(value.shape[axis], end - start))
    rest = CheckedValue(ValueError, "an array of another shape is written to a slice")
    values = [value for *_, value in slices]
    joined = pt.join(axis, *values, _zeros(whole, axis, rest(size - end, *fit)))
    return [joined] if node.outputs[0].type.is_super(joined.type) else None


@node_rewriter([IncSubtensor])
def pad_rows_of_loops(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Turn ``zeros[:n] += rows`` into a `PaddedRows`, where rows come from a loop.

    They are its results, or elementwise functions of them, as the outer products are that a matrix
    of each step gets.
    """
    found = _rows_in_zeros(node)
    if found is None:
        return None
    whole, (start, stop, rows) = found
    if start is not None or stop is None or not is_of_loop(rows):
        return None
    new = PaddedRows()(rows, pt.as_tensor(stop), whole.inputs[1])
    return [new] if node.outputs[0].type.is_super(new.type) else None


def is_of_loop(variable: Variable) -> bool:
    """Whether a loop computes a variable, or elementwise operations on parts of its results."""

    def inputs_of(value: Variable) -> list[Variable]:
        node = value.owner
        is_passed = node is not None and isinstance(node.op, Elemwise | DimShuffle | Subtensor)
        return node.inputs if is_passed else []

    above = (value.owner for value in walk([variable], inputs_of, bfs=False))
    return any(node is not None and isinstance(node.op, LoopOp) for node in above)
