"""Rows read at computed places: the C code of `scanlib.ops.positions`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from pytensor.graph.basic import Apply, Variable

from scanlib.backends.c.source import Source, c_string, c_type
from scanlib.ops.messages import Messages
from scanlib.ops.positions import Channel, Item, Position


class Row(NamedTuple):
    """Where a row is.

    `base` is its address, `strides` the array of strides and `dims` that of lengths, of which the
    first `lead` do not belong to the row.
    """

    base: str
    strides: str
    dims: str
    lead: int


class PositionalCode:
    """Writes positional operations.

    Parameters
    ----------
    row_of : callable
        Returns where the row is that an input of the body stands for.
    """

    def __init__(
        self, source: Source, messages: Messages, row_of: Callable[[Variable], Row]
    ) -> None:
        self.source = source
        self.messages = messages
        self.row_of = row_of

    def write(self, node: Apply, inputs: list[str]) -> list[str]:
        """Write one operation with the texts of its inputs; return the text of its result."""
        if isinstance(node.op, Channel):
            return [f"((npy_int64)e{node.op.axis})"]
        if isinstance(node.op, Position):
            return [self.write_position(node, inputs[1])]
        return [self.write_item(node, inputs[1:])]

    def write_position(self, node: Apply, index: str) -> str:
        row = self.row_of(node.inputs[0])
        given, place = self.source.name("i"), self.source.name("p")
        size = f"{row.dims}[{row.lead + node.op.axis}]"
        line = self.source.line
        line(f"const npy_int64 {given} = {index};")
        line(f"const npy_int64 {place} = {given} < 0 ? {given} + {size} : {given};")
        with self.source.block(f"if ({place} < 0 || {place} >= {size})"):
            message = c_string(self.messages.index_range())
            line(f'return scanlib_raise("StepIndexError", {message}, 2, i, (npy_intp){given});')
        return place

    def write_item(self, node: Apply, positions: list[str]) -> str:
        op: Item = node.op
        row = self.row_of(node.inputs[0])
        given = iter(positions)
        terms = [row.base]
        for k, place in enumerate(op.places):
            if place is not None:
                at = next(given) if place == "at" else f"e{place}"
                terms.append(f"{at} * {row.strides}[{row.lead + k}]")
        dtype = c_type(node.outputs[0].type.dtype)
        name = self.source.name("s")
        self.source.line(f"const {dtype} {name} = *(const {dtype} *)({' + '.join(terms)});")
        return name
