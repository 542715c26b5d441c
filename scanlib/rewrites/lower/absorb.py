"""Elementwise work on whole sequences moves into the loop that reads them.

``2 * y`` over all time, computed for one loop alone, is a pass over memory that writes an array
only for the loop to read it. In the body of an elementwise loop the same product costs no memory.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import Alloc
from pytensor.tensor.elemwise import Elemwise

from scanlib.ops.graph import row_type
from scanlib.ops.loop import Loop, NonSequence, Sequence


def absorb_producers(fgraph: FunctionGraph, node: Apply) -> Loop:
    """Return a loop whose step computes what elementwise Ops made for it alone.

    `node` is the loop as it stands in `fgraph`.
    """
    loop = Loop.from_node(node)
    absorbed = {node}
    pending = list(loop.sequences)
    while pending:
        rows: dict[Variable, Variable] = {}
        added: list[Sequence] = []
        read: set[Variable] = set()
        for part in reversed(pending):
            if part.row in read:
                added.append(part)  # until what reads it is part of the step
                continue
            if part.outer.owner is None or not _is_read_once(loop, part.outer):
                continue
            if any(client not in absorbed for client, _ in fgraph.clients[part.outer]):
                continue
            new = _absorb(loop, part, rows)
            if new is not None:
                absorbed.add(part.outer.owner)
                read.update(ancestors([rows[part.row]]))
                added += new
        loop.substitute(rows)
        pending = added
    return loop


def _is_read_once(loop: Loop, variable: Variable) -> bool:
    """Whether a variable is one sequence of a loop, and nothing else of it."""
    if sum(part.outer is variable for part in loop.sequences) > 1:
        return False
    return all(part.outer is not variable for part in loop.non_sequences)


def _absorb(
    loop: Loop, part: Sequence, replaced: dict[Variable, Variable]
) -> list[Sequence] | None:
    """Replace a sequence by those it was computed from; return the new ones.

    `replaced` gets what its row is in the step.
    """
    producer = part.outer.owner
    if producer is None or len(producer.outputs) != 1:
        return None
    if isinstance(producer.op, Alloc):
        return _absorb_constant(loop, part, producer, replaced)
    if not isinstance(producer.op, Elemwise):
        return None
    if all(inp.type.broadcastable[0] for inp in producer.inputs):
        return None
    rows: list[Variable] = []
    sequences: list[Sequence] = []
    non_sequences: list[NonSequence] = []
    for inp in producer.inputs:
        if isinstance(inp, Constant) and inp.type.ndim and inp.data.size == 1:
            rows.append(pt.constant(inp.data.reshape((1,) * (inp.type.ndim - 1))))
        elif inp.type.broadcastable[0]:
            inner = row_type(inp)()
            non_sequences.append(NonSequence(inp[0], inner))
            rows.append(inner)
        else:
            known = next((s for s in [*loop.sequences, *sequences] if s.outer is inp), None)
            if known is None or known is part:
                known = Sequence(inp, row_type(inp)())
                sequences.append(known)
            rows.append(known.row)
    value = producer.op(*rows)
    if value.type.dtype != part.row.type.dtype or value.type.ndim != part.row.type.ndim:
        return None
    if not part.row.type.is_super(value.type):
        return None
    loop.sequences = [other for other in loop.sequences if other is not part] + sequences
    loop.non_sequences += non_sequences
    replaced[part.row] = value
    return sequences


def _absorb_constant(
    loop: Loop, part: Sequence, producer: Apply, replaced: dict[Variable, Variable]
) -> list[Sequence] | None:
    """Replace a sequence that holds one number everywhere."""
    value = producer.inputs[0]
    if part.row.type.ndim or value.type.ndim > 1 or len(loop.sequences) == 1:
        return None
    if value.type.ndim and not value.type.broadcastable[0]:
        return None
    scalar = value[0] if value.type.ndim else value
    if isinstance(value, Constant):
        inner: Variable = pt.constant(value.data.reshape(()), dtype=value.type.dtype)
    else:
        inner = scalar.type()
        loop.non_sequences.append(NonSequence(scalar, inner))
    loop.sequences = [other for other in loop.sequences if other is not part]
    replaced[part.row] = inner
    return []
