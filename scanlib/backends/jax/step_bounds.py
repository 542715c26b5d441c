"""Numbers of steps that only the readers of a loop bound.

The gradient of ``scan(…, x, n_steps=k)``, where `k` is data, is a loop of `k` steps. It may have no
sequence that says how many there can be, but what it makes are the first rows of a gradient of
`x`. Where the rows of a loop are read as some of an array of known length, there are no more than
that.
"""

from __future__ import annotations

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor

from scanlib.backends.jax.static import AtMost
from scanlib.backends.jax.unknown_lengths import KnownLengths, steps_and_sequences
from scanlib.ops.padded_rows import PaddedRows

REASON = "scanlib_bound_steps"


def bound_steps(fgraph: FunctionGraph, lengths: KnownLengths) -> bool:
    """Bound the numbers of steps that nothing else bounds; return whether there were some."""
    found = False
    for node in fgraph.toposort():
        if node not in lengths.loops:
            continue
        n_steps, sequences = steps_and_sequences(node)
        filled = [_filled(sequence, lengths) for sequence in sequences]
        bound = None if None in filled else _bound_of_readers(fgraph, node, lengths)
        if bound is None:
            continue
        found = True
        if n_steps is not None:
            fgraph.change_node_input(node, 0, AtMost()(n_steps, bound), reason=REASON)
        for alloc in filter(None, filled):
            size = AtMost()(alloc.inputs[1], bound)
            rows = alloc.op.make_node(alloc.inputs[0], size, *alloc.inputs[2:]).outputs[0]
            rows = alloc.outputs[0].type.filter_variable(rows)
            fgraph.replace(alloc.outputs[0], rows, reason=REASON)
    return found


def _filled(sequence: Variable, lengths: KnownLengths) -> Apply | None:
    """Return the node that fills an array of an unknown number of rows, if it is one."""
    node = sequence.owner
    if node is None or not isinstance(node.op, Alloc) or lengths.has(node.inputs[1]):
        return None
    return None if node.inputs[1] in lengths.unknown else node


def _bound_of_readers(fgraph: FunctionGraph, node: Apply, lengths: KnownLengths) -> Variable | None:
    """Return a number that is known, and that a loop cannot have more rows than."""
    pending, seen = list(node.outputs), set(node.outputs)
    while pending:
        for client, position in fgraph.clients[pending.pop()]:
            if (
                isinstance(client.op, PaddedRows)
                and position == 0
                and lengths.has(client.inputs[1])
            ):
                return client.inputs[1]
            if _adds_rows(client, position) and client.inputs[0] not in lengths.unknown:
                return Shape_i(0)(client.inputs[0])
            if _keeps_rows(client, position) and not seen.issuperset(client.outputs):
                pending += client.outputs
                seen.update(client.outputs)
    return None


def _adds_rows(client: Apply, position: int) -> bool:
    """Whether a node adds each row of an input to another row of an array."""
    op = client.op
    if not isinstance(op, IncSubtensor) or position != 1 or len(op.idx_list) != 1:
        return False
    target, rows = client.inputs[:2]
    (index,) = op.idx_list
    return isinstance(index, slice) and target.type.ndim == rows.type.ndim


def _keeps_rows(client: Apply, position: int) -> bool:
    """Whether a node has one row for each row of an input."""
    op = client.op
    if isinstance(op, Elemwise):
        return client.outputs[0].type.ndim > 0
    if isinstance(op, DimShuffle):
        return op.new_order[:1] == (0,)
    return isinstance(op, CheckAndRaise | SpecifyShape) and position == 0
