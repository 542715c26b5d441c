"""From arguments and a step to a canonical loop: what `scan`, `loop` and direct functions share."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.sharedvalue import SharedVariable, collect_new_shareds
from pytensor.graph.basic import Constant, Variable
from pytensor.tensor.subtensor import Subtensor
from pytensor.tensor.variable import TensorVariable

from scanlib._compat import variable_number
from scanlib.frontend.arguments import OutputArgument, SequenceArgument, tap_name
from scanlib.frontend.generators import check_generators
from scanlib.frontend.methods import check_checkpoint, solve
from scanlib.frontend.states import adapt_initial, type_text, wanted_type, warn_of_rounding
from scanlib.frontend.step_function import (
    StepResult,
    captured_variables,
    check_strict,
    errors_of,
    read_updates,
)
from scanlib.frontend.values import advice
from scanlib.ops.composites import composites
from scanlib.ops.counted_rows import read_counted_rows
from scanlib.ops.graph import depends_on, index_text, is_tensor, row_type
from scanlib.ops.logaddexp import stable_logs
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Part, Results, State, past_rows
from scanlib.ops.loop import Sequence as SequencePart
from scanlib.ops.lowered.newton_scan import Newton
from scanlib.ops.messages import loop_title
from scanlib.ops.shapes import output_row_shapes

MAX_TRACES = 8
OVER_TIME = "[t]"  # behind the name of what has a row for each step
_called: ContextVar[str | None] = ContextVar("called", default=None)


@contextmanager
def called_as(function: str | None) -> Iterator[None]:
    """Have messages begin with the function that the user has called, in place of `scan` or `loop`.

    Loops that a step holds are none of it.
    """
    token = _called.set(function)
    try:
        yield
    finally:
        _called.reset(token)


def function_called(own: str) -> str:
    """Return the function that the user has called for a loop that `own` builds."""
    return _called.get() or own


@dataclass
class Trace:
    """One call of a step: the loop so far, its state or carry for each output that has one.

    What was made in the call, or after it, has a `variable_number` of at least `first`.
    """

    loop: Loop
    parts: dict[int, State | Carry]
    first: int
    result: StepResult
    new_shared: list[SharedVariable]


@dataclass
class Built:
    """A loop that was applied.

    `values` holds, for each output of the step, its values over time; for a carry its last value.
    `shared` has the last values of the shared variables that the step updates, `taken` the names
    of what the loop was given.
    """

    results: Results
    values: list[Variable]
    shared: dict[SharedVariable, Variable]
    taken: set[str | None]

    def free_name(self, name: str | None, rows: str = OVER_TIME) -> str | None:
        """Return a name for rows that no input has: `eval` finds inputs by their names."""
        return f"{name}{rows}" if name and name in self.taken else name


@dataclass
class LoopBuilder:
    """Traces a step and builds its loop.

    Messages begin with `function`, what the user called for the loop. `call` calls the user's step
    with variables, each with a text for messages: rows, then past values of the states and carries;
    it returns the next values of `outputs`, then more outputs. `rows` are sequences, taps, and the
    rows that these read, one for each step; `outputs` what is known of outputs before the step is
    traced; `non_sequences` what was given whole: with `strict`, all that the step may read from
    outside.
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
            with called_as(None):
                trace = self.trace_once()
            if not self.adapt_states(trace):
                for i, part in trace.parts.items():
                    warn_of_rounding(self.state_title(i), part)
                return trace
        raise TypeError(
            f"{self.title}: the step returns a state of another type each time it is called with "
            "what it returned before; return values of one dtype and shape"
        )

    def trace_once(self) -> Trace:
        loop = Loop(n_steps=self.n_steps, name=self.name, function=self.function)
        arguments: list[tuple[Variable, str]] = []
        for argument, tap, outer in self.rows:
            row = row_type(outer)(name=tap_name(argument.name, tap))
            loop.sequences.append(SequencePart(outer, row, argument.name))
            arguments.append((row, argument.describe_tap(tap)))
        parts: dict[int, State | Carry] = {}
        for i, output in enumerate(self.outputs):
            if output.initial is None:
                continue
            tap_type = output.read_type()
            taps = {tap: tap_type(name=tap_name(output.name, tap)) for tap in output.taps}
            first = next(iter(taps.values()))
            if output.is_carry:
                loop.carries.append(Carry(output.initial, first, first, output.name))
                parts[i] = loop.carries[-1]
            else:
                loop.states.append(State(output.initial, taps, first, name=output.name))
                parts[i] = loop.states[-1]
            arguments += [(value, output.describe_tap(tap)) for tap, value in taps.items()]
        number = variable_number(pt.scalar())
        with collect_new_shareds() as new_shared:
            result = self.call(arguments)
        for i, part in parts.items():
            part.next = result.outputs[i]
            if isinstance(part, Carry) and not part.type.is_super(part.next.type):
                raise TypeError(
                    f"{self.state_title(i)} starts as {type_text(part.type)}, the step "
                    f"returns {type_text(part.next.type)}; return the next value of what it is "
                    "given"
                )
        return Trace(loop, parts, number, result, list(new_shared))

    def adapt_states(self, trace: Trace, weak_integers: bool = False) -> bool:
        """Widen initial values where the step returned something wider; say whether any was.

        Weak integers come last: other states may yet make floats of them.
        """
        changed = False
        for i, state in trace.parts.items():
            output, title = self.outputs[i], self.state_title(i)
            if isinstance(state, Carry):
                continue
            tap_type = output.read_type()
            before = "starts as" if output.tap_type is None else "has become"
            where = f"{title} {before}"
            wanted = wanted_type(tap_type, state.next, where, output.weak_float, weak_integers)
            if wanted == state.type:
                continue
            changed = True
            grown = wanted.shape != tap_type.shape
            sizes = sizes_in_step(trace.loop, state.next) if grown else [None] * wanted.ndim
            adapt_initial(output, wanted, sizes, title)
        return changed or (not weak_integers and self.adapt_states(trace, True))

    def build(
        self, newton: Newton | None = None, reports_end: bool = False, **options: Any
    ) -> Built:
        """Build the loop and apply it; `options` are fields of the `Loop`, such as `reverse`.

        With `reports_end`, the last carry of a loop with a condition says whether that ended it.
        """
        trace = self.trace()
        loop, result, parts = trace.loop, trace.result, trace.parts
        for option, value in options.items():
            setattr(loop, option, value)
        past = self.past_values(trace)
        stacked = [i for i, v in enumerate(result.outputs) if i not in parts and v not in past]
        for i in stacked:
            if not is_tensor(result.outputs[i]):
                raise TypeError(
                    f"{self.title}: output {i} has type {result.outputs[i].type}; "
                    f"only tensors can be stacked over time{advice(result.outputs[i])}"
                )
            loop.outputs.append(Output(result.outputs[i], self.result_name(i, result)))
        stop = result.stop
        loop.stop = pt.neq(stop, 0) if stop is not None and stop.type.dtype != "bool" else stop
        shared = self.add_updates(trace)
        if reports_end and loop.stop is not None:
            loop.carries.append(
                Carry(pt.constant(np.array(False)), pt.scalar(dtype="bool"), loop.stop)
            )
        # First, so that what no step changes of such graphs is read from outside, too.
        outside = captured_variables(loop.body_outputs(), loop.body_inputs(), trace.first)
        loop.substitute(composites(loop.body_outputs(), [*loop.body_inputs(), *outside]))
        captured = add_captured(loop, self.non_sequences, trace.first)
        if self.strict:
            with errors_of(self.title):
                check_strict(captured, self.non_sequences)
        check_checkpoint(loop, self.title)
        loop.substitute(stable_logs(loop.body_outputs()))
        read_counted_rows(loop)
        results = loop.apply() if newton is None else solve(loop, newton, self.title)
        results.node.tag.is_written = True  # by a user: the gradient of a loop draws the same again
        found: dict[Part, Variable] = dict(zip(loop.states, results.histories, strict=True))
        found |= zip(loop.carries, results.carries, strict=True)
        outputs = iter(results.outputs)
        values = []
        for i, value in enumerate(result.outputs):
            part, lag = (parts[i], 0) if i in parts else past.get(value, (None, 0))
            if isinstance(part, State):
                values.append(past_rows(found[part], part.depth, lag, loop.reverse))
            else:
                values.append(next(outputs) if part is None else found[part])
        last = {v: found[part] for v, part in shared.items()}
        built = Built(results, values, last, self.names_taken(loop))
        for i, value in enumerate(values):
            name = self.name if len(values) == 1 or self.name is None else f"{self.name}.{i}"
            name_result(value, built.free_name(self.result_name(i, result) or name))
        return built

    def past_values(self, trace: Trace) -> dict[Variable, tuple[State, int]]:
        """Return the values of states that the step reads or returns, as state and lag.

        An output that is one of them is a part of the history that the state has anyway.
        """
        found = {}
        for state in trace.loop.states:
            if state.next.type.dtype == state.type.dtype:
                found[state.next] = (state, 0)
            found.update({value: (state, -tap) for tap, value in state.taps.items()})
        return found

    def result_name(self, i: int, result: StepResult) -> str | None:
        """Return what an output is called: by the user, or in the step."""
        known = self.outputs[i].name if i < len(self.outputs) else None
        return known or result.outputs[i].name

    def names_taken(self, loop: Loop) -> set[str | None]:
        """Return the names of what the loop is given."""
        given = [argument.variable for argument, _, _ in self.rows]
        given += [output.initial for output in self.outputs if output.initial is not None]
        given += [part.outer for part in loop.non_sequences]
        return {v.name for v in given} | {output.initial_name for output in self.outputs}

    def add_updates(self, trace: Trace) -> dict[SharedVariable, Carry]:
        """Turn the shared variables that change from step to step into carries."""
        loop = trace.loop
        with errors_of(self.title):
            updates = read_updates(trace.result, trace.new_shared, loop.body_outputs())
        places = {value: f"non_sequences[{i}]" for i, value in enumerate(self.non_sequences)}
        places |= {
            part.value: self.outputs[i].argument
            for i, part in trace.parts.items()
            if isinstance(part, Carry)
        }
        check_generators(loop, trace.first, updates, places, self.title)
        shared = {v: Carry(v, v.type(), update, v.name) for v, update in updates.items()}
        loop.carries += shared.values()
        replacements: dict[Variable, Variable] = {}
        for outer in dict.fromkeys(self.non_sequences):
            # What was given whole is the same at every step, also if it was computed from them.
            if outer not in updates and outer in depends_on([outer], updates):
                replacements[outer] = inner = outer.type(name=outer.name)
                loop.non_sequences.append(NonSequence(outer, inner, outer.name))
        replacements.update({v: carry.value for v, carry in shared.items()})
        loop.substitute(replacements)
        return shared


def add_captured(
    loop: Loop, given: Sequence[Variable] = (), first: int | None = None
) -> list[Variable]:
    """Make what a step reads from outside inputs of its loop, what was given first; return it.

    What was given is an input as well where no step reads it, so that `pytensor.function` takes it.
    """
    captured = captured_variables(loop.body_outputs(), loop.body_inputs(), first)
    order = {variable: i for i, variable in enumerate(given)}
    captured.sort(key=lambda variable: order.get(variable, len(order)))
    known = {*captured, *(part.outer for part in loop.non_sequences)}
    known |= {carry.initial for carry in loop.carries}
    unread = [v for v in order if v not in known and not isinstance(v, Constant)]
    inputs = [*captured, *unread]
    own = [NonSequence(outer, outer.type(name=outer.name), outer.name) for outer in inputs]
    loop.non_sequences += own
    loop.substitute({part.outer: part.inner for part in own})
    return captured


def sizes_in_step(loop: Loop, value: Variable) -> list[Variable | None]:
    """Return the sizes of a value of a step, from the sizes of what it reads."""
    sources = loop.sources()
    captured = captured_variables([value], list(sources))
    shapes = [
        list(outer.shape)[lead:] if hasattr(outer.type, "ndim") else None
        for outer, lead in [*sources.values(), *((outer, 0) for outer in captured)]
    ]
    values: list[Variable | None] = [*[None] * len(sources), *captured]
    return output_row_shapes([*sources, *captured], [value], shapes, values)[0]


class LoopResult(TensorVariable):
    """What comes out of a loop. Rows that are read of it are named after it: ``balance[-1]``."""

    def __getitem__(self, index: Any) -> Variable:
        rows = super().__getitem__(index)
        node = rows.owner
        is_part = node is not None and isinstance(node.op, Subtensor) and node.inputs[0] is self
        if self.name and is_part and rows.name is None:
            name_result(rows, f"{self.name.removesuffix(OVER_TIME)}[{index_text(node)}]")
        return rows

    def __str__(self) -> str:
        node = self.owner
        if self.name is None and node is not None and isinstance(node.op, Subtensor):
            return str(node.inputs[0])
        return super().__str__()


def name_result(result: Variable, name: str | None) -> None:
    """Name a result of a loop that was just built."""
    if is_tensor(result):
        result.__class__ = LoopResult
    result.name = name
