"""Several steps as one function: what the template composes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pytensor.scalar.basic as ps
from pytensor.graph.basic import Apply, Variable

from scanlib.backends.cuda.families import AFFINE, Composed, Numbers, is_nan, size
from scanlib.backends.cuda.scalar_code import Code, computed, item_type, parts
from scanlib.kernels.language import BOOL, Value
from scanlib.kernels.scalars import Number

if TYPE_CHECKING:
    from scanlib.backends.cuda.printer import LoopWriter


class SummaryWriter:
    """Writes ``Summary``, and how it is made, composed, applied and trusted.

    Parameters
    ----------
    loop : LoopWriter
    composed : list of Composed
    """

    def __init__(self, loop: LoopWriter, composed: list[Composed]) -> None:
        self.loop, self.composed, self.source = loop, composed, loop.source
        n = loop.signature.n_states
        self.values = [f"r{c.part}_1" if c.part < n else f"c{c.part - n}" for c in composed]
        self.names = [
            [(f"f{k}_{i}", dtype) for i, dtype in enumerate(one.members)]
            for k, one in enumerate(composed)
        ]

    def write(self) -> None:
        fields = [(item_type(dtype), name) for own in self.names for name, dtype in own]
        self.loop.members("Functions", fields)
        even = "sizeof(Functions) % 16 == 0 ? 16 : alignof(Functions)"  # read by few instructions
        self.source.line(f"struct alignas({even}) Summary : Functions {{}};")
        self.write_lift()
        self.write_then("compose", one=False)
        self.write_then("extend", one=True)
        self.write_apply()
        self.write_moderate()

    def each(self, code: Code, *objects: str) -> Iterator[tuple[Composed, list[Numbers]]]:
        """Yield the recurrences, and the numbers of their functions in some objects."""
        for one, names in zip(self.composed, self.names, strict=True):
            found = [tuple(code.read(f"{x}.{n}", dtype) for n, dtype in names) for x in objects]
            yield one, found

    def assign(self, code: Code, results: list[Number]) -> None:
        """End a function whose results become the summary."""
        targets = [name for own in self.names for name, _ in own]
        for name, text in zip(targets, code.write(self.source, results), strict=True):
            self.source.line(f"f.{name} = {text};")

    def write_lift(self) -> None:
        with self.loop.method("void lift(const Fixed &w, const Rows &x, Summary &f)"):
            code = Code(self.loop.unit, "scanlib_lift")
            results: list[Number] = []
            for one in self.composed:
                needed = [v for v in one.elements if isinstance(v, Variable)]
                self.loop.bind(code, one.inputs, needed)
                code.scalars.emit(needed)
                dtype = computed(one.dtype)
                given = [
                    code.scalars.number(v)
                    if isinstance(v, Variable)
                    else code.scalars.constant(v, dtype)
                    for v in one.elements
                ]
                numbers = [code.scalars.number_as(number, dtype) for number in given]
                zero = code.writer.constant(0.0, parts(numbers[0])[0].type)
                results += [*numbers, *[zero] * one.family.bounds]
            self.assign(code, results)

    def write_then(self, name: str, one: bool) -> None:
        with self.loop.method(f"void {name}(Summary &f, const Summary &later)"):
            code = Code(self.loop.unit, f"scanlib_{name}_functions")
            results: list[Number] = []
            for own, (first, later) in self.each(code, "f", "later"):
                results += own.family.then(code.writer, first, later, one)
            self.assign(code, results)

    def write_apply(self) -> None:
        with self.loop.method("bool apply(const Summary &f, State &s)"):
            code = Code(self.loop.unit, "scanlib_apply_functions")
            w, forgets = code.writer, has_choices(self.loop.op.body.toposort())
            results: list[Number] = []
            good: Value = w.constant(True, BOOL)
            for (one, (f,)), value in zip(self.each(code, "f"), self.values, strict=True):
                before = code.read(f"s.{value}", one.dtype)
                after = one.family.of(w, f, before)
                results.append(after)
                if one.family.trusted is None:
                    continue
                stays = is_nan(w, before)
                if forgets and one.family is AFFINE:
                    stays = stays & (size(f[0]) > 0.0)
                good = good & (stays | one.family.trusted(w, f, before, after))
            *texts, trusted = code.write(self.source, [*results, good])
            for value, text in zip(self.values, texts, strict=True):
                self.source.line(f"s.{value} = {text};")
            self.source.line(f"return {trusted};")

    def write_moderate(self) -> None:
        with self.loop.method("bool moderate(const State &before, const State &after)"):
            code = Code(self.loop.unit, "scanlib_moderate")
            w = code.writer
            good: Value = w.constant(True, BOOL)
            for one, value in zip(self.composed, self.values, strict=True):
                if one.family.moderate is None:
                    continue
                before, after = (
                    code.read(f"{name}.{value}", one.dtype) for name in ("before", "after")
                )
                lost: Value = w.constant(False, BOOL)
                for part in parts(before):
                    lost = lost | part.differs(part)
                good = good & (lost | one.family.moderate(w, after))
            (text,) = code.write(self.source, [good])
            self.source.line(f"return {text};")


def has_choices(nodes: Iterable[Apply]) -> bool:
    """Whether scalar code chooses between values: it may leave out a state, and so forget NaN."""
    return any(
        isinstance(node.op, ps.Switch)
        or (isinstance(node.op, ps.Composite) and has_choices(node.op.fgraph.toposort()))
        for node in nodes
    )
