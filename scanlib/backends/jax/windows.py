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
from pytensor.graph.basic import Apply
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
    loops = [node for node in fgraph.toposort() if isinstance(node.op, LoopOp)]
    return {
        value.owner
        for loop in loops
        if not loop.op.signature.has_stop and is_compiled(loop.op, loop)
        for value in loop.op.signature.split_inputs(loop.inputs).sequences
        if _is_slice_of_rows(value.owner) and value not in fgraph.outputs
    }


def _is_slice_of_rows(node: Apply | None) -> bool:
    if node is None or not isinstance(node.op, Subtensor) or len(node.op.idx_list) != 1:
        return False
    (index,) = node.op.idx_list
    return isinstance(index, slice) and index.step is None


def windows(inputs: tuple[Any, ...], count: int) -> tuple[list[Any], np.ndarray]:
    """Return the whole arrays of a loop's inputs, and which rows it reads of the first ones: so
    many sequences."""
    whole = [v if isinstance(v, Window) else Window(v, 0, len(v)) for v in inputs[:count]]
    places = np.array([(v.start, v.length) for v in whole], np.int64).reshape(-1, 2)
    return [*(v.array for v in whole), *map(sliced, inputs[count:])], places
