"""PyTensor's own Ops on arrays of unknown length.

`OnRows` stands in front of an Op of PyTensor's that reads rows of a loop of an unknown number of
steps. On ordinary arrays it is that Op; on `Bounded` arrays, and on those
that have time as another axis than the first (`scanlib.backends.jax.across`)

* elementwise Ops, dimshuffles and products with a matrix work on the whole buffer; where arrays of
  different lengths meet, the result is NaN;
* slices keep track of the length, and a slice of an ordinary array by an unknown bound becomes
  `Bounded`; what is added to or written into one leaves the other rows as they are
  (`scanlib.backends.jax.sliced_rows`);
* reductions, running sums, sorts and searches along time leave out the rows that do not count
  (`scanlib.backends.jax.along_time`);
* arrays are joined, read and written at places (`scanlib.backends.jax.gathered_rows`), and their
  rows repeated (`scanlib.backends.jax.repeated_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.link.jax.dispatch.basic import jax_funcify
from pytensor.scalar.basic import ScalarOp
from pytensor.tensor.basic import Alloc, AllocEmpty, Eye, Join
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp, Repeat, SearchsortedOp
from pytensor.tensor.math import Argmax, Dot
from pytensor.tensor.shape import Reshape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

from scanlib._compat import INDEX_READS, INDEX_WRITES, IfElse, join_of
from scanlib.backends.jax.across import (
    UNKNOWN,
    Across,
    Plain,
    common_time,
    like,
    time_first,
    with_time,
)
from scanlib.backends.jax.along_time import (
    accumulate,
    argmax,
    argsort,
    reduce,
    searchsorted,
    softmax,
    sort,
)
from scanlib.backends.jax.bounded import (
    SQUARE,
    Bounded,
    Length,
    UnknownLengthError,
    number_of,
    rows_of,
    static_int,
)
from scanlib.backends.jax.gathered_rows import join, read, reshape, write
from scanlib.backends.jax.repeated_rows import repeat
from scanlib.backends.jax.sliced_rows import inc_subtensor, subtensor


class OnRows(Op):
    """An Op of PyTensor's that may meet arrays of an unknown length.

    Parameters
    ----------
    core : Op
        One of `KNOWN`.
    """

    __props__ = ("core",)

    def __init__(self, core: Op) -> None:
        self.core = core

    def make_node(self, *inputs: Variable) -> Apply:
        node = self.core.make_node(*inputs)
        return Apply(self, node.inputs, [out.type() for out in node.outputs])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        self.core.perform(self.core.make_node(*node.inputs), inputs, output_storage)

    def __str__(self) -> str:
        return f"OnRows{{{self.core}}}"


@jax_funcify.register(OnRows)
def funcify_on_rows(op: OnRows, node: Apply, **kwargs: Any) -> Callable[..., Any]:
    """Return the function of the Op, for ordinary arrays and for those of unknown length."""
    core = Apply(op.core, node.inputs, [out.type() for out in node.outputs])
    plain = jax_funcify(op.core, node=core, **kwargs)
    rule = next(rule for kind, rule in _RULES.items() if isinstance(op.core, kind))

    def on_rows(*inputs: Any) -> Any:
        if rule not in (_alloc, _eye, _if_else, _specify_shape):
            inputs = tuple(map(number_of, inputs))
        return rule(core, plain, inputs)

    return on_rows


def _alloc(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    value, sizes = (inputs[0], inputs[1:]) if isinstance(node.op, Alloc) else (0, inputs)
    if isinstance(value, UNKNOWN):
        time = value.time + len(sizes) - value.ndim
        shape = [value.first.capacity if k == time else number_of(n) for k, n in enumerate(sizes)]
        return like(value, jnp.broadcast_to(value.whole(), shape), time)
    lengths = [axis for axis, size in enumerate(sizes) if isinstance(size, Length)]
    others = [static_int(size) for size in sizes if not isinstance(size, Length)]
    if len(lengths) > 1 or None in others:
        raise UnknownLengthError(
            "JAX needs to know when it compiles how large an array is; the function itself "
            "computes its size from data"
        )
    if not lengths:
        return plain(*map(number_of, inputs))
    (time,) = lengths
    shape = [getattr(size, "bound", size) for size in sizes]
    value = jnp.asarray(value, dtype=jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype))
    rows = jnp.moveaxis(jnp.broadcast_to(value, shape), time, 0)
    return with_time(Bounded(rows, sizes[time].value, "an array of unknown length"), time)


def _eye(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    if any(isinstance(size, Length) for size in inputs):
        raise UnknownLengthError(SQUARE)
    return plain(*inputs)


def _elemwise(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    time = common_time(inputs)
    if time is None:
        return plain(*inputs)
    plain, operands = time_first(plain, inputs, time)
    found = _elemwise_rows(node, plain, operands)
    results = found if isinstance(found, list) else [found]
    results = [
        with_time(result, time) if isinstance(result, Bounded) else jnp.moveaxis(result, 0, time)
        for result in results
    ]
    return results if isinstance(found, list) else results[0]


def _elemwise_rows(node: Apply, plain: Plain, inputs: list[Any]) -> Any:
    # Operands must have equal lengths, so one whose length is known tells that of the others.
    bounded = [value for value in inputs if isinstance(value, Bounded)]
    first = bounded[0]
    known = [
        len(value)
        for value in inputs
        if not isinstance(value, Bounded) and np.ndim(value) == first.ndim and len(value) != 1
    ]
    capacity = min(value.capacity for value in bounded)
    if known and known[0] > capacity:
        first.__jax_array__()
    rows = known[0] if known else capacity
    found = plain(*(v.rows[:rows] if isinstance(v, Bounded) else v for v in inputs))
    results = [found] if len(node.outputs) == 1 else found
    results = _where_equal([*(v.length for v in bounded), *known[:1]], results)
    if not known:
        results = [Bounded(result, first.length, first.origin) for result in results]
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
    time = common_time(inputs)
    if time is None or join_of(node)[0] != time:
        return _elemwise(node, plain, inputs)
    plain, parts = time_first(plain, inputs, time)
    return with_time(join(node, plain, tuple(parts)), time)


def _scalars(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    return plain(*inputs)  # numbers computed from lengths


def _dimshuffle(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    (value,) = inputs
    if not isinstance(value, UNKNOWN):
        return plain(value)
    order = tuple(node.op.new_order)
    if value.time not in order:  # dropped: its length is one
        return plain(jax.lax.slice_in_dim(value.whole(), 0, 1, axis=value.time))
    return like(value, plain(value.whole()), order.index(value.time))


def _dot(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    left, right = inputs
    if isinstance(right, Across):
        if isinstance(left, Across):
            right.__jax_array__()
        columns = right.first
        rows = jnp.dot(columns.rows, jnp.asarray(left).T)
        found = Bounded(rows, columns.length, columns.origin)
        return with_time(found, int(np.ndim(left) == 2))
    if isinstance(left, Across) or isinstance(right, Bounded):
        # Time is summed over: rows that do not count are zero on both sides.
        if isinstance(left, Across):
            left = left.first
        elif not isinstance(left, Bounded) or left.ndim != 1:
            right.__jax_array__()
        known = [len(v) for v in (left, right) if not isinstance(v, Bounded)]
        count = min([v.capacity for v in (left, right) if isinstance(v, Bounded)] + known)
        first, second = (
            value.filled()[:count] if isinstance(value, Bounded) else jnp.asarray(value)[:count]
            for value in (left, right)
        )
        return jnp.tensordot(first, second, ((0,), (0,)))
    if not isinstance(left, Bounded):
        return plain(left, right)
    if left.ndim != 2:
        left.__jax_array__()
    return Bounded(plain(left.rows, right), left.length, left.origin)


def _shape_i(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    (value,) = inputs
    if not isinstance(value, UNKNOWN):
        return plain(value)
    if node.op.i != value.time:
        return value.shape[node.op.i]
    return Length(value.first.length, value.first.capacity)


def _specify_shape(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    value, *sizes = inputs
    sizes = [None if isinstance(size, Length) else size for size in sizes]
    if not isinstance(value, UNKNOWN):
        return plain(value, *sizes)
    if sizes[value.time] is not None and value.first.capacity:
        value.__jax_array__()
    sizes[value.time] = None
    return like(value, plain(value.whole(), *sizes))


def _if_else(node: Apply, plain: Plain, inputs: tuple[Any, ...]) -> Any:
    """One of two results each; those of unknown length get buffers of one size."""
    condition, *values = inputs
    condition, count = number_of(condition), node.op.n_outs
    known = static_int(condition)
    if known is not None:
        chosen = values[:count] if known else values[count:]
        return chosen[0] if count == 1 else chosen
    condition = jnp.asarray(condition) != 0
    pairs = zip(values[:count], values[count:], strict=True)
    chosen = [_either(condition, *pair) for pair in pairs]
    return chosen[0] if count == 1 else chosen


def _either(condition: Any, first: Any, second: Any) -> Any:
    """Return one of two arrays, which may have lengths of their own."""
    time = common_time((first, second))
    if first is second or (isinstance(first, int) and isinstance(second, int) and first == second):
        return first
    if isinstance(first, Length) or isinstance(second, Length):
        bounds = [n.bound if isinstance(n, Length) else static_int(n) for n in (first, second)]
        chosen = jnp.where(condition, number_of(first), number_of(second))
        known = [bound for bound in bounds if bound is not None]
        return Length(chosen, max(known)) if len(known) == 2 else chosen
    if time is None:
        return jax.lax.cond(condition, lambda: jnp.asarray(first), lambda: jnp.asarray(second))
    _, parts = time_first(jnp.asarray, (first, second), time)
    room = max(len(rows_of(part)) for part in parts)
    rows, lengths = [], []
    for part in parts:
        buffer = jnp.asarray(rows_of(part))
        rows.append(jnp.pad(buffer, [(0, room - len(buffer))] + [(0, 0)] * (buffer.ndim - 1)))
        lengths.append(part.length if isinstance(part, Bounded) else len(buffer))
    origin = next(part.origin for part in parts if isinstance(part, Bounded))
    found = Bounded(jnp.where(condition, *rows), jnp.where(condition, *lengths), origin)
    return with_time(found, time)


_RULES: dict[type, Plain] = {
    Alloc: _alloc,
    AllocEmpty: _alloc,
    Eye: _eye,
    Elemwise: _elemwise,
    Join: _join,
    ScalarOp: _scalars,
    CAReduce: reduce,
    Argmax: argmax,
    CumOp: accumulate,
    Softmax: softmax,
    LogSoftmax: softmax,
    SortOp: sort,
    ArgSortOp: argsort,
    DimShuffle: _dimshuffle,
    Dot: _dot,
    IfElse: _if_else,
    Repeat: repeat,
    SearchsortedOp: searchsorted,
    Reshape: reshape,
    Shape_i: _shape_i,
    SpecifyShape: _specify_shape,
    Subtensor: subtensor,
    IncSubtensor: inc_subtensor,
    **dict.fromkeys(INDEX_READS[1:], read),
    **dict.fromkeys(INDEX_WRITES[1:], write),
}
KNOWN = tuple(_RULES)
