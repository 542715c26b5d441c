"""Arrays of unknown length that are joined, and that are read or written at places of an array."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply, Constant
from pytensor.tensor.subtensor import indices_from_subtensor

from scanlib._compat import join_of
from scanlib.backends.jax.across import UNKNOWN, Plain, common_time, like, with_time
from scanlib.backends.jax.bounded import (
    Bounded,
    UnknownLengthError,
    number_of,
    rows_of,
    static_int,
)


def join(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Return arrays behind one another in time."""
    first = next(value for value in inputs if isinstance(value, Bounded))
    parts = list(inputs[len(inputs) - len(join_of(node)[1]) :])
    dtype = jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype)
    buffers = [jnp.asarray(p.rows if isinstance(p, Bounded) else p, dtype) for p in parts]
    rows = jnp.zeros((sum(map(len, buffers)), *first.rows.shape[1:]), dtype)
    length: Any = 0
    # What stands behind the rows of a part is overwritten by the next one.
    for part, buffer in zip(parts, buffers, strict=True):
        rows = jax.lax.dynamic_update_slice_in_dim(rows, buffer, length, 0)
        length = length + (part.length if isinstance(part, Bounded) else len(part))
    return Bounded(rows, length, first.origin)


def reshape(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Return an array with other axes behind time, or with rows that are cut along time."""
    value, shape = inputs
    if not isinstance(value, UNKNOWN):
        return plain(value, shape)
    given = node.inputs[1]
    listed = given.data if isinstance(given, Constant) else shape
    sizes = [static_int(number_of(size)) for size in listed]
    whole, first = value.whole(), value.first
    new = next((k for k, size in enumerate(sizes) if size in (None, -1)), len(sizes))
    others = [-1 if size is None else size for size in sizes]
    lead, row = others[:new], others[new + 1 :]
    fits = new < len(sizes) and prod(lead) == prod(whole.shape[: value.time]) > 0
    if not fits or min([*lead, *row], default=1) < 1:
        value.__jax_array__()
    # The axes before time stay before it, those behind it and time itself are cut anew.
    count, old = prod(row), prod(whole.shape[value.time + 1 :])
    room = first.capacity * old // count
    items = whole.reshape(prod(lead), -1)[:, : room * count]
    rows = jnp.moveaxis(items.reshape(*lead, room, *row), new, 0)
    return with_time(Bounded(rows, first.length * old // count, first.origin), new)


def split(array: Any, sizes: Sequence[Any]) -> list[Any]:
    """Return the parts of an array that lie behind one another in time."""
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


def read(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Items at arrays of places: ``x[places]``, where either may be of unknown length."""
    if not any(isinstance(value, UNKNOWN) for value in inputs):
        return plain(*inputs)
    value, places = inputs[0], _places(node, inputs, 1)
    time = _time_after(value, places)
    if time is not None:
        return like(value, value.whole()[tuple(places)], time)
    found = _whole(value)[tuple(_from_start(value, places))]
    time = _time_of_places(places)
    return found if time is None else like(_sized(places), found, time)


def write(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Items added to, or set at, arrays of places."""
    if not any(isinstance(value, UNKNOWN) for value in inputs):
        return plain(*inputs)
    (target, values), places = inputs[:2], _places(node, inputs, 2)
    whole = jnp.asarray(_whole(target))
    rows = jnp.asarray(_whole(values))
    time = _time_after(target, places)
    if time is not None:
        at = whole.at[tuple(places)]
        axis = time - (jax.eval_shape(lambda: whole[tuple(places)]).ndim - rows.ndim)
        if axis >= 0:
            rows = _fitted(rows, target.first.capacity, axis)
    else:
        index = _from_start(target, places)
        region = jax.eval_shape(lambda: whole[tuple(index)])
        axis, missing = _time_of_places(places), region.ndim - rows.ndim
        if axis is not None:
            # What stands at places that do not count goes nowhere.
            sized, first = _sized(places), _first_array(places)
            counts = jnp.moveaxis(sized.first.valid(), 0, sized.time)
            index[first] = jnp.where(counts, index[first], whole.shape[first])
            axis -= missing
        elif isinstance(values, UNKNOWN):
            axis = values.time
        if axis is not None and axis >= 0:
            rows = _fitted(rows, region.shape[axis + missing], axis)
        at = whole.at[tuple(index)]
    if node.op.set_instead_of_inc:
        changed = at.set(rows, mode="drop")
    else:
        changed = at.add(rows.astype(whole.dtype), mode="drop")
    return like(target, changed) if isinstance(target, UNKNOWN) else changed


def _whole(array: Any) -> Any:
    return array.whole() if isinstance(array, UNKNOWN) else array


def _time_after(array: Any, places: list[Any]) -> int | None:
    """Return where time is in what an index takes of all rows, None if it takes some of them."""
    if not isinstance(array, UNKNOWN) or _sized(places) is not None:
        return None
    time = array.time
    if time < len(places):
        return time if isinstance(places[time], slice) else None
    arrays = [part for part in places if not isinstance(part, slice)]
    return time - len(arrays) + max(np.ndim(part) for part in arrays)


def _first_array(places: list[Any]) -> int:
    """Return which of some places is the first array."""
    return next(k for k, part in enumerate(places) if not isinstance(part, slice))


def _time_of_places(places: list[Any]) -> int | None:
    """Return where time is in what is taken at places, None if these have a known length."""
    sized = _sized(places)
    if sized is None:
        return None
    ndim = max(np.ndim(part) for part in places if not isinstance(part, slice))
    return _first_array(places) + ndim - sized.ndim + sized.time


def _sized(places: list[Any]) -> Any:
    """Return the first of some places that has an unknown length, None if none has."""
    common_time(tuple(places))
    return next((part for part in places if isinstance(part, UNKNOWN)), None)


def _from_start(array: Any, places: list[Any]) -> list[Any]:
    """Return places as plain arrays; those in time are counted from its start."""
    index: list[Any] = [
        part if isinstance(part, slice) else jnp.asarray(_whole(part)) for part in places
    ]
    if isinstance(array, UNKNOWN):
        if array.time >= len(index) or _first_array(places):
            _refuse_index()
        own = index[array.time]
        index[array.time] = jnp.where(own < 0, array.first.length + own, own)
        return index
    return [
        part if isinstance(part, slice) else jnp.where(part < 0, size + part, part)
        for part, size in zip(index, np.shape(array), strict=False)
    ]


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
    if isinstance(inputs[0], UNKNOWN):
        slices = [part for part in found if isinstance(part, slice)]
        if any(part != slice(None) for part in slices) or arrays[-1] + 1 != len(found):
            _refuse_index()
    return found


def _refuse_index() -> None:
    raise UnknownLengthError(
        "JAX compiles arrays of integers as the index of an array of unknown length, and full "
        "slices before them, nothing else; as that of other arrays, all of them side by side"
    )
