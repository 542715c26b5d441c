"""From the sizes of a call to launches of kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

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
MOST_BLOCKS = 2**31 - 1


@dataclass(frozen=True)
class Launch:
    """One launch: the kernel's place among `Kernels.names`, blocks, threads of a block."""

    kernel: int
    blocks: int
    threads: int


@dataclass(frozen=True)
class Call:
    """All that a call needs but for addresses.

    Attributes
    ----------
    words : list of int
        The numbers of the kernels.
    slots : list of int
        Where among them the addresses go: of the inputs, the outputs, the works.
    works : list of int
        How many bytes each array for intermediate results needs.
    launches : list of Launch
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

    def launch_of(self, name: str, blocks: int, threads: int) -> Launch:
        """Return the launch of a kernel."""
        if blocks > MOST_BLOCKS:
            raise ValueError(f"a loop over so many channels needs {blocks} blocks, too many")
        return Launch(self.names.index(name), blocks, threads)


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
        """Return the launches for arguments of known sizes.

        Parameters
        ----------
        sizes : Geometry
        strides : sequence of tuple of int
            Of the arguments and of the results, in bytes.
        processors : int
            How many multiprocessors the device has.
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
        if writer.places is not None:
            names = [array.name for array in self.parameters.inputs]
            for name, (array, axis) in writer.places.strides.items():
                values[name] = strides[names.index(array)][axis]
        terms = self.parameters.arrays[len(strides) :]
        shapes = [
            (plan.chunks if array.name.startswith("partial") else sizes.steps, *sizes.sizes)
            for array in terms
        ]
        items = [np.dtype(array.dtype).itemsize for array in terms]
        every = [*strides, *map(contiguous, shapes, items)]
        words, slots = self.parameters.pack(values, every)
        works = [item * prod(shape) for item, shape in zip(items, shapes, strict=True)]
        if writer.composed is not None:
            count = sizes.channels * plan.chunks if plan.kind == "look-back" else 0
            works += [2 * count * writer.summary_bytes, count * writer.state_bytes]
            works.append(4 * flags_of(sizes, plan) if count else 0)
        dense = sizes.channels == 1 and writer.is_dense(every)
        return Call(words, slots, works, self._launches(sizes, plan, dense))

    def _launches(self, sizes: Geometry, plan: Schedule, dense: bool) -> list[Launch]:
        if not sizes.channels:
            return self._sums(sizes, plan)
        tiles = -(-sizes.channels // plan.lanes)
        shared, flat = self.writer.threads, 32
        launches = []
        if plan.kind == "serial":
            blocks = -(-sizes.channels // plan.threads)
            launches.append(self.launch_of(f"serial_{plan.ahead}", blocks, plan.threads))
        if plan.kind == "look-back":
            name = "look_back_dense" if dense and plan.lanes == 1 else "look_back"
            resets = -(-flags_of(sizes, plan) // RESETS)
            launches.append(self.launch_of("reset", resets, RESETS))
            launches.append(self.launch_of(name, tiles * plan.chunks, shared))
            launches.append(self.launch_of("mend", -(-sizes.channels // flat), flat))
        if plan.kind == "rows":
            launches.append(self.launch_of("walk", tiles, shared))
        return launches + self._sums(sizes, plan)

    def _sums(self, sizes: Geometry, plan: Schedule) -> list[Launch]:
        """Return the launches that add up what channels have left: a block or a thread each."""
        results = [f"c{i}" for i in self.writer.sums] + [f"z{i}" for i in self.writer.summed]
        launches = []
        for k, name in enumerate(results):
            array = self.writer.arrays[name]
            items = prod(sizes.sizes[axis] for _, axis in array.kept)
            terms = sizes.channels // max(items, 1) * (1 if array.lead else plan.chunks)
            items *= sizes.steps if array.lead else 1
            if items and terms < FEW_TERMS:
                blocks = -(-items // self.writer.threads)
                launches.append(self.launch_of(f"short_sum_{k}", blocks, self.writer.threads))
            elif items:
                launches.append(self.launch_of(f"sum_{k}", items, self.writer.threads))
        return launches


def flags_of(sizes: Geometry, plan: Schedule) -> int:
    """Return how many flags blocks need that look back; see `look_back.cuh`."""
    return 1 + sizes.channels * (1 + 3 * plan.chunks)


def launch(
    driver: Driver,
    handles: Sequence[int],
    call: Call,
    addresses: Sequence[int],
    stream: int,
) -> None:
    """Launch the kernels of a call on a stream.

    Parameters
    ----------
    addresses : sequence of int
        Of the inputs, the outputs and the works.
    """
    words = (ctypes.c_longlong * len(call.words))(*call.words)
    for slot, address in zip(call.slots, addresses, strict=True):
        words[slot] += address
    for one in call.launches:
        driver.launch(handles[one.kernel], one.blocks, one.threads, stream, words)
