"""Loops over channels: their numbers, their lengths, and the checks that all inputs agree.

See `scanlib.ops.channels` for which results share which loops.
"""

from __future__ import annotations

from collections.abc import Sequence

from scanlib.backends.c.base import LoopPrinter
from scanlib.backends.c.scalars import can_fail
from scanlib.ops.channels import ChannelPlan, Place, Target
from scanlib.ops.elemwise_scan import ElemwiseScan


class ChannelsPrinter(LoopPrinter):
    """What is known of a loop with channels before its code is written."""

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        self.plan = ChannelPlan(self.signature, self.layout, self.inner, self.result)
        self.scalars.can_fail = can_fail(self.graph)
        for target in self.plan.targets:
            target.total = self.source.name("total") if target.collected else None
        self.loops: dict[tuple[int, int], int] = {}
        self.axes_of_loops: list[int] = []
        self.number_loops(self.plan.targets, 0)
        self.local_carries = [not any(a is not None for a in axes) for axes in self.layout.carries]

    def number_loops(self, targets: Sequence[Target], level: int) -> None:
        """Give every loop over channels its number; a group without channels gets none."""
        for group in self.plan.groups(targets, level):
            if self.plan.group_places(group, level):
                self.loops.update({(id(target), level): self.n_loops for target in group})
                self.axes_of_loops.append(level)
                self.n_loops += 1
            self.number_loops(group, level + 1)

    def write_sizes(self) -> None:
        for number, level in enumerate(self.axes_of_loops):
            keys = {key for key, loop in self.loops.items() if loop == number}
            group = [target for target in self.plan.targets if (id(target), level) in keys]
            first, *others = self.plan.group_places(group, level)
            text = f"PyArray_DIM({first.array}, {first.along(level)})"
            self.source.line(f"data.size[{number}] = {text};")
            for place in others:
                self.check_size(place, level, f"data.size[{number}]")

    def check_size(self, place: Place, level: int, size: str) -> None:
        """Write the check that an array has as many channels as the others."""
        text = f"PyArray_DIM({place.array}, {place.along(level)})"
        error = "return scanlib_shapes_differ();"
        if place.owned is not None:
            message = self.messages.state_shape(place.owned, place.axes.index(level))
            error = self.raise_error("StepShapeError", message, "0", text, size)
        self.source.line(f"if (steps > 0 && {text} != {size}) {error}")

    def row_sizes(self, i: int) -> list[str]:
        (target,) = (t for t in self.plan.targets if t.kind == "output" and t.number == i)
        key = id(target)
        return [
            "1" if axis is None else f"data.size[{self.loops[key, axis]}]" for axis in target.axes
        ]
