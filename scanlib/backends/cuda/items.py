"""What one step reads and writes: non-sequences, rows of sequences, rows of results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pytensor.graph.basic import Variable

from scanlib.backends.cuda.scalar_code import item_type

if TYPE_CHECKING:
    from scanlib.backends.cuda.printer import LoopWriter


def read_items(
    loop: LoopWriter, variables: list[Variable], names: list[str]
) -> Iterator[tuple[int, str]]:
    """Yield which of the inputs have an item of the channel that is read, and their arrays.

    Others are there for their sizes, or read at computed places; they may have no item at all.
    """
    for k, (variable, name) in enumerate(zip(variables, names, strict=True)):
        if variable in loop.loaded:
            yield k, name


def write_fixed(loop: LoopWriter) -> None:
    names = list(read_items(loop, loop.inner.non_sequences, loop.plan.outer.non_sequences))
    members = [(item_type(loop.arrays[name].dtype), f"w{k}") for k, name in names]
    channel = [] if loop.places is None else [("Channel", "l")]
    loop.struct("Fixed", members + channel)
    with loop.source.block("SCANLIB_METHOD static void fix(const Channel &l, Fixed &w)"):
        for k, name in names:
            loop.source.line(f"w.w{k} = {loop.fetched(name)};")
        if channel:
            loop.source.line("w.l = l;")


def write_rows(loop: LoopWriter) -> None:
    names = list(read_items(loop, loop.inner.rows, loop.plan.outer.sequences))
    members = [(item_type(loop.arrays[name].dtype), f"v{k}") for k, name in names]
    time = [] if loop.places is None else [("int64_t", "t")]
    loop.struct("Rows", members + time)
    head = "SCANLIB_METHOD static void load(const Channel &l, int64_t t, Rows &x)"
    with loop.source.block(head):
        for k, name in names:
            loop.source.line(f"x.v{k} = {loop.fetched(name, 't')};")
        if time:
            loop.source.line("x.t = t;")


def write_results(loop: LoopWriter) -> None:
    members = [(f"h{i}", loop.result.states[i]) for i in loop.traced]
    members += [(f"z{i}", out) for i, out in enumerate(loop.result.outputs)]
    loop.struct("Results", [(item_type(v.type.dtype), name) for name, v in members])
    head = "SCANLIB_METHOD static void store(const Channel &l, int64_t t, const Results &y)"
    with loop.source.block(head):
        for name, _ in members:
            depth = loop.signature.depths[int(name[1:])] if name[0] == "h" else 0
            shift = f" + {depth}" if depth and not loop.signature.reverse else ""
            loop.source.line(loop.stored(name, f"t{shift}", f"y.{name}"))
