"""The program of any loop, and loops inside steps, which call the kernels of theirs.

A step is to the program of an inner loop what a linker is to that of another
(`scanlib.kernels.program`): it fills in a table, which lies in its workspace, and calls `start` and
`run`. What `prepare` would write and check is known before the first step, as all sizes in a step
are: the sizes of the inner loop's arrays are those of the step's. Results of the inner loop go to
where they belong.

A loop whose results are as long as its steps decide (`until`) has no kernel inside of another one,
nor has one of so many steps as its step decides, unless only the last values are read.
"""

from dataclasses import dataclass, replace

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Variable

from scanlib.kernels.arrays.array_step import Step, rule, writes
from scanlib.kernels.arrays.sizes import (
    UNFIT,
    Changing,
    Expression,
    Given,
    Size,
    changes,
    combined,
    if_equal,
    total,
)
from scanlib.kernels.arrays.workspace import rounded
from scanlib.kernels.compiled import ProgramEntry
from scanlib.kernels.language import INT64, INTERRUPTED, Poll, Value, walk
from scanlib.kernels.program import WORD, Kernels, LoopProgram
from scanlib.kernels.scalars import NoKernelError
from scanlib.kernels.thread_parts import wanted_threads
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from scanlib.schedules.array_loops import NONE, Numbers, array_program
from scanlib.schedules.blocks import BlocksRun
from scanlib.schedules.channels import ChannelsRun
from scanlib.schedules.chunks import ChunksRun
from scanlib.schedules.elementwise import ElemwiseLoop
from scanlib.schedules.linear_steps import linear_program
from scanlib.schedules.loop_kernels import prepare, start
from scanlib.schedules.selection import can_chunk, schedule

LOOPS = (Scan, ElemwiseScan, LinearScan)


def loop_program(
    op: Scan | ElemwiseScan | LinearScan, node: Apply | None, numbers: Numbers = NONE
) -> LoopProgram:
    """Return the kernels of a loop; `NoKernelError` where an operation or a dtype has none.

    Those of a loop that is no matrix recurrence need no node. `numbers` are sizes of its inputs.
    """
    if isinstance(op, ElemwiseScan):
        return elementwise_program(op)
    if isinstance(op, LinearScan):
        assert node is not None
        return linear_program(op, node)
    return array_program(op, numbers=numbers)


def elementwise_program(op: ElemwiseScan) -> LoopProgram:
    """Return the kernels of an elementwise loop; `NoKernelError` if an operation or a dtype of its
    body has none."""
    loop = ElemwiseLoop(op, schedule(op))
    run = [ChannelsRun(loop).kernel()] if loop.by_channels else []
    in_chunks = wanted_threads() > 1 and can_chunk(op)
    if in_chunks or loop.by_blocks:
        run.append((ChunksRun if in_chunks else BlocksRun)(loop).kernel())
    kernels = Kernels(prepare(loop), start(loop), tuple(run), last_round=in_chunks)
    shared = tuple(loop.shared_sums()) if loop.slices > 1 else ()
    return loop.program(op.scan.name or "loop", kernels, shared=shared)


@rule(*LOOPS)
def write_inner_loop(step: Step, node: Apply) -> None:
    numbers = {
        Given("dim", f"x{number}", axis): size
        for number, inp in enumerate(node.inputs)
        for axis, size in enumerate(map(step.sizes.same, step.place(inp).sizes))
        if isinstance(size, int) and size > 1  # arrays of one item may repeat themselves
    }
    with config.change_flags(scanlib__threads=1):
        program = loop_program(node.op, node, numbers)
    if program.may_stop and any(output.grows for output in program.outputs):
        raise NoKernelError("an inner loop decides in its steps how long its results are")
    for kernel in program.kernels.all:
        for statement in walk(kernel.body):
            if isinstance(statement, Poll):
                statement.steps = ()  # those that are told of are the steps around
    InnerLoop(step, node, replace(program, name="inner loop", progress=False)).write()


@writes(Scan, ElemwiseScan)
def _carried(node: Apply) -> list[tuple[Variable, Variable]]:
    """Return the first values of carries, over which the last ones may be written."""
    return node.op.signature.carried(node.inputs, node.outputs)


@dataclass
class InnerLoop:
    """Writes the call of the program that an inner loop is."""

    step: Step
    node: Apply
    program: LoopProgram

    def __post_init__(self) -> None:
        self.sizes: dict[Size, Size] = {}  # of the inner loop, as those of the step
        self.inputs = [self.step.place(variable) for variable in self.node.inputs]
        # How many steps the loop takes, or how large its arrays are.
        self.step_decides = any(changes(*place.sizes, *place.strides) for place in self.inputs)
        if self.node.op.has_n_steps:
            self.step_decides |= changes(self.step.size_of(self.node.inputs[0]))
        self.failures = dict(self.program.failures)
        if not self.step_decides:  # what is checked before the first step is no failure later
            self.failures = {k: own for k, own in self.failures.items() if own.error != UNFIT}
        elif self.program.may_be_unfit:
            raise NoKernelError("a carry of an inner loop may get another shape")

    def write(self) -> None:
        step, program, words, w = self.step, self.program, self.program.words, self.step.writer
        ends = zip(program.outputs, words.outputs, strict=True)
        shapes = [range(first + 1, first + 1 + output.type.ndim) for output, first in ends]
        found: dict[int, Size] = {}
        for place, first in zip(self.inputs, words.inputs, strict=True):
            found |= enumerate((*place.sizes, *place.strides), first + 1)
        needed = {words.workspace_size, *(word for shape in shapes for word in shape)}
        sizes = program.first_words | {words.capacity: program.first_words[words.steps]}
        if self.step_decides:
            sizes = {word: sizes[word] for word in needed}
        else:
            self.check()
        found |= {word: self.translated(size) for word, size in sizes.items()}
        with w.inside(step.before):
            self.table = step.pinned("int64", (words.size,)).pointer
            for word, size in found.items():
                if not changes(size):
                    self.fill(word, step.value(size))
            for number, function in enumerate(program.functions):
                self.fill(words.functions + number, step.library(function))
        for word, size in found.items():
            if changes(size):
                self.fill(word, step.value(size))
        for place, first in zip(self.inputs, words.inputs, strict=True):
            self.fill(first, place.pointer)
        if self.step_decides:
            self.call(program.kernels.prepare.name)
            self.fill(words.capacity, self.read(words.steps))
        for out, first, shape in zip(self.node.outputs, words.outputs, shapes, strict=True):
            dims, dtype = [found[word] for word in shape], out.type.dtype
            place = step.target(out, dims) if dims else step.fresh(dtype, ())
            self.fill(first, place.pointer)
            step.bind_place(out, place)
        self.fill(words.workspace, step.fresh("uint8", (found[words.workspace_size],)).pointer)
        if program.kernels.start.body.statements:
            self.call(program.kernels.start.name)
        run, *others = (kernel.name for kernel in program.kernels.run)
        if not others:
            self.call(run)
            return
        with w.when(self.read(words.choice).equals(0)) as chosen:
            self.call(run)
        with w.otherwise(chosen):
            self.call(others[0])

    def fill(self, word: int, value: Value) -> None:
        """Write a word of the table."""
        self.step.writer.store(self.table, WORD * word, value)

    def read(self, word: int) -> Value:
        return self.step.writer.load(INT64, self.table, WORD * word)

    def call(self, kernel: str) -> None:
        """Write the call of a kernel, and that the loop around ends as it does."""
        step, w = self.step, self.step.writer
        address = step.library(ProgramEntry(self.program, kernel))
        (code,) = w.call(address, self.table, step.frame(), result=INT64)
        with w.when(code.differs(0)):
            for number, failure in self.failures.items():
                with w.when(code.equals(number)):
                    w.fail(step.fail(failure.error, failure.template, failure.count))
            w.fail(INTERRUPTED)

    def check(self) -> None:
        """Compare what must hold before the first step."""
        program = self.program
        steps = self.translated(program.first_words[program.words.steps])
        for checks, always in zip(program.checks, (True, False), strict=True):
            for check in checks:
                one, other, *shown = map(self.translated, (*check.sizes, *check.values))
                if not always and not (isinstance(steps, int) and steps > 0):
                    one = if_equal(steps, 0, other, one)
                self.step.check(replace(check, sizes=(one, other), values=tuple(shown)))

    def translated(self, size: Size) -> Size:
        """Return a size of the inner loop as one of the step."""
        if isinstance(size, int | float):
            return size
        if size not in self.sizes:
            self.sizes[size] = self._translated(size)
        return self.sizes[size]

    def _translated(self, size: Given | Expression | Changing) -> Size:
        if isinstance(size, Expression):
            return combined(size.operation, *map(self.translated, size.parts))
        assert isinstance(size, Given)
        if size.kind == "part":
            parts = self.program.parts[: size.axis]
            return total(*(rounded(self.translated(part)) for part in parts))
        if size.kind == "address":
            return 1  # of which most memory is asked for
        number = int(size.array.removeprefix("x"))
        if size.kind == "value":
            return self.step.size_of(self.node.inputs[number])
        place = self.inputs[number]
        return (place.sizes if size.kind == "dim" else place.strides)[size.axis]
