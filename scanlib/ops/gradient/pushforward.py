"""Forward mode: one loop over pairs (value, tangent)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import HasInnerGraph
from pytensor.graph.traversal import toposort
from pytensor.tensor.random.type import RandomType

from scanlib.ops.gradient.cotangents import is_zeros
from scanlib.ops.gradient.step_pullback import (
    as_dtype,
    cotangent_type,
    is_connected,
    loose_type,
    with_single_choices,
)
from scanlib.ops.graph import (
    Variables,
    conform,
    is_differentiable,
    is_numeric,
    row_type,
    substitute,
)
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Part, Results, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.scan import Scan
from scanlib.ops.signature import OuterInputs


def pushforward(
    op: Scan, inputs: Variables, outputs: Variables, tangents: Variables
) -> list[Variable]:
    """Return the tangents of a loop's outputs; see `pytensor.graph.op.Op.pushforward`."""
    return _Forward(op, Loop.from_op(op, list(inputs)), list(tangents)).tangents()


def pushforward_at(
    op: Scan, inputs: Sequence[Variable], results: Results, tangents: Sequence[Variable]
) -> list[Variable]:
    """Return the tangents of a loop's outputs, reading the values of its states in `results`."""
    loop = Loop.from_op(op, list(inputs))
    return _Forward(op, loop, list(tangents), known=results.histories).tangents()


@dataclass
class _Forward:
    """The loop over pairs, while it is put together.

    `pairs` holds each body variable with the one that carries its tangent. With `known`, the
    histories of the states, the loop is one over tangents alone.
    """

    op: Scan
    loop: Loop
    given: list[Variable]
    pairs: list[tuple[Variable, Variable]] = field(default_factory=list)
    known: list[Variable] | None = None

    def tangents(self) -> list[Variable]:
        loop, given = self.loop, self.op.signature.split_inputs(self.given)
        self.add_inputs(given)
        computed = dict(zip(loop.parts, loop.body_outputs(), strict=False))
        starts = dict(zip(loop.recurrent, [*given.initials, *given.carries], strict=True))
        moved: dict[Part, Part] = {
            part: self.tangent_of(part, starts[part])
            for part in _live_parts(self.op, loop, self.given)
        }
        moved |= {out: Output(out.value) for out in loop.outputs if is_differentiable(out.value)}
        tangents = step_tangents([computed[part] for part in moved], self.pairs)
        for part, tangent in zip(moved.values(), tangents, strict=True):
            value = conform(tangent, part.type)
            if isinstance(part, Output):
                part.value = value
            else:
                part.next = value
        if self.known is not None:
            loop.sequences += loop.rows_of_taps(self.known)
            loop.states = []
        loop.states += [part for part in moved.values() if isinstance(part, State)]
        loop.carries += [part for part in moved.values() if isinstance(part, Carry)]
        loop.outputs += [part for part in moved.values() if isinstance(part, Output)]
        results = loop.results()
        return [
            results[moved[part]] if part in moved else pg.disconnected_type() for part in computed
        ]

    def add_inputs(self, given: OuterInputs) -> None:
        """Add the tangents of sequences and non-sequences."""
        for part, tangent in zip(list(self.loop.sequences), given.sequences, strict=True):
            if is_connected(tangent) and is_differentiable(part.row):
                tangent = as_dtype(tangent, part.outer)
                row = row_type(tangent)()
                self.loop.sequences.append(SequencePart(tangent, row))
                self.pairs.append((part.row, row))
        for whole, tangent in zip(list(self.loop.non_sequences), given.non_sequences, strict=True):
            if _moves(whole.inner, tangent):
                tangent = as_dtype(tangent, whole.outer)
                inner = cotangent_type(whole.inner, tangent)()
                tangent = conform(tangent, inner.type)
                self.loop.non_sequences.append(NonSequence(tangent, inner))
                self.pairs.append((whole.inner, inner))

    def tangent_of(self, part: State | Carry, tangent: Variable) -> State | Carry:
        """Return the state or carry of a tangent, whose next value is not known yet."""
        taps = {offset: part.type() for offset in part.taps}
        self.pairs += zip(part.taps.values(), taps.values(), strict=True)
        start = pt.zeros_like(part.initial)
        if is_connected(tangent):
            start = as_dtype(tangent, part.initial)
        if isinstance(part, State):
            return State(start, taps, part.next)
        return Carry(conform(start, part.type), taps[-1], part.next)


def _moves(value: Variable, tangent: Variable) -> bool:
    """Whether a non-sequence has a tangent; that of most integers is zero."""
    if not is_connected(tangent) or not is_numeric(value):
        return False
    return is_differentiable(value) or not is_zeros(tangent)


def _live_parts(op: Scan, loop: Loop, given: list[Variable]) -> list[State | Carry]:
    """Return the states and carries that some connected tangent reaches."""
    rows = [
        row
        for tangent, row in zip(given, op.connection_pattern(), strict=True)
        if is_connected(tangent)
    ]
    reached = [any(column) for column in zip(*rows, strict=True)]
    pairs = zip(loop.recurrent, reached, strict=False)
    return [part for part, is_live in pairs if is_live and is_differentiable(part.tap(-part.depth))]


def _draws(node: Apply) -> bool:
    """Whether a node draws random numbers by itself, not in a graph of its own."""
    is_drawn_from = any(isinstance(inp.type, RandomType) for inp in node.inputs)
    return is_drawn_from and not isinstance(node.op, HasInnerGraph)


def step_tangents(
    targets: list[Variable], pairs: list[tuple[Variable, Variable]]
) -> list[Variable]:
    """Return the Jacobian of one step applied to tangents, by two pullbacks.

    J. Townsend, "A new trick for calculating Jacobian vector products", 2017: the pullback is
    linear in its cotangent, so pulling it back once more applies the Jacobian itself. Draws do
    not move, as PyTensor has it: a pullback would be undefined where their parameters do.
    """
    if not pairs:
        return [pt.zeros_like(target) for target in targets]
    singles, choices = with_single_choices(targets)
    copies = [pt.tensor_copy(target) for target in singles]
    cotangents = [target.zeros_like() for target in targets]
    first = pg.grad(
        cost=None,
        known_grads=dict(zip(copies, cotangents, strict=True)),
        wrt=[value for value, _ in pairs],
        disconnected_inputs="ignore",
        return_disconnected="zero",
        consider_constant=[
            out for node in toposort(singles) if _draws(node) for out in node.outputs
        ],
    )
    second = pg.grad(
        cost=None,
        known_grads={
            pt.tensor_copy(value): conform(tangent, loose_type(value))
            for value, (_, tangent) in zip(first, pairs, strict=True)
        },
        wrt=cotangents,
        disconnected_inputs="ignore",
        return_disconnected="zero",
    )
    return substitute(second, choices)
