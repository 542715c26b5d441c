"""What the kernels of all loops share: their arrays, `prepare`, `start`, how they end.

A program (`scanlib.kernels.program`) has one kernel `prepare`, one `start`, and a `run` for each
way in which its steps may be taken: `prepare` chooses.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from typing import Any, Generic, TypeVar

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.type import TensorType

from scanlib.kernels.arrays.array_step import Step
from scanlib.kernels.arrays.nests import write_copy
from scanlib.kernels.arrays.sizes import (
    Check,
    Given,
    Size,
    Sizes,
    SizeValues,
    if_equal,
    maximum,
    minimum,
    product,
    quotient,
    total,
)
from scanlib.kernels.arrays.workspace import Place, Workspace
from scanlib.kernels.compiled import ProgramEntry
from scanlib.kernels.language import BOOL, FLOAT64, INT64, POINTER, Kernel, Type, Value
from scanlib.kernels.program import (
    WORD,
    ArrayType,
    Failure,
    Kernels,
    LoopProgram,
    Output,
    TableKernel,
    Words,
)
from scanlib.kernels.scalars import NoKernelError, Scalars, parts_of
from scanlib.kernels.scipy_routines import Routine, special_function
from scanlib.kernels.spans import LINE
from scanlib.ops.lowered.channel_plan import ChannelPlan
from scanlib.ops.lowered.elemwise_scan import Axes, Layout
from scanlib.ops.messages import Messages
from scanlib.ops.scan import Scan
from scanlib.ops.signature import BodyInputs, BodyOutputs, OuterInputs
from scanlib.schedules.polls import STEPS, WORK

REGISTER_DEPTH = 8  # states deeper than this are read from memory
FIRST_CAPACITY = 64  # rows allocated at first by a loop with `until`


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

    @property
    def dims(self) -> tuple[Size, ...]:
        """Its sizes, with the axes before the channels'."""
        axes = range(self.lead + len(self.axes))
        return tuple(Given("dim", self.name, axis) for axis in axes)

    @property
    def strides(self) -> tuple[Size, ...]:
        """Its strides; outputs are contiguous."""
        if not self.is_output:
            return tuple(Given("stride", self.name, axis) for axis in range(len(self.dims)))
        return tuple(product(self.itemsize, *self.dims[k:]) for k in range(1, len(self.dims) + 1))

    @property
    def row(self) -> Size:
        """How many bytes its rows have."""
        return product(self.itemsize, *self.dims[self.lead :])


class Tables:
    """What kernels read and write: the inputs and outputs of a program, its functions and failures.

    `steps` is how many there are, `capacity` for how many of them outputs that grow have rows at
    first. `first_checks` must hold before the first step always, `checks` where there is one.
    `sizes` are those of the outputs, or of the rows of stacked ones.
    """

    arrays: dict[str, Array]
    outputs: tuple[Output, ...]
    words: Words
    lengths: list[Given]
    steps: Size = 1
    capacity: Size = 1
    may_stop = False

    def __init__(self, types: Sequence[object]) -> None:
        self.failures: dict[int, Failure] = {}
        self.inputs = tuple(array_type(type) for type in types)
        self.functions: list[Any] = []  # that the kernels do not have: see `LoopProgram`
        self.function_places: dict[Hashable, int] = {}
        self.first_checks: list[Check] = []
        self.checks: list[Check] = []
        self.sizes: dict[int, tuple[Size, ...]] = {}
        self.workspace = Workspace(Sizes())

    def failure(self, error: str, template: str, count: int = 0) -> int:
        wanted, known = Failure(error, template, count), list(self.failures.values())
        code = 1 + (known.index(wanted) if wanted in known else len(known))
        self.failures[code] = wanted
        return code

    def program(self, name: str, kernels: Kernels, **more: Any) -> LoopProgram:
        """Return the program of the kernels, which have been written."""
        return LoopProgram(
            name=name,
            inputs=self.inputs,
            outputs=self.outputs,
            words=self.words,
            kernels=kernels,
            failures=self.failures,
            first_words=self.first_words(),
            checks=(self.first_checks, self.checks),
            parts=tuple(part.size for part in self.workspace.parts),
            functions=tuple(self.functions),
            may_stop=self.may_stop,
            **more,
        )

    def space(self) -> Size:
        """Return how many bytes the workspace has."""
        return self.workspace.end

    def dims(self, number: int) -> Sequence[Size]:
        """Return the dimensions of an output."""
        return self.sizes[number]

    def first_words(self) -> dict[int, Size]:
        """Return what is in the table before the first step."""
        words = self.words
        found: dict[int, Size] = dict.fromkeys(
            (words.begin, words.taken, words.part, words.choice), 0
        )
        found |= {words.steps: self.steps, words.capacity: self.capacity, words.parts: 1}
        found[words.workspace_size] = self.space()
        for number, first in enumerate(words.outputs):
            found |= enumerate(self.dims(number), first + 1)
        return found


class Loop(Tables):
    """A loop, and what the kernels of all schedules need to know of it.

    `graph` is the body whose results they compute; `layout` is that of the channels, without which
    rows are what they are in `graph`. A step computes about `work` numbers. `depths` has of how
    many steps states, `h0` and so on, and carries, `c0` and so on, are read; `starts` what they
    start with; `taps` which one, and how many steps before, an input of the body is; `rings` where
    in the workspace the last rows are of those that have them there, one row more than are read.
    """

    may_be_empty = False  # histories without initial rows, where there are no steps
    most_steps_per_poll = STEPS
    slices = 1  # of the channels, each in a thread of its own
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
        self.depths = {f"h{i}": depth for i, depth in enumerate(self.signature.depths)}
        self.depths |= {f"c{i}": 1 for i in range(self.signature.n_carries)}
        self.taps = {carry: (f"c{i}", -1) for i, carry in enumerate(self.inner.carries)}
        for i, taps in enumerate(self.inner.taps):
            offsets = zip(taps, self.signature.taps[i], strict=True)
            self.taps |= {tap: (f"h{i}", offset) for tap, offset in offsets}
        names = [*self.outer.initials, *self.outer.carries]
        self.starts = {k: self.arrays[name] for k, name in zip(self.depths, names, strict=True)}
        self.rings: dict[str, Size] = {}
        self.end_of_rings: Size = 0
        for name, depth in self.depths.items():
            if self.has_ring(name):
                self.rings[name] = self.end_of_rings
                size = product(depth + 1, self.starts[name].row)
                self.end_of_rings = total(self.end_of_rings, size, 2 * LINE)
        self.steps, self.first_checks = counted_steps(self.outer, self.messages)
        self.first_checks += map(self._check_of_rows, range(self.signature.n_states))
        self.capacity = self.steps
        if self.grows:
            self.capacity = minimum(self.steps, FIRST_CAPACITY)

    def _check_of_rows(self, i: int) -> Check:
        """Return the check of a state's initial rows."""
        rows, wanted = self.starts[f"h{i}"].dims[0], self.signature.depths[i]
        found = rows
        if self.may_be_empty:
            empty = if_equal(rows, 0, wanted, rows)
            found = if_equal(self.steps, 0, empty, rows)
        message = self.messages.initial_rows(i)
        return Check("ne", (found, wanted), "InitialRowsError", message, (rows,))

    def dims(self, number: int) -> Sequence[Size]:
        output = self.outputs[number]
        if number >= len(self.starts):
            return [self.capacity, *self.sizes[number]]
        dims = list(self.starts.values())[number].dims
        if number < self.signature.n_states:
            rows = total(self.capacity, dims[0]) if output.grows else output.extra
            dims = (rows, *dims[1:])
        return dims

    def space(self) -> Size:
        return total(self.end_of_rings, super().space())

    def first_words(self) -> dict[int, Size]:
        steps = quotient(WORK, maximum(self.work, 1))
        steps = maximum(minimum(steps, self.most_steps_per_poll), 1)
        return super().first_words() | {self.words.steps_per_poll: steps}

    def _arrays(self) -> Iterator[Array]:
        results = 0
        if self.outer.n_steps is not None:
            yield Array(self.outer.n_steps, False, 0, self.inputs[0].dtype, (), 0)
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

    def is_local(self, name: str) -> bool:
        """Whether a state or a carry lives in local variables."""
        free = all(axis is None for axis in self.arrays[name].axes)
        return free and self.depths[name] <= REGISTER_DEPTH

    def is_traced(self, name: str) -> bool:
        """Whether a state has all of its rows."""
        return name[0] == "h" and not self.signature.untraced[int(name[1:])]

    def has_ring(self, name: str) -> bool:
        """Whether the last rows of a state or a carry are kept in a ring."""
        return name[0] == "h" and not self.is_traced(name) and not self.is_local(name)

    def has_rows(self, name: str) -> bool:
        """Whether an output has the rows of a state or a carry that the first step reads."""
        return name not in self.rings


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


def counted_steps(outer: OuterInputs, messages: Messages) -> tuple[Size, list[Check]]:
    """Return the number of steps, and the checks that keep every read inside its array.

    `outer` has the names of the loop's arrays.
    """
    rows: list[Size] = [Given("dim", name, 0) for name in outer.sequences]
    checks = []
    if outer.n_steps is not None:
        steps: Size = Given("value", outer.n_steps)
        checks = [Check("lt", (steps, 0), "StepCountError", messages.negative_steps(), (steps,))]
    else:
        steps = reduce(minimum, rows)
    for i, size in enumerate(rows):
        if size != steps:
            text = messages.sequence_length(i)
            checks.append(Check("ne", (size, steps), "SequenceLengthError", text, (size, steps)))
    return steps, checks


def array_type(kind: object) -> ArrayType:
    if not isinstance(kind, ScalarType | TensorType):
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
        self.scalars = Scalars(self.w, self.call_outside)
        self.size_values = SizeValues(self.w, self._given)

    def _given(self, size: Given) -> Value:
        """Write what a size is made of."""
        if size.kind == "dim":
            return self.dim(size.array, size.axis)
        if size.kind == "stride":
            return self.given_stride(size.array, size.axis)
        if size.kind == "part":
            return self.loop.workspace.value(size.axis, self.size_values)
        array = self.loop.arrays[size.array]
        if size.kind == "address":
            return self.w.load(INT64, self.out.table, WORD * self.base(array))
        return self.w.cast(self.w.load(Type(array.dtype), self.data(size.array)), "int64")

    def value_of(self, size: Size) -> Value:
        return self.size_values.value(size)

    def stride_of(self, name: str, axis: int) -> Value:
        """Return the stride of an array's axis, counted with those before the channels'."""
        return self.value_of(self.loop.arrays[name].strides[axis])

    def whole_kernel(self, register: int = Kernel.register, runs_once: bool = False) -> Kernel:
        """Return the kernel that has been written; see `Kernel`."""
        self.w.block.statements[:0] = self.size_values.block.statements
        return self.out.kernel(register, runs_once)

    @property
    def workspace(self) -> Value:
        return self.out.word(self.words.workspace, POINTER, "workspace")

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
        special = special_function(node.op, len(inputs))
        if special is not None:
            numbers = [self.w.cast(value, "float64") for value in inputs]
            one, address = self.w.constant(1, Type("int32")), self.address(special)
            (found,) = self.w.call(address, *numbers, one, result=FLOAT64)
            return [self.w.cast(found, out.type.dtype)]
        return [*self.w.call(self.address(node), *inputs, result=Type(out.type.dtype))]

    def address(self, function: Apply | Routine | ProgramEntry) -> Value:
        """Return the address of a function, which the table has."""
        key: Hashable = repr(function)
        if isinstance(function, Apply):
            key = function.op, *(v.type.dtype for v in (*function.inputs, *function.outputs))
        place = self.loop.function_places.setdefault(key, len(self.loop.functions))
        if place == len(self.loop.functions):
            self.loop.functions.append(function)
        return self.out.word(self.words.functions + place, POINTER, f"function{place}")


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


def prepare(loop: Tables) -> Kernel:
    """Return the kernel that checks the inputs and computes the sizes of everything."""
    kernel = TableReader(loop, "prepare")
    w, value = kernel.w, kernel.value_of
    always: Value = w.constant(True, BOOL)
    for checks, holds in ((loop.first_checks, always), (loop.checks, value(loop.steps) > 0)):
        for check in checks:
            one, other = map(value, check.sizes)
            wrong = one.differs(other) if check.operation == "ne" else one < other
            with w.when(holds & wrong):
                code = loop.failure(check.error, check.template, len(check.values))
                w.fail(code, *map(value, check.values))
    for word, size in loop.first_words().items():
        kernel.out.write_word(word, value(size))
    return kernel.whole_kernel(runs_once=True)


@contextmanager
def writing_step(
    kernel: TableReader, first: Size = 0, workspace: Workspace | None = None
) -> Iterator[Step]:
    """Write a step into a kernel; its part of the workspace begins so many bytes after the start.

    What is done before the first step comes first.
    """
    w, loop, values = kernel.w, kernel.loop, kernel.size_values
    space = w.offset(kernel.workspace, kernel.value_of(first))
    memory, w.block.statements = w.block.statements, []
    own = loop.workspace if workspace is None else workspace
    step = Step(w, kernel.scalars, values, own, space, loop.failure, kernel.address)
    step.frame = lambda: kernel.out.frame
    yield step
    loop.checks += step.sizes.checks
    w.block.statements[:0] = [*memory, *step.before.statements]


def start(loop: Loop) -> Kernel:
    """Return the kernel that copies what outputs start with."""
    kernel = TableReader(loop, "start")
    # Sizes that the steps have found equal are so only where there are steps.
    with writing_step(kernel, workspace=Workspace(Sizes())) as step:
        for name, array in loop.starts.items():
            if name in loop.rings:  # it holds rows in the order of iteration, the latest one last
                ring = step.writer.offset(kernel.workspace, kernel.value_of(loop.rings[name]))
                write_start(kernel, step, ring, array, backwards=loop.reverse)
            if loop.has_rows(name):
                output = kernel.data(name)
                if loop.reverse and loop.is_traced(name):
                    steps = kernel.out.number(kernel.words.steps, "steps")
                    output = step.writer.offset(output, steps * kernel.stride_of(name, 0))
                write_start(kernel, step, output, array)
    return kernel.whole_kernel(runs_once=True)


def write_start(
    kernel: TableReader, step: Step, pointer: Value, array: Array, backwards: bool = False
) -> None:
    """Write the copy of an input to contiguous memory, its rows perhaps `backwards`; an input that
    lies there stays."""
    source = Place(kernel.data(array.name), array.dtype, array.dims, array.strides)
    strides = step.sizes.contiguous_strides(array.itemsize, array.dims)
    if backwards and array.lead:
        last = product(total(array.dims[0], -1), strides[0])
        pointer = step.writer.offset(pointer, kernel.value_of(last))
        strides = (product(-1, strides[0]), *strides[1:])
    target = Place(pointer, array.dtype, array.dims, strides)
    with step.writer.when(~source.pointer.equals(target.pointer)):
        write_copy(step, source, target)
