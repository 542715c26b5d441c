"""Elementwise loops as their kernels see them: channels, the loops over these, parts in threads."""

from collections.abc import Iterator, Sequence
from functools import reduce

from pytensor.configdefaults import config

from scanlib._compat import thaw_graph
from scanlib.kernels.arrays.sizes import (
    Check,
    Given,
    Size,
    maximum,
    minimum,
    product,
    quotient,
    total,
)
from scanlib.kernels.thread_parts import wanted_threads
from scanlib.ops.lowered import channel_plan
from scanlib.ops.lowered.channel_plan import Target
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.messages import title
from scanlib.schedules.loop_kernels import Loop
from scanlib.schedules.selection import MANY_STEPS, can_slice, few_channels, least_row

RUN, LAST = range(2)  # rounds of chunks of the steps


class ElemwiseLoop(Loop):
    """An elementwise loop, whose steps are taken as `scanlib.schedules.selection.schedule` says.

    `loops` has the number of the loop over channels in which a result is computed, by its `id` and
    axis; `axes_of_loops` the axis of each, and `lengths` the size of an array that says how long it
    is.
    """

    def __init__(self, op: ElemwiseScan, schedule: str) -> None:
        self.op = op
        self.by_channels = schedule != "blocks"
        self.by_blocks = schedule in ("blocks", "by width")
        super().__init__(op.scan, thaw_graph(op.body), op.outer_input_types(), op.layout)
        self.block_bytes = 0  # of the memory that a part needs that runs in blocks
        # How much of the workspace chunks of the steps have in common.
        self.extra_bytes = 0
        self.least_chunk = 1  # steps
        self.slices = wanted_threads() if can_slice(op) else 1
        self.chunks = 1  # of the steps, each in a thread of its own
        self.loops: dict[tuple[int, int], int] = {}
        self.axes_of_loops: list[int] = []
        self.lengths: list[Given] = []
        self._number_loops(self.plan.targets, 0)
        self.channels = total(*(product(*sizes) for sizes in self._channels()))
        self.work = product(self.channels, max(len(self.graph.apply_nodes), 1))
        m = len(self.outputs) - self.signature.n_outputs
        for target in self.plan.targets:
            if target.kind == "output":
                self.sizes[m + target.number] = tuple(
                    1 if axis is None else self.lengths[self.loops[id(target), axis]]
                    for axis in target.axes
                )

    def has_ring(self, name: str) -> bool:
        return self.by_channels and super().has_ring(name)

    def has_rows(self, name: str) -> bool:
        return self.by_blocks or super().has_rows(name)

    def space(self) -> Size:
        blocks = self.block_bytes * max(self.slices, self.chunks) + self.extra_bytes
        return total(super().space(), blocks)

    def first_words(self) -> dict[int, Size]:
        words, found = self.words, super().first_words()
        if self.chunks > 1:
            chunks = self._parts(self.chunks, quotient(self.steps, self.least_chunk))
            return found | {words.chunks: chunks, words.parts: chunks, words.job: RUN}
        if self.slices > 1:
            work, least = config.scanlib__parallel_channels, least_row(self.op)
            most = quotient(product(self.channels, self.steps), work)
            rows = quotient(self.channels, least)
            axes = zip(self.axes_of_loops, self.lengths, strict=True)
            first = [length for axis, length in axes if axis == 0]
            found[words.parts] = self._parts(self.slices, most, rows, *first)
        if self.by_channels and self.by_blocks:  # in blocks, of few channels and many steps
            few = quotient(few_channels(self.op), self.channels)
            found[words.choice] = minimum(minimum(few, quotient(self.steps, MANY_STEPS)), 1)
        return found

    def _parts(self, *numbers: Size) -> Size:
        """Return the least of some numbers, which is not below one."""
        return maximum(reduce(minimum, numbers), 1)

    def _number_loops(self, targets: Sequence[Target], level: int) -> None:
        """Give every loop over channels its number; a group without channels gets none."""
        for group in self.plan.groups(targets, level):
            places = self.plan.group_places(group, level)
            if places:
                self.loops.update(
                    {(id(target), level): len(self.axes_of_loops) for target in group}
                )
                self.axes_of_loops.append(level)
                self.lengths.append(self._length(places, level))
            self._number_loops(group, level + 1)

    def _length(self, places: Sequence[channel_plan.Place], level: int) -> Given:
        """Return how long a loop is; note that all of its arrays have as many channels."""

        def given(place: channel_plan.Place) -> Given:
            axis = place.along(level)
            assert axis is not None
            return Given("dim", place.array, axis)

        size = given(places[0])
        for place in places[1:]:
            own = given(place)
            if place.owned is None:
                titles = [self._title_of_axis(k) for k in (size, own)]
                error, text = "ValueError", self.messages.channel_sizes(*titles)
                shown: tuple[Size, ...] = (size, own)
            else:
                text = self.messages.state_shape(place.owned, place.axes.index(level))
                error, shown = "StepShapeError", (0, own, size)
            self.checks.append(Check("ne", (own, size), error, text, shown))
        return size

    def _title_of_axis(self, size: Given) -> str:
        """Return what messages call an axis of an input; those of a state are counted without
        time."""
        labels, outer = self.messages.labels, self.outer
        for kind, arrays, names in (
            ("state", outer.initials, labels.states),
            ("sequence", outer.sequences, labels.sequences),
            ("carry", outer.carries, labels.carries),
            ("non-sequence", outer.non_sequences, labels.non_sequences),
        ):
            if size.array in arrays:
                place = list(arrays).index(size.array)
                axis = size.axis - (kind == "state")
                return f"axis {axis} of {title(kind, place, names[place])}"
        raise KeyError(size.array)

    def _channels(self) -> Iterator[list[Given]]:
        """Yield the sizes of the channels that a group of results has."""
        for group in self.plan.groups(self.plan.targets, 0):
            deepest = max(group, key=lambda target: target.inner)
            numbers = [self.loops.get((id(deepest), axis)) for axis in range(deepest.inner)]
            yield [self.lengths[number] for number in numbers if number is not None]

    def shared_sums(self) -> Iterator[int]:
        """Yield the outputs that are sums over the first axis: each slice has its own."""
        for target in self.plan.targets:
            if 0 in target.reduced:
                yield self.arrays[target.array].number
