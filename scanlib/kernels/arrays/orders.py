"""Results that depend on the order of items: cumulative sums and products, the largest's place."""

from __future__ import annotations

from pytensor.graph.basic import Apply
from pytensor.tensor.extra_ops import CumOp
from pytensor.tensor.math import Argmax

from scanlib.kernels.arrays.array_step import Step, core_op, rule
from scanlib.kernels.arrays.nests import (
    Walk,
    collapse,
    contiguous,
    nest,
    over,
    walked,
    write_copy,
)
from scanlib.kernels.arrays.sizes import Size, product
from scanlib.kernels.language import INT64, Value
from scanlib.kernels.scalars import NoKernelError, Number, parts_of
from scanlib.kernels.spans import added


@rule(CumOp)
def write_cumulative(step: Step, node: Apply) -> None:
    (inp,), (out,), op = node.inputs, node.outputs, core_op(node)
    if op.axis is None:
        place = contiguous(step, inp)
        place = place.view([product(*place.sizes)], [place.itemsize])
    else:
        place = step.place(inp)
    if parts_of(out.type.dtype) is not None and op.mode == "mul":
        raise NoKernelError("cumulative products of complex numbers have no kernel")
    axis = (op.axis or 0) % place.ndim
    target = step.target(out, place.sizes)
    write_copy(step, place, target)
    size, stride = target.sizes[axis], target.strides[axis]
    others = [k for k in range(place.ndim) if k != axis]
    row = target.view([target.sizes[k] for k in others], [target.strides[k] for k in others])
    w = step.writer
    with w.loop(1, step.value(size)) as index:
        here = w.offset(target.pointer, step.bytes(index, stride))
        before = w.offset(target.pointer, step.bytes(index - 1, stride))
        last, this = (
            walked(step, row.view(list(row.sizes), list(row.strides), pointer), row.sizes)
            for pointer in (before, here)
        )
        loops = collapse(step, [last, this], row.sizes)

        def write(lanes: int) -> None:
            old, item = last.load(step, lanes), this.load(step, lanes)
            this.store(step, added(old, item) if op.mode == "add" else _times(old, item))

        nest(step, [last, this], loops, write)
    step.bind_place(out, target)


def _times(x: Number, y: Number) -> Number:
    assert isinstance(x, Value)
    assert isinstance(y, Value)
    return x & y if x.type.dtype == "bool" else x * y


@rule(Argmax)
def write_argmax(step: Step, node: Apply) -> None:
    """Write where the largest items are, or the first ones that are no numbers."""
    (inp,), (out,), op = node.inputs, node.outputs, core_op(node)
    place, w = step.place(inp), step.writer
    if parts_of(place.dtype) is not None:
        raise NoKernelError("the largest of complex numbers has no kernel")
    axes = list(range(place.ndim)) if op.axis is None else [a % place.ndim for a in op.axis]
    kept = [axis for axis in range(place.ndim) if axis not in axes]
    text = "attempt to get argmax of an empty sequence"
    size = product(*(place.sizes[axis] for axis in axes))
    step.require_not_below(size, 1, "ValueError", text)
    outer: list[Size] = [place.sizes[axis] for axis in kept]
    target = step.target(out, outer) if outer else None
    walk = Walk(place.pointer, place.dtype, [place.strides[axis] for axis in (*kept, *axes)])
    walks = [walk]
    if target is not None:
        walks.append(Walk(target.pointer, target.dtype, list(target.strides)))
    with over(step, walks, outer):
        best = w.local(_real(walk.load(step, 1)))
        where, count = w.local(0, INT64), w.local(0, INT64)
        with over(step, [walk], [place.sizes[axis] for axis in axes], len(kept)):
            item, old = _real(walk.load(step, 1)), w.copy(best)
            if place.dtype == "bool":
                larger = item & ~old
            elif item.type.is_float:
                larger = (item > old) | (item.differs(item) & old.equals(old))
            else:
                larger = item > old
            w.assign(best, w.select(larger, item, old))
            w.assign(where, w.select(larger, w.copy(count), w.copy(where)))
            w.assign(count, w.copy(count) + 1)
        if target is not None:
            walks[1].store(step, w.copy(where))
    if target is None:
        step.bind_number(out, w.copy(where))
    else:
        step.bind_place(out, target)


def _real(number: Number) -> Value:
    assert isinstance(number, Value)
    return number
