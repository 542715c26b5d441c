"""Recurrences that a kernel composes: which, and the functions that compose them."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pytensor.scalar.basic as ps
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.traversal import ancestors

from scanlib.backends.cuda.scalar_code import Code, computed, item_type
from scanlib.kernels.language import BOOL, Value, Writer
from scanlib.kernels.scalars import Number, parts, parts_of
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.recurrences import CLASSES
from scanlib.recurrences.block_scans import Formulas
from scanlib.recurrences.losses import TRUST, Numbers, ScalarArithmetic, Trust, is_nan, size

if TYPE_CHECKING:
    from scanlib.backends.cuda.printer import LoopWriter

# The kinds of dtypes whose functions kernels compose.
KINDS = {"affine": "fciu", "log-affine": "f", "maximum": "fiu", "minimum": "fiu"}


@dataclass(frozen=True)
class Composed:
    """A recurrence that a kernel composes, of one state or carry (states count first).

    `inputs` are a copy of the body's, `elements` what selects its function: a constant where the
    recurrence leaves one out.
    """

    part: int
    dtype: str
    family: str
    inputs: list[Variable]
    elements: list[Variable]

    @property
    def formulas(self) -> Formulas:
        return CLASSES[self.family].formulas

    @property
    def trust(self) -> Trust | None:
        """None where composing loses nothing: integers wrap around, extremes stay what they are."""
        return TRUST.get(self.family) if np.dtype(self.dtype).kind in "fc" else None

    @property
    def bounds(self) -> int:
        return 0 if self.trust is None else self.trust.bounds

    @property
    def members(self) -> list[str]:
        """The dtypes of the numbers of a composed function."""
        real = parts_of(computed(self.dtype)) or self.dtype
        return [self.dtype] * len(self.elements) + [real] * self.bounds

    def compose(self, w: Writer, first: Numbers, later: Numbers, one: bool) -> Numbers:
        """Return the function that does `first`, then `later`, which is `one` step or several."""
        count, trust = len(self.elements), self.trust
        both = self.formulas.compose(ScalarArithmetic(w), first[:count], later[:count])
        if trust is None or trust.losses is None:
            return both
        return (*both, *trust.losses(w, first, later, one))

    def apply(self, w: Writer, function: Numbers, state: Number) -> Number:
        m = ScalarArithmetic(w)
        return self.formulas.apply(m, function[: len(self.elements)], state)


def composed_recurrences(op: ElemwiseScan) -> list[Composed] | None:
    """Return the recurrences of a loop; None if a kernel cannot compose its steps: one is of no
    family above or deeper than one step, or its function depends on a recurrent part."""
    signature = op.signature
    parts = {part for recurrence in op.recurrences for part in recurrence.parts}
    carried = {i for i, is_sum in enumerate(op.layout.sums) if not is_sum}
    needed = set(range(signature.n_states)) | {signature.n_states + i for i in carried}
    if not op.recurrences or parts != needed or any(taps != (-1,) for taps in signature.taps):
        return None
    results = signature.split_body_outputs(op.body.outputs)
    values = [*results.states, *results.carries]
    found = []
    inputs = [inp.type() for inp in op.body.inputs]
    inner = signature.split_body_inputs(inputs)
    recurrent = {tap for taps in inner.taps for tap in taps} | set(inner.carries)
    for number, recurrence in enumerate(op.recurrences):
        terms, family = recurrence.terms[0], recurrence.family
        dtype = values[recurrence.parts[0]].type.dtype
        if len(recurrence.parts) != 1 or np.dtype(dtype).kind not in KINDS.get(family, ""):
            return None
        outputs, scanned = op.elements_of(number, inputs)
        if len(terms) != 1 or scanned or not recurrent.isdisjoint(ancestors(outputs)):
            return None
        identity = CLASSES[family].formulas.identity(dtype)
        # What a recurrence leaves out changes nothing.
        given = (terms[0].coefficient, recurrence.constants[0])[-len(identity) :]
        pairs = zip(given, identity, strict=True)
        elements = [
            ps.constant(np.asarray(x, dtype)) if k is None else outputs[k] for k, x in pairs
        ]
        found.append(Composed(recurrence.parts[0], dtype, family, inputs, elements))
    return found


class SummaryWriter:
    """Writes ``Summary``, several steps as one function, and what is done with it."""

    def __init__(self, loop: "LoopWriter", composed: list[Composed]) -> None:
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
        code.write(self.source, results, [f"f.{name} =" for own in self.names for name, _ in own])

    def write_lift(self) -> None:
        with self.loop.function("void lift(const Fixed &w, const Rows &x, Summary &f)") as code:
            results: list[Number] = []
            for one in self.composed:
                self.loop.bind(code, one.inputs, one.elements)
                code.scalars.emit(one.elements)
                given, dtype = code.numbers(one.elements), computed(one.dtype)
                numbers = [code.scalars.number_as(number, dtype) for number in given]
                zero = code.writer.constant(0.0, parts(numbers[0])[0].type)
                results += [*numbers, *[zero] * one.bounds]
            self.assign(code, results)

    def write_then(self, name: str, one: bool) -> None:
        with self.loop.function(f"void {name}(Summary &f, const Summary &later)") as code:
            results: list[Number] = []
            for own, (first, later) in self.each(code, "f", "later"):
                results += own.compose(code.writer, first, later, one)
            self.assign(code, results)

    def write_apply(self) -> None:
        with self.loop.function("bool apply(const Summary &f, State &s)") as code:
            w, forgets = code.writer, has_choices(self.loop.op.body.toposort())
            results: list[Number] = []
            good: Value = w.constant(True, BOOL)
            for (one, (f,)), value in zip(self.each(code, "f"), self.values, strict=True):
                before = code.read(f"s.{value}", one.dtype)
                after = one.apply(w, f, before)
                results.append(after)
                if one.trust is None:
                    continue
                stays = is_nan(before)
                if forgets and one.family == "affine":
                    stays = stays & (size(f[0]) > 0.0)
                good = good & (stays | one.trust.trusted(w, f, before, after))
            targets = [f"s.{value} =" for value in self.values]
            code.write(self.source, [*results, good], [*targets, "return"])

    def write_moderate(self) -> None:
        with self.loop.function("bool moderate(const State &before, const State &after)") as code:
            w = code.writer
            good: Value = w.constant(True, BOOL)
            for one, value in zip(self.composed, self.values, strict=True):
                if one.trust is None:
                    continue
                before, after = (
                    code.read(f"{name}.{value}", one.dtype) for name in ("before", "after")
                )
                lost: Value = w.constant(False, BOOL)
                for part in parts(before):
                    lost = lost | part.differs(part)
                good = good & (lost | one.trust.moderate(after))
            code.write(self.source, [good], ["return"])


def has_choices(nodes: Iterable[Apply]) -> bool:
    """Whether scalar code chooses between values: it may leave out a state, and so forget NaN."""
    return any(
        isinstance(node.op, ps.Switch)
        or (isinstance(node.op, ps.Composite) and has_choices(node.op.fgraph.toposort()))
        for node in nodes
    )
