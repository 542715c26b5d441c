"""What the direct functions share: arguments, time axes, and loops of one state.

A direct function computes a recurrence of one state along one axis of its arguments,

    h[t] = step(h[t-1], x[t], ...)

in the order of time or, with `reverse`, from the last row to the first. This module reads the
arguments, moves the time axis to the front (a view), finds the shape of the state by
broadcasting, makes one canonical loop, and moves the time axis of its trace back.

An argument with as many dimensions as the result has the time axis, and is the same at every
step if its size along it is 1 when the graph is built. An argument with fewer dimensions has no
time axis: it is the same at every step and broadcasts against a row, the shape of the result
without the time axis. No argument is broadcast by sizes that only show when the function runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Variable
from pytensor.scalar import upcast
from pytensor.tensor.type import TensorType

from scanlib.frontend.trace import name_result
from scanlib.frontend.values import as_tensor
from scanlib.ops.loop import Loop, NonSequence, State
from scanlib.ops.loop import Sequence as LoopSequence

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
    if isinstance(axis, bool) or not hasattr(axis, "__index__"):
        raise TypeError(
            f"{function}: {label} must be an integer, got {axis!r} of type {type(axis).__name__}"
        )
    position = operator.index(axis)
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

    def row_shape(self) -> list[tuple[int | None, Any]]:
        """Return the static and the symbolic size of each dimension of a row."""
        static, symbolic = self.value.type.shape, self.value.shape
        return [(static[i], symbolic[i]) for i in range(int(self.timed), len(static))]

    def describe(self) -> str:
        """Return name and static shape of a row, for messages."""
        sizes = ", ".join(str(size) for size, _ in self.row_shape()).replace("None", "?")
        return f"{self.name} has ({sizes})"


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
    known = {a.name: a.value.type.shape[0] for a in arguments if a.timed}
    known = {name: length for name, length in known.items() if length is not None}
    if len(set(known.values())) > 1:
        text = ", ".join(f"{name} has {length} steps" for name, length in known.items())
        raise ValueError(
            f"{function}: the arguments must have the same length along the time axis, but {text}"
        )


def broadcast_rows(
    function: str, rows: Sequence[Sequence[tuple[int | None, Any]]], texts: Sequence[str]
) -> list[tuple[int | None, Any]]:
    """Return the static and symbolic sizes that rows broadcast to.

    Raises
    ------
    ValueError
        If sizes known when the graph is built do not broadcast.
    """
    ndim = max(len(row) for row in rows)
    result: list[tuple[int | None, Any]] = []
    for position in range(-ndim, 0):
        sizes = [row[position] for row in rows if len(row) >= -position]
        sizes = [size for size in sizes if size[0] != 1]
        known = [size for size in sizes if size[0] is not None]
        if len({static for static, _ in known}) > 1:
            raise ValueError(
                f"{function}: the shapes of one step do not broadcast: {', '.join(texts)}"
            )
        chosen: tuple[int | None, Any] = (1, 1)
        if known:
            chosen = (known[0][0], known[0][0])
        elif sizes:
            chosen = sizes[0]
        result.append(chosen)
    return result


# Loops


def zeros(sizes: Sequence[tuple[int | None, Any]], dtype: str) -> Variable:
    """Return zeros of the given sizes."""
    return pt.zeros([symbolic for _, symbolic in sizes], dtype=dtype)


def first_rows(value: Variable, sizes: Sequence[tuple[int | None, Any]], dtype: str) -> Variable:
    """Return the initial rows of a state: `value` broadcast to one row of the given sizes."""
    value = pt.cast(value, dtype)
    symbolic = [size for _, size in sizes]
    if value.type.ndim == 0 and sizes:
        return pt.alloc(value, 1, *symbolic)
    missing = len(sizes) - value.type.ndim
    value = pt.expand_dims(value, tuple(range(missing + 1)))
    own = value.type.shape[1:]
    if any(mine == 1 and known != 1 for mine, (known, _) in zip(own, sizes, strict=True)):
        # A size that is not known to be 1 is kept: if it is another one than the loop needs,
        # the loop says so when it runs.
        full = [n if own[k] == 1 else value.shape[k + 1] for k, n in enumerate(symbolic)]
        return pt.alloc(value, 1, *full)
    return value


def recurrence(
    name: str,
    step: Callable[..., Variable],
    arguments: Sequence[Argument],
    initial: Variable,
    sizes: Sequence[tuple[int | None, Any]],
    dtype: str,
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
        What broadcasts to the state before the first step.
    sizes, dtype
        Static and symbolic sizes, and the dtype, of the state.
    axis : int
        Where the time axis stands in the result.
    reverse : bool
        Whether to go from the last row to the first.
    """
    loop = Loop(name=name, function=name, reverse=reverse)
    rows = [add_argument(loop, argument) for argument in arguments]
    state = TensorType(dtype, shape=tuple(size for size, _ in sizes))(name="h[t-1]")
    first = first_rows(initial, sizes, dtype)
    loop.states.append(State(first, {-1: state}, step(state, *rows), name="h"))
    (history,) = loop.apply().histories
    trace = history[:-1] if reverse else history[1:]
    result = pt.moveaxis(trace, 0, axis) if axis else trace
    name_result(result, name)
    return result


def add_argument(loop: Loop, argument: Argument) -> Variable:
    """Make an argument an input of the loop and return what a step sees of it."""
    value, name = argument.value, argument.name
    if not argument.timed:
        inner = value.type(name=name)
        loop.non_sequences.append(NonSequence(value, inner, name))
        return inner
    row = TensorType(value.type.dtype, shape=value.type.shape[1:])(name=f"{name}[t]")
    loop.sequences.append(LoopSequence(value, row, name))
    return row
