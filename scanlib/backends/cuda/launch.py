"""From the sizes of a call to launches of kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from scanlib.backends.cuda.compiler import compile_kernels
from scanlib.backends.cuda.driver import Driver
from scanlib.backends.cuda.geometry import Geometry
from scanlib.backends.cuda.parameters import Parameters, contiguous
from scanlib.backends.cuda.printer import LoopWriter
from scanlib.backends.cuda.schedule import Schedule, choose
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan

FEW_TERMS = 64  # of a sum that one thread adds up
RESETS = 256  # threads of a block that clears flags
FLAT = 32  # threads of a block that repairs channels
MOST_BLOCKS = 2**31 - 1


class Launch(NamedTuple):
    """One launch: the kernel's place among `Kernels.names`, blocks, threads of a block."""

    kernel: int
    blocks: int
    threads: int


class Call(NamedTuple):
    """All that a call needs but for addresses.

    The numbers of the kernels; where among them the addresses go, of the inputs, the outputs, the
    works; how many bytes each array for intermediate results needs; the launches.
    """

    words: list[int]
    slots: list[int]
    works: list[int]
    launches: list[Launch]


class Kernels:
    """Kernels, compiled for the devices on which they run.

    Parameters
    ----------
    source : str
        The translation unit.
    names : list of str
        Of the kernels in it.
    parameters : Parameters
    """

    def __init__(self, source: str, names: list[str], parameters: Parameters) -> None:
        self.source = source
        self.names = names
        self.parameters = parameters
        self._loaded: dict[int, list[int]] = {}

    def handles(self, driver: Driver, context: int) -> list[int]:
        """Return the kernels' handles in a context, compiled if need be.

        Raises
        ------
        NoCompilerError, KernelCompileError, DriverError
        """
        if context not in self._loaded:
            with driver.current(context):
                code = compile_kernels(self.source, driver.architecture())
                self._loaded[context] = driver.load(code, self.names)
        return self._loaded[context]

    def of(self, sizes: Any, processors: int) -> Kernels:
        """Return the kernels for a call of these sizes."""
        return self

    def prepared(
        self,
        values: dict[str, int],
        strides: Sequence[tuple[int, ...]],
        works: list[int],
        jobs: Sequence[tuple[str, int, int]],
    ) -> Call:
        """Return a call from counts, strides of all arrays, and names, blocks, threads."""
        words, slots = self.parameters.pack(values, strides)
        for _, blocks, _ in jobs:
            if blocks > MOST_BLOCKS:
                raise ValueError(f"a loop over so many channels needs {blocks} blocks, too many")
        launches = [Launch(self.names.index(name), *sizes) for name, *sizes in jobs]
        return Call(words, slots, works, launches)


UNITS = {"rows": "walk", "look-back": "look_back"}  # of schedules


class KernelLoop:
    """The kernels of one elementwise loop, those of each schedule in a unit of their own.

    A unit is compiled when the first call needs it: of most loops, one ever is.

    Parameters
    ----------
    op : ElemwiseScan

    Raises
    ------
    NoCCodeError
        If the loop has no kernel.
    """

    def __init__(self, op: ElemwiseScan) -> None:
        self.writer = LoopWriter(op)
        self.parameters = self.writer.parameters
        self._units: dict[str, LoopUnit] = {}

    def unit(self, name: str) -> LoopUnit:
        """Return one of the units that the writer names."""
        if name not in self._units:
            self._units[name] = LoopUnit(self.writer, name)
        return self._units[name]

    def of(self, sizes: Geometry, processors: int) -> LoopUnit:
        """Return the kernels for a call of these sizes."""
        kind = schedule_of(self.writer, sizes, processors).kind
        return self.unit(UNITS.get(kind, kind))

    @property
    def source(self) -> str:
        """The unit that every loop has, with all of its operations."""
        return self.unit("serial").source


def schedule_of(writer: LoopWriter, sizes: Geometry, processors: int) -> Schedule:
    """Return how a loop is walked."""
    return choose(
        sizes.steps, sizes.channels, processors, writer.composed is not None,
        writer.threads, writer.items,
    )  # fmt: skip


class LoopUnit(Kernels):
    """The kernels of one elementwise loop for some schedules.

    Parameters
    ----------
    writer : LoopWriter
    name : str
        One of `writer.units()`.
    """

    def __init__(self, writer: LoopWriter, name: str) -> None:
        self.writer = writer
        super().__init__(writer.write(name), list(writer.kernels(name)), writer.parameters)

    def call(self, sizes: Geometry, strides: Sequence[tuple[int, ...]], processors: int) -> Call:
        """Return how the kernels are called on a device with so many multiprocessors.

        `strides` are those of the arguments and of the results, in bytes.
        """
        writer = self.writer
        plan = schedule_of(writer, sizes, processors)
        values = {
            "steps": sizes.steps,
            "channels": sizes.channels,
            "lanes": plan.lanes,
            "lane_bits": plan.lanes.bit_length() - 1,
            "chunk": plan.chunk,
            "chunks": plan.chunks,
        }
        values |= {f"n{axis}": size for axis, size in enumerate(sizes.sizes)}
        values |= sizes.lengths
        terms = self.parameters.arrays[len(strides) :]
        shapes = [
            (plan.chunks if array.name.startswith("partial") else sizes.steps, *sizes.sizes)
            for array in terms
        ]
        items = [np.dtype(array.dtype).itemsize for array in terms]
        every = [*strides, *map(contiguous, shapes, items)]
        works = [item * prod(shape) for item, shape in zip(items, shapes, strict=True)]
        if writer.composed is not None:
            count = sizes.channels * plan.chunks if plan.kind == "look-back" else 0
            works += [2 * count * writer.summary_bytes, count * writer.state_bytes]
            works.append(4 * flags_of(sizes, plan) if count else 0)
        dense = sizes.channels == 1 and writer.is_dense(every)
        jobs = [*self._walks(sizes, plan, dense), *self._sums(sizes, plan)]
        return self.prepared(values, every, works, jobs)

    def _walks(
        self, sizes: Geometry, plan: Schedule, dense: bool
    ) -> Iterator[tuple[str, int, int]]:
        """Yield the launches that take the steps: names, blocks, threads of a block."""
        blocks = -(-sizes.channels // plan.lanes) * plan.chunks
        if not sizes.channels:
            return
        if plan.kind == "serial":
            yield f"serial_{plan.ahead}", -(-sizes.channels // plan.threads), plan.threads
        elif plan.kind == "rows":
            yield "walk", blocks, plan.threads
        else:
            yield "reset", -(-flags_of(sizes, plan) // RESETS), RESETS
            name = "look_back_dense" if dense and plan.lanes == 1 else "look_back"
            yield name, blocks, plan.threads
            yield "mend", -(-sizes.channels // FLAT), FLAT

    def _sums(self, sizes: Geometry, plan: Schedule) -> Iterator[tuple[str, int, int]]:
        """Yield the launches that add up what channels have left: a block or a thread each."""
        threads = self.writer.threads
        results = [f"c{i}" for i in self.writer.sums] + [f"z{i}" for i in self.writer.summed]
        for k, name in enumerate(results):
            array = self.writer.arrays[name]
            items = prod(sizes.sizes[axis] for _, axis in array.kept)
            terms = sizes.channels // max(items, 1) * (1 if array.lead else plan.chunks)
            items *= sizes.steps if array.lead else 1
            if items and terms < FEW_TERMS:
                yield f"short_sum_{k}", -(-items // threads), threads
            elif items:
                yield f"sum_{k}", items, threads


def flags_of(sizes: Geometry, plan: Schedule) -> int:
    """Return how many flags blocks need that look back; see `look_back.cuh`."""
    return 1 + sizes.channels * (1 + 3 * plan.chunks)


def launch(
    driver: Driver, handles: Sequence[int], call: Call, addresses: Sequence[int], stream: int
) -> None:
    """Launch the kernels of a call on a stream; addresses are in the order of `Call.slots`."""
    words = (ctypes.c_longlong * len(call.words))(*call.words)
    for slot, address in zip(call.slots, addresses, strict=True):
        words[slot] += address
    for one in call.launches:
        driver.launch(handles[one.kernel], one.blocks, one.threads, stream, words)
