r"""Matrix recurrences: one product a step.

The recurrences are those of `ops.lowered.linear_scan`, ``h_t = A_t ⊗ h_{t-1} + b_t``. How a step of
vectors is computed:

* a real recurrence of at most `WIDEST` numbers, without a batch: in registers, with a fixed matrix
  several steps at once (`scanlib.schedules.linear_vectors`). Where the size is not known when the
  kernel is written, sizes of 2 to 4 are written beside the general code;
* the log semiring with a fixed matrix works with ``exp(A - its row's maximum)``, computed once
  (`LogSteps` there);
* other products are combinations of contiguous rows (`scanlib.kernels.linalg.semiring_products`). A
  fixed matrix is laid out once so that this is so. Of a real matrix per step that stands at the
  left, the contiguous axis is the one that is summed over; in other semirings it is turned first.

States that are matrices, and complex ones, are loops over arrays like others
(`scanlib.schedules.array_loops`).

Where a mask leaves items of the matrix out, steps (or blocks of them) whose results are not finite
are computed again without these items. Inputs are read where they are; rows that are not contiguous
are copied when their step comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

from pytensor.graph.basic import Apply

from scanlib.kernels.language import BOOL, INT64, POINTER, Kernel, Type, Value
from scanlib.kernels.linalg.matrices import Matrix, known, sized
from scanlib.kernels.linalg.products import write_product
from scanlib.kernels.linalg.semiring_products import (
    VECTOR_BYTES,
    Combination,
    choose,
    plainly,
    write_dots,
    write_multiple,
)
from scanlib.kernels.processor import register_bytes
from scanlib.kernels.program import ArrayType, Kernels, LoopProgram, Output, Words
from scanlib.kernels.scalars import NoKernelError, parts_of
from scanlib.kernels.spans import LINE, itemsize
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.schedules.array_loops import array_program
from scanlib.schedules.elementwise import (
    Array,
    TableReader,
    Tables,
    counted_steps,
    write_checks,
)
from scanlib.schedules.linear_vectors import BLOCK, LogSteps, VectorSteps, padded
from scanlib.schedules.turns import steps_of_a_turn, turns

WIDEST = 8  # columns longer than this do not fit the registers
GUESSED_SIZES = (2, 3, 4)  # written for where the size is not known

Place = dict[str, Value]  # which state of the batch it is, and how far the inputs are
MISMATCH = "rows that are multiplied with states have an incompatible shape in axis 0"
WORK_OF_A_TURN = 1 << 23  # multiplications, after which a kernel can be interrupted

Multiply = Callable[[Matrix, Matrix, Matrix, "Matrix | None"], None]  # out = a h + add


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
    if not _is_of_vectors(op):
        return array_program(op.scan, may_be_empty=not op.untraced)
    loop = Recurrence(op, node, outer)
    kernels = Kernels(Prepare(loop).kernel(), Start(loop).kernel(), (Run(loop).kernel(),))
    return LoopProgram(
        name=op.name or "linear scan",
        inputs=loop.inputs,
        outputs=loop.outputs,
        words=loop.words,
        kernels=kernels,
        failures=loop.failures,
    )


def _is_of_vectors(op: LinearScan) -> bool:
    """Whether states are vectors, and not of complex numbers."""
    return op.vector and parts_of(op.dtype) is None


def has_products(node: Apply) -> bool:
    """Whether the steps of a recurrence can write products of their states and other rows."""
    op = node.op
    if op.coefficient == "fixed" or op.has_mask or op.untraced or not _is_of_vectors(op):
        return False
    return bool(Recurrence(op, node, "").in_registers())


class Recurrence(Tables):
    """What the kernels of one recurrence share."""

    def __init__(self, op: LinearScan, node: Apply, outer: str) -> None:
        super().__init__([variable.type for variable in node.inputs])
        self.op, self.outer = op, outer
        self.messages = op.messages()
        parts = op.parts(node.inputs)
        out = node.outputs[0].type
        self.dtype = out.dtype
        if out.dtype not in ("float32", "float64"):
            raise NoKernelError(f"a matrix recurrence of {out.dtype} has no kernel")
        self.itemsize = itemsize(out.dtype)
        self.batch = op.batch_rank
        self.matrix_batched = op.matrix_batch_rank > 0
        self.fixed = op.coefficient == "fixed"
        state = parts.initial.type.shape
        added = state if parts.offset is None else parts.offset.type.shape
        self.size = _first_known(
            *parts.matrix.type.shape[-2:],
            *(shape[-1] for shape in (state, added)),
        )
        numbers = op.parts(range(len(node.inputs)))._asdict()
        outputs = [Output(ArrayType(out.dtype, out.ndim))]
        if outer:
            numbers["other"] = len(self.inputs)
            self.inputs += (ArrayType(out.dtype, 2),)
            outputs.append(Output(ArrayType(out.dtype, 3)))
        self.outputs = tuple(outputs)
        self.words = Words(self.inputs, self.outputs, ())
        self.arrays = {
            name: Array(name, False, number, kind.dtype, tuple(range(kind.ndim)), 0)
            for name, number in numbers.items()
            if number is not None
            for kind in [self.inputs[number]]
        }
        given = sorted(self.arrays, key=lambda name: self.arrays[name].number)
        self.names = op.signature.split_inputs(given[: len(node.inputs)])

    # Which code there is

    def in_registers(self) -> tuple[int, ...]:
        """Return the sizes of vectors that are kept in registers."""
        op = self.op
        if op.semiring != "real" or self.batch:
            return ()
        if op.has_mask and op.untraced:
            return ()  # a masked step reads the row before it
        if self.size is None:
            return GUESSED_SIZES
        return (self.size,) if 2 <= self.size <= WIDEST else ()

    def is_laid_out(self) -> bool:
        """Whether a fixed matrix is copied, so that its rows, or its columns, are contiguous."""
        return self.fixed and not self.has_logs()

    def has_logs(self) -> bool:
        """Whether steps are products with exponentials."""
        return self.fixed and self.op.semiring == "log"


def _first_known(*sizes: int | None) -> int | None:
    return next((size for size in sizes if size is not None), None)


class Table(TableReader[Recurrence]):
    """What the writers of `prepare`, `start` and `run` share: how they read the table, and where
    states are."""

    def __init__(self, loop: Recurrence, name: str) -> None:
        super().__init__(loop, name)
        self.op = loop.op

    def dim(self, name: str, axis: int) -> Value:
        """Return a size of an input; axes are counted like those of shapes."""
        return super().dim(name, axis % len(self.loop.arrays[name].axes))

    def stride(self, name: str, axis: int) -> Value:
        return self.given_stride(name, axis % len(self.loop.arrays[name].axes))

    def result(self, number: int = 0) -> Value:
        return self.out.word(self.words.outputs[number], POINTER, f"out{number}")

    def has(self, name: str) -> bool:
        return name in self.loop.arrays

    @property
    def size(self) -> Value:
        """The size of the matrix."""
        if self.loop.size is not None:
            return self.w.constant(self.loop.size, INT64)
        return self.dim("initial", -1)

    def batches(self) -> Value:
        total: Value = self.w.constant(1, INT64)
        for axis in range(self.loop.batch):
            total = total * self.dim("initial", 1 + axis)
        return total

    def spaces(self) -> dict[str, Value]:
        """Return how many items each part of the workspace has."""
        loop, op = self.loop, self.op
        d, found = self.size, {}
        if op.untraced:
            found["states"] = d * self.batches() * 2
        if self.has("offset"):
            found["row"] = d
            if loop.in_registers():
                found["rows"] = self.w.select(d <= WIDEST, d * BLOCK, 0)
        if not loop.fixed or loop.is_laid_out():
            many = loop.is_laid_out() and loop.matrix_batched
            found["matrix"] = d * d * self.batches() if many else d * d
        if loop.has_logs():
            length = padded(self.w, loop.dtype, d, loop.size)
            several = self.batches() if loop.matrix_batched else self.w.constant(1, INT64)
            found["exponentials"] = several * d * length
            found["largest"] = several * length
            found["buffers"] = length * 4
        if loop.outer:
            found["other"] = self.dim("other", 1)
        return found

    def whole_lines(self, items: Value) -> Value:
        """Return how many bytes a part of the workspace has, in whole lines of the cache."""
        return (items * self.loop.itemsize + (LINE - 1)) & -LINE

    # States, and the parts of the workspace

    def prepare_memory(self) -> None:
        loop, w = self.loop, self.w
        self.steps = self.out.number(self.words.steps, "steps")
        self.cells = self.size * loop.itemsize
        self.row_bytes = self.batches() * self.cells
        self.space: dict[str, Value] = {}
        self.units: dict[Value, Value] = {}  # whether a stride is that of contiguous numbers
        place: Value = w.constant(0, INT64)
        for name, items in self.spaces().items():
            workspace = self.out.word(self.words.workspace, POINTER, "workspace")
            self.space[name] = w.offset(workspace, place)
            place = place + self.whole_lines(items)
        self.history = self.space["states"] if self.op.untraced else self.result()

    def row_of(self, n: Value) -> Value:
        """Return where the state before step `n` is; after the last one, where it ends."""
        if self.op.untraced:
            return (n & 1) * self.row_bytes
        return self.place_of(n) * self.row_bytes

    def place_of(self, n: Value) -> Value:
        """Return which row of the history has the state before step `n`."""
        return self.steps - n if self.op.reverse else n

    def time(self, n: Value) -> Value:
        return self.steps - 1 - n if self.op.reverse else n

    @contextmanager
    def over_batch(self, t: Value | None = None, opens: bool = True) -> Iterator[Place]:
        """Open loops over the batch; what is yielded are the index and how far the inputs are.

        With `t`, these are at that time.
        """
        loop, w = self.loop, self.w
        zero: Value = w.constant(0, INT64)
        found: Place = dict.fromkeys(("index", "initial", "matrix", "offset"), zero)
        leads = {"initial": 1, "offset": 1, "matrix": int(not loop.fixed)}
        with ExitStack() as stack:
            for axis in range(loop.batch if opens else 0):
                size = self.dim("initial", 1 + axis)
                k = stack.enter_context(w.loop(0, size))
                found["index"] = found["index"] * size + k
                for name, lead in leads.items():
                    if self.has(name) and (name != "matrix" or loop.matrix_batched):
                        found[name] = found[name] + k * self.stride(name, axis + lead)
            for name in ("offset", *([] if loop.fixed else ["matrix"])):
                if t is not None and self.has(name):
                    found[name] = found[name] + t * self.stride(name, 0)
            yield found

    # Matrices

    def given(self, name: str, place: Place) -> Matrix:
        """Return an input as a matrix: of one row if it is a vector."""
        pointer = self.w.offset(self.data(name), place[name])
        is_matrix = name in ("matrix", "mask")
        row = (self.size, self.stride(name, -2)) if is_matrix else (1, 0)
        columns = self.dim(name, 1) if name == "other" else self.size
        dtype = self.loop.arrays[name].dtype
        return Matrix(pointer, dtype, row[0], columns, row[1], self.stride(name, -1))

    def state_at(self, pointer: Value) -> Matrix:
        """Return a state as a column."""
        d, item = self.size, self.loop.itemsize
        return Matrix(pointer, self.loop.dtype, 1, d, d * item, item).turned

    def copy(self, target: Value, source: Matrix) -> Matrix:
        """Write the copy of a matrix to contiguous memory."""
        w, size = self.w, source.itemsize
        with w.loop(0, source.rows) as i, w.loop(0, source.columns) as k:
            j = plainly(w, k)
            w.store(target, (i * source.columns + j) * size, source.load(w, i, j))
        line = w.as_value(source.columns, INT64) * size
        return replace(source, pointer=target, row_stride=line, column_stride=size)

    def in_rows(self, matrix: Matrix, space: str) -> Matrix:
        """Return a matrix whose rows are contiguous, copied to the workspace if need be."""
        w, size = self.w, matrix.itemsize
        if known(matrix.column_stride) == size:
            return matrix
        row, column, columns = sized(w, matrix.row_stride, matrix.column_stride, matrix.columns)
        is_unit = self.units.get(column)
        if is_unit is None:
            is_unit = column.equals(size) | (columns < 2)
        found = w.local(matrix.pointer)
        with w.when(~is_unit):
            self.copy(self.space[space], matrix)
            w.assign(found, self.space[space])
        line = w.select(is_unit, row, columns * size)
        return replace(matrix, pointer=w.copy(found), row_stride=line, column_stride=size)


class Prepare(Table):
    """Writes the kernel that checks the inputs and computes the sizes of everything."""

    def __init__(self, loop: Recurrence) -> None:
        super().__init__(loop, "prepare")

    def refuse(self, condition: Value, error: str, text: str, *numbers: Value) -> None:
        with self.w.when(condition):
            self.w.fail(self.loop.failure(error, text, len(numbers)), *numbers)

    def kernel(self) -> Kernel:
        loop, op, w, words = self.loop, self.op, self.w, self.words
        messages = loop.messages
        count, checks = counted_steps(loop.names, messages)
        steps = self.value_of(count)
        write_checks(self, checks, w.constant(True, BOOL))
        rows = self.dim("initial", 0)
        is_wrong = rows.differs(1)
        if not op.untraced:
            is_wrong = is_wrong & ((steps > 0) | rows.differs(0))
        self.refuse(is_wrong, "InitialRowsError", messages.initial_rows(0), rows)
        if op.required_steps:
            self.refuse(steps < op.required_steps, "IndexError", messages.missing_steps())
        first = {"initial": 1, "offset": 1, "matrix": int(not loop.fixed), "mask": 0}
        for pair in op.same_sizes():
            left, right = (
                self.dim(name, axis if axis < 0 else axis + first[name]) for name, axis in pair
            )
            self.refuse(left.differs(right), "LoopError", op.sizes_differ(), left, right)
        for word in (words.steps, words.capacity, words.taken):
            self.out.write_word(word, steps)
        for word in (words.begin, words.part, words.choice):
            self.out.write_word(word, 0)
        self.out.write_word(words.parts, 1)
        total: Value = w.constant(0, INT64)
        for items in self.spaces().values():
            total = total + self.whole_lines(items)
        self.out.write_word(words.workspace_size, total)
        dims = [self.dim("initial", axis) for axis in range(2 + loop.batch)]
        history = w.constant(1, INT64) if op.untraced else steps + rows
        self.write_output(0, [history, *dims[1:]])
        if loop.outer:
            others, length = self.dim("other", 0), self.dim("other", 1)
            sizes = [dims[1], length] if loop.outer == "after" else [length, dims[1]]
            self.refuse(others.differs(history), "ValueError", MISMATCH)
            self.write_output(1, [history, *sizes])
        return self.whole_kernel(runs_once=True)

    def write_output(self, number: int, dims: list[Value]) -> None:
        for axis, value in enumerate(dims):
            self.out.write_word(self.words.outputs[number] + 1 + axis, value)
        first = self.words.first_row(number)
        self.out.write_word(first, 0)
        self.out.write_word(first + 1, dims[0])


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


class Run(Table):
    """Writes the kernel that takes the steps."""

    def __init__(self, loop: Recurrence) -> None:
        super().__init__(loop, "steps")

    def kernel(self) -> Kernel:
        loop, w = self.loop, self.w
        self.prepare_memory()
        self.prepare_matrices()
        cases: list[tuple[Value, Callable[[], None]]] = []
        for size in loop.in_registers():
            cases.append((self.size.equals(size), VectorSteps(self, size).write))
        self.choose(cases)
        if self.op.untraced:
            last = w.offset(self.history, self.row_of(self.steps))
            w.move(self.result(), last, self.row_bytes)
        return self.out.kernel(register_bytes())

    def choose(self, cases: list[tuple[Value, Callable[[], None]]]) -> None:
        """Write the first case that there is, and the general code behind all."""
        loop = self.loop
        if not cases:
            self.write_all_steps()
            return
        (condition, write), *rest = cases
        if loop.outer:
            condition = condition & self.has_products() & self.dim("other", 1).equals(self.size)
        elif loop.size is not None:
            write()
            return
        with self.w.when(condition) as choice:
            write()
        with self.w.otherwise(choice):
            self.choose(rest)

    # Matrices

    def prepare_matrices(self) -> None:
        """Write copies of fixed matrices, and whether the rows of other inputs are contiguous."""
        loop, w = self.loop, self.w
        for name in ("offset", "matrix", "other"):
            if self.has(name):
                stride, size = self.stride(name, -1), self.dim(name, -1)
                self.units[stride] = stride.equals(loop.itemsize) | (size < 2)
        if loop.is_laid_out():
            with self.over_batch(opens=loop.matrix_batched) as place:
                source = self.oriented("matrix", place)
                target = w.offset(self.space["matrix"], self.laid_out_at(place["index"]))
                self.copy(target, source.turned)

    def laid_out_at(self, index: Value) -> Value:
        size = self.size * self.size * self.loop.itemsize
        return index * size if self.loop.matrix_batched else self.w.constant(0, INT64)

    def oriented(self, name: str, place: Place) -> Matrix:
        """Return an input as it stands in ``A ⊗ h + b``."""
        matrix, is_matrix = self.given(name, place), name in ("matrix", "mask")
        return matrix.turned if not is_matrix or self.op.side == "right" else matrix

    def matrix_at(self, place: Place) -> Matrix:
        """Return the matrix of a step."""
        loop, d, item = self.loop, self.size, self.loop.itemsize
        if not loop.is_laid_out():
            return self.oriented("matrix", place)
        pointer = self.w.offset(self.space["matrix"], self.laid_out_at(place["index"]))
        return Matrix(pointer, loop.dtype, d, d, d * item, item).turned

    def offset_at(self, place: Place) -> Matrix | None:
        return self.oriented("offset", place) if self.has("offset") else None

    @contextmanager
    def turns(self, work: Value) -> Iterator[Value]:
        """Open the loops over all steps, with a chance to interrupt them now and then."""
        w = self.w
        length, done = steps_of_a_turn(w, work, whole=WORK_OF_A_TURN), w.local(0, INT64)
        with turns(w, done, self.steps, length) as (first, last), w.loop(first, last) as n:
            yield n

    # All steps, in the general way

    def write_all_steps(self) -> None:
        loop, op, w = self.loop, self.op, self.w
        logs = None
        if loop.has_logs():
            logs = LogSteps(self)
            logs.prepare()
        work = self.size * self.size * self.batches()
        if logs is not None or op.semiring == "log":
            work = work * 16
        with self.turns(work) as n, self.over_batch(self.time(n)) as place:
            cell = place["index"] * self.cells
            old, new = (w.offset(self.history, self.row_of(k) + cell) for k in (n, n + 1))
            if logs is not None:
                logs.step(place, old, new)
            else:
                self.write_step(place, old, new, self.combine)
                if op.has_mask:
                    self.check_step(place, old, new)
        if loop.outer:
            self.write_products()

    def write_step(self, place: Place, old: Value, new: Value, multiply: Multiply) -> None:
        """Write one step of a state."""
        state, out = self.state_at(old), self.state_at(new)
        multiply(out, self.matrix_at(place), state, self.offset_at(place))

    def combine(self, out: Matrix, a: Matrix, h: Matrix, add: Matrix | None) -> None:
        """Write a product as combinations of contiguous rows, or as sums over them."""
        w, op, loop = self.w, self.op, self.loop
        row = None if add is None else self.in_rows(add.turned, "row").pointer
        if op.semiring == "real" and op.side == "left" and not loop.fixed:
            rows, full = self.in_rows(a, "matrix"), VECTOR_BYTES // a.itemsize
            dots = partial(write_dots, w, out.pointer, rows, h.pointer, row)
            cases = [(lanes, partial(dots, lanes)) for lanes in (full, 4)]
            choose(w, self.size, [*cases, (0, partial(write_product, w, a, h, out, add))])
            return
        rows = self.in_rows(a.turned, "matrix")
        Combination(w, op.semiring, out.pointer, h.pointer, rows, row).write()

    def masked(self, out: Matrix, a: Matrix, h: Matrix, add: Matrix | None) -> None:
        """Write a product without the items that the mask leaves out."""
        mask = self.oriented("mask", {"mask": self.w.constant(0, INT64)})
        write_product(self.w, a, h, out, add, mask)

    def check_step(self, place: Place, old: Value, new: Value) -> None:
        """Write what is done about a step whose results are not finite."""
        w, kind = self.w, Type(self.loop.dtype)
        wrong = w.local(0, INT64)
        with w.loop(0, self.cells, kind.itemsize) as byte:
            value = w.load(kind, new, byte)
            is_wrong = (value * 0.0).differs(0.0)
            w.assign(wrong, w.copy(wrong) | w.cast(is_wrong, "int64"))
        with w.when(w.copy(wrong).differs(0)):
            self.write_step(place, old, new, self.masked)

    def masked_steps(self, first: Value, last: Value) -> None:
        """Write some steps without the items that the mask leaves out; there is no batch."""
        w = self.w
        with w.loop(first, last) as n, self.over_batch(self.time(n)) as place:
            old, new = (w.offset(self.history, self.row_of(k)) for k in (n, n + 1))
            self.write_step(place, old, new, self.masked)

    # Products of states and other rows

    def has_products(self) -> Value:
        rows = self.out.number(self.words.outputs[1] + 1, "product_rows")
        return rows > 0

    def write_products(self) -> None:
        """Write the products of all states, after the steps."""
        w, item = self.w, Type(self.loop.dtype)
        rows = self.out.number(self.words.outputs[1] + 1, "product_rows")
        d, width = self.size, self.dim("other", 1)
        sizes = (d, width) if self.loop.outer == "after" else (width, d)
        with w.loop(0, rows) as t:
            pair = w.offset(self.history, t * self.row_bytes), self.other_at(t)
            left, right = pair if self.loop.outer == "after" else pair[::-1]
            first = w.offset(self.result(1), t * (d * width) * item.itemsize)
            with w.loop(0, sizes[0]) as i:
                factor = w.load(item, left, i * item.itemsize)
                target = w.offset(first, i * sizes[1] * item.itemsize)
                write_multiple(w, target, factor, right, sizes[1])

    def other_at(self, t: Value) -> Value:
        """Return where a row is that states are multiplied with, its numbers side by side."""
        row = self.given("other", {"other": t * self.stride("other", 0)})
        return self.in_rows(row, "other").pointer
