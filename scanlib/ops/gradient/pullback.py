"""Reverse mode: one loop that walks the steps backwards. See the package for the algebra."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.tensor.type import TensorType

from scanlib.ops.gradient.cotangents import HistoryCotangent, enter, split_history, total_of
from scanlib.ops.gradient.forward import ForwardValues, drawn_values
from scanlib.ops.gradient.step_pullback import (
    StepPullback,
    as_dtype,
    cotangent_type,
    is_connected,
    is_null,
    is_usable,
)
from scanlib.ops.graph import Variables, conform, is_differentiable, is_tensor, row_type, zeros_like
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Part, State
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.messages import loop_title
from scanlib.ops.row_ops.ran_steps import is_mask
from scanlib.ops.scan import Scan


def pullback(
    op: Scan, inputs: Variables, outputs: Variables, cotangents: Variables
) -> list[Variable]:
    """Return the cotangents of a loop's inputs, reading forward values in its outputs.

    See `pytensor.graph.op.Op.pullback`.
    """
    loop = Loop.from_op(op, list(inputs))
    given = dict(zip(loop.parts, cotangents, strict=True))
    # Where an integer is differentiated as well, integer results have cotangents, which are zero.
    smooth = {
        part: g if is_differentiable(value) else pg.disconnected_type()
        for (part, g), value in zip(given.items(), loop.body_outputs(), strict=False)
    }
    step = StepPullback(loop)
    step.activate({part for part, g in smooth.items() if is_usable(g)})
    step.differentiate()
    if not op.recompute:
        step.read_stored_results()
    stored = op.signature.split_outputs(outputs)
    forward = ForwardValues(loop, stored.histories, stored.outputs)
    _store_what_is_missing(forward, step)
    backward = _Backward(forward, step, smooth)
    backward.build()
    return backward.cotangents(op, inputs, cotangents)


def _store_what_is_missing(forward: ForwardValues, step: StepPullback) -> None:
    """Run the forward loop with more outputs if the backward steps read what it dropped."""
    loop, values = forward.loop, step.values()
    cuts = drawn_values(values, [*loop.body_inputs(), *step.stored])
    needed = set(ancestors(values, blockers=cuts))
    carries = [carry for carry in loop.carries if carry.value in needed]
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

    The dictionaries map a part of the forward loop to what holds its cotangent in the backward
    loop; `owed` maps a state to the carries ``a_1 … a_K``, a carry to its one.
    """

    forward: ForwardValues
    step: StepPullback
    given: dict[Part, Variable]
    loop: Loop = field(default_factory=Loop)
    owed: dict[State | Carry, list[Carry]] = field(default_factory=dict)
    sums: dict[NonSequence, Carry] = field(default_factory=dict)
    rows: dict[SequencePart, Output] = field(default_factory=dict)
    histories: dict[State, HistoryCotangent] = field(default_factory=dict)
    replacements: dict[Variable, Variable] = field(default_factory=dict)
    results: dict[Part, Variable] = field(default_factory=dict)

    def build(self) -> None:
        source = self.forward.loop
        name = f"{source.name}_gradient" if source.name else "gradient"
        self.loop = Loop(
            reverse=not source.reverse,
            name=name,
            function=source.function,
            recompute=source.recompute,
        )
        for state in source.states:
            if is_usable(self.given[state]):
                cotangent = as_dtype(self.given[state], state.initial)
                self.histories[state] = split_history(cotangent, state.depth, source.reverse)
        self.add_entering_cotangents()
        self.add_owed()
        self.add_sums()
        self.add_forward_values()
        if not self.loop.body_outputs():
            return
        self.loop.n_steps = self.forward.walked()
        self.loop.substitute(self.replacements)
        self.loop.drop_unread_inputs()
        masks = self.forward.ran()
        if self.loop.sequences or any(map(is_mask, masks)):
            self.loop.n_steps = None
        for mask in masks:
            self.add_sequence(mask)
        self.results = self.loop.results()

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
        return None if value is None or is_null(value) else value

    # What enters from outside and from later steps

    def add_entering_cotangents(self) -> None:
        for part, total in self.step.cotangents.items():
            if isinstance(part, Output):
                value = self.output_cotangent(part, total)
            elif isinstance(part, Carry):
                final = self.given[part]
                is_given = is_usable(final)
                start = as_dtype(final, total) if is_given else pt.zeros_like(part.initial)
                self.owed[part] = [self.add_carry(start, total.type)]
                value = self.owed[part][0].value
            else:
                value = self.state_cotangent(part, total)
            self.replacements[total] = conform(value, total.type)

    def state_cotangent(self, state: State, total: Variable) -> Variable:
        """Return what enters a backward step for a state, and add the carries of what is owed."""
        entering = self.histories.get(state, HistoryCotangent())
        zero = pt.zeros_like(state.initial[0])
        first = zero if entering.last is None else entering.last
        starts = [first] + [zero] * (state.depth - 1)
        if entering.ends is not None:
            ends = [entering.ends[state.depth - j] for j in range(1, state.depth + 1)]
            starts = [a if b is zero else a + b for a, b in zip(ends, starts, strict=True)]
        self.owed[state] = [self.add_carry(start, total.type) for start in starts]
        value = self.owed[state][0].value
        if entering.rows is not None:
            value = value + self.add_sequence(self.forward.walk(entering.rows))
        self.check_shape(state, value)
        return value

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

    def output_cotangent(self, output: Output, total: Variable) -> Variable:
        """Return what enters a backward step for an output."""
        source, rows = self.forward.loop, as_dtype(self.given[output], total)
        if source.stop is not None and not source.reverse:
            return enter(self.loop, rows, total.type, walk=self.forward.walk)
        return self.add_sequence(self.forward.walk(rows))

    # What one backward step computes

    def add_owed(self) -> None:
        """``a_j ← a_{j+1} + d_j`` for states; the plain cotangent for carries."""
        for part, carries in self.owed.items():
            for j, (carry, later) in enumerate(zip_longest(carries, carries[1:]), 1):
                own = self.gradient_of(part.taps.get(-j))
                kept = None if later is None else later.value
                value = total_of([kept, own])
                value = pt.zeros_like(carry.value) if value is None else value
                carry.next = conform(value, carry.type)

    def add_sums(self) -> None:
        """Sums over time for non-sequences, stacked rows for sequences."""
        source = self.forward.loop
        for part in source.non_sequences:
            own = self.gradient_of(part.inner)
            if own is not None:
                kind = cotangent_type(part.inner, own)
                self.sums[part] = carry = self.add_carry(zeros_like(part.outer, kind.dtype), kind)
                carry.next = conform(carry.value + own, carry.type)
        for sequence in source.sequences:
            own = self.gradient_of(sequence.row)
            if own is not None:
                self.rows[sequence] = Output(conform(own, sequence.row.type))
        self.loop.outputs += self.rows.values()

    # What a backward step reads of the forward loop

    def add_forward_values(self) -> None:
        forward, source = self.forward, self.forward.loop
        cuts = [key for key in forward.stored if isinstance(key, Variable)]
        needed = set(ancestors(self.step.values(), blockers=cuts))

        def read(inner: Variable, rows: Callable[[], Variable]) -> None:
            if inner in needed:
                self.replacements[inner] = conform(self.add_sequence(rows()), inner.type)

        for sequence in source.sequences:
            read(sequence.row, partial(forward.sequence, sequence.outer))
        for recurrent in source.recurrent:
            for offset, tap in recurrent.taps.items():
                read(tap, partial(forward.tap, recurrent, offset))
        for placeholder, stored in self.step.stored.items():
            read(placeholder, partial(forward.rows, stored))
        for cut in cuts:
            read(cut, partial(forward.rows, cut))
        for part in source.non_sequences:
            if part.inner in needed:
                inner = part.inner.type()
                self.loop.non_sequences.append(NonSequence(part.outer, inner))
                self.replacements[part.inner] = inner

    # From the results to one cotangent per input of the forward loop

    def cotangents(self, op: Scan, inputs: Variables, given: Variables) -> list[Variable]:
        """Return the cotangents of a loop's inputs, given those of all of its results."""
        loop = self.forward.loop
        sums = [self.sums.get(part) for part in loop.non_sequences]
        found: list[Variable | None] = [None] * int(op.signature.has_n_steps)
        found += [self.of_sequence(part) for part in loop.sequences]
        found += [self.of_initial(state) for state in loop.states]
        found += [self.owed_to(carry)[0] for carry in loop.carries]
        found += [None if part is None else self.results.get(part) for part in sums]
        rows = zip(inputs, found, self.undefined(op, given), reachable(op, given), strict=True)
        return [finish(*row) for row in rows]

    def owed_to(self, part: State | Carry) -> list[Variable | None]:
        """Return what steps owe to a part, the step before the first one first."""
        carries = self.owed.get(part, [])
        return [self.results.get(carry) for carry in carries] or [None]

    def undefined(self, op: Scan, given: Variables) -> list[Variable | None]:
        """Return, for each input, the undefined gradient it gets, if it does.

        One that enters the loop reaches all inputs that this result depends on; one that a step
        has for an input stays there, as in `pytensor.scan`: the others have the gradient along
        the paths that exist.
        """
        loop, results = self.forward.loop, self.step.results

        def null(*inner: Variable) -> Variable | None:
            values = (results.get(variable) for variable in inner)
            return next((v for v in values if v is not None and is_null(v)), None)

        spread = [g if is_null(g) else None for g in given]
        own = [None] * int(op.signature.has_n_steps)
        own += [null(part.row) for part in loop.sequences]
        own += [null(*part.taps.values()) for part in loop.recurrent]
        own += [null(part.inner) for part in loop.non_sequences]
        return [
            next((v for v, reaches in zip(spread, row, strict=True) if reaches and v), value)
            for value, row in zip(own, op.connection_pattern(), strict=True)
        ]

    def of_sequence(self, part: SequencePart) -> Variable | None:
        """Return a sequence's cotangent, with zeros where no backward step wrote."""
        output, forward = self.rows.get(part), self.forward
        if output is None:
            return None
        rows = self.results[output]
        if forward.loop.stop is None and not forward.truncated:
            return rows
        first: Any = forward.first_walked()
        if forward.loop.reverse and forward.loop.stop is not None:
            first = forward.unread()
        zeros = pt.zeros_like(part.outer)
        return pt.set_subtensor(zeros[first : first + rows.shape[0]], rows)

    def of_initial(self, state: State) -> Variable | None:
        """Return the cotangent of a state's initial rows: its own, and what steps owe them."""
        forward, entering = self.forward, self.histories.get(state, HistoryCotangent())
        rows = [pt.expand_dims(row, 0) for row in self.owed_to(state) if row is not None]
        if not rows:
            return entering.initial
        if not forward.loop.reverse:
            rows = rows[::-1]
        owed = pt.concatenate(rows)
        if forward.truncated:
            # a_j belongs to the row j steps before the first walked one.
            shift = pt.minimum(forward.length() - forward.walked(), state.depth)
            zeros = pt.zeros_like(owed)
            if forward.loop.reverse:
                owed = pt.concatenate([owed[shift:], zeros[:shift]])
            else:
                owed = pt.concatenate([zeros[:shift], owed[: state.depth - shift]])
        return owed if entering.initial is None else entering.initial + owed


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


def reachable(op: Scan, given: Variables) -> list[bool]:
    """Return, for each input, whether it reaches an output whose cotangent is connected."""
    connected = [is_connected(g) for g in given]
    return [
        any(reaches and live for reaches, live in zip(row, connected, strict=True))
        for row in op.connection_pattern()
    ]
