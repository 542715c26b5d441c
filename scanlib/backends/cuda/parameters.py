"""The numbers that a kernel is given: one struct of 64-bit integers.

Addresses, strides in bytes, sizes and counts have one name each, the same in the kernel and in
Python, and one place in the struct.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scanlib.ops.lowered.elemwise_scan import Axes


@dataclass(frozen=True)
class Array:
    """An array that a kernel reads or writes.

    Attributes
    ----------
    name : str
        ``x3`` for the fourth input of the loop, ``h0`` for a history or the last rows of a state,
        ``c0`` for a carry, ``z0`` for a stacked output.
    dtype : str
    lead : int
        How many axes come before those of the channels: 1 if there is a time axis.
    axes : Axes
        For each further axis, the axis of the channels that it runs along.
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

    def words(self) -> Iterator[str]:
        yield self.name
        if self.lead:
            yield f"{self.name}_t"
        yield from (f"{self.name}_{axis}" for _, axis in self.kept)

    def strides(self, strides: tuple[int, ...]) -> dict[str, int]:
        """Return the numbers that say where items are, from the array's strides in bytes."""
        found = {f"{self.name}_t": strides[0]} if self.lead else {}
        return found | {f"{self.name}_{axis}": strides[own] for own, axis in self.kept}


COUNTS = ("steps", "channels", "lanes", "lane_bits", "chunk", "chunks")


class Parameters:
    """The names of a kernel's numbers, in order.

    Parameters
    ----------
    ndim : int
        How many axes the channels have.
    inputs, outputs : list of Array
        What the loop is given and returns, in its order; a number of steps does not count.
    works : list of str
        Names of arrays for intermediate results.
    more : sequence of str, optional
        Names of further numbers.
    """

    def __init__(
        self,
        ndim: int,
        inputs: list[Array],
        outputs: list[Array],
        works: list[str],
        more: Sequence[str] = (),
    ) -> None:
        self.inputs = inputs
        self.outputs = outputs
        self.works = works
        names = [*COUNTS, *(f"n{axis}" for axis in range(ndim))]
        names += [word for array in [*inputs, *outputs] for word in array.words()]
        self.names = [*names, *more, *works]
        self.place = {name: k for k, name in enumerate(self.names)}

    def pack(self, values: dict[str, int]) -> list[int]:
        """Return the numbers in order; those that are not given are zero."""
        packed = [0] * len(self.names)
        for name, value in values.items():
            packed[self.place[name]] = value
        return packed

    def struct(self) -> str:
        """Return the C struct."""
        return "struct Params {\n  int64_t " + ", ".join(self.names) + ";\n};\n"
