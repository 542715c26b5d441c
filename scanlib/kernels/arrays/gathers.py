"""Indices that are arrays: items read from places that a step computes, and written to such."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pytensor.graph.basic import Apply, Variable

from scanlib._compat import INDEX_READS, INDEX_WRITES
from scanlib.kernels.arrays.array_step import Step, rule
from scanlib.kernels.arrays.nests import Walk, common_sizes, over, stretched, write_copy
from scanlib.kernels.arrays.sizes import Size
from scanlib.kernels.arrays.views import (
    broadcast,
    copied_base,
    indexed,
    wrapped_index,
)
from scanlib.kernels.arrays.workspace import Place
from scanlib.kernels.language import INT64, Value
from scanlib.kernels.scalars import NoKernelError, added, real
from scanlib.lengths.numbers import indices_of
from scanlib.ops.graph import core_op

INDEX_SHAPES = "shape mismatch: indexing arrays of {} and {} could not be broadcast together"


class Gather:
    """The items of an array that arrays of indices select, with slices of its other axes.

    The axes of the indices come where the first of these is, or before all others where a slice is
    between two of them.
    """

    def __init__(self, step: Step, place: Place, indices: Sequence[slice | Variable]) -> None:
        self.step = step
        given = [*indices, *[slice(None)] * (place.ndim - len(indices))]
        axes = [axis for axis, index in enumerate(given) if not isinstance(index, slice)]
        arrays = [index for index in given if not isinstance(index, slice)]
        if any(array.type.dtype == "bool" for array in arrays):
            raise NoKernelError("masks as indices have no kernel")
        slices = [index if isinstance(index, slice) else slice(None) for index in given]
        base = indexed(step, place, slices)
        self.pointer = base.pointer
        self.by_index = [(axis, base.sizes[axis], base.strides[axis]) for axis in axes]
        rest = [axis for axis in range(base.ndim) if axis not in axes]
        self.rest = base.along(rest)
        together = axes == list(range(axes[0], axes[-1] + 1))
        self.lead = sum(axis < axes[0] for axis in rest) if together else 0
        ndim = max(array.type.ndim for array in arrays)
        shapes = [(array, step.place(array).sizes) for array in arrays if array.type.ndim]
        self.loops = common_sizes(step, ndim, shapes, "IndexError", INDEX_SHAPES)
        self.indices = [self._walk(array) for array in arrays]

    def _walk(self, array: Variable) -> Walk | Value:
        number = self.step.only_number(array)
        if number is not None:
            return real(number)
        return stretched(self.step, array, self.step.place(array), self.loops)

    @property
    def sizes(self) -> list[Size]:
        """The sizes of the result."""
        rest = list(self.rest.sizes)
        return [*rest[: self.lead], *self.loops, *rest[self.lead :]]

    def each(self, other: Place, write: Callable[[Place, Place], None]) -> None:
        """Write, for each index, what is done with what it selects and with a part of another."""
        step, w = self.step, self.step.writer
        inner = range(self.lead, self.lead + len(self.loops))
        along = Walk(other.pointer, other.dtype, [other.strides[axis] for axis in inner])
        kept = [axis for axis in range(other.ndim) if axis not in inner]
        walks = [index for index in self.indices if isinstance(index, Walk)]
        with over(step, [*walks, along], self.loops):
            pointer = self.pointer
            for found, (axis, size, stride) in zip(self.indices, self.by_index, strict=True):
                number = found.load(step, 1) if isinstance(found, Walk) else found
                first = wrapped_index(step, real(number), axis, size)
                pointer = w.offset(pointer, step.bytes(first, stride))
            here = w.offset(other.pointer, w.as_value(along.offset, INT64))
            write(self.rest.along(range(self.rest.ndim), pointer), other.along(kept, here))


@rule(*INDEX_READS[1:])
def write_gather(step: Step, node: Apply) -> None:
    """Write the copy of items that arrays of indices select."""
    source = node.inputs[0]
    gather = Gather(step, step.place(source), indices_of(node))
    (out,) = node.outputs
    target = step.target(out, gather.sizes)
    gather.each(target, lambda item, part: write_copy(step, item, part))
    step.bind_place(out, target)


@rule(*INDEX_WRITES[1:])
def write_scatter(step: Step, node: Apply) -> None:
    """Write numbers to the items that arrays of indices select, one after the other."""
    _, value, *rest = node.inputs
    (out,), op = node.outputs, core_op(node)
    if getattr(op, "ignore_duplicates", False):
        raise NoKernelError("a write that forgets repeated indices has no kernel")
    for array in rest:
        if array.type.ndim:
            step.place(array)
    target = copied_base(step, node)
    gather = Gather(step, target, indices_of(node))
    number = step.only_number(value)
    sizes, combine = tuple(gather.sizes), None if op.set_instead_of_inc else added
    if number is not None:
        nothing = target.view(sizes, [0] * len(sizes))
        gather.each(nothing, lambda item, _: write_copy(step, number, item, combine))
    else:
        source = broadcast(step, value, sizes)
        gather.each(source, lambda item, part: write_copy(step, part, item, combine))
    step.bind_place(out, target)
