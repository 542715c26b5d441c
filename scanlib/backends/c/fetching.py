"""Rows that are asked for some steps before they are read or written.

When that pays, and why, stands in `scanlib.kernels.schedules.channels`. Here arrays may have
gaps between their rows; those are not asked for. A thread asks for its own part of each row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from scanlib.kernels.schedules.channels import DISTANCE, LEAST_BYTES, LINE, LONGEST_ROW

if TYPE_CHECKING:
    from scanlib.backends.c.nest import NestPrinter

FETCHING = f"""
#ifndef SCANLIB_FETCHING
#define SCANLIB_FETCHING
/* How many rows ahead to ask for, 0 for not at all: of the longest row, and all bytes of a step. */
static inline npy_intp scanlib_rows_ahead(npy_intp steps, npy_intp longest, npy_intp all) {{
  if (longest < {LINE} || longest > {LONGEST_ROW} || all < {LEAST_BYTES} / (steps ? steps : 1))
    return 0;
  return longest > {DISTANCE} ? 1 : {DISTANCE} / longest;
}}
/* Asks for one of some parts of a row, which need not exist. */
static inline void scanlib_fetch(const char *row, npy_intp size, npy_intp part, npy_intp parts) {{
#if defined(__GNUC__)
  const npy_intp stop = size * (part + 1) / parts;
  for (npy_intp place = size * part / parts; place < stop; place += {LINE})
    __builtin_prefetch((const char *)((size_t)row + (size_t)place), 0, 3);
#endif
}}
#endif
"""


def streams(printer: NestPrinter) -> Iterator[tuple[str, str]]:
    """Yield the arrays that are walked a row at each step, and the names of their objects."""
    for variable, (name, axes) in printer.parts.items():
        if variable in printer.inner.rows and any(axis is not None for axis in axes):
            yield name, name
    for i, output in enumerate(printer.histories):
        if not printer.signature.untraced[i] and not printer.is_local(i):
            yield f"h{i}", f"*{output}"
    for i, output in enumerate(printer.stacks):
        if any(axis is not None for axis in printer.layout.outputs[i]):
            yield f"z{i}", f"*{output}"


def write_rows_ahead(printer: NestPrinter) -> None:
    """Write, before the steps, how long rows are and how many of them are asked for ahead."""
    line, found = printer.source.line, list(streams(printer))
    line("data.ahead = data.part = 0, data.parts = 1;")
    if not found:
        return
    line("npy_intp longest = 0, all = 0;")
    for name, array in found:
        with printer.source.block(""):
            line(f"const npy_intp rows = PyArray_DIM({array}, 0);")
            line(f"npy_intp size = rows ? PyArray_NBYTES({array}) / rows : 0;")
            line(f"const npy_intp stride = PyArray_STRIDE({array}, 0);")
            line(f"if (size < {LINE} || (stride != size && stride != -size)) size = 0;")
            line(f"data.{name}_row_bytes = size;")
            line("all += size;")
            line("if (size > longest) longest = size;")
    line("data.ahead = scanlib_rows_ahead(steps, longest, all);")


def write_fetches(printer: NestPrinter) -> None:
    """Ask, in a step, for the rows that later steps read and write."""
    found = list(streams(printer))
    if not found:
        return
    place = f"(t {'-' if printer.reverse else '+'} data.ahead)"
    with printer.source.block("if (FAST && data.ahead)"):
        for name, _ in found:
            row = f"{name} + {place} * {name}_0"
            size = f"data.{name}_row_bytes"
            printer.source.line(f"scanlib_fetch({row}, {size}, data.part, data.parts);")
