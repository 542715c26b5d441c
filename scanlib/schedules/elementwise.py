"""What the schedules of loops share: their arrays, `prepare`, `start`, how they end.

A program of such a loop (`scanlib.kernels.program`) has one kernel `prepare`, one `start`, and a
`run` for each way in which its steps may be taken (`channels`, `blocks`): `prepare` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.type import TensorType

from scanlib._compat import thaw_graph
from scanlib.kernels.language import INT64, POINTER, Kernel, Type, Value
from scanlib.kernels.program import ArrayType, Failure, Output, Routine, TableKernel, Words
from scanlib.kernels.scalars import NoKernelError, parts_of
from scanlib.kernels.spans import LINE
from scanlib.kernels.thread_parts import wanted_threads
from scanlib.ops.lowered.channel_plan import ChannelPlan, Place, Target
from scanlib.ops.lowered.elemwise_scan import Axes, ElemwiseScan
from scanlib.ops.messages import Messages, title
from scanlib.ops.scan import Scan
from scanlib.ops.signature import OuterInputs
from scanlib.schedules.selection import MANY_STEPS, can_slice, few_channels, least_row
from scanlib.schedules.turns import steps_of_a_turn

REGISTER_DEPTH = 8  # states deeper than this are read from memory
FIRST_CAPACITY = 64  # rows allocated at first by a loop with `until`
RUN, AFRESH = range(2)  # what a round of chunks of the steps does


@dataclass
class Array:
    """An array of the loop: which input or output it is, its dtype, its channels' axes, and how
    many axes come before those."""

    name: str
    is_output: bool
    number: int
    dtype: str
    axes: Axes
    lead: int

    @property
    def itemsize(self) -> int:
        return int(np.dtype(self.dtype).itemsize)


class Tables:
    """What kernels read and write: the inputs and outputs of a program, its functions and failures.

    Parameters
    ----------
    types : sequence of Type
        Of the inputs.
    """

    arrays: dict[str, Array]
    outputs: tuple[Output, ...]
    words: Words

    def __init__(self, types: Sequence[object]) -> None:
        self.failures: dict[int, Failure] = {}
        self.inputs = tuple(array_type(type) for type in types)
        self.functions: list[Apply | Routine] = []  # that no kernel has

    def failure(self, error: str, template: str, count: int = 0) -> int:
        """Return the code of a failure."""
        wanted = Failure(error, template, count)
        for code, known in self.failures.items():
            if known == wanted:
                return code
        self.failures[len(self.failures) + 1] = wanted
        return len(self.failures)


class Loop(Tables):
    """A loop, and what the kernels of all schedules need to know of it.

    Parameters
    ----------
    scan : Scan
    graph : FunctionGraph
        The body whose results the kernels compute.
    types : sequence of Type
        Of the loop's inputs.
    """

    by_channels, by_blocks = True, False
    outer: OuterInputs

    def __init__(self, scan: Scan, graph: FunctionGraph, types: Sequence[object]) -> None:
        super().__init__(types)
        self.signature = scan.signature
        self.reverse = self.signature.reverse
        self.grows = self.signature.has_stop and not self.reverse
        self.graph = graph
        self.inner = self.signature.split_body_inputs(graph.inputs)
        self.result = self.signature.split_body_outputs(graph.outputs)
        self.messages = Messages(self.signature, scan.labels, scan.name)

    def has_ring(self, i: int) -> bool:
        """Whether the last rows of a state that is not traced are kept in a ring."""
        return self.signature.untraced[i]


class ElemwiseLoop(Loop):
    """An elementwise loop, and what its kernels need to know of it.

    Parameters
    ----------
    op : ElemwiseScan
    schedule : str
        How its steps are taken, see `scanlib.schedules.selection.schedule`.
    """

    def __init__(self, op: ElemwiseScan, schedule: str) -> None:
        super().__init__(op.scan, thaw_graph(op.body), op.outer_input_types())
        self.op = op
        self.by_channels = schedule != "blocks"
        self.by_blocks = schedule in ("blocks", "by width")
        self.block_bytes = 0  # of the memory that a part needs that runs in blocks
        # How much of the workspace chunks of the steps have in common.
        self.extra_bytes = 0
        self.least_chunk = 1  # steps
        self.layout = op.layout
        self.plan = ChannelPlan(self.signature, self.layout, self.inner, self.result)
        self.outer = self.plan.outer
        self.outputs = tuple(self._outputs())
        self.words = Words(self.inputs, self.outputs, self.functions)
        self.slices = wanted_threads() if can_slice(op) else 1
        self.chunks = 1  # of the steps, each in a thread of its own
        self.arrays = {array.name: array for array in self._arrays()}
        self.loops: dict[tuple[int, int], int] = {}
        self.axes_of_loops: list[int] = []
        self.groups_of_loops: list[list[Target]] = []
        self._number_loops(self.plan.targets, 0)

    def _outputs(self) -> Iterator[Output]:
        layout, signature = self.layout, self.signature
        for i, axes in enumerate(layout.states):
            kind = ArrayType(self.inner.taps[i][0].type.dtype, 1 + len(axes))
            yield Output(kind, not signature.untraced[i], signature.depths[i])
        for variable, axes in zip(self.inner.carries, layout.carries, strict=True):
            yield Output(ArrayType(variable.type.dtype, len(axes)))
        for variable, axes in zip(self.result.outputs, layout.outputs, strict=True):
            yield Output(ArrayType(variable.type.dtype, 1 + len(axes)), grows=True)

    def _arrays(self) -> Iterator[Array]:
        results = 0
        for name, dtype, lead, axes in self.plan.arrays():
            is_output = name[0] != "x"
            yield Array(name, is_output, results if is_output else int(name[1:]), dtype, axes, lead)
            results += is_output

    def title_of(self, array: str) -> str:
        """Return what messages call an input or a history."""
        labels, outer = self.messages.labels, self.outer
        groups = {
            "state": ([f"h{i}" for i in range(self.signature.n_states)], labels.states),
            "initial": (outer.initials, labels.states),
            "sequence": (outer.sequences, labels.sequences),
            "carry": (outer.carries, labels.carries),
            "non-sequence": (outer.non_sequences, labels.non_sequences),
        }
        for kind, (arrays, names) in groups.items():
            if array in arrays:
                place = list(arrays).index(array)
                return title(kind.replace("initial", "state"), place, names[place])
        return "an array"

    def _number_loops(self, targets: Sequence[Target], level: int) -> None:
        """Give every loop over channels its number; a group without channels gets none."""
        for group in self.plan.groups(targets, level):
            if self.plan.group_places(group, level):
                self.loops.update(
                    {(id(target), level): len(self.axes_of_loops) for target in group}
                )
                self.axes_of_loops.append(level)
                self.groups_of_loops.append(group)
            self._number_loops(group, level + 1)

    def is_local(self, i: int) -> bool:
        """Whether a state lives in local variables."""
        free = all(axis is None for axis in self.layout.states[i])
        return free and self.signature.depths[i] <= REGISTER_DEPTH

    def is_local_carry(self, i: int) -> bool:
        return all(axis is None for axis in self.layout.carries[i])

    def has_ring(self, i: int) -> bool:
        """Whether the last rows of a state that is not traced are kept in a ring."""
        return self.signature.untraced[i] and not self.is_local(i)

    def shared_sums(self) -> Iterator[int]:
        """Yield the outputs that are sums over the first axis: each slice has its own."""
        first = {"state": 0, "output": self.signature.n_states + self.signature.n_carries}
        for target in self.plan.targets:
            if 0 in target.reduced:
                yield first.get(target.kind, self.signature.n_states) + target.number


def _types(node: Apply) -> list[str]:
    return [variable.type.dtype for variable in (*node.inputs, *node.outputs)]


def array_type(kind: object) -> ArrayType:
    if isinstance(kind, ScalarType):
        parts_of(kind.dtype)
        return ArrayType(kind.dtype, 0)
    if not isinstance(kind, TensorType):
        raise NoKernelError(f"an input of type {kind} has no kernel")
    parts_of(kind.dtype)
    return ArrayType(kind.dtype, kind.ndim)


T = TypeVar("T", bound=Tables)
L = TypeVar("L", bound=Loop)


class TableReader(Generic[T]):
    """What the writers of all kernels share: how they read the table."""

    def __init__(self, loop: T, name: str) -> None:
        self.loop = loop
        self.words = loop.words
        self.out = TableKernel(name)
        self.w = self.out.writer

    def base(self, array: Array) -> int:
        words = self.words.outputs if array.is_output else self.words.inputs
        return words[array.number]

    def data(self, name: str) -> Value:
        array = self.loop.arrays[name]
        return self.out.word(self.base(array), POINTER, f"{name}_data")

    def dim(self, name: str, axis: int) -> Value:
        array = self.loop.arrays[name]
        return self.out.number(self.base(array) + 1 + axis, f"{name}_dim{axis}")

    def given_stride(self, name: str, axis: int) -> Value:
        """Return the stride of an input."""
        array = self.loop.arrays[name]
        slot = self.base(array) + 1 + array.lead + len(array.axes) + axis
        return self.out.number(slot, f"{name}_stride{axis}")

    def length(self, place: Place, level: int) -> Value:
        """Return the length of an array along an axis of the channels, which it has."""
        axis = place.along(level)
        assert axis is not None
        return self.dim(place.array, axis)

    # Functions outside

    def call_outside(self, node: Apply, inputs: list[Value]) -> list[Value]:
        """Write the call of a function that computes a node, whose address the table has."""
        if len(node.outputs) > 1:  # iterations of PyTensor's own, as in derivatives of gammainc
            raise NoKernelError(f"{node.op} with several results has no kernel")
        (out,) = node.outputs
        for variable in (*node.inputs, out):
            if parts_of(variable.type.dtype) is not None:
                raise NoKernelError(f"{node.op} of complex numbers has no kernel")
        known = [
            isinstance(other, Apply) and other.op == node.op and _types(other) == _types(node)
            for other in self.loop.functions
        ]
        place = known.index(True) if any(known) else len(known)
        if place == len(known):
            self.loop.functions.append(node)
        address = self.out.word(self.words.functions + place, POINTER, f"function{place}")
        return [self.w.call_pointer(Type(out.type.dtype), address, *inputs)]

    def routine(self, routine: Routine) -> Value:
        """Return the address of a routine, which the table has."""
        functions = self.loop.functions
        if routine not in functions:
            functions.append(routine)
        place = functions.index(routine)
        return self.out.word(self.words.functions + place, POINTER, f"function{place}")


class Storage(Generic[L]):
    """The strides of a loop's arrays, and where the workspace of each state is.

    They are written where the object is made.
    """

    def __init__(self, kernel: TableReader[L]) -> None:
        self.kernel = kernel
        loop, w = kernel.loop, kernel.w
        self.strides: dict[tuple[str, int], Value] = {}
        for name, array in loop.arrays.items():
            if not array.is_output:
                continue
            step: Value = w.constant(array.itemsize, INT64)
            for axis in reversed(range(array.lead + len(array.axes))):
                self.strides[name, axis] = step
                if axis:
                    step = step * kernel.dim(name, axis)
        self.spaces: dict[int, Value] = {}
        self.row_sizes: dict[int, Value] = {}
        place: Value = w.constant(0, INT64)
        for i in range(loop.signature.n_states):
            rows = workspace_rows(loop, i)
            self.row_sizes[i] = self.strides[f"h{i}", 0]
            if rows:
                workspace = kernel.out.word(kernel.words.workspace, POINTER, "workspace")
                self.spaces[i] = w.offset(workspace, place)
                place = place + self.row_sizes[i] * rows + 2 * LINE
        self.end_of_spaces = place

    def stride(self, name: str, axis: int) -> Value:
        """Return the stride of an array's axis, counted with those before the channels'."""
        known = self.strides.get((name, axis))
        return known if known is not None else self.kernel.given_stride(name, axis)


def write_result(kernel: TableReader[L], steps: Value, taken: Value) -> None:
    """Write which rows of the outputs are the result, or that too few steps were taken."""
    loop, w, words = kernel.loop, kernel.w, kernel.words
    required = loop.signature.required_steps
    if required:
        with w.when(taken < required):
            w.fail(loop.failure("IndexError", loop.messages.missing_steps()))
    for number, output in enumerate(loop.outputs):
        if not output.type.ndim:
            continue
        place = words.first_row(number)
        rows = taken + output.extra
        first: Value = w.constant(0, INT64)
        if not output.grows:
            rows = kernel.out.number(words.outputs[number] + 1, f"rows{number}")
        elif loop.reverse:
            first = steps - taken
        kernel.out.write_word(place, first)
        kernel.out.write_word(place + 1, rows)


def checked_steps(kernel: TableReader[T], outer: OuterInputs, messages: Messages) -> Value:
    """Write the number of steps, and the checks that keep every read inside its array.

    `outer` has the names of the loop's arrays.
    """
    loop, w = kernel.loop, kernel.w
    rows = [kernel.dim(name, 0) for name in outer.sequences]
    if outer.n_steps is not None:
        kind, base = loop.inputs[0], kernel.words.inputs[0]
        address = kernel.out.word(base, POINTER, "n_steps")
        steps = w.cast(w.load(Type(kind.dtype), address), "int64")
        with w.when(steps < 0):
            w.fail(loop.failure("StepCountError", messages.negative_steps(), 1), steps)
    else:
        steps = rows[0]
        for size in rows[1:]:
            steps = w.select(size < steps, size, steps)
    for i, size in enumerate(rows):
        with w.when(size.differs(steps)):
            code = loop.failure("SequenceLengthError", messages.sequence_length(i), 2)
            w.fail(code, size, steps)
    return steps


class Checks(TableReader[L]):
    """Writes the checks of a loop's inputs that all schedules have."""

    def checked_steps(self, may_be_empty: bool = False) -> Value:
        """Write the checks of steps and rows, and the loop's first words; return the steps.

        Loops whose histories `may_be_empty` need no initial rows for no steps.
        """
        loop, w, words = self.loop, self.w, self.words
        steps = checked_steps(self, loop.outer, loop.messages)
        self.out.write_word(words.steps, steps)
        for word in (words.begin, words.taken):
            self.out.write_word(word, w.constant(0, INT64))
        for i, (name, depth) in enumerate(
            zip(loop.outer.initials, loop.signature.depths, strict=True)
        ):
            rows = self.dim(name, 0)
            is_wrong = rows.differs(depth)
            if may_be_empty:
                is_wrong = is_wrong & ((steps > 0) | rows.differs(0))
            with w.when(is_wrong):
                message = loop.messages.initial_rows(i)
                w.fail(loop.failure("InitialRowsError", message, 1), rows)
        return steps

    def capacity(self, steps: Value) -> Value:
        """Write how many rows outputs that grow have at first."""
        loop, w = self.loop, self.w
        capacity = steps
        if loop.grows:
            capacity = w.select(steps < FIRST_CAPACITY, steps, FIRST_CAPACITY)
        self.out.write_word(self.words.capacity, capacity)
        return capacity

    def write_dims(self, capacity: Value, row_sizes: Callable[[int], list[Value]]) -> None:
        """Write the dimensions of all outputs; `row_sizes` gives those of a stacked one's rows."""
        loop, m = self.loop, len(self.loop.outputs) - self.loop.signature.n_outputs
        given = [*loop.outer.initials, *loop.outer.carries]
        for number, output in enumerate(loop.outputs):
            if number < m:
                dims = [self.dim(given[number], axis) for axis in range(output.type.ndim)]
            else:
                dims = [capacity, *row_sizes(number - m)]
            if number < loop.signature.n_states:
                rows: Value = self.w.constant(output.extra, INT64)
                dims[0] = capacity + dims[0] if output.grows else rows
            for axis, value in enumerate(dims):
                self.out.write_word(self.words.outputs[number] + 1 + axis, value)

    def space_bytes(self) -> Value:
        """Write how many bytes the rows of states have that are kept in the workspace."""
        total: Value = self.w.constant(0, INT64)
        for i in range(self.loop.signature.n_states):
            rows = workspace_rows(self.loop, i)
            if rows:
                total = total + self.row_bytes(i) * rows + 2 * LINE
        return total

    def row_bytes(self, i: int) -> Value:
        name = self.loop.outer.initials[i]
        array = self.loop.arrays[name]
        size: Value = self.w.constant(array.itemsize, INT64)
        for axis in range(len(array.axes)):
            size = size * self.dim(name, axis + 1)
        return size


class Prepare(Checks[ElemwiseLoop]):
    """Writes the kernel that checks the inputs and computes the sizes of everything."""

    def __init__(self, loop: ElemwiseLoop) -> None:
        super().__init__(loop, "prepare")

    def kernel(self) -> Kernel:
        steps = self.checked_steps()
        sizes = self.sizes(steps)
        self.write_dims(self.capacity(steps), lambda k: self.row_sizes(k, sizes))
        self.write_workspace()
        self.write_turn(sizes)
        self.write_parts(steps, sizes)
        self.write_choice(steps, sizes)
        return self.out.kernel(runs_once=True)

    def channels(self, sizes: list[Value]) -> tuple[Value, list[Value]]:
        """Write how many channels the loops of a step have, and the sizes of their first axis."""
        loop, w = self.loop, self.w
        channels: Value = w.constant(0, INT64)
        first = []
        for group in loop.plan.groups(loop.plan.targets, 0):
            deepest = max(group, key=lambda target: target.inner)
            own = [loop.loops.get((id(deepest), axis)) for axis in range(deepest.inner)]
            product: Value = w.constant(1, INT64)
            for number in own:
                product = product if number is None else product * sizes[number]
            channels = channels + product
            first += [sizes[number] for number in own[:1] if number is not None]
        return channels, first

    def write_turn(self, sizes: list[Value]) -> None:
        channels, _ = self.channels(sizes)
        work = channels * max(len(self.loop.graph.apply_nodes), 1)
        self.out.write_word(self.words.turn, steps_of_a_turn(self.w, work))

    def write_parts(self, steps: Value, sizes: list[Value]) -> None:
        """Write how many slices of the channels there are, each in a thread of its own."""
        loop, w = self.loop, self.w
        if loop.chunks > 1:
            self.write_chunks(steps)
            return
        self.out.write_word(self.words.part, w.constant(0, INT64))
        parts: Value = w.constant(loop.slices, INT64)
        if loop.slices > 1:
            channels, most = self.channels(sizes)
            enough = w.constant(config.scanlib__parallel_channels, INT64)
            most.append(w.apply("quotient", channels * steps, enough))
            most.append(w.apply("quotient", channels, w.constant(least_row(loop.op), INT64)))
            for size in most:
                parts = w.select(size < parts, size, parts)
            parts = w.select(parts < 1, 1, parts)
        self.out.write_word(self.words.parts, parts)

    def write_chunks(self, steps: Value) -> None:
        """Write how many chunks of the steps there are."""
        loop, w, words = self.loop, self.w, self.words
        chunks = w.apply("quotient", steps, w.constant(loop.least_chunk, INT64))
        chunks = w.select(chunks < loop.chunks, chunks, loop.chunks)
        chunks = w.select(chunks < 1, 1, chunks)
        for word in (words.chunks, words.parts):
            self.out.write_word(word, chunks)
        self.out.write_word(words.job, RUN)
        self.out.write_word(words.part, 0)

    def write_choice(self, steps: Value, sizes: list[Value]) -> None:
        """Write whether the steps are taken in blocks: of few channels and many steps."""
        loop, w = self.loop, self.w
        choice: Value = w.constant(0, INT64)
        if loop.by_channels and loop.by_blocks:
            channels: Value = w.constant(1, INT64)
            for axis in range(loop.layout.ndim):
                number = loop.loops.get((id(loop.plan.targets[0]), axis))
                channels = channels if number is None else channels * sizes[number]
            few = (channels <= few_channels(loop.op)) & (steps >= MANY_STEPS)
            choice = w.cast(few, "int64")
        self.out.write_word(self.words.choice, choice)

    def sizes(self, steps: Value) -> list[Value]:
        """Write the lengths of the loops over channels, and the checks that inputs agree."""
        loop, found = self.loop, []
        for level, group in zip(loop.axes_of_loops, loop.groups_of_loops, strict=True):
            first, *others = loop.plan.group_places(group, level)
            found.append(self.length(first, level))
            for place in others:
                self.check_size(first, place, level, steps)
        return found

    def check_size(self, first: Place, place: Place, level: int, steps: Value) -> None:
        """Write the check that an array has as many channels as another."""
        loop, w = self.loop, self.w
        size, own = self.length(first, level), self.length(place, level)
        with w.when((steps > 0) & own.differs(size)):
            if place.owned is None:
                names = [
                    f"axis {p.along(level)} of {loop.title_of(p.array)}" for p in (first, place)
                ]
                code = loop.failure("ValueError", loop.messages.channel_sizes(*names), 2)
                w.fail(code, size, own)
            else:
                message = loop.messages.state_shape(place.owned, place.axes.index(level))
                code = loop.failure("StepShapeError", message, 3)
                w.fail(code, w.constant(0, INT64), own, size)

    def row_sizes(self, k: int, sizes: list[Value]) -> list[Value]:
        """Return the dimensions of the rows of a stacked output."""
        loop, one = self.loop, self.w.constant(1, INT64)
        (target,) = (t for t in loop.plan.targets if t.kind == "output" and t.number == k)
        loops = [None if a is None else loop.loops[id(target), a] for a in target.axes]
        return [one if number is None else sizes[number] for number in loops]

    def write_workspace(self) -> None:
        loop = self.loop
        total = self.space_bytes() + loop.block_bytes * max(loop.slices, loop.chunks)
        self.out.write_word(self.words.workspace_size, total + loop.extra_bytes)


def workspace_rows(loop: Loop, i: int) -> int:
    """Return how many rows of a state the workspace has."""
    return loop.signature.depths[i] + 1 if loop.by_channels and loop.has_ring(i) else 0


class Start(TableReader[Loop]):
    """Writes the kernel that copies what outputs start with."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop, "start")

    def kernel(self) -> Kernel:
        loop, w, signature = self.loop, self.w, self.loop.signature
        self.storage = storage = Storage(self)
        steps = self.out.number(self.words.steps, "steps")
        for i in range(signature.n_states):
            rings = loop.by_channels and loop.has_ring(i)
            if rings:  # it holds rows in the order of iteration, the latest one last
                self.copy_rows(i, storage.spaces[i], 0, backwards=loop.reverse)
            if not rings or loop.by_blocks:
                behind = loop.reverse and not signature.untraced[i]
                first = steps * storage.row_sizes[i] if behind else 0
                self.copy_rows(i, self.data(f"h{i}"), first)
        for i, name in enumerate(loop.outer.carries):
            zero = w.constant(0, INT64)
            self.copy_array(self.data(f"c{i}"), zero, name, zero, 0)
        return self.out.kernel(runs_once=True)

    def copy_rows(self, i: int, target: Value, first: Value | int, backwards: bool = False) -> None:
        """Write the copy of a state's initial rows, to memory `first` bytes after an address."""
        name, depth = self.loop.outer.initials[i], self.loop.signature.depths[i]
        with self.w.loop(0, self.dim(name, 0)) as k:
            row = (depth - 1 - k if backwards else k) * self.storage.row_sizes[i]
            self.copy_array(target, row + first, name, k * self.storage.stride(name, 0), 1)

    def copy_array(self, target: Value, place: Value, name: str, offset: Value, lead: int) -> None:
        """Write the copy of an input to contiguous memory."""
        w, array = self.w, self.loop.arrays[name]
        axes = list(range(lead, lead + len(array.axes)))
        size = array.itemsize
        kind = Type(_UNSIGNED[min(size, 8)])

        def items(axes: list[int], place: Value, offset: Value) -> None:
            if not axes:
                for byte in range(0, size, kind.itemsize):
                    value = w.load(kind, self.data(name), offset + byte if byte else offset)
                    w.store(target, place + byte if byte else place, value)
                return
            step: Value = w.constant(size, INT64)
            for axis in axes[1:]:
                step = step * self.dim(name, axis)
            with w.loop(0, self.dim(name, axes[0])) as k:
                items(axes[1:], place + k * step, offset + k * self.storage.stride(name, axes[0]))

        items(axes, place, offset)


_UNSIGNED = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
