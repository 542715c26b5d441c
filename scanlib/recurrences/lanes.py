"""Vectors whose lanes are consecutive steps.

The lanes of a vector are in the order of memory; `reverse` says that the last one is the first
step. Lanes may be taken in *groups*, each of which is composed for itself.

Lanes that are not composed with an earlier one keep their values by a mask, which costs nothing
where registers have 512 bits. A compiler must not know the masks: it makes shuffles of constant
ones, of which a scan has more than enough, and in shorter registers takes lanes that a constant
mask hides from the register of the state, so that shuffles wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from scanlib.kernels.language import INT64, Type, Value, Writer
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.spans import LINE, Span


@dataclass(frozen=True)
class Block:
    """The steps that are scanned.

    Attributes
    ----------
    writer : Writer
    size : Value
        How many steps there are.
    reverse : bool
        Whether the last one in memory is the first that is taken.
    ahead : tuple of Span
        What the next block reads and writes, and need not exist: it is asked for on the way.
    """

    writer: Writer
    size: Value
    reverse: bool
    ahead: tuple[Span, ...] = ()

    def step(self, k: Value) -> Value:
        """Return where step `k` is in memory."""
        return self.size - 1 - k if self.reverse else k

    def for_all(self, size: int, write: Callable[[Value, int], None]) -> None:
        """Write what is done for all steps: for as many at once as fill a register, then singly.

        `write` takes a place and how many steps there are; their numbers have `size` bytes.
        """
        w, lanes = self.writer, register_bytes() // size
        done = self.size & -lanes
        with w.loop(0, done, lanes) as j:
            write(j, lanes)
        with w.loop(done, self.size) as j:
            write(j, 1)

    def fetch(self, place: Value, items: int) -> None:
        """Ask for what lies at some places of the next block."""
        for span in self.ahead:
            start = span.place(place)
            for line in range(0, items * span.itemsize, LINE):
                self.writer.prefetch(span.pointer, start + line if line else start)


def halves(lanes: int) -> list[int]:
    """Return how many lanes the first halves have in a scan by halves."""
    return [half for half in (1, 2, 4, 8) if half < lanes]


class Lanes:
    """Writes what moves numbers between steps; `group` of the `lanes` belong together."""

    def __init__(self, w: Writer, dtype: str, reverse: bool, lanes: int, group: int) -> None:
        self.w, self.dtype, self.reverse = w, dtype, reverse
        self.lanes, self.group = lanes, group
        self.type = Type(dtype, lanes)
        self.groups = list(range(lanes // group))
        if reverse:
            self.groups.reverse()
        self.masks: dict[int, Value] = {}

    def _step(self, lane: int) -> int:
        """Return which step of its group a lane is."""
        place = lane % self.group
        return self.group - 1 - place if self.reverse else place

    def _lane(self, group: int, step: int) -> int:
        place = self.group - 1 - step if self.reverse else step
        return group * self.group + place

    def _shuffled(self, value: Value, places: list[int]) -> Value:
        return self.w.shuffle(value, value, places)

    def constant(self, value: float) -> Value:
        return self.w.constant(value, self.type)

    def splat_last(self, value: Value, group: int) -> Value:
        """Return the last step of a group in all lanes."""
        return self._shuffled(value, [self._lane(group, self.group - 1)] * self.lanes)

    def lasts(self, several: list[Value]) -> Value:
        """Return the last steps of the groups of two or four vectors, the earliest first."""
        lanes = [self._lane(group, self.group - 1) for group in self.groups]
        parts = self._joined(several, [*lanes, *(self.lanes + lane for lane in lanes)])
        while len(parts) > 1:
            parts = self._joined(parts, list(range(2 * parts[0].type.lanes)))
        return parts[0]

    def _joined(self, parts: list[Value], places: list[int]) -> list[Value]:
        """Return, for each pair of vectors, a vector of what they hold at some places."""
        pairs = zip(parts[::2], parts[1::2], strict=True)
        return [self.w.shuffle(one, other, places) for one, other in pairs]

    def spread(self, value: Value, count: int) -> list[Value]:
        """Return so many vectors, in the lanes of whose groups are the numbers of a short one."""
        order = [self.groups.index(lane // self.group) for lane in range(self.lanes)]
        several = len(self.groups)
        return [
            self._shuffled(value, [k * several + place for place in order]) for k in range(count)
        ]

    def shifted(self, value: Value, first: float) -> Value:
        """Return, in each lane, the one before it, and a number in the first."""
        places = [self.lanes, *range(self.lanes - 1)]
        return self.w.shuffle(value, self.constant(first), places)

    def by_step(self, number: Callable[[int], Value | None]) -> Value:
        """Return the vector whose lanes hold a number for their steps, None being zero."""
        result = self.constant(0.0)
        for step in range(self.group):
            value = number(step)
            if value is not None:
                own = [self._step(lane) == step for lane in range(self.lanes)]
                chosen = self.w.constant(own, self.type.of("bool"))
                result = self.w.select(chosen, self.w.splat(value, self.lanes), result)
        return result

    def weights(self, powers: list[Value], half: int) -> Value:
        """Return, for second halves, the power that the last step of the first counts with."""
        return self.by_step(lambda step: powers[step % half + 1] if step & half else None)

    def earlier(self, value: Value, by: int) -> Value:
        """Return, in each lane, the one `by` steps before it; the first ones get the last ones."""
        places = []
        for lane in range(self.lanes):
            step = (self._step(lane) - by) % self.group
            places.append(self._lane(lane // self.group, step))
        return self._shuffled(value, places)

    def half_before(self, value: Value, half: int) -> Value:
        """Return, in the second half of `2 * half` lanes, the last of the first; else the same."""
        places = []
        for lane in range(self.lanes):
            step = self._step(lane)
            earlier = step // half * half - 1 if step & half else step
            places.append(self._lane(lane // self.group, earlier))
        return self._shuffled(value, places)

    # Masks

    def prepare_masks(self) -> None:
        """Make the masks of some lanes, before the loop that uses them."""
        for half in halves(self.group):
            self.masks[half] = self._hidden(k for k in range(self.group) if k & half)
        self.behind = self._hidden(range(1, self.group))

    def _hidden(self, steps: Iterable[int]) -> Value:
        """Return a mask of some steps of all groups, of which compilers know nothing."""
        w, word = self.w, self.type.of(f"int{8 * self.type.itemsize}")
        bits = sum(1 << step for step in steps)
        given = w.cast(w.apply("opaque", w.constant(bits, INT64)), word.dtype)
        # Its bit becomes the sign of each lane: a test that is not turned around when compiled.
        highest = 8 * word.itemsize - 1
        own = w.constant([highest - self._step(lane) for lane in range(self.lanes)], word)
        return (w.splat(given, self.lanes) << own) < 0

    def in_second_half(self, half: int, value: Value, otherwise: Value) -> Value:
        """Return `value` in the second half of `2 * half` lanes."""
        return self.w.select(self.masks[half], value, otherwise)

    def after_first(self, value: Value, otherwise: Value) -> Value:
        """Return `value` in all lanes but those of first steps."""
        return self.w.select(self.behind, value, otherwise)

    def in_group(self, group: int, value: Value, otherwise: Value) -> Value:
        """Return `value` in the lanes of a group."""
        own = [lane // self.group == group for lane in range(self.lanes)]
        return self.w.select(self.w.constant(own, self.type.of("bool")), value, otherwise)
