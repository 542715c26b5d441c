"""What stands around loops, when a time axis is cut over devices.

Each Op is what it is under JAX, and XLA cuts it. A rule says which axis of its result is time, and
an Op without one is an error, so that XLA never gathers a whole time axis. Three are written in
another way for its sake: arrays that are joined or written to along time, and cumulative sums. With
tiles, sums over time are added in a fixed order.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytensor.scalar as ps
from pytensor.compile.ops import DeepCopyOp, ViewOp
from pytensor.graph.basic import Apply
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.basic import Alloc, Join, Split
from pytensor.tensor.elemwise import CAReduce
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape_i, SpecifyShape
from pytensor.tensor.special import LogSoftmax, Softmax
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor

from scanlib._compat import join_of, split_of
from scanlib.backends.jax.bounded import static_int
from scanlib.backends.jax.graph_functions import funcify_node
from scanlib.backends.jax.time_pieces import (
    Cut,
    Timed,
    TimeShardingError,
    cumulated,
    joined,
    plain,
    sum_rows,
    written,
)
from scanlib.ops.graph import ByOp
from scanlib.ops.kept_axes import axes_kept
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.row_ops.step_products import StepProducts

Rule = Callable[[Apply, list[Any], Cut], Any]
RULES: ByOp[Rule] = ByOp()
rule = RULES.register


def run_op(node: Apply, inputs: list[Any], cut: Cut) -> list[Any]:
    """Return the results of an Op of which an input is cut along time."""
    found = RULES.of(node.op) or _side_by_side
    try:
        result = found(node, inputs, cut)
    except _NoRuleError:
        names = [v.name for v in (*node.inputs, *node.outputs) if v.name]
        raise TimeShardingError(
            f"{node.op}{f' of `{names[0]}`' if names else ''} does not work row by row, and "
            f"time is cut over the axis {cut.axis!r}. Compute it before, from arrays that are not "
            "cut so"
        ) from None
    return result if isinstance(result, list) else [result]


class _NoRuleError(Exception):
    """This Op, applied so, has no rule."""


def plain_function(node: Apply) -> Callable[..., list[Any]]:
    """Return the JAX function of an Op."""
    with jax.ensure_compile_time_eval():
        function = funcify_node(node.op, node)

    def run(*values: Any) -> list[Any]:
        found = function(*plain(values))
        return list(found) if isinstance(found, list | tuple) else [found]

    return run


def _along(node: Apply, inputs: list[Any], axis: int | None) -> list[Any]:
    """Return the results of PyTensor's own function, which have time along an axis."""
    results = plain_function(node)(*inputs)
    return results if axis is None else [Timed(result, axis) for result in results]


def _first(inputs: Sequence[Any]) -> Timed:
    return next(value for value in inputs if isinstance(value, Timed))


def _side_by_side(node: Apply, inputs: list[Any], cut: Cut) -> list[Any]:
    """Apply an Op that works on the rows side by side, or sums over time."""
    kept = list(axes_kept(node))
    axes: set[int | None] = set()
    for variable, value in zip(node.inputs, inputs, strict=True):
        if isinstance(value, Timed):
            found = {
                k for v, i, out, k in kept if v is variable and i == value.axis and out is not v
            }
            axes |= found or {None}
    if len(axes) > 1 or (None in axes and not isinstance(node.op, CAReduce | Dot)):
        raise _NoRuleError
    (axis,) = axes
    if axis is not None or cut.tile is None:
        return _along(node, inputs, axis)
    if isinstance(node.op, Dot):
        return [_product(node, inputs, cut, [node.inputs[0].type.ndim - 1, 0])]
    if not isinstance(node.op.scalar_op, ps.Add):
        return _along(node, inputs, None)
    (value,), ndim = inputs, node.inputs[0].type.ndim
    summed = tuple(range(ndim)) if node.op.axis is None else tuple(node.op.axis)
    others = tuple(a - (a > value.axis) for a in summed if a != value.axis)
    rows = jnp.moveaxis(value.whole(), value.axis, 0).astype(node.outputs[0].type.dtype)
    return [sum_rows(cut, rows).sum(axis=others)]


def _product(node: Apply, inputs: list[Any], cut: Cut, axes: list[int]) -> Any:
    """Return a product that sums over time, with tiles in a fixed order."""
    function = plain_function(node)
    arrays = map(jnp.asarray, plain(inputs))
    rows = [jnp.expand_dims(v, axis + 1) for v, axis in zip(arrays, axes, strict=True)]
    return sum_rows(cut, jax.vmap(lambda *row: function(*row)[0], tuple(axes))(*rows))


@rule(StepProducts)
def _step_products(node: Apply, inputs: list[Any], cut: Cut) -> Any:
    if node.op.total and cut.tile is not None:
        return _product(node, inputs, cut, [0, 0])
    return _along(node, inputs, None if node.op.total else 0)


def _timed(value: Any) -> Timed:
    """Return the one input that may be cut."""
    if not isinstance(value, Timed):
        raise _NoRuleError
    return value


rule(SpecifyShape, CheckAndRaise, DeepCopyOp, ViewOp)(lambda node, inputs, cut: _timed(inputs[0]))
rule(Softmax, LogSoftmax, PaddedRows)(
    lambda node, inputs, cut: _along(node, inputs, _timed(inputs[0]).axis)
)
rule(Shape_i)(lambda node, inputs, cut: inputs[0].shape[node.op.i])


@rule(Alloc)
def _alloc(node: Apply, inputs: list[Any], cut: Cut) -> Any:
    axis = _timed(inputs[0]).axis
    return _along(node, inputs, axis + len(inputs) - 1 - node.inputs[0].type.ndim)


@rule(CumOp)
def _cumulate(node: Apply, inputs: list[Any], cut: Cut) -> Any:
    (value,), axis = inputs, node.op.axis
    ndim = node.inputs[0].type.ndim
    if axis is None and ndim > 1:
        raise _NoRuleError
    if axis is not None and axis % ndim != value.axis:
        return _along(node, inputs, value.axis)
    total = (jnp.cumsum, jnp.add, 0) if node.op.mode == "add" else (jnp.cumprod, jnp.multiply, 1)
    rows = cumulated(cut, jnp.moveaxis(value.whole(), value.axis, 0), *total)
    return Timed(jnp.moveaxis(rows, 0, value.axis), value.axis)


# Slices, and arrays that are put together from others


def _indices(node: Apply, places: list[Any]) -> list[Any]:
    """Return the indices of a slice, as numbers that JAX knows."""

    def known(place: Any) -> Any:
        number = static_int(place)
        if place is not None and number is None:
            raise _NoRuleError
        return number

    return [
        slice(known(i.start), known(i.stop), known(i.step)) if isinstance(i, slice) else known(i)
        for i in indices_from_subtensor(places, node.op.idx_list)
    ]


@rule(Subtensor)
def _subtensor(node: Apply, inputs: list[Any], cut: Cut) -> Any:
    value, indices = _timed(inputs[0]), _indices(node, inputs[1:])
    indices += [slice(None)] * (len(value.shape) - len(indices))
    own = indices[value.axis]
    if not isinstance(own, slice):
        own %= value.length
        indices[value.axis] = 0
        return value.sliced(own, own + 1)[tuple(indices)]
    if own == slice(None) and value.axis == 0 and all(i == own for i in indices):
        return value
    start, stop, step = own.indices(value.length)
    lost = sum(not isinstance(index, slice) for index in indices[: value.axis])
    if step == 1:
        rows, indices[value.axis] = value.sliced(start, stop), slice(None)
    else:
        rows = value.whole()
    return Timed(rows[tuple(indices)], value.axis - lost)


@rule(IncSubtensor)
def _inc_subtensor(node: Apply, inputs: list[Any], cut: Cut) -> Any:
    whole, part, *places = inputs
    own, *others = _indices(node, places)
    timed = _first([whole, part])
    if timed.axis or any(index != slice(None) for index in others):
        raise _NoRuleError
    whole, part = map(jnp.asarray, plain([whole, part]))
    if isinstance(own, slice):
        start, stop, step = own.indices(len(whole))
        if step < 0 and start >= stop:
            start, stop, part = stop + 1, start + 1, jnp.flip(part, 0) if part.ndim else part
        if abs(step) != 1:
            raise _NoRuleError
    else:
        start, stop = own % len(whole), own % len(whole) + 1
        part = part[None]
    part = jnp.broadcast_to(part, (max(stop - start, 0), *whole.shape[1:]))
    return Timed(written(whole, part, start, node.op.set_instead_of_inc))


@rule(Join)
def _join(node: Apply, inputs: list[Any], cut: Cut) -> Any:
    axis, arrays = join_of(node)
    values = inputs[len(inputs) - len(arrays) :]
    if axis is None:
        raise _NoRuleError
    own = _first(values).axis
    if own != axis % arrays[0].type.ndim:
        return _along(node, inputs, own)
    return Timed(joined(plain(values), own), own)


@rule(Split)
def _split(node: Apply, inputs: list[Any], cut: Cut) -> Any:
    value, *others = inputs
    _, axis, _ = split_of(node)
    if axis is None or isinstance(others[-1], jax.core.Tracer):
        raise _NoRuleError
    if axis % len(value.shape) != value.axis:
        return _along(node, inputs, value.axis)
    ends = [0, *accumulate(map(int, others[-1]))]
    return [Timed(value.sliced(*pair), value.axis) for pair in pairwise(ends)]
