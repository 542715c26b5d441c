"""The program of any loop, and loops inside steps, which call the kernels of theirs.

A step is to the program of an inner loop what a linker is to that of another
(`scanlib.kernels.program`): it fills in a table, which lies in its workspace, and calls `start` and
`run`. What `prepare` would write and check is known before the first step, as all sizes in a step
are: the sizes of the inner loop's arrays are those of the step's. Results of the inner loop go to
where they belong.

A loop whose results are as long as its steps decide (`until`) has no kernel inside of another one,
nor has one of so many steps as its step decides, unless only the last values are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pytensor.configdefaults import config
from pytensor.graph.basic import Apply

from scanlib.kernels.arrays.array_step import Step, rule
from scanlib.kernels.arrays.sizes import Expression, Size, combined, if_equal, total
from scanlib.kernels.arrays.workspace import rounded
from scanlib.kernels.compiled import ProgramEntry
from scanlib.kernels.language import INT64, INTERRUPTED, Poll, Value, walk
from scanlib.kernels.program import WORD, LoopProgram
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from scanlib.schedules.array_loops import array_program
from scanlib.schedules.choice import elementwise_program
from scanlib.schedules.linear_steps import linear_program

LOOPS = (Scan, ElemwiseScan, LinearScan)


def loop_program(op: Scan | ElemwiseScan | LinearScan, node: Apply | None) -> LoopProgram:
    """Return the kernels of a loop; `NoKernelError` where an operation or a dtype has none.

    Those of a loop that is no matrix recurrence need no node.
    """
    if isinstance(op, ElemwiseScan):
        return elementwise_program(op)
    if isinstance(op, LinearScan):
        assert node is not None
        return linear_program(op, node)
    return array_program(op)


@rule(*LOOPS)
def write_inner_loop(step: Step, node: Apply) -> None:
    """Write the call of an inner loop."""
    with config.change_flags(scanlib__threads=1):
        program = loop_program(node.op, node)
    if program.may_be_unfit:
        raise NoKernelError("a carry of an inner loop may get another shape")
    if program.may_stop and any(output.grows for output in program.outputs):
        raise NoKernelError("an inner loop decides in its steps how long its results are")
    for kernel in program.kernels.all:
        for statement in walk(kernel.body):
            if isinstance(statement, Poll):
                statement.steps = ()  # those that are told of are the steps around
    InnerLoop(step, node, replace(program, name="inner loop", progress=False)).write()


@dataclass
class InnerLoop:
    """Writes the call of the program that an inner loop is."""

    step: Step
    node: Apply
    program: LoopProgram

    def write(self) -> None:
        step, program, words, w = self.step, self.program, self.program.words, self.step.writer
        self.inputs = [step.place(variable) for variable in self.node.inputs]
        self.check()
        found = {word: self.translated(size) for word, size in program.first_words.items()}
        found[words.capacity] = found[words.steps]
        for place, first in zip(self.inputs, words.inputs, strict=True):
            found |= enumerate((*place.sizes, *place.strides), first + 1)
        with w.inside(step.before):
            self.table = step.pinned("int64", (words.size,)).pointer
            for word, size in found.items():
                self.fill(word, step.value(size))
            for number, function in enumerate(program.functions):
                self.fill(words.functions + number, step.library(function))
        for place, first in zip(self.inputs, words.inputs, strict=True):
            self.fill(first, place.pointer)
        results = []
        for out, output, first in zip(
            self.node.outputs, program.outputs, words.outputs, strict=True
        ):
            sizes = [found[first + 1 + axis] for axis in range(output.type.ndim)]
            results.append(step.target(out, sizes) if sizes else step.fresh(out.type.dtype, ()))
            self.fill(first, results[-1].pointer)
        self.fill(words.workspace, step.fresh("uint8", (found[words.workspace_size],)).pointer)
        if program.kernels.start.body.statements:
            self.call(program.kernels.start.name)
        first_run, *others = program.kernels.run
        if not others:
            self.call(first_run.name)
        else:
            choice = step.value(found[words.choice])
            with w.when(choice.equals(0)) as chosen:
                self.call(first_run.name)
            with w.otherwise(chosen):
                self.call(others[0].name)
        for out, place in zip(self.node.outputs, results, strict=True):
            step.bind_place(out, place)

    def fill(self, word: int, value: Value) -> None:
        """Write a word of the table."""
        self.step.writer.store(self.table, WORD * word, value)

    def call(self, kernel: str) -> None:
        """Write the call of a kernel, and that the loop around ends as it does."""
        step, w = self.step, self.step.writer
        address = step.library(ProgramEntry(self.program, kernel))
        code = w.call_pointer(INT64, address, self.table, step.frame())
        with w.when(code.differs(0)):
            for number, failure in self.program.failures.items():
                with w.when(code.equals(number)):
                    w.fail(step.fail(failure.error, failure.template, failure.count))
            w.fail(INTERRUPTED)

    def check(self) -> None:
        """Note what must hold before the first step."""
        sizes, steps = self.step.sizes, self.translated(self.program.first_words[self.program.words.steps])
        for checks, is_always in zip(self.program.checks, (True, False), strict=True):
            for check in checks:
                one, other, *shown = map(self.translated, (*check.sizes, *check.values))
                if not is_always and not (isinstance(steps, int) and steps > 0):
                    one = if_equal(steps, 0, other, one)
                if check.operation == "ne":
                    sizes.require_equal(one, other, check.error, check.template, tuple(shown))
                else:
                    sizes.checks.append(replace(check, sizes=(one, other), values=tuple(shown)))

    def translated(self, size: Size) -> Size:
        """Return a size of the inner loop as one of the step."""
        if isinstance(size, Expression):
            return combined(size.operation, *map(self.translated, size.parts))
        if isinstance(size, int):
            return size
        if size.kind == "part":
            return total(*(rounded(self.translated(part)) for part in self.program.parts[: size.axis]))
        number = int(size.array[1:])
        if size.array[0] != "x":
            raise AssertionError(size)
        if size.kind == "value":
            return self.step.size_of(self.node.inputs[number])
        place = self.inputs[number]
        return (place.sizes if size.kind == "dim" else place.strides)[size.axis]
