"""Kernels run three ways: by the interpreter, by LLVM, and by a C++ compiler."""

import ctypes
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from pytensor.configdefaults import config

from scanlib.kernels import compiled
from scanlib.kernels.language import FRAME, POINTER, TABLE, Function, Kernel, Writer
from scanlib.kernels.printers import c
from scanlib.kernels.printers.llvm import print_kernels
from tests import kernel_interpreter as interpreter

COMPILER = config.cxx.split() or [""]
HEADERS = ("<math.h>", "<stdint.h>", "<string.h>")
ARGUMENTS = ("-fwrapv", "-fno-fast-math", "-ffp-contract=off", "-fno-trapping-math")
ENTRY = ctypes.PYFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
_engines = []


def write_kernel(name, types, write):
    """Return the kernel that `write` writes: it takes a `Writer` and the named parameters."""
    writer = Writer()
    parameters = tuple(writer.parameter(type, f"x_{key}") for key, type in types.items())
    write(writer, *parameters)
    return Kernel(name, parameters, writer.block, tuple(range(len(parameters))))


def interpreted(kernel, arrays):
    """Run a kernel in Python; return its code and the values of a failure."""
    code, values = interpreter.run(kernel, arrays)
    return code, [np.asarray(value) for value in values]


def _table(kernel, arrays):
    words = np.zeros(len(arrays), np.int64)
    for place, (value, given) in enumerate(zip(kernel.parameters, arrays, strict=True)):
        if value.type == POINTER:
            words[place] = given.ctypes.data
        else:
            item = np.asarray(given, value.type.dtype)
            words[place : place + 1].view(np.uint8)[: item.itemsize] = item.reshape(1).view(
                np.uint8
            )
    return words


def _run(entry, kernel, arrays):
    words, frame = _table(kernel, arrays), np.zeros(FRAME, np.int64)
    return entry(words.ctypes.data, frame.ctypes.data), frame[1:]


def by_llvm(kernel, arrays):
    """Run a kernel as machine code that LLVM made."""
    entry = f"{kernel.name}_entry"
    text = print_kernels(kernel)
    compiled._load_shared([kernel])
    code = compiled._load(compiled._object_code(text), [entry])
    _engines.append(code)
    return _run(ENTRY(code.entries[entry]), kernel, arrays)


def by_c(kernel, arrays, flags=("-O2", "-march=native")):
    """Run a kernel without failures as a function that the C++ compiler compiled."""
    headers = "".join(f"#include {header}\n" for header in HEADERS)
    function = Function(kernel.name, kernel.parameters, kernel.body, ())
    given = ", ".join(
        f"*({c.type_text(value.type)} *)(table + {8 * slot})"
        for value, slot in zip(kernel.parameters, kernel.slots, strict=True)
    )
    source = f"""{headers}{c.print_functions([function])}
    extern "C" int64_t go(char *table, char *frame) {{
      {kernel.name}({given});
      return 0;
    }}"""
    return _run(_library(source, flags), kernel, arrays)


@cache
def _library(source, flags):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.so"
        command = [*COMPILER, *flags, "-shared", "-fPIC", "-Wno-psabi", *ARGUMENTS]
        command += ["-x", "c++", "-", "-o", str(path)]
        subprocess.run(command, input=source.encode(), check=True)
        library = ctypes.CDLL(str(path))
    _engines.append(library)
    library.go.argtypes, library.go.restype = [ctypes.c_void_p] * 2, ctypes.c_int64
    return library.go


class RawAddress:
    """A place in memory that only its number is known of, for kernels that read tables."""

    def __init__(self, number):
        self.number = number

    def item(self, offset, size):
        memory = (ctypes.c_char * size).from_address(self.number + offset)
        return np.frombuffer(memory, np.uint8)

    def moved(self, count):
        return RawAddress(self.number + count)


def interpreted_entry(kernel, words):
    """Return an entry of a kernel that the interpreter runs."""

    def entry(table_address, frame_address):
        size = 8 * words.size
        table = np.frombuffer((ctypes.c_char * size).from_address(table_address), np.int64)
        frame = np.frombuffer((ctypes.c_char * (8 * FRAME)).from_address(frame_address), np.int64)
        given = []
        for value, slot in zip(kernel.parameters, kernel.slots, strict=True):
            if slot == TABLE:
                given.append(RawAddress(table_address))
            elif value.type == POINTER:
                given.append(RawAddress(int(table[slot])))
            else:
                given.append(table[slot])
        code, values = interpreter.run(kernel, given)
        for place, value in enumerate(values):
            frame[1 + place] = value
        return code

    return entry
