"""Which sequences have the same number of rows, as far as it can be told without values."""

from __future__ import annotations

from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.graph import constant_index
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.scan import Scan


def row_count(variable: Variable) -> tuple[Variable, int]:
    """Return a variable and a number: the first has so many rows fewer than the given one.

    Loops read views of histories, whose lengths differ by constants from those of their
    sequences; equal results of this function mean equal lengths.
    """
    node, more = variable.owner, 0
    while node is not None:
        op = node.op
        if isinstance(op, Scan | LinearScan | ElemwiseScan):
            source, rows = _length_of_loop(node, variable)
        elif isinstance(op, Subtensor):
            source, rows = node.inputs[0], _rows_cut(node)
        elif isinstance(op, Elemwise):
            source = next((i for i in node.inputs if i.type.ndim and i.type.shape[0] != 1), None)
            rows = 0
        else:
            break
        if source is None or rows is None:
            break
        variable, more, node = source, more + rows, source.owner
    return variable, more


def _length_of_loop(node: Apply, out: Variable) -> tuple[Variable | None, int | None]:
    """Return a sequence of a loop and how many rows more a history of it has."""
    if isinstance(node.op, LinearScan):
        parts = node.op.parts(node.inputs)
        timed = parts.offset if node.op.coefficient == "fixed" else parts.matrix
        return (None if node.op.untraced else timed), 1
    signature = node.op.signature
    position = node.outputs.index(out)
    inputs = signature.split_inputs(node.inputs)
    if signature.has_stop or not inputs.sequences:
        return None, None
    if position >= signature.n_states:
        stacked = position >= signature.n_states + signature.n_carries
        return (inputs.sequences[0] if stacked else None), 0
    untraced = signature.untraced[position]
    return (None if untraced else inputs.sequences[0]), signature.depths[position]


def _rows_cut(node: Apply) -> int | None:
    """Return by how many rows an index changes the length; None if not by a constant."""
    indices = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
    first = indices[0]
    if not isinstance(first, slice) or first.step is not None:
        return None
    start = 0 if first.start is None else constant_index(first.start)
    stop = 0 if first.stop is None else constant_index(first.stop)
    if start is None or stop is None or start < 0 or (first.stop is not None and stop >= 0):
        return None
    # A history has at least as many rows as are cut off one end of it.
    source = node.inputs[0].owner
    if start - stop > 1 and (source is None or not isinstance(source.op, Scan)):
        return None
    return stop - start
