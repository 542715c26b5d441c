"""What an index says of every axis of the row that it is applied to.

An axis that is kept is an axis of the result; so is one that an index array counts through, as the
first of ``h[arange(n), i]``. Every other axis is read at an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.subtensor import indices_from_subtensor

from scanlib._compat import INDEX_WRITES, INDEXED_BY_VECTOR
from scanlib.analysis.scalar_values import NotElementwiseError
from scanlib.lengths.arrays import Lengths

FULL = slice(None)


@dataclass
class IndexPlace:
    """What an index says of one axis of a row.

    `index` is the variable that the axis is read at, with `along` the axes of the result that the
    index array runs along; without one, `out` is the axis of the result that the axis becomes.
    """

    out: int = -1
    index: Variable | None = None
    along: tuple[int, ...] = ()


def index_places(node: Apply, sizes: Lengths) -> tuple[list[IndexPlace], int]:
    """Return the place of every axis of the row that a node indexes, and the rank of the items.

    Parameters
    ----------
    node : Apply
        Reads or writes some items of its first input.
    sizes : Lengths
        Tells which index arrays count through an axis.

    Raises
    ------
    NotElementwiseError
        If the index is anything but whole numbers, arrays of these side by side, and full slices.
    """
    op = node.op
    batch = op.batch_ndim(node) if isinstance(op, Blockwise) else 0
    source = node.inputs[0]
    indices = _indices(node, batch)
    places = [IndexPlace(out=k) for k in range(batch)]
    advanced = [k for k, index in enumerate(indices) if not isinstance(index, slice)]
    joint = max([*(_ndim(indices[k]) - batch for k in advanced), 0])
    together = not advanced or advanced == list(range(advanced[0], advanced[-1] + 1))
    if joint and (batch or not together):
        raise NotElementwiseError(f"{op} mixes slices and index arrays", node.outputs[0])
    out = start = batch
    for k, index in enumerate(indices):
        if isinstance(index, slice):
            places.append(IndexPlace(out=out))
            out += 1
            continue
        if k == advanced[0]:
            start, out = out, out + joint
        last = start + joint
        along = range(batch) if batch else range(last - _ndim(index), last)
        place = IndexPlace(index=index, along=tuple(along))
        places.append(_counted(source, batch + k, place, sizes) or place)
    return places, out


def _indices(node: Apply, batch: int) -> list[Any]:
    """Return one index for every axis: a variable or a full slice."""
    core = node.op.core_op if isinstance(node.op, Blockwise) else node.op
    given = node.inputs[2 if isinstance(core, INDEX_WRITES) else 1 :]
    if isinstance(core, INDEXED_BY_VECTOR):
        indices: Sequence[Any] = given
    else:
        indices = indices_from_subtensor(given, core.idx_list)
    rank = node.inputs[0].type.ndim - batch
    indices = [*indices, *[FULL] * (rank - len(indices))]
    if len(indices) != rank:
        raise NotElementwiseError(f"{node.op} adds axes to what it reads", node.outputs[0])
    for index in indices:
        if isinstance(index, slice):
            if index != FULL:
                raise NotElementwiseError(f"{node.op} takes a part of a row", node.outputs[0])
        elif np.dtype(getattr(index.type, "dtype", bool)).kind not in "iu":
            raise NotElementwiseError(f"{node.op} adds or selects axes", node.outputs[0])
    return indices


def _ndim(index: Variable) -> int:
    return getattr(index.type, "ndim", 0)


def _counted(source: Variable, axis: int, place: IndexPlace, sizes: Lengths) -> IndexPlace | None:
    """Return the place of an axis that an index array counts through, None if it does not."""
    index, along = place.index, place.along
    if index is None or not along:
        return None
    node = index.owner
    if node is not None and isinstance(node.op, DimShuffle) and node.inputs[0].type.ndim == 1:
        along = (along[node.op.new_order.index(0)],)
        index = node.inputs[0]
    if index.type.ndim != 1:
        return None
    counted = sizes.of_range(index)
    if counted is None or not sizes.agrees(source, counted, axis):
        return None
    return IndexPlace(out=along[0])
