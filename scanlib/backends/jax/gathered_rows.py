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
from scanlib.backends.jax.along_time import Plain
from scanlib.backends.jax.bounded import (
    Bounded,
    UnknownLengthError,
    number_of,
    rows_of,
    static_int,
)


def first_bounded(inputs: tuple[Any, ...]) -> Bounded | None:
    """Return the first array of unknown length, None if there is none."""
    return next((value for value in inputs if isinstance(value, Bounded)), None)


def join(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Return arrays behind one another in time."""
    first = first_bounded(inputs)
    if first is None:
        return plain(*inputs)
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
    if not isinstance(value, Bounded):
        return plain(value, shape)
    given = node.inputs[1]
    sizes = list(given.data) if isinstance(given, Constant) else list(shape)
    row = [static_int(number_of(size)) for size in sizes[1:]]
    first = static_int(number_of(sizes[0])) if sizes else 0
    if first not in (None, -1) or not all(size is not None and size > 0 for size in row):
        value.__jax_array__()
    count, old = prod(size or 1 for size in row), prod(value.rows.shape[1:])
    items = value.rows.reshape(-1)
    rows = items[: len(items) // count * count].reshape(-1, *row)
    return Bounded(rows, value.length * old // count, value.origin)


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
    """Items at an array of places: ``x[places]``, where either may be of unknown length."""
    if first_bounded(inputs) is None:
        return plain(*inputs)
    value, places = inputs[0], _only_places(node, inputs, 1)
    if isinstance(value, Bounded):
        known = places.rows if isinstance(places, Bounded) else places
        found = value.rows[jnp.where(known < 0, value.length + known, known)]
    else:
        found = plain(value, places.rows)
    return Bounded(found, places.length, places.origin) if isinstance(places, Bounded) else found


def write(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Items added to, or set at, an array of places."""
    if first_bounded(inputs) is None:
        return plain(*inputs)
    (target, values), places = inputs[:2], _only_places(node, inputs, 2)
    whole = target.rows if isinstance(target, Bounded) else jnp.asarray(target)
    length = target.length if isinstance(target, Bounded) else len(whole)
    index = places.rows if isinstance(places, Bounded) else jnp.asarray(places)
    index = jnp.where(index < 0, length + index, index)
    rows = values.rows if isinstance(values, Bounded) else jnp.asarray(values)
    if isinstance(places, Bounded):
        index = jnp.where(places.valid().reshape(-1), index, len(whole))
        if isinstance(values, Bounded):
            count = min(len(index), len(rows))
            index, rows = index[:count], rows[:count]
    elif isinstance(values, Bounded):
        rows = rows[: len(index)]
    at = whole.at[index]
    changed = (
        at.set(rows, mode="drop")
        if node.op.set_instead_of_inc
        else at.add(rows.astype(whole.dtype), mode="drop")
    )
    return (
        Bounded(changed, target.length, target.origin) if isinstance(target, Bounded) else changed
    )


def _only_places(node: Apply, inputs: tuple[Any, ...], lead: int) -> Any:
    """Return the one array of integers that an index consists of."""
    found = indices_from_subtensor(list(inputs[lead:]), node.op.idx_list)
    kinds = np.dtype(getattr(found[0], "dtype", object)).kind
    if len(found) != 1 or kinds not in "iu" or np.ndim(found[0]) != 1:
        raise UnknownLengthError(
            "JAX compiles one array of integers as the index of an array of unknown length, "
            "nothing else"
        )
    return found[0]
