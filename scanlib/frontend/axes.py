"""What the direct functions share: arguments, time axes, and loops of one state.

A direct function computes a recurrence of one state along one axis of its arguments,

    h[t] = step(h[t-1], x[t], ...)

in the order of time or, with `reverse`, from the last row to the first. This module reads the
arguments, moves the time axis to the front (a view), makes one canonical loop, and moves the time
axis of its trace back.

An argument with as many dimensions as the result has the time axis, and is the same at every
step if its size along it is 1 when the graph is built. An argument with fewer dimensions has no
time axis: it is the same at every step and broadcasts against a row, the shape of the result
without the time axis. No argument is broadcast by sizes that only show when the function runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Variable
from pytensor.scalar import upcast

from scanlib.frontend.arguments import OutputArgument, SequenceArgument, known_to_differ
from scanlib.frontend.builder import Built, LoopBuilder, name_result
from scanlib.frontend.step_function import StepResult
from scanlib.frontend.values import as_tensor, read_integer

OPTIONAL = ("init", "zi")
KINDS = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}


# Arguments


def _is_weak(value: Any) -> bool:
    """Whether a value is a Python number, which has no dtype of its own."""
    if isinstance(value, bool | np.generic):
        return False
    return isinstance(value, int | float | complex)


def read_numbers(function: str, kinds: str, **given: Any) -> dict[str, Any]:
    """Return the arguments of a direct function as tensors; an optional None stays None.

    A Python number takes the dtype that NumPy would give it beside the other arguments, with
    `floatX` where these are integers and the number is not.

    Parameters
    ----------
    function : str
        Name of the function, for messages.
    kinds : str
        The kinds of dtype it takes, as in `numpy.dtype.kind`.
    **given
        The arguments.

    Raises
    ------
    TypeError
        If an argument is no tensor of one of these kinds.
    """
    result: dict[str, Any] = dict.fromkeys(given)
    for name, value in given.items():
        if (value is not None or name not in OPTIONAL) and not _is_weak(value):
            # A truth value is refused for its dtype, where it is.
            value = np.asarray(value) if isinstance(value, bool) else value
            result[name] = as_tensor(value, f"{function}: {name}")
    strong = [variable.type.dtype for variable in result.values() if variable is not None]
    common = upcast(*strong) if strong else None
    for name, value in given.items():
        if _is_weak(value):
            result[name] = pt.constant(np.asarray(value, dtype=_weak_dtype(value, common)))
    for name, variable in result.items():
        if variable is not None:
            _check_kind(variable, kinds, f"{function}: {name}")
    return result


def _weak_dtype(value: Any, common: str | None) -> np.dtype:
    if common is None:
        dtype = np.asarray(value).dtype
        return np.dtype(config.floatX) if dtype.kind == "f" else dtype
    kind = np.dtype(common).kind
    if isinstance(value, float) and kind in "biu":
        return np.dtype(config.floatX)
    try:
        dtype = np.result_type(np.dtype(common), value)
        np.asarray(value, dtype=dtype)
    except OverflowError:
        return np.asarray(value).dtype
    return dtype


def _check_kind(variable: Variable, kinds: str, where: str) -> None:
    kind = np.dtype(variable.type.dtype).kind
    if kind in kinds:
        return
    names = list(dict.fromkeys(KINDS[letter] for letter in kinds))
    expected = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    article = "an" if expected[0] in "aeiou" else "a"
    hint = "; cast it, for example with x.astype('float64')" if kind in "biu" else ""
    raise TypeError(
        f"{where} must have {article} {expected} dtype, got dtype {variable.type.dtype}{hint}"
    )


def read_axis(function: str, axis: Any, ndim: int, of: str, label: str = "axis") -> int:
    """Return an axis counted from the front; `label` is what the user calls it.

    Raises
    ------
    TypeError
        If it is no integer.
    numpy.exceptions.AxisError
        If there is no such axis.
    """
    position = read_integer(f"{function}: {label}", axis)
    if ndim == 0:
        raise ValueError(f"{function}: {of} is a scalar; it needs a time axis")
    if not -ndim <= position < ndim:
        raise np.exceptions.AxisError(
            f"{function}: {label}={position} is out of range for {of} with {ndim} dimension(s); "
            f"expected {-ndim} to {ndim - 1}"
        )
    return position % ndim


# Time axes


@dataclass
class Argument:
    """An argument of a recurrence, its time axis in front if it has one.

    `core` is the number of trailing dimensions that belong to a matrix and take no part in
    broadcasting.
    """

    name: str
    value: Variable
    timed: bool
    core: int = 0

    def row_shape(self) -> tuple[int | None, ...]:
        """Return the static shape of a row."""
        return self.value.type.shape[int(self.timed) :]


def read_arguments(given: dict[str, tuple[Variable, int]], leading: int, axis: int) -> list:
    """Return the arguments of a recurrence with the time axis in front.

    Parameters
    ----------
    given : dict
        Name, variable, and how many of its last dimensions are no batch dimensions.
    leading : int
        Number of dimensions of the result that may be time.
    axis : int
        Which of them is.
    """
    full = {name: v.type.ndim - core == leading for name, (v, core) in given.items()}
    lengths = [v.type.shape[axis] for name, (v, _) in given.items() if full[name]]
    one_step = all(length == 1 for length in lengths)
    arguments = []
    for name, (variable, core) in given.items():
        timed = full[name] and (one_step or variable.type.shape[axis] != 1)
        if timed:
            variable = pt.moveaxis(variable, axis, 0) if axis else variable
        elif full[name]:
            variable = variable.squeeze(axis)
        arguments.append(Argument(name, variable, timed, core))
    return arguments


def check_lengths(function: str, arguments: Sequence[Argument]) -> None:
    """Raise if two arguments have lengths that are known to differ."""
    known = known_to_differ((a.name, a.value.type.shape[0]) for a in arguments if a.timed)
    if known:
        text = ", ".join(f"{name} has {length} steps" for name, length in known)
        raise ValueError(
            f"{function}: the arguments must have the same length along the time axis, but {text}"
        )


def check_rows(function: str, rows: dict[str, tuple[int | None, ...]]) -> None:
    """Raise if the shapes of what one step reads are known not to broadcast."""
    try:
        np.broadcast_shapes(*(tuple(1 if n is None else n for n in row) for row in rows.values()))
    except ValueError:
        texts = (f"{name} has ({', '.join(map(str, row))})" for name, row in rows.items())
        text = ", ".join(texts).replace("None", "?")
        raise ValueError(f"{function}: the shapes of one step do not broadcast: {text}") from None


# Loops


def run(
    name: str,
    step: Callable[..., Sequence[Variable]],
    sequences: dict[str, Variable],
    initial: dict[str, Variable],
    reverse: bool = False,
) -> Built:
    """Return a loop; its states are widened where a step returns more than `initial` has.

    Parameters
    ----------
    name : str
        Of the function; messages begin with it.
    step : callable
        Takes rows, then states; returns the next states, then outputs.
    sequences, initial : dict
        What the rows are of, time in front, and the values before the first step.
    reverse : bool
    """
    given = [SequenceArgument(value, [0], key, key) for key, value in sequences.items()]
    states = [
        OutputArgument(pt.expand_dims(value, 0), [-1], key, key) for key, value in initial.items()
    ]

    def call(values: list[tuple[Variable, str]]) -> StepResult:
        return StepResult(list(step(*(value for value, _ in values))), {}, None)

    rows = [(argument, 0, argument.variable) for argument in given]
    return LoopBuilder(name, call, rows, states, name).build(reverse=reverse)


def recurrence(
    name: str,
    step: Callable[..., Variable],
    arguments: Sequence[Argument],
    initial: Variable,
    axis: int,
    reverse: bool,
) -> Variable:
    """Return the trace of a loop with one state, its time axis at `axis`.

    Parameters
    ----------
    name : str
        Name of the loop, and of its trace.
    step : callable
        Takes the state, then a row of each argument; returns the next state.
    arguments : sequence of Argument
    initial : Variable
        The state before the first step, of its rank and dtype; sizes of 1 broadcast.
    axis : int
        Where the time axis stands in the result.
    reverse : bool
        Whether to go from the last row to the first.
    """
    sequences = {argument.name: argument.value for argument in arguments if argument.timed}

    def call(*rows: Variable) -> list[Variable]:
        own = iter(rows)
        given = [next(own) if argument.timed else argument.value for argument in arguments]
        return [step(rows[-1], *given)]

    (trace,) = run(name, call, sequences, {"h": initial}, reverse).values
    result = pt.moveaxis(trace, 0, axis) if axis else trace
    name_result(result, name)
    return result
