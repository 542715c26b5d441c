"""Parts of a loop in threads of their own.

`run` is called once for each of ``words.parts`` parts, with tables of their own; who calls is the
handler in C++ (``program.h``), where threads are. Outputs that are sums over the parts
(`LoopProgram.shared`) are the first part's; others start from zero in memory of their own, which
`combining_kernel` adds, in the order of the parts. How many parts there are depends on flags and
sizes alone, and so does, bit by bit, what comes out.
"""

import sys

from pytensor.configdefaults import config

from scanlib.kernels.language import INT64, POINTER, Kernel, Value
from scanlib.kernels.program import LoopProgram, TableKernel
from scanlib.kernels.scalars import added
from scanlib.kernels.spans import itemsize, load_number, store_number


def system_has_threads() -> bool:
    """Whether there are the threads that the handler starts, and a compiler for it."""
    return sys.platform != "win32" and bool(config.cxx)


def wanted_threads() -> int:
    """Return how many threads a loop may use."""
    return config.scanlib__threads if system_has_threads() else 1


def combining_kernel(program: LoopProgram) -> Kernel:
    """Return the kernel that adds a part's sums to those of the first part.

    Its table is the part's, with the addresses of the first part's sums after it.
    """
    out, words = TableKernel("combine"), program.words
    w = out.writer
    for place, number in enumerate(program.shared):
        kind, base = program.outputs[number].type, words.outputs[number]
        own = out.word(base, POINTER, f"sum{number}")
        first = out.word(words.size + place, POINTER, f"first{number}")
        items: Value = w.constant(1, INT64)
        for axis in range(kind.ndim):
            items = items * out.number(base + 1 + axis, f"dim{number}_{axis}")
        with w.loop(0, items) as i:
            offset = i * itemsize(kind.dtype)
            old, new = (load_number(w, kind.dtype, place, offset) for place in (first, own))
            store_number(w, first, offset, added(old, new))
    return out.kernel()
