"""Loops around one matrix recurrence become a `LinearScan` and batches.

A loop is lowered if its recurrent part is one state (or carry) of depth one whose next value
`scanlib.analysis.linear_forms` recognizes; all else that a step computes must be maps of the
step's inputs and that state, stacked as outputs or added up in accumulators ``c ← c + f``. Then

1. the coefficients and offsets of all steps are evaluated as a batch (`over_time.peel`);
2. `LinearScan` gives the history of the state;
3. outputs are evaluated as batches over views of the history;
4. accumulators become sums over time.

The derivative of a loop is a loop of the same form, whose carry holds the cotangents, so it is
lowered by the same rule. It costs memory only for what such a loop stored anyway: the history of
the cotangents is as large as that of the states. A state of which only the last row is read, by
nobody but itself, is not stored.

Several recurrent parts, deeper taps, and states that a step cuts up or joins are first made one
vector (`linear_recurrence`). Loops with `until` stay.
"""

from typing import Any

import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.elemwise import DimShuffle

from scanlib.ops.linker_features import TakesSteps, takes_steps
from scanlib.ops.loop import Carry, Loop, Part, State
from scanlib.ops.loop_rewrite import LowersLoops
from scanlib.ops.lowered.linear_scan import LinearOptions, Parts, history_of
from scanlib.rewrites.edit import detach, replace
from scanlib.rewrites.lower.linear_recurrence import NotLinearError, Roles, find_recurrence
from scanlib.rewrites.over_time.peel import OverTime


class LowerLinearLoops(LowersLoops):
    """Replace loops around a matrix recurrence; see the module's text."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        if not config.scanlib__linear:
            return False
        read = [bool(fgraph.clients.get(out)) for out in node.outputs]
        try:
            new = lower_linear(node, read, by_steps=takes_steps(fgraph))
        except NotLinearError:
            return False
        pairs = zip(node.outputs, new, strict=True)
        replacements = {old: value for old, value in pairs if value is not None}
        replace(fgraph, replacements, "scanlib_linear")
        return True


def explain_linear(node: Apply) -> str | None:
    """Return why a loop is not lowered to a `LinearScan`, None if it can be."""
    try:
        find_recurrence(node, by_steps=TakesSteps())
    except NotLinearError as error:
        return str(error)
    return None


def lower_linear(
    node: Apply, read: list[bool], at_any_cost: bool = False, by_steps: TakesSteps | None = None
) -> list[Variable | None]:
    """Return what replaces each output of a loop that is read, as graphs of its inputs.

    `at_any_cost` is not to ask what the matrices cost; the loop need not have been simplified then.
    `by_steps` marks a linker that takes recurrences step by step. `NotLinearError` if the loop is
    of another form.
    """
    loop, parts = find_recurrence(node, at_any_cost, by_steps)
    detached = detach(loop)
    try:
        rows = detached.checked(loop)
        lowering = LinearLowering(loop, parts, read, rows, by_steps is not None)
        results = lowering.results()
    except NotImplementedError as error:
        raise NotLinearError(f"a step cannot be evaluated as a batch: {error}") from error
    return detached.attach(results)


class LinearLowering:
    """Builds what replaces a loop's outputs."""

    def __init__(
        self,
        loop: Loop,
        parts: Roles,
        read: list[bool],
        sequences: dict[Variable, Variable],
        in_programs: bool,
    ) -> None:
        self.loop = loop
        self.parts = parts
        self.read = read
        self.sequence_values = sequences
        self.over_time = OverTime(loop, sequences, in_programs=in_programs)
        pieces = parts.pieces
        self.pieces = pieces and pieces.changed(lambda size: self.over_time.value(size)[0])
        # The state before all steps, with an axis of time.
        self.start = parts.slots[0].part.initial
        if self.pieces is not None:
            self.start = self.pieces.joined([s.initial(loop.reverse) for s in parts.slots])[None]
        elif isinstance(parts.slots[0].part, Carry):
            self.start = self.start[None]

    def of_slot(self, rows: Variable, k: int) -> Variable:
        """Return the values of one slot in rows of the state."""
        return rows if self.pieces is None else self.pieces.of(rows, k)

    def results(self) -> list[Variable | None]:
        slots, over_time = self.parts.slots, self.over_time
        if self.parts.shift is not None:
            history = self.run_shifted()
            for k, slot in enumerate(slots):
                over_time.add(slot.value, self.of_slot(history, k))
            known = self.last_carries(history)
        else:
            rows, last = self.run()
            if rows is not None:
                before, after = rows[:-1], rows[1:]
                if self.loop.reverse:
                    before, after = after, before
                for k, slot in enumerate(slots):
                    over_time.add(slot.next, self.of_slot(after, k))
                # What is both, such as a tap that becomes the one before it, is one of before.
                for k, slot in enumerate(slots):
                    over_time.add(slot.value, self.of_slot(before, k))
            known = {slot.part: self.of_part(slot.part, rows, last) for slot in slots}
        return over_time.results(self.loop, self.read, known, self.parts.sums)

    def of_part(self, part: State | Carry, rows: Variable | None, last: Variable) -> Variable:
        """Return the result of one part, given the history, if there is one, and its last row."""
        slots = {slot.tap: k for k, slot in enumerate(self.parts.slots) if slot.part is part}
        if isinstance(part, Carry):
            return self.of_slot(last, slots[-1])[0]
        reverse = self.loop.reverse
        if part.untraced or rows is None:
            found = [self.of_slot(last, slots[tap]) for tap in sorted(slots, reverse=reverse)]
        else:
            found = [self.of_slot(rows, slots[-1])]
            if len(slots) > 1:
                more = part.initial[1:] if reverse else part.initial[:-1]
                found.insert(len(found) if reverse else 0, more)
        return pt.concatenate(found)

    def reads_states(self) -> bool:
        """Whether anything but the recurrence reads the states."""
        states = {v for slot in self.parts.slots for v in (slot.value, slot.next)}
        fixed = [whole.inner for whole in self.loop.non_sequences]
        others = [value for _, value in self.parts.sums]
        others += [output.value for output in self.loop.outputs]
        return not states.isdisjoint(ancestors(others, blockers=[*states, *fixed]))

    def run(self) -> tuple[Variable | None, Variable]:
        """Return the history, if it is needed, and its last row."""
        loop = self.loop
        stored = [slot.part for slot in self.parts.slots if isinstance(slot.part, State)]
        traced = not all(part.untraced for part in stored) or self.reads_states()
        options, parts = self.recurrence(traced)
        told = parts.offset is not None or options.coefficient == "steps"
        n_steps = loop.length() if loop.n_steps is not None or not told else None
        out = history_of(options, parts._replace(n_steps=n_steps, initial=self.start))
        if not traced:
            return None, out
        return out, out[:1] if loop.reverse else out[-1:]

    def run_shifted(self) -> Variable:
        """Return all values of ``u = c + g``; see `linear_recurrence.shift_carries`."""
        assert self.parts.shift is not None
        options, parts = self.recurrence(True)
        shift = self.full_rows(self.parts.shift)
        first, later = (slice(-1, None), slice(None, -1))
        earlier = slice(1, None)
        if not self.loop.reverse:
            first, later, earlier = slice(None, 1), slice(1, None), slice(None, -1)
        if options.coefficient == "steps":
            parts = parts._replace(matrix=parts.matrix[earlier])
        offset = shift[later] if parts.offset is None else shift[later] + parts.offset[earlier]
        initial = self.start + shift[first]
        return history_of(options, parts._replace(offset=offset, initial=initial))

    def last_carries(self, history: Variable) -> dict[Part, Variable]:
        """Return the carries after the last step: one more step, if there was any."""
        row = slice(None, 1) if self.loop.reverse else slice(-1, None)
        here = OverTime(
            self.loop,
            {inner: values[row] for inner, values in self.sequence_values.items()},
            pt.minimum(self.loop.length(), 1),
            self.over_time.in_programs,
        )
        for k, slot in enumerate(self.parts.slots):
            here.add(slot.value, self.of_slot(history[row], k))
        return {
            slot.part: pt.concatenate([here.rows(slot.next), slot.part.initial[None]])[0]
            for slot in self.parts.slots
        }

    def recurrence(self, traced: bool) -> tuple[LinearOptions, Parts]:
        """Choose the form of the recurrence, and lay out what it reads."""
        recurrence, ndim = self.parts.recurrence, self.start.type.ndim - 1
        matrix, has_time = self.over_time.value(recurrence.matrix)
        if 1 in matrix.type.shape[-2:]:  # all states become the same, or are read alike
            size = self.sizes()[recurrence.axis]
            matrix = pt.broadcast_to(matrix, (*tuple(matrix.shape)[:-2], size, size))
        lead = int(has_time)
        others = [matrix.type.shape[lead + k] == 1 for k in range(ndim - 1)]
        state = [k for k in range(ndim) if k != recurrence.axis]
        side, vector = "left", True
        batch = state
        if ndim > 1 and recurrence.semiring == "real":
            companion = ndim - 2 if recurrence.axis == ndim - 1 else ndim - 1
            if recurrence.axis < ndim - 2:
                raise NotLinearError("the matrix acts on an axis that is not among the last two")
            if others[state.index(companion)]:
                vector = False
                side = "right" if recurrence.axis == ndim - 1 else "left"
                batch = [k for k in state if k != companion]
            elif recurrence.axis != ndim - 1:
                raise NotLinearError("the matrix differs between the columns of the state")
        time = [0] if has_time else []
        used = [state.index(k) for k in batch]
        if all(others[k] for k in used):
            kept: list[int] = []
        else:
            kept = [lead + k for k in used]
            sizes = [self.sizes()[k] for k in batch]
            target = list(matrix.shape)
            for k, size in zip(kept, sizes, strict=True):
                target[k] = size
            matrix = pt.broadcast_to(matrix, target)
        end = [matrix.type.ndim - 2, matrix.type.ndim - 1]
        matrix = matrix.dimshuffle(*time, *kept, *(end[::-1] if side == "right" else end))
        if vector and not kept:
            side, matrix = _untransposed(side, matrix)
        options = LinearOptions(
            recurrence.semiring,
            "steps" if has_time else "fixed",
            side,
            vector,
            self.loop.reverse,
            untraced=not traced,
            required_steps=self.loop.required_steps,
            name=self.loop.name,
            function=self.loop.function,
        )
        offset = None if recurrence.offset is None else self.full_rows(recurrence.offset)
        mask = self.parts.mask
        if mask is not None:  # as the matrix stands beside the state
            mask, _ = self.over_time.value(mask)
            mask = mask if side == "left" else mask.T
        return options, Parts(None, matrix, offset, None, mask)

    def sizes(self) -> list[Variable]:
        """Return the shape of the state."""
        return list(self.start.shape)[1:]

    def full_rows(self, offset: Variable) -> Variable:
        """Return the values of a body variable at all steps, of the state's shape."""
        if offset.type.ndim != self.start.type.ndim - 1:
            raise NotLinearError("the offset has another rank than the state")
        value, has_time = self.over_time.value(offset)
        state = self.start.type.shape[1:]
        row = value.type.shape[1:] if has_time else value.type.shape
        full = all(a != 1 or b == 1 for a, b in zip(row, state, strict=True))
        if has_time and full:
            return pt.cast(value, self.start.type.dtype)
        value = value if has_time else value[None]
        return pt.broadcast_to(value, (self.loop.length(), *self.sizes()))


def _untransposed(side: str, matrix: Variable) -> tuple[str, Variable]:
    """Return a side and matrix without a transposition: a vector may stand on either."""
    own: list[Any] = list(range(matrix.type.ndim))
    turned = [*own[:-2], own[-1], own[-2]]
    base, order, found = matrix, own, (side, matrix)
    while base.owner is not None and isinstance(base.owner.op, DimShuffle):
        before = base.owner.op.new_order
        base, order = base.owner.inputs[0], [o if o == "x" else before[o] for o in order]
        if order in (own, turned) and base.type.ndim == len(own):
            other = "right" if side == "left" else "left"
            found = (side if order == own else other), base
    return found
