"""PyTensor's own Ops on arrays of unknown length, and with sizes that JAX must know.

A rule takes a node, PyTensor's function for it, and what it is given while JAX traces.

* **Sizes** that are known when JAX compiles are constants, for which PyTensor has functions.
* **Row by row**: elementwise Ops, other orders of axes, reductions, products with matrices and
  sums of products are computed for the whole buffer of a `Bounded` array. What does not count is
  filled with what changes no result where time is reduced, or summed over. Where arrays of
  different lengths meet, the result is NaN.
* **Slices and rows** are read and written. An index by slices and integers treats every axis by
  itself: the axis of unknown length is moved to the front, read there, and moved back.

Any other Op raises `UnknownLengthError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytensor.tensor as pt
from pytensor.compile.ops import DeepCopyOp, TypeCastingOp
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, AllocEmpty, ARange, Eye, Join, Split
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import Repeat
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib._compat import INDEX_READS, INDEX_WRITES, join_of
from scanlib.backends.jax.bounded import (
    CHOSEN,
    LARGE,
    MASKED,
    Bounded,
    Length,
    UnknownLengthError,
    known_number,
    number_of,
    place_of,
    rows_of,
    static_int,
)
from scanlib.backends.jax.known_numbers import range_of
from scanlib.backends.jax.prepare import FIRST_SIZE

Plain = Callable[..., Any]
Inputs = tuple[Any, ...]


def rule_of(op: Any) -> Plain | None:
    """Return the rule for an Op, None if it has none."""
    return next((rule for kind, rule in _RULES.items() if isinstance(op, kind)), None)


def refuse(inputs: Inputs) -> Any:
    """Raise what an array of unknown length says where no rule takes it."""
    for value in inputs:
        if isinstance(value, Bounded):
            value.__jax_array__()


# Sizes


def _sized(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Return what PyTensor's function for constant sizes does."""
    refuse(inputs)
    first = FIRST_SIZE[type(node.op)] % len(inputs)
    arrays, sizes = inputs[:first], inputs[first:]
    if any(isinstance(size, jax.core.Tracer | Length) for size in sizes):
        raise UnknownLengthError(LARGE)
    known = [np.asarray(size, "int64") for size in sizes]
    with jax.ensure_compile_time_eval():
        new = node.op.make_node(*node.inputs[: len(arrays)], *map(pt.constant, known))
        function = jax_funcify(node.op, node=new)
    found = function(*arrays, *known)
    return found[0] if isinstance(found, list) and len(found) == 1 else found


def _alloc(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    value, sizes = (inputs[0], inputs[1:]) if isinstance(node.op, Alloc) else (0, inputs)
    if isinstance(value, Bounded):
        time = value.time + len(sizes) - value.ndim
        shape = [value.capacity if k == time else number_of(n) for k, n in enumerate(sizes)]
        return value.like(jnp.broadcast_to(value.rows, shape), time)
    lengths = [axis for axis, size in enumerate(sizes) if isinstance(size, Length)]
    others = [static_int(size) for size in sizes if not isinstance(size, Length)]
    if len(lengths) > 1 or None in others:
        raise UnknownLengthError(LARGE)
    # PyTensor writes constants into its code as numbers of Python's, which have no dtype.
    value = jnp.asarray(value, dtype=jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype))
    if not lengths:
        return plain(value, *sizes) if isinstance(node.op, Alloc) else plain(*sizes)
    (time,) = lengths
    rows = jnp.broadcast_to(value, [getattr(size, "bound", size) for size in sizes])
    return Bounded(rows, sizes[time].value, "an array of unknown length", time)


def _arange(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(node.op.dtype)
    known = [known_number(value) for value in inputs]
    if None not in known:
        return jnp.asarray(np.arange(*known, dtype=node.op.dtype), dtype)
    (low, _), (_, high), _ = map(range_of, inputs)
    if known[2] != 1 or high - low == np.inf:
        raise UnknownLengthError(LARGE)
    start, stop = map(number_of, inputs[:2])
    rows = start + jnp.arange(max(high - low, 0))
    length = jnp.maximum(stop - start, 0)
    return Bounded(rows.astype(dtype), length, "a range up to a number that is computed")


def _specify_shape(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    value, *sizes = inputs
    return value if isinstance(value, Bounded) else plain(value, *map(static_int, sizes))


def _shape_i(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    (value,) = inputs
    if node.op.i != value.time:
        return np.int64(value.shape[node.op.i])
    return Length(value.length, 0, value.capacity)


def _check(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Checks of known conditions are made when JAX compiles; of others it makes none."""
    value, *conditions = inputs
    known = [known_number(condition) for condition in conditions]
    if 0 in known:
        raise node.op.exc_type(node.op.msg)
    if None in known:
        plain(*inputs)
    return value


def _same(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    return inputs[0]


# Row by row


def _by_rows(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    bounded = [value for value in inputs if isinstance(value, Bounded)]
    first, op = bounded[0], node.op
    if isinstance(op, CAReduce):
        filler = _filler(op, first)
        reduced = range(first.ndim) if op.axis is None else op.axis
        found = plain(first.filled(filler))
        if first.time in reduced:
            return found
        return first.like(found, first.time - sum(axis < first.time for axis in reduced))
    if isinstance(op, DimShuffle):
        if first.time not in op.new_order:  # its length is one
            return plain(first.cut(1))
        return first.like(plain(first.rows), op.new_order.index(first.time))
    # Operands must have equal lengths, so one whose length is known tells that of the others.
    lengths, capacity = [v.length for v in bounded], min(v.capacity for v in bounded)
    plain_ones = (v for v in inputs if not isinstance(v, Bounded) and np.ndim(v) == first.ndim)
    sizes = (np.shape(v)[first.time] for v in plain_ones)
    known = next((n for n in sizes if n != 1), None)
    if len({v.time for v in bounded}) > 1 or (known or 0) > capacity:
        refuse(inputs)
    if known is not None:
        lengths, capacity = [*lengths, known], known
    results = plain(*(v.cut(capacity) if isinstance(v, Bounded) else v for v in inputs))
    found = _where_equal(lengths, [results] if len(node.outputs) == 1 else list(results))
    if known is None:
        found = [first.like(result) for result in found]
    return found[0] if len(found) == 1 else found


def _product(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Return a product of two arrays, which sums over the time of both or of none.

    PyTensor makes such products of sums of squares.
    """
    inner = [np.ndim(inputs[0]) - 1, 0]
    bounded = [(v, v.time == k) for v, k in zip(inputs, inner, strict=True) if _is_bounded(v)]
    first, sums = bounded[0]
    if len(bounded) != 1 + sums or not all(own == sums for _, own in bounded):
        refuse(inputs)
    capacity = min(v.capacity for v, _ in bounded)
    filled = [v.like(v.filled()).cut(capacity) if _is_bounded(v) else v for v in inputs]
    found = plain(*filled)
    if sums:
        return _where_equal([v.length for v, _ in bounded], [found])[0]
    return first.like(found, 0 if first is inputs[0] else found.ndim - 1)


def _is_bounded(value: Any) -> bool:
    return isinstance(value, Bounded)


def _join(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Return arrays behind one another in time, as gradients of slices are."""
    time, (axis, parts) = next(v.time for v in inputs if isinstance(v, Bounded)), join_of(node)
    if axis != time:
        refuse(inputs)
    dtype = jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype)
    given = inputs[len(inputs) - len(parts) :]
    buffers = [jnp.asarray(p.rows if isinstance(p, Bounded) else p, dtype) for p in given]
    shape = list(buffers[0].shape)
    shape[time] = sum(buffer.shape[time] for buffer in buffers)
    rows, length = jnp.zeros(shape, dtype), 0
    # What stands behind the rows of a part is overwritten by the next one.
    for part, buffer in zip(given, buffers, strict=True):
        rows = jax.lax.dynamic_update_slice_in_dim(rows, buffer, length, time)
        length = length + (part.length if isinstance(part, Bounded) else buffer.shape[time])
    return Bounded(rows, length, "an array of unknown length", time)


def _where_equal(lengths: list[Any], results: list[Any]) -> list[Any]:
    """Return results, or NaN where lengths differ: compiled code cannot raise an error."""
    first, *others = {id(length): length for length in lengths}.values()
    if not others:
        return results
    same = jnp.all(jnp.stack([jnp.asarray(first == other) for other in others]))
    return [
        jnp.where(same, result, jnp.nan) if jnp.issubdtype(result.dtype, jnp.inexact) else result
        for result in results
    ]


def _filler(op: CAReduce, value: Bounded) -> Any:
    """Return what changes no result of a reduction in the place of what does not count."""
    kind, name = np.dtype(value.dtype).kind, type(op.scalar_op).__name__
    if name.endswith(("Maximum", "Minimum")) and kind != "c":
        ends = np.iinfo(value.dtype) if kind in "iu" else None
        least = False if kind == "b" else -np.inf if ends is None else ends.min
        most = True if kind == "b" else np.inf if ends is None else ends.max
        return least if name.endswith("Maximum") else most
    fillers = {"Add": 0, "OR": 0, "XOR": 0, "Mul": 1, "AND": True if kind == "b" else -1}
    return fillers[name] if name in fillers else value.__jax_array__()


# Slices and rows


def _subtensor(node: Apply, plain: Plain, inputs: Inputs) -> Any:
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


def _inc_subtensor(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Return an array with something added to a part of it, or written there."""
    target, values, *parts = map(number_of, inputs)
    own, *others = _of_all_axes(indices_from_subtensor(parts, node.op.idx_list), np.ndim(target))
    arrays = [array for array in (target, values) if isinstance(array, Bounded)]
    forwards = isinstance(own, slice) and own.step in (None, 1)
    if not arrays and _unknown_axis([own, *others]) is None:
        if forwards and len(node.op.idx_list) == 1:
            return _updated(node, jnp.asarray(target), values, own)
        return plain(jnp.asarray(target), *inputs[1:])
    is_row = not isinstance(own, slice) and not isinstance(values, Bounded)
    rank = np.ndim(target) - len(others) + _kept(others)
    of_rows = not isinstance(values, Bounded) or values.ndim == rank
    if not (forwards or is_row) or any(a.time for a in arrays) or not of_rows:
        raise UnknownLengthError(
            "JAX needs to know when it compiles which part of an array is written; it is computed "
            "by the function itself. Let pt.where choose by the places of the rows, or compile "
            'with mode="NUMBA"'
        )
    rows = jnp.asarray(rows_of(target))
    length = target.length if isinstance(target, Bounded) else len(rows)
    if is_row:
        place = jnp.where(jnp.asarray(own) < 0, length + own, own)
        new = _changed(node, rows.at[(place, *others)], values)
    else:
        start = 0 if own.start is None else place_of(own.start, length)
        end = length if own.stop is None else place_of(own.stop, length)
        places = jnp.arange(len(rows))
        written = jnp.asarray(rows_of(values))
        if not written.size:
            return target
        if written.ndim == rank and (len(written) > 1 or isinstance(values, Bounded)):
            written = written[jnp.clip(places - start, 0, len(written) - 1)]
        new = _changed(node, rows.at[(slice(None), *others)], written)
        chosen = (places >= start) & (places < end)
        new = jnp.where(chosen.reshape((-1, *(1 for _ in rows.shape[1:]))), new, rows)
    return target.like(new) if isinstance(target, Bounded) else new


def _changed(node: Apply, at: Any, values: Any) -> Any:
    return (at.set if node.op.set_instead_of_inc else at.add)(values)


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


def _items(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Read or write items at arrays of places, or those that a mask selects.

    How many a mask selects is not known: what is read are the rows that it does, as `Bounded`, and
    what is written must be the same for all.
    """
    refuse(inputs)
    target, *parts = map(number_of, inputs)
    values: Any = parts.pop(0) if isinstance(node.op, INDEX_WRITES) else None
    indices = indices_from_subtensor(parts, node.op.idx_list)
    mask = next((i for i in indices if isinstance(i, jax.core.Tracer) and i.dtype == bool), None)
    if mask is None:
        return plain(*inputs)
    target, row_ndim = jnp.asarray(target), np.ndim(target) - mask.ndim
    many = values is not None and np.ndim(values) > row_ndim and len(values) != 1
    if many or len(indices) > 1:
        raise UnknownLengthError(
            f"JAX does not know when it compiles how many items a mask selects. {MASKED}"
        )
    if mask.shape != target.shape[: mask.ndim]:
        shape = target.shape
        raise IndexError(f"a mask of shape {mask.shape} is no index of an array of {shape}")
    if values is None:
        rows = target.reshape((-1, *target.shape[mask.ndim :]))
        (places,) = jnp.nonzero(mask.reshape(-1), size=len(rows), fill_value=0)
        return Bounded(rows[places], mask.sum(), CHOSEN)
    new = values if node.op.set_instead_of_inc else target + values
    return jnp.where(jnp.expand_dims(mask, range(mask.ndim, target.ndim)), new, target)


_RULES: dict[type, Plain] = {
    **dict.fromkeys((Eye, Repeat, Reshape, Split), _sized),
    **dict.fromkeys((Alloc, AllocEmpty), _alloc),
    ARange: _arange,
    SpecifyShape: _specify_shape,
    Shape_i: _shape_i,
    CheckAndRaise: _check,
    **dict.fromkeys((DeepCopyOp, TypeCastingOp), _same),
    **dict.fromkeys((CAReduce, DimShuffle, Elemwise), _by_rows),
    Dot: _product,
    Join: _join,
    Subtensor: _subtensor,
    IncSubtensor: _inc_subtensor,
    **dict.fromkeys(INDEX_READS[1:] + INDEX_WRITES[1:], _items),
}
# Rules for arrays of known length as well.
ALWAYS = {
    _alloc, _arange, _check, _inc_subtensor, _items, _sized, _specify_shape, _subtensor,
}  # fmt: skip
