"""From arguments and a step to a canonical loop: what `scan` and `loop` share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Variable

from scanlib.frontend.arguments import OutputArgument, SequenceArgument
from scanlib.frontend.checkpoints import check_checkpoint
from scanlib.frontend.generators import check_generators, mark_written
from scanlib.frontend.newton import solve
from scanlib.frontend.states import adapt_initial, type_text, value_sizes, wanted_type
from scanlib.frontend.step_function import (
    StepResult,
    captured_variables,
    check_strict,
    errors_of,
    read_updates,
)
from scanlib.frontend.trace import Trace, describe_row, describe_state, name_result, tap_name
from scanlib.ops.graph import depends_on, is_tensor, row_type
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Results, Sequence, State
from scanlib.ops.lowered.newton_scan import Newton
from scanlib.ops.messages import loop_title

MAX_TRACES = 8


@dataclass
class Built:
    """A loop that was applied, and what its step returned when it was traced.

    `values` holds, for each output of the step, its values over time; for a carry its last value.
    """

    loop: Loop
    trace: Trace
    results: Results
    values: list[Variable]

    @property
    def shared(self) -> dict[SharedVariable, Variable]:
        """The last values of the shared variables that the step updates."""
        carries = self.results.carries[len(self.trace.carries) :]
        return dict(zip(self.trace.shared, carries, strict=False))


@dataclass
class LoopBuilder:
    """Traces a step and builds its loop.

    Parameters
    ----------
    function : str
        What the user called for the loop; messages begin with it.
    call : callable
        Calls the user's step with variables (each with a text for messages): rows, then past values
        of the states and carries. Returns the next values of `outputs`, then more outputs.
    rows : sequence of (SequenceArgument, int, Variable)
        Sequences, taps, and the rows that these read, one for each step.
    outputs : list of OutputArgument
        What is known of outputs before the step is traced.
    name : str, optional
    n_steps : Variable, optional
    non_sequences : list of Variable, optional
        What was given whole; with `strict`, all that the step may read from outside.
    """

    function: str
    call: Callable[[list[tuple[Variable, str]]], StepResult]
    rows: list[tuple[SequenceArgument, int, Variable]]
    outputs: list[OutputArgument]
    name: str | None = None
    n_steps: Variable | None = None
    non_sequences: list[Variable] = field(default_factory=list)
    strict: bool = False

    @property
    def title(self) -> str:
        """What messages call the loop."""
        return loop_title(self.name, self.function)

    def state_title(self, i: int) -> str:
        name = self.outputs[i].name
        label = f"state `{name}`" if name else f"the state of {self.outputs[i].argument}"
        return f"{self.title}: {label}"

    def trace(self) -> Trace:
        """Call the step function until the types of all states are stable."""
        for _ in range(MAX_TRACES):
            trace = self.trace_once()
            if not self.adapt_states(trace):
                return trace
        raise TypeError(
            f"{self.title}: the step returns a state of another type each time it is called with "
            "what it returned before; return values of one dtype and shape"
        )

    def trace_once(self) -> Trace:
        trace = Trace()
        arguments: list[tuple[Variable, str]] = []
        for argument, tap, outer in self.rows:
            row = row_type(outer)(name=tap_name(argument.name, tap))
            trace.rows.append(Sequence(outer, row, argument.name))
            arguments.append((row, describe_row(argument, tap)))
        for i, output in enumerate(self.outputs):
            if output.initial is None:
                continue
            if output.is_carry:
                value = output.initial.type(name=tap_name(output.name, -1))
                trace.carries[i] = Carry(output.initial, value, value, output.name)
                arguments.append((value, describe_state(output, -1)))
                continue
            tap_type = output.tap_type or row_type(output.initial)
            taps = {tap: tap_type(name=tap_name(output.name, tap)) for tap in output.taps}
            first = next(iter(taps.values()))
            trace.states[i] = State(output.initial, taps, first, name=output.name)
            arguments += [(value, describe_state(output, tap)) for tap, value in taps.items()]
        trace.result = self.call(arguments)
        for i, state in trace.states.items():
            state.next = trace.result.outputs[i]
        for i, carry in trace.carries.items():
            carry.next = trace.result.outputs[i]
            self.check_carry(i, carry)
        return trace

    def check_carry(self, i: int, carry: Carry) -> None:
        if not carry.value.type.is_super(carry.next.type):
            raise TypeError(
                f"{self.state_title(i)} starts as {type_text(carry.value.type)}, the step returns "
                f"{type_text(carry.next.type)}; return the next value of what it is given"
            )

    def adapt_states(self, trace: Trace, weak_integers: bool = False) -> bool:
        """Widen initial values where the step returned something wider; say whether any was.

        Weak integers come last: other states may yet make floats of them.
        """
        changed = False
        for i, state in trace.states.items():
            output, title = self.outputs[i], self.state_title(i)
            tap_type = output.tap_type or row_type(output.initial)
            wanted = wanted_type(tap_type, state.next, title, output.is_weak, weak_integers)
            if wanted == next(iter(state.taps.values())).type:
                continue
            changed = True
            grown = wanted.shape != tap_type.shape
            sizes = self.sizes(trace, state.next) if grown else [None] * wanted.ndim
            adapt_initial(output, wanted, sizes, title)
        return changed or (not weak_integers and self.adapt_states(trace, True))

    def sizes(self, trace: Trace, value: Variable) -> list[Variable | None]:
        placeholders = trace.placeholders()
        captured = captured_variables([value], placeholders)
        return value_sizes(value, placeholders, trace.row_shapes(), captured)

    def build(
        self, newton: Newton | None = None, reports_end: bool = False, **options: Any
    ) -> Built:
        """Build the loop and apply it; `options` are fields of the `Loop`, such as `reverse`.

        With `reports_end`, the last carry of a loop with a condition says whether that ended it.
        """
        trace = self.trace()
        result = trace.result
        assert result is not None
        past = self.past_values(trace)
        stacked = [
            i
            for i, value in enumerate(result.outputs)
            if i not in trace.states and i not in trace.carries and value not in past
        ]
        for i in stacked:
            if not is_tensor(result.outputs[i]):
                raise TypeError(
                    f"{self.title}: output {i} has type {result.outputs[i].type}; "
                    "only tensors can be stacked over time"
                )
        stop = result.stop
        loop = Loop(
            n_steps=self.n_steps,
            sequences=trace.rows,
            states=list(trace.states.values()),
            carries=list(trace.carries.values()),
            outputs=[Output(result.outputs[i], self.result_name(i, result)) for i in stacked],
            stop=pt.neq(stop, 0) if stop is not None and stop.type.dtype != "bool" else stop,
            name=self.name,
            function=self.function,
            **options,
        )
        self.add_updates(loop, trace)
        if reports_end and loop.stop is not None:
            loop.carries.append(
                Carry(pt.constant(np.array(False)), pt.scalar(dtype="bool"), loop.stop)
            )
        self.add_captured(loop)
        check_checkpoint(loop, self.title)
        results = loop.apply() if newton is None else solve(loop, newton, self.title)
        mark_written(results.node)
        values: dict[int, Variable] = {}
        for i, history in zip(trace.states, results.histories, strict=True):
            values[i] = past_rows(history, loop.states[len(values)].depth, 0, loop.reverse)
        values.update(zip(trace.carries, results.carries, strict=False))
        values.update(zip(stacked, results.outputs, strict=True))
        position = {i: k for k, i in enumerate(trace.states)}
        for i, value in enumerate(result.outputs):
            if i not in values:
                state, lag = past[value]
                k = position[state]
                history = results.histories[k]
                values[i] = past_rows(history, loop.states[k].depth, lag, loop.reverse)
        for i, value in values.items():
            name = self.name if len(values) == 1 or self.name is None else f"{self.name}.{i}"
            name_result(value, self.result_name(i, result) or name)
        return Built(loop, trace, results, [values[i] for i in range(len(result.outputs))])

    def past_values(self, trace: Trace) -> dict[Variable, tuple[int, int]]:
        """Return the values of states that the step reads or returns, as state and lag.

        An output that is one of them is a part of the history that the state has anyway.
        """
        found = {}
        for i, state in trace.states.items():
            row = next(iter(state.taps.values())).type
            if state.next.type.dtype == row.dtype:
                found[state.next] = (i, 0)
            found.update({value: (i, -tap) for tap, value in state.taps.items()})
        return found

    def result_name(self, i: int, result: StepResult) -> str | None:
        """Return what an output is called: by the user, or in the step."""
        known = self.outputs[i].name if i < len(self.outputs) else None
        return known or result.outputs[i].name

    def add_updates(self, loop: Loop, trace: Trace) -> None:
        """Turn the shared variables that change from step to step into carries."""
        assert trace.result is not None
        with errors_of(self.title):
            updates = read_updates(trace.result, loop.body_outputs())
        values = [*loop.body_outputs(), *updates.values()]
        places = {value: f"non_sequences[{i}]" for i, value in enumerate(self.non_sequences)}
        places |= {carry.value: self.outputs[i].argument for i, carry in trace.carries.items()}
        check_generators(values, trace, updates, places, self.title)
        for shared, update in updates.items():
            carry = Carry(shared, shared.type(), update, shared.name)
            trace.shared[shared] = carry
            loop.carries.append(carry)
        replacements: dict[Variable, Variable] = {}
        for outer in dict.fromkeys(self.non_sequences):
            # What was given whole is the same at every step, also if it was computed from them.
            if outer not in updates and outer in depends_on([outer], updates):
                replacements[outer] = inner = outer.type(name=outer.name)
                loop.non_sequences.append(NonSequence(outer, inner, outer.name))
        replacements.update({shared: carry.value for shared, carry in trace.shared.items()})
        loop.substitute(replacements)

    def add_captured(self, loop: Loop) -> None:
        """Make what the step reads from outside an input of the loop."""
        captured = captured_variables(loop.body_outputs(), loop.body_inputs())
        if self.strict:
            with errors_of(self.title):
                check_strict(captured, self.non_sequences)
        given = {variable: i for i, variable in enumerate(self.non_sequences)}
        captured.sort(key=lambda variable: given.get(variable, len(given)))
        replacements = {}
        for outer in captured:
            inner = outer.type(name=outer.name)
            loop.non_sequences.append(NonSequence(outer, inner, outer.name))
            replacements[outer] = inner
        loop.substitute(replacements)


def past_rows(history: Variable, depth: int, lag: int, reverse: bool) -> Variable:
    """Return the rows of a history that steps read, or with lag 0 write: one for each step."""
    first, last = (lag, lag - depth) if reverse else (depth - lag, -lag)
    return history[first or None : last or None]
