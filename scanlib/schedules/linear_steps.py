r"""Matrix recurrences: one product a step.

The recurrences are those of `ops.lowered.linear_scan`, ``h_t = A_t ⊗ h_{t-1} + b_t``. How a step is
computed:

* a real recurrence of vectors of at most `WIDEST` numbers, without a batch: in registers, with a
  fixed matrix several steps at once (`scanlib.schedules.linear_vectors`). Where the size
  is not known when the kernel is written, sizes of 2 to 4 are written beside the general code;
* products from both sides of a small state keep its rows in registers; other ones are two products
  of matrices;
* the log semiring with a fixed matrix and vectors works with ``exp(A - its row's maximum)``,
  computed once (`scanlib.schedules.linear_logs`);
* other products are combinations of contiguous rows (`scanlib.kernels.linalg.semiring_products`).
  A fixed matrix that multiplies vectors is laid out once so that this is so. Of a matrix per step
  with a vector at its right, the contiguous axis is the one that is summed over; in the log
  semiring it is turned first. Complex numbers are computed one by one.

Where a mask leaves items of the matrix out, steps (or blocks of them) whose results are not finite
are computed again without these items. Inputs are read where they are; rows that are not contiguous
are copied when their step comes.
"""

from __future__ import annotations

from collections.abc import Iterator

from pytensor.graph.basic import Apply

from scanlib.kernels.language import INT64, Kernel, Type, Value
from scanlib.kernels.program import Kernels, LoopProgram
from scanlib.ops.lowered import linear_loop
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.schedules.linear_run import Run
from scanlib.schedules.linear_table import Recurrence, Table

MISMATCH = "rows that are multiplied with states have an incompatible shape in axis 0"


def linear_program(op: LinearScan, node: Apply, outer: str = "") -> LoopProgram:
    """Return the kernels of a matrix recurrence.

    Parameters
    ----------
    op : LinearScan
    node : Apply
        Its inputs have the types of those of the kernels.
    outer : {"", "after", "before"}
        Whether the program has one more input, rows `x_t`, and one more output, the products
        ``h_i x_j`` of each state and row, or ``x_i h_j``. It refuses another number of
        rows than of states.

    Raises
    ------
    NoKernelError
        If kernels do not have the dtype.
    """
    loop = Recurrence(op, node, outer)
    kernels = Kernels(Prepare(loop).kernel(), Start(loop).kernel(), (Run(loop).kernel(),))
    return LoopProgram(
        name=op.name or "linear scan",
        inputs=loop.inputs,
        outputs=loop.outputs,
        words=loop.words,
        kernels=kernels,
        failures=loop.failures,
        has_workspace=True,
    )


def has_products(node: Apply) -> bool:
    """Whether the steps of a recurrence can write products of their states and other rows."""
    op = node.op
    if op.coefficient == "fixed" or op.has_mask or op.untraced:
        return False
    return bool(Recurrence(op, node, "").in_registers())


class Prepare(Table):
    """Writes the kernel that checks the inputs and computes the sizes of everything."""

    def __init__(self, loop: Recurrence) -> None:
        super().__init__(loop, "prepare")

    def refuse(self, condition: Value, error: str, text: str, *numbers: Value) -> None:
        with self.w.when(condition):
            self.w.fail(self.loop.failure(error, text, len(numbers)), *numbers)

    def kernel(self) -> Kernel:
        loop, op, w, words = self.loop, self.op, self.w, self.words
        steps = self.checked_steps()
        rows = self.dim("initial", 0)
        is_wrong = rows.differs(1)
        if not op.untraced:
            is_wrong = is_wrong & ((steps > 0) | rows.differs(0))
        self.refuse(is_wrong, "InitialRowsError", linear_loop.INITIAL_ROWS, rows)
        if op.required_steps:
            text = linear_loop.missing_steps(op.required_steps)
            self.refuse(steps < op.required_steps, "IndexError", text)
        for left, right in self.equal_sizes():
            self.refuse(left.differs(right), "LoopError", linear_loop.SHAPES, left, right)
        for word in (words.steps, words.capacity, words.taken):
            self.out.write_word(word, steps)
        for word, number in ((words.begin, 0), (words.part, 0), (words.parts, 1)):
            self.out.write_word(word, number)
        total: Value = w.constant(0, INT64)
        for items in self.spaces().values():
            total = total + self.whole_lines(items)
        self.out.write_word(words.workspace_size, total)
        dims = [self.dim("initial", axis) for axis in range(1 + loop.row_ndim)]
        history = w.constant(1, INT64) if op.untraced else steps + rows
        self.write_output(0, [history, *dims[1:]])
        if loop.outer:
            others, length = self.dim("other", 0), self.dim("other", 1)
            sizes = [dims[1], length] if loop.outer == "after" else [length, dims[1]]
            self.refuse(others.differs(history), "ValueError", MISMATCH)
            self.write_output(1, [history, *sizes])
        return self.out.kernel(runs_once=True)

    def write_output(self, number: int, dims: list[Value]) -> None:
        for axis, value in enumerate(dims):
            self.out.write_word(self.words.outputs[number] + 1 + axis, value)
        first = self.words.first_row(number)
        self.out.write_word(first, 0)
        self.out.write_word(first + 1, dims[0])

    def checked_steps(self) -> Value:
        """Write the number of steps, and the checks that all inputs have it."""
        loop, w = self.loop, self.w
        if self.has("n_steps"):
            kind = Type(loop.arrays["n_steps"].dtype)
            steps = w.cast(w.load(kind, self.data("n_steps")), "int64")
            self.refuse(steps < 0, "StepCountError", linear_loop.NEGATIVE_STEPS, steps)
        else:
            steps = self.dim("offset" if self.has("offset") else "matrix", 0)
        timed = [("offset", linear_loop.OFFSET_ROWS)] if self.has("offset") else []
        if not loop.fixed:
            names = ["matrix", "right"] if self.has("right") else ["matrix"]
            timed += [(name, linear_loop.MATRIX_ROWS) for name in names]
        for name, text in timed:
            rows = self.dim(name, 0)
            self.refuse(rows.differs(steps), "SequenceLengthError", text, rows, steps)
        return steps

    def equal_sizes(self) -> Iterator[tuple[Value, Value]]:
        loop = self.loop
        d = self.dim("initial", -1 if loop.is_turned() else -2)
        for axis in (-2, -1):
            yield self.dim("matrix", axis), d
        if loop.matrix_batched:
            first = 0 if loop.fixed else 1
            for axis in range(loop.batch):
                yield self.dim("matrix", first + axis), self.dim("initial", 1 + axis)
        for axis in (-2, -1):
            if self.has("right"):
                yield self.dim("right", axis), self.dim("initial", -1)
            if self.has("mask"):
                yield self.dim("mask", axis), d
        if self.has("offset"):
            for axis in range(1, 1 + loop.row_ndim):
                yield self.dim("offset", axis), self.dim("initial", axis)


class Start(Table):
    """Writes the kernel that copies the initial state."""

    def __init__(self, loop: Recurrence) -> None:
        super().__init__(loop, "start")

    def kernel(self) -> Kernel:
        self.prepare_memory()
        first = self.row_of(self.w.constant(0, INT64))
        with self.w.loop(0, self.dim("initial", 0)), self.over_batch() as place:
            target = self.w.offset(self.history, first + place["index"] * self.cells)
            self.copy(target, self.given("initial", place))
        return self.out.kernel(runs_once=True)
