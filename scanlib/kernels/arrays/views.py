"""Other ways to look at arrays, and writes through them: transposes, slices, indices, joins.

What only looks at an array in another way is arithmetic with pointers and strides. Indices are
checked, and counted from the end where they are negative.
"""

from __future__ import annotations

import builtins
from collections.abc import Sequence

import numpy as np
from pytensor.compile.ops import DeepCopyOp
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import (
    Alloc,
    AllocDiag,
    AllocEmpty,
    ARange,
    ExtractDiag,
    Eye,
    Join,
    MakeVector,
    ScalarFromTensor,
    TensorFromScalar,
)
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import Reshape, Shape, Shape_i, SpecifyShape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor
from pytensor.tensor.type import TensorType

from scanlib.kernels.arrays.nests import contiguous, write_copy
from scanlib.kernels.arrays.places import Place
from scanlib.kernels.arrays.sizes import Expression, Size, combined, product, total
from scanlib.kernels.arrays.step import Step, rule
from scanlib.kernels.language import Value
from scanlib.kernels.scalars import NoKernelError, parts_of
from scanlib.kernels.spans import load_number, store_number
from scanlib.ops import errors

OUT_OF_BOUNDS = "index out of bounds"


# Numbers


@rule(TensorFromScalar, ScalarFromTensor)
def write_scalar_type(step: Step, node: Apply) -> None:
    step.alias(node.outputs[0], node.inputs[0])


@rule(Shape_i)
def write_shape_i(step: Step, node: Apply) -> None:
    step.bind_known(node.outputs[0], shape_of(step, node.inputs[0])[node.op.i])


def shape_of(step: Step, variable: Variable) -> tuple[Size, ...]:
    """Return the sizes of an array, which may be computed where it is read only."""
    if variable in step.deferred:
        raise NoKernelError("the shape of a value that is not stored has no kernel")
    if variable in step.items:
        return (len(step.items[variable]),)
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
    for condition in conditions:
        if step.is_known(condition):
            size = step.size_of(condition)
            step.sizes.require_not_below(size, 1, kind.__name__, node.op.msg)
            continue
        if condition.type.ndim:
            raise NoKernelError("a check of an array has no kernel")
        holds = step.scalars.truth(step.number(condition))
        step.fail_when(~holds, kind.__name__, node.op.msg)
    step.alias(node.outputs[0], value)


# Views


@rule(DimShuffle)
def write_dimshuffle(step: Step, node: Apply) -> None:
    (inp,), (out,) = node.inputs, node.outputs
    op = node.op
    if inp.type.ndim == 0 or (inp not in step.places and inp in step.numbers):
        number = step.number(inp)
        if inp in step.known:
            step.bind_known(out, step.known[inp])
        step.bind_number(out, number)
        return
    place = step.place(inp)
    for axis in op.drop:
        text = "Cannot drop an axis of a size other than one"
        step.sizes.require_equal(place.sizes[axis], 1, "ValueError", text)
    if out.type.ndim == 0:
        step.bind_number(out, load_number(step.writer, place.dtype, place.pointer, 0))
        return
    order = [None if axis == "x" else axis for axis in op.new_order]
    sizes: list[Size] = [1 if axis is None else place.sizes[axis] for axis in order]
    strides: list[Size] = [0 if axis is None else place.strides[axis] for axis in order]
    step.bind_place(out, place.view(sizes, strides))


@rule(SpecifyShape)
def write_specify_shape(step: Step, node: Apply) -> None:
    inp, *wanted = node.inputs
    if inp.type.ndim == 0:
        step.alias(node.outputs[0], inp)
        return
    place, sizes = step.place(inp), []
    for axis, size in enumerate(wanted):
        own = place.sizes[axis]
        if isinstance(size.type, TensorType | ScalarType):
            text = "SpecifyShape: an array has another shape"
            own = step.sizes.require_equal(own, step.size_of(size), "AssertionError", text)
        sizes.append(own)
    step.bind_place(node.outputs[0], place.view(sizes, list(place.strides)))


@rule(Reshape)
def write_reshape(step: Step, node: Apply) -> None:
    inp, shape = node.inputs
    out = node.outputs[0]
    if isinstance(shape, Constant):
        wanted: list[Size] = [int(size) for size in shape.data]
    elif shape in step.items:
        wanted = [step.size_of(size) for size in step.items[shape]]
    else:
        raise NoKernelError("a shape that is computed as a vector has no kernel")
    if inp.type.ndim == 0:
        step.bind_number(out, step.number(inp))
        return
    place = contiguous(step, inp)
    items = product(*place.sizes)
    unknown = [axis for axis, size in enumerate(wanted) if size == -1]
    if len(unknown) == 1:
        others = product(*(size for size in wanted if size != -1))
        wanted[unknown[0]] = combined("quotient", items, others)
    if not wanted:
        step.sizes.require_equal(items, 1, "ValueError", "cannot reshape array")
        step.bind_number(out, load_number(step.writer, place.dtype, place.pointer, 0))
        return
    step.sizes.require_equal(product(*wanted), items, "ValueError", "cannot reshape array")
    strides = step.sizes.contiguous_strides(place.itemsize, tuple(wanted))
    step.bind_place(out, place.view(wanted, list(strides)))


@rule(ExtractDiag)
def write_extract_diag(step: Step, node: Apply) -> None:
    op = node.op
    if node.inputs[0].type.ndim != 2 or op.offset != 0:
        raise NoKernelError(f"{op} has no kernel")
    place = step.place(node.inputs[0])
    size = combined("min", *map(step.sizes.same, place.sizes))
    step.bind_place(node.outputs[0], place.view([size], [total(*place.strides)]))


# Indices


def is_simple(index: object) -> bool:
    """Whether an index is a number, or a slice without a step or that flips an axis."""
    if not isinstance(index, slice):
        return True
    if index.step is None:
        return True
    if not isinstance(index.step, Constant | int):
        return False
    number = integer_of(index.step)
    return number == 1 or (number == -1 and index.start is None and index.stop is None)


def integer_of(index: Constant | int) -> int:
    return int(np.asarray(index.data)) if isinstance(index, Constant) else int(index)


def indexed(step: Step, place: Place, indices: Sequence) -> Place:
    """Return the part of an array that basic indices select."""
    if not all(map(is_simple, indices)):
        raise NoKernelError("a slice with a step has no kernel")
    sizes: list[Size] = []
    strides: list[Size] = []
    pointer, w = place.pointer, step.writer
    for axis, size in enumerate(map(step.sizes.same, place.sizes)):
        stride = place.strides[axis]
        index = indices[axis] if axis < len(indices) else slice(None)
        first: Size | Value
        if isinstance(index, slice):
            first, count, by = _span(step, index, size)
            sizes.append(count)
            strides.append(stride if by == 1 else product(-1, stride))
        else:
            first = _checked_index(step, index, size)
        if isinstance(first, Value):
            pointer = w.offset(pointer, step.bytes(first, stride))
        elif first != 0:
            pointer = w.offset(pointer, step.value(product(first, stride)))
    return place.view(sizes, strides, pointer)


def _checked_index(step: Step, index: Variable | int, size: Size) -> Size | Value:
    if isinstance(index, int) or step.is_known(index):
        number = index if isinstance(index, int) else step.size_of(index)
        if isinstance(number, int):
            least = number + 1 if number >= 0 else -number
            step.sizes.require_not_below(size, least, "IndexError", OUT_OF_BOUNDS)
            return number if number >= 0 else step.sizes.same(total(size, number))
    w = step.writer
    value = step.number(index)
    assert isinstance(value, Value)
    place = w.cast(value, "int64")
    length = step.value(size)
    place = w.select(place < 0, place + length, place)
    step.fail_when((place < 0) | (place >= length), "IndexError", OUT_OF_BOUNDS)
    return place


def _span(step: Step, index: slice, size: Size) -> tuple[Size, Size, int]:
    """Return the first index of a slice, how many there are, and the step."""
    if index.step is not None and integer_of(index.step) == -1:
        return total(size, -1), size, -1
    start = 0 if index.start is None else _bound(step, index.start, size)
    stop = size if index.stop is None else _bound(step, index.stop, size)
    if start == 0:
        return 0, stop, 1
    return start, combined("max", total(stop, product(-1, start)), 0), 1


def _bound(step: Step, bound: Variable | int, size: Size) -> Size:
    number = bound if isinstance(bound, int) else step.size_of(bound)
    if isinstance(number, int):
        if isinstance(size, int):
            return slice(number, None).indices(size)[0]
        if number >= 0:
            return 0 if number == 0 else combined("min", number, size)
        return combined("max", total(size, number), 0)
    if step.sizes.same(number) == step.sizes.same(size):
        return size
    # Counted from the end where it is negative: a bound and the size are both known.
    wrapped = combined("max", total(number, size), 0)
    plain = combined("min", number, size)
    is_negative = combined("min", combined("max", number, -1), 0)  # -1 or 0
    return combined("equal", is_negative, 0, plain, wrapped)


@rule(Subtensor)
def write_subtensor(step: Step, node: Apply) -> None:
    indices = indices_from_subtensor(node.inputs[1:], node.op.idx_list)
    inp, out = node.inputs[0], node.outputs[0]
    if inp in step.items and len(indices) == 1 and not isinstance(indices[0], slice):
        index = indices[0]
        if isinstance(index, int | Constant):
            step.alias(out, step.items[inp][integer_of(index)])
            return
    view = indexed(step, step.place(inp), indices)
    if out.type.ndim == 0:
        step.bind_number(out, load_number(step.writer, view.dtype, view.pointer, 0))
    else:
        step.bind_place(out, view)


@rule(IncSubtensor)
def write_inc_subtensor(step: Step, node: Apply) -> None:
    base, value, *rest = node.inputs
    out = node.outputs[0]
    indices = indices_from_subtensor(rest, node.op.idx_list)
    if base.type.dtype != value.type.dtype:
        raise NoKernelError("a write of another dtype has no kernel")
    if not all(map(is_simple, indices)):
        raise NoKernelError("a slice with a step has no kernel")
    place = step.place(base)
    written = step.places.get(value)
    apart = written is None or written.part is not place.part
    target = step.target(out, place.sizes, [(base, place)] if apart else [])
    if target.pointer is not place.pointer:
        write_copy(step, place, target)
    part = indexed(step, target, indices)
    number = step.only_number(value)
    source = number if number is not None else broadcast(step, value, part.sizes)
    write_copy(step, source, part, add=not node.op.set_instead_of_inc)
    step.bind_place(out, target)


def broadcast(step: Step, value: Variable, sizes: tuple[Size, ...]) -> Place:
    """Return an array as one of these sizes, which repeats itself."""
    place = step.place(value)
    lead = len(sizes) - place.ndim
    strides: list[Size] = [0] * lead
    for axis, (size, stride) in enumerate(zip(place.sizes, place.strides, strict=True)):
        if value.type.shape[axis] == 1:
            strides.append(0)
            continue
        text = "cannot assign an array of another shape to a slice"
        step.sizes.require_equal(size, sizes[lead + axis], "ValueError", text)
        strides.append(stride)
    return place.view(list(sizes), strides)


# New arrays


@rule(DeepCopyOp)
def write_deep_copy(step: Step, node: Apply) -> None:
    (inp,), (out,) = node.inputs, node.outputs
    if inp.type.ndim == 0:
        step.bind_number(out, step.number(inp))
        return
    place = step.place(inp)
    target = step.target(out, place.sizes)
    write_copy(step, place, target)
    step.bind_place(out, target)


@rule(Alloc)
def write_alloc(step: Step, node: Apply) -> None:
    value, *sizes = node.inputs
    out = node.outputs[0]
    known = [step.size_of(size) for size in sizes]
    for size in known:
        if isinstance(size, Expression) or (isinstance(size, int) and size < 0):
            text = "negative dimensions are not allowed"
            step.sizes.require_not_below(size, 0, "ValueError", text)
    target = step.target(out, known)
    number = step.only_number(value)
    source = number if number is not None else broadcast(step, value, target.sizes)
    write_copy(step, source, target)
    step.bind_place(out, target)


@rule(AllocEmpty)
def write_alloc_empty(step: Step, node: Apply) -> None:
    out = node.outputs[0]
    step.bind_place(out, step.target(out, [step.size_of(size) for size in node.inputs]))


@rule(ARange)
def write_arange(step: Step, node: Apply) -> None:
    start, stop, by = node.inputs
    out, w = node.outputs[0], step.writer
    plain = all(isinstance(x, Constant) for x in (start, by)) and parts_of(out.type.dtype) is None
    if not plain or start.data != 0 or by.data != 1:
        raise NoKernelError("a range with a start or a step has no kernel")
    size = combined("max", step.size_of(stop), 0)
    target = step.target(out, [size])
    stride = target.strides[0]
    with w.loop(0, step.value(size)) as index:
        item = w.cast(index, out.type.dtype)
        store_number(w, target.pointer, step.bytes(index, stride), item)
    step.bind_place(out, target)


def _write_diagonal(step: Step, target: Place, value: Place | None, size: Size) -> None:
    """Write zeros with numbers, or ones, on the diagonal."""
    write_copy(step, step.scalars.constant(0, target.dtype), target)
    diagonal = target.view([size], [total(*target.strides)])
    source = step.scalars.constant(1, target.dtype) if value is None else value
    write_copy(step, source, diagonal)


@rule(Eye)
def write_eye(step: Step, node: Apply) -> None:
    rows, columns, offset = node.inputs
    if not isinstance(offset, Constant) or offset.data != 0:
        raise NoKernelError("ones beside the diagonal have no kernel")
    out = node.outputs[0]
    sizes = [combined("max", step.size_of(size), 0) for size in (rows, columns)]
    target = step.target(out, sizes)
    _write_diagonal(step, target, None, combined("min", *sizes))
    step.bind_place(out, target)


@rule(AllocDiag)
def write_alloc_diag(step: Step, node: Apply) -> None:
    (value,), (out,) = node.inputs, node.outputs
    if value.type.ndim != 1 or node.op.offset != 0:
        raise NoKernelError(f"{node.op} has no kernel")
    place = step.place(value)
    size = step.sizes.same(place.sizes[0])
    target = step.target(out, [size, size])
    _write_diagonal(step, target, place, size)
    step.bind_place(out, target)


@rule(Join)
def write_join(step: Step, node: Apply) -> None:
    axis, *parts = node.inputs
    out = node.outputs[0]
    if not isinstance(axis, Constant) or any(p.type.dtype != out.type.dtype for p in parts):
        raise NoKernelError("a join along an axis that is computed has no kernel")
    along = int(axis.data) % out.type.ndim
    places = [step.place(part) for part in parts]
    sizes = list(places[0].sizes)
    for place in places[1:]:
        for other, size in enumerate(place.sizes):
            if other != along:
                text = "all the input array dimensions except for the concatenation axis must match"
                sizes[other] = step.sizes.require_equal(sizes[other], size, "ValueError", text)
    sizes[along] = total(*(place.sizes[along] for place in places))
    target = step.target(out, sizes)
    first: Size = 0
    for place in places:
        own = list(target.sizes)
        own[along] = place.sizes[along]
        pointer = target.pointer
        if first != 0:
            moved = step.value(product(first, target.strides[along]))
            pointer = step.writer.offset(target.pointer, moved)
        write_copy(step, place, target.view(own, list(target.strides), pointer))
        first = total(first, place.sizes[along])
    step.bind_place(out, target)
