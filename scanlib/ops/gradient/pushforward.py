"""Forward mode: one loop over pairs (value, tangent)."""

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
    return pushforward_at(op, inputs, None, tangents)


def pushforward_at(
    op: Scan, inputs: Variables, results: Results | None, tangents: Variables
) -> list[Variable]:
    """Return the tangents of a loop's outputs: those of a loop over pairs, or with `results`, where
    the values of its states are read, of one over tangents alone."""
    # What does not move takes no part: 0 times an infinite derivative would be NaN.
    tangents = [pg.disconnected_type() if is_zeros(tangent) else tangent for tangent in tangents]
    loop, given = Loop.from_op(op, list(inputs)), op.signature.split_inputs(tangents)
    # Each body variable with the one that carries its tangent.
    pairs = _add_inputs(loop, given)
    computed = dict(zip(loop.parts, loop.body_outputs(), strict=False))
    starts = dict(zip(loop.recurrent, [*given.initials, *given.carries], strict=True))
    moved: dict[Part, Part] = {}
    for own in _live_parts(op, loop, tangents):
        taps = {offset: own.type() for offset in own.taps}
        pairs += zip(own.taps.values(), taps.values(), strict=True)
        moved[own] = _tangent_of(own, starts[own], taps)
    moved |= {out: Output(out.value) for out in loop.outputs if is_differentiable(out.value)}
    found = step_tangents([computed[part] for part in moved], pairs)
    for part, tangent in zip(moved.values(), found, strict=True):
        value = conform(tangent, part.type)
        if isinstance(part, Output):
            part.value = value
        else:
            part.next = value
    if results is not None:
        loop.sequences += loop.rows_of_taps(results.histories)
        loop.states = []
    loop.states += [part for part in moved.values() if isinstance(part, State)]
    loop.carries += [part for part in moved.values() if isinstance(part, Carry)]
    loop.outputs += [part for part in moved.values() if isinstance(part, Output)]
    made = loop.results()
    return [made[moved[part]] if part in moved else pg.disconnected_type() for part in computed]


def _add_inputs(loop: Loop, given: OuterInputs) -> list[tuple[Variable, Variable]]:
    """Add the tangents of sequences and non-sequences to a loop; return pairs of a step."""
    pairs = []
    for part, tangent in zip(list(loop.sequences), given.sequences, strict=True):
        if is_connected(tangent) and is_differentiable(part.row):
            tangent = as_dtype(tangent, part.outer)
            loop.sequences.append(SequencePart(tangent, row_type(tangent)()))
            pairs.append((part.row, loop.sequences[-1].row))
    for whole, tangent in zip(list(loop.non_sequences), given.non_sequences, strict=True):
        if is_connected(tangent) and is_numeric(whole.inner):
            tangent = as_dtype(tangent, whole.outer)
            inner = cotangent_type(whole.inner, tangent)()
            loop.non_sequences.append(NonSequence(conform(tangent, inner.type), inner))
            pairs.append((whole.inner, inner))
    return pairs


def _tangent_of(part: State | Carry, tangent: Variable, taps: dict[int, Variable]) -> State | Carry:
    """Return the state or carry of a tangent, whose next value is not known yet."""
    start = pt.zeros_like(part.initial)
    if is_connected(tangent):
        start = as_dtype(tangent, part.initial)
    if isinstance(part, State):
        return State(start, taps, part.next)
    return Carry(conform(start, part.type), taps[-1], part.next)


def _live_parts(op: Scan, loop: Loop, given: Variables) -> list[State | Carry]:
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
