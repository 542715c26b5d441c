"""Runs the instructions of a graph: by ``graph.h``, or in Python where there is no C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import numpy as np

from scanlib.backends.handler.instructions import (
    CALL,
    CHECK,
    COPY,
    NO_END,
    REGISTER,
    ROWS,
    RUN,
    SHUFFLE,
    SIZE,
    Instruction,
    Instructions,
)
from scanlib.backends.handler.programs import address, registered
from scanlib.backends.handler.thunks import library, runner


class GraphRunner:
    """Runs a graph.

    Parameters
    ----------
    whole : Instructions
    inputs, outputs : sequence of list
        Lists of one item, in which values are.
    timed : bool
        Whether to note how long instructions take; Python runs them then.

    Attributes
    ----------
    stored : callable
        Computes the values of `outputs` from those of `inputs`, and returns a list of them.
    values : callable
        Returns the list of results for given values.
    where : list of int
        The number of the instruction that failed last.
    seconds : list of float
        How long each instruction took in all calls.
    """

    def __init__(
        self,
        whole: Instructions,
        inputs: Sequence[list[Any]],
        outputs: Sequence[list[Any]],
        timed: bool = False,
    ) -> None:
        self.where = [0]
        self.seconds = [0.0] * len(whole.code)
        self.stored: Callable[[], list[Any]]
        self.values: Callable[..., list[Any]]
        found = None if timed else library()
        if found is None:
            self._run_in_python(whole, inputs, outputs)
            return
        code = tuple(
            (
                own.kind,
                0 if own.program is None else address(registered(own.program)),
                own.function,
                *map(tuple, (own.inputs, own.outputs, own.numbers, own.done)),
            )
            for own in whole.code
        )
        self.stored, self.values = found.scanlib_graph(
            code,
            tuple(whole.constants),
            tuple(whole.results),
            tuple(inputs),
            tuple(outputs),
            self.where,
        )

    def _run_in_python(
        self, whole: Instructions, inputs: Sequence[list[Any]], outputs: Sequence[list[Any]]
    ) -> None:
        functions = [python_function(own) for own in whole.code]

        def values(*given: Any) -> list[Any]:
            registers = [*whole.constants, *given]
            registers += [None] * (whole.count - len(registers))
            for number, (own, function) in enumerate(zip(whole.code, functions, strict=True)):
                self.where[0] = number
                started = perf_counter()
                function(registers)
                self.seconds[number] += perf_counter() - started
                for place in own.done:
                    registers[place] = None
            return [registers[place] for place in whole.results]

        def stored() -> list[Any]:
            results = values(*(cell[0] for cell in inputs))
            for cell, result in zip(outputs, results, strict=True):
                cell[0] = result
            return results

        self.values, self.stored = values, stored


def python_function(own: Instruction) -> Callable[[list[Any]], None]:
    """Return what does an instruction with a list of registers."""
    compute = _several(own)

    def run(registers: list[Any]) -> None:
        results = compute(registers, *(registers[place] for place in own.inputs))
        for place, result in zip(own.outputs, results, strict=True):
            registers[place] = result

    return run


def _several(own: Instruction) -> Callable[..., Sequence[Any]]:
    """Return a function from the registers and the inputs of an instruction to its outputs."""
    if own.kind == RUN:
        assert own.program is not None
        run = runner(own.program)
        return lambda registers, *inputs: run(*inputs)
    if own.kind in (CALL, ROWS):
        function = own.function
        assert function is not None
        if len(own.outputs) == 1:
            return lambda registers, *inputs: [function(*inputs)]
        return lambda registers, *inputs: function(*inputs)
    one = {CHECK: _check, SHUFFLE: _shuffle, SIZE: _size, COPY: _copy}.get(own.kind, _subtensor)
    return lambda registers, *inputs: [one(own, registers, *inputs)]


def _check(own: Instruction, registers: list[Any], value: Any, *conditions: Any) -> Any:
    if not all(conditions):
        assert own.function is not None
        own.function()
    return value


def _shuffle(own: Instruction, registers: list[Any], value: Any) -> Any:
    value, kept = np.asarray(value), [axis for axis in own.numbers if axis >= 0]
    dropped = tuple(axis for axis in range(value.ndim) if axis not in kept)
    if any(value.shape[axis] != 1 for axis in dropped):
        raise ValueError("an axis that is dropped does not have length one")
    rest = value.transpose(*kept, *dropped).reshape([value.shape[axis] for axis in kept])
    return rest[tuple(np.newaxis if axis < 0 else slice(None) for axis in own.numbers)]


def _size(own: Instruction, registers: list[Any], value: Any) -> Any:
    return np.asarray(np.shape(value)[own.numbers[0]], np.int64)


def _copy(own: Instruction, registers: list[Any], value: Any) -> Any:
    return np.array(value)


def _subtensor(own: Instruction, registers: list[Any], value: Any, *ends: Any) -> Any:
    def end(kind: int, number: int) -> int | None:
        return None if kind == NO_END else int(registers[number] if kind == REGISTER else number)

    indices: list[Any] = []
    for axis, first in enumerate(range(0, len(own.numbers), 7)):
        is_slice, *pairs = own.numbers[first : first + 7]
        start, stop, step = (end(*pairs[k : k + 2]) for k in (0, 2, 4))
        if is_slice:
            indices.append(slice(start, stop, step))
            continue
        assert start is not None
        if not -value.shape[axis] <= start < value.shape[axis]:
            raise IndexError("index out of bounds")
        indices.append(start)
    found = value[tuple(indices)]
    return found if isinstance(found, np.ndarray) else np.asarray(found)
