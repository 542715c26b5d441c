"""What reduces, accumulates or sorts arrays of unknown length along time.

Time is the first axis. Rows that do not count stand behind the others, so they are no harm to what
runs from the first row to the last one: running sums and products, and the first place of an
extreme. Everywhere else they hold what does not change the result: the identity of a reduction, or
what is sorted to the end.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply

from scanlib._compat import sort_axis
from scanlib.backends.jax.bounded import Bounded

Plain = Callable[..., Any]


def takes_time(axes: Any, ndim: int) -> bool:
    """Whether the axes of a reduction, None for all, have time among them."""
    return axes is None or 0 in axes or -ndim in axes


def lowest(value: Bounded) -> Any:
    """Return what no item of an array is lower than."""
    dtype = np.dtype(value.dtype)
    if dtype.kind == "b":
        return False
    if dtype.kind == "c":
        value.__jax_array__()
    return np.iinfo(dtype).min if dtype.kind in "iu" else -np.inf


def highest(value: Bounded) -> Any:
    """Return what no item of an array is higher than."""
    dtype = np.dtype(value.dtype)
    if dtype.kind == "b":
        return True
    if dtype.kind == "c":
        value.__jax_array__()
    return np.iinfo(dtype).max if dtype.kind in "iu" else np.inf


def _identity(value: Bounded, scalar_op: Any) -> Any:
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
    if not isinstance(value, Bounded):
        return plain(value)
    if takes_time(node.op.axis, value.ndim):
        return plain(value.filled(_identity(value, node.op.scalar_op)))
    return Bounded(plain(value.rows), value.length, value.origin)


def argmax(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """The place of the greatest item: the first of them, so that rows that count win."""
    (value,) = inputs
    if not isinstance(value, Bounded):
        return plain(value)
    if takes_time(node.op.axis, value.ndim):
        return plain(value.filled(lowest(value)))
    return Bounded(plain(value.rows), value.length, value.origin)


def accumulate(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Running sums and products; along no axis, of all items one after another."""
    (value,) = inputs
    if not isinstance(value, Bounded):
        return plain(value)
    length = value.length
    if node.op.axis is None:
        length = length * prod(value.rows.shape[1:])
    return Bounded(plain(value.rows), length, value.origin)


def softmax(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """`softmax` and `log_softmax`."""
    (value,) = inputs
    if not isinstance(value, Bounded):
        return plain(value)
    axis = node.op.axis
    axes = axis if axis is None or isinstance(axis, tuple | list) else (axis,)
    rows = value.filled(-np.inf) if takes_time(axes, value.ndim) else value.rows
    return Bounded(plain(rows), value.length, value.origin)


def sort(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Sorted items: NaN comes last, and so does what stands behind the rows that count."""
    value = inputs[0]
    if not isinstance(value, Bounded):
        return plain(*inputs)
    rows = _with_last(value) if _sorts_time(node) else value.rows
    return Bounded(plain(rows, *inputs[1:]), value.length, value.origin)


def argsort(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Where sorted items stand. Of equal ones the first comes first, before rows of no account."""
    value = inputs[0]
    if not isinstance(value, Bounded):
        return plain(*inputs)
    if not _sorts_time(node):
        return Bounded(plain(value.rows, *inputs[1:]), value.length, value.origin)
    order = jnp.argsort(_with_last(value), axis=0, stable=True)
    return Bounded(order, value.length, value.origin)


def _with_last(value: Bounded) -> Any:
    """Return the buffer with what is sorted to the end in the rows that do not count."""
    return value.filled(jnp.nan if jnp.issubdtype(value.dtype, jnp.floating) else highest(value))


def _sorts_time(node: Apply) -> bool:
    axis = sort_axis(node)
    return axis is None or axis % node.outputs[0].type.ndim == 0
