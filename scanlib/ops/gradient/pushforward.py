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

from scanlib.ops.connection import connection_pattern
from scanlib.ops.derivatives import Variables
from scanlib.ops.gradient.cotangents import is_zeros
from scanlib.ops.gradient.step_pullback import (
    as_dtype,
    cotangent_type,
    is_connected,
    loose_type,
    with_single_choices,
)
from scanlib.ops.graph import conform, is_differentiable, is_numeric, row_type, substitute
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Results, State
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
        live_states, live_carries = _live_tangents(self.op, self.given)
        given = self.op.signature.split_inputs(self.given)
        loop = self.loop
        self.add_inputs(given)
        states = [self.state(loop.states[i], given.initials[i]) for i in live_states]
        carries = [self.carry(loop.carries[i], given.carries[i]) for i in live_carries]
        stacked = [i for i, out in enumerate(loop.outputs) if is_differentiable(out.value)]
        outputs = self.step(states, carries, stacked)
        if self.known is not None:
            loop.sequences += loop.rows_of_taps(self.known)
            loop.states = []
        n_states, n_carries, n_outputs = len(loop.states), len(loop.carries), len(loop.outputs)
        loop.states += states
        loop.carries += carries
        loop.outputs += outputs
        results = loop.apply()
        histories = dict(zip(live_states, results.histories[n_states:], strict=True))
        n_states = len(given.initials)
        finals = dict(zip(live_carries, results.carries[n_carries:], strict=True))
        rows = dict(zip(stacked, results.outputs[n_outputs:], strict=True))
        return [
            *(histories.get(i, pg.disconnected_type()) for i in range(n_states)),
            *(finals.get(i, pg.disconnected_type()) for i in range(n_carries)),
            *(rows.get(i, pg.disconnected_type()) for i in range(n_outputs)),
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

    def state(self, state: State, tangent: Variable) -> State:
        taps = {offset: state.type() for offset in state.taps}
        self.pairs.extend((state.taps[offset], taps[offset]) for offset in taps)
        return State(_start(tangent, state.initial), taps, state.next)

    def carry(self, carry: Carry, tangent: Variable) -> Carry:
        value = carry.value.type()
        self.pairs.append((carry.value, value))
        return Carry(conform(_start(tangent, carry.initial), value.type), value, carry.next)

    def step(self, states: list[State], carries: list[Carry], stacked: list[int]) -> list[Output]:
        """Set the next tangents of states and carries, and return those of the outputs."""
        values = [self.loop.outputs[i].value for i in stacked]
        recurrent: list[State | Carry] = [*states, *carries]
        targets = [*(part.next for part in recurrent), *values]
        moved = iter(step_tangents(targets, self.pairs))
        for part in recurrent:
            part.next = conform(next(moved), part.type)
        return [Output(conform(tangent, v.type)) for tangent, v in zip(moved, values, strict=True)]


def _moves(value: Variable, tangent: Variable) -> bool:
    """Whether a non-sequence has a tangent; that of most integers is zero."""
    if not is_connected(tangent) or not is_numeric(value):
        return False
    return is_differentiable(value) or not is_zeros(tangent)


def _start(tangent: Variable, initial: Variable) -> Variable:
    return as_dtype(tangent, initial) if is_connected(tangent) else pt.zeros_like(initial)


def _live_tangents(op: Scan, given: list[Variable]) -> tuple[list[int], list[int]]:
    """Return the states and carries that some connected tangent reaches."""
    signature = op.signature
    reach = [False] * (signature.n_states + signature.n_carries)
    for tangent, row in zip(given, connection_pattern(op), strict=True):
        if is_connected(tangent):
            reach = [a or b for a, b in zip(reach, row[: len(reach)], strict=True)]
    inner = signature.split_body_inputs(op.body.inputs)
    states = [
        i for i in range(signature.n_states) if reach[i] and is_differentiable(inner.taps[i][0])
    ]
    carries = [
        i
        for i in range(signature.n_carries)
        if reach[signature.n_states + i] and is_differentiable(inner.carries[i])
    ]
    return states, carries


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
