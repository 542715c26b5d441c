"""The last rewrite before the JAX linker: which numbers it must know, marked.

While JAX traces, what is computed from known numbers is known (`graph_functions`). Two things have
to be said before. PyTensor's linker compiles a function anew for every value of the integer inputs
that it finds by `KnownNumber`: those that decide a size (`known_inputs`). And numbers that
something else reads than the computation of another number get the mark as well: PyTensor's fusion
would mix them with data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.extra_ops import Repeat

from scanlib._compat import INDEX_WRITES
from scanlib.backends.jax.known_inputs import needs_value
from scanlib.backends.jax.known_numbers import KnownNumber
from scanlib.backends.jax.traces import stack_traces
from scanlib.lengths.known import KnownLengths, countable_scalars
from scanlib.ops.linker_features import data_in

REASON = "scanlib_prepare_for_jax"


def prepare(fgraph: FunctionGraph) -> None:
    """Mark the numbers that JAX must know when it compiles."""
    stack_traces(fgraph)
    _keep_masks_of_rows(fgraph)
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


def _keep_masks_of_rows(fgraph: FunctionGraph) -> None:
    """Have numbers that are written to rows which a mask selects be vectors of one item.

    A rewrite of PyTensor's makes a choice of such a write by a number, ``where(mask, y, A)``, where
    ``mask[:, None]`` were right. It leaves vectors.
    """
    for node in fgraph.toposort():
        if isinstance(node.op, INDEX_WRITES[1:]) and len(node.inputs) == 3:
            array, value, mask = node.inputs
            is_mask = getattr(mask.type, "dtype", None) == "bool" and not value.type.ndim
            if is_mask and mask.type.ndim < array.type.ndim:
                op: Any = node.op
                new = op.make_node(array, value.dimshuffle("x"), mask).outputs[0]
                fgraph.replace(node.outputs[0], new, reason=REASON)


def _counts(client: Apply, countable: set[Variable]) -> bool:
    """Whether a reader of a number computes another such number."""
    return bool(client.outputs) and all(out in countable for out in client.outputs)


def _mark(fgraph: FunctionGraph, number: Variable, readers: Sequence[tuple[Apply, int]]) -> None:
    if readers:
        known = KnownNumber()(number)
        for client, position in readers:
            fgraph.change_node_input(client, position, known, reason=REASON)


def lengths_in(fgraph: FunctionGraph, data: Sequence[Variable] = ()) -> KnownLengths:
    """Return what is known of lengths in a graph; `data` are inputs that are not known, though they
    may be integers."""
    return KnownLengths(fgraph, data, (KnownNumber,), (Repeat,))
