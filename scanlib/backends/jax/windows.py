"""Slices that compiled loops read in place.

The gradient of a loop reads slices of the loop's histories, ``history[:-1]`` and ``history[1:]``.
XLA has no views: as arguments of a compiled loop, slices would be copied. A slice of rows that
compiled loops read stays a `Window` instead, and the loop reads those rows of the whole array.
Other Ops have it `sliced`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import AbstractFunctionGraph
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib.backends.jax.bounded import Bounded, static_int
from scanlib.backends.jax.kernels import is_compiled
from scanlib.ops.execution import LoopOp


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


def sliced(value: Any) -> Any:
    """Return a value, the rows of a `Window` as an array."""
    return value.rows() if isinstance(value, Window) else value


def funcify_slice(node: Apply, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that gives a `Window`, where the bounds are known."""

    def slice_(array: Any, *parts: Any) -> Any:
        array = sliced(array)
        (index,) = indices_from_subtensor(parts, node.op.idx_list)
        bounds = [None if b is None else static_int(b) for b in (index.start, index.stop)]
        given = [b for b in (index.start, index.stop) if b is not None]
        if isinstance(array, Bounded) or any(static_int(b) is None for b in given):
            return plain(array, *parts)
        start, stop, _ = slice(*bounds).indices(len(array))
        return Window(array, start, max(stop - start, 0))

    return slice_


def slices_read_in_place(fgraph: AbstractFunctionGraph) -> set[Apply]:
    """Return the slices of rows that compiled loops read, as sequences."""
    nodes = fgraph.toposort()
    readers: dict[Variable, list[tuple[Apply, int]]] = {}
    for node in nodes:
        for position, value in enumerate(node.inputs):
            readers.setdefault(value, []).append((node, position))
    loops = [node for node in nodes if isinstance(node.op, LoopOp)]
    compiled = {n for n in loops if not n.op.signature.has_stop and is_compiled(n.op, n)}
    return {
        node
        for node in nodes
        if isinstance(node.op, Subtensor)
        and _is_slice_of_rows(node.op)
        and node.outputs[0] in readers
        and node.outputs[0] not in fgraph.outputs
        and any(
            client in compiled and _is_sequence(client, position)
            for client, position in readers[node.outputs[0]]
        )
    }


def _is_slice_of_rows(op: Subtensor) -> bool:
    index = op.idx_list
    return len(index) == 1 and isinstance(index[0], slice) and index[0].step is None


def _is_sequence(client: Apply, position: int) -> bool:
    signature = client.op.signature
    return 0 <= position - signature.has_n_steps < signature.n_sequences


def windows(inputs: tuple[Any, ...], count: int) -> tuple[list[Any], np.ndarray]:
    """Return the whole arrays of a loop's inputs, and which rows it reads of the first ones: so
    many sequences."""
    whole = [v if isinstance(v, Window) else Window(v, 0, len(v)) for v in inputs[:count]]
    places = np.array([(v.start, v.length) for v in whole], np.int64).reshape(-1, 2)
    return [*(v.array for v in whole), *map(sliced, inputs[count:])], places
