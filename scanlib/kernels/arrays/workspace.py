"""Where the arrays of a step lie, and who may use a part of the workspace when.

All results of a step lie in one workspace, which lives as long as the loop runs. A part of it is
given back when the last value in it has been read, for later results of the same step that have the
same size.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scanlib.kernels.arrays.sizes import (
    Given,
    Size,
    Sizes,
    SizeValues,
    bound,
    changes,
    maximum,
    pieces,
    product,
)
from scanlib.kernels.language import INT64, Value
from scanlib.kernels.spans import LINE, itemsize


@dataclass(eq=False)
class Part:
    """A part of the workspace, from byte `start` to `end` of it; a `pinned` one is kept for the
    whole loop."""

    start: Given
    end: Given
    size: Size
    pinned: bool = False


@dataclass(frozen=True)
class Place:
    """An array in memory: the address of its first item, sizes, strides in bytes, and the part of
    the workspace that it lies in, if it does."""

    pointer: Value
    dtype: str
    sizes: tuple[Size, ...]
    strides: tuple[Size, ...]
    part: Part | None = None

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    @property
    def itemsize(self) -> int:
        return itemsize(self.dtype)

    def view(
        self, sizes: Iterable[Size], strides: Iterable[Size], pointer: Value | None = None
    ) -> "Place":
        """Return another way to look at the same memory."""
        pointer = self.pointer if pointer is None else pointer
        return replace(self, pointer=pointer, sizes=tuple(sizes), strides=tuple(strides))

    def along(self, axes: Iterable[int], pointer: Value | None = None) -> "Place":
        """Return the items along some of the axes, from the first one or from a pointer on."""
        chosen = list(axes)
        sizes, strides = ([numbers[k] for k in chosen] for numbers in (self.sizes, self.strides))
        return self.view(sizes, strides, pointer)

    def swapped(self) -> "Place":
        """Return the array with its last two axes in each other's place."""
        return self.view(last_swapped(self.sizes), last_swapped(self.strides))


def last_swapped(axes: Sequence[Size]) -> list[Size]:
    """Return what belongs to the axes of an array, for those of its transposed matrices."""
    return [*axes[:-2], axes[-1], axes[-2]]


def is_contiguous(sizes: Sizes, place: Place) -> bool:
    """Whether an array is known to fill its memory in order."""
    expected = sizes.contiguous_strides(place.itemsize, place.sizes)
    return all(
        sizes.same(size) == 1 or sizes.same(stride) == wanted
        for size, stride, wanted in zip(place.sizes, place.strides, expected, strict=True)
    )


class Workspace:
    """Hands out parts of the workspace."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.parts: list[Part] = []
        self._free: list[Part] = []

    @property
    def end(self) -> Size:
        """How many bytes it has."""
        return self.parts[-1].end if self.parts else 0

    def take(self, size: Size, *, pinned: bool = False) -> Part:
        """Return memory for so many bytes, which hold anything."""
        size = self.sizes.same(size)
        if changes(size):
            size = maximum(bound(size), 0)
        if not pinned:
            for part in self._free:
                if self.sizes.same(part.size) == size:
                    self._free.remove(part)
                    return part
        number = len(self.parts)
        part = Part(Given("part", "", number), Given("part", "", number + 1), size, pinned)
        self.parts.append(part)
        return part

    def value(self, number: int, values: SizeValues) -> Value:
        """Write where a part begins, or, for their number, how many bytes all have."""
        if number == 0:
            return values.writer.constant(0, INT64)
        first = number - 1
        while first and not values.has(self.parts[first].start):
            first -= 1
        for part in self.parts[first:number]:  # no part by way of the one before: there may be many
            end = values.value(part.start) + values.value(rounded(part.size))
        return end

    def give_back(self, part: Part) -> None:
        """Let later results use a part."""
        if not part.pinned and part not in self._free:
            self._free.append(part)


def rounded(size: Size) -> Size:
    """Return a number of bytes with which no two parts share a line of the cache."""
    return product(LINE, pieces(size, LINE))


def bytes_of(dtype: str, sizes: tuple[Size, ...]) -> Size:
    return product(itemsize(dtype), *sizes)
