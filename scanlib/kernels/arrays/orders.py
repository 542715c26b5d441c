"""Orders: items sorted, the places of items in their order, places in a sorted array.

The order is that of NumPy's stable sort: what is no number comes last, and equal items stay in the
order in which they were.

A row is taken in runs of `RUN` items at most, as many as a power of two, whose lengths differ by
one at most. The place of an item of a run is the number of those that come before it, counted for
several at once, ``|{j < i: x_j ≤ x_i}| + |{j > i: x_j < x_i}|``. Pairs of runs are merged from both
ends (the parity merge of I. van den Hoven's quadsort, https://github.com/scandum/quadsort): of runs
of m items or more, the first m of the result, and the last m, are found without a look at where the
runs end. Where either half is cut in two is searched for, so that four items are found at a time.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from operator import or_

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.tensor.extra_ops import SearchsortedOp
from pytensor.tensor.sort import ArgSortOp, SortOp

from scanlib._compat import sorted_axis
from scanlib.kernels.arrays.array_step import Step, rule
from scanlib.kernels.arrays.nests import at_index, over, walked, write_copy
from scanlib.kernels.arrays.sizes import total
from scanlib.kernels.arrays.workspace import Place
from scanlib.kernels.language import INT64, Local, Type, Value, Writer
from scanlib.kernels.linalg.matrices import shared
from scanlib.kernels.scalars import NoKernelError, Number, limit, parts_of, real
from scanlib.kernels.spans import load_number, walk

RUN = 32  # items that are put in order by counting
LANES = 8  # items whose places are counted at once
SEARCHES = 8  # items whose places are searched for at once

Column = tuple[Type, Value, Value]  # items of a type that are moved from one place to another


def _compared(dtype: str) -> str:
    """Return the dtype as which items are compared."""
    if parts_of(dtype) is not None:
        raise NoKernelError("an order of complex numbers has no kernel")
    return "uint8" if dtype == "bool" else dtype


def _move(w: Writer, columns: Sequence[Column], of: Value, to: Value) -> None:
    for kind, source, target in columns:
        w.store(target, to * kind.itemsize, w.load(kind, source, of * kind.itemsize))


@shared
def sort_row(
    w: Writer, source: Value, stride: Value, count: Value, *memory: Value, dtype: str
) -> None:
    """Write the items of a row in order, and where they were, if there is memory for that.

    `memory` is where items go, and a spare part of `LANES` items more; then the same for places.
    """
    kinds = (Type(dtype), INT64)[: len(memory) // 2]
    results = list(zip(kinds, memory[1::2], memory[::2], strict=True))
    n = _write_numbers_first(w, source, stride, count, results)
    levels = w.local(0, INT64)
    with w.loop_while(lambda: ((n - 1) >> w.copy(levels)) >= RUN):
        w.assign(levels, w.copy(levels) + 1)
    depth, one = w.copy(levels), w.constant(1, INT64)

    def columns(level: Value) -> list[Column]:
        """Return between which parts of memory a level of merges moves items; the last is 1."""
        is_odd = (level & 1).equals(1)
        return [
            (kind, w.select(is_odd, spare, result), w.select(is_odd, result, spare))
            for kind, spare, result in results
        ]

    runs = [
        (kind, spare, target)
        for (kind, spare, _), (_, _, target) in zip(results, columns(depth + 1), strict=True)
    ]
    scratch = [w.scratch(kind.dtype, RUN) for kind in kinds]
    ranks = w.scratch(_counter(kinds[0]).dtype, RUN)
    with w.loop(0, one << depth) as run:
        ends = (run * n) >> depth, ((run + 1) * n) >> depth
        _write_run(w, runs, ends, scratch, ranks)
    with w.loop(0, depth) as done:
        level = depth - done
        moved = columns(level)
        with w.loop(0, one << (level - 1)) as pair:
            _write_merge(w, moved, [(((pair << 1) + k) * n) >> level for k in range(3)])


def _write_numbers_first(
    w: Writer, source: Value, stride: Value, count: Value, columns: Sequence[Column]
) -> Value:
    """Write a row to the spare part of memory, what is no number to the end of the result.

    Return how many numbers there are.
    """
    (kind, *_), numbers = columns[0], w.local(0, INT64)
    _, spare, results = zip(*columns, strict=True)

    def write(i: Value, item: Value, memory: Sequence[Value]) -> Value:
        place = w.copy(numbers)
        for pointer, value in zip(memory, (item, i), strict=False):
            w.store(pointer, place * value.type.itemsize, value)
        return place

    with w.loop(0, count) as i:
        item = w.load(kind, source, i * stride)
        is_number = w.cast(item.equals(item), "int64") if kind.is_float else 1
        w.assign(numbers, write(i, item, spare) + is_number)
    n = w.copy(numbers)
    if kind.is_float:
        with w.when(n < count), w.loop(0, count) as i:
            item = w.load(kind, source, i * stride)
            with w.when(item.differs(item)):
                w.assign(numbers, write(i, item, results) + 1)
    return n


def _counter(kind: Type) -> Type:
    """Return the integers in which places in a run are counted, as wide as the items."""
    return Type(f"int{8 * kind.itemsize}", LANES)


def _write_run(
    w: Writer,
    columns: Sequence[Column],
    ends: tuple[Value, Value],
    scratch: Sequence[Value],
    ranks: Value,
) -> None:
    """Write a run in order; it has no more than `RUN` items, `ranks` is memory for their places."""
    (kind, *_), (items, *_), (first, last) = columns[0], scratch, ends
    counter, item, size = _counter(kind), kind.itemsize, last - first
    several = Type(kind.dtype, LANES)
    lanes = w.constant(range(LANES), counter)
    with w.loop(0, size, LANES) as block:
        for (own, spare, _), to in zip(columns, scratch, strict=True):
            value = w.load(Type(own.dtype, LANES), spare, (first + block) * own.itemsize)
            if to is items:
                is_own = lanes < w.splat(w.cast(size - block, counter.dtype), LANES)
                value = w.select(is_own, value, w.constant(limit(kind.dtype, True), several))
            w.store(to, block * own.itemsize, value)
    with w.loop(0, size, LANES) as block:
        mine, before = w.load(several, items, block * item), w.local(0, counter)

        def count(start: Value, comes_before: Callable[[Value, int], Value]) -> None:
            for k in range(LANES):
                other = w.splat(w.load(kind, items, (start + k) * item), LANES)
                found = w.cast(comes_before(other, k), counter.dtype)
                w.assign(before, w.copy(before) + found)

        with w.loop(0, block, LANES) as start:
            count(start, lambda other, _: other <= mine)
        count(block, lambda other, k: (other < mine) | (other.equals(mine) & (lanes > k)))
        with w.loop(block + LANES, size, LANES) as start:
            count(start, lambda other, _: other < mine)
        w.store(ranks, block * item, w.copy(before))
    moved = [(own, of, to) for (own, _, to), of in zip(columns, scratch, strict=True)]
    with w.loop(0, size) as i:
        place = w.cast(w.load(Type(counter.dtype), ranks, i * item), "int64")
        _move(w, moved, i, first + place)


class _Side:
    """One end of two runs that are merged; `first` is where the second run begins, seen from it."""

    def __init__(
        self, w: Writer, columns: Sequence[Column], ends: Sequence[Value], is_start: bool
    ) -> None:
        self.w, self.columns, self.is_start = w, columns, is_start
        low, middle, high = ends
        self.first, self.result = (middle, low) if is_start else (high - 1, high - 1)
        self.both = low + middle if is_start else middle + high - 2

    def moved(self, place: Value, count: Value) -> Value:
        """Return the place so many items away from this end."""
        return place + count if self.is_start else place - count

    def one(self, k: Value, other: Value) -> Value:
        """Return which item of the first run is next after k, where `other` is the second's."""
        return self.moved(self.both, k) - other

    def choose(self, one: Value, other: Value) -> tuple[Value, Value]:
        """Return whether the item of the second run is nearer to the end, and the one that is."""
        w, (kind, source, _) = self.w, self.columns[0]
        x, y = (w.load(kind, source, place * kind.itemsize) for place in (one, other))
        is_other = y < x if self.is_start else ~(y < x)
        return is_other, w.select(is_other, y, x)

    def split(self, k: Value) -> Value:
        """Return which item of the second run is next after k items."""

        def is_taken(count: Value) -> Value:
            other = self.moved(self.first, count)
            return self.choose(self.one(k - 1, other), other)[0]

        return self.moved(self.first, _count_while(self.w, k, [is_taken])[0])

    def take(self, k: Value, following: Local) -> None:
        """Write an item of the result; `following` is where the second run's next is."""
        w, other = self.w, self.w.copy(following)
        one, to = self.one(k, other), self.moved(self.result, k)
        is_other, item = self.choose(one, other)
        found = _flag(w, is_other)
        (kind, _, target), *rest = self.columns
        w.store(target, to * kind.itemsize, item)
        _move(w, rest, one + (other - one) * found, to)
        w.assign(following, self.moved(other, found))


def _write_merge(w: Writer, columns: Sequence[Column], ends: Sequence[Value]) -> None:
    """Write two runs as one; their lengths differ by one at most."""
    low, middle, high = ends
    sides = [_Side(w, columns, ends, is_start) for is_start in (True, False)]
    shorter = w.select(middle - low < high - middle, middle - low, high - middle)
    half = shorter >> 1
    outer = [w.local(side.first) for side in sides]
    inner = [w.local(side.split(half)) for side in sides]
    with w.loop(0, half) as k:
        for side, first, then in zip(sides, outer, inner, strict=True):
            side.take(k, first)
            side.take(half + k, then)
    with w.loop(half << 1, shorter) as k:
        for side, then in zip(sides, inner, strict=True):
            side.take(k, then)
    with w.when(high - low > shorter << 1):
        others = [w.copy(then) for then in inner]
        one, last = (side.one(shorter, other) for side, other in zip(sides, others, strict=True))
        _move(w, columns, w.select(one > last, others[0], one), low + shorter)


def _flag(w: Writer, condition: Value) -> Value:
    """Return 1 or 0, of which compilers make no branch that the processor would have to guess."""
    return w.apply("opaque", w.cast(condition, "int64"))


def _count_while(w: Writer, size: Value, holds: Sequence[Callable[[Value], Value]]) -> list[Value]:
    """Return of how many of the first places each of some things holds, and of none after them.

    All searches take as many steps, side by side: none waits for another one.
    """
    firsts, rest = [w.local(0, INT64) for _ in holds], w.local(size)

    def go_on(half: Value) -> None:
        for first, each in zip(firsts, holds, strict=True):
            start = w.copy(first)
            w.assign(first, start + (half & -_flag(w, each(start + half - 1))))

    with w.loop_while(lambda: w.copy(rest) > 1):
        half = w.copy(rest) >> 1
        go_on(half)
        w.assign(rest, w.copy(rest) - half)
    with w.when(w.copy(rest) > 0):
        go_on(w.constant(1, INT64))
    return list(map(w.copy, firsts))


@rule(SortOp, ArgSortOp)
def write_order(step: Step, node: Apply) -> None:
    """Write an array sorted along an axis, or the places of its items in their order."""
    (inp, *_), (out,), axis, w = node.inputs, node.outputs, sorted_axis(node), step.writer
    if axis is None:
        raise NoKernelError("an order along an axis that is not known has no kernel")
    source, dtype = step.place(inp), out.type.dtype
    compared, target = _compared(source.dtype), step.target(out, source.sizes)
    size, with_spare = source.sizes[axis], total(source.sizes[axis], LANES)
    step.bind_place(out, target)
    is_argsort = isinstance(node.op, ArgSortOp)
    if is_argsort and isinstance(inp.owner_op, ArgSortOp) and sorted_axis(inp.owner) == axis:
        _write_inverse(step, axis, source, target)
        return
    memory = []
    if is_argsort:
        memory = [step.fresh(source.dtype, [n]).pointer for n in (size, with_spare)]
    spare = step.fresh(dtype, [with_spare]).pointer
    is_in_order = step.sizes.same(target.strides[axis]) == target.itemsize
    apart = None if is_in_order else step.fresh(dtype, [size])
    with _rows(step, axis, source, target) as (row, result):
        to = result if apart is None else apart
        ends = step.value(row.strides[0]), step.value(size)
        sort_row(w, row.pointer, *ends, *memory, to.pointer, spare, dtype=compared)
        if apart is not None:
            write_copy(step, apart, result)


def _write_inverse(step: Step, axis: int, source: Place, target: Place) -> None:
    """Write the places of places in order, each of which is there once."""
    w = step.writer
    with (
        _rows(step, axis, source, target) as (row, result),
        w.loop(0, step.value(source.sizes[axis])) as i,
    ):
        place = w.load(INT64, row.pointer, step.bytes(i, row.strides[0]))
        w.store(result.pointer, step.bytes(place, result.strides[0]), i)


@contextmanager
def _rows(step: Step, axis: int, *places: Place) -> Iterator[list[Place]]:
    """Open loops over all axes of arrays of the same sizes but one; yield the rows along that."""
    w, sizes = step.writer, places[0].sizes
    others = [k for k in range(len(sizes)) if k != axis]
    walks = [walked(step, place.along(others), [sizes[k] for k in others]) for place in places]
    with over(step, walks, [sizes[k] for k in others]):
        offsets = [w.as_value(walk.offset, INT64) for walk in walks]
        yield [
            place.along([axis], w.offset(place.pointer, offset))
            for place, offset in zip(places, offsets, strict=True)
        ]


# Places in sorted arrays


@rule(SearchsortedOp)
def write_search(step: Step, node: Apply) -> None:
    """Write how many items of a sorted array come before others."""
    if len(node.inputs) > 2:
        raise NoKernelError("a search in an array that an argument sorts has no kernel")
    (inp, wanted), (out,), w = node.inputs, node.outputs, step.writer
    row = step.place(inp)
    dtype = np.promote_types(row.dtype, wanted.type.dtype).name
    compared, is_left = _compared(dtype), node.op.side == "left"
    size = step.value(row.sizes[0])

    def compares(item: Number) -> Value:
        return real(step.scalars.number_as(item, compared))

    def item_at(place: Value) -> Value:
        offset = step.bytes(place, row.strides[0])
        return compares(load_number(w, row.dtype, row.pointer, offset))

    def is_number(place: Value) -> Value:
        item = item_at(place)
        return item.equals(item)

    def found(items: Sequence[Value]) -> list[Value]:
        def comes_before(item: Value, place: Value) -> Value:
            return item_at(place) < item if is_left else item_at(place) <= item

        places = _count_while(w, size, [partial(comes_before, item) for item in items])
        if not items[0].type.is_float:
            return places
        results = list(map(w.local, places))
        unordered = [item.differs(item) for item in items]
        with w.when(reduce(or_, unordered)):
            end = _count_while(w, size, [is_number])[0] if is_left else size
            for is_last, result in zip(unordered, results, strict=True):
                w.assign(result, w.select(is_last, end, w.copy(result)))
        return list(map(w.copy, results))

    if wanted.type.ndim == 0:
        step.bind_number(out, found([compares(step.number(wanted))])[0])
        return
    place = step.place(wanted)
    target = step.target(out, place.sizes)
    walks = [walked(step, each, place.sizes) for each in (place, target)]

    def search(first: Value, count: int) -> None:
        items = []
        for k in range(count):
            with at_index(step, walks, place.ndim - 1, first + k):
                items.append(compares(walks[0].load(step, 1)))
        for k, number in enumerate(found(items)):
            with at_index(step, walks, place.ndim - 1, first + k):
                walks[1].store(step, number)

    with over(step, walks, place.sizes[:-1]):
        walk(w, w.constant(0, INT64), step.value(place.sizes[-1]), [SEARCHES], search)
    step.bind_place(out, target)
