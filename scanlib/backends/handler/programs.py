"""What C has to know of a loop program: ``scanlib_program`` in ``program.h``, filled in by Python.

Programs are known by their keys (`scanlib.kernels.compiled.program_key`), which are the same in all
processes; addresses are not, so that nothing that is kept on disk has any.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph

from scanlib._compat import thaw_graph
from scanlib.backends.handler.functions import function_address, has_compiled_function
from scanlib.kernels.compiled import ProgramEntry, compile_program, program_key
from scanlib.kernels.language import FRAME, NUMBERS
from scanlib.kernels.program import ArrayType, LoopProgram
from scanlib.kernels.python_driver import ENTRY, program_progress, raise_failure
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.kernel_graph import KernelGraph
from scanlib.schedules.array_loops import graph_program
from scanlib.schedules.inner_loops import LOOPS, loop_program

_KERNELS = ("prepare", "start", "first_run", "last_run", "last_round", "combine")
_COUNTS = ("n_inputs", "n_outputs", "n_functions", "n_shared", "n_sizes", "n_variants")
_WORDS = (
    *("size", "steps", "capacity", "begin", "taken", "workspace", "workspace_size"),
    *("part", "parts", "choice", "functions"),
)


class _Array(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("word", "ndim", "type", "itemsize", "grows", "extra", "first")
    ]


class _Program(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in (*_KERNELS, *_COUNTS, *_WORDS, "may_stop", "tell")),
        ("inputs", ctypes.POINTER(_Array)),
        ("outputs", ctypes.POINTER(_Array)),
        ("addresses", ctypes.POINTER(ctypes.c_int64)),
        ("shared", ctypes.POINTER(ctypes.c_int64)),
        ("sizes", ctypes.POINTER(ctypes.c_int64)),
        ("variants", ctypes.POINTER(ctypes.c_int64)),
        ("fail", ctypes.py_object),
        ("vary", ctypes.py_object),
    ]


_programs: dict[str, LoopProgram] = {}
# Whatever has the address of a program may call it as long as the process runs.
_described: dict[str, _Program] = {}
MOST_VARIANTS = 4  # of a program, `SCANLIB_VARIANTS` of ``program.h``
_varying = threading.RLock()


def _unlock() -> None:
    global _varying
    _varying = threading.RLock()  # a thread that held it is not in this process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def program_of(op: Any, node: Any = None) -> LoopProgram | None:
    """Return the kernels of an Op, which may turn out to be unfit; None where an operation has
    none. Those of a loop that is no matrix recurrence need no node."""
    try:
        if isinstance(op, LOOPS):
            program = loop_program(op, node)
        elif isinstance(op, KernelGraph):
            program = op.program or graph_program(thaw_graph(op.body))
        else:
            inputs = [variable.type() for variable in node.inputs]
            outputs = op.make_node(*inputs).outputs
            program = graph_program(FunctionGraph(inputs, outputs, clone=False))
    except NoKernelError:
        return None
    return program if all(map(has_compiled_function, program.functions)) else None


def program_of_node(node: Apply) -> LoopProgram | None:
    """Return the kernels of a node, None also where they may turn out to be unfit."""
    program = program_of(node.op, node)
    return None if program is None or program.may_be_unfit else program


def registered(program: LoopProgram) -> str:
    """Return the key of a program, whose `address` can be asked for from now on."""
    key = program_key(program)
    _programs.setdefault(key, program)
    return key


def address(key: str) -> int:
    """Return the address of a registered program, which is compiled if it has not been."""
    if key not in _described:
        _described[key] = _describe(_programs[key])
    return ctypes.addressof(_described[key])


def result_shapes(
    key: str, shapes: Sequence[Sequence[int]], values: dict[int, np.ndarray]
) -> list[tuple[int, ...]] | None:
    """Return the shapes of the results of a registered program that takes all its steps.

    `shapes` are those of the inputs; `values` are those that are known, by their numbers. None
    where other values decide. What the loop itself would raise for such inputs before its first
    step is raised here.
    """
    program, words = _programs[key], _programs[key].words
    read = set(program.kernels.prepare.slots) - {words.inputs[number] for number in values}
    if any(slot in words.inputs or slot >= words.functions for slot in read):
        return None
    table, frame = np.zeros(words.size, np.int64), np.zeros(FRAME, np.int64)
    for place, shape in zip(words.inputs, shapes, strict=True):
        table[place + 1 : place + 1 + len(shape)] = shape
    for number, value in values.items():
        table[words.inputs[number]] = value.ctypes.data
    prepare = ENTRY(ProgramEntry(program, "prepare").address())
    code = prepare(table.ctypes.data, frame.ctypes.data)
    if code:
        raise_failure(program, code, frame[NUMBERS:])
    found = []
    for output, place in zip(program.outputs, words.outputs, strict=True):
        shape = table[place + 1 : place + 1 + output.type.ndim].tolist()
        if output.grows:
            shape[0] = int(table[words.steps]) + output.extra
        found.append(tuple(shape))
    return found


def _describe(program: LoopProgram) -> _Program:
    """Return a program as C reads it.

    One that has `free_sizes` is compiled when it is called with arrays of large ones first.
    """
    words = program.words
    inputs = [_array(kind, place) for kind, place in zip(program.inputs, words.inputs, strict=True)]
    outputs = []
    for number, (output, place) in enumerate(zip(program.outputs, words.outputs, strict=True)):
        outputs.append(_array(output.type, place))
        outputs[-1].grows, outputs[-1].extra = output.grows, output.extra
        outputs[-1].first = words.first_row(number)
    functions = [function_address(node) for node in program.functions]
    sizes = [words.inputs[int(s.array[1:])] + 1 + s.axis for s in program.free_sizes]
    tell = program_progress(program).address if program.progress else 0
    described = _Program(
        *(0 for _ in _KERNELS),
        *(len(inputs), len(outputs), len(functions), len(program.shared), len(sizes), 0),
        *(getattr(words, name) for name in _WORDS),
        program.may_stop,
        tell,
        _sequence(_Array, inputs),
        _sequence(_Array, outputs),
        _sequence(ctypes.c_int64, functions),
        _sequence(ctypes.c_int64, program.shared),
        _sequence(ctypes.c_int64, sizes),
        _sequence(ctypes.c_int64, [0] * (MOST_VARIANTS * (len(sizes) + 1))),
        partial(_fail, program),
        partial(_vary, program),
    )
    if not sizes:
        _compile(program, described)
    return described


def _compile(program: LoopProgram, described: _Program) -> None:
    """Compile a program for arrays of any sizes; `prepare`, which says that it is, comes last."""
    code, kernels = compile_program(program), program.kernels
    names = [own.name for own in (kernels.prepare, kernels.start, kernels.run[0], kernels.run[-1])]
    names += [names[-1] if kernels.last_round else "", "combine"]
    if not kernels.start.body.statements:
        names[1] = ""
    for field, name in reversed([*zip(_KERNELS, names, strict=True)]):
        setattr(described, field, code.entries.get(f"{name}_entry", 0))


def _vary(program: LoopProgram, given: bytes) -> int:
    """Return the address of the program for inputs some of whose sizes are given, zero for a large
    one: of a variant that has them as known numbers, as long as there are few."""
    described, sizes = _described[program_key(program)], np.frombuffer(given, np.int64).tolist()
    with _varying:
        count, width, found = described.n_variants, len(sizes) + 1, ctypes.addressof(described)
        for row in range(0, count * width, width):  # made while this call waited, say
            *own, made = described.variants[row : row + width]
            if own == sizes:
                return int(made)
        numbers = {own: size for own, size in zip(program.free_sizes, sizes, strict=True) if size}
        is_kept = bool(numbers) and count < MOST_VARIANTS
        if is_kept and program.of_sizes is not None:
            variant = replace(program.of_sizes(numbers=numbers), progress=program.progress)
            if not variant.free_sizes and variant.words.size <= program.words.size:
                found = address(registered(variant))
        if found == ctypes.addressof(described) and not described.prepare:
            _compile(program, described)
        if is_kept:
            for k, word in enumerate([*sizes, found]):
                described.variants[count * width + k] = word
            described.n_variants += 1
        return found


def _sequence(kind: Any, items: Sequence[Any]) -> Any:
    return ctypes.cast((kind * len(items))(*items), ctypes.POINTER(kind))


def _array(kind: ArrayType, place: int) -> _Array:
    dtype = np.dtype(kind.dtype)
    return _Array(place, kind.ndim, dtype.num, dtype.itemsize)


def _fail(program: LoopProgram, code: int, values: bytes) -> None:
    """Raise what a code of a program stands for."""
    raise_failure(program, code, np.frombuffer(values, np.int64))
