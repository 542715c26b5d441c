"""What a kernel is given: one struct of 64-bit integers, of which each has one place.

Counts come first, then for each array its address, how far one row is from the next, and how far
items are apart along each of the channels' axes and of others that a kernel knows, in bytes. Where
a loop runs from the last row to the first, its arrays are given from their last row on, with a
negative stride: kernels know one direction only.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from scanlib.ops.lowered.elemwise_scan import Axes

COUNTS = ("steps", "channels", "lanes", "lane_bits", "chunk", "chunks")


def contiguous(shape: Sequence[int], item: int) -> tuple[int, ...]:
    """Return the strides of an array without gaps, in bytes."""
    return tuple(item * prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class Array:
    """An array that a kernel reads or writes; plain memory has no axes.

    It is called ``x3`` for the fourth input of the loop, ``h0`` for a history or the last rows of a
    state, ``c0`` for a carry, ``z0`` for a stacked output. `lead` axes come before those of the
    channels: 1 if there is a time axis. `axes` has, for each further axis, the axis of the channels
    that it runs along.
    """

    name: str
    dtype: str
    lead: int
    axes: Axes

    @property
    def kept(self) -> list[tuple[int, int]]:
        """Which of the array's axes run along which of the channels'."""
        pairs = enumerate(self.axes, self.lead)
        return [(own, axis) for own, axis in pairs if axis is not None]


class Parameters:
    """The places of a kernel's numbers.

    The channels have `sizes` axes, the first ones of those that arrays have. Inputs and outputs are
    in the loop's order; a number of steps does not count. `works` are what kernels write for one
    another. With `reverse`, the first step has the last row.
    """

    def __init__(
        self,
        sizes: int,
        inputs: list[Array],
        outputs: list[Array],
        works: Sequence[Array] = (),
        reverse: bool = False,
    ) -> None:
        self.inputs, self.outputs, self.works = inputs, outputs, list(works)
        self.arrays = [*inputs, *outputs, *works]
        self.sizes, self.reverse = sizes, reverse
        self.axes = (
            max([0, sizes - 1, *(own for array in self.arrays for _, own in array.kept)]) + 1
        )
        numbers = [*COUNTS, *(f"n{axis}" for axis in range(max(sizes, 1)))]
        self.place = {name: k for k, name in enumerate(numbers)}
        self.count = len(numbers)
        for array in self.arrays:
            self.place[array.name] = self.count
            self.count += 2 + self.axes

    def pack(
        self, values: dict[str, int], strides: Sequence[tuple[int, ...]], rows: Sequence[int]
    ) -> tuple[list[int], list[int]]:
        """Return the numbers, and where among them the addresses go, which are added.

        `values` are counts and sizes by name, zero if they are not given, `strides` those of all
        arrays, in bytes, and `rows` how many rows of each the loop has.
        """
        packed = [0] * self.count
        for name, value in values.items():
            packed[self.place[name]] = value
        for array, own, count in zip(self.arrays, strides, rows, strict=True):
            first = self.place[array.name]
            if array.lead:
                packed[first + 1] = own[0]
                if self.reverse and array not in self.works:
                    packed[first : first + 2] = (count - 1) * own[0], -own[0]
            for axis, along in array.kept:
                packed[first + 2 + along] = own[axis]
        return packed, [self.place[array.name] for array in self.arrays]

    def struct(self) -> str:
        """Return the C struct, in which arrays have their numbers by name."""
        names = "".join(f"{array.name}, " for array in self.arrays)
        counts = ", ".join([*COUNTS, f"n[{max(self.sizes, 1)}]"])
        along = " || ".join(
            f"k == {array.name} && axis == {axis}"
            for array in self.arrays
            for _, axis in array.kept
        )
        return (
            f"struct Params {{\n  enum {{ {names}ARRAYS, SIZES = {self.sizes} }};\n"
            f"  int64_t {counts};\n"
            f"  struct {{ char *data; int64_t t, e[{self.axes}]; }} at[ARRAYS];\n"
            "  /* Whether the items of array `k` differ along an axis. */\n"
            "  SCANLIB_METHOD static bool along(int k, int axis) {\n"
            f"    return {along or 'false'};\n  }}\n}};\n"
        )
