"""What users pass to `scan`, checked and put into one form."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.compile.mode import Mode, get_mode, predefined_modes
from pytensor.configdefaults import config
from pytensor.graph.basic import Constant, Variable
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import TensorType, integer_dtypes

from scanlib.frontend.values import (
    advice,
    as_tensor,
    as_variable,
    brief,
    is_list_of_numbers,
    is_plain_integer,
    read_integer,
    shown,
    warn,
)
from scanlib.lengths.arrays import Lengths
from scanlib.lengths.forms import LengthForm
from scanlib.lengths.numbers import constant_integer
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.graph import is_tensor, row_type


def as_list(value: Any) -> list[Any]:
    """Return `value` as a list: None is empty, anything but a list or tuple stands alone."""
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def list_sequences(sequences: Any) -> tuple[list[Any], bool]:
    """Return the sequences in a list, and whether there was one that was in none.

    Numbers are no sequences, so a list of numbers is one sequence.
    """
    is_one = not isinstance(sequences, list | tuple) or is_list_of_numbers(sequences)
    return ([sequences] if is_one and sequences is not None else as_list(sequences)), is_one


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

    @property
    def rows(self) -> int | None:
        """The number of rows, None if it is not known."""
        return self.variable.type.shape[0]

    def static_length(self) -> int | None:
        """Return the number of steps this sequence is known to allow."""
        lowest, highest = self.span
        return None if self.rows is None else max(self.rows - (highest - lowest), 0)

    def describe(self) -> str:
        """Return name and known length, for messages."""
        label, steps = f"`{self.name}`" if self.name else self.argument, self.static_length()
        enough = "" if self.rows == steps else f", enough for {steps} steps with taps {self.taps}"
        return f"{label} has {self.rows} row{'' if self.rows == 1 else 's'}{enough}"

    def describe_tap(self, tap: int) -> str:
        """Return what a step is given of this sequence, for messages."""
        if self.taps != [0]:
            return f"{self.name or 'row'}{_at(tap)} (tap {tap} of {self.argument})"
        return describe_whole(self.name, f"row of {self.argument}")

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
    step reads them, where it is wider than that of the initial rows. `weak_float` is the dtype
    that an initial value takes which is an integer without a dtype that means something, where the
    step returns floats; None for other values. `initial_name` is the name that the variable given
    as initial value has.
    """

    initial: Variable | None
    taps: list[int]
    name: str | None
    argument: str
    tap_type: TensorType | None = None
    weak_float: str | None = None
    initial_name: str | None = None

    @property
    def is_carry(self) -> bool:
        return self.initial is not None and not is_tensor(self.initial)

    def read_type(self) -> Any:
        """Return the type in which the step reads it."""
        assert self.initial is not None
        if self.is_carry:
            return self.initial.type
        return self.tap_type or row_type(self.initial)

    def describe_tap(self, tap: int) -> str:
        """Return what a step is given of this output, for messages."""
        if self.name is None:
            return f"{self.argument} at t{tap:+d}"
        return f"{self.name}{_at(tap)} ({self.argument})"


def tap_name(name: str | None, tap: int) -> str | None:
    """Return the name of the row that a tap of a variable reads."""
    return None if name is None else f"{name}{_at(tap)}"


def _at(tap: int) -> str:
    return "[t]" if tap == 0 else f"[t{tap:+d}]"


def describe_whole(name: str | None, argument: str) -> str:
    """Return the name of an argument and the caller's name for it, for messages."""
    return f"{name} ({argument})" if name else argument


def _tap_list(taps: Any, argument: str) -> list[int]:
    is_one = not isinstance(taps, Iterable) or getattr(taps, "ndim", None) == 0
    return [read_integer(f"a tap of {argument}", tap) for tap in ([taps] if is_one else taps)]


def _check_keys(
    given: dict[str, Any], keys: Sequence[str], argument: str, advice: str = ""
) -> None:
    unknown = sorted(given.keys() - {*keys, "inplace"}, key=str)
    if unknown:
        *others, last = map(repr, keys)
        text = f"{', '.join(others)} and {last}"
        raise ValueError(f"{argument} has unknown keys {unknown}; the keys are {text}{advice}")


def read_sequences(sequences: Any) -> list[SequenceArgument]:
    """Return the sequences given to `scan`."""
    result = []
    for i, given in enumerate(list_sequences(sequences)[0]):
        argument = f"sequences[{i}]"
        taps: list[int] = [0]
        if isinstance(given, dict):
            _check_keys(given, ("input", "taps"), argument, "; scanlib.loop takes trees")
            if given.get("input") is None:
                raise ValueError(
                    f"{argument} is a dict without the key 'input', the variable to iterate over"
                )
            if given.get("taps") is not None:
                taps = _tap_list(given["taps"], argument)
            given = given["input"]
        variable = as_tensor(given, argument)
        if variable.type.ndim == 0:
            raise ValueError(
                f"{argument} is a scalar; a sequence needs at least one dimension, and what every "
                "step sees whole belongs to non_sequences; sequences come before outputs_info; "
                "what is called like jax.lax.scan is scanlib.loop(step, init, xs)"
            )
        if taps:
            result.append(SequenceArgument(variable, taps, variable.name, argument))
    return result


def read_outputs_info(outputs_info: Any, inputs: Sequence[Variable]) -> list[OutputArgument]:
    """Return what the user told about each output; `inputs` are the loop's other arguments."""
    entries = [x if isinstance(x, dict) else {"initial": x} for x in as_list(outputs_info)]
    return read_initials(entries, [f"outputs_info[{i}]" for i in range(len(entries))], inputs)


def read_initials(
    entries: Sequence[dict[str, Any] | OutputArgument],
    arguments: Sequence[str],
    inputs: Sequence[Any],
) -> list[OutputArgument]:
    """Return what is told about outputs in dictionaries; `arguments` say what these are called."""
    initials = []
    for entry, argument in zip(entries, arguments, strict=True):
        initial = entry.initial if isinstance(entry, OutputArgument) else entry.get("initial")
        # A Python number has no dtype of its own. PyTensor takes the smallest one that holds it:
        # a counter would overflow after 127 steps, and 1.0 would mean single precision.
        if type(initial) is int:
            initial = pt.constant(initial, dtype="int64")
        elif initial is not None and type(initial) is not float:
            initial = as_variable(initial, f"the initial value of {argument}")
        initials.append(initial)
    float_dtype = _float_dtype([*inputs, *initials])
    result = []
    for entry, initial, argument in zip(entries, initials, arguments, strict=True):
        if isinstance(entry, OutputArgument):
            result.append(entry)
            continue
        if isinstance(initial, float):
            initial = pt.constant(initial, dtype=float_dtype)
        output = _read_output({**entry, "initial": initial}, argument)
        output.weak_float = float_dtype if is_plain_integer(entry.get("initial")) else None
        output.initial_name = getattr(initial, "name", None)
        result.append(output)
    return result


def _float_dtype(values: Sequence[Any]) -> str:
    """Return the dtype of a Python float among these values: the widest of theirs, or floatX."""
    dtypes = []
    for value in values:
        is_number = isinstance(value, int | float | Constant) and not getattr(value, "ndim", 0)
        dtype = None if is_number else getattr(value, "dtype", None)
        if dtype is not None and np.dtype(dtype).kind == "f":
            dtypes.append(str(dtype))
    return str(np.result_type(*dtypes)) if dtypes else config.floatX


def _read_output(given: dict[str, Any], argument: str) -> OutputArgument:
    _check_keys(given, ("initial", "taps", "name"), argument)
    name = read_name(given.get("name"), f"the name of {argument}")
    taps = given.get("taps")
    if given.get("initial") is None:
        if taps is not None and as_list(taps):
            raise ValueError(
                f"{argument} asks for taps {taps} but has no initial value; "
                "add 'initial', or leave out 'taps' for an output that no step reads"
            )
        return OutputArgument(None, [], name, argument)
    initial = given["initial"]
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
        return OutputArgument(pt.expand_dims(initial, 0), listed, name, argument)
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
        warn(
            f"{argument} has type {initial.type}, which cannot be stacked over time: "
            f"only its last value is returned{advice(initial)}"
        )


def read_n_steps(n_steps: Any, argument: str = "n_steps") -> Variable | None:
    """Return the number of steps as an int64 scalar, or None where the sequences give it."""
    if n_steps is None:
        return None
    is_symbolic = isinstance(n_steps, Variable)
    variable = pt.as_tensor_variable(n_steps if is_symbolic else read_integer(argument, n_steps))
    if variable.type.ndim != 0:
        raise TypeError(f"{argument} must be a scalar, such as x.shape[0], got {variable.type}")
    if variable.type.dtype not in integer_dtypes:
        raise TypeError(
            f"{argument} must be an integer, got dtype {variable.type.dtype}; divide by // in "
            'place of /, or round and cast: pt.cast(pt.round(n), "int64")'
        )
    known = constant_integer(variable)
    if known is not None and known < 0:
        raise ValueError(f"{argument} must not be negative, got {known}")
    return pt.constant(known, dtype="int64") if known is not None else pt.cast(variable, "int64")


def without_arrays(argument: str, given: Any) -> str:
    """Return what is said of an argument that holds no array where there must be one."""
    if given is None:
        return ""
    return f"; {argument}={brief(given)} holds no array; one without rows is np.zeros(0)"


def read_axis(function: str, axis: Any, ndim: int, of: str) -> int:
    """Return an axis counted from the front; `AxisError` if there is no such axis."""
    position = read_integer(f"{function}: axis", axis)
    if ndim == 0:
        raise ValueError(f"{function}: {of} is a scalar; it needs a time axis")
    if not -ndim <= position < ndim:
        raise np.exceptions.AxisError(
            f"{function}: axis={position} is out of range for {of} with {ndim} dimension(s); "
            f"expected {-ndim} to {ndim - 1}"
        )
    return position % ndim


def read_name(name: Any, label: str = "name") -> str | None:
    """Return the name of a loop, or of a part of it."""
    if name is not None and not isinstance(name, str):
        raise TypeError(f"{label} must be a string, got {shown(name)}")
    return name


def check_mode(mode: Any) -> None:
    """Raise if what is accepted for compatibility is no mode of PyTensor's."""
    try:
        if mode is None or isinstance(get_mode(mode), Mode):
            return
    except Exception:
        pass
    raise (ValueError if isinstance(mode, str) else TypeError)(
        f"mode must be None, a pytensor.compile.mode.Mode or the name of one "
        f"({', '.join(sorted(predefined_modes))}), got {brief(mode)}; leave it out: a loop is "
        "compiled in the mode of the function that contains it"
    )


def read_truncation(truncate_gradient: Any) -> int:
    """Return the number of steps a gradient goes back, -1 for all of them."""
    steps = read_integer("truncate_gradient", truncate_gradient)
    if steps < -1 or steps == 0:
        raise ValueError(
            f"truncate_gradient must be at least 1, or -1 for all steps, got {steps}; for no "
            "gradient at all use pytensor.gradient.disconnected_grad"
        )
    return steps


def known_to_differ(lengths: Iterable[tuple[str, int | None]]) -> list[tuple[str, int]]:
    """Return the lengths that are known, each with its label, if they are not all the same."""
    known = [(label, length) for label, length in lengths if length is not None]
    return known if len({length for _, length in known}) > 1 else []


def check_spans(title: str, sequences: Sequence[SequenceArgument]) -> None:
    """Warn of sequences that are known to have rows, but too few for their taps."""
    for argument in sequences:
        if argument.rows and argument.static_length() == 0:
            warn(f"{title}: {argument.describe()}; the loop takes no step")


def check_lengths(
    title: str,
    sequences: Sequence[SequenceArgument],
    n_steps: Variable | None,
    backwards: bool,
    strict: bool,
) -> None:
    """Compare the lengths of sequences that are known, with `n_steps` or with each other.

    A `SequenceLengthError` if one is shorter than `n_steps`. Where that leaves it to the sequences,
    it is a warning if one is longer than the loop, and a `ValueError` with `strict`. Rows that are
    left over for the taps of another sequence as long are none to warn of.
    """
    known = [(x, rows) for x in sequences if (rows := x.static_length()) is not None]
    if n_steps is not None:
        wanted = constant_integer(n_steps)
        for argument, rows in known:
            if wanted is not None and rows < wanted:
                raise SequenceLengthError(
                    f"{title}: {'sequence ' if argument.name else ''}{argument.describe()}, but "
                    f"the loop takes n_steps={wanted} steps; pass a longer sequence or fewer steps"
                )
        return
    check_spans(title, sequences)
    steps = min((rows for _, rows in known), default=0)
    shortest = [x for x, rows in known if rows == steps]
    longer = [x for x, rows in known if rows > steps and x.rows not in {y.rows for y in shortest}]
    if not longer:
        return
    lowest, highest = longer[0].span
    needed = steps + highest - lowest
    cut = f"{longer[0].name or longer[0].argument}[{f'-{needed}:' if backwards else f':{needed}'}]"
    all_known = len(known) == len(sequences)
    message = (
        f"{title}: the sequences have different lengths: {shortest[0].describe()}, "
        f"{' and '.join(x.describe() for x in longer)}; the loop takes "
        f"{'' if all_known else 'at most '}{steps} steps and leaves rows unread. If you mean that, "
        f"{f'give n_steps={steps}, or ' if all_known else ''}cut what is longer: {cut}"
    )
    if strict:
        raise ValueError(message)
    warn(message)


def _common_length(sequences: Sequence[SequenceArgument]) -> Variable | None:
    """Return the length of the shortest sequence, or None where all are sure to be equal."""
    known = Lengths(sure=True)
    lengths: dict[LengthForm, Variable] = {}
    for argument in sequences:
        lowest, highest = argument.span
        rows = known.of(argument.variable)
        lengths.setdefault(rows + lowest - highest, argument.length())
    shortest, *others = lengths.values() if lengths else [None]
    for length in others:
        shortest = pt.minimum(shortest, length)
    return shortest if others else None


def read_rows(
    sequences: Sequence[SequenceArgument], n_steps: Variable | None, go_backwards: bool
) -> list[tuple[SequenceArgument, int, Variable]]:
    """Return the rows of every tap of every sequence, cut to the steps of the loop."""
    length = n_steps if n_steps is not None else _common_length(sequences)
    rows = []
    for argument in sequences:
        for tap in argument.taps:
            outer = argument.tap(tap)
            if go_backwards:
                outer = outer[::-1]
            if length is not None:
                outer = outer[:length]
            rows.append((argument, tap, outer))
    return rows
