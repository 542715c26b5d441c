"""Forward mode: one loop over pairs (value, tangent)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.ops.gradient.connection import connection_pattern
from scanlib.ops.gradient.step import as_dtype, is_connected, loose_type
from scanlib.ops.graph import conform, is_differentiable
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, State
from scanlib.ops.loop import Sequence as SequencePart


if TYPE_CHECKING:
    from scanlib.ops.scan import Scan


def pushforward(
    op: Scan,
    inputs: Sequence[Variable],
    outputs: Sequence[Variable],
    tangents: Sequence[Variable],
) -> list[Variable]:
    """Return the tangents of a loop's outputs: one loop over pairs (value, tangent)."""
    loop = Loop.from_op(op, list(inputs))
    given = op.signature.split_inputs(list(tangents))
    pairs: list[tuple[Variable, Variable]] = []

    def live(tangent: Variable | None) -> bool:
        return tangent is not None and is_connected(tangent)

    live_states, live_carries = _live_tangents(op, given)
    new_sequences, new_states, new_carries, new_parts = [], [], [], []
    for part, tangent in zip(loop.sequences, given.sequences, strict=True):
        if live(tangent) and is_differentiable(part.row):
            tangent = as_dtype(tangent, part.outer)
            row = pt.TensorType(tangent.type.dtype, shape=tangent.type.shape[1:])()
            new_sequences.append(SequencePart(tangent, row))
            pairs.append((part.row, row))
    for i in live_states:
        state, tangent = loop.states[i], given.initials[i]
        tangent = as_dtype(tangent, state.initial) if live(tangent) else pt.zeros_like(state.initial)
        tap_type = next(iter(state.taps.values())).type
        taps = {offset: tap_type() for offset in state.taps}
        new_states.append(State(tangent, taps, state.next))
        pairs.extend((state.taps[offset], taps[offset]) for offset in taps)
    for i in live_carries:
        carry, tangent = loop.carries[i], given.carries[i]
        tangent = as_dtype(tangent, carry.initial) if live(tangent) else pt.zeros_like(carry.initial)
        value = carry.value.type()
        new_carries.append(Carry(conform(tangent, value.type), value, carry.next))
        pairs.append((carry.value, value))
    for part, tangent in zip(loop.non_sequences, given.non_sequences, strict=True):
        if live(tangent) and is_differentiable(part.inner):
            inner = part.inner.type()
            tangent = conform(as_dtype(tangent, part.outer), inner.type)
            new_parts.append(NonSequence(tangent, inner))
            pairs.append((part.inner, inner))

    differentiable = [i for i, out in enumerate(loop.outputs) if is_differentiable(out.value)]
    targets = [
        *(part.next for part in new_states),
        *(part.next for part in new_carries),
        *(loop.outputs[i].value for i in differentiable),
    ]
    moved = _step_tangents(targets, pairs)
    for part, value in zip([*new_states, *new_carries], moved, strict=False):
        kind = next(iter(part.taps.values())) if isinstance(part, State) else part.value
        part.next = conform(value, kind.type)
    new_outputs = [
        Output(conform(value, loop.outputs[i].value.type))
        for i, value in zip(differentiable, moved[len(new_states) + len(new_carries) :], strict=True)
    ]
    n_states, n_carries, n_outputs = len(loop.states), len(loop.carries), len(loop.outputs)
    loop.sequences += new_sequences
    loop.states += new_states
    loop.carries += new_carries
    loop.non_sequences += new_parts
    loop.outputs += new_outputs
    results = loop.apply()
    states = dict(zip(live_states, results.histories[n_states:], strict=True))
    carries = dict(zip(live_carries, results.carries[n_carries:], strict=True))
    stacked = dict(zip(differentiable, results.outputs[n_outputs:], strict=True))
    return [
        *(states.get(i, pg.disconnected_type()) for i in range(n_states)),
        *(carries.get(i, pg.disconnected_type()) for i in range(n_carries)),
        *(stacked.get(i, pg.disconnected_type()) for i in range(n_outputs)),
    ]


def _live_tangents(op: Scan, given: Any) -> tuple[list[int], list[int]]:
    """Return the states and carries that some connected tangent reaches."""
    signature = op.signature
    flat = signature.join_inputs(given)
    reach = [False] * (signature.n_states + signature.n_carries)
    for tangent, row in zip(flat, connection_pattern(op), strict=True):
        if tangent is not None and is_connected(tangent):
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


def _step_tangents(
    targets: list[Variable], pairs: list[tuple[Variable, Variable]]
) -> list[Variable]:
    """Return the Jacobian of one step applied to tangents, by two pullbacks.

    J. Townsend, "A new trick for calculating Jacobian vector products", 2017: the pullback is
    linear in its cotangent, so pulling it back once more applies the Jacobian itself.
    """
    if not pairs:
        return [pt.zeros_like(target) for target in targets]
    wrt = [value for value, _ in pairs]
    copies = [pt.tensor_copy(target) for target in targets]
    cotangents = [target.zeros_like() for target in targets]
    first = pg.grad(
        cost=None,
        known_grads=dict(zip(copies, cotangents, strict=True)),
        wrt=wrt,
        disconnected_inputs="ignore",
        return_disconnected="zero",
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
    return list(second)
