"""Runs the instructions of a graph: by ``graph.h``, or in Python where there is no C++ compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from scanlib.backends.handler.functions import performed
from scanlib.backends.handler.instructions import CALL, ROWS, Instruction, Instructions
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
        results = compute(*(registers[place] for place in own.inputs))
        for place, result in zip(own.outputs, results, strict=True):
            registers[place] = result

    return run


def _several(own: Instruction) -> Callable[..., Sequence[Any]]:
    """Return a function from the inputs of an instruction to its outputs."""
    if own.program is not None:
        return runner(own.program)
    function = own.function if own.kind in (CALL, ROWS) else performed(own.node)
    assert function is not None
    return function if len(own.outputs) > 1 else lambda *inputs: [function(*inputs)]
