"""Machine code of kernels: one module for a loop and all it calls, optimized once, kept on disk.

Object code lies in PyTensor's compilation directory, under a hash of the module's text, of the
processor, of the release of LLVM, and of this file, which says how LLVM optimizes. They are what
the code is made of, so there is no version to be raised when a kernel changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import llvmlite.binding as llvm
from pytensor.configdefaults import config

from scanlib import kept_files
from scanlib.kernels.language import Function, Kernel
from scanlib.kernels.printers.llvm import print_kernels, shared_functions
from scanlib.kernels.processor import processor
from scanlib.kernels.program import LoopProgram
from scanlib.kernels.thread_parts import combining_kernel

# Kernels are written in lanes, take several steps or channels in a pass where that pays, and have
# in their loops what depends on the loops only: the rest of LLVM's passes take twice the time of
# these together, and gain nothing.
PASSES = (
    "always_inliner",
    "sroa",
    "sccp",
    "simplify_cfg",
    "loop_rotate",
    "instruction_combine",
)
LONG = 1500  # lines of a block


@dataclass(frozen=True)
class CompiledKernels:
    """Machine code in memory; the addresses of its functions, by name, are valid as long as this
    object is there."""

    entries: dict[str, int]
    engine: Any


_texts: WeakKeyDictionary[LoopProgram, str] = WeakKeyDictionary()


def program_text(program: LoopProgram) -> str:
    """Return the module of a loop's kernels."""
    if program not in _texts:
        _texts[program] = print_kernels(*_kernels_of(program))
    return _texts[program]


def _kernels_of(program: LoopProgram) -> list[Kernel]:
    combining = [combining_kernel(program)] if program.shared else []
    return [*program.kernels.all, *combining]


def program_key(program: LoopProgram) -> str:
    """Return what identifies a loop between processes: its module, its arrays, its messages.

    The code of two loops can be the same for arrays of different dtypes.
    """
    words = program.may_stop, program.progress, program.shared
    arrays = str((program.inputs, program.outputs, *words))
    messages = str(program.failures)
    whole = [program_text(program), arrays, messages, str(program.functions), program.name]
    return sha256("\n".join(whole).encode()).hexdigest()


def compile_program(program: LoopProgram) -> CompiledKernels:
    """Return the kernels of a loop as machine code, which stays in memory."""
    key = program_key(program)
    if key not in _loaded:
        kernels = _kernels_of(program)
        _load_shared(kernels)
        names = [f"{own.name}_entry" for own in kernels]
        _loaded[key] = _load(_object_code(program_text(program)), names)
    return _loaded[key]


@dataclass(frozen=True, repr=False)
class ProgramEntry:
    """A kernel of a program, as a function from the addresses of a table and a frame."""

    program: LoopProgram
    kernel: str

    def __repr__(self) -> str:
        return f"{self.kernel} of {program_key(self.program)}"

    def address(self) -> int:
        return compile_program(self.program).entries[f"{self.kernel}_entry"]


_loaded: dict[str, CompiledKernels] = {}


def _load_shared(roots: Sequence[Kernel | Function]) -> None:
    """Let modules find the shared functions that kernels call: each is compiled by itself, once."""
    for symbol, text in shared_functions(*roots).items():
        if symbol not in _loaded:
            _loaded[symbol] = _load(_object_code(text), [symbol])
            llvm.add_symbol(symbol, _loaded[symbol].entries[symbol])


def _object_code(text: str) -> bytes:
    """Return the object code of a module, from disk if it is there."""
    name, features = processor()
    identity = "\n".join([text, name, features, str(llvm.llvm_version_info), _source()])
    folder = Path(config.compiledir) / "scanlib_kernels"
    path = folder / f"{sha256(identity.encode()).hexdigest()}.o"
    kept = kept_files.read_sealed(path)
    if kept is None:
        kept = _compile(text)
        kept_files.write_sealed(path, kept)
    return kept


@cache
def _source() -> str:
    """Return the text of this module, which says how LLVM optimizes."""
    return Path(__file__).read_text(encoding="utf-8")


def _machine() -> Any:
    name, features = processor()
    target = llvm.Target.from_default_triple()
    return target.create_target_machine(name, features, opt=2, reloc="pic", codemodel="jitdefault")


def _compile(text: str) -> bytes:
    module = llvm.parse_assembly(text)
    module.verify()
    machine = _machine()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    passes = llvm.create_new_module_pass_manager()
    for name in PASSES:
        getattr(passes, f"add_{name}_pass")()
    passes.run(module, builder)
    # What grows with the index of a loop is added up in the text already. LLVM's pass for that
    # takes two fifths of this time, and the square of the number of loops. Its own order of
    # instructions takes the square of the longest block; this one does not. (The fastest order of
    # all, `linearize`, makes wrong code.)
    is_long = max(block.count("\n") for block in text.split(":\n")) > LONG
    llvm.set_option("scanlib", "-disable-lsr=1")
    llvm.set_option("scanlib", f"-pre-RA-sched={'list-burr' if is_long else 'default'}")
    try:
        return machine.emit_object(module)
    finally:
        llvm.set_option("scanlib", "-disable-lsr=0")
        llvm.set_option("scanlib", "-pre-RA-sched=default")


def _load(code: bytes, names: Sequence[str]) -> CompiledKernels:
    empty = llvm.parse_assembly("")
    engine = llvm.create_mcjit_compiler(empty, _machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    entries = {name: engine.get_function_address(name) for name in names}
    return CompiledKernels(entries, engine)
