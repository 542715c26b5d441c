"""Arrays of unknown length that are sliced, joined, and read or written at places.

An index by slices and integers treats every axis by itself. So the axis of unknown length is moved
to the front, read or written there, and moved back. Places are arrays of integers.
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


def _changed(node: Apply, at: Any, values: Any, **options: Any) -> Any:
    return (at.set if node.op.set_instead_of_inc else at.add)(values, **options)


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


# Arrays of places


def read(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Items at arrays of places: ``x[places]``, where either may be of unknown length."""
    value, places = inputs[0], _places(node, inputs, 1)
    time = _time_after(value, places)
    if time is not None:
        return value.like(value.rows[tuple(places)], time)
    found = _buffer(value)[tuple(_from_start(value, places))]
    sized, axis = _unknown_place(places)
    return found if sized is None else sized.like(found, axis)


def write(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Items added to, or set at, arrays of places."""
    (target, values), places = inputs[:2], _places(node, inputs, 2)
    whole, rows = (jnp.asarray(_buffer(each)) for each in (target, values))
    axis = _time_after(target, places)
    index = list(places) if axis is not None else _from_start(target, places)
    region = jax.eval_shape(lambda: whole[tuple(index)])
    sized, own = (None, None) if axis is not None else _unknown_place(places)
    if sized is not None:  # what stands at places that do not count goes nowhere
        first = _first_array(places)
        index[first] = jnp.where(sized.valid(), index[first], whole.shape[first])
        axis = own
    elif axis is None and isinstance(values, Bounded):
        axis = values.time + region.ndim - rows.ndim
    if axis is not None and axis >= region.ndim - rows.ndim:
        rows = _fitted(rows, region.shape[axis], axis - region.ndim + rows.ndim)
    changed = _changed(node, whole.at[tuple(index)], rows.astype(whole.dtype), mode="drop")
    return target.like(changed) if isinstance(target, Bounded) else changed


def _buffer(array: Any) -> Any:
    return array.rows if isinstance(array, Bounded) else array


def _time_after(array: Any, places: list[Any]) -> int | None:
    """Return where time is in what an index takes of all rows, None if it takes some of them."""
    if not isinstance(array, Bounded) or _unknown_place(places)[0] is not None:
        return None
    if array.time < len(places):
        return array.time if isinstance(places[array.time], slice) else None
    arrays = [part for part in places if not isinstance(part, slice)]
    return array.time - len(arrays) + max(np.ndim(part) for part in arrays)


def _first_array(places: list[Any]) -> int:
    """Return which of some places is the first array."""
    return next(k for k, part in enumerate(places) if not isinstance(part, slice))


def _unknown_place(places: list[Any]) -> tuple[Any, int]:
    """Return the first of some places that has an unknown length, None if none has, and where time
    is in what is taken at them."""
    sized = [part for part in places if isinstance(part, Bounded)]
    if not sized:
        return None, 0
    if len({part.time for part in sized}) > 1:
        sized[0].__jax_array__()
    ndim = max(np.ndim(part) for part in places if not isinstance(part, slice))
    return sized[0], _first_array(places) + ndim - sized[0].ndim + sized[0].time


def _from_start(array: Any, places: list[Any]) -> list[Any]:
    """Return places as plain arrays; those in time are counted from its start."""
    if isinstance(array, Bounded) and (array.time >= len(places) or _first_array(places)):
        _refuse_index()
    index = list(places)
    for k, (part, size) in enumerate(zip(places, array.shape, strict=False)):
        if not isinstance(part, slice):
            own = jnp.asarray(_buffer(part))
            index[k] = jnp.where(own < 0, size + own, own)
    return index


def _fitted(rows: Any, count: int, axis: int) -> Any:
    """Return an array with another number of rows; of those that do not count more or less."""
    if rows.shape[axis] in (1, count):
        return rows
    rows = jax.lax.slice_in_dim(rows, 0, min(count, rows.shape[axis]), axis=axis)
    missing = count - rows.shape[axis]
    return jnp.pad(rows, [(0, missing if k == axis else 0) for k in range(rows.ndim)])


def _places(node: Apply, inputs: tuple[Any, ...], lead: int) -> list[Any]:
    """Return the arrays of integers and the slices that an index consists of.

    Slices of an array of unknown length are full, and stand before the arrays.
    """
    found = list(indices_from_subtensor(list(inputs[lead:]), node.op.idx_list))
    arrays = [k for k, part in enumerate(found) if not isinstance(part, slice)]
    kinds = {np.dtype(getattr(found[k], "dtype", type(found[k]))).kind for k in arrays}
    if not kinds <= set("iu") or arrays != list(range(arrays[0], arrays[-1] + 1)):
        _refuse_index()
    if isinstance(inputs[0], Bounded):
        slices = [part for part in found if isinstance(part, slice)]
        if any(part != slice(None) for part in slices) or arrays[-1] + 1 != len(found):
            _refuse_index()
    return found


def _refuse_index() -> None:
    raise UnknownLengthError(
        "JAX compiles arrays of integers as the index of an array of unknown length, and full "
        "slices before them, nothing else; as that of other arrays, all of them side by side. Take "
        'one index after the other, or compile with mode="NUMBA"'
    )
