"""PyTensor's own Ops on arrays of unknown length.

A rule takes a node, PyTensor's function for it, and what it is given while JAX traces. On `Bounded`
arrays

* elementwise Ops, dimshuffles and products with a matrix work on the whole buffer; where arrays of
  different lengths meet, the result is NaN;
* what does not count holds what does not change the result where time is reduced, or summed over in
  a product. It stands behind what counts, so running sums need no such thing;
* arrays are joined, sliced and masked, and rows of them read and written (`indexed_rows`).

Any other Op raises `UnknownLengthError`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.compile.ops import DeepCopyOp, TypeCastingOp
from pytensor.graph.basic import Apply
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, AllocEmpty, ARange, Eye, Join, Nonzero, Split
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp, Repeat
from pytensor.tensor.math import Argmax, Dot
from pytensor.tensor.shape import Reshape, Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib._compat import INDEX_READS, INDEX_WRITES, IfElse, join_of, split_of
from scanlib.backends.jax.bounded import (
    RANGE,
    SQUARE,
    Bounded,
    Length,
    UnknownLengthError,
    known_number,
    number_of,
    static_int,
)
from scanlib.backends.jax.indexed_rows import inc_subtensor, items, join, nonzero, subtensor
from scanlib.backends.jax.known_numbers import range_of

Plain = Callable[..., Any]


def rule_of(op: Any) -> Plain | None:
    """Return the rule for an Op, None if it has none."""
    return next((rule for kind, rule in _RULES.items() if isinstance(op, kind)), None)


def refuse(inputs: tuple[Any, ...]) -> Any:
    """Raise what an array of unknown length says where no rule takes it."""
    for value in inputs:
        if isinstance(value, Bounded):
            value.__jax_array__()


# Sizes

LARGE = (
    "JAX needs to know when it compiles how large an array is; the function itself computes its "
    "size from data. Take an array of the greatest size and let pt.where choose, give the size as "
    'an input, or compile with mode="NUMBA"'
)


def _alloc(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
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


def _eye(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    if None in map(static_int, inputs):
        raise UnknownLengthError(SQUARE)
    return plain(*map(int, inputs))


def _arange(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(node.op.dtype)
    known = [known_number(value) for value in inputs]
    if None not in known:
        step = known[-1]
        if step == 1:
            return jnp.arange(known[0], known[1], dtype=dtype)
        return jnp.asarray(np.arange(known[0], known[1], step, dtype=node.op.dtype), dtype)
    start, stop, step = inputs
    (first, first_most), (least, last), (low, _) = map(range_of, inputs)
    span = last - first if low > 0 else first_most - least
    by = static_int(step)
    if by is None or span == np.inf:
        raise UnknownLengthError(
            "JAX needs to know when it compiles how long a range can get, and arange is given a "
            "number that the function computes. Say what it is at most, as in "
            "pt.arange(pt.minimum(n, 10)), or make a range of the greatest length and let "
            "pt.where(range < n, …, 0) choose"
        )
    start, stop = number_of(start), number_of(stop)
    rows = start + by * jnp.arange(max(ceil(span / abs(by)), 0))
    return Bounded(rows.astype(dtype), jnp.maximum(-((start - stop) // by), 0), RANGE)


def _reshape(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    value, shape = inputs
    refuse(inputs)
    if isinstance(shape, jax.core.Tracer):
        raise UnknownLengthError(LARGE)
    sizes = [
        static_int(size) for size in (shape if isinstance(shape, tuple) else np.asarray(shape))
    ]
    if None in sizes:
        raise UnknownLengthError(LARGE)
    return jnp.reshape(value, sizes)


def _split(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    refuse(inputs)
    array, (_, axis, _) = inputs[0], split_of(node)
    sizes = inputs[-1]
    if axis is None or isinstance(sizes, jax.core.Tracer):
        raise UnknownLengthError(
            "JAX must know the sizes of the parts of an array. Give them as inputs or constants, "
            'or compile with mode="NUMBA"'
        )
    known = np.asarray(sizes).tolist()
    if min(known) < 0 or sum(known) != array.shape[axis]:
        raise ValueError(
            f"an array of {array.shape[axis]} rows cannot be split into parts of {known}"
        )
    parts = jnp.split(array, np.cumsum(known)[:-1], axis=axis)
    return parts if len(parts) > 1 else parts[0]


def _check(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Checks of known conditions are made when JAX compiles; of others it makes none."""
    value, *conditions = inputs
    known = [known_number(condition) for condition in conditions]
    if 0 in known:
        raise node.op.exc_type(node.op.msg)
    if None in known:
        plain(*inputs)
    return value


def _same(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    return inputs[0]


def _shape_i(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    (value,) = inputs
    if node.op.i != value.time:
        return np.int64(value.shape[node.op.i])
    return Length(value.length, 0, value.capacity)


def _specify_shape(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    value, *sizes = inputs
    sizes = [static_int(size) for size in sizes]
    if not isinstance(value, Bounded):
        return plain(value, *sizes)
    if sizes[value.time] is not None and value.capacity:
        value.__jax_array__()
    sizes[value.time] = None
    return value.like(plain(value.rows, *sizes))


def _if_else(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    condition, *values = inputs
    known, count = static_int(condition), node.op.n_outs
    one, other = map(known_number, (values[0], values[-1]))
    same = len(values) == 2 and one is not None and one == other  # a size that both have
    if known is None and not same:
        refuse(inputs)
        return plain(*inputs)
    chosen = values[:count] if known or same else values[count:]
    return chosen[0] if count == 1 else chosen


# Item by item, and row by row


def time_of(inputs: tuple[Any, ...]) -> int:
    """Return the axis that has an unknown length in operands, one at least."""
    values = [value for value in inputs if isinstance(value, Bounded)]
    if len({value.time for value in values}) > 1:
        values[0].__jax_array__()
    return values[0].time


def _elemwise(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    # Operands must have equal lengths, so one whose length is known tells that of the others.
    time = time_of(inputs)
    bounded = [value for value in inputs if isinstance(value, Bounded)]
    first = bounded[0]
    known = [
        np.shape(value)[time]
        for value in inputs
        if not isinstance(value, Bounded) and np.ndim(value) == first.ndim
    ]
    known = [length for length in known if length != 1]
    capacity = min(value.capacity for value in bounded)
    if known and known[0] > capacity:
        first.__jax_array__()
    rows = known[0] if known else capacity
    found = plain(*(v.cut(rows) if isinstance(v, Bounded) else v for v in inputs))
    results = [found] if len(node.outputs) == 1 else found
    results = _where_equal([*(v.length for v in bounded), *known[:1]], results)
    if not known:
        results = [first.like(result) for result in results]
    return results[0] if len(node.outputs) == 1 else results


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


def _join(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    axis, parts = join_of(node)
    if axis != time_of(inputs):
        return _elemwise(node, plain, inputs)
    dtype = jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype)
    return join(inputs[len(inputs) - len(parts) :], axis, dtype)


def _dimshuffle(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    (value,) = inputs
    order = tuple(node.op.new_order)
    if value.time not in order:  # dropped: its length is one
        return plain(value.cut(1))
    return value.like(plain(value.rows), order.index(value.time))


def _dot(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    left, right = inputs
    pairs = [(left, np.ndim(left) - 1), (right, 0)]  # with the axes that are summed over
    sums = [isinstance(value, Bounded) and value.time == axis for value, axis in pairs]
    if not any(sums):
        if isinstance(left, Bounded):
            refuse((right,))
            return left.like(plain(left.rows, right))
        return right.like(plain(left, right.rows), node.outputs[0].type.ndim - 1)
    # What does not count is zero on both sides.
    filled = [
        value.filled() if has_time else jnp.asarray(value)
        for value, has_time in zip(inputs, sums, strict=True)
    ]
    count = min(value.shape[axis] for value, (_, axis) in zip(filled, pairs, strict=True))
    return plain(
        *(
            jax.lax.slice_in_dim(value, 0, count, axis=axis)
            for value, (_, axis) in zip(filled, pairs, strict=True)
        )
    )


# Along an axis


def time_after(axes: Any, ndim: int, time: int) -> int | None:
    """Return where time is when a reduction took axes, None for all; None if it took time."""
    taken = set(range(ndim)) if axes is None else {axis % ndim for axis in np.atleast_1d(axes)}
    return None if time in taken else time - sum(axis < time for axis in taken)


def _ends(value: Bounded) -> tuple[Any, Any]:
    """Return what no item of an array is lower, and higher, than."""
    dtype = np.dtype(value.dtype)
    if dtype.kind == "b":
        return False, True
    if dtype.kind in "iu":
        return np.iinfo(dtype).min, np.iinfo(dtype).max
    if dtype.kind == "c":
        value.__jax_array__()  # raises the error that says where the unknown length is from
    return -np.inf, np.inf


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
        return _ends(value)[0]
    if name in ("ScalarMinimum", "Minimum"):
        return _ends(value)[1]
    return value.__jax_array__()


def _reduce(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Sums, products, extremes, `any` and `all`, and the place of the greatest item."""
    (value,) = inputs
    time = time_after(node.op.axis, value.ndim, value.time)
    if time is not None:
        return value.like(plain(value.rows), time)
    if isinstance(node.op, Argmax):  # the first of equal ones, so that what counts wins
        return plain(value.filled(_ends(value)[0]))
    return plain(value.filled(_identity(value, node.op.scalar_op)))


def _along(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """Running sums and products, and `softmax`."""
    (value,) = inputs
    axes = node.op.axis
    if axes is None and value.ndim > 1:
        value.__jax_array__()
    if time_after(axes, value.ndim, value.time) is not None or isinstance(node.op, CumOp):
        return value.like(plain(value.rows))
    return value.like(plain(value.filled(-np.inf)))


def _repeat(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    value, numbers = inputs
    if isinstance(numbers, jax.core.Tracer | Bounded):
        raise UnknownLengthError(
            "JAX needs to know when it compiles how many rows `repeat` gives, but the function "
            "itself computes how often each is repeated. Repeat all rows as often as one can be, "
            'and let pt.where choose, or compile with mode="NUMBA"'
        )
    refuse(inputs)
    return plain(value, np.asarray(numbers))


_RULES: dict[type, Plain] = {
    Alloc: _alloc,
    AllocEmpty: _alloc,
    ARange: _arange,
    Eye: _eye,
    Reshape: _reshape,
    Split: _split,
    Repeat: _repeat,
    Nonzero: nonzero,
    CheckAndRaise: _check,
    IfElse: _if_else,
    Shape_i: _shape_i,
    SpecifyShape: _specify_shape,
    Elemwise: _elemwise,
    Join: _join,
    CAReduce: _reduce,
    Argmax: _reduce,
    DimShuffle: _dimshuffle,
    Dot: _dot,
    Subtensor: subtensor,
    IncSubtensor: inc_subtensor,
    **dict.fromkeys((CumOp, Softmax, LogSoftmax), _along),
    **dict.fromkeys((DeepCopyOp, TypeCastingOp), _same),
    **dict.fromkeys(INDEX_READS[1:] + INDEX_WRITES[1:], items),
}
# Rules for arrays of known length as well.
ALWAYS = {
    _alloc, _arange, _check, _eye, _if_else, nonzero, _repeat, _reshape, _split,
    _specify_shape, inc_subtensor, items, subtensor,
}  # fmt: skip
