"""Reverse mode from checkpoints: segments are run again, from the last to the first.

A loop of `T` steps is written as a nest of ordinary loops: an outer loop over ``n = T // s``
segments of `s` steps, whose step is an inner loop, and a tail of ``T - n s`` steps::

    outer, j = 0 … n-1:   start_{j+1} = last rows of inner(start_j, x[j s : (j+1) s])
    tail:                 the same loop, from start_n, over x[n s :]

`start_j` holds the `K` rows of a state before segment `j`, shape (K, …); carries become states
of the outer loop, so that they are stored at the start of each segment, and a random generator
is stored as its words. Sequences are cut by views. Nothing is padded.

These loops are pulled back: the tail, then the loop over segments, whose pullback reads the
starts of the segments, and whose step runs the inner loop forward and pulls it back. If nothing
else is to be stored of the user's loop, a rewrite makes it the same nest, and merging one of both.

A loop with `until` is run to count its steps; the nest is that of a loop of so many steps. With
``truncate_gradient = n``, it is that of the last `n` steps: a head of ``m = max(R - n, 0)`` of the
`R` steps that ran is run once more, stores nothing and takes no part.

Griewank, Walther, "Algorithm 799: revolve", ACM Transactions on Mathematical Software 26, 2000.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import floordiv, mul, sub

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.graph.basic import Variable
from pytensor.tensor.type import TensorType

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.checkpoint_schedules import Schedule
from scanlib.ops.derivatives import Variables
from scanlib.ops.gradient.cotangents import HistoryCotangent, split_history, total_of
from scanlib.ops.gradient.pullback import finish, is_null, reachable
from scanlib.ops.gradient.step_pullback import as_dtype, is_connected, is_usable
from scanlib.ops.graph import is_differentiable, is_tensor, row_type
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Results, State
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
    def of(cls, loop: Loop, schedule: Schedule) -> Cut:
        """Cut a loop into as many whole segments as there are."""
        total = loop.length()
        length, inside = schedule.first(loop)
        count = _folded(floordiv, total, length)
        steps = _folded(mul, count, length)
        return cls(count, length, steps, _folded(sub, total, steps), inside)

    @property
    def has_tail(self) -> bool:
        return constant_integer(self.rest) != 0


def _folded(combine: Callable[..., Variable], first: Variable, second: Variable) -> Variable:
    known = constant_integer(first), constant_integer(second)
    return combine(first, second) if None in known else pt.constant(combine(*known), dtype="int64")


def segments_name(name: str | None) -> str:
    """Return the name of the loop over the segments of a loop."""
    return f"{name}_segments" if name else "segments"


def restored_carry(carry: Carry, stored: Variable) -> Variable:
    """Return the value of a carry from what was stored."""
    return stored if is_tensor(carry.value) else GeneratorFromWords()(stored)


def _stored(carry: Variable) -> Variable:
    return carry if is_tensor(carry) else GeneratorWords()(carry)


def outer_loop(loop: Loop, cut: Cut) -> Loop:
    """Return the loop over segments of a loop, which is left as it is.

    Its states are the starts of the loop's states, then those of its carries; its outputs are the
    rows of all steps, shape (n, s, …), of the states, then of the outputs.
    """
    outer = Loop(name=segments_name(loop.name), function=loop.function, recompute=True)
    inner = Loop(name=loop.name, function=loop.function, checkpoint=cut.inside)
    _add_inputs(loop, cut, outer, inner)
    for state in loop.states:
        tap_type = next(iter(state.taps.values())).type
        # No size for several rows: asserting it would stand in the way of rewrites.
        rows = 1 if state.depth == 1 else None
        start = TensorType(tap_type.dtype, shape=(rows, *tap_type.shape))()
        initial = pt.expand_dims(state.initial, 0)
        outer.states.append(State(initial, {-1: start}, start, name=state.name))
        inner.states.append(replace(state, initial=start, taps=dict(state.taps), untraced=False))
    for carry in loop.carries:
        initial = _stored(carry.initial)
        value = carry.value.type() if is_tensor(carry.value) else initial.type()
        rows = pt.expand_dims(initial, 0)
        outer.states.append(State(rows, {-1: value}, value, name=carry.name))
        inner.carries.append(replace(carry, initial=restored_carry(carry, value)))
    inner.outputs = [replace(output) for output in loop.outputs]
    results = inner.apply()
    for state, start, history in zip(
        loop.states, outer.states[: len(loop.states)], results.histories, strict=True
    ):
        deep = state.depth > 1
        start.next = history[-state.depth :] if deep else pt.expand_dims(history[-1], 0)
        outer.outputs.append(Output(history[state.depth :]))
    for start, final in zip(outer.states[len(loop.states) :], results.carries, strict=True):
        start.next = _stored(final)
    outer.outputs += [Output(value) for value in results.outputs]
    return outer


def _add_inputs(loop: Loop, cut: Cut, outer: Loop, inner: Loop) -> None:
    for part in loop.sequences:
        segments = SplitRows()(part.outer, cut.count, cut.length)
        rows = row_type(segments)(name=part.name)
        outer.sequences.append(SequencePart(segments, rows, part.name))
        inner.sequences.append(SequencePart(rows, part.row, part.name))
    for whole in loop.non_sequences:
        between = whole.inner.type(name=whole.name)
        outer.non_sequences.append(NonSequence(whole.outer, between, whole.name))
        inner.non_sequences.append(NonSequence(between, whole.inner, whole.name))
    if loop.sequences:
        return
    outer.n_steps = cut.count
    inner.n_steps = cut.length
    if constant_integer(cut.length) is None:
        inner.n_steps = pt.lscalar()
        outer.non_sequences.append(NonSequence(cut.length, inner.n_steps))


def tail_loop(loop: Loop, cut: Cut, starts: Sequence[Variable]) -> Loop:
    """Return the loop over the steps after the last whole segment.

    `starts` are what it starts from: states of the loop over segments, without time.
    """
    states = len(loop.states)
    return replace(
        loop,
        n_steps=None if loop.n_steps is None else cut.rest,
        sequences=[replace(part, outer=part.outer[cut.steps :]) for part in loop.sequences],
        states=[
            replace(state, initial=rows, taps=dict(state.taps), untraced=False)
            for state, rows in zip(loop.states, starts[:states], strict=True)
        ],
        carries=[
            replace(carry, initial=restored_carry(carry, value))
            for carry, value in zip(loop.carries, starts[states:], strict=True)
        ],
        outputs=list(loop.outputs),
        required_steps=0,
        checkpoint=cut.inside,
    )


def checkpointed_pullback(
    op: Scan, inputs: Variables, outputs: Variables, cotangents: Variables
) -> list[Variable]:
    """Return the cotangents of a loop's inputs, computing its steps again from checkpoints."""
    assert op.checkpoint is not None
    own = Loop.from_op(op, list(inputs))
    walked, steps = _walked_back(own)
    given = op.signature.split_outputs(cotangents)
    parts = [
        split_history(as_dtype(history, state.initial), state.depth, reverse=False)
        if is_usable(history) and is_differentiable(state.initial)
        else HistoryCotangent()
        for state, history in zip(own.states, given.histories, strict=True)
    ]
    rows = [part.rows for part in parts]
    rows += [value if is_usable(value) else None for value in given.outputs]
    if steps.start is not None:
        rows = [None if value is None else value[steps.start :] for value in rows]
    ends = [replace(part, rows=None, initial=None) for part in parts]
    cut = Cut.of(walked, op.checkpoint)
    found = _pull_back_nest(walked, cut, rows, ends, given.carries)
    if steps.stop is not None:
        for i, (sequence, value) in enumerate(zip(own.sequences, found.sequences, strict=True)):
            if _is_defined(value):
                zeros = pt.zeros_like(sequence.outer)
                found.sequences[i] = pt.set_subtensor(zeros[steps], value)
    for i, (state, part) in enumerate(zip(own.states, parts, strict=True)):
        value = found.initials[i]
        if _is_defined(value) and steps.start is not None:
            # The rows that the walked steps start from are not, or not all, initial ones.
            shift = pt.minimum(steps.start, state.depth)
            value = pt.concatenate([pt.zeros_like(value[:shift]), value[: state.depth - shift]])
        found.initials[i] = total_of([value, part.initial])
    totals = zip(inputs, op.signature.join_inputs(found), reachable(op, given), strict=True)
    return [
        finish(outer, value, None if _is_defined(value) else value, reaches)
        for outer, value, reaches in totals
    ]


def _is_defined(cotangent: Variable | None) -> bool:
    return cotangent is not None and not is_null(cotangent)


def _walked_back(loop: Loop) -> tuple[Loop, slice]:
    """Return the loop over the steps that are walked back, and which of all steps these are.

    Steps before them are run once more, for the values that they end with.
    """
    n = loop.truncate_gradient
    if loop.stop is None and n < 0:
        return loop, slice(None)
    ran = _steps_that_ran(loop)
    steps = slice(None if n < 0 else pt.maximum(ran - n, 0), ran)
    walked = _some_steps(loop, steps)
    if n >= 0:
        head = _some_steps(loop, slice(None, steps.start))
        head.states = [replace(s, taps=dict(s.taps), untraced=True) for s in loop.states]
        head.outputs = []
        before = head.apply()
        starts = [
            pt.specify_shape(rows, (state.depth, *[None] * (rows.type.ndim - 1)))
            for state, rows in zip(loop.states, before.histories, strict=True)
        ]
        walked.states = [
            replace(state, initial=start, taps=dict(state.taps), untraced=False)
            for state, start in zip(loop.states, starts, strict=True)
        ]
        carries = zip(loop.carries, before.carries, strict=True)
        walked.carries = [replace(carry, initial=value) for carry, value in carries]
    return walked, steps


def _steps_that_ran(loop: Loop) -> Variable:
    """Return how many steps a loop takes; one with `until` is run for that, and merged later."""
    if loop.stop is None:
        return loop.length()
    count = pt.lscalar()
    counter = Carry(pt.constant(0, dtype="int64"), count, count + 1, "steps")
    return replace(loop, carries=[*loop.carries, counter], checkpoint=None).apply().carries[-1]


def _some_steps(loop: Loop, steps: slice) -> Loop:
    first, last = steps.start, steps.stop
    return replace(
        loop,
        stop=None,
        truncate_gradient=-1,
        required_steps=0,
        checkpoint=None,
        n_steps=None if loop.sequences else (last if first is None else last - first),
        sequences=[replace(p, outer=p.outer[first:last]) for p in loop.sequences],
    )


def _pull_back_nest(
    loop: Loop,
    cut: Cut,
    rows: list[Variable | None],
    ends: list[HistoryCotangent],
    carries: list[Variable],
) -> OuterInputs:
    """Return the cotangents of a loop's inputs, None where there are none, through its nest.

    Parameters
    ----------
    loop : Loop
    cut : Cut
    rows : list of Variable or None
        The cotangents of what the steps write, states before outputs.
    ends : list of HistoryCotangent
        What is added to the last rows of the states.
    carries : list of Variable
        The cotangents of the last carries.
    """
    nothing, n_states, n_fixed = pg.disconnected_type(), len(loop.states), len(loop.non_sequences)
    depths = [state.depth for state in loop.states]
    segments = outer_loop(loop, cut).apply()
    starts = [history[-1] for history in segments.histories]
    if cut.has_tail:
        tail = tail_loop(loop, cut, starts).apply()
        rests = [None if value is None else value[cut.steps :] for value in rows]
        whole = [replace(end, rows=rest) for end, rest in zip(ends, rests, strict=False)]
        outputs = [nothing if rest is None else rest for rest in rests[n_states:]]
        last = _pull_back(tail, [*_joined(whole, tail.histories, depths), *carries, *outputs])
        owed = [*last.initials, *last.carries]
    else:
        last = OuterInputs(None, [], [], [], [])
        owed = [*_joined(ends, starts, depths), *carries]
    # Through a start whose cotangent is undefined nothing flows back.
    back = [
        pt.set_subtensor(pt.zeros_like(history)[-1], as_dtype(value, history))
        if is_usable(value) and is_differentiable(history)
        else nothing
        for history, value in zip(segments.histories, owed, strict=True)
    ]
    stacked = [nothing if v is None else SplitRows()(v, cut.count, cut.length) for v in rows]
    first = _pull_back(segments, [*back, *stacked])
    before = [
        total_of([value[0] if is_usable(value) else value, owes if is_null(owes) else None])
        for value, owes in zip(first.initials, owed, strict=True)
    ]
    return OuterInputs(
        None,
        [
            _sequence_cotangent(part.outer, cut, *pair)
            for part, *pair in zip_longest(
                loop.sequences, first.sequences, last.sequences, fillvalue=nothing
            )
        ],
        before[:n_states],
        [
            value if is_tensor(carry.value) else None
            for carry, value in zip(loop.carries, before[n_states:], strict=True)
        ],
        [*map(total_of, zip_longest(first.non_sequences[:n_fixed], last.non_sequences))],
    )


def _pull_back(results: Results, cotangents: list[Variable]) -> OuterInputs:
    """Return the cotangents of the inputs of a loop from those of its results."""
    node = results.node
    found = node.op.pullback(node.inputs, node.outputs, cotangents)
    return node.op.signature.split_inputs(found)


def _joined(
    parts: list[HistoryCotangent], histories: list[Variable], depths: list[int]
) -> list[Variable]:
    return [part.joined(*pair) for part, *pair in zip(parts, histories, depths, strict=True)]


def _sequence_cotangent(
    rows: Variable, cut: Cut, segments: Variable, rest: Variable
) -> Variable | None:
    """Return the cotangent of a sequence from that of its segments, and of the rows behind."""
    if not is_differentiable(rows):
        return None
    pieces = [MergeRows()(segments) if is_usable(segments) else segments]
    pieces += [rest] if cut.has_tail else []
    undefined = [piece for piece in pieces if is_null(piece)]
    if undefined or not any(map(is_connected, pieces)):
        return total_of(undefined)
    places = [slice(None, cut.steps), slice(cut.steps, None)]
    return pt.concatenate(
        [
            piece if is_connected(piece) else pt.zeros_like(rows[place])
            for piece, place in zip(pieces, places, strict=False)
        ]
    )
