"""Which results of a step share which loops over channels, and how long these are.

Results that read some array along the same axis have as many channels there, and are computed in
one loop; results that share nothing may differ in size and get loops of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from pytensor.graph.basic import Variable

from scanlib.ops.elemwise_scan import Axes
from scanlib.ops.positions import Hidden


@dataclass(frozen=True)
class Place:
    """An array that a result is computed from or kept in.

    `lead` is the number of its axes that are not the channels', `axes` are the others. `owned` is
    the position of the state whose initial rows it holds, if the result is its next value and
    does not read it: its size is checked in words of its own.
    """

    array: str
    lead: int
    axes: Axes
    owned: int | None = None

    def along(self, axis: int) -> int | None:
        """Return which of the array's axes runs along an axis of the channels."""
        return self.axes.index(axis) + self.lead if axis in self.axes else None


def array_of(writer: Any, variable: Variable) -> tuple[str, int, Axes]:
    """Return the loop's input that holds an input of the body before the first step.

    `writer` writes an elementwise loop, for whatever backend. With the name come the number of axes
    that are not the channels', and the others.
    """
    inner, outer, layout = writer.inner, writer.outer, writer.layout
    if variable in writer.parts:
        array, axes = writer.parts[variable]
        return array, int(variable in inner.rows), axes
    for i, taps in enumerate(inner.taps):
        if variable in taps:
            return outer.initials[i], 1, layout.states[i]
    i = inner.carries.index(variable)
    return outer.carries[i], 0, layout.carries[i]


def places_at_positions(
    writer: Any, reads: Mapping[Variable, Set[Hidden | None]]
) -> Iterator[Place]:
    """Yield the arrays that are read at positions, with the axes along which they are not."""
    for variable, ways in reads.items():
        for hidden in ways:
            if hidden is not None:
                array, lead, axes = array_of(writer, variable)
                shown = (None if k in hidden else axis for k, axis in enumerate(axes))
                yield Place(array, lead, tuple(shown))


def partition(places: Sequence[Sequence[Place]], axis: int) -> list[list[int]]:
    """Return groups of positions in `places` whose results share an array along `axis`."""
    groups: list[tuple[set[tuple[str, int | None]], list[int]]] = []
    for position, own in enumerate(places):
        keys = {(p.array, p.along(axis)) for p in own if p.along(axis) is not None}
        members = [position]
        apart = []
        for group in groups:
            if group[0].isdisjoint(keys):
                apart.append(group)
            else:
                keys |= group[0]
                members = group[1] + members
        groups = [*apart, (keys, members)]
    return [sorted(members) for _, members in sorted(groups, key=lambda group: min(group[1]))]


def write_sizes(
    line: Callable[[str], None],
    check: Callable[[str, str, Place, int], None],
    name: str,
    places: Sequence[Place],
    axis: int,
) -> None:
    """Write ``name = …``, the number of channels along `axis`, and checks that all arrays agree."""
    owned = {place.array for place in places if place.owned is not None}
    seen: list[tuple[str, int]] = []
    for place in sorted(places, key=lambda place: (place.array in owned, place.owned is None)):
        own = place.along(axis)
        if own is None or (place.array, own) in seen:
            continue
        text = f"{place.array}.shape[{own}]"
        if seen:
            check(text, name, place, axis)
        else:
            line(f"{name} = {text}")
        seen.append((place.array, own))
