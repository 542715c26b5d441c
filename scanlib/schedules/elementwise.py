"""What the schedules of loops share: their arrays, `prepare`, `start`, how they end.

A program of such a loop (`scanlib.kernels.program`) has one kernel `prepare`, one `start`, and a
`run` for each way in which its steps may be taken (`channels`, `blocks`): `prepare` chooses.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.type import TensorType

from scanlib._compat import thaw_graph
from scanlib.kernels.arrays.places import Workspace
from scanlib.kernels.arrays.sizes import Check, Given, Size, Sizes, SizeValues, product, total
from scanlib.kernels.language import INT64, POINTER, Block, Kernel, Type, Value
from scanlib.kernels.program import (
    ArrayType,
    Failure,
    Kernels,
    LoopProgram,
    Output,
    Routine,
    TableKernel,
    Words,
)
from scanlib.kernels.scalars import NoKernelError, parts_of
from scanlib.kernels.spans import LINE
from scanlib.kernels.thread_parts import wanted_threads
from scanlib.ops.lowered.channel_plan import ChannelPlan, Place, Target
from scanlib.ops.lowered.elemwise_scan import Axes, ElemwiseScan, Layout
from scanlib.ops.messages import Messages, title
from scanlib.ops.scan import Scan
from scanlib.ops.signature import BodyInputs, BodyOutputs, OuterInputs
from scanlib.schedules.selection import MANY_STEPS, can_slice, few_channels, least_row
from scanlib.schedules.turns import STEPS, steps_of_a_turn

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

    Attributes
    ----------
    checks : list of Check
        What must be so before the first step.
    sizes : dict of int to tuple of Size
        Of the outputs, or of the rows of stacked ones, by their numbers.
    """

    arrays: dict[str, Array]
    outputs: tuple[Output, ...]
    words: Words
    lengths: list[Given]
    rings: Sequence[int] = ()  # the states of which the workspace has rows
    may_stop = False

    def __init__(self, types: Sequence[object]) -> None:
        self.failures: dict[int, Failure] = {}
        self.inputs = tuple(array_type(type) for type in types)
        self.functions: list[Apply | Routine] = []  # that no kernel has
        self.checks: list[Check] = []
        self.sizes: dict[int, tuple[Size, ...]] = {}
        self.workspace = Workspace(Sizes())

    def failure(self, error: str, template: str, count: int = 0) -> int:
        """Return the code of a failure."""
        wanted = Failure(error, template, count)
        for code, known in self.failures.items():
            if known == wanted:
                return code
        self.failures[len(self.failures) + 1] = wanted
        return len(self.failures)

    def program(self, name: str, kernels: Kernels, **more: Any) -> LoopProgram:
        """Return the program of the kernels, which have been written."""
        return LoopProgram(
            name=name,
            inputs=self.inputs,
            outputs=self.outputs,
            words=self.words,
            kernels=kernels,
            failures=self.failures,
            functions=tuple(self.functions),
            may_stop=self.may_stop,
            **more,
        )

    @property
    def space(self) -> Size:
        """How many bytes the workspace has besides the rows of states."""
        return self.workspace.end


class Loop(Tables):
    """A loop, and what the kernels of all schedules need to know of it.

    Parameters
    ----------
    scan : Scan
    graph : FunctionGraph
        The body whose results the kernels compute.
    types : sequence of Type
        Of the loop's inputs.
    layout : Layout, optional
        Of the channels. Without one, rows are what they are in `graph`.

    Attributes
    ----------
    work : Size
        How many numbers a step computes, about.
    """

    by_channels, by_blocks = True, False
    longest_turn = STEPS
    work: Size = 1

    def __init__(
        self,
        scan: Scan,
        graph: FunctionGraph,
        types: Sequence[object],
        layout: Layout | None = None,
    ) -> None:
        super().__init__(types)
        self.signature = scan.signature
        self.reverse = self.signature.reverse
        self.may_stop = self.signature.has_stop
        self.grows = self.may_stop and not self.reverse
        self.graph = graph
        self.inner = self.signature.split_body_inputs(graph.inputs)
        self.result = self.signature.split_body_outputs(graph.outputs)
        self.messages = Messages(self.signature, scan.labels, scan.name)
        self.layout = layout = whole_rows(self.inner, self.result) if layout is None else layout
        self.plan = ChannelPlan(self.signature, layout, self.inner, self.result)
        self.outer = self.plan.outer
        self.arrays = {array.name: array for array in self._arrays()}
        self.outputs = tuple(self._outputs())
        self.words = Words(self.inputs, self.outputs, self.functions)
        if self.by_channels:
            self.rings = list(filter(self.has_ring, range(self.signature.n_states)))

    def _arrays(self) -> Iterator[Array]:
        results = 0
        for name, dtype, lead, axes in self.plan.arrays():
            is_output = name[0] != "x"
            yield Array(name, is_output, results if is_output else int(name[1:]), dtype, axes, lead)
            results += is_output

    def _outputs(self) -> Iterator[Output]:
        for array in self.arrays.values():
            if array.is_output:
                kind = ArrayType(array.dtype, array.lead + len(array.axes))
                i = int(array.name[1:])
                if array.name[0] == "h":
                    yield Output(kind, not self.signature.untraced[i], self.signature.depths[i])
                else:
                    yield Output(kind, grows=array.name[0] == "z")

    def is_local(self, i: int) -> bool:
        """Whether a state lives in local variables."""
        free = all(axis is None for axis in self.layout.states[i])
        return free and self.signature.depths[i] <= REGISTER_DEPTH

    def is_local_carry(self, i: int) -> bool:
        return all(axis is None for axis in self.layout.carries[i])

    def has_ring(self, i: int) -> bool:
        """Whether the last rows of a state that is not traced are kept in a ring."""
        return self.signature.untraced[i] and not self.is_local(i)


def whole_rows(inner: BodyInputs, result: BodyOutputs) -> Layout:
    """Return the layout of a loop whose steps work on arrays: every axis is one of its own."""

    def axes(variables: Iterable[Variable]) -> tuple[Axes, ...]:
        return tuple(tuple(range(variable.type.ndim)) for variable in variables)

    n_carries = len(inner.carries)
    return Layout(
        ndim=0,
        sequences=axes(inner.rows),
        states=axes(taps[0] for taps in inner.taps),
        carries=axes(inner.carries),
        non_sequences=axes(inner.non_sequences),
        outputs=axes(result.outputs),
        sums=(False,) * n_carries,
        carry_reductions=((),) * n_carries,
        output_reductions=((),) * len(result.outputs),
    )


class ElemwiseLoop(Loop):
    """An elementwise loop, and what its kernels need to know of it.

    Parameters
    ----------
    op : ElemwiseScan
    schedule : str
        How its steps are taken, see `scanlib.schedules.selection.schedule`.

    Attributes
    ----------
    loops : dict of tuple to int
        The number of the loop over channels in which a result is computed, by its `id` and axis.
    axes_of_loops, lengths : list
        The axis of each loop, and the size of an array that says how long it is.
    """

    def __init__(self, op: ElemwiseScan, schedule: str) -> None:
        self.op = op
        self.by_channels = schedule != "blocks"
        self.by_blocks = schedule in ("blocks", "by width")
        super().__init__(op.scan, thaw_graph(op.body), op.outer_input_types(), op.layout)
        self.block_bytes = 0  # of the memory that a part needs that runs in blocks
        # How much of the workspace chunks of the steps have in common.
        self.extra_bytes = 0
        self.least_chunk = 1  # steps
        self.slices = wanted_threads() if can_slice(op) else 1
        self.chunks = 1  # of the steps, each in a thread of its own
        self.loops: dict[tuple[int, int], int] = {}
        self.axes_of_loops: list[int] = []
        self.lengths: list[Given] = []
        self._number_loops(self.plan.targets, 0)
        self.channels = total(*(product(*sizes) for sizes in self._channels()))
        self.work = product(self.channels, max(len(self.graph.apply_nodes), 1))
        m = len(self.outputs) - self.signature.n_outputs
        for target in self.plan.targets:
            if target.kind == "output":
                self.sizes[m + target.number] = tuple(
                    1 if axis is None else self.lengths[self.loops[id(target), axis]]
                    for axis in target.axes
                )

    @property
    def space(self) -> Size:
        return self.block_bytes * max(self.slices, self.chunks) + self.extra_bytes

    def _number_loops(self, targets: Sequence[Target], level: int) -> None:
        """Give every loop over channels its number; a group without channels gets none."""
        for group in self.plan.groups(targets, level):
            places = self.plan.group_places(group, level)
            if places:
                self.loops.update(
                    {(id(target), level): len(self.axes_of_loops) for target in group}
                )
                self.axes_of_loops.append(level)
                self.lengths.append(self._length(places, level))
            self._number_loops(group, level + 1)

    def _length(self, places: Sequence[Place], level: int) -> Given:
        """Return how long a loop is; note that all of its arrays have as many channels."""

        def given(place: Place) -> Given:
            axis = place.along(level)
            assert axis is not None
            return Given("dim", place.array, axis)

        size = given(places[0])
        for place in places[1:]:
            own = given(place)
            if place.owned is None:
                titles = [f"axis {k.axis} of {self._title_of(k.array)}" for k in (size, own)]
                error, text = "ValueError", self.messages.channel_sizes(*titles)
                shown: tuple[Size, ...] = (size, own)
            else:
                text = self.messages.state_shape(place.owned, place.axes.index(level))
                error, shown = "StepShapeError", (0, own, size)
            self.checks.append(Check("ne", (own, size), error, text, shown))
        return size

    def _title_of(self, array: str) -> str:
        """Return what messages call an input."""
        labels, outer = self.messages.labels, self.outer
        for kind, arrays, names in (
            ("state", outer.initials, labels.states),
            ("sequence", outer.sequences, labels.sequences),
            ("carry", outer.carries, labels.carries),
            ("non-sequence", outer.non_sequences, labels.non_sequences),
        ):
            if array in arrays:
                place = list(arrays).index(array)
                return title(kind, place, names[place])
        raise KeyError(array)

    def _channels(self) -> Iterator[list[Given]]:
        """Yield the sizes of the channels that a group of results has."""
        for group in self.plan.groups(self.plan.targets, 0):
            deepest = max(group, key=lambda target: target.inner)
            numbers = [self.loops.get((id(deepest), axis)) for axis in range(deepest.inner)]
            yield [self.lengths[number] for number in numbers if number is not None]

    def first_axes(self) -> list[Given]:
        """Return the sizes of the first axes of all channels."""
        axes = zip(self.axes_of_loops, self.lengths, strict=True)
        return [length for axis, length in axes if axis == 0]

    def shared_sums(self) -> Iterator[int]:
        """Yield the outputs that are sums over the first axis: each slice has its own."""
        for target in self.plan.targets:
            if 0 in target.reduced:
                yield self.arrays[target.array].number


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

    def length(self, number: int) -> Value:
        """Return how long a loop over channels is."""
        size = self.loop.lengths[number]
        return self.dim(size.array, size.axis)

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
        for i, depth in enumerate(loop.signature.depths):
            self.row_sizes[i] = self.strides[f"h{i}", 0]
            if i in loop.rings:
                workspace = kernel.out.word(kernel.words.workspace, POINTER, "workspace")
                self.spaces[i] = w.offset(workspace, place)
                place = place + self.row_sizes[i] * (depth + 1) + 2 * LINE
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


def size_values(kernel: TableReader, before: Block, workspace: Workspace) -> SizeValues:
    """Return what writes sizes into a kernel, in a block before all others."""

    def given(size: Given) -> Value:
        if size.kind == "dim":
            return kernel.dim(size.array, size.axis)
        if size.kind == "stride":
            return kernel.given_stride(size.array, size.axis)
        if size.kind == "part":
            return workspace.value(size.axis, values)
        array = kernel.loop.arrays[size.array]
        return kernel.w.cast(kernel.w.load(Type(array.dtype), kernel.data(size.array)), "int64")

    values = SizeValues(kernel.w, given, lambda: kernel.w.inside(before))
    return values


class Preparing(TableReader[T]):
    """Writes a kernel that checks the inputs and computes the sizes of everything."""

    def __init__(self, loop: T) -> None:
        super().__init__(loop, "prepare")
        self.before = Block()
        self.values = size_values(self, self.before, loop.workspace)

    def write_words(self, values: dict[int, Value | int]) -> None:
        for word, value in values.items():
            self.out.write_word(word, value)

    def write_checks(self, holds: Value) -> None:
        """Write the checks of sizes, which are made where a condition holds."""
        w, value = self.w, self.values.value
        for check in self.loop.checks:
            one, other = map(value, check.sizes)
            wrong = one.differs(other) if check.operation == "ne" else one < other
            with w.when(holds & wrong):
                code = self.loop.failure(check.error, check.template, len(check.values))
                w.fail(code, *map(value, check.values))

    def finished(self) -> Kernel:
        self.w.block.statements[:0] = self.before.statements
        return self.out.kernel(runs_once=True)


class Prepare(Preparing[L]):
    """Writes that kernel of a loop, whose histories need no initial rows if they `may_be_empty`."""

    def kernel(self, may_be_empty: bool = False) -> Kernel:
        loop, w, words = self.loop, self.w, self.words
        steps = checked_steps(self, loop.outer, loop.messages)
        self.check_initial_rows(steps, may_be_empty)
        self.write_checks(steps > 0)
        capacity = steps
        if loop.grows:
            capacity = w.select(steps < FIRST_CAPACITY, steps, FIRST_CAPACITY)
        self.write_dims(capacity)
        rings = [
            total(2 * LINE, product(loop.arrays[f"h{i}"].itemsize, depth + 1, *sizes))
            for i, depth in enumerate(loop.signature.depths)
            for _, *sizes in [self.initial_sizes(i)]
            if i in loop.rings
        ]
        turn = steps_of_a_turn(w, self.values.value(loop.work), loop.longest_turn)
        self.write_words(
            {
                words.steps: steps,
                words.capacity: capacity,
                words.begin: 0,
                words.taken: 0,
                words.workspace_size: self.values.value(total(*rings, loop.space)),
                words.turn: turn,
                words.part: 0,
            }
        )
        self.write_words(self.parts(steps))
        return self.finished()

    def parts(self, steps: Value) -> dict[int, Value | int]:
        """Write how many parts the loop is run in, and by which kernel."""
        return {self.words.parts: 1, self.words.choice: 0}

    def check_initial_rows(self, steps: Value, may_be_empty: bool) -> None:
        loop, w = self.loop, self.w
        for i, depth in enumerate(loop.signature.depths):
            rows = self.dim(loop.outer.initials[i], 0)
            is_wrong = rows.differs(depth)
            if may_be_empty:
                is_wrong = is_wrong & ((steps > 0) | rows.differs(0))
            with w.when(is_wrong):
                message = loop.messages.initial_rows(i)
                w.fail(loop.failure("InitialRowsError", message, 1), rows)

    def initial_sizes(self, number: int) -> list[Size]:
        """Return the sizes of what a state or a carry starts with."""
        name = [*self.loop.outer.initials, *self.loop.outer.carries][number]
        array = self.loop.arrays[name]
        return [Given("dim", name, axis) for axis in range(array.lead + len(array.axes))]

    def write_dims(self, capacity: Value) -> None:
        """Write the dimensions of all outputs."""
        loop, m = self.loop, len(self.loop.outputs) - self.loop.signature.n_outputs
        for number, output in enumerate(loop.outputs):
            is_given = number < m
            sizes = self.initial_sizes(number) if is_given else loop.sizes[number]
            dims = list(map(self.values.value, sizes))
            if not is_given:
                dims = [capacity, *dims]
            elif number < loop.signature.n_states:
                rows: Value = self.w.constant(output.extra, INT64)
                dims[0] = capacity + dims[0] if output.grows else rows
            for axis, value in enumerate(dims):
                self.out.write_word(self.words.outputs[number] + 1 + axis, value)


class PrepareChannels(Prepare[ElemwiseLoop]):
    """Writes that kernel of an elementwise loop, which may be run in parts."""

    def parts(self, steps: Value) -> dict[int, Value | int]:
        loop, w, words = self.loop, self.w, self.words
        if loop.chunks > 1:
            chunks = w.apply("quotient", steps, w.constant(loop.least_chunk, INT64))
            chunks = self.least(loop.chunks, [chunks])
            return {words.chunks: chunks, words.parts: chunks, words.job: RUN, words.choice: 0}
        parts: Value | int = 1
        channels = self.values.value(loop.channels)
        if loop.slices > 1:
            work, least = config.scanlib__parallel_channels, least_row(loop.op)
            most = [
                w.apply("quotient", number, w.constant(enough, INT64))
                for number, enough in ((channels * steps, work), (channels, least))
            ]
            parts = self.least(loop.slices, [*map(self.values.value, loop.first_axes()), *most])
        choice: Value | int = 0
        if loop.by_channels and loop.by_blocks:  # of few channels and many steps
            few = (channels <= few_channels(loop.op)) & (steps >= MANY_STEPS)
            choice = w.cast(few, "int64")
        return {words.parts: parts, words.choice: choice}

    def least(self, number: int, others: list[Value]) -> Value:
        """Return the least of some numbers, which is not below one."""
        w, found = self.w, self.w.as_value(number, INT64)
        for other in others:
            found = w.select(other < found, other, found)
        return w.select(found < 1, 1, found)


class Start(TableReader[Loop]):
    """Writes the kernel that copies what outputs start with."""

    def __init__(self, loop: Loop) -> None:
        super().__init__(loop, "start")

    def kernel(self) -> Kernel:
        loop, w, signature = self.loop, self.w, self.loop.signature
        self.storage = storage = Storage(self)
        steps = self.out.number(self.words.steps, "steps")
        for i in range(signature.n_states):
            if i in loop.rings:  # it holds rows in the order of iteration, the latest one last
                self.copy_rows(i, storage.spaces[i], 0, backwards=loop.reverse)
            if i not in loop.rings or loop.by_blocks:
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
