"""`scan`: from a step function to a canonical loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Variable

from scanlib.config import check_flags
from scanlib.frontend.arguments import (
    OutputArgument,
    SequenceArgument,
    as_list,
    check_lengths,
    check_mode,
    read_n_steps,
    read_name,
    read_outputs_info,
    read_rows,
    read_sequences,
    read_truncation,
)
from scanlib.frontend.checkpoints import check_checkpoint, read_checkpoint
from scanlib.frontend.generators import check_generators, mark_written
from scanlib.frontend.newton import read_method, solve
from scanlib.frontend.states import adapt_initial, type_text, value_sizes, wanted_type
from scanlib.frontend.step import (
    StepResult,
    call_step,
    captured_variables,
    check_strict,
    errors_of,
    read_updates,
)
from scanlib.frontend.trace import (
    Trace,
    check_count,
    describe_row,
    describe_state,
    describe_whole,
    name_result,
    tap_name,
)
from scanlib.frontend.values import as_variable, read_flag
from scanlib.ops.checkpoint_schedules import Schedule
from scanlib.ops.graph import depends_on, is_tensor, row_type
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Sequence, State
from scanlib.ops.messages import loop_title
from scanlib.ops.newton_scan import Newton

MAX_TRACES = 8

_function: ContextVar[str] = ContextVar("function", default="scan")


@contextmanager
def called_as(function: str) -> Iterator[None]:
    """Have messages begin with another function than `scan`, which the user has called."""
    token = _function.set(function)
    try:
        yield
    finally:
        _function.reset(token)


class _Builder:
    """Collects the arguments of one `scan` call and builds its loop."""

    def __init__(
        self,
        fn: Callable[..., Any],
        sequences: list[SequenceArgument],
        outputs: list[OutputArgument],
        non_sequences: list[Variable],
        n_steps: Variable | None,
        go_backwards: bool,
        strict: bool,
        name: str | None,
    ) -> None:
        self.fn = fn
        self.sequences = sequences
        self.outputs = outputs
        self.non_sequences = non_sequences
        self.n_steps = n_steps
        self.go_backwards = go_backwards
        self.strict = strict
        self.name = name
        self.title = loop_title(name, _function.get())

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
        for argument, tap, outer in read_rows(self.sequences, self.n_steps, self.go_backwards):
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
        arguments += [
            (value, describe_whole(value.name, f"non_sequences[{i}]"))
            for i, value in enumerate(self.non_sequences)
        ]
        trace.result = call_step(self.fn, arguments, self.title)
        check_count(self.fn, trace.result, self.outputs, self.title)
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
            tap_type = next(iter(state.taps.values())).type
            is_weak, title = self.outputs[i].is_weak, self.state_title(i)
            wanted = wanted_type(tap_type, state.next, title, is_weak, weak_integers)
            if wanted == tap_type:
                continue
            changed = True
            grown = wanted.shape != tap_type.shape
            sizes = self.sizes(trace, state.next) if grown else [None] * wanted.ndim
            adapt_initial(self.outputs[i], wanted, sizes, self.state_title(i))
        return changed or (not weak_integers and self.adapt_states(trace, True))

    def sizes(self, trace: Trace, value: Variable) -> list[Variable | None]:
        placeholders = trace.placeholders()
        captured = captured_variables([value], placeholders)
        return value_sizes(value, placeholders, trace.row_shapes(), captured)

    def build(
        self, truncate_gradient: int, checkpoint: Schedule | None, newton: Newton | None = None
    ) -> tuple[list[Variable], dict[Any, Variable]]:
        trace = self.trace()
        result = trace.result
        assert result is not None
        stacked = [
            i
            for i in range(len(result.outputs))
            if i not in trace.states and i not in trace.carries
        ]
        for i in stacked:
            if not is_tensor(result.outputs[i]):
                raise TypeError(
                    f"{self.title}: output {i} has type {result.outputs[i].type}; "
                    "only tensors can be stacked over time"
                )
        loop = Loop(
            n_steps=self.n_steps,
            sequences=trace.rows,
            states=list(trace.states.values()),
            carries=list(trace.carries.values()),
            outputs=[Output(result.outputs[i], self.result_name(i, result)) for i in stacked],
            stop=None
            if result.stop is None
            else pt.neq(result.stop, 0)
            if result.stop.type.dtype != "bool"
            else result.stop,
            truncate_gradient=truncate_gradient,
            name=self.name,
            checkpoint=checkpoint,
        )
        if loop.n_steps is None and not loop.sequences:
            raise ValueError(
                f"{self.title}: nothing says how many steps to take; give n_steps or a sequence"
            )
        self.add_updates(loop, trace)
        self.add_captured(loop)
        check_checkpoint(loop, self.title)
        results = loop.apply() if newton is None else solve(loop, newton, self.title)
        mark_written(results.node)
        values: dict[int, Variable] = {}
        for history, state, i in zip(results.histories, loop.states, trace.states, strict=True):
            values[i] = history[state.depth :]
        values.update(zip(trace.carries, results.carries, strict=False))
        values.update(zip(stacked, results.outputs, strict=True))
        for i, value in values.items():
            name = self.name if len(values) == 1 or self.name is None else f"{self.name}.{i}"
            name_result(value, self.result_name(i, result) or name)
        updates = dict(zip(trace.shared, results.carries[len(trace.carries) :], strict=True))
        return [values[i] for i in range(len(result.outputs))], updates

    def result_name(self, i: int, result: StepResult) -> str | None:
        """Return what an output is called: by the user, or in the step."""
        return (self.outputs[i].name if self.outputs else None) or result.outputs[i].name

    def add_updates(self, loop: Loop, trace: Trace) -> None:
        """Turn the shared variables that change from step to step into carries."""
        assert trace.result is not None
        with errors_of(self.title):
            updates = read_updates(trace.result, loop.body_outputs())
        values = [*loop.body_outputs(), *updates.values()]
        check_generators(values, trace, updates, self.non_sequences, self.title)
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


def scan(
    fn: Callable[..., Any],
    sequences: Any = None,
    outputs_info: Any = None,
    non_sequences: Any = None,
    n_steps: Any = None,
    truncate_gradient: int = -1,
    go_backwards: bool = False,
    mode: Any = None,
    name: str | None = None,
    profile: Any = False,
    allow_gc: bool | None = None,
    strict: bool = False,
    return_list: bool = False,
    return_updates: bool = True,
    checkpoint: Any = None,
    method: Any = "sequential",
) -> Any:
    """Build a symbolic loop.

    Parameters
    ----------
    fn : callable
        One step. It is called once with symbolic variables: all taps of the first sequence,
        of the second …, then all taps of the first output that has some, of the second …,
        then the non-sequences. It returns the outputs (a variable, or a list), optionally
        followed by updates of shared variables (a dict, or a list of pairs), optionally
        followed by `until`. It may be called again where the type of a state turns out wider
        than that of its initial value.
    sequences : variable, array_like, dict, or list of these, optional
        What the loop walks over, along axis 0. ``dict(input=x, taps=[-1, 0, 2])`` passes
        ``x[t-1], x[t], x[t+2]``; the lowest negative tap is read from row 0. Without
        `n_steps` the shortest sequence sets the number of steps; if known lengths differ, there
        is a warning.
    outputs_info : variable, array_like, dict, None, or list of these, optional
        One entry per output of `fn`, or None where no output is read by later steps. An
        initial value makes the output a state whose value one step before is passed to `fn`.
        ``dict(initial=y0, taps=[-3, -1])`` passes ``y[t-3], y[t-1]``; `y0` then has one row
        for each of the three steps before the first. The key `name` names the output in messages
        and where it is printed; without it an initial value's own name does. None (or an empty
        dict) marks an output that is only stacked. A value that is not a tensor, such as the
        state of a random generator, is carried, and its last value is returned.
    non_sequences : variable, array_like, or list of these, optional
        Passed to `fn` whole at every step, as the very variables given here. What `fn` uses
        without being given it becomes an input of the loop as well.
    n_steps : int or integer scalar variable, optional
        The number of steps; with `until` the greatest number. May be 0.
    truncate_gradient : int, optional
        How many steps a derivative walks back from the last one; -1 walks all of them.
    go_backwards : bool, optional
        Walk the sequences from their last row to their first. Results are in the order in
        which the steps ran.
    name : str, optional
        Name of the loop, for printing and messages.
    strict : bool, optional
        Raise if `fn` uses outer variables that are not among `non_sequences`, or if known lengths
        of sequences differ and `n_steps` is not given.
    return_list : bool, optional
        Return a list even for a single output.
    return_updates : bool, optional
        Return ``(outputs, updates)``, the default; False returns the outputs alone and raises
        if there are updates.
    checkpoint : int, sequence of int, "sqrt", Levels or Memory, optional
        How a gradient of the loop saves memory by computing steps again: the length of the
        segments between stored states (several lengths nest segments in segments, the longest
        first), ``"sqrt"`` for segments of the square root of the number of steps, `Levels` for
        several nested levels, `Memory` for what fits into a number of bytes. Values and
        gradients stay the same. Without it, gradients read what the loop stored.
    method : {"sequential", "newton"} or Newton, optional
        How the states are computed: step by step, or for all steps at once by Newton's method on
        the whole trajectory, with the options of `Newton`. docs/newton.md says when that pays.
    mode, profile, allow_gc : optional
        Accepted for compatibility, without a meaning: a loop is compiled as a part of the
        function that contains it. `mode` must be a mode all the same.

    Returns
    -------
    outputs : variable, list of variable, or None
        The outputs over time, of shape ``(steps, …)``, initial values not included. A single
        output is returned without a list, no output as None.
    updates : dict
        The values of shared variables after the last step. Pass it to `pytensor.function`.

    Raises
    ------
    TypeError
        If an argument or a value that `fn` returns has a type that cannot be used, or a state
        cannot be given one stable type.
    ValueError
        If taps, initial values, the number of steps or the number of outputs are wrong, or if
        `fn` draws from a random generator and does not return the one that follows.
    MissingInputError
        With `strict`, if `fn` captures a variable.

    Notes
    -----
    The compiled loop raises subclasses of `ValueError` (see `scanlib.ops.errors`) if a
    sequence is shorter than `n_steps`, a state has too few initial rows, `n_steps` is
    negative, or a value changes its shape between steps.

    The interface is that of `pytensor.scan`, which goes back to Theano (Bergstra et al.,
    "Theano: a CPU and GPU math expression compiler", SciPy 2010).

    Examples
    --------
    >>> import pytensor, scanlib
    >>> import pytensor.tensor as pt
    >>> a = pt.vector("a")
    >>> k = pt.iscalar("k")
    >>> powers, updates = scanlib.scan(
    ...     lambda power, a: power * a, outputs_info=pt.ones_like(a), non_sequences=a, n_steps=k
    ... )
    >>> f = pytensor.function([a, k], powers[-1], updates=updates)
    >>> f([0, 1, 2, 3], 3)
    array([ 0.,  1.,  8., 27.])
    """
    del profile, allow_gc
    check_flags()
    title = loop_title(read_name(name), _function.get())
    with errors_of(title):
        check_mode(mode)
        go_backwards = read_flag(title, "go_backwards", go_backwards)
        strict = read_flag(title, "strict", strict)
        return_list = read_flag(title, "return_list", return_list)
        return_updates = read_flag(title, "return_updates", return_updates)
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        given = [
            as_variable(value, f"non_sequences[{i}]")
            for i, value in enumerate(as_list(non_sequences))
        ]
        walked = read_sequences(sequences)
        described = read_outputs_info(
            outputs_info, [*(argument.variable for argument in walked), *given]
        )
        steps = read_n_steps(n_steps)
        check_lengths(title, walked, steps, go_backwards, strict)
        truncation = read_truncation(truncate_gradient)
        schedule = read_checkpoint(checkpoint)
        newton = read_method(method)
    builder = _Builder(fn, walked, described, given, steps, go_backwards, strict, name)
    with called_as("scan"):  # by steps that hold loops
        outputs, updates = builder.build(truncation, schedule, newton)
    result: Any = outputs
    if not outputs:
        result = None
    elif len(outputs) == 1 and not return_list:
        result = outputs[0]
    if return_updates:
        return result, updates
    if updates:
        raise ValueError(
            f"{title}: return_updates=False, but the loop updates {list(updates)}; pass "
            "return_updates=True, or carry these values through outputs_info"
        )
    return result
