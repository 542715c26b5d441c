"""Runs the kernels of a loop on NumPy arrays: the steps of `scanlib.kernels.program`, in Python."""

import builtins
import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from scanlib.kernels.compiled import compile_program
from scanlib.kernels.language import ASK, FRAME, FULL, INTERRUPTED, NUMBERS, PROGRESS
from scanlib.kernels.program import LoopProgram
from scanlib.kernels.progress import DONE, FAILED, Progress, progress_of
from scanlib.ops import errors, execution

Entry = Callable[[int, int], int]
# Polls ask the interpreter, whose lock must be held.
ENTRY = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)


def compiled_runner(program: LoopProgram, functions: Sequence[int] = ()) -> "Runner":
    """Return a function from the inputs of a loop to its outputs, which runs machine code.

    `functions` are the addresses of `LoopProgram.functions`.
    """
    code, kernels = compile_program(program), program.kernels
    prepare, start, *runs = (ENTRY(code.entries[f"{own.name}_entry"]) for own in kernels.all)
    return Runner(program, prepare, start, partial(_run_parts, program, runs), code, functions)


def _run_parts(program: LoopProgram, runs: Sequence[Entry], table: int, frame: int) -> int:
    """Run the parts of a loop one after the other."""
    words, code = program.words, 0
    numbers = np.ctypeslib.as_array((ctypes.c_int64 * words.size).from_address(table))
    for part in range(max(int(numbers[words.parts]), 1)):
        numbers[words.part] = part
        code = code or runs[numbers[words.choice]](table, frame)
    numbers[words.part] = 0
    return code or (runs[-1](table, frame) if program.kernels.last_round else 0)


@dataclass
class Runner:
    """Calls the kernels of a loop by their entries, which take the addresses of a table and a
    frame; `code` is kept as long as this object is there."""

    program: LoopProgram
    prepare: Entry
    start: Entry
    run: Entry
    code: Any = None
    functions: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.progress = program_progress(self.program) if self.program.progress else None

    def __call__(self, *inputs: Any) -> list[np.ndarray]:
        program, words = self.program, self.program.words
        table, frame = np.zeros(words.size, np.int64), np.zeros(FRAME, np.int64)
        frame[ASK] = self.progress.address if self.progress else poll_address()
        arrays = [
            np.asarray(value, kind.dtype)
            for value, kind in zip(inputs, program.inputs, strict=True)
        ]
        for array, place in zip(arrays, words.inputs, strict=True):
            table[place : place + 1 + 2 * array.ndim] = (
                array.ctypes.data,
                *array.shape,
                *array.strides,
            )
        table[words.functions : words.size] = self.functions
        self.check(self.prepare(table.ctypes.data, frame.ctypes.data), frame)
        outputs = []
        for output, place in zip(program.outputs, words.outputs, strict=True):
            shape = table[place + 1 : place + 1 + output.type.ndim]
            outputs.append(np.empty(shape, output.type.dtype))
            table[place] = outputs[-1].ctypes.data
        workspace = np.empty(table[words.workspace_size], np.uint8)
        table[words.workspace] = workspace.ctypes.data
        self.start(table.ctypes.data, frame.ctypes.data)
        while True:
            code = self.run(table.ctypes.data, frame.ctypes.data)
            if code != FULL:
                break
            self.grow(table, outputs)
        if self.progress:
            frame[PROGRESS] = FAILED if code else DONE
            interrupted = self.progress.tell(frame.ctypes.data)
            code = code or (INTERRUPTED if interrupted else 0)
        self.check(code, frame)
        return [self.result(table, k, output) for k, output in enumerate(outputs)]

    def grow(self, table: np.ndarray, outputs: list[np.ndarray]) -> None:
        """Give outputs that are full twice as many rows."""
        words = self.program.words
        table[words.begin] = table[words.taken]
        capacity = min(2 * table[words.capacity], table[words.steps])
        table[words.capacity] = capacity
        for k, output in enumerate(self.program.outputs):
            if output.grows:
                rows = outputs[k].shape[0]
                longer = np.empty(
                    (capacity + output.extra, *outputs[k].shape[1:]), outputs[k].dtype
                )
                longer[:rows] = outputs[k]
                outputs[k] = longer
                table[words.outputs[k]] = longer.ctypes.data
                table[words.outputs[k] + 1] = longer.shape[0]

    def result(self, table: np.ndarray, k: int, output: np.ndarray) -> np.ndarray:
        """Return the rows of an output that are the result."""
        if not output.ndim:
            return output
        first, rows = table[self.program.words.first_row(k) :][:2]
        return output if rows == output.shape[0] else output[first : first + rows]

    def check(self, code: int, frame: np.ndarray) -> None:
        """Raise what a code means."""
        if code != 0:
            raise_failure(self.program, code, frame[NUMBERS:])


def poll_address() -> int:
    """Return the address of the function that tells whether the user wants a kernel to end."""
    return ctypes.cast(ctypes.pythonapi.PyErr_CheckSignals, ctypes.c_void_p).value or 0


def program_progress(program: LoopProgram) -> Progress:
    """Return what draws the progress of a loop's runs."""
    return progress_of(program.name, not program.may_stop)


def raise_failure(program: LoopProgram, code: int, values: np.ndarray) -> None:
    """Raise the error that a code of a loop stands for, with the numbers in its message."""
    if code == INTERRUPTED:
        raise program_progress(program).taken_error()
    failure = program.failures[code]
    kind = next(
        getattr(home, failure.error)
        for home in (errors, builtins, np.linalg, execution)
        if hasattr(home, failure.error)
    )
    numbers = map(int, values[: failure.count])
    raise kind(failure.template.format(*numbers) if failure.count else failure.template)
