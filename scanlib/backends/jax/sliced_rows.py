"""Slices and rows of arrays of unknown length, and slices of other arrays by unknown bounds.

An index by slices and integers treats every axis by itself. So the axis of unknown length is moved
to the front, read or written there, and moved back.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply
from pytensor.tensor.subtensor import indices_from_subtensor

from scanlib.backends.jax.across import UNKNOWN, Plain, like, with_time
from scanlib.backends.jax.bounded import (
    Bounded,
    UnknownLengthError,
    bound_of,
    rows_of,
    slice_rows,
    static_int,
)


def subtensor(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Return a part of an array."""
    value, *parts = inputs
    indices = _of_all_axes(indices_from_subtensor(parts, node.op.idx_list), np.ndim(value))
    time = value.time if isinstance(value, UNKNOWN) else _unknown_axis(indices)
    if time is None:
        return plain(*inputs)
    own, others = indices[time], [*indices[:time], *indices[time + 1 :]]
    if isinstance(value, UNKNOWN):
        found = value.first[(own, *others)]
    elif own.step not in (None, 1):
        return plain(*inputs)
    else:
        first = jnp.moveaxis(jnp.asarray(value), time, 0)
        found = slice_rows(first, own.start, own.stop, "a slice of unknown length")
        found = found[(slice(None), *others)]
    return with_time(found, _kept(indices[:time])) if isinstance(found, Bounded) else found


def inc_subtensor(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Return an array with something added to a part of it, or written there."""
    target, values, *parts = inputs
    indices = _of_all_axes(indices_from_subtensor(parts, node.op.idx_list), np.ndim(target))
    time = _written_axis(target, values, indices)
    if time is None:
        first = indices[0]
        if isinstance(first, slice) and len(node.op.idx_list) == 1 and first.step in (None, 1):
            return _updated(node, jnp.asarray(target), values, first)
        return plain(*inputs)
    own, others = indices[time], [*indices[:time], *indices[time + 1 :]]
    values = _time_first(values, _kept(indices), _kept(indices[:time]), isinstance(own, slice))
    if isinstance(target, UNKNOWN):
        first = target.first
        rows = _written(node, first.rows, values, own, others, first.length)
        return with_time(Bounded(rows, first.length, first.origin), target.time)
    first = jnp.moveaxis(jnp.asarray(target), time, 0)
    return jnp.moveaxis(_written(node, first, values, own, others, len(first)), 0, time)


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


def _written_axis(target: Any, values: Any, indices: list[Any]) -> int | None:
    """Return the axis of an array that has, or is written by, an unknown length."""
    if isinstance(target, UNKNOWN):
        return target.time
    if not isinstance(values, UNKNOWN):
        return _unknown_axis(indices)
    kept = [axis for axis, index in enumerate(indices) if isinstance(index, slice)]
    return kept[values.time - values.ndim]


def _time_first(values: Any, ndim: int, time: int, has_time: bool) -> Any:
    """Return what is written to a part of `ndim` axes with its time as the first one."""
    if not np.ndim(values) or not has_time:
        return values
    new = ndim - np.ndim(values)
    if isinstance(values, UNKNOWN):
        whole = values.whole()
        whole = whole.reshape(*(1 for _ in range(new)), *whole.shape)
        moved = like(values, whole, values.time + new)
        if moved.time != time:
            values.__jax_array__()
        return moved.first
    if not time and new:
        return values  # the same for all rows
    values = jnp.asarray(values)
    return jnp.moveaxis(values.reshape(*(1 for _ in range(new)), *values.shape), time, 0)


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
    if own.step not in (None, 1):
        raise UnknownLengthError(
            "JAX needs to know when it compiles which part of an array is written; it is computed "
            "by the function itself"
        )
    capacity = len(target)
    whole = Bounded(target, length, "")
    places = jnp.arange(capacity)
    start = 0 if own.start is None else bound_of(own.start, whole.length)
    chosen = (places >= start) & (places < start + whole.slice(own.start, own.stop, None).length)
    values = jnp.asarray(rows_of(rows))
    if values.ndim == 1 + _kept(others) and (len(values) != 1 or isinstance(rows, Bounded)):
        if not len(values):
            return target
        values = values[jnp.clip(places - start, 0, len(values) - 1)]
    changed = _changed(node, target.at[(slice(None), *others)], values)
    return jnp.where(chosen.reshape((-1, *(1 for _ in target.shape[1:]))), changed, target)


def _changed(node: Apply, at: Any, values: Any) -> Any:
    return at.set(values) if node.op.set_instead_of_inc else at.add(values)
