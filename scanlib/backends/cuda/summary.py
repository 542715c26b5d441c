"""Several steps as one function: what the template composes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pytensor.scalar.basic as ps
from pytensor.graph.basic import Apply, Variable

from scanlib.backends.cuda.families import Composed

if TYPE_CHECKING:
    from scanlib.backends.cuda.printer import LoopWriter


def write_summary(loop: LoopWriter, composed: list[Composed]) -> None:
    """Write ``Summary``, and how it is made, composed, applied and trusted."""
    n = loop.signature.n_states
    values = [f"r{c.part}_1" if c.part < n else f"c{c.part - n}" for c in composed]
    loop.struct("Functions", [(c.template, f"f{k}") for k, c in enumerate(composed)])
    even = "sizeof(Functions) % 16 == 0 ? 16 : alignof(Functions)"  # read by few instructions
    loop.source.line(f"struct alignas({even}) Summary : Functions {{}};")
    write_lift(loop, composed)
    write_apply(loop, values)
    write_moderate(loop, composed, values)
    for name, kind in (
        ("summaries", "Summary"),
        ("states", "State"),
        ("alarms", "npy_int32"),
        ("flags", "npy_int32"),
    ):
        loop.source.line(
            f"SCANLIB_METHOD static {kind} *{name}(const Params &p) "
            f"{{ return ({kind} *)p.{name}; }}"
        )


def write_lift(loop: LoopWriter, composed: list[Composed]) -> None:
    line = loop.source.line
    head = "static void lift(const Fixed &w, const Rows &x, Summary &f)"
    with loop.source.block(f"SCANLIB_METHOD {head}"):
        for k, one in enumerate(composed):
            with loop.scalars.scope(), loop.source.block(""):
                loop.bind(one.inputs)
                loop.scalars.emit([v for v in one.elements if isinstance(v, Variable)])
                texts = [v if isinstance(v, str) else loop.scalars.text(v) for v in one.elements]
                line(f"f.f{k} = {one.template}::make({', '.join(texts)});")
    for name, method in (("compose", "then"), ("extend", "once")):
        head = f"static void {name}(Summary &f, const Summary &later)"
        with loop.source.block(f"SCANLIB_METHOD {head}"):
            for k in range(len(composed)):
                line(f"f.f{k} = f.f{k}.{method}(later.f{k});")


def write_apply(loop: LoopWriter, values: list[str]) -> None:
    line = loop.source.line
    with loop.source.block("SCANLIB_METHOD static bool apply(const Summary &f, State &s)"):
        line("const State before = s;")
        line("bool good = true;")
        forgets = str(has_choices(loop.op.body.toposort())).lower()
        for k, value in enumerate(values):
            line(f"s.{value} = f.f{k}.of(s.{value});")
            line(f"good = good && f.f{k}.trusted(before.{value}, s.{value}, {forgets});")
        line("return good;")


def write_moderate(loop: LoopWriter, composed: list[Composed], values: list[str]) -> None:
    head = "static bool moderate(const State &before, const State &after)"
    with loop.source.block(f"SCANLIB_METHOD {head}"):
        tests = [
            f"((before.{value} != before.{value}) | {one.template}::moderate(after.{value}))"
            for value, one in zip(values, composed, strict=True)
        ]
        loop.source.line(f"return {' & '.join(tests)};")  # without branches


def has_choices(nodes: Iterable[Apply]) -> bool:
    """Whether scalar code chooses between values: it may leave out a state, and so forget NaN."""
    return any(
        isinstance(node.op, ps.Switch)
        or (isinstance(node.op, ps.Composite) and has_choices(node.op.fgraph.toposort()))
        for node in nodes
    )
