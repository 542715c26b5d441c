"""The numba backend: loops inside numba mode, and the compiled loop that `perform` runs."""

from scanlib.backends.numba import (
    checked_rows,
    dispatch,
    graph,
    initial,
    linker,
    loop,
    memory,
    one_row,
    padded_rows,
    recurrences,
    reductions,
    segments,
)

memory.keep_freed_memory()

__all__ = [
    "checked_rows",
    "dispatch",
    "graph",
    "initial",
    "linker",
    "loop",
    "memory",
    "one_row",
    "padded_rows",
    "recurrences",
    "reductions",
    "segments",
]
