"""Loops over the items of arrays: elementwise Ops, copies and fills, reductions.

Axes along which all arrays go on where the next axis ends are walked as one. Where all items lie
side by side along the innermost axis, it takes as many at once as fill two vector registers, half
as many while there are enough, and the rest one by one; a few of known number without a loop. A few
items of an array that steps write one item of are taken one by one: a processor that reads several
numbers waits until one that has just been written is in the cache.

Of arrays with a short last axis, such as three numbers for each of many members, many members are
taken at once if they lie side by side, and results are put in memory so that they do. So are the
results of transposes: PyTensor has ``x @ (A + b)`` as a product of ``A.T + b.T``.

A sum over inner axes is collected in one number for each lane, one over outer axes in registers, or
in memory where rows are long.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.scalar.basic import ScalarMaximum, ScalarMinimum, get_scalar_type
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.extra_ops import CumOp

from scanlib._compat import IfElse
from scanlib.kernels.arrays.array_step import Destination, Step, rule
from scanlib.kernels.arrays.sizes import UNFIT, Expression, Size, product
from scanlib.kernels.arrays.workspace import Place, is_contiguous, last_swapped
from scanlib.kernels.language import INT64, Value
from scanlib.kernels.scalars import (
    LanesError,
    Number,
    added,
    each_part,
    limit,
    multiplied,
    parts_of,
)
from scanlib.kernels.spans import (
    Cell,
    Total,
    itemsize,
    lane_counts,
    lane_pieces,
    load_number,
    spread,
    store_number,
    walk,
)

REGISTER = 64  # bytes of the lanes of the widest dtype: of two registers
MOST_UNROLLED = 4  # parts of a known number of items
LONG_ROW = 1024  # bytes from which on a row is copied by the C library
MOST_BY_ITEM = 8  # items of an array that are taken one by one where steps write one of them
CHOICES = "a choice of arrays of other sizes"
SHAPES = "Incompatible Elemwise input shapes, sizes {} and {} along axis "


@dataclass
class Walk:
    """An array inside nested loops: its strides in bytes along the axis of each loop, and where its
    item is, as far as loops are open."""

    pointer: Value
    dtype: str
    strides: list[Size]
    offset: Value | int = 0

    def load(self, step: Step, lanes: int) -> Number:
        """Read the item, or several, which are the same one where the innermost stride is zero."""
        several = lanes if self.strides and self.strides[-1] != 0 else 1
        number = load_number(step.writer, self.dtype, self.pointer, self.offset, several)
        return spread(step.writer, number, lanes)

    def store(self, step: Step, number: Number) -> None:
        store_number(step.writer, self.pointer, self.offset, number)


def walked(step: Step, place: Place, sizes: Sequence[Size]) -> Walk:
    """Return an array for loops of these sizes; it repeats itself along axes where it has one."""
    strides: list[Size] = []
    for own, size, stride in zip(place.sizes, sizes, place.strides, strict=True):
        repeated = step.sizes.same(own) == 1 or step.sizes.same(size) == 1
        strides.append(0 if repeated else step.sizes.same(stride))
    return Walk(place.pointer, place.dtype, strides)


def stretched(step: Step, variable: Variable, place: Place, sizes: Sequence[Size]) -> Walk:
    """Return the array of a variable for loops of these sizes, the last of which are its own.

    It repeats itself along axes that it lacks, and where its type says that it has one item.
    """
    lead = len(sizes) - place.ndim
    own = [
        1 if known == 1 else size
        for known, size in zip(variable.type.shape, place.sizes, strict=False)
    ]
    return walked(step, place.view([1] * lead + own, [0] * lead + [*place.strides]), sizes)


def common_sizes(
    step: Step, ndim: int, shapes: Sequence[tuple[Variable, Sequence[Size]]], error: str, text: str
) -> list[Size]:
    """Return the sizes of `ndim` axes over which arrays run together, their last axes the last.

    An axis repeats itself where the type of its variable says that it has one item.
    """
    found: list[Size] = [1] * ndim
    for variable, sizes in shapes:
        for axis, size in enumerate(map(step.sizes.same, sizes)):
            place = ndim - len(sizes) + axis
            if variable.type.shape[axis] != 1 and size != 1:
                own = found[place]
                found[place] = (
                    size if own == 1 else step.require(own, size, error, text, [own, size])
                )
    return list(map(step.sizes.same, found))


def collapse(step: Step, arrays: Sequence[Walk], sizes: Sequence[Size]) -> list[Size]:
    """Walk axes as one where all arrays allow it; change their strides, return the sizes."""
    same = step.sizes.same
    kept = [axis for axis, size in enumerate(sizes) if same(size) != 1]
    for array in arrays:
        array.strides = [array.strides[axis] for axis in kept]
    found = [same(sizes[axis]) for axis in kept]
    for axis in range(len(found) - 2, -1, -1):
        inner = found[axis + 1]
        if all(
            same(array.strides[axis]) == same(product(array.strides[axis + 1], inner))
            for array in arrays
        ):
            for array in arrays:
                del array.strides[axis]
            found[axis : axis + 2] = [same(product(found[axis], inner))]
    return found


def nest(
    step: Step,
    arrays: Sequence[Walk],
    sizes: Sequence[Size],
    write: Callable[[int], None],
    first: int = 0,
    by_item: bool = False,
) -> None:
    """Write loops of some sizes, from an axis on; `write` gets how many items are taken at once.

    It may raise `LanesError`, after which single items are taken. `by_item` says that steps write
    single items of the arrays.
    """
    with over(step, arrays, sizes[first:-1], first):
        innermost(step, arrays, sizes[-1] if sizes else 1, write, by_item)


@contextmanager
def over(
    step: Step, arrays: Sequence[Walk], sizes: Sequence[Size], first: int = 0
) -> Iterator[list[Value]]:
    """Open loops over axes, from the first one on, along which arrays move; yield the indices."""
    indices: list[Value] = []
    with ExitStack() as stack:
        for axis, size in enumerate(sizes, first):
            indices.append(stack.enter_context(step.writer.loop(0, step.value(size))))
            stack.enter_context(at_index(step, arrays, axis, indices[-1]))
        yield indices


@contextmanager
def at_index(step: Step, arrays: Sequence[Walk], axis: int, index: Value | int) -> Iterator[None]:
    """Let arrays be at an index of an axis."""
    before = [array.offset for array in arrays]
    for array in arrays:
        if axis < len(array.strides) and array.strides[axis] != 0 and index != 0:
            array.offset = step.bytes(index, array.strides[axis]) + array.offset
    try:
        yield
    finally:
        for array, offset in zip(arrays, before, strict=True):
            array.offset = offset


def possible_lanes(arrays: Sequence[Walk], size: Size) -> list[int]:
    """Return how many items may be taken at once along the innermost axis, most first.

    There are no arrays where all that is read are numbers, the same at every index.
    """
    if not arrays or not arrays[0].strides or size == 1:
        return [1]
    side_by_side = all(array.strides[-1] in (0, itemsize(array.dtype)) for array in arrays)
    if not side_by_side or any(parts_of(array.dtype) is not None for array in arrays):
        return [1]
    lanes = REGISTER // max(itemsize(array.dtype) for array in arrays)
    if isinstance(size, int) and len(lane_pieces(size, lanes)) <= MOST_UNROLLED:
        return sorted({1, *(count for _, count in lane_pieces(size, lanes))}, reverse=True)
    return [*lane_counts(lanes), 1]


def innermost(
    step: Step, arrays: Sequence[Walk], size: Size, write: Callable[[int], None], by_item: bool
) -> None:
    """Write the loop over the innermost axis."""
    lanes, axis = possible_lanes(arrays, size)[0], len(arrays[0].strides) - 1 if arrays else 0
    if by_item and isinstance(size, int) and size <= MOST_BY_ITEM:
        lanes = 1

    def at(index: Value | int, taken: int) -> None:
        with at_index(step, arrays, axis, index):
            write(taken)

    if axis < 0 or size == 1:
        write(1)
        return
    if isinstance(size, int):
        for several in (lanes, 1):
            pieces = lane_pieces(size, several)
            if len(pieces) <= MOST_UNROLLED and _unrolled(step, pieces, at):
                return
    w, whole = step.writer, step.value(size)
    most = w.select(whole > MOST_BY_ITEM, whole, 0) if by_item else None
    walk(w, w.constant(0, INT64), whole, lane_counts(lanes), at, most)


def _unrolled(
    step: Step, pieces: Sequence[tuple[int, int]], at: Callable[[Value | int, int], None]
) -> bool:
    """Write some items after others; False, and nothing, where an operation is for single ones."""
    before = len(step.writer.block.statements)
    try:
        for first, taken in pieces:
            at(first, taken)
    except LanesError:
        del step.writer.block.statements[before:]
        return False
    return True


# Elementwise Ops


class Tree:
    """The elementwise nodes that are computed together, from arrays and numbers.

    The last of them, `node`, may be None for an array as it is. `sizes` are those of the loops,
    `None` as long as an axis has a size of one only. `by_columns` says that loops run over the last
    axis outside the one before it.
    """

    by_columns = False

    def __init__(self, step: Step, variable: Variable, node: Apply | None) -> None:
        self.step, self.variable, self.node = step, variable, node
        self.sizes: list[Size | None] = [None] * variable.type.ndim
        self.places: list[tuple[Variable, Place]] = []
        self.walks: dict[Variable, Walk] = {}
        self.numbers: dict[Variable, Number] = {}
        if node is None:
            self._add(variable)
        else:
            self._collect(node)

    def _collect(self, node: Apply) -> None:
        step, shape = self.step, node.outputs[0].type.shape
        for axis, known in enumerate(shape):
            if known is not None and known != 1:
                self._agree(axis, known)
        for inp in node.inputs:
            if inp in step.deferred:
                self._collect(inp.owner)
                continue
            number = step.only_number(inp)
            if number is not None:
                self.numbers[inp] = number
            else:
                self._add(inp)

    def _add(self, variable: Variable) -> None:
        place = self.step.place(variable)
        self.places.append((variable, place))
        for axis, known in enumerate(variable.type.shape):
            if known != 1:
                self._agree(axis, place.sizes[axis])

    def _agree(self, axis: int, size: Size) -> None:
        own = self.sizes[axis]
        if own is not None:
            size = self.step.require(own, size, "ValueError", f"{SHAPES}{axis}", [own, size])
        self.sizes[axis] = size

    def shape(self) -> list[Size]:
        return [1 if size is None else self.step.sizes.same(size) for size in self.sizes]

    def loops(self) -> list[Size]:
        return last_swapped(self.shape()) if self.by_columns else self.shape()

    def prepare(self) -> list[Walk]:
        """Return the arrays that are read, for loops of the sizes that were found."""
        sizes = self.shape()
        for variable, place in self.places:
            if variable not in self.walks:
                self.walks[variable] = self.walked(stretched(self.step, variable, place, sizes))
        return list(self.walks.values())

    def walked(self, array: Walk) -> Walk:
        """Return an array of all axes for the loops."""
        if self.by_columns:
            array.strides = last_swapped(array.strides)
        return array

    def has_columns(self) -> bool:
        """Whether items of the axis before the last one lie side by side, and those of the last one
        do not, as of transposes, or are few."""
        sizes = self.shape()
        if len(sizes) < 2:
            return False
        walks = [stretched(self.step, *pair, sizes) for pair in self.places]

        def side_by_side(axis: int) -> bool:
            return all(walk.strides[axis] in (0, itemsize(walk.dtype)) for walk in walks)

        lanes = REGISTER // max((itemsize(walk.dtype) for walk in walks), default=REGISTER)
        is_long = not isinstance(sizes[-2], int) or sizes[-2] >= lanes
        is_short = isinstance(sizes[-1], int) and 1 < sizes[-1] < lanes
        return is_long and side_by_side(-2) and (is_short or not side_by_side(-1))

    def write(self, lanes: int) -> list[Number]:
        """Write one item of each result, or several."""
        if self.node is None:
            return [self.walks[self.variable].load(self.step, lanes)]
        with self.step.scalars.taking(lanes):
            return self._write(self.node, lanes, {})

    def _write(self, node: Apply, lanes: int, loaded: dict[Variable, Number]) -> list[Number]:
        step = self.step
        items = []
        for inp in node.inputs:
            if inp not in loaded:
                if inp in step.deferred:
                    (loaded[inp],) = self._write(inp.owner, lanes, loaded)
                elif inp in self.numbers:
                    loaded[inp] = self.numbers[inp]
                else:
                    loaded[inp] = self.walks[inp].load(step, lanes)
            items.append(loaded[inp])
        return step.scalars.apply(node.op.make_scalar_node(*node.inputs), items)


def require_shape(step: Step, variable: Variable, shape: Sequence[int | None]) -> None:
    """Note that an array must have the sizes that an elementwise node wants."""
    for axis, own in enumerate(step.place(variable).sizes):
        size = shape[axis]
        if size is not None and variable.type.shape[axis] is None:
            step.require(own, size, "ValueError", f"{SHAPES}{axis}", [own, size])


def write_numbers(step: Step, node: Apply, scalar: Apply) -> None:
    """Write a node whose operands and results are numbers; `scalar` is its scalar node."""
    known = step.known_results(node, scalar)
    if known is not None:
        for out, size in zip(node.outputs, known, strict=True):
            step.bind_known(out, size)
        return
    results = step.scalars.apply(scalar, [step.number(inp) for inp in node.inputs])
    for out, result in zip(node.outputs, results, strict=True):
        step.bind_number(out, result)


@rule(Elemwise)
def write_elemwise(step: Step, node: Apply) -> None:
    if node.outputs[0].type.ndim == 0:
        write_numbers(step, node, node.op.make_scalar_node(*node.inputs))
        return
    tree = Tree(step, node.outputs[0], node)
    sizes = tree.shape()
    tree.by_columns = step.destinations.keys().isdisjoint(node.outputs) and tree.has_columns()
    plain = [pair for pair in tree.places if not any(k == 1 for k in pair[0].type.shape)]
    read = tree.places if len(plain) == len(tree.places) else []
    if tree.by_columns:
        read = [(variable, place.swapped()) for variable, place in read]
        goals = [step.target(out, tree.loops(), read) for out in node.outputs]
        targets = [goal.swapped() for goal in goals]
    else:
        targets = [step.target(out, sizes, read) for out in node.outputs]
    write_tree(tree, targets, not step.by_item.isdisjoint(node.outputs))
    for out, place in zip(node.outputs, targets, strict=True):
        step.bind_place(out, place)


def write_tree(tree: Tree, targets: Sequence[Place], by_item: bool = False) -> None:
    """Write the results of a tree's last node into memory of their sizes."""
    step, sizes = tree.step, tree.loops()
    reads = tree.prepare()
    writes = [tree.walked(walked(step, place, tree.shape())) for place in targets]
    loops = collapse(step, [*reads, *writes], sizes)

    def write(lanes: int) -> None:
        for array, number in zip(writes, tree.write(lanes), strict=True):
            array.store(step, spread(step.writer, number, lanes))

    nest(step, [*reads, *writes], loops, write, by_item=by_item)


# Copies


def deliver(step: Step, variable: Variable, destination: Destination) -> None:
    """Write a result where it goes, if it is not there yet."""
    if variable.type.ndim == 0:
        place, number = destination.place(()), step.number(variable)
        store_number(step.writer, place.pointer, 0, spread(step.writer, number, 1))
        return
    if variable in step.items and variable not in step.places:
        shape = step.shape_of_items(variable)
        step.store_items(variable, step.at_destination(destination, shape))
        return
    place = step.place(variable)
    if step.arrived.get(variable) == (destination, place.pointer):
        return
    target = step.at_destination(destination, place.sizes)
    if target.pointer is not place.pointer:
        write_copy(step, place, target)


def write_copy(
    step: Step,
    source: Place | Number,
    target: Place,
    combine: Callable[[Number, Number], Number] | None = None,
    by_item: bool = False,
) -> None:
    """Write that an array of the target's sizes, or a number, is copied.

    With `combine`, such as `added`, it is combined with what is there. `by_item` is as in `nest`.
    """
    write = walked(step, target, target.sizes)
    arrays = [write]
    if isinstance(source, Place):
        arrays.append(walked(step, source, target.sizes))
    sizes = collapse(step, arrays, target.sizes)

    def copy(lanes: int) -> None:
        if isinstance(source, Place):
            item = arrays[1].load(step, lanes)
        else:
            item = spread(step.writer, source, lanes)
        item = step.scalars.number_as(item, target.dtype)
        write.store(step, combine(write.load(step, lanes), item) if combine else item)

    item = itemsize(target.dtype)
    is_plain = isinstance(source, Place) and source.dtype == target.dtype and not combine
    is_whole = is_plain and sizes and all(array.strides[-1] == item for array in arrays)
    if not is_whole or isinstance(sizes[-1], int):
        nest(step, arrays, sizes, copy, by_item=by_item)
        return
    w = step.writer
    with over(step, arrays, sizes[:-1]):
        count = step.bytes(step.value(sizes[-1]), item)
        to, of = (w.offset(array.pointer, array.offset) for array in arrays)
        with w.when(count >= LONG_ROW) as choice:
            w.move(to, of, count)
        with w.otherwise(choice):
            innermost(step, arrays, sizes[-1], copy, by_item)


def contiguous(step: Step, variable: Variable) -> Place:
    """Return where an array lies in order of memory, a copy if need be."""
    place = step.place(variable)
    if is_contiguous(step.sizes, place):
        return place
    copy = copied(step, place)
    assert copy.part is not None
    step.readers[copy.part].add(variable)
    return copy


def copied(step: Step, place: Place) -> Place:
    """Return a copy of an array in order of memory, for one node to read."""
    copy = step.fresh(place.dtype, place.sizes)
    write_copy(step, place, copy)
    return copy


@rule(IfElse)
def write_choice(step: Step, node: Apply) -> None:
    """Write a choice of what was computed: which one is known, or both have the same sizes."""
    condition, *values = node.inputs
    known = step.size_of(condition) if step.is_known(condition) else None
    holds = step.scalars.truth(step.number(condition))
    half = len(node.outputs)
    for out, one, other in zip(node.outputs, values[:half], values[half:], strict=True):
        if isinstance(known, int):
            step.alias(out, one if known else other)
        elif out.type.ndim == 0:
            choose = partial(step.writer.select, holds)
            step.bind_number(out, each_part(choose, step.number(one), step.number(other)))
        else:
            places = step.place(one), step.place(other)
            for size, other_size in zip(places[0].sizes, places[1].sizes, strict=True):
                step.require(size, other_size, UNFIT, CHOICES)
            target = step.target(out, places[0].sizes)
            with step.writer.when(holds) as choice:
                write_copy(step, places[0], target)
            with step.writer.otherwise(choice):
                write_copy(step, places[1], target)
            step.bind_place(out, target)


@rule(CumOp)
def write_cumulative(step: Step, node: Apply) -> None:
    """Write sums or products of all items up to each one: row after row."""
    (inp,), (out,), op = node.inputs, node.outputs, node.op
    place = contiguous(step, inp) if op.axis is None else step.place(inp)
    if op.axis is None:
        place = place.view([product(*place.sizes)], [place.itemsize])
    axis = (op.axis or 0) % place.ndim
    target = step.target(out, place.sizes)
    step.bind_place(out, target)
    combine, nothing = (added, -0.0) if op.mode == "add" else (multiplied, 1.0)
    others = [k for k in range(target.ndim) if k != axis]
    if not others and parts_of(target.dtype) is None:  # numbers that no step reads from memory
        walks = [walked(step, each, place.sizes) for each in (place, target)]
        result = Cell(step.writer, step.scalars.constant(nothing, target.dtype))
        with over(step, walks, place.sizes):
            item = step.scalars.number_as(walks[0].load(step, 1), target.dtype)
            result.value = combine(result.value, item)
            walks[1].store(step, result.value)
        return
    write_copy(step, place, target)
    size, stride = target.sizes[axis], target.strides[axis]
    with step.writer.loop(1, step.value(size)) as index:
        before, here = (
            target.along(others, step.moved(target.pointer, k, stride)) for k in (index - 1, index)
        )
        write_copy(step, before, here, combine)


# Reductions


class Reduction:
    """A reduction of an array, or of what elementwise nodes compute."""

    def __init__(self, step: Step, node: Apply) -> None:
        self.step, self.op = step, node.op
        (variable,), (self.out,) = node.inputs, node.outputs
        ndim = variable.type.ndim
        axes = range(ndim) if node.op.axis is None else node.op.axis
        self.axes = {axis % ndim for axis in axes}
        self.dtype = getattr(node.op, "acc_dtype", None) or self.out.type.dtype
        self.variable = variable

    def item(self, lanes: int) -> Number:
        """Return the item, or several, as the dtype in which they are collected."""
        item = spread(self.step.writer, self.tree.write(lanes)[0], lanes)
        return self.step.scalars.number_as(item, self.dtype)

    def identity(self) -> Number:
        op, is_minimum = self.op.scalar_op, isinstance(self.op.scalar_op, ScalarMinimum)
        is_extreme = is_minimum or isinstance(op, ScalarMaximum)
        value = limit(self.dtype, largest=is_minimum) if is_extreme else op.identity
        return self.step.scalars.constant(value, self.dtype)

    def combined(self, one: Number, other: Number) -> Number:
        lanes = one.type.lanes if isinstance(one, Value) else 1
        node = self.op.scalar_op.make_node(*(get_scalar_type(self.dtype)() for _ in range(2)))
        with self.step.scalars.taking(lanes):
            (result,) = self.step.scalars.apply(node, [one, other])
        return self.step.scalars.number_as(result, self.dtype)

    def write(self) -> None:
        step, variable = self.step, self.variable
        self.tree = Tree(step, variable, variable.owner if variable in step.deferred else None)
        last = len(self.tree.sizes) - 1
        if not self.axes.isdisjoint({last - 1, last}) and self.tree.has_columns():
            self.tree.by_columns = True
            self.axes = {{last: last - 1, last - 1: last}.get(axis, axis) for axis in self.axes}
        sizes = self.tree.loops()
        kept = [axis for axis in range(len(sizes)) if axis not in self.axes]
        if not kept:
            arrays = self.tree.prepare()
            total = self.collect(arrays, collapse(step, arrays, sizes), 0)
            step.bind_number(self.out, step.scalars.number_as(total, self.out.type.dtype))
            return
        outer = [sizes[axis] for axis in kept]
        target = step.target(self.out, outer)
        sums = target if self.dtype == self.out.type.dtype else step.fresh(self.dtype, outer)
        if all(axis > kept[-1] for axis in self.axes):  # the last ones
            arrays, result = self.tree.prepare(), walked(step, sums, sums.sizes)
            with over(step, [*arrays, result], outer):
                result.store(step, self.collect(arrays, sizes, len(kept)))
        else:
            self.write_outer(sizes, kept, sums)
        if sums is not target:
            write_copy(step, sums, target)
        step.bind_place(self.out, target)

    def collect(self, arrays: list[Walk], loops: list[Size], first: int) -> Number:
        """Write the loops from an axis on, and return what they give together."""
        step, w = self.step, self.step.writer
        lanes = possible_lanes(arrays, loops[-1] if loops[first:] else 1)
        total = Total(w, self.identity(), lanes, self.combined)
        nest(step, arrays, loops, lambda count: total.add(self.item(count)), first)
        return total.after()

    def write_outer(self, sizes: list[Size], kept: list[int], sums: Place) -> None:
        """Write a reduction that is collected in memory, in the order of the array's axes; in
        registers, if these hold a row."""
        step = self.step
        arrays = self.tree.prepare()
        alone = len(kept) - 1
        if kept == [*range(alone), len(sizes) - 1] and self._in_registers(arrays, sizes, sums):
            return
        write_copy(step, self.identity(), sums)
        strides: list[Size] = [0] * len(sizes)
        for axis, stride in zip(kept, sums.strides, strict=True):
            strides[axis] = 0 if step.sizes.same(sizes[axis]) == 1 else stride
        result = Walk(sums.pointer, sums.dtype, strides)

        def write(lanes: int) -> None:
            if lanes > 1 and result.strides[-1] == 0:
                raise LanesError("a reduction over the innermost axis")
            item = self.item(lanes)
            result.store(step, self.combined(result.load(step, lanes), item))

        loops = collapse(step, [*arrays, result], sizes)
        nest(step, [*arrays, result], loops, write)

    def _in_registers(self, arrays: list[Walk], sizes: list[Size], sums: Place) -> bool:
        """Write the reduction of rows to one, of each item of a batch, in registers; False, and
        nothing, if rows are long."""
        step, w, size, alone = self.step, self.step.writer, sizes[-1], sums.ndim - 1
        result, before = walked(step, sums, sums.sizes), len(w.block.statements)
        lanes = possible_lanes(arrays, size)[0]
        pieces = lane_pieces(size, lanes) if isinstance(size, int) else []
        if not 0 < len(pieces) <= MOST_UNROLLED:
            return False
        try:
            with over(step, [*arrays, result], sizes[:alone]):
                cells = [Cell(w, spread(w, self.identity(), count)) for _, count in pieces]
                with over(step, arrays, sizes[alone:-1], alone):
                    for (first, count), cell in zip(pieces, cells, strict=True):
                        with at_index(step, arrays, len(sizes) - 1, first):
                            cell.value = self.combined(cell.value, self.item(count))
                for (first, _), cell in zip(pieces, cells, strict=True):
                    with at_index(step, [result], alone, first):
                        result.store(step, cell.value)
        except LanesError:
            del w.block.statements[before:]
            return False
        return True


@rule(CAReduce)
def write_reduction(step: Step, node: Apply) -> None:
    (variable,), (out,) = node.inputs, node.outputs
    if variable in step.items and out.type.ndim == 0:
        _reduce_items(step, node)
        return
    if variable.type.ndim == 0 and variable not in step.deferred:
        step.bind_number(out, step.scalars.number_as(step.number(variable), out.type.dtype))
        return
    Reduction(step, node).write()


def _reduce_items(step: Step, node: Apply) -> None:
    """Write the reduction of a few numbers, which may be known before the first step."""
    reduction = Reduction(step, node)
    (out,), members = node.outputs, step.items[node.inputs[0]]
    if all(map(step.is_known, members)) and np.dtype(out.type.dtype).kind in "iub":
        kind = get_scalar_type(reduction.dtype)
        known = step.size_of(members[0])
        for member in members[1:]:
            pair = reduction.op.scalar_op.make_node(kind(), kind())
            known = Expression((pair, 0), (known, step.size_of(member)))
        step.bind_known(out, known)
        return
    total = reduction.identity()
    for member in members:
        total = reduction.combined(
            total, step.scalars.number_as(step.number(member), reduction.dtype)
        )
    step.bind_number(node.outputs[0], step.scalars.number_as(total, node.outputs[0].type.dtype))
