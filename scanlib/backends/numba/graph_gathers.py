"""Outside of loops: reads and writes at places that arrays of integers give.

    y[k, r] = x[i[k], r]        x[i[k], j[k], r] += v[k, r]

The indices come first and are broadcast together; the axes behind them are walked whole. A write
visits its places in the order of memory: what is written last stays, and what is added to one place
several times is added each time. The index of every place is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.blockwise import BlockwiseWithCoreShape
from pytensor.tensor.subtensor import (
    AdvancedIncSubtensor,
    AdvancedSubtensor,
    indices_from_subtensor,
)

from scanlib._compat import INDEXED_BY_VECTOR
from scanlib.backends.numba.graph_places import PlaceEmitter
from scanlib.backends.numba.graph_vectors import is_item

WRITTEN = "shape mismatch: what is written does not fit the places that are indexed"


@dataclass
class Places:
    """What arrays of integers choose of an array: the indices, and the sizes of what is chosen."""

    indices: list[Variable]
    lead: int
    sizes: list[str]


class GatherEmitter(PlaceEmitter):
    """Writes reads and writes at places that arrays of integers give."""

    @singledispatchmethod
    def _emit(self, op: Op, node: Apply) -> None:
        super()._emit(op, node)

    @_emit.register
    def _gather(self, op: AdvancedSubtensor, node: Apply) -> None:
        x, *inputs = node.inputs
        self._write_gather(op, node, indices_from_subtensor(inputs, op.idx_list), x)

    @_emit.register
    def _scatter(self, op: AdvancedIncSubtensor, node: Apply) -> None:
        indices = indices_from_subtensor(node.inputs[2:], op.idx_list)
        self._write_scatter(op, node, [] if op.ignore_duplicates else indices)

    if INDEXED_BY_VECTOR:

        @_emit.register(INDEXED_BY_VECTOR[0])
        def _gather_rows(self, op: Any, node: Apply) -> None:
            self._write_gather(op, node, node.inputs[1:], node.inputs[0])

        @_emit.register(INDEXED_BY_VECTOR[1])
        def _scatter_rows(self, op: Any, node: Apply) -> None:
            self._write_scatter(op, node, node.inputs[2:])

    def _write_gather(self, op: Op, node: Apply, indices: Sequence[Any], x: Variable) -> None:
        out = node.outputs[0]
        places = self._places(x, indices)
        if places is None or not out.type.ndim:
            self._call(op, node)
            return
        array, name = self.array(x), self._empty(out, *places.sizes)

        def write(at: list[str]) -> None:
            item = self._place_text(array, places, at)
            self.source.line(f"{name}[{', '.join(at)}] = {item}")

        self._write_at(places, write)

    def _write_scatter(self, op: Any, node: Apply, indices: Sequence[Any]) -> None:
        x, y = node.inputs[:2]
        out = node.outputs[0]
        places = self._places(x, indices)
        if places is None or not places.sizes:
            self._call(op, node)
            return
        whole = self.array(x) if op.inplace else self._copied(x, out)
        self.bind_array(out, whole)
        dtype, sign = self._dtype(out), "=" if op.set_instead_of_inc else "+="
        at = self._new_indices(places.sizes)
        item = self._broadcast(y, places.sizes, at, WRITTEN)

        def write(at: list[str]) -> None:
            place = self._place_text(whole, places, at)
            self.source.line(f"{place} {sign} {dtype}({item})")

        self._write_at(places, write, at)

    def _write_at(
        self, places: Places, write: Callable[[list[str]], None], at: list[str] | None = None
    ) -> None:
        """Write a nest over all places."""
        found = self._new_indices(places.sizes) if at is None else at
        self._write_nest(places.sizes, found, lambda: write(found))

    def _places(self, x: Variable, indices: Sequence[Any]) -> Places | None:
        """Return what indices choose of an array, None where there is no code for it here."""
        whole = slice(None)
        while indices and isinstance(indices[-1], slice) and indices[-1] == whole:
            indices = indices[:-1]
        if not indices or not all(map(_is_integers, indices)):
            return None
        lead = max(index.type.ndim for index in indices)
        if all(index is indices[0] for index in indices):  # of a diagonal, too
            array = self.array(indices[0])
            sizes = [
                f"{array}.shape[{axis}]" if known is None else str(known)
                for axis, known in enumerate(indices[0].type.shape)
            ]
        else:
            known = broadcast([index.type.shape for index in indices])
            if known is None:
                return None
            sizes = list(map(str, known))
        rest = [f"{self.array(x)}.shape[{axis}]" for axis in range(len(indices), x.type.ndim)]
        return Places(list(indices), lead, [*sizes, *rest])

    def _place_text(self, array: str, places: Places, at: Sequence[str]) -> str:
        """Write the checks of a place's indices, and return its text."""
        inside = []
        for axis, index in enumerate(places.indices):
            text = self._at(index, at[: places.lead])
            inside.append(self._checked(f"np.int64({text})", f"{array}.shape[{axis}]"))
        return f"{array}[{', '.join([*inside, *at[places.lead :]])}]"

    def _at(self, variable: Variable, at: Sequence[str]) -> str:
        """Return the item of an array that is broadcast to axes with some indices."""
        if is_item(variable):
            return self._item(variable)
        own = at[len(at) - variable.type.ndim :]
        flags = variable.type.broadcastable
        inside = ["0" if flag else place for flag, place in zip(flags, own, strict=True)]
        return f"{self.array(variable)}[{', '.join(inside)}]"

    @_emit.register
    def _blockwise(self, op: BlockwiseWithCoreShape, node: Apply) -> None:
        """Write a read of the items of each vector of a batch."""
        (inner,) = op.fgraph.apply_nodes
        core, out = inner.op.core_op, node.outputs[0]
        lead = inner.op.batch_ndim(inner)
        plain = isinstance(core, AdvancedSubtensor) and list(core.idx_list) == [0]
        if not plain or len(inner.inputs) != 2 or node.inputs[0].type.ndim != lead + 1:
            self._call(op, node)
            return
        x, index = node.inputs[:2]
        known = broadcast([x.type.shape[:-1], index.type.shape[:lead]])
        if known is None:
            self._call(op, node)
            return
        array, indices = self.array(x), self.array(index)
        rest = [f"{indices}.shape[{axis}]" for axis in range(lead, index.type.ndim)]
        sizes = [*map(str, known), *rest]
        name, at = self._empty(out, *sizes), self._new_indices(sizes)

        def write() -> None:
            place = self._checked(f"np.int64({self._at(index, at)})", f"{array}.shape[{lead}]")
            flags = x.type.broadcastable[:lead]
            batch = ["0" if flag else j for flag, j in zip(flags, at[:lead], strict=True)]
            item = f"{array}[{', '.join([*batch, place])}]"
            self.source.line(f"{name}[{', '.join(at)}] = {item}")

        self._write_nest(sizes, at, write)


def _is_integers(index: Any) -> bool:
    return isinstance(index, Variable) and np.dtype(index.type.dtype).kind in "iu"


def broadcast(shapes: Sequence[tuple[int | None, ...]]) -> tuple[int, ...] | None:
    """Return the shape that known shapes are broadcast to, None where it is not known."""
    if any(size is None for shape in shapes for size in shape):
        return None
    try:
        return np.broadcast_shapes(*shapes)  # type: ignore[arg-type]
    except ValueError:
        return None
