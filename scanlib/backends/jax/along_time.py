"""What reduces, accumulates or sorts arrays of unknown length along time.

Rows that do not count stand behind the others, so they are no harm to what runs from the first row
to the last one: running sums and products, and the first place of an extreme. Everywhere else they
hold what does not change the result: the identity of a reduction, or what is sorted to the end.
"""

from __future__ import annotations

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply

from scanlib._compat import sort_axis
from scanlib.backends.jax.across import UNKNOWN, Across, Plain, like
from scanlib.backends.jax.bounded import Bounded, rows_of


def time_after(axes: Any, ndim: int, time: int) -> int | None:
    """Return where time is when a reduction took axes, None for all; None if it took time."""
    taken = set(range(ndim)) if axes is None else {axis % ndim for axis in axes}
    return None if time in taken else time - sum(axis < time for axis in taken)


def lowest(value: Bounded | Across) -> Any:
    """Return what no item of an array is lower than."""
    return _ends(value)[0]


def highest(value: Bounded | Across) -> Any:
    """Return what no item of an array is higher than."""
    return _ends(value)[1]


def _ends(value: Bounded | Across) -> tuple[Any, Any]:
    dtype = np.dtype(value.dtype)
    if dtype.kind == "b":
        return False, True
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    if dtype.kind == "c":
        value.__jax_array__()  # raises the error that says where the unknown length is from
    return -np.inf, np.inf


def _identity(value: Bounded | Across, scalar_op: Any) -> Any:
    """Return what does not change the result of a reduction."""
    name = type(scalar_op).__name__
    if name in ("Add", "OR", "XOR"):
        return 0
    if name in ("Mul", "MulWithoutZeros"):
        return 1
    if name == "AND":
        return True if np.dtype(value.dtype).kind == "b" else -1
    if name in ("ScalarMaximum", "Maximum"):
        return lowest(value)
    if name in ("ScalarMinimum", "Minimum"):
        return highest(value)
    value.__jax_array__()
    return None


def reduce(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Sums, products, extremes, `any` and `all`."""
    (value,) = inputs
    if not isinstance(value, UNKNOWN):
        return plain(value)
    time = time_after(node.op.axis, value.ndim, value.time)
    if time is None:
        return plain(value.filled(_identity(value, node.op.scalar_op)))
    return like(value, plain(value.whole()), time)


def argmax(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """The place of the greatest item: the first of them, so that rows that count win."""
    (value,) = inputs
    if not isinstance(value, UNKNOWN):
        return plain(value)
    time = time_after(node.op.axis, value.ndim, value.time)
    if time is None:
        return plain(value.filled(lowest(value)))
    return like(value, plain(value.whole()), time)


def accumulate(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Running sums and products; along no axis, of all items one after another."""
    (value,) = inputs
    if not isinstance(value, UNKNOWN):
        return plain(value)
    if node.op.axis is not None:
        return like(value, plain(value.whole()))
    if isinstance(value, Across):
        return value.__jax_array__()
    return Bounded(plain(value.rows), value.length * prod(value.rows.shape[1:]), value.origin)


def softmax(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """`softmax` and `log_softmax`."""
    (value,) = inputs
    if not isinstance(value, UNKNOWN):
        return plain(value)
    axis = node.op.axis
    axes = axis if axis is None or isinstance(axis, tuple | list) else (axis,)
    takes = time_after(axes, value.ndim, value.time) is None
    return like(value, plain(value.filled(-np.inf) if takes else value.whole()))


def sort(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Sorted items: NaN comes last, and so does what stands behind the rows that count."""
    value = inputs[0]
    if not isinstance(value, UNKNOWN):
        return plain(*inputs)
    items = with_last(value) if _sorts_time(node, value) else value.whole()
    return like(value, plain(items, *inputs[1:]))


def argsort(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Where sorted items stand. Of equal ones the first comes first, before rows of no account."""
    value = inputs[0]
    if not isinstance(value, UNKNOWN):
        return plain(*inputs)
    if not _sorts_time(node, value):
        return like(value, plain(value.whole(), *inputs[1:]))
    return like(value, jnp.argsort(with_last(value), axis=value.time, stable=True))


def searchsorted(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Where items belong among sorted ones: behind the last row that counts, if after all."""
    if not any(isinstance(array, UNKNOWN) for array in inputs):
        return plain(*inputs)
    among, items, *sorter = inputs
    if sorter:
        among = _taken(among, sorter[0])
    wanted = items.whole() if isinstance(items, UNKNOWN) else jnp.asarray(items)
    if isinstance(among, Bounded):
        places = jnp.searchsorted(with_last(among), wanted, side=node.op.side)
        places = jnp.minimum(places, among.length)
    else:
        places = jnp.searchsorted(jnp.asarray(among), wanted, side=node.op.side)
    places = places.astype(jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype))
    return like(items, places) if isinstance(items, UNKNOWN) else places


def _taken(array: Any, places: Any) -> Any:
    """Return the items of a vector in another order."""
    items = jnp.asarray(rows_of(array))[rows_of(places)]
    sized = next((a for a in (array, places) if isinstance(a, Bounded)), None)
    return items if sized is None else Bounded(items, sized.length, sized.origin)


def with_last(value: Bounded | Across) -> Any:
    """Return the buffer with what is sorted to the end in the rows that do not count."""
    return value.filled(jnp.nan if jnp.issubdtype(value.dtype, jnp.floating) else highest(value))


def _sorts_time(node: Apply, value: Bounded | Across) -> bool:
    axis = sort_axis(node)
    return axis is None or axis % value.ndim == value.time
