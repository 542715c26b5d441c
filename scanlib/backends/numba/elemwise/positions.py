"""Rows read at computed places: the code of `scanlib.ops.positions`."""

from __future__ import annotations

from collections.abc import Callable

from pytensor.graph.basic import Apply, Variable

from scanlib.backends.numba.emit import Emitter
from scanlib.backends.numba.source import Source
from scanlib.ops.elemwise_scan import Axes
from scanlib.ops.errors import StepIndexError
from scanlib.ops.messages import Messages
from scanlib.ops.positions import Channel, Item, Position

Sources = Callable[[Variable], tuple[str, Axes, list[str]]]


class PositionalCode:
    """Writes positional operations.

    Parameters
    ----------
    source_of : callable
        Returns the array that holds an input of the body, its axes, and the indices before these.
    """

    def __init__(
        self, source: Source, emitter: Emitter, messages: Messages, source_of: Sources
    ) -> None:
        self.source = source
        self.emitter = emitter
        self.messages = messages
        self.source_of = source_of

    def write(self, node: Apply, indices: list[str]) -> None:
        """Write one operation; `indices` are those of the channel along the axes outside."""
        if isinstance(node.op, Channel):
            self.emitter.bind_scalar(node.outputs[0], indices[node.op.axis])
        elif isinstance(node.op, Position):
            self.write_position(node)
        else:
            self.write_item(node, indices)

    def write_position(self, node: Apply) -> None:
        row, index = node.inputs
        array, _, lead = self.source_of(row)
        given, place = self.source.name("i"), self.source.name("p")
        size = f"{array}.shape[{len(lead) + node.op.axis}]"
        line = self.source.line
        line(f"{given} = np.int64({self.emitter.scalar(index)})")
        line(f"{place} = {given} + {size} if {given} < 0 else {given}")
        self.source.object("StepIndexError", StepIndexError)
        with self.source.block(f"if {place} < 0 or {place} >= {size}:"):
            line(f"raise StepIndexError({self.messages.index_range()!r}, np.int64(i), {given})")
        self.emitter.bind_scalar(node.outputs[0], place)

    def write_item(self, node: Apply, indices: list[str]) -> None:
        op: Item = node.op
        row, *positions = node.inputs
        array, _, lead = self.source_of(row)
        given = iter(positions)
        places = [
            self.emitter.scalar(next(given))
            if place == "at"
            else "0"
            if place is None
            else indices[int(place)]
            for place in op.places
        ]
        name = self.source.name("s")
        self.source.line(f"{name} = {array}[{', '.join([*lead, *places]) or '()'}]")
        self.emitter.bind_scalar(node.outputs[0], name)
