"""Loops on NumPy arrays: under PyTensor's C linker without a C compiler, and in `perform`.

PyTensor's virtual machine calls the function in a thunk's capsule straight from C.
"""

import ctypes
import os
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.scalar.basic import ScalarType

from scanlib._compat.numba import NRT_FUNCTIONS
from scanlib.backends.handler.functions import function_address
from scanlib.backends.handler.library import load_library, python_options, source
from scanlib.backends.handler.programs import address, program_of, registered
from scanlib.kernels.program import LoopProgram
from scanlib.kernels.python_driver import compiled_runner
from scanlib.ops.c_linker import MayBeUnfitError, NoCCodeError
from scanlib.ops.execution import brings

COMPILED = "scanlib_compiled"  # what code calls that numba compiled
_MEMORY = ("MemInfo_alloc_aligned", "MemInfo_data", "MemInfo_release")
OPTIONS = ("-O1", "-std=c++11", "-w", f"-I{np.get_include()}")


_lock = threading.Lock()
_loaded: list[Any] = []  # the library, None if it cannot be compiled; empty before it was tried


def library() -> Any:
    """Return the library of ``thunk.cpp``, None if it cannot be compiled: PyTensor and PyMC take
    the compiler away while they fold constants, and what is there stays."""
    return _library_by(str(config.cxx))


def prepare_library() -> None:
    """Have the library compiled while the first graph is built, if it has never been."""
    if not config.cxx or not config.compiledir:  # flags are made by the first thread that asks
        return
    threading.Thread(target=_library_by, args=[str(config.cxx)], daemon=True).start()


def _library_by(compiler: str) -> Any:
    with _lock:
        if compiler and not _loaded:
            _loaded.append(_load(compiler))
        return _loaded[0] if _loaded else None


def _unlock() -> None:
    global _lock
    _lock = threading.Lock()  # a thread that held it is not in this process


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_unlock)


def _load(compiler: str) -> Any:
    options = [*OPTIONS, *python_options()]
    found = load_library(compiler, "scanlib_thunk", source("thunk.cpp"), options, ctypes.PyDLL)
    if found is None:
        return None
    found.scanlib_set_up.argtypes = (ctypes.py_object,)
    found.scanlib_set_up(address)
    memory = [ctypes.c_void_p(NRT_FUNCTIONS[name]) for name in _MEMORY]
    found.scanlib_set_memory((ctypes.c_void_p * len(memory))(*memory))
    llvm.add_symbol(COMPILED, ctypes.cast(found[COMPILED], ctypes.c_void_p).value)
    found.scanlib_function.argtypes = (ctypes.c_void_p,)
    found.scanlib_function.restype = ctypes.py_object
    found.scanlib_thunk.argtypes = (ctypes.c_void_p, *[ctypes.py_object] * 3)
    found.scanlib_thunk.restype = ctypes.py_object
    found.scanlib_run_thunk.argtypes = (ctypes.py_object,)
    return found


class Thunk:
    """Runs one node of a function on the values in its storage, lists of one item; in those of
    `computed` the item says whether an output has been computed. The outputs `numbers` are
    numbers, not arrays: what C code reads as a ``PyArrayScalar``."""

    lazy = False

    def __init__(
        self,
        key: str,
        inputs: Sequence[list[Any]],
        outputs: Sequence[list[Any]],
        computed: Sequence[list[bool]],
        numbers: Collection[int] = (),
    ) -> None:
        self.inputs, self.outputs, self.computed = list(inputs), list(outputs), computed
        self.error: list[Any] = [None, None, None]
        cells = (*self.inputs, *self.outputs)
        are_numbers = bytes(k in numbers for k in range(len(self.outputs)))
        self.cthunk = library().scanlib_thunk(address(key), self.error, cells, are_numbers)

    def __call__(self) -> None:
        library().scanlib_run_thunk(self.cthunk)
        for cell in self.computed:
            cell[0] = True


def make_thunk(
    program: LoopProgram,
    node: Apply,
    storage_map: dict[Variable, list[Any]],
    compute_map: dict[Variable, list[bool]] | None,
    no_recycling: Collection[Variable],
) -> Thunk:
    """Return what runs a node; the arguments are those of `COp.make_c_thunk`."""
    if library() is None:
        raise NotImplementedError("the handler of loop programs cannot be compiled")
    computed = [] if compute_map is None else [compute_map[out] for out in node.outputs]
    for out in node.outputs:
        if out in no_recycling:
            storage_map[out][0] = None
    inputs, outputs = ([storage_map[v] for v in some] for some in (node.inputs, node.outputs))
    numbers = [k for k, out in enumerate(node.outputs) if isinstance(out.type, ScalarType)]
    return Thunk(registered(program), inputs, outputs, computed, numbers)


def program_function(program: LoopProgram) -> Callable[..., Any]:
    """Return a function from the inputs of a loop to its output, or to several."""
    if library() is not None:
        return library().scanlib_function(address(registered(program)))
    run = compiled_runner(program, [function_address(node) for node in program.functions])
    return run if len(program.outputs) > 1 else lambda *inputs: run(*inputs)[0]


def runner(program: LoopProgram) -> Callable[..., Sequence[np.ndarray]]:
    """Return a function from the inputs of a loop to the sequence of its outputs."""
    call = program_function(program)
    return call if len(program.outputs) > 1 else lambda *inputs: (call(*inputs),)


@brings("thunk")
def thunk_maker(node: Apply) -> Callable[..., Thunk]:
    """Return what makes the thunk of a loop; `NoCCodeError` if it has no program."""
    program = program_of(node.op, node)
    if program is None:
        raise NoCCodeError(f"{node.op} runs through perform")
    if program.may_be_unfit:
        raise MayBeUnfitError(f"{node.op} runs through perform, a carry may get another shape")
    return partial(make_thunk, program)
