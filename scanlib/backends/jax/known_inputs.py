"""Which integer inputs of a function JAX must know when it compiles.

PyTensor's linker compiles a function anew for every value of an input that is known. So only those
are from which a size, the bound of a slice or a number of steps is computed. An integer that is
data is not: the index of one row, or a number that steps compute with.
"""

from __future__ import annotations

from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph, Output
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import (
    Alloc,
    AllocEmpty,
    ARange,
    Eye,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib._compat import split_of, thaw_graph
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.row_ops.checked_rows import CheckedRows
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.row_ops.row_segments import SplitRows
from scanlib.ops.scan import Scan

# Which input is the first of those that say how large something is.
FIRST_SIZE: dict[type, int] = {
    Alloc: 1,
    AllocEmpty: 0,
    ARange: 0,
    Eye: 0,
    CheckedRows: 1,
    PaddedRows: 1,
    Reshape: 1,
    SpecifyShape: 1,
    SplitRows: 1,
}
# What makes another number of numbers, or puts them side by side.
ARITHMETIC = (CheckAndRaise, Elemwise, ScalarFromTensor, TensorFromScalar)
JOINED = (DimShuffle, MakeVector)
# What reads a number as data, of the Ops that have no size among their inputs.
READS_DATA = (CAReduce, Dot, Elemwise, Output)


def needs_value(fgraph: FunctionGraph, variable: Variable, otherwise: bool = False) -> bool:
    """Whether JAX must know the value of an integer when it compiles a graph.

    Parameters
    ----------
    fgraph : FunctionGraph
    variable : Variable
        One of its inputs, a scalar.
    otherwise : bool, optional
        The answer where an Op reads it of which nothing is known here.
    """
    pending, visited = [variable], set()
    while pending:
        value = pending.pop()
        for client, position in fgraph.clients.get(value, ()):
            found = _reads_size(client, position)
            if found is None:
                found = otherwise and not (isinstance(client.op, READS_DATA) or _hands_on(client))
            if found:
                return True
            if client in visited or isinstance(client.op, Output):
                continue
            visited.add(client)
            if _hands_on(client):
                pending += client.outputs
    return False


def _hands_on(client: Apply) -> bool:
    """Whether what a node makes of a number may be a size as well."""
    if isinstance(client.op, JOINED):
        return all(out.type.ndim == 1 for out in client.outputs)
    is_number = all(getattr(out.type, "ndim", 0) == 0 for out in client.outputs)
    return isinstance(client.op, ARITHMETIC) and is_number


def _reads_size(client: Apply, position: int) -> bool | None:
    """Whether a node reads a size, a bound or a number of steps there; None if that is not known
    of its Op."""
    op = client.op
    first = next((n for kind, n in FIRST_SIZE.items() if isinstance(op, kind)), None)
    if first is not None:
        return position >= first
    if isinstance(op, Split):
        return client.inputs[position] is split_of(client)[2]
    if isinstance(op, Subtensor | IncSubtensor):
        return _is_bound(client, position)
    if isinstance(op, LinearScan | ElemwiseScan | Scan):
        has_steps = op.has_n_steps if isinstance(op, LinearScan) else op.signature.has_n_steps
        is_steps = has_steps and position == 0
        return is_steps or (isinstance(op, Scan) and _step_reads_size(client, position))
    if isinstance(op, OpFromGraph):
        return needs_value(op.fgraph, op.fgraph.inputs[position])
    return None


def _is_bound(client: Apply, position: int) -> bool:
    """Whether an input is a bound of a slice, and not the index of a row or an array."""
    lead = 2 if isinstance(client.op, IncSubtensor) else 1
    value = client.inputs[position]
    if position < lead:
        return False
    indices = indices_from_subtensor(client.inputs[lead:], client.op.idx_list)
    slices = [index for index in indices if isinstance(index, slice)]
    return any(value is part for s in slices for part in (s.start, s.stop, s.step))


def _step_reads_size(client: Apply, position: int) -> bool:
    """Whether a step of a loop reads a size there."""
    back = len(client.inputs) - position  # from the last input, inside as well
    if back > client.op.signature.n_non_sequences:
        return False  # a row or a first value: other steps read others
    body = thaw_graph(client.op.body)
    return needs_value(body, body.inputs[-back], otherwise=True)
