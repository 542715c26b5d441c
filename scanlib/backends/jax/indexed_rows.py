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

from scanlib.backends.jax.bounded import (
    Bounded,
    UnknownLengthError,
    bound_of,
    number_of,
    rows_of,
    static_int,
)

Plain = Callable[..., Any]

# Slices and rows


def subtensor(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Return a part of an array."""
    value, *parts = inputs
    indices = _of_all_axes(indices_from_subtensor(parts, node.op.idx_list), np.ndim(value))
    time = value.time if isinstance(value, Bounded) else _unknown_axis(indices)
    if time is None:
        return plain(*inputs)
    own, others = indices[time], [*indices[:time], *indices[time + 1 :]]
    if isinstance(value, Bounded):
        first = value.moved(0)
    elif own.step not in (None, 1):
        return plain(*inputs)
    else:
        array = jnp.moveaxis(jnp.asarray(value), time, 0)
        first = Bounded(array, len(array), "a slice of unknown length")
    found = first[(own, *others)]
    return found.moved(_kept(indices[:time])) if isinstance(found, Bounded) else found


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
    if isinstance(target, Bounded):
        rows = _written(node, target.moved(0).rows, values, own, others, target.length)
        return target.like(jnp.moveaxis(rows, 0, time))
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
    if isinstance(target, Bounded):
        return target.time
    if not isinstance(values, Bounded):
        return _unknown_axis(indices)
    kept = [axis for axis, index in enumerate(indices) if isinstance(index, slice)]
    return kept[values.time - values.ndim]


def _time_first(values: Any, ndim: int, time: int, has_time: bool) -> Any:
    """Return what is written to a part of `ndim` axes with its time as the first one."""
    if not np.ndim(values) or not has_time:
        return values
    new = ndim - np.ndim(values)
    if isinstance(values, Bounded):
        whole = values.rows.reshape(*(1 for _ in range(new)), *values.rows.shape)
        if values.time + new != time:
            values.__jax_array__()
        return values.like(whole, time).moved(0)
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
            "by the function itself. Let pt.where choose by the places of the rows, or compile "
            'with mode="NUMBA"'
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


def split(array: Any, sizes: Sequence[Any]) -> list[Any]:
    """Return the parts of an array that lie behind one another in time: the gradient of a join."""
    rows, start, parts = rows_of(array), 0, []
    for size in map(number_of, sizes):
        known = static_int(size)
        if known is not None:
            part: Any = jax.lax.dynamic_slice_in_dim(rows, start, known)
        else:
            part = Bounded(jnp.roll(rows, -start, axis=0), size, "a part of unknown length")
        parts.append(part)
        start = start + size
    return parts


def refuse_places(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Items at arrays of places, where the array, what is written or the places are that long."""
    raise UnknownLengthError(
        "JAX compiles no arrays as the index of an array of unknown length, and none of unknown "
        "length as an index. Read one row after the other in the loop, keep all rows and let "
        'pt.where choose, or compile with mode="NUMBA"'
    )
