"""PyTensor's own Ops on arrays of unknown length, and with sizes that JAX must know.

A rule takes a node, PyTensor's function for it, and what it is given while JAX traces.

* **Sizes** that are known when JAX compiles are constants, for which PyTensor has functions.
* **Row by row**: what works on the rows of arrays side by side (`axes_kept`) is computed for the
  whole buffer of a `Bounded` array. In reductions over the rows, what does not count is filled with
  what changes no result. Where arrays of different unknown lengths meet, the result is NaN.
* **Slices and rows** are read and written.

Any other Op raises `UnknownLengthError`. Behind the rules are scanlib's own small Ops: rows that
are cut, padded and checked.
"""

from collections.abc import Callable
from functools import partial, reduce
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
from pytensor.tensor.extra_ops import CumOp, Repeat
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
    marked,
    number_of,
    place_of,
    rows_of,
    static_int,
)
from scanlib.backends.jax.prepare import FIRST_SIZE
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.graph import ByOp
from scanlib.ops.kept_axes import axes_kept
from scanlib.ops.row_ops.checked_rows import CheckedConvergence, CheckedSizes, CheckedValue
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.row_ops.row_segments import MergeRows, SplitRows
from scanlib.ops.row_ops.step_products import StepProducts
from scanlib.ops.row_ops.triangular import TriangularFactor

Plain = Callable[..., Any]
Inputs = tuple[Any, ...]


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
    refuse(inputs)
    value, sizes = (inputs[0], inputs[1:]) if isinstance(node.op, Alloc) else (0, inputs)
    is_bounded = bool(sizes) and isinstance(sizes[0], Length)
    if None in map(static_int, sizes[is_bounded:]):
        raise UnknownLengthError(LARGE)
    # PyTensor writes constants into its code as numbers of Python's, which have no dtype.
    value = jnp.asarray(value, dtype=jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype))
    if not is_bounded:
        return plain(value, *sizes) if isinstance(node.op, Alloc) else plain(*sizes)
    rows = jnp.broadcast_to(value, (sizes[0].bound, *sizes[1:]))
    return Bounded(rows, sizes[0].value, "an array of unknown length", sizes[0].low)


def _arange(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    dtype = jax.dtypes.canonicalize_dtype(node.op.dtype)
    known = [known_number(value) for value in inputs]
    if None not in known:
        return jnp.asarray(np.arange(*known, dtype=node.op.dtype), dtype)
    (start, _, step), stop = known, inputs[1]
    if start is None or step != 1 or not isinstance(stop, Length):
        raise UnknownLengthError(LARGE)
    rows = jnp.arange(start, max(stop.bound, start), dtype=dtype)
    length = jnp.maximum(stop.value - start, 0)
    return Bounded(rows, length, "a range up to a number that is computed", stop.low - start)


def _specify_shape(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    value, *sizes = inputs
    return value if isinstance(value, Bounded) else plain(value, *map(static_int, sizes))


def _shape_i(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    (value,) = inputs
    if node.op.i:
        return np.int64(value.shape[node.op.i])
    return Length(value.length, value.low, value.capacity)


def _check(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Checks of known conditions are made when JAX compiles; of others it makes none."""
    value, *conditions = inputs
    known = [known_number(condition) for condition in conditions]
    if 0 in known:
        raise node.op.exc_type(node.op.msg)
    if None in known:
        plain(*inputs)
    return value


# Row by row


def _by_rows(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Return what a node computes of rows side by side, or a reduction over the rows."""
    bounded = [value for value in inputs if isinstance(value, Bounded)]
    pairs = list(zip(node.inputs, inputs, strict=True))
    kept = {v: k for v, i, out, k in axes_kept(node) if i == 0 and out is node.outputs[0]}
    axes = {kept.get(variable) for variable, value in pairs if isinstance(value, Bounded)}
    if axes == {None} and isinstance(node.op, CAReduce):
        return plain(bounded[0].filled(_filler(node.op, bounded[0])))
    if axes != {0} or any(kept.get(v) == 0 for v, value in pairs if not isinstance(value, Bounded)):
        refuse(inputs)
    capacity = min(value.capacity for value in bounded)
    found = plain(*(v.rows[:capacity] if isinstance(v, Bounded) else v for v in inputs))
    results = _where_equal(bounded, [found] if len(node.outputs) == 1 else list(found))
    return results[0] if len(results) == 1 else results


def _cumulative(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Return what is collected of rows, each from those before it."""
    (value,) = inputs
    if node.op.axis is None and value.ndim > 1:
        refuse(inputs)
    return value.like(plain(value.rows))


def _join(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Return arrays behind one another in time, as gradients of slices are."""
    axis, parts = join_of(node)
    if axis:
        refuse(inputs)
    dtype = jax.dtypes.canonicalize_dtype(node.outputs[0].type.dtype)
    given = inputs[len(inputs) - len(parts) :]
    buffers = [jnp.asarray(rows_of(part), dtype) for part in given]
    rows, length = jnp.zeros((sum(map(len, buffers)), *buffers[0].shape[1:]), dtype), 0
    low = sum(
        p.low if isinstance(p, Bounded) else len(b) for p, b in zip(given, buffers, strict=True)
    )
    # What stands behind the rows of a part is overwritten by the next one.
    for part, buffer in zip(given, buffers, strict=True):
        rows = jax.lax.dynamic_update_slice_in_dim(rows, buffer, length, 0)
        length = length + (part.length if isinstance(part, Bounded) else len(buffer))
    return Bounded(rows, length, "an array of unknown length", low)


def _where_equal(bounded: list[Bounded], results: list[Any]) -> list[Bounded]:
    """Return results, or NaN where lengths differ: compiled code cannot raise an error."""
    first, *others = {id(value.length): value.length for value in bounded}.values()
    if others:
        same = jnp.all(jnp.stack([jnp.asarray(first == other) for other in others]))
        results = [marked(value, same) for value in results]
    return [bounded[0].like(result) for result in results]


def _filler(op: CAReduce, value: Bounded) -> Any:
    """Return what changes no result of a reduction in the place of what does not count."""
    filler: Any = getattr(op.scalar_op, "identity", None)
    kind = np.dtype(value.dtype).kind
    if filler is None or (kind == "c" and np.isinf(filler)):
        value.__jax_array__()
    if kind in "iu" and np.isinf(filler):
        return getattr(np.iinfo(value.dtype), "min" if filler < 0 else "max")
    return filler if kind != "b" else filler not in (0, -np.inf)


# Slices and rows


def _subtensor(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Return a part of an array."""
    value, *parts = map(number_of, inputs)
    own, *others = indices = indices_from_subtensor(parts, node.op.idx_list)
    if not isinstance(value, Bounded):
        axis = _unknown_axis(indices)
        if axis is None:
            return plain(*inputs)
        if axis:
            raise UnknownLengthError(LARGE)
        value = Bounded(jnp.asarray(value), len(value), "a slice of unknown length", len(value))
    if not isinstance(own, slice):
        row = value.row(own)
        return row[tuple(others)] if others else row
    found, within = value.slice(own), (slice(None), *others)
    return found.like(found.rows[within]) if isinstance(found, Bounded) else found[within]


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
    own, *others = indices_from_subtensor(parts, node.op.idx_list)
    arrays = [array for array in (target, values) if isinstance(array, Bounded)]
    forwards = isinstance(own, slice) and own.step in (None, 1)
    if not arrays and _unknown_axis([own, *others]) is None:
        if forwards and len(node.op.idx_list) == 1:
            return _updated(node, jnp.asarray(target), values, own)
        return plain(jnp.asarray(target), *inputs[1:])
    is_row = not isinstance(own, slice) and not isinstance(values, Bounded)
    rank = np.ndim(target) - sum(not isinstance(index, slice) for index in others)
    of_rows = not isinstance(values, Bounded) or values.ndim == rank
    if not (forwards or is_row) or not of_rows:
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
    """Return an array with a slice of known bounds written or added to, without a scatter, which is
    slower, and of whose reversed ones XLA's compiler for CPUs dies."""
    bounds = [None if b is None else static_int(b) for b in (where.start, where.stop)]
    start, stop, _ = slice(*bounds).indices(len(target))
    old = target[start : max(start, stop)]
    new = rows if node.op.set_instead_of_inc else old + rows
    new = jnp.broadcast_to(jnp.asarray(new, target.dtype), old.shape)
    return jax.lax.dynamic_update_slice_in_dim(target, new, start, 0)


def _items(node: Apply, plain: Plain, inputs: Inputs) -> Any:
    """Read or write items at arrays of places, or read those that a mask selects, as `Bounded`: how
    many they are is not known."""
    refuse(inputs)
    target, *parts = map(number_of, inputs)
    is_write = isinstance(node.op, INDEX_WRITES)
    indices = indices_from_subtensor(parts[is_write:], node.op.idx_list)
    mask = next((i for i in indices if isinstance(i, jax.core.Tracer) and i.dtype == bool), None)
    if mask is None:
        return plain(*inputs)
    if is_write or len(indices) > 1:
        raise UnknownLengthError(
            f"JAX does not know when it compiles how many items a mask selects. {MASKED}"
        )
    target = jnp.asarray(target)
    if mask.shape != target.shape[: mask.ndim]:
        shape = target.shape
        raise IndexError(f"a mask of shape {mask.shape} is no index of an array of {shape}")
    rows = target.reshape((-1, *target.shape[mask.ndim :]))
    (places,) = jnp.nonzero(mask.reshape(-1), size=len(rows), fill_value=0)
    return Bounded(rows[places], mask.sum(), CHOSEN)


RULES: ByOp[Plain] = ByOp(
    {
        **dict.fromkeys((Eye, Repeat, Reshape, Split), _sized),
        **dict.fromkeys((Alloc, AllocEmpty), _alloc),
        ARange: _arange,
        SpecifyShape: _specify_shape,
        Shape_i: _shape_i,
        CheckAndRaise: _check,
        **dict.fromkeys((DeepCopyOp, TypeCastingOp), lambda node, plain, inputs: inputs[0]),
        **dict.fromkeys((CAReduce, DimShuffle, Dot, Elemwise), _by_rows),
        CumOp: _cumulative,
        Join: _join,
        Subtensor: _subtensor,
        IncSubtensor: _inc_subtensor,
        **dict.fromkeys(INDEX_READS[1:] + INDEX_WRITES[1:], _items),
    }
)
# Rules for arrays of known length as well.
ALWAYS = {
    _alloc, _arange, _check, _inc_subtensor, _items, _sized, _specify_shape, _subtensor,
}  # fmt: skip


# scanlib's own Ops


def rule(kind: type) -> Callable[[Callable[..., Any]], None]:
    """Register a function of an Op and of arrays."""
    return lambda function: jax_funcify.register(kind)(lambda op, **kwargs: partial(function, op))


@rule(PaddedRows)
def padded_rows(op: PaddedRows, rows: Any, stop: Any, length: Any) -> Any:
    """Return rows and zero rows behind them, up to a length."""
    known = length.bound if isinstance(length, Length) else static_int(length)
    if known is None:
        raise UnknownLengthError(
            "the gradient of a sequence needs the length of the sequence when JAX compiles. "
            "Cut all sequences of the loop alike, let it run over all rows and let pt.where "
            'choose, or compile with mode="NUMBA"'
        )
    values = rows.filled() if isinstance(rows, Bounded) else jnp.asarray(rows)
    end = None if isinstance(rows, Bounded) else static_int(stop)
    if end is not None and not isinstance(length, Length):
        values = jnp.broadcast_to(values, (len(range(known)[:end]), *values.shape[1:]))
    missing = max(known - len(values), 0)
    padded = jnp.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1))[:known]
    if isinstance(length, Length):
        return Bounded(
            padded, length.value, "the gradient of an array of unknown length", length.low
        )
    return padded


@rule(StepProducts)
def step_products(op: StepProducts, x: Any, y: Any) -> Any:
    """Return the products of the matrices of all steps, or their sum."""
    steps = [value for value in (x, y) if value.ndim == 3]
    bounded = [value for value in steps if isinstance(value, Bounded)]
    if len(bounded) < len(steps):
        refuse((x, y))
    capacity = min((value.capacity for value in bounded), default=None)
    x, y = (v.filled()[:capacity] if isinstance(v, Bounded) else v for v in (x, y))
    product = jnp.tensordot(x, y, ((0, 2), (0, 1))) if op.total else jnp.matmul(x, y)
    if not bounded:
        return product
    (found,) = _where_equal(bounded, [product])
    return found.rows if op.total else found


rule(MergeRows)(
    lambda op, value: jnp.reshape(value, (value.shape[0] * value.shape[1], *value.shape[2:]))
)
rule(CheckedConvergence)(lambda op, rows, failed, *numbers: jnp.where(failed, jnp.nan, rows))


@jax_funcify.register(TriangularFactor)
def funcify_triangular_factor(op: TriangularFactor, **kwargs: Any) -> Callable[..., Any]:
    """Return the rows of the factor that are not zero: SciPy's function has them all."""
    if op.pivoting:
        raise NotImplementedError(f"{op}: JAX has no pivoting here")
    return lambda x: jnp.linalg.qr(x, mode="r")


@rule(SplitRows)
def split_rows(op: SplitRows, value: Any, count: Any, length: Any) -> Any:
    """Return the first rows of an array, cut into segments."""
    n, size = static_int(count), static_int(length)
    if n is None or size is None:
        raise UnknownLengthError(LARGE)
    if n * size > len(value):
        raise SequenceLengthError(
            f"a sequence has {len(value)} rows, but the loop takes {n * size} steps or more"
        )
    return jnp.reshape(value[: n * size], (n, size, *value.shape[1:]))


@rule(CheckedValue)
def checked_value(op: CheckedValue, value: Any, *conditions: Any) -> Any:
    """Return a value; where a condition does not hold, raise if JAX knows it when it compiles, and
    return NaN for a real or complex number if not."""
    known = [static_int(condition) for condition in conditions]
    if 0 in known:
        raise op.exc_type(op.msg)
    return marked(value, reduce(jnp.logical_and, conditions)) if None in known else value


@rule(CheckedSizes)
def checked_sizes(op: CheckedSizes, array: Any, steps: Any = None) -> Any:
    """Return an array whose sizes have been checked."""
    sizes = op.larger(array.shape, static_int(array.shape[0] if steps is None else steps))
    return array if sizes is None else jnp.zeros(sizes, array.dtype)
