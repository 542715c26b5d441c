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

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
from pytensor.graph.basic import Apply
from pytensor.tensor.type import TensorType

from scanlib._compat import thaw_graph
from scanlib.kernels.arrays.sizes import Check, Size, if_equal, minimum, product, quotient, total
from scanlib.kernels.language import FLOATS, INT64, Kernel, Type, Value
from scanlib.kernels.linalg.matrices import Matrix, copy, known, packed, sized
from scanlib.kernels.linalg.products import write_product
from scanlib.kernels.linalg.semiring_products import (
    VECTOR_BYTES,
    Combination,
    choose,
    write_multiple,
)
from scanlib.kernels.processor import foresees_rows, register_bytes
from scanlib.kernels.program import Kernels, LoopProgram
from scanlib.kernels.scalars import NoKernelError, parts_of
from scanlib.kernels.spans import Span, itemsize
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.recurrences.trust import above, some
from scanlib.schedules.array_loops import array_program
from scanlib.schedules.linear_vectors import BLOCK, LogSteps, VectorSteps, padded
from scanlib.schedules.loop_kernels import Array, Loop, prepare, start
from scanlib.schedules.step_by_step import TakesSteps

WIDEST = 8  # columns longer than this do not fit the registers
DISTANCE = 8192  # bytes: how far ahead matrices are asked for
GUESSED_SIZES = (2, 3, 4)  # written for where the size is not known
MULTIPLICATIONS = 8  # take as long as what counts as one number between polls

STATE = "h0"
OTHER, OUTER = "other", "p0"  # rows that are multiplied with states, and the products
MISMATCH = "rows that are multiplied with states have an incompatible shape in axis 0"

Position = dict[str, Value]  # which state of the batch it is, and how far the inputs are

Multiply = Callable[[Matrix, Matrix, Matrix, "Matrix | None"], None]  # out = a h + add


def linear_program(op: LinearScan, node: Apply, outer: str = "") -> LoopProgram:
    """Return the kernels of a matrix recurrence whose inputs have the types of those of `node`;
    `NoKernelError` for a dtype that kernels do not have.

    With `outer` ``"after"`` or ``"before"``, the program has one more input, rows `x_t`, and one
    more output, the products ``h_i x_j`` of each state and row, or ``x_i h_j``. It refuses another
    number of rows than of states.
    """
    if not _is_of_vectors(op):
        return array_program(op.scan, may_be_empty=not op.untraced)
    loop = MatrixLoop(op, node, outer)
    run = MatrixRun(loop).kernel()
    kernels = Kernels(prepare(loop), start(loop), (run,))
    return loop.program(op.name or "linear scan", kernels)


def _is_of_vectors(op: LinearScan) -> bool:
    """Whether states are vectors, and not of complex numbers."""
    return op.vector and parts_of(op.dtype) is None


def has_products(node: Apply) -> bool:
    """Whether the steps of a recurrence can write products of their states and other rows."""
    op = node.op
    if op.coefficient == "fixed" or op.has_mask or op.untraced or not _is_of_vectors(op):
        return False
    return bool(sizes_in_registers(op, known_size(op, node)))


class MatrixLoop(Loop):
    """A matrix recurrence of vectors, and what its kernels need to know of it.

    `roles` are the inputs: ``"matrix"``, ``"offset"``, ``"initial"``, ``"mask"``, and ``"other"``,
    the rows that states are multiplied with. `size` is that of the matrix, `known_size` where it is
    known when kernels are written; `batches` is how many states there are, `buffers` what is kept
    in the workspace.
    """

    def __init__(self, op: LinearScan, node: Apply, outer: str) -> None:
        self.op, self.products = op, outer
        self.may_be_empty = not op.untraced
        out = node.outputs[0].type
        self.dtype = out.dtype
        if out.dtype not in FLOATS:
            raise NoKernelError(f"a matrix recurrence of {out.dtype} has no kernel")
        types = [variable.type for variable in node.inputs]
        more = [TensorType(out.dtype, (None, None))] if outer else []
        super().__init__(op.scan, thaw_graph(op.scan.body), [*types, *more])
        self.itemsize = itemsize(out.dtype)
        self.batch = op.batch_rank
        self.matrix_batched = op.matrix_batch_rank > 0
        self.fixed = op.coefficient == "fixed"
        names = op.parts([f"x{k}" for k in range(len(types))])._asdict()
        self.roles = {role: self.arrays[name] for role, name in names.items() if name is not None}
        self.known_size = known_size(op, node)
        initial = self.roles["initial"]
        self.size = initial.dims[-1] if self.known_size is None else self.known_size
        self.batches = product(*initial.dims[1:-1])
        self.work = quotient(product(self.size, self.size, self.batches), MULTIPLICATIONS)
        if op.semiring == "log":
            self.work = product(16, self.work)
        for pair in op.same_sizes():
            own = [(self.roles[role], axis) for role, axis in pair]
            one, two = (a.dims[axis if axis < 0 else axis + a.lead] for a, axis in own)
            check = Check("ne", (one, two), "LoopError", op.sizes_differ(pair), (one, two))
            self.first_checks.append(check)
        if outer:
            self.roles["other"] = self.arrays[OTHER]
            rows, width = self.roles["other"].dims
            self.first_checks.append(Check("ne", (rows, self.dims(0)[0]), "ValueError", MISMATCH))
            sizes = (self.size, width) if outer == "after" else (width, self.size)
            self.sizes[1] = (rows, *sizes)
        self.buffers = {
            name: self.workspace.take(product(self.itemsize, items), pinned=True)
            for name, items in self._buffers()
        }

    def _arrays(self) -> Iterator[Array]:
        yield from super()._arrays()
        if self.products:
            yield Array(OTHER, False, len(self.inputs) - 1, self.dtype, (0,), 1)
            yield Array(OUTER, True, 1, self.dtype, (0, 1), 1)

    def dims(self, number: int) -> Sequence[Size]:
        return self.sizes[number] if number else super().dims(number)

    def _buffers(self) -> Iterator[tuple[str, Size]]:
        """Yield the parts of the workspace, and how many items each has."""
        d = self.size
        if "offset" in self.roles:
            yield "row", d
            if self.in_registers():
                is_small = minimum(d, WIDEST), d
                yield "rows", if_equal(*is_small, product(d, BLOCK), 0)
        if not self.fixed or self.is_laid_out():
            many = self.is_laid_out() and self.matrix_batched
            yield "matrix", product(d, d, self.batches if many else 1)
        if self.has_logs():
            length, several = padded(self.dtype, d), self.batches if self.matrix_batched else 1
            yield "exponentials", product(several, d, length)
            yield "largest", product(several, length)
            yield "buffers", product(length, 4)
        if self.products:
            yield "other", self.roles["other"].dims[1]

    # Which code there is

    def in_registers(self) -> tuple[int, ...]:
        """Return the sizes of vectors that are kept in registers."""
        return sizes_in_registers(self.op, self.known_size)

    def is_laid_out(self) -> bool:
        """Whether a fixed matrix is copied, so that its rows, or its columns, are contiguous."""
        return self.fixed and not self.has_logs()

    def has_logs(self) -> bool:
        """Whether steps are products with exponentials."""
        return self.fixed and self.op.semiring == "log"


def known_size(op: LinearScan, node: Apply) -> int | None:
    """Return the size of a matrix where types say it."""
    parts = op.parts([variable.type.shape for variable in node.inputs])
    vectors = [shape for shape in (parts.initial, parts.offset) if shape is not None]
    sizes = [*parts.matrix[-2:], *(shape[-1] for shape in vectors)]
    return next((size for size in sizes if size is not None), None)


def sizes_in_registers(op: LinearScan, size: int | None) -> tuple[int, ...]:
    """Return the sizes of vectors that are kept in registers; `size` is that of the matrix."""
    if op.semiring != "real" or op.batch_rank:
        return ()
    if op.has_mask and op.untraced:
        return ()  # a masked step reads the row before it
    if size is None:
        return GUESSED_SIZES
    return (size,) if 2 <= size <= WIDEST else ()


class MatrixRun(TakesSteps[MatrixLoop]):
    """Writes the kernel that takes the steps."""

    def __init__(self, loop: MatrixLoop) -> None:
        super().__init__(loop, "steps")
        self.op = loop.op
        self.size = self.value_of(loop.size)

    def size_of(self, role: str, axis: int) -> Value:
        return self.value_of(self.loop.roles[role].dims[axis])

    def stride(self, role: str, axis: int) -> Value:
        return self.value_of(self.loop.roles[role].strides[axis])

    def kernel(self) -> Kernel:
        loop, w = self.loop, self.w
        self.begin_steps()
        self.history = self.memory_of(STATE)
        if loop.products:
            self.outer = self.data(OUTER)
        self.cells = self.size * loop.itemsize
        self.ahead = None if loop.fixed or foresees_rows() else self.bytes_ahead()
        self.units: dict[Value, Value] = {}  # whether a stride is that of contiguous numbers
        starts = {name: total(loop.end_of_rings, part.start) for name, part in loop.buffers.items()}
        self.space = {k: w.offset(self.workspace, self.value_of(at)) for k, at in starts.items()}
        self.prepare_matrices()
        with ExitStack() as stack:
            for size in loop.in_registers():
                if loop.known_size is not None and not loop.products:
                    VectorSteps(self, size).write()
                    break
                fits = self.size.equals(size)
                if loop.products:
                    fits = fits & self.has_products() & self.size_of("other", 1).equals(self.size)
                with w.when(fits) as choice:
                    VectorSteps(self, size).write()
                stack.enter_context(w.otherwise(choice))
            else:
                self.write_all_steps()
        self.finish(self.steps)
        return self.whole_kernel(register_bytes())

    def bytes_ahead(self) -> Value:
        """Return how far from a matrix is what is read some steps later."""
        ahead = -DISTANCE if self.op.reverse else DISTANCE
        down, up = sized(self.w, -ahead, ahead)
        return self.w.select(self.stride("matrix", 0) < 0, down, up)

    # States

    def row_before(self, n: Value) -> Value:
        """Return where the state before step `n` is; after the last one, where it ends."""
        self.be_at(n)
        return self.row_of(STATE, -1)

    def place_of(self, n: Value) -> Value:
        """Return which row of the history has the state before step `n`."""
        return self.steps - n if self.op.reverse else n

    @contextmanager
    def over_batch(self, t: Value | None = None, opens: bool = True) -> Iterator[Position]:
        """Open loops over the batch; what is yielded are the index and how far the inputs are.

        With `t`, these are at that time.
        """
        loop, w = self.loop, self.w
        zero: Value = w.constant(0, INT64)
        found: Position = dict.fromkeys(("index", "matrix", "offset"), zero)
        with ExitStack() as stack:
            for axis in range(loop.batch if opens else 0):
                size = self.size_of("initial", 1 + axis)
                k = stack.enter_context(w.loop(0, size))
                found["index"] = found["index"] * size + k
                for role in ("matrix", "offset"):
                    if role in self.loop.roles and (role != "matrix" or loop.matrix_batched):
                        stride = self.stride(role, axis + loop.roles[role].lead)
                        found[role] = found[role] + k * stride
            for role in ("offset", *([] if loop.fixed else ["matrix"])):
                if t is not None and role in self.loop.roles:
                    found[role] = found[role] + t * self.stride(role, 0)
            yield found

    # Matrices

    def given(self, name: str, place: Position) -> Matrix:
        """Return an input as a matrix: of one row if it is a vector."""
        pointer = self.w.offset(self.data(self.loop.roles[name].name), place[name])
        is_matrix = name in ("matrix", "mask")
        row = (self.size, self.stride(name, -2)) if is_matrix else (1, 0)
        columns = self.size_of(name, 1) if name == "other" else self.size
        dtype = self.loop.roles[name].dtype
        return Matrix(pointer, dtype, row[0], columns, row[1], self.stride(name, -1))

    def state_at(self, pointer: Value) -> Matrix:
        """Return a state as a column."""
        return packed(pointer, self.loop.dtype, 1, self.size).turned

    def copy(self, target: Value, source: Matrix) -> None:
        """Write the copy of a matrix to contiguous memory."""
        copy(self.w, source, packed(target, source.dtype, source.rows, source.columns))

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

    def prepare_matrices(self) -> None:
        """Write copies of fixed matrices, and whether the rows of other inputs are contiguous."""
        loop, w = self.loop, self.w
        for name in ("offset", "matrix", "other"):
            if name in self.loop.roles:
                stride, size = self.stride(name, -1), self.size_of(name, -1)
                self.units[stride] = stride.equals(loop.itemsize) | (size < 2)
        if loop.is_laid_out():
            with self.over_batch(opens=loop.matrix_batched) as place:
                source = self.oriented("matrix", place)
                target = w.offset(self.space["matrix"], self.laid_out_at(place["index"]))
                self.copy(target, source.turned)

    def laid_out_at(self, index: Value) -> Value:
        size = self.size * self.size * self.loop.itemsize
        return index * size if self.loop.matrix_batched else self.w.constant(0, INT64)

    def oriented(self, name: str, place: Position) -> Matrix:
        """Return an input as it stands in ``A ⊗ h + b``."""
        matrix, is_matrix = self.given(name, place), name in ("matrix", "mask")
        return matrix.turned if not is_matrix or self.op.side == "right" else matrix

    def matrix_at(self, place: Position) -> Matrix:
        if not self.loop.is_laid_out():
            return self.oriented("matrix", place)
        pointer = self.w.offset(self.space["matrix"], self.laid_out_at(place["index"]))
        return packed(pointer, self.loop.dtype, self.size, self.size).turned

    def offset_at(self, place: Position) -> Matrix | None:
        return self.oriented("offset", place) if "offset" in self.loop.roles else None

    # All steps, in the general way

    def write_all_steps(self) -> None:
        self.logs = LogSteps(self) if self.loop.has_logs() else None
        if self.logs is not None:
            self.logs.prepare()
        self.take_steps()
        if self.loop.products:
            self.write_products()

    def step(self) -> None:
        with self.over_batch(self.t) as place:
            old, new = self.states(place)
            if self.logs is not None:
                self.logs.step(place, old, new)
            else:
                self.write_step(place, old, new, self.combine)
                if self.op.has_mask:
                    results = Span(self.w, self.loop.dtype, new)
                    is_infinite = above(float(np.finfo(self.loop.dtype).max))
                    with self.w.when(some(self.w, results, self.size, is_infinite)):
                        self.write_step(place, old, new, self.masked)

    def states(self, place: Position) -> tuple[Value, Value]:
        """Return where a state is before this step, and after."""
        cell = place["index"] * self.cells
        old, new = (self.w.offset(self.history, self.row_of(STATE, k) + cell) for k in (-1, 0))
        return old, new

    def write_step(self, place: Position, old: Value, new: Value, multiply: Multiply) -> None:
        state, out = self.state_at(old), self.state_at(new)
        multiply(out, self.matrix_at(place), state, self.offset_at(place))

    def combine(self, out: Matrix, a: Matrix, h: Matrix, add: Matrix | None) -> None:
        """Write a product as combinations of contiguous rows, or as sums over them."""
        w, op, loop = self.w, self.op, self.loop
        row = None if add is None else self.in_rows(add.turned, "row").pointer
        if op.semiring == "real" and op.side == "left" and not loop.fixed:
            rows, full = self.in_rows(a, "matrix"), VECTOR_BYTES // a.itemsize
            own = Combination(w, "real", out.pointer, h.pointer, rows, row, self.ahead)
            cases = [(lanes, partial(own.dots, lanes)) for lanes in (full, 4)]
            choose(w, self.size, [*cases, (0, partial(write_product, w, a, h, out, add))])
            return
        rows = self.in_rows(a.turned, "matrix")
        Combination(w, op.semiring, out.pointer, h.pointer, rows, row, self.ahead).write()

    def masked(self, out: Matrix, a: Matrix, h: Matrix, add: Matrix | None) -> None:
        """Write a product without the items that the mask leaves out."""
        mask = self.oriented("mask", {"mask": self.w.constant(0, INT64)})
        write_product(self.w, a, h, out, add, mask)

    def masked_steps(self, first: Value, last: Value) -> None:
        """Write some steps without the items that the mask leaves out; there is no batch."""
        w = self.w
        with w.loop(first, last) as n:
            self.be_at(n)
            with self.over_batch(self.t) as place:
                self.write_step(place, *self.states(place), self.masked)

    # Products of states and other rows

    def has_products(self) -> Value:
        return self.dim(OUTER, 0) > 0

    def write_products(self) -> None:
        """Write the products of all states, after the steps."""
        w, item = self.w, Type(self.loop.dtype)
        rows, *sizes = (self.dim(OUTER, axis) for axis in range(3))
        with w.loop(0, rows) as t:
            state = w.offset(self.history, t * self.stride_of(STATE, 0))
            left, right = self.in_order(state, self.other_at(t))
            first = w.offset(self.outer, t * self.stride_of(OUTER, 0))
            with w.loop(0, sizes[0]) as i:
                factor = w.load(item, left, i * item.itemsize)
                target = w.offset(first, i * self.stride_of(OUTER, 1))
                write_multiple(w, target, factor, right, sizes[1])

    def in_order(self, state: Value, other: Value) -> tuple[Value, Value]:
        """Return the factors of a product as they stand in it."""
        return (state, other) if self.loop.products == "after" else (other, state)

    def other_at(self, t: Value) -> Value:
        """Return where a row is that states are multiplied with, its numbers side by side."""
        row = self.given("other", {"other": t * self.stride("other", 0)})
        return self.in_rows(row, "other").pointer
