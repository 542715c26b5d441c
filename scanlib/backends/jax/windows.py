"""Slices that compiled loops read in place.

The gradient of a loop reads slices of the loop's histories, ``history[:-1]`` and ``history[1:]``.
XLA has no views: as arguments of a compiled loop, slices would be copied. A `Slice` of rows that
only compiled loops read stays a `Window` instead, and the loop reads those rows of the whole array.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib.backends.jax.bounded import Bounded, static_int
from scanlib.backends.jax.kernels import is_compiled
from scanlib.backends.jax.rows import OnRows, funcify_on_rows
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan

REASON = "scanlib_read_in_place"


@dataclass(frozen=True)
class Window:
    """Some rows of an array: ``array[start : start + length]``."""

    array: Any
    start: int
    length: int

    def __len__(self) -> int:
        return self.length

    def rows(self) -> Any:
        return self.array[self.start : self.start + self.length]


class Slice(OnRows):
    """A slice along time that only compiled loops read."""


@jax_funcify.register(Slice)
def funcify_slice(op: Slice, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function that gives a `Window`, where the bounds are known."""
    plain = funcify_on_rows(op, node, **kwargs)

    def slice_(array: Any, *parts: Any) -> Any:
        (index,) = indices_from_subtensor(parts, op.core.idx_list)
        bounds = [None if b is None else static_int(b) for b in (index.start, index.stop)]
        given = [b for b in (index.start, index.stop) if b is not None]
        if isinstance(array, Bounded) or any(static_int(b) is None for b in given):
            return plain(array, *parts)
        start, stop, _ = slice(*bounds).indices(len(array))
        return Window(array, start, max(stop - start, 0))

    return slice_


def read_in_place(fgraph: FunctionGraph) -> None:
    """Make a `Slice` of every slice of rows that only compiled loops read, as sequences."""
    known: dict[Apply, bool] = {}

    def reads_windows(node: Apply) -> bool:
        if node not in known:
            steps = not node.op.signature.has_stop
            known[node] = steps and is_compiled(node.op, node)
        return known[node]

    for node in fgraph.toposort():
        core = getattr(node.op, "core", node.op)
        if not isinstance(core, Subtensor) or not _is_slice_of_rows(core):
            continue
        clients = fgraph.clients[node.outputs[0]]
        if clients and all(_is_sequence(*c) and reads_windows(c[0]) for c in clients):
            new = Apply(Slice(core), list(node.inputs), [node.outputs[0].type()])
            fgraph.replace(node.outputs[0], new.outputs[0], reason=REASON)


def _is_slice_of_rows(op: Subtensor) -> bool:
    index = op.idx_list
    return len(index) == 1 and isinstance(index[0], slice) and index[0].step is None


def _is_sequence(client: Apply, position: int) -> bool:
    if not isinstance(client.op, Scan | ElemwiseScan):
        return False
    signature = client.op.signature
    return 0 <= position - signature.has_n_steps < signature.n_sequences


def windows(inputs: tuple[Any, ...], first: int, count: int) -> tuple[list[Any], np.ndarray]:
    """Return the whole arrays of a loop's inputs, and which rows of the sequences it reads."""
    places = np.zeros((count, 2), np.int64)
    arrays = list(inputs)
    for k in range(count):
        value = inputs[first + k]
        if isinstance(value, Window):
            arrays[first + k] = value.array
            places[k] = value.start, value.length
        else:
            places[k] = 0, len(value)
    return arrays, places
