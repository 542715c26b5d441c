"""Where the results of a step are computed: inside which loops over channels, of which lengths.

Results that share no array along an axis may differ in size there, and get loops of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytensor.graph.basic import Variable

from scanlib.backends.c.base import LoopPrinter
from scanlib.backends.c.scalars import can_fail
from scanlib.backends.numba.elemwise.channels import Place, partition, places_at_positions
from scanlib.ops.elemwise_scan import Axes, ElemwiseScan
from scanlib.ops.positions import inputs_read, node_level


def depth_of(axes: Axes) -> int:
    """Return how many loops enclose what has these axes."""
    return max((axis + 1 for axis in axes if axis is not None), default=0)


@dataclass
class Target:
    """A result of the step.

    `array` holds it; it is written inside `level` loops, its value is computed inside `inner`.
    A sum over the axes `reduced` is collected in the local variable `total`, or in place.
    """

    kind: str
    number: int
    value: Variable
    axes: Axes
    reduced: tuple[int, ...] = ()
    level: int = 0
    inner: int = 0
    total: str | None = None

    @property
    def array(self) -> str:
        letter = {"state": "h", "output": "z"}.get(self.kind, "c")
        return f"{letter}{self.number}"

    @property
    def kept(self) -> list[int]:
        return [axis for axis in self.axes if axis is not None]

    @property
    def adds(self) -> bool:
        return self.kind == "sum" or bool(self.reduced)


class ChannelsPrinter(LoopPrinter):
    """What is known of a loop with channels before its code is written."""

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        self.levels: dict[Variable, int] = {}
        self.place_values()
        self.scalars.can_fail = can_fail(self.graph)
        self.targets = list(self.make_targets())
        for target in self.targets:
            self.place_target(target)
        self.loops: dict[tuple[int, int], int] = {}
        self.axes_of_loops: list[int] = []
        self.number_loops(self.targets, 0)
        self.local_carries = [not any(a is not None for a in axes) for axes in self.layout.carries]

    def place_values(self) -> None:
        """Find how many loops must enclose each value."""
        for variable, (_, axes) in self.parts.items():
            self.levels[variable] = depth_of(axes)
        for taps, axes in zip(self.inner.taps, self.layout.states, strict=True):
            self.levels.update({tap: depth_of(axes) for tap in taps})
        for variable, axes in zip(self.inner.carries, self.layout.carries, strict=True):
            self.levels[variable] = depth_of(axes)
        for node in self.graph.toposort():
            self.levels.update(dict.fromkeys(node.outputs, node_level(node, self.levels)))

    def make_targets(self) -> Iterator[Target]:
        layout, result = self.layout, self.result
        for i, value in enumerate(result.states):
            yield Target("state", i, value, layout.states[i])
        for i, value in enumerate(result.carries):
            kind = "sum" if layout.sums[i] else "carry"
            yield Target(kind, i, value, layout.carries[i], layout.carry_reductions[i])
        for i, value in enumerate(result.outputs):
            yield Target("output", i, value, layout.outputs[i], layout.output_reductions[i])

    def place_target(self, target: Target) -> None:
        """Decide where a result is computed and written."""
        kept = target.kept
        target.inner = max(
            self.levels.get(target.value, 0),
            depth_of(target.axes),
            *(axis + 1 for axis in target.reduced),
            0,
        )
        target.level = target.inner
        first = kept == list(range(len(kept)))
        if target.reduced and first and min(target.reduced) >= len(kept):
            target.level = len(kept)
            target.total = self.source.name("total")

    # Sizes: results that share no array along an axis have loops of their own

    def places(self, target: Target) -> list[Place]:
        """Return the arrays that a result is computed from or kept in."""
        reads = inputs_read([target.value])
        above = {variable for variable, hidden in reads.items() if None in hidden}
        found = [
            Place(array, int(variable in self.inner.rows), axes)
            for variable, (array, axes) in self.parts.items()
            if variable in above
        ]
        found += places_at_positions(self, reads)
        for i, taps in enumerate(self.inner.taps):
            read = not above.isdisjoint(taps)
            if read or (target.kind == "state" and target.number == i):
                own = None if read else i
                found.append(Place(self.outer.initials[i], 1, self.layout.states[i], own))
        for i, carry in enumerate(self.inner.carries):
            if carry in above or (target.kind in ("carry", "sum") and target.number == i):
                found.append(Place(self.outer.carries[i], 0, self.layout.carries[i]))
        return found

    def groups(self, targets: list[Target], level: int) -> list[list[Target]]:
        """Return the results inside `level` loops that share the next one."""
        inside = [target for target in targets if target.inner > level]
        found = partition([self.places(target) for target in inside], level)
        return [[inside[position] for position in group] for group in found]

    def number_loops(self, targets: list[Target], level: int) -> None:
        """Give every loop over channels its number; a group without channels gets none."""
        for group in self.groups(targets, level):
            places = [place for target in group for place in self.places(target)]
            if any(place.along(level) is not None for place in places):
                self.loops.update({(id(target), level): self.n_loops for target in group})
                self.axes_of_loops.append(level)
                self.n_loops += 1
            self.number_loops(group, level + 1)

    def write_sizes(self) -> None:
        for number, level in enumerate(self.axes_of_loops):
            keys = {key for key, loop in self.loops.items() if loop == number}
            places = [p for t in self.targets if (id(t), level) in keys for p in self.places(t)]
            known: set[str] = set()
            for place in sorted(places, key=lambda place: place.owned is not None):
                along = place.along(level)
                text = f"PyArray_DIM({place.array}, {along})"
                if along is None or text in known:
                    continue
                if known:
                    self.check_size(text, f"data.size[{number}]", place, level)
                else:
                    self.source.line(f"data.size[{number}] = {text};")
                known.add(text)

    def check_size(self, text: str, size: str, place: Place, level: int) -> None:
        """Write the check that an array has as many channels as the others."""
        error = "return scanlib_shapes_differ();"
        if place.owned is not None:
            message = self.messages.state_shape(place.owned, place.axes.index(level))
            error = self.raise_error("StepShapeError", message, "0", text, size)
        self.source.line(f"if (steps > 0 && {text} != {size}) {error}")

    def row_sizes(self, i: int) -> list[str]:
        (target,) = (t for t in self.targets if t.kind == "output" and t.number == i)
        key = id(target)
        return [
            "1" if axis is None else f"data.size[{self.loops[key, axis]}]" for axis in target.axes
        ]
