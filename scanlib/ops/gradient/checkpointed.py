"""Reverse mode from checkpoints: segments are run again, from the last to the first.

A loop of `T` steps is written as a nest of ordinary loops: an outer loop over ``n = T // s``
segments of `s` steps, whose step is an inner loop, and a tail of ``T - n s`` steps::

    outer, j = 0 … n-1:   start_{j+1} = last rows of inner(start_j, x[j s : (j+1) s])
    tail:                 the same loop, from start_n, over x[n s :]

`start_j` holds the `K` rows of a state before segment `j`, shape (K, …); carries become states
of the outer loop, so that they are stored at the start of each segment, and a random generator
is stored as its words. Sequences are cut by views. Nothing is padded.

The nest is differentiated like any other graph: the tail, then the loop over segments, whose
pullback reads the starts of the segments, and whose step runs the inner loop forward and pulls it
back. If nothing else is to be stored of the user's loop, a rewrite makes it the same nest, and
merging one of both.

A loop with `until` is run to count its steps; the nest is that of a loop of so many steps.

Griewank, Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import floordiv, mul, sub
from typing import NamedTuple

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor.type import TensorType

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.checkpoint_schedules import Schedule
from scanlib.ops.gradient.cotangents import HistoryCotangent, split_history, total_of
from scanlib.ops.gradient.pullback import finish, reachable
from scanlib.ops.gradient.step_pullback import as_dtype, is_connected, is_null, is_usable
from scanlib.ops.graph import (
    Variables,
    is_differentiable,
    is_numeric,
    is_tensor,
    row_type,
    substitute,
)
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.row_ops.generator_words import GeneratorFromWords, GeneratorWords
from scanlib.ops.row_ops.row_segments import MergeRows, SplitRows
from scanlib.ops.scan import Scan
from scanlib.ops.signature import OuterInputs


@dataclass(frozen=True)
class Cut:
    """How a loop is cut: `count` segments of `length` steps, `steps` in all, and `rest` behind.

    All are int64 scalars; `inside` are the checkpoints of a segment.
    """

    count: Variable
    length: Variable
    steps: Variable
    rest: Variable
    inside: Schedule | None

    @classmethod
    def of(cls, loop: Loop, schedule: Schedule) -> "Cut":
        """Cut a loop into as many whole segments as there are."""
        total = loop.length()
        length, inside = schedule.first(loop)
        count = _folded(floordiv, total, length)
        steps = _folded(mul, count, length)
        return cls(count, length, steps, _folded(sub, total, steps), inside)


def _folded(combine: Callable[..., Variable], first: Variable, second: Variable) -> Variable:
    known = constant_integer(first), constant_integer(second)
    return combine(first, second) if None in known else pt.constant(combine(*known), dtype="int64")


def segments_name(name: str | None) -> str:
    """Return the name of the loop over the segments of a loop."""
    return f"{name}_segments" if name else "segments"


def _restored(carry: Carry, stored: Variable) -> Variable:
    """Return the value of a carry from what was stored."""
    return stored if is_tensor(carry.value) else GeneratorFromWords()(stored)


def _stored(carry: Variable) -> Variable:
    return carry if is_tensor(carry) else GeneratorWords()(carry)


def _outer_loop(loop: Loop, cut: Cut) -> Loop:
    """Return the loop over segments of a loop, which is left as it is.

    Its states are the starts of the loop's states, then those of its carries; its outputs are the
    rows of all steps, shape (n, s, …), of the states, then of the outputs.
    """
    outer = Loop(name=segments_name(loop.name), function=loop.function, recompute=True)
    for part in loop.sequences:
        segments = SplitRows()(part.outer, cut.count, cut.length)
        outer.sequences.append(
            SequencePart(segments, row_type(segments)(name=part.name), part.name)
        )
    for whole in loop.non_sequences:
        own = whole.inner.type(name=whole.name)
        outer.non_sequences.append(NonSequence(whole.outer, own, whole.name))
    fixed = [
        replace(whole, outer=own.inner)
        for whole, own in zip(loop.non_sequences, outer.non_sequences, strict=True)
    ]
    length = cut.length
    if not loop.sequences:
        outer.n_steps = cut.count
        if constant_integer(length) is None:
            length = pt.lscalar()
            outer.non_sequences.append(NonSequence(cut.length, length))
    for state in loop.states:
        # No size for several rows: asserting it would stand in the way of rewrites.
        kept = 1 if state.depth == 1 else None
        start = TensorType(state.type.dtype, shape=(kept, *state.type.shape))()
        rows = pt.expand_dims(state.initial, 0)
        outer.states.append(State(rows, {-1: start}, start, name=state.name))
    for carry in loop.carries:
        initial = _stored(carry.initial)
        start = carry.value.type() if is_tensor(carry.value) else initial.type()
        rows = pt.expand_dims(initial, 0)
        outer.states.append(State(rows, {-1: start}, start, name=carry.name))
    inner = _some_steps(
        replace(loop, non_sequences=fixed, n_steps=None if loop.sequences else length),
        [part.row for part in outer.sequences],
        [state.tap(-1) for state in outer.states],
        cut.inside,
    )
    results, n = inner.apply(), len(loop.states)
    for state, start, history in zip(loop.states, outer.states[:n], results.histories, strict=True):
        deep = state.depth > 1
        start.next = history[-state.depth :] if deep else pt.expand_dims(history[-1], 0)
        outer.outputs.append(Output(history[state.depth :]))
    for start, final in zip(outer.states[n:], results.carries, strict=True):
        start.next = _stored(final)
    outer.outputs += [Output(value) for value in results.outputs]
    return outer


def _some_steps(
    loop: Loop, rows: Sequence[Variable], starts: Sequence[Variable], inside: Schedule | None
) -> Loop:
    """Return the loop over some rows of a loop's sequences.

    `starts` are what it starts from: states of the loop over segments, without time.
    """
    states = len(loop.states)
    return replace(
        loop,
        sequences=[replace(own, outer=o) for own, o in zip(loop.sequences, rows, strict=True)],
        states=[
            replace(state, initial=start, taps=dict(state.taps), untraced=False)
            for state, start in zip(loop.states, starts[:states], strict=True)
        ],
        carries=[
            replace(carry, initial=_restored(carry, start))
            for carry, start in zip(loop.carries, starts[states:], strict=True)
        ],
        outputs=list(loop.outputs),
        required_steps=0,
        checkpoint=inside,
    )


class Nest(NamedTuple):
    """What a loop over segments and a tail compute of a loop.

    `traces` are the rows that the steps write of each state; the last `K` rows of its end (`ends`)
    are the last of its history. `sequences` has the parts of each sequence that are read: the
    segments, and what is left. The tail, if there is one, begins with `starts`.
    """

    traces: list[Variable]
    ends: list[Variable]
    carries: list[Variable]
    outputs: list[Variable]
    sequences: list[list[Variable]]
    starts: list[Variable]


def nest_of(loop: Loop, schedule: Schedule) -> Nest:
    """Return the results of a loop, computed segment by segment."""
    cut, n = Cut.of(loop, schedule), len(loop.states)
    outer = _outer_loop(loop, cut)
    segments = outer.apply()
    starts = [history[-1] for history in segments.histories]
    rows = [MergeRows()(stacked) for stacked in segments.outputs]
    parts = [[part.outer] for part in outer.sequences]
    if constant_integer(cut.rest) == 0:
        carries = [_restored(*pair) for pair in zip(loop.carries, starts[n:], strict=True)]
        return Nest(rows[:n], starts[:n], carries, rows[n:], parts, [])
    behind = [part.outer[cut.steps :] for part in loop.sequences]
    n_steps = None if loop.n_steps is None else cut.rest
    tail = _some_steps(replace(loop, n_steps=n_steps), behind, starts, cut.inside)
    found = tail.apply()
    written = [rows[own.depth :] for rows, own in zip(found.histories, loop.states, strict=True)]
    rest = [*written, *found.outputs]
    rows = [pt.concatenate(pair) for pair in zip(rows, rest, strict=True)]
    parts = [[*own, piece] for own, piece in zip(parts, behind, strict=True)]
    return Nest(rows[:n], found.histories, found.carries, rows[n:], parts, starts)


def checkpointed_pullback(
    op: Scan, inputs: Variables, outputs: Variables, cotangents: Variables
) -> list[Variable]:
    """Return the cotangents of a loop's inputs, computing its steps again from checkpoints."""
    assert op.checkpoint is not None
    # The nest reads stand-ins: an input may be computed from another one, or be two of them.
    first = int(op.signature.has_n_steps)
    own = [*inputs[:first], *(v.type() if is_numeric(v) else v for v in inputs[first:])]
    loop, given = Loop.from_op(op, own), op.signature.split_outputs(cotangents)
    ran = None if loop.stop is None else _steps_that_ran(loop)
    nest = nest_of(loop if ran is None else _first_steps(loop, ran), op.checkpoint)
    known: dict[Variable, Variable] = {}
    starts: list[Variable | None] = []
    for state, trace, end, cotangent in zip(
        loop.states, nest.traces, nest.ends, given.histories, strict=True
    ):
        parts = HistoryCotangent()
        if is_usable(cotangent) and is_differentiable(state.initial):
            parts = split_history(as_dtype(cotangent, end), state.depth, reverse=False)
        values = (trace, parts.rows), (end[-1], parts.last), (end[-state.depth :], parts.ends)
        known |= {value: g for value, g in values if g is not None}
        starts.append(parts.initial)
    for value, g in zip(
        [*nest.carries, *nest.outputs], [*given.carries, *given.outputs], strict=True
    ):
        if is_usable(g) and is_differentiable(value):
            known[value] = as_dtype(g, value)
    found = _pulled_back(known, loop, nest)
    total = OuterInputs(
        None,
        [
            _sequence_cotangent(part.outer, pieces, [found.get(piece) for piece in pieces], ran)
            for part, pieces in zip(loop.sequences, nest.sequences, strict=True)
        ],
        [
            total_of([found.get(state.initial), start])
            for state, start in zip(loop.states, starts, strict=True)
        ],
        [found.get(carry.initial) for carry in loop.carries],
        [found.get(part.outer) for part in loop.non_sequences],
    )
    made = [
        finish(outer, value, _if_null(value), reaches)
        for outer, value, reaches in zip(
            inputs, op.signature.join_inputs(total), reachable(op, cotangents), strict=True
        )
    ]
    return substitute(made, dict(zip(own, inputs, strict=True)))


def _pulled_back(
    known: dict[Variable, Variable], loop: Loop, nest: Nest
) -> dict[Variable, Variable]:
    """Return the cotangents of what a nest reads, from those of its results."""
    wrt = [piece for pieces in nest.sequences for piece in pieces]
    wrt += [part.initial for part in loop.recurrent]
    wrt = [v for v in wrt if is_differentiable(v)]
    wrt += [part.outer for part in loop.non_sequences if is_numeric(part.outer)]
    if not known or not wrt:
        return {}
    found = _gradients(known, wrt)
    if any(map(is_null, found.values())):
        # An undefined cotangent of what the tail starts from stays there, and does not flow back.
        starts = [v for v in nest.starts if is_differentiable(v)]
        found = _gradients(known, [*wrt, *starts], starts)
        owed = {v: found.pop(v) for v in starts if v in found}
        back = _gradients({v: g for v, g in owed.items() if not is_null(g)}, wrt)
        pairs = zip(loop.recurrent, nest.starts, strict=False)
        lost = {part.initial: owed.get(v) for part, v in pairs}
        total = {v: total_of([found.get(v), back.get(v), _if_null(lost.get(v))]) for v in wrt}
        found = {v: g for v, g in total.items() if g is not None}
    return found


def _if_null(cotangent: Variable | None) -> Variable | None:
    return cotangent if cotangent is not None and is_null(cotangent) else None


def _gradients(
    known: dict[Variable, Variable], wrt: list[Variable], constant: Sequence[Variable] = ()
) -> dict[Variable, Variable]:
    """Return the cotangents that are connected; nothing flows back through what is constant."""
    if not known:
        return {}
    found = pg.grad(
        cost=None,
        known_grads=known,
        wrt=wrt,
        consider_constant=list(constant),
        disconnected_inputs="ignore",
        return_disconnected="disconnected",
        null_gradients="return",
    )
    return {v: g for v, g in zip(wrt, found, strict=True) if is_connected(g)}


def _steps_that_ran(loop: Loop) -> Variable:
    """Return how many steps a loop with `until` takes; it is run for that, and merged later."""
    count = pt.lscalar()
    counter = Carry(pt.constant(0, dtype="int64"), count, count + 1, "steps")
    return replace(loop, carries=[*loop.carries, counter], checkpoint=None).apply().carries[-1]


def _first_steps(loop: Loop, steps: Variable) -> Loop:
    """Return the loop of so many steps."""
    return replace(
        loop,
        stop=None,
        required_steps=0,
        checkpoint=None,
        n_steps=None if loop.sequences else steps,
        sequences=[replace(part, outer=part.outer[:steps]) for part in loop.sequences],
    )


def _sequence_cotangent(
    outer: Variable, pieces: list[Variable], found: list[Variable | None], ran: Variable | None
) -> Variable | None:
    """Return the cotangent of a sequence from those of its segments, and of the rows behind."""
    present = [g for g in found if g is not None]
    undefined = next(filter(is_null, present), None)
    if undefined is not None or not present:
        return undefined
    segments, *rest = (
        pt.zeros_like(piece) if g is None else g for piece, g in zip(pieces, found, strict=True)
    )
    rows = MergeRows()(segments)
    rows = pt.concatenate([rows, *rest]) if rest else rows
    return rows if ran is None else pt.set_subtensor(pt.zeros_like(outer)[:ran], rows)
