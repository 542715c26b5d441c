"""Where the items of one channel are: what the template asks about places in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from scanlib.backends.cuda.computed_places import WRONG
from scanlib.backends.cuda.parameters import Array
from scanlib.backends.cuda.scalar_code import item_type

if TYPE_CHECKING:
    from scanlib.backends.cuda.printer import LoopWriter


def write_channel(loop: LoopWriter) -> None:
    """Write ``Channel``, which row belongs to a step, and how a channel is found."""
    line = loop.source.line
    row = "steps - 1 - i" if loop.signature.reverse else "i"
    line(f"SCANLIB_METHOD static int64_t row(int64_t steps, int64_t i) {{ return {row}; }}")
    members = []
    for array in loop.arrays.values():
        members.append(("char *", array.name))
        if array.lead:
            members.append(("int64_t", f"{array.name}_t"))
    if loop.places is not None:
        members += loop.places.members
    loop.struct("Channel", members)
    with loop.source.block(
        "SCANLIB_METHOD static void locate(const Params &p, int64_t c, Channel &l)"
    ):
        write_whole(loop)
        for axis in reversed(range(loop.layout.ndim)):  # what is left for the first is its own
            line(f"const int64_t e{axis} = {f'c % p.n{axis}' if axis else 'c'};")
            if axis:
                line(f"c /= p.n{axis};")
        for array in loop.arrays.values():
            if array.name in (*whole_sums(loop), WRONG):
                continue
            terms = [f" + e{axis} * p.{array.name}_{axis}" for _, axis in array.kept]
            line(f"l.{array.name} = (char *)p.{array.name}{''.join(terms)};")
            if array.lead:
                line(f"l.{array.name}_t = p.{array.name}_t;")
        if loop.places is not None:
            loop.places.write_locate()
    if loop.composed is not None:
        write_moves(loop)


def whole_sums(loop: LoopWriter) -> dict[str, str]:
    """Return the outputs that are sums over channels, and where their terms are kept."""
    return {f"z{i}": f"whole{i}" for i in loop.summed}


def write_whole(loop: LoopWriter) -> None:
    for name, work in whole_sums(loop).items():
        size = f"sizeof({item_type(loop.arrays[name].dtype)})"
        loop.source.line(f"l.{name} = (char *)p.{work} + c * {size};")
        loop.source.line(f"l.{name}_t = p.channels * {size};")
    if loop.places is not None:
        loop.source.line(f"l.{WRONG} = (char *)p.{WRONG} + c * 2 * sizeof(int64_t);")


def timed(loop: LoopWriter) -> Iterator[Array]:
    """Yield the arrays of which every step has a row."""
    traced = {f"h{i}" for i in loop.traced}
    stacked = {f"z{i}" for i in range(loop.signature.n_outputs)}
    for name in {*loop.plan.outer.sequences} | traced | stacked:
        yield loop.arrays[name]


def write_moves(loop: LoopWriter) -> None:
    """Write how a channel moves in time, and what is known of one channel without gaps in time."""
    line, arrays = loop.source.line, sorted(timed(loop), key=lambda array: array.name)
    with loop.source.block("SCANLIB_METHOD static void advance(Channel &l, int64_t rows)"):
        for array in arrays:
            line(f"l.{array.name} += rows * l.{array.name}_t;")
    with loop.source.block("SCANLIB_METHOD static void dense(Params &p)"):
        line("p.channels = p.lanes = 1;")
        line("p.lane_bits = 0;")
        line("p.chunk = SCANLIB_THREADS * SCANLIB_ITEMS;")
        for array in arrays:
            line(f"p.{array.name}_t = {np.dtype(array.dtype).itemsize};")


def is_dense(loop: LoopWriter, strides: Sequence[tuple[int, ...]]) -> bool:
    """Whether items that follow one another in time lie side by side.

    Parameters
    ----------
    loop : LoopWriter
    strides : sequence of tuple of int
        Of the arguments and of the results, in bytes.
    """
    arrays = [*loop.parameters.inputs, *loop.parameters.outputs]
    own = {array.name: s for array, s in zip(arrays, strides, strict=True)}
    return all(own[array.name][0] == np.dtype(array.dtype).itemsize for array in timed(loop))
