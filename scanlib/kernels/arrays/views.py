"""Other ways to look at arrays, and writes through them: transposes, slices, indices, joins.

What only looks at an array in another way is arithmetic with pointers and strides. Indices are
checked, and counted from the end where they are negative. Items that arrays of indices select are
copied one after the other.
"""

import builtins
from collections.abc import Callable, Sequence

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.ops import DeepCopyOp
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarOp, ScalarType
from pytensor.tensor.basic import (
    Alloc,
    AllocDiag,
    ARange,
    ExtractDiag,
    Join,
    MakeVector,
    ScalarFromTensor,
    Split,
    TensorFromScalar,
)
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor
from pytensor.tensor.type import TensorType, integer_dtypes

from scanlib._compat import INDEX_READS, INDEX_WRITES, join_of, split_of
from scanlib.kernels.arrays.array_step import Step, rule
from scanlib.kernels.arrays.nests import (
    Tree,
    Walk,
    common_sizes,
    contiguous,
    over,
    stretched,
    write_copy,
    write_numbers,
    write_tree,
)
from scanlib.kernels.arrays.sizes import (
    Check,
    Given,
    Size,
    changes,
    if_equal,
    maximum,
    minimum,
    pieces,
    product,
    quotient,
    total,
)
from scanlib.kernels.arrays.workspace import Place
from scanlib.kernels.language import INT64, Value
from scanlib.kernels.scalars import NoKernelError, Number, added, parts_of, real
from scanlib.kernels.spans import load_number, store_number
from scanlib.lengths.numbers import constant_place, indices_of
from scanlib.ops import errors
from scanlib.ops.messages import SPECIFIED_SHAPE, out_of_bounds, shape_text
from scanlib.ops.row_ops.checked_rows import CheckedItems, CheckedRows
from scanlib.ops.row_ops.row_segments import FEW_ROWS, SplitRows

ASSIGNED = "cannot assign an array of another shape to a slice: sizes {} and {}"
FILLED = "could not broadcast an array to the shape of a new one: sizes {} and {}"
INDEX_SHAPES = "shape mismatch: indexing arrays of {} and {} could not be broadcast together"
JOINED = (
    "all the input array dimensions except for the concatenation axis must match exactly, "
    "got {} and {} along axis "
)
NEGATIVE = "negative dimensions are not allowed, got {}"
MOST_SHOWN = 6  # axes of an array that is reshaped
RESHAPED = "cannot reshape array of size {} into "


# Numbers


rule(TensorFromScalar, ScalarFromTensor, DeepCopyOp)(
    lambda step, node: step.alias(node.outputs[0], node.inputs[0])
)
rule(ScalarOp)(lambda step, node: write_numbers(step, node, node))


@rule(Shape_i)
def write_shape_i(step: Step, node: Apply) -> None:
    step.bind_known(node.outputs[0], shape_of(step, node.inputs[0])[node.op.i])


def shape_of(step: Step, variable: Variable) -> tuple[Size, ...]:
    """Return the sizes of an array, which may be computed where it is read only."""
    if variable in step.deferred:
        return tuple(Tree(step, variable, variable.owner).shape())
    if variable in step.items:
        return step.shape_of_items(variable)
    if all(known == 1 for known in variable.type.shape):
        return (1,) * variable.type.ndim
    return tuple(map(step.sizes.same, step.place(variable).sizes))


@rule(MakeVector)
def write_make_vector(step: Step, node: Apply) -> None:
    step.items[node.outputs[0]] = list(node.inputs)


@rule(Shape)
def write_shape(step: Step, node: Apply) -> None:
    """Bind the sizes of an array, of which a vector is made only if it is read as one."""
    (inp,), (out,) = node.inputs, node.outputs
    step.items[out] = [Shape_i(axis)(inp) for axis in range(inp.type.ndim)]
    for variable, size in zip(step.items[out], shape_of(step, inp), strict=True):
        step.bind_known(variable, size)


@rule(CheckAndRaise)
def write_check(step: Step, node: Apply) -> None:
    """Write a check, before the first step if it is the same for all of them."""
    kind: type = node.op.exc_type
    value, *conditions = node.inputs
    homes = (errors, builtins, np.linalg)
    if not any(getattr(home, kind.__name__, None) is kind for home in homes):
        raise NoKernelError(f"a check that raises {kind.__name__} has no kernel")
    said = node.op.msg.replace("{", "{{").replace("}", "}}")
    for condition in conditions:
        if step.is_known(condition):
            size = step.size_of(condition)
            step.require_not_below(size, 1, kind.__name__, said)
            continue
        if condition.type.ndim:
            raise NoKernelError("a check of an array has no kernel")
        holds = step.scalars.truth(step.number(condition))
        step.fail_when(~holds, kind.__name__, said)
    step.alias(node.outputs[0], value)


# Views


@rule(DimShuffle)
def write_dimshuffle(step: Step, node: Apply) -> None:
    (inp,), (out,) = node.inputs, node.outputs
    op = node.op
    if inp in step.items and out.type.ndim == 0 and len(step.items[inp]) == 1:
        step.alias(out, step.items[inp][0])
        return
    if inp.type.ndim == 0 or (inp not in step.places and inp in step.numbers):
        number = step.number(inp)
        if step.is_known(inp):
            step.bind_known(out, step.size_of(inp))
        if inp.type.ndim == 0 and out.type.ndim == 1:
            step.items[out] = [inp]
        step.bind_number(out, number)
        return
    place = step.place(inp)
    for axis in op.drop:
        text = f"Cannot drop axis {axis} of a size other than one, {{}}"
        step.require(place.sizes[axis], 1, "ValueError", text, place.sizes[axis : axis + 1])
    if out.type.ndim == 0:
        step.bind_number(out, load_number(step.writer, place.dtype, place.pointer, 0))
        return
    order = [None if axis == "x" else axis for axis in op.new_order]
    sizes: list[Size] = [1 if axis is None else place.sizes[axis] for axis in order]
    strides: list[Size] = [0 if axis is None else place.strides[axis] for axis in order]
    step.bind_place(out, place.view(sizes, strides))
    if inp in step.fixed:
        step.fixed.add(out)


@rule(SpecifyShape)
def write_specify_shape(step: Step, node: Apply) -> None:
    inp, *wanted = node.inputs
    if inp.type.ndim == 0:
        step.alias(node.outputs[0], inp)
        return
    error = "SpecifiedShapeError"
    texts = [SPECIFIED_SHAPE.format(axis, "{}", "{}") for axis in range(len(wanted))]
    place, sizes = step.place(inp), []
    for own, size, text in zip(place.sizes, wanted, texts, strict=True):
        if isinstance(size.type, TensorType | ScalarType):
            given = own, step.size_of(size)
            own = step.require(*given, error, text, given)
        sizes.append(own)
    step.bind_place(node.outputs[0], place.view(sizes, place.strides))


@rule(Reshape)
def write_reshape(step: Step, node: Apply) -> None:
    (inp, shape), (out,) = node.inputs, node.outputs
    if inp in step.items and None not in out.type.shape:
        step.items[out] = step.items[inp]
        return
    wanted = numbers_of(step, shape)
    if inp.type.ndim == 0:
        step.bind_number(out, step.number(inp))
        return
    place = contiguous(step, inp)
    items = product(*place.sizes)
    for axis, size in enumerate(given := list(wanted)):
        if size == -1 or (isinstance(size, Given) and size.kind == "value"):
            rest = quotient(items, product(*given[:axis], *given[axis + 1 :]))
            wanted[axis] = rest if size == -1 else if_equal(size, -1, rest, size)
    if not wanted:
        step.require(items, 1, "ValueError", f"{RESHAPED}shape ()", [items])
        step.bind_number(out, load_number(step.writer, place.dtype, place.pointer, 0))
        return
    if len(wanted) > MOST_SHOWN:
        raise NoKernelError("a reshape to so many axes has no kernel")
    text = f"{RESHAPED}shape {shape_text(len(wanted))}"
    step.require(product(*wanted), items, "ValueError", text, [items, *wanted])
    strides = step.sizes.contiguous_strides(place.itemsize, tuple(wanted))
    step.bind_place(out, place.view(wanted, strides))


@rule(SplitRows)
def write_split_rows(step: Step, node: Apply) -> None:
    place, (count, length) = step.place(node.inputs[0]), map(step.size_of, node.inputs[1:])
    given, used = place.sizes[0], product(count, length)
    step.check(Check("lt", (given, used), "SequenceLengthError", FEW_ROWS, (given, used)))
    sizes = count, length, *place.sizes[1:]
    strides = product(length, place.strides[0]), *place.strides
    step.bind_place(node.outputs[0], place.view(sizes, strides))


@rule(CheckedRows)
def write_checked_rows(step: Step, node: Apply) -> None:
    rows, steps = step.place(node.inputs[0]).sizes[0], step.size_of(node.inputs[1])
    both = rows, steps
    step.check(Check("ne", both, "SequenceLengthError", node.op.message, both))
    step.alias(node.outputs[0], node.inputs[0])


@rule(CheckedItems)
def write_checked_items(step: Step, node: Apply) -> None:
    op, place = node.op, step.place(node.inputs[0])
    if len(node.inputs) > 1:
        raise NoKernelError("items of an array that no step may read have no kernel")
    enough = [maximum(size, op.sizes.get(axis, 0)) for axis, size in enumerate(place.sizes)]
    sizes = [if_equal(place.sizes[0], 0, *pair) for pair in zip(enough, place.sizes, strict=True)]
    for item in op.items:
        size, given = sizes[item.axis], place.sizes[item.axis]
        step.check(Check("lt", (size, item.least), "IndexError", item.message, (0, given)))
    step.bind_place(node.outputs[0], place.view(sizes, place.strides))


def numbers_of(step: Step, vector: Variable) -> list[Size]:
    """Return a vector of integers, which may change from step to step."""
    if isinstance(vector, Constant):
        return [int(size) for size in vector.data]
    if vector not in step.items:
        raise NoKernelError("a shape that is computed as a vector has no kernel")
    return [step.size_of(size) for size in step.items[vector]]


def diagonal(step: Step, place: Place, axes: tuple[int, int], offset: int) -> Place:
    """Return a diagonal of two axes as a view; it is the last axis."""
    rows, columns = (step.sizes.same(place.sizes[axis]) for axis in axes)
    row, column = max(-offset, 0), max(offset, 0)
    size = maximum(minimum(total(rows, -row), total(columns, -column)), 0)
    down, right = (place.strides[axis] for axis in axes)
    pointer = step.moved(step.moved(place.pointer, row, down), column, right)
    others = [axis for axis in range(place.ndim) if axis not in axes]
    sizes = [*(place.sizes[axis] for axis in others), size]
    strides = [*(place.strides[axis] for axis in others), total(down, right)]
    return place.view(sizes, strides, pointer)


@rule(ExtractDiag)
def write_extract_diag(step: Step, node: Apply) -> None:
    op = node.op
    place = step.place(node.inputs[0])
    step.bind_place(node.outputs[0], diagonal(step, place, (op.axis1, op.axis2), op.offset))


# Indices


def indexed(step: Step, place: Place, indices: Sequence) -> Place:
    """Return the part of an array that basic indices select."""
    sizes: list[Size] = []
    strides: list[Size] = []
    pointer = place.pointer
    for axis, size in enumerate(map(step.sizes.same, place.sizes)):
        stride = place.strides[axis]
        index = indices[axis] if axis < len(indices) else slice(None)
        first: Size | Value
        if isinstance(index, slice):
            first, count, by = _span(step, index, size)
            sizes.append(count)
            strides.append(product(by, stride))
        else:
            first = _checked_index(step, index, axis, size)
        pointer = step.moved(pointer, first, stride)
    return place.view(sizes, strides, pointer)


def _checked_index(step: Step, index: Variable | int, axis: int, size: Size) -> Size | Value:
    if step.is_known(index):
        number = step.size_of(index)
        if isinstance(number, int):
            least = number + 1 if number >= 0 else -number
            text = out_of_bounds(number, axis)
            step.require_not_below(size, least, "IndexError", text, [size])
            return number if number >= 0 else step.sizes.same(total(size, number))
    return wrapped_index(step, real(step.number(index)), axis, size)


def wrapped_index(step: Step, index: Value, axis: int, size: Size) -> Value:
    """Write the check of an index, and return it as one that is counted from the start."""
    w = step.writer
    given = w.cast(index, "int64")
    length = step.value(size)
    place = w.select(given < 0, given + length, given)
    text = out_of_bounds("{}", axis)
    step.fail_when((place < 0) | (place >= length), "IndexError", text, given, length)
    return place


def _span(step: Step, index: slice, size: Size) -> tuple[Size, Size, int]:
    """Return the first index of a slice, how many there are, and the step."""
    by = 1 if index.step is None else step.size_of(index.step)
    if not isinstance(by, int):
        raise NoKernelError("a slice whose step is computed has no kernel")
    bounds = [None if k is None else step.size_of(k) for k in (index.start, index.stop)]
    if by < 0:  # the items from the end of the array on, counted from there
        bounds = [None if k is None else total(-1, product(-1, k)) for k in bounds]
    start, stop = bounds
    first, count = _forward(step, start, stop, abs(by), size)
    return first if by > 0 else total(size, -1, product(-1, first)), count, by


def _forward(
    step: Step, start: Size | None, stop: Size | None, by: int, size: Size
) -> tuple[Size, Size]:
    first = 0 if start is None else _bound(step, start, size)
    last = size if stop is None else _bound(step, stop, size)
    count = last if first == 0 else maximum(total(last, product(-1, first)), 0)
    if changes(count):
        count = minimum(count, size)  # as nobody knows of it
    return first, pieces(count, by)


def _bound(step: Step, number: Size, size: Size) -> Size:
    if isinstance(number, int):
        if isinstance(size, int):
            return slice(number, None).indices(size)[0]
        if number >= 0:
            return 0 if number == 0 else minimum(number, size)
        return maximum(total(size, number), 0)
    if step.sizes.same(number) == step.sizes.same(size):
        return size
    # Counted from the end where it is negative: a bound and the size are both known.
    wrapped = maximum(total(number, size), 0)
    plain = minimum(number, size)
    is_negative = minimum(maximum(number, -1), 0)  # -1 or 0
    return if_equal(is_negative, 0, plain, wrapped)


@rule(Subtensor)
def write_subtensor(step: Step, node: Apply) -> None:
    indices = indices_of(node)
    inp, out = node.inputs[0], node.outputs[0]
    if inp in step.deferred:
        step.bind_number(out, _computed_item(step, inp, indices))
        return
    if inp in step.items and out.type.ndim == 0 and all(map(step.is_known, node.inputs[1:])):
        which = _place_in_order(step, indices, step.shape_of_items(inp))
        if which is not None:
            for axis, index in enumerate(indices if inp in step.places else ()):
                _checked_index(step, index, axis, step.places[inp].sizes[axis])
            step.alias(out, step.items[inp][which])
            return
    place = constant_place(node)
    if inp in step.items and place is not None and len(place) == 1 and isinstance(place[0], slice):
        step.items[out] = step.items[inp][place[0]]
        return
    view = indexed(step, step.place(inp), indices)
    if out.type.ndim == 0:
        step.bind_number(out, load_number(step.writer, view.dtype, view.pointer, 0))
        return
    if out in step.copied:
        target = step.fresh(view.dtype, view.sizes)
        write_copy(step, view, target)
        view = target
    step.bind_place(out, view)


def _place_in_order(step: Step, indices: Sequence, shape: Sequence[int]) -> int | None:
    """Return which item indices mean, None if they are no numbers or out of bounds."""
    found = 0
    for index, size in zip(indices, shape, strict=True):
        place = step.size_of(index)
        if not isinstance(place, int) or not -size <= place < size:
            return None
        found = found * size + place % size
    return found


def _computed_item(step: Step, variable: Variable, indices: Sequence[Variable | int]) -> Number:
    """Write an item of an elementwise result that is not stored."""
    tree = Tree(step, variable, variable.owner)
    sizes = tree.loops()
    places = [_checked_index(step, k, axis, sizes[axis]) for axis, k in enumerate(indices)]
    for walk in tree.prepare():
        for place, stride in zip(places, walk.strides, strict=True):
            walk.offset = step.bytes(place, stride) + walk.offset
    (number,) = tree.write(1)
    return number


@rule(IncSubtensor)
def write_inc_subtensor(step: Step, node: Apply) -> None:
    value, out, op = node.inputs[1], node.outputs[0], node.op
    indices = indices_of(node)
    if (members := _with_one_set(step, node, indices)) is not None:
        step.items[out] = members
        return
    target = copied_base(step, node)
    part = indexed(step, target, indices)
    number = step.only_number(value)
    part = part.view(sizes_of_written(step, value, number, part.sizes), part.strides)
    source = number if number is not None else broadcast(step, value, part.sizes, ones=True)
    write_copy(step, source, part, None if op.set_instead_of_inc else added)
    step.bind_place(out, target)


def sizes_of_written(
    step: Step, value: Variable, number: Number | None, sizes: Sequence[Size]
) -> tuple[Size, ...]:
    """Return the sizes of what a value is written into: those that its type says, if they change
    otherwise or the value is one number everywhere; `broadcast` compares others."""
    found = list(sizes)
    for axis, size in enumerate(value.type.shape, len(found) - value.type.ndim):
        if size not in (None, 1) and (number is not None or changes(found[axis])):
            given = found[axis], size
            found[axis] = step.require(*given, "ValueError", ASSIGNED, given)
    return tuple(found)


def _with_one_set(step: Step, node: Apply, indices: Sequence) -> list[Variable] | None:
    """Return the numbers of a vector made of numbers after one was set; None for all else."""
    base, value, *others = node.inputs
    is_set = node.op.set_instead_of_inc and value.type == base.type.clone(shape=())
    if not is_set or base not in step.items or not all(map(step.is_known, others)):
        return None
    if any(isinstance(index, slice) for index in indices):
        return None
    which = _place_in_order(step, indices, step.shape_of_items(base))
    if which is None:
        return None
    members = list(step.items[base])
    members[which] = value
    return members


def copied_base(step: Step, node: Apply) -> Place:
    """Return the array that a node writes into, a copy of its first input if others read that."""
    base, *others = node.inputs
    place, (out,) = step.place(base), node.outputs
    if base in step.arrived and step.arrived[base][0] is step.destinations.get(out):
        step.arrived[out] = step.arrived[base]
        return place
    apart = all(
        written is None or written.part is not place.part
        for written in map(step.places.get, others)
    )
    target = step.target(out, place.sizes, [(base, place)] if apart else [])
    if target.pointer is not place.pointer:
        write_copy(step, place, target, by_item=out in step.by_item)
    return target


def broadcast(
    step: Step, value: Variable, sizes: tuple[Size, ...], text: str = ASSIGNED, ones: bool = False
) -> Place:
    """Return an array as one of these sizes, which repeats itself where it is known to have one
    item, and with `ones` also where that is found when the loop runs."""
    place = step.place(value)
    lead = len(sizes) - place.ndim
    strides: list[Size] = [0] * lead
    for axis, (size, stride) in enumerate(zip(place.sizes, place.strides, strict=True)):
        if value.type.shape[axis] == 1:
            strides.append(0)
            continue
        given = tuple(map(step.sizes.same, (size, sizes[lead + axis])))
        if ones and given[0] != given[1] and not isinstance(given[0], int):
            stride = if_equal(given[0], 1, 0, stride)
            size = if_equal(given[0], 1, given[1], given[0])
        step.require(size, given[1], "ValueError", text, given)
        strides.append(stride)
    return place.view(sizes, strides)


# Indices that are arrays


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
                pointer = step.moved(pointer, first, stride)
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
    (out,), op = node.outputs, node.op
    if getattr(op, "ignore_duplicates", False):
        raise NoKernelError("a write that forgets repeated indices has no kernel")
    for array in rest:
        if array.type.ndim:
            step.place(array)
    target = copied_base(step, node)
    gather = Gather(step, target, indices_of(node))
    number = step.only_number(value)
    sizes = sizes_of_written(step, value, number, gather.sizes)
    combine = None if op.set_instead_of_inc else added
    if number is not None:
        nothing = target.view(sizes, [0] * len(sizes))
        gather.each(nothing, lambda item, _: write_copy(step, number, item, combine))
    else:
        source = broadcast(step, value, sizes)
        gather.each(source, lambda item, part: write_copy(step, part, item, combine))
    step.bind_place(out, target)


# New arrays


@rule(Alloc)
def write_alloc(step: Step, node: Apply) -> None:
    value, *sizes = node.inputs
    out = node.outputs[0]
    known = list(map(step.size_of, sizes))
    for size in known:
        if not (isinstance(size, Given) and size.kind == "dim"):
            step.require_not_below(size, 0, "ValueError", NEGATIVE, [size])
    target = step.target(out, known)
    number = step.only_number(value)
    source = number if number is not None else broadcast(step, value, target.sizes, FILLED)
    write_copy(step, source, target, by_item=out in step.by_item)
    step.bind_place(out, target)


@rule(ARange)
def write_arange(step: Step, node: Apply) -> None:
    start, stop, by = node.inputs
    out, w = node.outputs[0], step.writer
    if any(number.type.dtype not in integer_dtypes for number in node.inputs):
        raise NoKernelError("a range between numbers that are no integers has no kernel")
    first, stride = step.size_of(start), step.size_of(by)
    if not isinstance(stride, int) or stride <= 0 or parts_of(out.type.dtype) is not None:
        raise NoKernelError("a range with a step that is computed or negative has no kernel")
    length = maximum(total(step.size_of(stop), product(-1, first)), 0)
    size = pieces(length, stride)
    target = step.target(out, [size])
    with w.loop(0, step.value(size)) as index:
        item = w.cast(index * stride + step.value(first), out.type.dtype)
        store_number(w, target.pointer, step.bytes(index, target.strides[0]), item)
    step.bind_place(out, target)


@rule(AllocDiag)
def write_alloc_diag(step: Step, node: Apply) -> None:
    (value,), (out,), op = node.inputs, node.outputs, node.op
    place = step.place(value)
    *sizes, size = map(step.sizes.same, place.sizes)
    for axis in (op.axis1, op.axis2):
        sizes.insert(axis, total(size, abs(op.offset)))
    target = step.target(out, sizes)
    write_copy(step, step.scalars.constant(0, target.dtype), target)
    write_copy(step, place, diagonal(step, target, (op.axis1, op.axis2), op.offset))
    step.bind_place(out, target)


def _part(step: Step, place: Place, axis: int, first: Size, size: Size) -> Place:
    """Return so many items along an axis of an array, from the `first` on."""
    sizes, pointer = list(place.sizes), step.moved(place.pointer, first, place.strides[axis])
    sizes[axis] = size
    return place.view(sizes, place.strides, pointer)


def _members_of(step: Step, out: Variable, parts: Sequence[Variable]) -> list[Variable] | None:
    """Return the numbers that vectors consist of, with a few constants among them; None for
    others."""
    found: list[Variable] = []
    for part in parts:
        if part in step.items:
            found += step.items[part]
        elif isinstance(part, Constant) and part.data.size <= MOST_SHOWN:
            found += [pt.constant(number, dtype=out.type.dtype) for number in part.data]
        else:
            return None
    return found


@rule(Join)
def write_join(step: Step, node: Apply) -> None:
    along, parts = join_of(node)
    out = node.outputs[0]
    if along is None:
        raise NoKernelError("a join along an axis that is computed has no kernel")
    if out.type.ndim == 1 and (members := _members_of(step, out, parts)) is not None:
        step.items[out] = members
        return
    trees = [Tree(step, p, p.owner if p in step.deferred else None) for p in parts]
    shapes = [tree.loops() for tree in trees]
    sizes = list(shapes[0])
    for shape in shapes[1:]:
        for other, size in enumerate(shape):
            if other != along:
                given, text = (sizes[other], size), f"{JOINED}{other}"
                sizes[other] = step.require(*given, "ValueError", text, given)
    sizes[along] = total(*(shape[along] for shape in shapes))
    target = step.target(out, sizes)
    first: Size = 0
    for tree, shape in zip(trees, shapes, strict=True):
        place = _part(step, target, along, first, shape[along])
        if tree.node is None:
            write_copy(step, step.place(tree.variable), place)
        else:
            write_tree(tree, [place])
        first = total(first, shape[along])
    step.bind_place(out, target)


@rule(Split)
def write_split(step: Step, node: Apply) -> None:
    """Bind parts of an array, which are views of it."""
    inp, along, lengths = split_of(node)
    if along is None:
        raise NoKernelError("a split along an axis that is computed has no kernel")
    place = step.place(inp)
    wanted = numbers_of(step, lengths)
    first: Size = 0
    if len(wanted) != len(node.outputs):
        raise NoKernelError("a split into another number of parts has no kernel")
    text = "Split sizes do not sum up to the length of the axis: {} and {}"
    given = total(*wanted), place.sizes[along]
    step.require(*given, "ValueError", text, given)
    for out, length in zip(node.outputs, wanted, strict=True):
        text = "Split sizes cannot be negative, got {}"
        step.require_not_below(length, 0, "ValueError", text, [length])
        if changes(length):
            length = minimum(length, place.sizes[along])
        step.bind_place(out, _part(step, place, along, first, length))
        first = total(first, length)
