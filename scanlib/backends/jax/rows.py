"""PyTensor's own Ops on arrays of unknown length.

`OnRows` stands in front of an Op of PyTensor's that reads rows of a loop of an unknown number of
steps. On ordinary arrays it is that Op; on `Bounded` arrays

* elementwise Ops, dimshuffles and products with a matrix work on the whole buffer; where arrays of
  different lengths meet, the result is NaN;
* slices keep track of the length, and a slice of an ordinary array by an unknown bound becomes
  `Bounded`;
* reductions, running sums and sorts along time leave out the rows that do not count
  (`scanlib.backends.jax.along_time`);
* arrays are joined, read and written at places (`scanlib.backends.jax.gathered_rows`);
* rows added to or written into a slice of an ordinary array leave the others as they are.
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
from pytensor.tensor.basic import Alloc, AllocEmpty, Join
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Argmax, Dot
from pytensor.tensor.shape import Reshape, Shape_i, SpecifyShape
from pytensor.tensor.sort import ArgSortOp, SortOp
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import (
    IncSubtensor,
    Subtensor,
    indices_from_subtensor,
)

from scanlib._compat import INDEX_READS, INDEX_WRITES, join_of
from scanlib.backends.jax.along_time import accumulate, argmax, argsort, reduce, softmax, sort
from scanlib.backends.jax.bounded import (
    Across,
    Bounded,
    Length,
    UnknownLengthError,
    bound_of,
    number_of,
    rows_of,
    slice_rows,
    static_int,
)
from scanlib.backends.jax.gathered_rows import first_bounded, join, read, reshape, write


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
        if rule is not _alloc:
            inputs = tuple(map(number_of, inputs))
        return rule(core, plain, inputs)

    return on_rows


def _alloc(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    value, sizes = (inputs[0], inputs[1:]) if isinstance(node.op, Alloc) else (0, inputs)
    if isinstance(value, Bounded) and value.ndim == len(sizes):
        rows = jnp.broadcast_to(value.rows, (value.capacity, *map(number_of, sizes[1:])))
        return Bounded(rows, value.length, value.origin)
    if not sizes or not isinstance(sizes[0], Length) or isinstance(value, Bounded):
        if any(static_int(number_of(size)) is None for size in sizes):
            raise UnknownLengthError(
                "JAX needs to know when it compiles how large an array is; the function itself "
                "computes its size from data"
            )
        return plain(*map(number_of, inputs))
    shape = (sizes[0].bound, *sizes[1:])
    value = jnp.asarray(value, dtype=jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype))
    return Bounded(jnp.broadcast_to(value, shape), sizes[0].value, "an array of unknown length")


def _elemwise(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    if any(isinstance(value, Across) for value in inputs):
        return _elemwise_across(node, plain, inputs)
    first = first_bounded(inputs)
    if first is None:
        return plain(*inputs)
    # Operands must have equal lengths, so one whose length is known tells that of the others.
    known = [
        len(value)
        for value in inputs
        if not isinstance(value, Bounded) and np.ndim(value) == first.ndim and len(value) != 1
    ]
    bounded = [value for value in inputs if isinstance(value, Bounded)]
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


def _elemwise_across(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    across = [value.columns for value in inputs if isinstance(value, Across)]
    others = [value for value in inputs if not isinstance(value, Across)]
    if any(isinstance(v, Bounded) or np.shape(v)[-1:] not in ((), (1,)) for v in others):
        across[0].__jax_array__()
    rows = min(columns.capacity for columns in across)
    found = plain(*(v.columns.rows[:rows].T if isinstance(v, Across) else v for v in inputs))
    results = [found] if len(node.outputs) == 1 else found
    results = _where_equal([columns.length for columns in across], results)
    made = [Across(Bounded(result.T, across[0].length, across[0].origin)) for result in results]
    return made[0] if len(made) == 1 else made


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


def _join(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    along_time = join_of(node)[0] == 0
    return (join if along_time else _elemwise)(node, plain, inputs)


def _scalars(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    return plain(*inputs)  # numbers computed from lengths


def _dimshuffle(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    (value,) = inputs
    order = tuple(node.op.new_order)
    if isinstance(value, Across):
        if order != (1, 0):
            value.__jax_array__()
        return value.columns
    if not isinstance(value, Bounded):
        return plain(value)
    if 0 not in order:
        return plain(value.rows[:1])  # dropped: its length is one
    if order == (1, 0):
        return Across(value)
    if order == ("x", 0):
        return Across(Bounded(value.rows[:, None], value.length, value.origin))
    if order[0] != 0:
        value.__jax_array__()
    return Bounded(plain(value.rows), value.length, value.origin)


def _dot(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    left, right = inputs
    if isinstance(right, Across):
        if isinstance(left, Across):
            right.__jax_array__()
        columns = right.columns
        rows = jnp.dot(columns.rows, jnp.asarray(left).T)
        found = Bounded(rows, columns.length, columns.origin)
        return Across(found) if np.ndim(left) == 2 else found
    if isinstance(left, Across) or isinstance(right, Bounded):
        # Time is summed over: rows that do not count are zero on both sides.
        if isinstance(left, Across):
            left = left.columns
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


def _shape_i(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    (value,) = inputs
    if not isinstance(value, Bounded):
        return plain(value)
    return value.shape[node.op.i] if node.op.i else Length(value.length, value.capacity)


def _specify_shape(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    value, *sizes = inputs
    if not isinstance(value, Bounded):
        return plain(*inputs)
    if sizes[0] is not None and value.capacity:
        value.__jax_array__()
    return Bounded(plain(value.rows, None, *sizes[1:]), value.length, value.origin)


def _subtensor(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    value, *parts = inputs
    indices = indices_from_subtensor(parts, node.op.idx_list)
    first = indices[0]
    if isinstance(value, Bounded):
        return value[tuple(indices)]
    if not isinstance(first, slice) or first.step not in (None, 1):
        return plain(*inputs)
    rows = slice_rows(value, first.start, first.stop, "a slice of unknown length")
    if len(indices) == 1:
        return rows
    return rows[(slice(None), *indices[1:])]


def _inc_subtensor(node: Apply, plain: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    target, rows, *parts = inputs
    indices = indices_from_subtensor(parts, node.op.idx_list)
    first = indices[0]
    bounds = [first.start, first.stop] if isinstance(first, slice) else []
    unknown = any(b is not None and static_int(b) is None for b in bounds)
    if isinstance(target, Bounded):
        return _inc_bounded(node, target, rows, indices)
    if not unknown and not isinstance(rows, Bounded):
        if bounds and len(indices) == 1 and first.step in (None, 1):
            return _updated(node, jnp.asarray(target), rows, first)
        return plain(*inputs)
    if not bounds or len(indices) != 1 or first.step not in (None, 1):
        raise UnknownLengthError(
            "JAX needs to know when it compiles which part of an array is written; it is computed "
            "by the function itself"
        )
    return _written(node, jnp.asarray(target), rows, first)


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


def _inc_bounded(node: Apply, target: Bounded, rows: Any, indices: list[Any]) -> Bounded:
    """Return an array of unknown length with something added to or written into it."""
    first, *rest = indices
    if rest and first == slice(None):
        count = min(target.capacity, rows.capacity) if isinstance(rows, Bounded) else None
        at = target.rows.at[(slice(count), *rest)]
        values = rows_of(rows)[:count]
        buffer = at.set(values) if node.op.set_instead_of_inc else at.add(values)
    elif rest:
        target.__jax_array__()
    elif isinstance(first, slice):
        buffer = _written(node, target.rows, rows, first, target.length)
    else:
        place = jnp.where(jnp.asarray(first) < 0, target.length + first, first)
        at = target.rows.at[place]
        buffer = at.set(rows) if node.op.set_instead_of_inc else at.add(rows)
    return Bounded(buffer, target.length, target.origin)


def _written(node: Apply, target: Any, rows: Any, where: slice, length: Any = None) -> Any:
    """Return a buffer with rows added to, or written into, a slice of unknown bounds."""
    capacity = target.shape[0]
    whole = Bounded(target, capacity if length is None else length, "")
    if where.step not in (None, 1):
        whole.__jax_array__()
    part = whole.slice(where.start, where.stop, None)
    places = jnp.arange(capacity)
    start = 0 if where.start is None else bound_of(where.start, whole.length)
    chosen = (places >= start) & (places < start + part.length)
    values = jnp.asarray(rows_of(rows))
    if values.ndim == target.ndim and not len(values):
        return target
    if values.ndim == target.ndim and (len(values) != 1 or isinstance(rows, Bounded)):
        values = values[jnp.clip(places - start, 0, len(values) - 1)]
    values = jnp.broadcast_to(values, target.shape)
    chosen = chosen.reshape((-1, *(1 for _ in target.shape[1:])))
    changed = values if node.op.set_instead_of_inc else target + values
    return jnp.where(chosen, changed, target)


_RULES: dict[type, Callable[..., Any]] = {
    Alloc: _alloc,
    AllocEmpty: _alloc,
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
    Reshape: reshape,
    Shape_i: _shape_i,
    SpecifyShape: _specify_shape,
    Subtensor: _subtensor,
    IncSubtensor: _inc_subtensor,
    **dict.fromkeys(INDEX_READS[1:], read),
    **dict.fromkeys(INDEX_WRITES[1:], write),
}
KNOWN = tuple(_RULES)
