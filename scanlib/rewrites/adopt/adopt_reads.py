"""What reads the buffers that PyTensor's scans return: in which direction, and which rows."""

from __future__ import annotations

from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.subtensor import Subtensor

from scanlib.lengths.arrays import slice_of
from scanlib.lengths.numbers import constant_index
from scanlib.rewrites.simplify.last_rows import last_row_reads


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
    found, only = last_row_reads(fgraph, out, 1)
    reads = {
        read.old: tuple(read.rest)
        for read in found
        if read.back == 1 and not read.several and (is_updated or not read.needs_step)
    }
    return reads, only and len(reads) == len(found)
