"""Rows read at computed places: the device code of `scanlib.ops.lowered.positions`.

A thread reads any item of sequences and non-sequences, which no thread writes, but of states those
of its own channel only. An index outside of its array is noted with its step, the first one of each
channel, and the nearest item is read; the linker raises the error, if it can raise one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import toposort

from scanlib.backends.cuda.scalar_code import HALF, Code
from scanlib.kernels.language import BOOL, INT64, Local, Type, Value, Writer
from scanlib.kernels.scalars import Number, Pair, parts_of
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.lowered.positions import Channel, Position, PositionalOp

if TYPE_CHECKING:
    from scanlib.backends.cuda.printer import LoopWriter

# For each channel, the first step with an index outside of its array, and the index.
WRONG = "wrong"


def positional(outputs: Sequence[Variable]) -> Iterator[Apply]:
    """Yield the positional operations of a graph."""
    for node in toposort(list(outputs)):
        if isinstance(node.op, PositionalOp):
            yield node


class PlaceWriter:
    """Writes positional operations.

    Attributes
    ----------
    lengths : dict
        By name of the kernel's number, the array and its axis whose length it is.
    """

    def __init__(self, loop: LoopWriter) -> None:
        self.loop = loop
        self.lengths: dict[str, tuple[str, int]] = {}
        for node in positional(loop.graph.outputs):
            if isinstance(node.op, Position):
                array, lead, _ = loop.plan.array_of(node.inputs[0])
                axis = lead + node.op.axis
                self.lengths[f"{array}_d{axis}"] = array, axis

    def bind(self, code: Code) -> Callable[[Apply], bool]:
        """Return what writes a positional operation into a function, and binds its result."""
        self.code, self.w = code, code.writer
        self.wrong = [self.w.local(self.number(f"s.wrong_{what}")) for what in ("step", "index")]

        def special(node: Apply) -> bool:
            if isinstance(node.op, PositionalOp):
                code.scalars.bind(node.outputs[0], self.write(node))
            return isinstance(node.op, PositionalOp)

        return special

    def noted(self) -> list[Number]:
        """Return the first step with an index outside of its array, and the index."""
        return [self.w.copy(own) for own in self.wrong]

    def number(self, text: str) -> Value:
        return self.code.parameter(text, INT64)

    def write(self, node: Apply) -> Number:
        """Write one operation; return its result."""
        if isinstance(node.op, Channel):
            return self.number(f"w.l.e[{node.op.axis}]")
        positions = [
            self.code.scalars.convert(number, "int64")
            for number in self.code.numbers(node.inputs[1:])
            if isinstance(number, Value)
        ]
        if isinstance(node.op, Position):
            return self.write_position(node, positions[0])
        return self.write_item(node, positions)

    def write_position(self, node: Apply, given: Value) -> Value:
        array, lead, _ = self.loop.plan.array_of(node.inputs[0])
        w, size = self.w, self.number(f"w.p->{array}_d{lead + node.op.axis}")
        place = w.select(given < 0, given + size, given)
        outside = (place < 0) | (place >= size)
        step, index = (w.copy(own) for own in self.wrong)
        first = outside & (step < 0)
        w.assign(self.wrong[0], w.select(first, self.number("s.step"), step))
        w.assign(self.wrong[1], w.select(first, given, index))
        nearest = w.select((place < 0) & size.differs(0), 0, size - 1)  # -1 if there is none
        return w.select(outside, nearest, place)

    def write_item(self, node: Apply, positions: list[Value]) -> Number:
        array, _, axes = self.loop.plan.array_of(node.inputs[0])
        w, given = self.w, iter(positions)
        offset: Value = w.constant(0, INT64)
        if node.inputs[0] in self.loop.inner.rows:
            offset = self.number("x.t") * self.number(f"w.l.t[Params::{array}]")
        exists: Value = w.constant(True, BOOL)
        for k, place in enumerate(node.op.places):
            if place == "at":
                position = next(given)
                axis = self.loop.arrays[array].axes[k]
                exists = exists & (position >= 0)
                offset = offset + position * self.number(f"w.p->at[Params::{array}].e[{axis}]")
            elif place != axes[k]:
                raise NoCCodeError("an item of another channel has no CUDA kernel")
        dtype = node.outputs[0].type.dtype
        half = None if dtype == HALF else parts_of(dtype)
        kind = Type("uint16" if dtype == HALF else half or dtype)
        pointer, found = self.code.pointer(f"w.l.at[Params::{array}]"), list[Local]()
        for _ in range(1 if half is None else 2):
            found.append(w.local(0, kind))
            with w.when(exists):
                w.assign(found[-1], w.load(kind, pointer, offset))
            offset = offset + kind.itemsize
        values = [w.copy(own) for own in found]
        if half is not None:
            return Pair(*values)
        return widened(w, values[0]) if dtype == HALF else values[0]


def widened(w: Writer, bits: Value) -> Value:
    """Return the number that the bits of one in half precision mean."""
    wide = w.cast(bits, "uint32")
    size, sign = (wide & 0x7FFF) << 13, (wide & 0x8000) << 16
    number = w.bitcast(size, "float32") * 2.0**112  # the exponents' biases differ by 112
    special = w.bitcast(size | 0x7F800000, "float32")  # infinity, or NaN
    value = w.select(size >= 0x0F800000, special, number)
    return w.bitcast(w.bitcast(value, "uint32") | sign, "float32")
