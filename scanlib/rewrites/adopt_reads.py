"""What reads the buffers that PyTensor's scans return: in which direction, and which rows."""

from __future__ import annotations

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib.ops.graph import constant_index
from scanlib.rewrites.adopt_rows import slice_of
from scanlib.rewrites.last_rows import is_trace


def readings(fgraph: FunctionGraph, variable: Variable, sign: int = -1) -> list[int]:
    """Return 1 for each reader that reverses the rows, -1 for each that does not."""
    found = []
    for client, position in fgraph.clients.get(variable, ()):
        index = slice_of(client) if isinstance(client.op, Subtensor) else None
        if index is None or position != 0:
            found.append(sign)
        else:
            step = 1 if index.step is None else constant_index(index.step)
            found += readings(fgraph, client.outputs[0], -sign if step == -1 else sign)
    return found


def last_reads(
    fgraph: FunctionGraph, out: Variable, is_updated: bool = False
) -> tuple[dict[Variable, tuple], bool]:
    """Return the reads of a buffer's last row with what follows the index, and whether there
    are no others.

    What is read through the trace is a row that a step wrote. Of a shared variable that is
    updated PyTensor reads so what it holds after the loop: if there were no steps, what it
    held before.
    """
    reads: dict[Variable, tuple] = {}
    only = True
    for client, position in fgraph.clients.get(out, ()):
        rest = _final_row(client, position)
        if rest is not None:
            reads[client.outputs[0]] = rest
        elif is_updated and position == 0 and is_trace(client, 1):
            trace = client.outputs[0]
            for reader, place in fgraph.clients.get(trace, ()):
                rest = _final_row(reader, place)
                if rest is None:
                    only = False
                else:
                    reads[reader.outputs[0]] = rest
        else:
            only = False
    return reads, only


def _final_row(node: Apply, position: int) -> tuple | None:
    """Return what follows the index of a node that reads the last row; None for other nodes."""
    if position != 0 or not isinstance(node.op, Subtensor):
        return None
    first, *rest = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
    if isinstance(first, slice) or constant_index(first) != -1:
        return None
    return tuple(rest)
