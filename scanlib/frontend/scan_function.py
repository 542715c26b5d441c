"""`scan`: the interface of `pytensor.scan`."""

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from pytensor.graph.basic import Variable

from scanlib.config import check_flags
from scanlib.frontend.arguments import (
    as_list,
    check_lengths,
    check_mode,
    describe_whole,
    read_n_steps,
    read_name,
    read_outputs_info,
    read_rows,
    read_sequences,
    read_truncation,
    without_arrays,
)
from scanlib.frontend.builder import LoopBuilder, function_called
from scanlib.frontend.methods import read_checkpoint, read_method
from scanlib.frontend.step_function import StepResult, call_step, errors_of
from scanlib.frontend.values import as_variable, read_flag
from scanlib.ops.messages import loop_title


class Updates(dict[Variable, Variable]):
    """The values of shared variables after the last step, by the variables."""

    def __repr__(self) -> str:
        return (
            f"<updates of shared variables: {super().__repr__()}; with return_updates=False a loop "
            "returns its outputs alone>"
        )

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the updates of a loop, a dict, have no attribute {name!r}; a loop returns its "
            f"outputs and these updates, `outputs, updates = …`, and with return_updates=False the "
            f"outputs alone"
        )


class OutputsAndUpdates(NamedTuple):
    """What a loop returns without ``return_updates=False``."""

    outputs: Any
    updates: Updates

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"a loop returns its outputs and the updates of shared variables, a pair that has no "
            f"attribute {name!r}; write `outputs, updates = …`, or pass return_updates=False to "
            f"get the outputs alone"
        )


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
        What the loop iterates over, along axis 0. ``dict(input=x, taps=[-1, 0, 2])`` passes
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
        How many steps a derivative goes back from the last one, at least 1; -1 for all of them.
    go_backwards : bool, optional
        Read the sequences from their last row to their first. Results are in the order in
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
        if there are updates. The default is that of `pytensor.scan`.
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

    `loop` builds the same loops from a step over trees; this is the compatible interface. It is
    that of `pytensor.scan`, which goes back to Theano (Bergstra et al.,
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
    function = function_called("scan")
    title = loop_title(read_name(name), function)
    with errors_of(title):
        check_mode(mode)
        go_backwards = read_flag(title, "go_backwards", go_backwards)
        strict = read_flag(title, "strict", strict)
        return_list = read_flag(title, "return_list", return_list)
        return_updates = read_flag(title, "return_updates", return_updates)
        if not callable(fn):
            raise TypeError(f"fn must be callable, got {type(fn).__name__}")
        if isinstance(non_sequences, dict):
            raise TypeError(
                f"non_sequences is a dict with the keys {list(non_sequences)}; give its values as "
                "a list, in the order of the step's parameters"
            )
        given = [
            as_variable(value, f"non_sequences[{i}]")
            for i, value in enumerate(as_list(non_sequences))
        ]
        iterated = read_sequences(sequences)
        described = read_outputs_info(
            outputs_info, [*(argument.variable for argument in iterated), *given]
        )
        steps = read_n_steps(n_steps)
        if steps is None and not iterated:
            raise ValueError(
                "nothing says how many steps to take; give n_steps or a sequence"
                + without_arrays("sequences", sequences)
            )
        check_lengths(title, iterated, steps, go_backwards, strict)
        truncation = read_truncation(truncate_gradient)
        schedule = read_checkpoint(checkpoint)
        newton = read_method(method)

    def call(arguments: list[tuple[Variable, str]]) -> StepResult:
        whole = [
            (value, describe_whole(value.name, f"non_sequences[{i}]"))
            for i, value in enumerate(given)
        ]
        return call_step(fn, [*arguments, *whole], described, title)

    rows = read_rows(iterated, steps, go_backwards)
    builder = LoopBuilder(function, call, rows, described, name, steps, given, strict)
    built = builder.build(newton, truncate_gradient=truncation, checkpoint=schedule)
    outputs, updates = built.values, built.shared
    result: Any = outputs
    if not outputs:
        result = None
    elif len(outputs) == 1 and not return_list:
        result = outputs[0]
    if return_updates:
        return OutputsAndUpdates(result, Updates(updates))
    if updates:
        carried = "" if function == "map" else ", or pass these values through outputs_info"
        raise ValueError(
            f"{title}: return_updates=False, but the loop updates {list(updates)}; pass "
            f"return_updates=True{carried}"
        )
    return result
