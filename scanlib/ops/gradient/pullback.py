"""Reverse mode: one loop that walks the steps backwards. See the package for the algebra."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.gradient import NullType
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.type import TensorType

from scanlib.ops.connection import connection_pattern
from scanlib.ops.derivatives import Variables
from scanlib.ops.gradient.cotangents import HistoryCotangent, split_history, split_output
from scanlib.ops.gradient.forward import ForwardValues, drawn_values
from scanlib.ops.gradient.step_pullback import (
    StepPullback,
    as_dtype,
    cotangent_type,
    is_connected,
    is_usable,
)
from scanlib.ops.graph import conform, is_differentiable, is_tensor, row_type, zeros_like
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Results, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.messages import loop_title
from scanlib.ops.row_ops.ran_steps import is_mask
from scanlib.ops.scan import Scan
from scanlib.ops.signature import OuterOutputs


def pullback(
    op: Scan, inputs: Variables, outputs: Variables, cotangents: Variables
) -> list[Variable]:
    """Return the cotangents of a loop's inputs; see `pytensor.graph.op.Op.pullback`."""
    results = Results(*op.signature.split_outputs(outputs), outputs[0].owner)
    return pull_back(op, inputs, results, cotangents)


def pull_back(
    op: Scan,
    inputs: Sequence[Variable],
    results: Results,
    cotangents: Sequence[Variable],
) -> list[Variable]:
    """Return the cotangents of a loop's inputs, reading forward values in `results`."""
    loop = Loop.from_op(op, list(inputs))
    given = op.signature.split_outputs(cotangents)
    # Where an integer is differentiated as well, integer results have cotangents, which are zero.
    smooth = op.signature.split_outputs(
        [
            g if is_differentiable(value) else pg.disconnected_type()
            for g, value in zip(cotangents, loop.body_outputs(), strict=False)
        ]
    )
    step = StepPullback(loop)
    step.activate(*({i for i, g in enumerate(group) if is_usable(g)} for group in smooth))
    step.differentiate()
    if not op.recompute:
        step.read_stored_results()
    forward = ForwardValues(loop, results)
    _store_what_is_missing(forward, step)
    backward = _Backward(forward, step, smooth)
    backward.build()
    return _Collector(op, inputs, given, backward).cotangents()


def _store_what_is_missing(forward: ForwardValues, step: StepPullback) -> None:
    """Run the forward loop with more outputs if the backward steps read what it dropped."""
    loop, values = forward.loop, step.values()
    cuts = drawn_values(values, [*loop.body_inputs(), *step.stored])
    needed = set(ancestors(values, blockers=cuts))
    carries = [i for i, carry in enumerate(loop.carries) if carry.value in needed]
    dropped = any(
        state.untraced and needed.intersection(state.taps.values()) for state in loop.states
    )
    if loop.stop is not None and not loop.outputs:
        # Something stored must tell how many steps ran.
        if loop.states:
            dropped = dropped or loop.states[0].untraced
        elif not carries and not cuts:
            cuts = [loop.stop]
    if carries or cuts or dropped:
        forward.store(carries, dict(zip(cuts, step.of_the_loop(cuts), strict=True)))


@dataclass
class _Backward:
    """The loop that walks back, while it is put together.

    The dictionaries map a part of the forward loop to the carry or output of the backward loop
    that holds its cotangent; `owed` maps a state to the carries ``a_1 … a_K``.
    """

    forward: ForwardValues
    step: StepPullback
    given: OuterOutputs
    loop: Loop = field(default_factory=Loop)
    results: Results | None = None
    owed: dict[int, list[int]] = field(default_factory=dict)
    carries: dict[int, int] = field(default_factory=dict)
    sums: dict[int, int] = field(default_factory=dict)
    rows: dict[int, int] = field(default_factory=dict)
    histories: dict[int, HistoryCotangent] = field(default_factory=dict)
    replacements: dict[Variable, Variable] = field(default_factory=dict)

    def build(self) -> None:
        source = self.forward.loop
        name = f"{source.name}_gradient" if source.name else "gradient"
        self.loop = Loop(
            reverse=not source.reverse,
            name=name,
            function=source.function,
            recompute=source.recompute,
        )
        for i, state in enumerate(source.states):
            if is_usable(self.given.histories[i]):
                cotangent = as_dtype(self.given.histories[i], state.initial)
                self.histories[i] = split_history(cotangent, state.depth, source.reverse)
        self.add_entering_cotangents()
        self.add_owed()
        self.add_sums()
        self.add_forward_values()
        if not self.loop.body_outputs():
            return
        self.loop.n_steps = self.forward.walked()
        self.loop.substitute(self.replacements)
        self.drop_unread_sequences()
        masks = self.forward.ran()
        if self.loop.sequences or any(map(is_mask, masks)):
            self.loop.n_steps = None
        for mask in masks:
            self.add_sequence(mask)
        self.results = self.loop.apply()

    # Parts

    def add_carry(self, initial: Variable, kind: TensorType) -> Carry:
        value = kind()
        self.loop.carries.append(Carry(conform(initial, value.type), value, value))
        return self.loop.carries[-1]

    def add_sequence(self, rows: Variable) -> Variable:
        row = row_type(rows)()
        self.loop.sequences.append(SequencePart(rows, row))
        return row

    def gradient_of(self, inner: Variable | None) -> Variable | None:
        """Return what one step owes to a body input, None if nothing."""
        value = self.step.results.get(inner) if inner is not None else None
        return None if value is None or isinstance(value.type, NullType) else value

    # What enters from outside and from later steps

    def add_entering_cotangents(self) -> None:
        source, step = self.forward.loop, self.step
        for i, total in step.state_cotangents.items():
            state = source.states[i]
            entering = self.histories.get(i, HistoryCotangent())
            zero = pt.zeros_like(state.initial[0])
            first = zero if entering.last is None else entering.last
            starts = [first] + [zero] * (state.depth - 1)
            if entering.ends is not None:
                ends = [entering.ends[state.depth - j] for j in range(1, state.depth + 1)]
                starts = [a if b is zero else a + b for a, b in zip(ends, starts, strict=True)]
            self.owed[i] = [len(self.loop.carries) + j for j in range(state.depth)]
            added = [self.add_carry(start, total.type) for start in starts]
            value = added[0].value
            if entering.rows is not None:
                value = value + self.add_sequence(self.forward.walk(entering.rows))
            self.check_shape(state, value)
            self.replacements[total] = conform(value, total.type)
        for i, total in step.carry_cotangents.items():
            final = self.given.carries[i]
            start = as_dtype(final, total) if is_usable(final) else None
            if start is None:
                start = pt.zeros_like(source.carries[i].initial)
            self.carries[i] = len(self.loop.carries)
            self.replacements[total] = self.add_carry(start, total.type).value
        for i, total in step.output_cotangents.items():
            self.replacements[total] = conform(self.output_cotangent(i, total), total.type)

    def check_shape(self, state: State, cotangent: Variable) -> None:
        """Raise if a state is read as larger than what its step returns."""
        came, returned = cotangent.type.shape, state.next.type.shape
        if any(None is not a != b is not None for a, b in zip(came, returned, strict=True)):
            source = self.forward.loop
            name = f"state `{state.name}`" if state.name else "a state"
            raise TypeError(
                f"{loop_title(source.name, source.function)}: the gradient of {name} has shape "
                f"{came}, the step returns {returned}: its values are used beside an array of that "
                f"shape, and an axis is broadcast only if its size is known to be 1. Give an "
                f"initial value of known shape, as in pt.specify_shape(h0, {returned})"
            )

    def output_cotangent(self, i: int, total: Variable) -> Variable:
        """Return what enters a backward step for an output.

        With `until`, a cotangent of the last row waits for the last step: in a batch of loops,
        that is the last one of each.
        """
        source, cotangent = self.forward.loop, as_dtype(self.given.outputs[i], total)
        parts = HistoryCotangent(rows=cotangent)
        if source.stop is not None and not source.reverse:
            parts = split_output(cotangent)
        entering = []
        if parts.last is not None:
            carry = self.add_carry(parts.last, total.type)
            carry.next = pt.zeros_like(carry.value)
            entering.append(carry.value)
        if parts.rows is not None:
            entering.append(self.add_sequence(self.forward.walk(parts.rows)))
        return entering[0] if len(entering) == 1 else entering[0] + entering[1]

    # What one backward step computes

    def add_owed(self) -> None:
        """``a_j ← a_{j+1} + d_j`` for states; the plain cotangent for carries."""
        source = self.forward.loop
        for i, positions in self.owed.items():
            later = [*positions[1:], None]
            for j, (position, next_position) in enumerate(zip(positions, later, strict=True), 1):
                carry = self.loop.carries[position]
                own = self.gradient_of(source.states[i].taps.get(-j))
                kept = None if next_position is None else self.loop.carries[next_position].value
                parts = [part for part in (kept, own) if part is not None]
                value = parts[0] if parts else pt.zeros_like(carry.value)
                for part in parts[1:]:
                    value = value + part
                carry.next = conform(value, carry.value.type)
        for i, position in self.carries.items():
            carry = self.loop.carries[position]
            own = self.gradient_of(source.carries[i].value)
            carry.next = conform(
                pt.zeros_like(carry.value) if own is None else own, carry.value.type
            )

    def add_sums(self) -> None:
        """Sums over time for non-sequences, stacked rows for sequences."""
        source = self.forward.loop
        for i, part in enumerate(source.non_sequences):
            own = self.gradient_of(part.inner)
            if own is not None:
                self.sums[i] = len(self.loop.carries)
                kind = cotangent_type(part.inner, own)
                carry = self.add_carry(zeros_like(part.outer, kind.dtype), kind)
                carry.next = conform(carry.value + own, carry.value.type)
        for i, sequence in enumerate(source.sequences):
            own = self.gradient_of(sequence.row)
            if own is not None:
                self.rows[i] = len(self.loop.outputs)
                self.loop.outputs.append(Output(conform(own, sequence.row.type)))

    # What a backward step reads of the forward loop

    def add_forward_values(self) -> None:
        forward, source = self.forward, self.forward.loop
        cuts = list(forward.stored_cuts)
        needed = set(ancestors(self.step.values(), blockers=cuts))

        def read(inner: Variable, rows: Variable) -> None:
            self.replacements[inner] = conform(self.add_sequence(rows), inner.type)

        for sequence in source.sequences:
            if sequence.row in needed:
                read(sequence.row, forward.sequence(sequence.outer))
        for i, state in enumerate(source.states):
            for offset, tap in state.taps.items():
                if tap in needed:
                    read(tap, forward.tap(i, offset))
        for i in forward.stored_carries:
            if source.carries[i].value in needed:
                read(source.carries[i].value, forward.carry(i))
        for placeholder, (kind, i) in self.step.stored.items():
            if placeholder in needed:
                read(placeholder, forward.tap(i, 0) if kind == "state" else forward.output(i))
        for cut in cuts:
            if cut in needed:
                read(cut, forward.cut(cut))
        for part in source.non_sequences:
            if part.inner in needed:
                inner = part.inner.type()
                self.loop.non_sequences.append(NonSequence(part.outer, inner))
                self.replacements[part.inner] = inner

    def drop_unread_sequences(self) -> None:
        read = set(ancestors(self.loop.body_outputs()))
        self.loop.sequences = [part for part in self.loop.sequences if part.row in read]


def is_null(variable: Variable) -> bool:
    """Whether a cotangent is undefined."""
    return isinstance(variable.type, NullType)


def finish(
    outer: Variable, value: Variable | None, undefined: Variable | None, reaches: bool
) -> Variable:
    """Return the cotangent of an input, given what was found for it."""
    if not reaches or not (is_tensor(outer) or value is not None):
        return pg.disconnected_type()
    if undefined is not None:
        return undefined
    if value is not None:
        return value
    dtype = outer.type.dtype if is_differentiable(outer) else config.floatX
    return pt.zeros_like(outer, dtype=dtype)


def reachable(op: Scan, given: OuterOutputs) -> list[bool]:
    """Return, for each input, whether it reaches an output whose cotangent is connected."""
    connected = [is_connected(g) for group in given for g in group]
    return [
        any(reaches and live for reaches, live in zip(row, connected, strict=True))
        for row in connection_pattern(op)
    ]


@dataclass
class _Collector:
    """From the backward loop's results to one cotangent per input of the forward loop."""

    op: Scan
    inputs: Sequence[Variable]
    given: OuterOutputs
    backward: _Backward

    def cotangents(self) -> list[Variable]:
        groups = self.op.signature.split_inputs(list(self.inputs))
        found: list[Variable | None] = [None] * int(self.op.signature.has_n_steps)
        found += [self.sequence(i, outer) for i, outer in enumerate(groups.sequences)]
        found += [self.initial(i) for i in range(len(groups.initials))]
        found += [self.carry(self.backward.carries.get(i)) for i in range(len(groups.carries))]
        found += [self.carry(self.backward.sums.get(i)) for i in range(len(groups.non_sequences))]
        undefined = self.undefined()
        reached = reachable(self.op, self.given)
        rows = zip(self.inputs, found, undefined, reached, strict=True)
        return [finish(*row) for row in rows]

    def undefined(self) -> list[Variable | None]:
        """Return, for each input, the undefined gradient it gets, if it does.

        One that enters the loop reaches all inputs that this result depends on; one that a step
        has for an input stays there, as in `pytensor.scan`: the others have the gradient along
        the paths that exist.
        """
        loop, results = self.backward.forward.loop, self.backward.step.results

        def null(*inner: Variable) -> Variable | None:
            values = (results.get(variable) for variable in inner)
            return next((v for v in values if v is not None and is_null(v)), None)

        spread = [g if is_null(g) else None for group in self.given for g in group]
        own = [None] * int(self.op.signature.has_n_steps)
        own += [null(part.row) for part in loop.sequences]
        own += [null(*state.taps.values()) for state in loop.states]
        own += [null(carry.value) for carry in loop.carries]
        own += [null(part.inner) for part in loop.non_sequences]
        return [
            next((v for v, reaches in zip(spread, row, strict=True) if reaches and v), value)
            for value, row in zip(own, connection_pattern(self.op), strict=True)
        ]

    def carry(self, position: int | None) -> Variable | None:
        if position is None or self.backward.results is None:
            return None
        return self.backward.results.carries[position]

    def sequence(self, i: int, outer: Variable) -> Variable | None:
        """Return a sequence's cotangent, with zeros where no backward step wrote."""
        position = self.backward.rows.get(i)
        if position is None or self.backward.results is None:
            return None
        rows = self.backward.results.outputs[position]
        forward = self.backward.forward
        if forward.loop.stop is None and not forward.truncated:
            return rows
        first: Any = forward.first_walked()
        if forward.loop.reverse and forward.loop.stop is not None:
            first = forward.unread()
        zeros = pt.zeros_like(outer)
        return pt.set_subtensor(zeros[first : first + rows.shape[0]], rows)

    def initial(self, i: int) -> Variable | None:
        """Return the cotangent of a state's initial rows: its own, and what steps owe them."""
        forward = self.backward.forward
        state = forward.loop.states[i]
        entering = self.backward.histories.get(i, HistoryCotangent())
        positions = self.backward.owed.get(i)
        if positions is None or self.backward.results is None:
            return entering.initial
        rows = [pt.expand_dims(self.backward.results.carries[j], 0) for j in positions]
        if not forward.loop.reverse:
            rows = rows[::-1]
        owed = rows[0] if len(rows) == 1 else pt.concatenate(rows)
        if forward.truncated:
            # a_j belongs to the row j steps before the first walked one.
            shift = pt.minimum(forward.length() - forward.walked(), state.depth)
            zeros = pt.zeros_like(owed)
            if forward.loop.reverse:
                owed = pt.concatenate([owed[shift:], zeros[:shift]])
            else:
                owed = pt.concatenate([zeros[:shift], owed[: state.depth - shift]])
        return owed if entering.initial is None else entering.initial + owed
