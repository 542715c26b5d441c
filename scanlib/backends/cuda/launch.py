"""From the shapes of a call's arguments to launches of kernels, and to the loop's results.

Kernels of matrix recurrences (`linear.py`) and of elementwise loops answer alike: `call` says all
that a call needs but for addresses, and `results` makes what the loop returns of what the kernels
have written.
"""

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import numpy as np

from scanlib.backends.cuda.nvidia import Driver, compile_kernels
from scanlib.backends.cuda.parameters import Parameters, contiguous
from scanlib.backends.cuda.printer import KERNELS, LoopWriter
from scanlib.backends.cuda.schedule import Schedule, choose
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.errors import StepShapeError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.messages import Messages

Shape = tuple[int, ...]
RESETS = 256  # threads of a block that clears flags
FLAT = 32  # threads of a block that repairs channels
MOST_BLOCKS = 2**31 - 1
DIFFER = "Incompatible Elemwise input shapes inside a scan"
UNITS = {"rows": "walk", "look-back": "look_back"}  # of schedules


class Launch(NamedTuple):
    """One launch: the kernel's place among `Kernels.names`, blocks, threads of a block."""

    kernel: int
    blocks: int
    threads: int


class Call(NamedTuple):
    """All that a call needs but for addresses.

    The kernels; the shapes of what they write, in the order of `Parameters.outputs`, all without
    gaps; how many bytes each array for intermediate results needs; the kernels' numbers; where
    among them the addresses go, of the inputs, the outputs, the works; the launches.
    """

    kernels: "Kernels"
    shapes: list[Shape]
    works: list[int]
    words: list[int]
    slots: list[int]
    launches: list[Launch]


class Kernels:
    """Kernels of a translation unit, compiled for the devices on which they run."""

    def __init__(self, source: str, names: list[str], parameters: Parameters) -> None:
        self.source = source
        self.names = names
        self.parameters = parameters
        self._loaded: dict[int, list[int]] = {}

    def handles(self, driver: Driver, context: int) -> list[int]:
        """Return the kernels' handles in a context, compiled if need be; that may raise
        `NoCompilerError`, `KernelCompileError` or `DriverError`."""
        if context not in self._loaded:
            with driver.current(context):
                code = compile_kernels(self.source, driver.architecture())
                self._loaded[context] = driver.load(code, self.names)
        return self._loaded[context]

    def prepared(
        self,
        values: dict[str, int],
        strides: Sequence[tuple[int, ...]],
        rows: Sequence[int],
        shapes: list[Shape],
        works: list[Shape],
        jobs: Sequence[tuple[str, int, int]],
    ) -> Call:
        """Return a call: counts, the strides of the inputs in bytes and how many rows of each there
        are, the shapes of what is written and of works; names, blocks, threads."""
        strides, rows = [*strides], [*rows]
        made = [*self.parameters.outputs, *self.parameters.works]
        items = [np.dtype(array.dtype).itemsize for array in made]
        for shape, item in zip([*shapes, *works], items, strict=True):
            strides.append(contiguous(shape, item))
            rows.append(shape[0] if shape else 1)
        words, slots = self.parameters.pack(values, strides, rows)
        for _, blocks, _ in jobs:
            if blocks > MOST_BLOCKS:
                raise ValueError(f"a loop over so many channels needs {blocks} blocks, too many")
        launches = [Launch(self.names.index(name), *sizes) for name, *sizes in jobs]
        sizes = [
            prod(shape) * item for shape, item in zip(works, items[len(shapes) :], strict=True)
        ]
        return Call(self, shapes, sizes, words, slots, launches)


@dataclass(frozen=True)
class Geometry:
    """The sizes of one call: its steps, the channels' axes, and the results' shapes, behind which,
    where a condition ends the loop, is that of the number of steps."""

    steps: int
    sizes: Shape
    outputs: list[Shape]

    @property
    def channels(self) -> int:
        return prod(self.sizes)


class KernelLoop:
    """The kernels of one elementwise loop, those of each schedule in a unit of their own.

    A unit is compiled when the first call needs it: of most loops, one ever is. `NoCCodeError` if
    the loop has no kernel.
    """

    def __init__(self, op: ElemwiseScan) -> None:
        self.op, self.writer = op, LoopWriter(op)
        self.parameters = self.writer.parameters
        self.messages = Messages(op.signature, op.scan.labels, op.scan.name)
        self._units: dict[str, Kernels] = {}

    def unit(self, name: str) -> Kernels:
        """Return one of the units that the writer names."""
        if name not in self._units:
            source = self.writer.write(name)
            self._units[name] = Kernels(source, list(KERNELS[name]), self.parameters)
        return self._units[name]

    # Sizes

    def sizes(self, shapes: Sequence[Shape], n_steps: int | None = None) -> Geometry:
        """Return the sizes of a call, and check that its arguments agree.

        `shapes` are those of the arguments without the number of steps, which is `n_steps` where it
        is one of them. `ValueError` as the loop does on other devices, `NoCCodeError` if there is
        no step, and channels are not as many in all arrays.
        """
        outer, signature = self.writer.plan.outer, self.writer.signature
        given = {
            array.name: tuple(shape)
            for array, shape in zip(self.parameters.inputs, shapes, strict=True)
        }
        lengths = [given[name][0] for name in outer.sequences]
        initial_rows = [given[name][0] for name in outer.initials]
        steps = self.messages.count_steps(n_steps, lengths, initial_rows)
        if steps < signature.required_steps:
            raise IndexError(self.messages.missing_steps())
        sizes = tuple(self._channels(given, steps))
        outputs: list[Shape] = [
            (depth + (0 if untraced else steps), *given[name][1:])
            for name, depth, untraced in zip(
                outer.initials, signature.depths, signature.untraced, strict=True
            )
        ]
        outputs += [given[name] for name in outer.carries]
        for axes in self.writer.layout.outputs:
            outputs.append((steps, *(1 if axis is None else sizes[axis] for axis in axes)))
        if signature.has_stop:
            outputs.append(())
        return Geometry(steps, sizes, outputs)

    def _channels(self, given: dict[str, Shape], steps: int) -> Iterator[int]:
        """Yield the sizes of the channels' axes."""
        plan = self.writer.plan
        for level in range(self.writer.layout.ndim):
            places = plan.group_places(plan.targets, level)
            lengths = [given[place.array][place.lead + place.axes.index(level)] for place in places]
            size = lengths[0] if lengths else 1
            for place, other in zip(places, lengths, strict=True):
                if other == size:
                    continue
                if not steps:
                    raise NoCCodeError("a loop of no steps whose arrays do not fit has no kernel")
                if place.owned is None:
                    raise ValueError(DIFFER)
                message = self.messages.state_shape(place.owned, place.axes.index(level))
                raise StepShapeError(message, 0, other, size)
            yield size

    # Launches

    def schedule(self, sizes: Geometry, processors: int) -> Schedule:
        """Return how the loop is walked on a device with so many multiprocessors."""
        own = self.writer
        composes = own.composed is not None
        return choose(sizes.steps, sizes.channels, processors, composes, own.threads, own.items)

    def call(self, sizes: Geometry, strides: Sequence[tuple[int, ...]], processors: int) -> Call:
        """Return how the kernels are called: strides in bytes, multiprocessors of the device."""
        writer, plan = self.writer, self.schedule(sizes, processors)
        values = {
            "steps": sizes.steps,
            "channels": sizes.channels,
            "lanes": plan.lanes,
            "lane_bits": plan.lanes.bit_length() - 1,
            "chunk": plan.chunk,
            "chunks": plan.chunks,
        }
        values |= {f"n{axis}": size for axis, size in enumerate(sizes.sizes)}
        shapes = list(sizes.outputs)
        for k, array in enumerate(self.parameters.outputs):
            if array.name in writer.totals:
                rows = plan.chunks if array.name[0] == "c" else sizes.steps
                shapes[k] = (rows, *(sizes.sizes[axis] for _, axis in array.kept))
        works: list[Shape] = []
        if writer.composed is not None:
            count = sizes.channels * plan.chunks if plan.kind == "look-back" else 0
            works = [(2 * count * writer.summary_bytes,), (count * writer.state_bytes,)]
            works.append((4 * flags_of(sizes, plan) if count else 0,))
        unit = self.unit(UNITS.get(plan.kind, plan.kind))
        jobs = list(self._jobs(sizes, plan, strides)) if sizes.channels else []
        depths = dict(zip(writer.plan.outer.initials, writer.signature.depths, strict=True))
        counts = [depths.get(array.name, sizes.steps) for array in self.parameters.inputs]
        return unit.prepared(values, strides, counts, shapes, works, jobs)

    def _jobs(
        self, sizes: Geometry, plan: Schedule, strides: Sequence[tuple[int, ...]]
    ) -> Iterator[tuple[str, int, int]]:
        """Yield the launches: names, blocks, threads of a block."""
        blocks = -(-sizes.channels // plan.lanes) * plan.chunks
        if plan.kind == "serial":
            yield f"serial_{plan.ahead}", -(-sizes.channels // plan.threads), plan.threads
        elif plan.kind == "rows":
            yield "walk", blocks, plan.threads
        else:
            yield "reset", -(-flags_of(sizes, plan) // RESETS), RESETS
            dense = plan.lanes == sizes.channels == 1 and self._is_dense(strides)
            yield "look_back_dense" if dense else "look_back", blocks, plan.threads
            yield "mend", -(-sizes.channels // FLAT), FLAT

    def _is_dense(self, strides: Sequence[tuple[int, ...]]) -> bool:
        """Whether items of one channel that follow one another in time lie side by side."""
        sequences = set(self.writer.plan.outer.sequences)
        return all(
            own[0] == np.dtype(array.dtype).itemsize
            for array, own in zip(self.parameters.inputs, strides, strict=True)
            if array.name in sequences
        )

    # Results

    def results(
        self,
        given: Sequence[Any],
        made: Sequence[Any],
        sizes: Geometry,
        cast: Callable[[Any, str], Any],
    ) -> list[Any]:
        """Return the loop's results, and what comes after them, from what kernels have written.

        `given` are the arguments without the number of steps, `cast` converts an array of the
        linker's to a dtype. Terms of sums are added up by the linker's own function.
        """
        outer, layout = self.writer.plan.outer, self.writer.layout
        dtypes = {target.array: target.value.type.dtype for target in self.writer.plan.targets}
        names = [array.name for array in self.parameters.inputs]
        results = []
        for array, terms, shape in zip(self.parameters.outputs, made, sizes.outputs, strict=True):
            if array.name in self.writer.totals:
                kept, carried = self.writer.totals[array.name], array.name[0] == "c"
                # Torch has no sums of unsigned integers.
                wide = "int64" if np.dtype(array.dtype).kind == "u" else array.dtype
                axes = tuple(range(1 + kept, 1 + layout.ndim))
                axes = (0, *axes) if carried else axes
                terms = cast(terms, wide).sum(axes).reshape(shape)
                if carried:
                    start = given[names.index(outer.carries[int(array.name[1:])])]
                    terms = cast(start, wide) + terms
                terms = cast(terms, dtypes[array.name])
            results.append(terms)
        return results

    def checked(self, results: list[Any], steps: int) -> list[Any]:
        """Return the results that a loop of at most so many steps has, of all that `results` gave;
        `IndexError` if a condition ended the loop too early."""
        signature = self.writer.signature
        if not signature.has_stop:
            return results
        *results, number = results
        taken = int(number)  # waits for the device
        if taken < signature.required_steps:
            raise IndexError(self.messages.missing_steps())
        if taken == steps:
            return results
        first = steps - taken if signature.reverse else 0
        depths = zip(signature.depths, signature.untraced, strict=True)
        rows: list[Any] = [
            ... if last else slice(first, first + taken + depth) for depth, last in depths
        ]
        rows += [...] * signature.n_carries
        rows += [slice(first, first + taken)] * signature.n_outputs
        return [result[own] for result, own in zip(results, rows, strict=True)]


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
