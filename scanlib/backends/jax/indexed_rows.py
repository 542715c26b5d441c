"""Arrays of unknown length that are sliced and joined, and rows of them that are read and written.

An index by slices and integers treats every axis by itself. So the axis of unknown length is moved
to the front, read or written there, and moved back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply
from pytensor.tensor.subtensor import indices_from_subtensor

from scanlib._compat import INDEX_WRITES
from scanlib.backends.jax.bounded import (
    CHOSEN,
    MASKED,
    Bounded,
    UnknownLengthError,
    number_of,
    place_of,
    rows_of,
    static_int,
)

Plain = Callable[..., Any]

# Slices and rows


def subtensor(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Return a part of an array."""
    value, *parts = map(number_of, inputs)
    indices = _of_all_axes(indices_from_subtensor(parts, node.op.idx_list), np.ndim(value))
    time = value.time if isinstance(value, Bounded) else _unknown_axis(indices)
    if time is None:
        return plain(*inputs)
    own, others = indices[time], [*indices[:time], *indices[time + 1 :]]
    if isinstance(value, Bounded):
        first = value.moved(0)
    else:
        array = jnp.moveaxis(jnp.asarray(value), time, 0)
        first = Bounded(array, len(array), "a slice of unknown length")
    if not isinstance(own, slice):
        row = first.row(own)
        return row[tuple(others)] if others else row
    found = first.slice(own)
    return found.like(found.rows[(slice(None), *others)]).moved(_kept(indices[:time]))


def inc_subtensor(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Return an array with something added to a part of it, or written there."""
    target, values, *parts = map(number_of, inputs)
    own, *others = _of_all_axes(indices_from_subtensor(parts, node.op.idx_list), np.ndim(target))
    arrays = [array for array in (target, values) if isinstance(array, Bounded)]
    if not arrays and _unknown_axis([own, *others]) is None:
        if isinstance(own, slice) and len(node.op.idx_list) == 1 and own.step in (None, 1):
            return _updated(node, jnp.asarray(target), values, own)
        return plain(*inputs)
    in_rows = isinstance(own, slice) and own.step in (None, 1)
    is_row = not isinstance(own, slice) and not isinstance(values, Bounded)
    of_rows = not isinstance(values, Bounded) or values.ndim == 1 + _kept(others)
    if not (in_rows or is_row) or any(a.time for a in arrays) or not of_rows:
        raise UnknownLengthError(
            "JAX needs to know when it compiles which part of an array is written; it is computed "
            "by the function itself. Let pt.where choose by the places of the rows, or compile "
            'with mode="NUMBA"'
        )
    if isinstance(target, Bounded):
        return target.like(_written(node, target.rows, values, own, others, target.length))
    target = jnp.asarray(target)
    return _written(node, target, values, own, others, len(target))


def _of_all_axes(indices: Any, ndim: int) -> list[Any]:
    return [*indices, *[slice(None)] * (ndim - len(indices))]


def _kept(indices: list[Any]) -> int:
    """Return how many axes are left of those that indices are for."""
    return sum(isinstance(index, slice) for index in indices)


def _unknown_axis(indices: list[Any]) -> int | None:
    """Return the first axis that is sliced by bounds that are not known, None if none is."""
    for axis, index in enumerate(indices):
        bounds = [index.start, index.stop] if isinstance(index, slice) else []
        if any(bound is not None and static_int(bound) is None for bound in bounds):
            return axis
    return None


def _updated(node: Apply, target: Any, rows: Any, where: slice) -> Any:
    """Return an array with rows added to, or written into, a slice of known bounds.

    Not a scatter, as ``target.at[where].add(rows)`` is: slower, and XLA's compiler for CPUs dies of
    reversed ones.
    """
    bounds = [None if b is None else static_int(b) for b in (where.start, where.stop)]
    start, stop, _ = slice(*bounds).indices(len(target))
    old = target[start : max(start, stop)]
    new = rows if node.op.set_instead_of_inc else old + rows
    new = jnp.broadcast_to(jnp.asarray(new, target.dtype), old.shape)
    return jax.lax.dynamic_update_slice_in_dim(target, new, start, 0)


def _written(node: Apply, target: Any, rows: Any, own: Any, others: list[Any], length: Any) -> Any:
    """Return a buffer with something added to, or written into, a part of its first rows."""
    if not isinstance(own, slice):
        place = jnp.where(jnp.asarray(own) < 0, length + own, own)
        return _changed(node, target.at[(place, *others)], rows)
    places = jnp.arange(len(target))
    start = 0 if own.start is None else place_of(own.start, length)
    end = start + Bounded(target, length, "").slice(own).length
    return _where(node, target, rows, (places >= start) & (places < end), places - start, others)


def _where(
    node: Apply, target: Any, rows: Any, chosen: Any, places: Any, others: Sequence[Any] = ()
) -> Any:
    """Return an array with something added to, or written into, its chosen rows.

    Parameters
    ----------
    node : Apply
    target : jax.Array
    rows : jax.Array or Bounded
        One row for all, or many of them.
    chosen : jax.Array
        Whether a row of the array is changed.
    places : jax.Array
        For each that is, the number of the row that is written there.
    others : sequence, optional
        What is written of a row.
    """
    values = jnp.asarray(rows_of(rows))
    count = target.ndim - len(others) + _kept(list(others))
    if values.ndim == count and (len(values) != 1 or isinstance(rows, Bounded)):
        if not len(values):
            return target
        values = values[jnp.clip(places, 0, len(values) - 1)]
    changed = _changed(node, target.at[(slice(None), *others)], values)
    return jnp.where(chosen.reshape((-1, *(1 for _ in target.shape[1:]))), changed, target)


def _changed(node: Apply, at: Any, values: Any) -> Any:
    return (at.set if node.op.set_instead_of_inc else at.add)(values)


# Parts behind one another


def join(parts: Sequence[Any], time: int, dtype: Any) -> Bounded:
    """Return arrays behind one another in time."""
    first = next(part for part in parts if isinstance(part, Bounded))
    buffers = [jnp.asarray(p.rows if isinstance(p, Bounded) else p, dtype) for p in parts]
    shape = list(first.rows.shape)
    shape[time] = sum(buffer.shape[time] for buffer in buffers)
    rows, length = jnp.zeros(shape, dtype), 0
    # What stands behind the rows of a part is overwritten by the next one.
    for part, buffer in zip(parts, buffers, strict=True):
        rows = jax.lax.dynamic_update_slice_in_dim(rows, buffer, length, time)
        length = length + (part.length if isinstance(part, Bounded) else buffer.shape[time])
    return Bounded(rows, length, first.origin, time)


# Items at places, and those that a mask selects


def items(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Read or write items at arrays of places, or those that a mask selects.

    How many a mask selects is not known: what is read are the rows that it does, as `Bounded`.
    """
    writes = isinstance(node.op, INDEX_WRITES)
    target, *parts = map(number_of, inputs)
    values: Any = parts.pop(0) if writes else None
    indices = indices_from_subtensor(parts, node.op.idx_list)
    unknown = [index for index in indices if isinstance(index, jax.core.Tracer | Bounded)]
    masks = [index for index in unknown if index.dtype == np.bool_]
    if not masks and not any(isinstance(value, Bounded) for value in (target, values, *indices)):
        return plain(*inputs)
    if len(indices) != 1 or not masks:
        raise UnknownLengthError(_NO_MASK if masks else _NO_PLACES)
    (mask,) = masks
    whole, flags = rows_of(target), mask.filled(False) if isinstance(mask, Bounded) else mask
    if flags.shape != whole.shape[: flags.ndim]:
        raise IndexError(f"a mask of shape {flags.shape} is no index of an array of {whole.shape}")
    rows = whole.reshape((-1, *whole.shape[flags.ndim :]))
    chosen = flags.reshape(-1)
    if not writes:
        (places,) = jnp.nonzero(chosen, size=len(chosen), fill_value=0)
        return Bounded(rows[places], chosen.sum(), CHOSEN)
    changed = _where(node, rows, values, chosen, jnp.cumsum(chosen) - 1).reshape(whole.shape)
    return target.like(changed) if isinstance(target, Bounded) else changed


def nonzero(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Return the places where a mask is true, which JAX must know when it compiles."""
    if isinstance(inputs[0], jax.core.Tracer | Bounded):
        raise UnknownLengthError(_NO_MASK)
    return plain(*inputs)


_NO_MASK = f"JAX does not know when it compiles how many items a mask selects. {MASKED}"
_NO_PLACES = (
    "JAX compiles no arrays as the index of an array of unknown length, and none of unknown length "
    "as an index. Read one row after the other in the loop, keep all rows and let pt.where choose, "
    'or compile with mode="NUMBA"'
)
