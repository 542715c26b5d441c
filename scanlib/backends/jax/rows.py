"""PyTensor's own Ops on arrays of unknown length.

`OnRows` stands in front of an Op of PyTensor's that reads rows of a loop of an unknown number of
steps. On ordinary arrays it is that Op. On `Bounded` arrays

* elementwise Ops, dimshuffles and products with a matrix work on the whole buffer; where arrays of
  different lengths meet, the result is NaN;
* what does not count holds what does not change the result where time is reduced, or summed over in
  a product. It stands behind what counts, so running sums need no such thing;
* arrays are joined and sliced, and rows of them read and written (`indexed_rows`).

Any other Op raises `UnknownLengthError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.scalar.basic import ScalarOp
from pytensor.tensor.basic import Alloc, AllocEmpty, Eye, Join
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp, Repeat
from pytensor.tensor.math import Argmax, Dot
from pytensor.tensor.shape import Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib._compat import INDEX_READS, INDEX_WRITES, IfElse, join_of
from scanlib.backends.jax.bounded import (
    SQUARE,
    Bounded,
    Length,
    UnknownLengthError,
    has_value,
    number_of,
    static_int,
)
from scanlib.backends.jax.indexed_rows import inc_subtensor, join, refuse_places, subtensor
from scanlib.backends.jax.stand_in import StandIn

Plain = Callable[..., Any]


class OnRows(StandIn):
    """An Op of PyTensor's, one of `KNOWN`, that may meet arrays of an unknown length."""


@jax_funcify.register(OnRows)
def funcify_on_rows(op: OnRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function of the Op, for ordinary arrays and for those of unknown length."""
    core = Apply(op.core, node.inputs, [out.type() for out in node.outputs])
    plain = jax_funcify(op.core, node=core, **kwargs)
    rule = next(rule for kind, rule in _RULES.items() if isinstance(op.core, kind))

    def on_rows(*inputs: Any) -> Any:
        if rule in _SIZED:
            return rule(core, plain, inputs)
        inputs = tuple(map(number_of, inputs))
        has_time = any(isinstance(value, Bounded) for value in inputs)
        return rule(core, plain, inputs) if has_time or rule in _ALWAYS else plain(*inputs)

    return on_rows


# Sizes


def _alloc(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    value, sizes = (inputs[0], inputs[1:]) if isinstance(node.op, Alloc) else (0, inputs)
    if isinstance(value, Bounded):
        time = value.time + len(sizes) - value.ndim
        shape = [value.capacity if k == time else number_of(n) for k, n in enumerate(sizes)]
        return value.like(jnp.broadcast_to(value.rows, shape), time)
    lengths = [axis for axis, size in enumerate(sizes) if isinstance(size, Length)]
    others = [static_int(size) for size in sizes if not isinstance(size, Length)]
    if len(lengths) > 1 or None in others:
        raise UnknownLengthError(
            "JAX needs to know when it compiles how large an array is; the function itself "
            "computes its size from data. Take an array of the greatest size and let pt.where "
            'choose, give the size as an input, or compile with mode="NUMBA"'
        )
    if not lengths:
        return plain(*map(number_of, inputs))
    (time,) = lengths
    shape = [getattr(size, "bound", size) for size in sizes]
    value = jnp.asarray(value, dtype=jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype))
    rows = jnp.broadcast_to(value, shape)
    return Bounded(rows, sizes[time].value, "an array of unknown length", time)


def _eye(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    if any(isinstance(size, Length) for size in inputs):
        raise UnknownLengthError(SQUARE)
    return plain(*inputs)


def _shape_i(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    (value,) = inputs
    if node.op.i != value.time:
        return value.shape[node.op.i]
    return Length(value.length, value.capacity)


def _specify_shape(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    value, *sizes = inputs
    sizes = [None if isinstance(size, Length) else size for size in sizes]
    if not isinstance(value, Bounded):
        return plain(value, *sizes)
    if sizes[value.time] is not None and value.capacity:
        value.__jax_array__()
    sizes[value.time] = None
    return value.like(plain(value.rows, *sizes))


def _if_else(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    condition, *values = inputs
    known, count = static_int(number_of(condition)), node.op.n_outs
    pairs = list(zip(values[:count], values[count:], strict=True))
    same = all(isinstance(one, int) and one == other for one, other in pairs)  # sizes
    if known is not None or same:
        chosen = values[:count] if known or same else values[count:]
        return chosen[0] if count == 1 else chosen
    return plain(number_of(condition), *map(_ordinary, map(number_of, values)))


def _ordinary(value: Any) -> Any:
    return value.__jax_array__() if isinstance(value, Bounded) else value


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
            return left.like(plain(left.rows, _ordinary(right)))
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
    if not (isinstance(numbers, np.ndarray) or has_value(numbers)):
        raise UnknownLengthError(
            "JAX needs to know when it compiles how many rows `repeat` gives, but the function "
            "itself computes how often each is repeated. Repeat all rows as often as one can be, "
            'and let pt.where choose, or compile with mode="NUMBA"'
        )
    return plain(_ordinary(value), np.asarray(numbers))


_RULES: dict[type, Plain] = {
    Alloc: _alloc,
    AllocEmpty: _alloc,
    Eye: _eye,
    Elemwise: _elemwise,
    Join: _join,
    CAReduce: _reduce,
    Argmax: _reduce,
    DimShuffle: _dimshuffle,
    Dot: _dot,
    IfElse: _if_else,
    Shape_i: _shape_i,
    SpecifyShape: _specify_shape,
    Subtensor: subtensor,
    IncSubtensor: inc_subtensor,
    **dict.fromkeys((CumOp, Softmax, LogSoftmax), _along),
    Repeat: _repeat,
    ScalarOp: _elemwise,  # numbers that are computed from lengths
    **dict.fromkeys(INDEX_READS[1:] + INDEX_WRITES[1:], refuse_places),
}
KNOWN = tuple(_RULES)
_SIZED = (_alloc, _eye, _if_else, _specify_shape)  # that read bounds of sizes
_ALWAYS = (_repeat, subtensor, inc_subtensor)  # also for arrays of known length
