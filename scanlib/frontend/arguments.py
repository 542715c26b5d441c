"""What users pass to `scan`, checked and put into one form."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.configdefaults import config
from pytensor.graph.basic import Constant, Variable
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import TensorType, integer_dtypes

from scanlib.ops.graph import constant_integer, is_tensor


def as_list(value: Any) -> list[Any]:
    """Return `value` as a list: None is empty, anything but a list or tuple stands alone."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


@dataclass
class SequenceArgument:
    """A sequence and the taps that the step reads."""

    variable: Variable
    taps: list[int]
    name: str | None
    argument: str

    @property
    def span(self) -> tuple[int, int]:
        """The lowest and the highest tap, tap 0 included."""
        return min(0, *self.taps), max(0, *self.taps)

    def length(self) -> Variable:
        """Return the number of steps this sequence allows."""
        lowest, highest = self.span
        rows = self.variable.shape[0]
        return rows if lowest == highest else pt.maximum(rows - (highest - lowest), 0)

    def tap(self, offset: int) -> Variable:
        """Return the rows that tap `offset` reads, one per step."""
        lowest, highest = self.span
        start, end = offset - lowest, highest - offset
        if start == 0 and end == 0:
            return self.variable
        return self.variable[start or None : -end if end else None]


@dataclass
class OutputArgument:
    """What is known of an output before the step is traced.

    `initial` is None for an output that no step reads. For a tensor state it holds the
    initial rows, shape (K, …), with K the farthest tap. `tap_type` is the type in which the
    step reads them, where it is wider than that of the initial rows. A weak initial
    value takes the dtype of what the step returns.
    """

    initial: Variable | None
    taps: list[int]
    name: str | None
    argument: str
    tap_type: TensorType | None = None
    is_weak: bool = False

    @property
    def is_carry(self) -> bool:
        return self.initial is not None and not is_tensor(self.initial)


def as_variable(value: Any, argument: str) -> Variable:
    """Return what the user gave as a variable.

    Raises
    ------
    TypeError
        Naming the argument, if it cannot be one.
    """
    if isinstance(value, Variable):
        return value
    if isinstance(value, bool):
        # PyTensor takes none: it may come from comparing two variables.
        raise TypeError(
            f"{argument} is the Python value {value}; give np.array({value}) for a constant, and "
            "compare variables with pt.eq, not =="
        )
    try:
        return pt.as_tensor_variable(value)
    except Exception as error:
        raise TypeError(
            f"{argument} must be a PyTensor variable or something NumPy can turn into an "
            f"array, got {value!r} of type {type(value).__name__}"
        ) from error


def _tap_list(taps: Any, argument: str) -> list[int]:
    is_one = not isinstance(taps, Iterable) or getattr(taps, "ndim", None) == 0
    listed = [
        tap.item() if isinstance(tap, np.ndarray) and tap.ndim == 0 else tap
        for tap in ([taps] if is_one else taps)
    ]
    for tap in listed:
        if not isinstance(tap, int | np.integer) or isinstance(tap, bool):
            raise TypeError(f"the taps of {argument} must be integers, got {tap!r}")
    return [int(tap) for tap in listed]


def read_sequences(sequences: Any) -> list[SequenceArgument]:
    """Return the sequences given to `scan`."""
    result = []
    for i, given in enumerate(as_list(sequences)):
        argument = f"sequences[{i}]"
        taps: list[int] = [0]
        if isinstance(given, dict):
            unknown = set(given) - {"input", "taps"}
            if unknown:
                raise ValueError(
                    f"{argument} has unknown keys {sorted(unknown, key=str)}; "
                    "the keys are 'input' and 'taps'"
                )
            if given.get("input") is None:
                raise ValueError(
                    f"{argument} is a dict without the key 'input', the variable to walk over"
                )
            if given.get("taps") is not None:
                taps = _tap_list(given["taps"], argument)
            given = given["input"]
        variable = as_variable(given, argument)
        if not is_tensor(variable):
            raise TypeError(f"{argument} must be a tensor, got {variable.type}")
        if variable.type.ndim == 0:
            raise ValueError(
                f"{argument} is a scalar; a sequence needs at least one dimension, and what every "
                "step sees whole belongs to non_sequences"
            )
        if taps:
            result.append(SequenceArgument(variable, taps, variable.name, argument))
    return result


def read_outputs_info(outputs_info: Any, inputs: Sequence[Variable]) -> list[OutputArgument]:
    """Return what the user told about each output; `inputs` are the loop's other arguments."""
    listed = as_list(outputs_info)
    float_dtype = _float_dtype([*inputs, *listed])
    return [
        _read_output(given, f"outputs_info[{i}]", float_dtype) for i, given in enumerate(listed)
    ]


def _float_dtype(values: Sequence[Any]) -> str:
    """Return the dtype of a Python float among these values: the widest of theirs, or floatX."""
    dtypes = []
    for value in values:
        if isinstance(value, dict):
            value = value.get("initial")
        is_number = isinstance(value, int | float | Constant) and not getattr(value, "ndim", 0)
        dtype = None if is_number else getattr(value, "dtype", None)
        if dtype is not None and np.dtype(dtype).kind == "f":
            dtypes.append(str(dtype))
    return str(np.result_type(*dtypes)) if dtypes else config.floatX


def _read_output(given: Any, argument: str, float_dtype: str) -> OutputArgument:
    if not isinstance(given, dict):
        given = {} if given is None else {"initial": given}
    unknown = set(given) - {"initial", "taps", "name", "inplace"}
    if unknown:
        raise ValueError(
            f"{argument} has unknown keys {sorted(unknown, key=str)}; "
            "the keys are 'initial', 'taps' and 'name'"
        )
    name = given.get("name")
    if name is not None and not isinstance(name, str):
        raise TypeError(
            f"the name of {argument} must be a string, got {name!r} of type {type(name).__name__}"
        )
    taps = given.get("taps")
    if given.get("initial") is None:
        if taps is not None and as_list(taps):
            raise ValueError(
                f"{argument} asks for taps {taps} but has no initial value; "
                "add 'initial', or leave out 'taps' for an output that no step reads"
            )
        return OutputArgument(None, [], name, argument)
    initial = given["initial"]
    # A Python number has no dtype of its own. PyTensor takes the smallest one that holds it:
    # a counter would overflow after 127 steps, and 1.0 would mean single precision.
    is_weak = isinstance(initial, int) and not isinstance(initial, bool)
    if is_weak:
        initial = np.asarray(initial, dtype="int64")
    elif isinstance(initial, float) and not isinstance(initial, np.generic):
        initial = np.asarray(initial, dtype=float_dtype)
    initial = as_variable(initial, f"the initial value of {argument}")
    listed = [-1] if taps is None else _tap_list(taps, argument)
    name = name or initial.name
    if not listed:
        return OutputArgument(None, [], name, argument)
    for tap in listed:
        if tap >= 0:
            raise ValueError(
                f"{argument} has tap {tap}; the taps of an output must be negative: "
                "a step can only read the values of earlier steps"
            )
    if len(set(listed)) < len(listed):
        raise ValueError(f"{argument} has duplicate taps {listed}; give each once")
    if not is_tensor(initial):
        _check_carry(initial, listed, argument)
        return OutputArgument(initial, listed, name, argument)
    if listed == [-1]:
        return OutputArgument(pt.expand_dims(initial, 0), listed, name, argument, is_weak=is_weak)
    depth = -min(listed)
    if initial.type.ndim == 0:
        raise ValueError(
            f"{argument} has taps {listed}, so its initial value needs {depth} rows, got a scalar"
        )
    rows = initial.type.shape[0]
    if rows is not None and rows < depth:
        raise ValueError(
            f"{argument} has taps {listed}, so its initial value needs {depth} rows, got {rows}"
        )
    return OutputArgument(initial if rows == depth else initial[:depth], listed, name, argument)


def _check_carry(initial: Variable, taps: list[int], argument: str) -> None:
    if taps != [-1]:
        raise ValueError(
            f"{argument} is no tensor ({initial.type}); its only tap can be -1, got {taps}"
        )
    if not isinstance(initial.type, RandomType):
        warnings.warn(
            f"{argument} has type {initial.type}, which cannot be stacked over time: "
            "only its last value is returned",
            UserWarning,
            stacklevel=5,
        )


def read_n_steps(n_steps: Any) -> Variable | None:
    """Return the number of steps as an int64 scalar, or None where the sequences give it."""
    if n_steps is None:
        return None
    if isinstance(n_steps, Variable):
        variable = n_steps
    elif isinstance(n_steps, bool) or not isinstance(n_steps, int | np.integer | np.ndarray):
        raise TypeError(
            f"n_steps must be an integer, got {n_steps!r} of type {type(n_steps).__name__}"
        )
    else:
        variable = pt.as_tensor_variable(n_steps)
    variable = pt.as_tensor_variable(variable)
    if variable.type.dtype not in integer_dtypes:
        raise TypeError(f"n_steps must be an integer, got dtype {variable.type.dtype}")
    if variable.type.ndim != 0:
        raise TypeError(f"n_steps must be a scalar, got {variable.type}")
    known = constant_integer(variable)
    if known is not None and known < 0:
        raise ValueError(f"n_steps must not be negative, got {known}")
    return pt.constant(known, dtype="int64") if known is not None else pt.cast(variable, "int64")


def read_truncation(truncate_gradient: Any) -> int:
    """Return the number of steps a gradient walks back, -1 for all of them."""
    if isinstance(truncate_gradient, bool) or not isinstance(truncate_gradient, int | np.integer):
        raise TypeError(f"truncate_gradient must be an integer, got {truncate_gradient!r}")
    if truncate_gradient < -1:
        raise ValueError(f"truncate_gradient must be -1 or more, got {truncate_gradient}")
    return int(truncate_gradient)


def common_length(sequences: Sequence[SequenceArgument]) -> Variable | None:
    """Return the length of the shortest sequence, or None where all are sure to be equal."""
    lengths: list[Variable] = []
    seen: set[tuple[Variable, tuple[int, int]]] = set()
    static: set[int | None] = set()
    for argument in sequences:
        key = (argument.variable, argument.span)
        if key in seen:
            continue
        seen.add(key)
        lowest, highest = argument.span
        rows = argument.variable.type.shape[0]
        static.add(None if rows is None else max(rows - (highest - lowest), 0))
        lengths.append(argument.length())
    if len(lengths) < 2 or (len(static) == 1 and None not in static):
        return None
    shortest = lengths[0]
    for length in lengths[1:]:
        shortest = pt.minimum(shortest, length)
    return shortest
