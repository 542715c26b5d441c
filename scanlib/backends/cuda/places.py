"""Rows read at computed places: the device code of `scanlib.ops.positions`.

A thread reads any item of sequences and non-sequences, which no thread writes, but of states those
of its own channel only. An index outside of its array is noted with its step, the first one of each
channel, and the nearest item is read; the linker raises the error, if it can raise one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort

from scanlib.backends.cuda.scalars import item_type, memory_type
from scanlib.ops.c_code import NoCCodeError
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.positions import Channel, Item, Position, PositionalOp

if TYPE_CHECKING:
    from scanlib.backends.cuda.printer import LoopWriter

WRONG = (
    "wrong"  # for each channel, the first step with an index outside of its array, and the index
)


def check_places(op: ElemwiseScan) -> None:
    """Raise an error if a step reads the states of other channels.

    Raises
    ------
    NoCCodeError
    """
    inner = op.signature.split_body_inputs(op.body.inputs)
    own = {tap for taps in inner.taps for tap in taps} | set(inner.carries)
    for node in positional(op.body.outputs):
        if isinstance(node.op, Item) and node.inputs[0] in own:
            raise NoCCodeError("channels that need one another have no CUDA kernel")


def positional(outputs: Sequence[Variable]) -> Iterator[Apply]:
    """Yield the positional operations of a graph."""
    for node in toposort(list(outputs)):
        if isinstance(node.op, PositionalOp):
            yield node


class PlaceWriter:
    """Writes positional operations, and what they need to know of arrays.

    Parameters
    ----------
    loop : LoopWriter

    Attributes
    ----------
    strides, lengths : dict
        By name of the kernel's number, the array and its axis that it belongs to.
    """

    def __init__(self, loop: LoopWriter) -> None:
        self.loop = loop
        self.strides: dict[str, tuple[str, int]] = {}
        self.lengths: dict[str, tuple[str, int]] = {}
        for node in positional(loop.graph.outputs):
            if isinstance(node.op, Channel):
                continue
            array, lead, _ = loop.plan.array_of(node.inputs[0])
            if isinstance(node.op, Position):
                axis = lead + node.op.axis
                self.lengths[f"{array}_d{axis}"] = array, axis
            else:
                for axis in node.op.hidden:
                    self.strides[f"{array}_s{lead + axis}"] = array, lead + axis

    @property
    def names(self) -> list[str]:
        """The kernel's numbers."""
        return [*self.strides, *self.lengths]

    @property
    def members(self) -> list[tuple[str, str]]:
        """What a channel knows beside where its items are."""
        axes = [f"e{axis}" for axis in range(self.loop.layout.ndim)]
        return [("npy_intp", name) for name in [*axes, *self.names]]

    def write_locate(self) -> None:
        line = self.loop.source.line
        for axis in range(self.loop.layout.ndim):
            line(f"l.e{axis} = e{axis};")
        for name in self.names:
            line(f"l.{name} = p.{name};")

    def write(self, node: Apply, inputs: list[str]) -> list[str]:
        """Write one operation with the texts of its inputs; return the text of its result."""
        if isinstance(node.op, Channel):
            return [f"((npy_int64)w.l.e{node.op.axis})"]
        if isinstance(node.op, Position):
            return [self.write_position(node, inputs[1])]
        return [self.write_item(node, inputs[1:])]

    def write_position(self, node: Apply, index: str) -> str:
        array, lead, _ = self.loop.plan.array_of(node.inputs[0])
        source, size = self.loop.source, f"w.l.{array}_d{lead + node.op.axis}"
        given, place = source.name("i"), source.name("p")
        source.line(f"const npy_int64 {given} = {index};")
        source.line(f"npy_int64 {place} = {given} < 0 ? {given} + {size} : {given};")
        with source.block(f"if ({place} < 0 || {place} >= {size})"):
            source.line("if (s.wrong_step < 0) { s.wrong_step = s.step; "
                        f"s.wrong_index = {given}; }}")  # fmt: skip
            source.line(f"{place} = {place} < 0 && {size} ? 0 : {size} - 1;")  # -1 if there is none
        return place

    def write_item(self, node: Apply, positions: list[str]) -> str:
        array, lead, axes = self.loop.plan.array_of(node.inputs[0])
        source, given = self.loop.source, iter(positions)
        terms = [f"w.l.{array}"]
        if node.inputs[0] in self.loop.inner.rows:
            terms.append(f"x.t * w.l.{array}_t")
        for k, place in enumerate(node.op.places):
            if place == "at":
                terms.append(f"{next(given)} * w.l.{array}_s{lead + k}")
            elif place != axes[k]:
                raise NoCCodeError("an item of another channel has no CUDA kernel")
        dtype = node.outputs[0].type.dtype
        name = source.name("s")
        exists = " && ".join([*(f"{place} >= 0" for place in positions), "true"])
        read = f"{item_type(dtype)}(scanlib_fetch<{memory_type(dtype)}>({' + '.join(terms)}))"
        source.line(f"{item_type(dtype)} {name} = {item_type(dtype)}(0);")
        source.line(f"if ({exists}) {name} = {read};")
        return name
