"""The last rewrite before the JAX linker: which numbers it must know, marked.

While JAX traces, what is computed from known numbers is known (`graph_functions`). Two things have
to be said before. PyTensor's linker compiles a function anew for every value of the integer inputs
that it finds by `KnownNumber`: those from which a size, the bound of a slice or a number of steps
is computed. An integer that is data is not among them: the index of one row, or a number that steps
compute with. And numbers that something else reads than the computation of another number get the
mark as well: PyTensor's fusion would mix them with data.
"""

from collections.abc import Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph, Output
from pytensor.tensor.basic import Alloc, AllocEmpty, ARange, Eye, Split
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.extra_ops import Repeat
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib._compat import INDEX_WRITES, kept_sizes, thaw_graph
from scanlib.backends.jax.known_numbers import KnownNumber, may_be_known
from scanlib.lengths.arrays import width_of
from scanlib.lengths.known import countable_scalars
from scanlib.lengths.numbers import constant_index, indices_of, only_cut
from scanlib.ops.composites import written_out
from scanlib.ops.execution import LoopOp
from scanlib.ops.linker_features import data_in
from scanlib.ops.row_ops.checked_rows import CheckedSizes
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.row_ops.row_segments import SplitRows
from scanlib.ops.scan import Scan

# Which input is the first of those that say how large something is.
FIRST_SIZE: dict[type, int] = {
    Alloc: 1,
    AllocEmpty: 0,
    ARange: 0,
    Eye: 0,
    CheckedSizes: 1,
    PaddedRows: 2,
    Repeat: 1,
    Reshape: 1,
    SpecifyShape: 1,
    Split: -1,
    SplitRows: 1,
}
# What reads a number as data, of the Ops that have no size among their inputs.
READS_DATA = (CAReduce, Dot, Elemwise, Output)

REASON = "scanlib_prepare_for_jax"


def prepare(fgraph: FunctionGraph) -> None:
    """Mark the numbers that JAX must know when it compiles."""
    _write_where_masks_say(fgraph)
    _index_by_places(fgraph)
    sizes = kept_sizes(fgraph)
    unmarked = dict(sizes)
    data = data_in(fgraph)
    countable = countable_scalars(fgraph, data)
    for variable in fgraph.inputs:
        if variable in countable and needs_value(fgraph, variable):
            _mark(fgraph, variable, list(fgraph.clients[variable]))
    for node in fgraph.toposort():
        for out in node.outputs:
            if out in countable:
                readers = fgraph.clients[out]
                _mark(fgraph, out, [r for r in readers if not _counts(r[0], countable)])
    # A size that it keeps as a marked one of the same array would be a cycle to PyTensor.
    sizes.update(unmarked)


def _write_where_masks_say(fgraph: FunctionGraph) -> None:
    """Have numbers written where a mask says be choices, as in steps: PyTensor makes
    ``where(mask, y, A)`` of them, where for rows ``mask[:, None]`` were right."""
    for node in fgraph.toposort():
        made = written_out(node) if isinstance(node.op, INDEX_WRITES[1:]) else None
        if made is not None:
            fgraph.replace_all(zip(node.outputs, made, strict=True), reason=REASON)


def _index_by_places(fgraph: FunctionGraph) -> None:
    """Have slices between computed places be read and written item by item, where their length is
    specified, or that of what is written: JAX's slices have no others."""
    for node in fgraph.toposort():
        if isinstance(node.op, SpecifyShape):
            read = node.inputs[0].owner
            if read is not None and isinstance(read.op, Subtensor):
                part = _at_places(read, node.outputs[0].type.shape)
                if part is not None:
                    fgraph.replace(node.outputs[0], part, reason=REASON)
        elif isinstance(node.op, IncSubtensor):
            value = node.inputs[1]
            part = _at_places(node, value.type.shape)
            if part is not None:
                write = part.set if node.op.set_instead_of_inc else part.inc
                fgraph.replace(node.outputs[0], write(value), reason=REASON)


def _at_places(node: Apply, sizes: Sequence[int | None]) -> Variable | None:
    """Return the part of an array that a node reads or writes, of some sizes, at its places; None
    but for one slice between computed places, of a length that is known."""
    array, (axis, index) = node.inputs[0], only_cut(node) or (0, None)
    if not isinstance(index, slice) or constant_index(index.start) is not None:
        return None
    width = width_of(index)
    if width is None or len(sizes) != array.type.ndim or sizes[axis] != width:
        return None
    return array[(*[slice(None)] * axis, pt.as_tensor(index.start) + np.arange(width))]


def _counts(client: Apply, countable: set[Variable]) -> bool:
    """Whether a reader of a number computes another such number."""
    return bool(client.outputs) and all(out in countable for out in client.outputs)


def _mark(fgraph: FunctionGraph, number: Variable, readers: Sequence[tuple[Apply, int]]) -> None:
    if readers:
        known = KnownNumber()(number)
        for client, position in readers:
            fgraph.change_node_input(client, position, known, reason=REASON)


def needs_value(fgraph: FunctionGraph, variable: Variable, otherwise: bool = False) -> bool:
    """Whether JAX must know the value of an integer input when it compiles a graph; `otherwise`
    where an Op reads it of which nothing is known here."""
    pending, visited = [variable], set()
    while pending:
        value = pending.pop()
        for client, position in fgraph.clients.get(value, ()):
            found = _reads_size(client, position)
            if found is None:
                is_data = isinstance(client.op, READS_DATA) or may_be_known(client)
                found = otherwise and not is_data
            if found:
                return True
            if client in visited or isinstance(client.op, Output):
                continue
            visited.add(client)
            # What stands at the place that a number says is data.
            if may_be_known(client) and not isinstance(client.op, Subtensor):
                pending += client.outputs
    return False


def _reads_size(client: Apply, position: int) -> bool | None:
    """Whether a node reads a size, a bound or a number of steps there; None if that is not known
    of its Op."""
    op = client.op
    first = next((n for kind, n in FIRST_SIZE.items() if isinstance(op, kind)), None)
    if first is not None:
        return position >= first % len(client.inputs)
    if isinstance(op, Subtensor | IncSubtensor):
        slices = [index for index in indices_of(client) if isinstance(index, slice)]
        bounds = [bound for s in slices for bound in (s.start, s.stop, s.step)]
        return any(client.inputs[position] is bound for bound in bounds)
    if isinstance(op, LoopOp):
        is_steps = op.has_n_steps and position == 0
        return is_steps or (isinstance(op, Scan) and _step_reads_size(client, position))
    if isinstance(op, OpFromGraph):
        return needs_value(op.fgraph, op.fgraph.inputs[position])
    return None


def _step_reads_size(client: Apply, position: int) -> bool:
    """Whether a step of a loop reads a size there."""
    back = len(client.inputs) - position  # from the last input, inside as well
    if back > client.op.signature.n_non_sequences:
        return False  # a row or a first value: other steps read others
    body = thaw_graph(client.op.body)
    return needs_value(body, body.inputs[-back], otherwise=True)
