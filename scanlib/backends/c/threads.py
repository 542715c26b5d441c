"""The call of the steps: contiguous or strided, in one slice of the channels or in several.

With threads every one walks all steps of a slice of its own, so that none waits for another before
the end. Slices are cut along the first axis (along both last ones where they are one in memory).
That takes results which all have this axis, or are sums over it: each slice then has sums of its
own, which are added in the order of the slices. How many slices there are depends on the flags and
the sizes alone, and so does, bit by bit, what comes out.

The threads are those of the C++ standard library, started for each call. OpenMP would keep its own
between calls; its waiting threads hold on to their cores, which stalls loops for milliseconds where
another program needs one, and they do not survive a fork.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from pytensor.configdefaults import config
from pytensor.link.c.cmodule import GCC_compiler

from scanlib.backends.c.source import added, c_type
from scanlib.ops import parts
from scanlib.ops.c_code import NODE_NAME as NODE
from scanlib.ops.positions import has_positions

if TYPE_CHECKING:
    from scanlib.backends.c.channels import ChannelsPrinter
    from scanlib.ops.channels import Target


@cache
def compiler_has_threads() -> bool:
    """Whether the C++ compiler finds the standard library's threads."""
    source = "#include <thread>\nint main() { std::thread([] {}).join(); return 0; }"
    return bool(
        GCC_compiler.try_compile_tmp(
            source, tmp_prefix="scanlib_threads_", flags=["-pthread"], try_run=False
        )
    )


def threads_available() -> bool:
    """Whether threads are asked for, and the compiler has them."""
    return config.scanlib__threads > 1 and compiler_has_threads()


def can_slice(printer: ChannelsPrinter) -> bool:
    """Whether slices of the channels are independent of one another."""
    return bool(printer.n_loops) and not printer.scalars.can_fail and parts.can_slice(printer.op)


def can_merge(printer: ChannelsPrinter) -> bool:
    """Whether every array and every sum has both of the last two axes or none of them."""
    last = printer.layout.ndim - 1
    if last < 1 or has_positions(printer.graph.outputs):
        return False
    for _, _, axes, _ in printer.arrays():
        both = last - 1 in axes, last in axes
        if any(both) and not (all(both) and axes.index(last) == axes.index(last - 1) + 1):
            return False
    return all((last in t.reduced) == (last - 1 in t.reduced) for t in printer.plan.targets)


def write_slices(printer: ChannelsPrinter) -> None:
    """Write the call of ``NODE_run`` in ``NODE_call``."""
    line, last = printer.source.line, printer.layout.ndim - 1
    if not printer.n_loops:
        line(f"if ({NODE}_run<true>(data)) return -1;")
        return
    line("int fast = 1;")
    for length, stride, size in _strides(printer, last):
        line(f"if ({length} > 1 && {stride} != {size}) fast = 0;")
    for loop in range(printer.n_loops):
        line(f"data.low[{loop}] = 0;")
        line(f"data.high[{loop}] = data.size[{loop}];")
    merge = can_merge(printer)
    if merge:
        line("int merged = fast;")
        lengths = [length for length, *_ in _strides(printer, last)]
        for (length, stride, size), inner in zip(_strides(printer, last - 1), lengths, strict=True):
            line(f"if ({length} > 1 && {stride} != {inner} * {size}) merged = 0;")
        with printer.source.block("if (merged)"):
            for around, inside in _nested(printer, last):
                line(f"data.high[{inside}] *= data.high[{around}];")
                line(f"data.high[{around}] = 1;")
    run = f"if (fast ? {NODE}_run<true>(data) : {NODE}_run<false>(data)) return -1;"
    if not (threads_available() and can_slice(printer)):
        line(run)
        return
    _write_threads(printer, merge)
    with printer.source.block("else"):
        line(run)


def _strides(printer: ChannelsPrinter, axis: int) -> list[tuple[str, str, int]]:
    """Return, for inputs with an axis, its length, its stride, and the size of their items."""
    found = []
    for name, dtype, axes, lead in printer.arrays():
        if axis in axes and name in printer.inputs:
            place = axes.index(axis) + lead
            size = np.dtype(dtype).itemsize
            found.append((f"PyArray_DIM({name}, {place})", f"data.{name}_s[{place}]", size))
    return found


def _nested(printer: ChannelsPrinter, axis: int) -> list[tuple[int, int]]:
    """Return the loops over the axis before `axis`, each with the loop over `axis` inside it."""
    pairs = {
        (printer.loops[key, axis - 1], loop)
        for (key, level), loop in printer.loops.items()
        if level == axis
    }
    return sorted(pairs)


def _write_threads(printer: ChannelsPrinter, merge: bool) -> None:
    """Write the run in several slices, where there is enough to do."""
    line, block, axes = printer.source.line, printer.source.block, printer.axes_of_loops
    line("npy_intp channels = 0;")
    for number in (number for number, axis in enumerate(axes) if axis == 0):
        target = next(t for t in printer.plan.targets if printer.loops.get((id(t), 0)) == number)
        inside = sorted({loop for (key, _), loop in printer.loops.items() if key == id(target)})
        line(f"channels += {' * '.join(f'data.size[{loop}]' for loop in inside)};")
    line(f"npy_intp slices = channels * steps / {config.scanlib__parallel_channels};")
    least = parts.least_row(printer.op)
    line(f"if (slices > channels / {least}) slices = channels / {least};")
    line(f"if (slices > {config.scanlib__threads}) slices = {config.scanlib__threads};")
    sums = [target for target in printer.plan.targets if 0 in target.reduced]
    with block("if (slices > 1)"):
        for target in sums:
            name, output = target.array, _output(printer, target)
            line(f"const npy_intp {name}_bytes = PyArray_NBYTES(*{output});")
            line(f"scanlib_memory {name}_own;")
            line(f"if ({name}_own.get((slices - 1) * {name}_bytes)) return -1;")
            line(f"memset({name}_own.data, 0, (slices - 1) * {name}_bytes);")
        with block("const auto walk = [&](npy_intp k)"):
            line(f"{NODE}_data own = data;")
            line("own.part = k, own.parts = slices;")
            cut = [number for number, axis in enumerate(axes) if axis == 0]
            if merge and printer.layout.ndim == 2:
                # Merged loops over the first axis have length one.
                with block("if (merged)"):
                    _write_cuts(printer, [n for n, axis in enumerate(axes) if axis == 1])
                with block("else"):
                    _write_cuts(printer, cut)
            else:
                _write_cuts(printer, cut)
            for target in sums:
                name = target.array
                line(f"if (k) own.{name} = {name}_own.data + (k - 1) * {name}_bytes;")
            line(f"if (fast) {NODE}_run<true>(own); else {NODE}_run<false>(own);")
        printer.source.lines[-1] += ";"
        line("scanlib_in_threads(slices, walk);")
        for target in sums:
            _write_combination(printer, target)
        line("data.taken = steps;")


def _write_cuts(printer: ChannelsPrinter, loops: list[int]) -> None:
    for loop in loops:
        printer.source.line(f"own.low[{loop}] = data.high[{loop}] * k / slices;")
        printer.source.line(f"own.high[{loop}] = data.high[{loop}] * (k + 1) / slices;")


def _output(printer: ChannelsPrinter, target: Target) -> str:
    group = printer.stacks if target.kind == "output" else printer.finals
    return group[target.number]


def _write_combination(printer: ChannelsPrinter, target: Target) -> None:
    """Write the sum of the slices' sums, in their order."""
    dtype, name = target.value.type.dtype, target.array
    item = c_type(dtype)
    with printer.source.block("for (npy_intp k = 1; k < slices; k++)"):
        printer.source.line(f"{item} *sum = ({item} *)data.{name};")
        printer.source.line(
            f"const {item} *part = (const {item} *)({name}_own.data + (k - 1) * {name}_bytes);"
        )
        head = f"for (npy_intp j = 0; j < {name}_bytes / (npy_intp)sizeof({item}); j++)"
        with printer.source.block(head):
            printer.source.line(f"sum[j] = {added('sum[j]', 'part[j]', dtype)};")
