"""What the kernels of a matrix recurrence share: its sizes, its inputs, and where they are.

All recurrences are written as ``h ← A ⊗ h + b`` with a matrix `h` of shape ``(d, m)``: a vector is
a single column, and what has its matrix at the right is transposed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from pytensor.graph.basic import Apply

from scanlib.kernels.language import INT64, POINTER, Value
from scanlib.kernels.linalg.matrices import Matrix, known, sized
from scanlib.kernels.linalg.semiring_products import plainly
from scanlib.kernels.program import ArrayType, Output, Words
from scanlib.kernels.scalars import NoKernelError, parts_of
from scanlib.kernels.spans import LINE, itemsize, load_number, store_number
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.schedules.elementwise import Array, TableReader, Tables
from scanlib.schedules.linear_logs import padded

WIDEST = 8  # columns longer than this do not fit the registers
WIDEST_ROW = 4  # of a state with products from both sides
GUESSED_SIZES = (2, 3, 4)  # written for where the size is not known

Place = dict[str, Value]  # which state of the batch it is, and how far the inputs are


class Recurrence(Tables):
    """What the kernels of one recurrence share."""

    def __init__(self, op: LinearScan, node: Apply, outer: str) -> None:
        super().__init__([variable.type for variable in node.inputs])
        self.op, self.outer = op, outer
        parts = op.parts(node.inputs)
        out = node.outputs[0].type
        self.dtype = out.dtype
        self.half = parts_of(out.dtype)  # the dtype of the parts of complex numbers
        if (self.half or out.dtype) not in ("float32", "float64"):
            raise NoKernelError(f"a matrix recurrence of {out.dtype} has no kernel")
        self.itemsize = itemsize(out.dtype)
        self.row_ndim = out.ndim - 1
        self.batch = op.batch_rank(out.ndim)
        self.matrix_batched = op.matrix_batch_rank(parts.matrix.type.ndim) > 0
        self.fixed = op.coefficient == "fixed"
        state = parts.initial.type.shape
        added = state if parts.offset is None else parts.offset.type.shape
        self.size = _first_known(
            *parts.matrix.type.shape[-2:],
            *((s[-1] if self.is_turned() else s[-2]) for s in (state, added)),
        )
        self.width: int | None = 1
        if not op.vector:
            rights = () if parts.right is None else parts.right.type.shape[-2:]
            axis = -2 if op.side == "right" else -1
            self.width = _first_known(*rights, state[axis], added[axis])
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

    def is_turned(self) -> bool:
        """Whether the columns of states are what is contiguous."""
        return self.op.vector or self.op.side == "right"

    # Which code there is

    def in_registers(self) -> tuple[int, ...]:
        """Return the sizes of vectors that are kept in registers."""
        op = self.op
        if op.semiring != "real" or not op.vector or self.batch or self.half:
            return ()
        if op.has_mask and op.untraced:
            return ()  # a masked step reads the row before it
        if self.size is None:
            return GUESSED_SIZES
        return (self.size,) if 2 <= self.size <= WIDEST else ()

    def shapes_in_registers(self) -> list[tuple[int, int]]:
        """Return the shapes of states, with products from both sides, kept in registers."""
        if self.op.side != "both" or self.half:
            return []
        if self.size is None or self.width is None:
            known = {self.size, self.width}
            return [(n, n) for n in range(2, WIDEST_ROW + 1) if known <= {n, None}]
        fits = self.size >= 1 and self.width >= 2 and max(self.size, self.width) <= WIDEST_ROW
        return [(self.size, self.width)] if fits else []

    def is_laid_out(self) -> bool:
        """Whether a fixed matrix is copied, so that its rows, or its columns, are contiguous."""
        return self.fixed and not self.half and not self.has_logs()

    def has_logs(self) -> bool:
        """Whether steps are products with exponentials."""
        return self.fixed and self.op.semiring == "log" and self.op.vector


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
        return self.dim("initial", -1 if self.loop.is_turned() else -2)

    @property
    def width(self) -> Value:
        """How many vectors the state has; one if it is a vector."""
        if self.loop.width is not None:
            return self.w.constant(self.loop.width, INT64)
        return self.dim("initial", -2 if self.op.side == "right" else -1)

    def batches(self) -> Value:
        total: Value = self.w.constant(1, INT64)
        for axis in range(self.loop.batch):
            total = total * self.dim("initial", 1 + axis)
        return total

    def spaces(self) -> dict[str, Value]:
        """Return how many items each part of the workspace has."""
        loop, op = self.loop, self.op
        d, m, found = self.size, self.width, {}
        cells = d * m
        if op.untraced:
            found["states"] = cells * self.batches() * 2
        if not loop.half:
            if self.has("offset"):
                found["row"] = cells
            if not loop.fixed or loop.is_laid_out():
                many = loop.is_laid_out() and loop.matrix_batched
                found["matrix"] = d * d * self.batches() if many else d * d
            if op.side == "both":
                found["right"] = m * m
            if loop.has_logs():
                length = padded(self.w, loop.dtype, d, loop.size)
                several = self.batches() if loop.matrix_batched else self.w.constant(1, INT64)
                found["exponentials"] = several * d * length
                found["largest"] = several * length
                found["buffers"] = length * 4
            if loop.outer:
                found["other"] = self.dim("other", 1)
        if op.side == "both":
            found["half"] = cells
        return found

    def whole_lines(self, items: Value) -> Value:
        """Return how many bytes a part of the workspace has, in whole lines of the cache."""
        return (items * self.loop.itemsize + (LINE - 1)) & -LINE

    # States, and the parts of the workspace

    def prepare_memory(self) -> None:
        loop, w = self.loop, self.w
        self.steps = self.out.number(self.words.steps, "steps")
        self.cells = self.size * self.width * loop.itemsize
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
        return (self.steps - n if self.op.reverse else n) * self.row_bytes

    def time(self, n: Value) -> Value:
        return self.steps - 1 - n if self.op.reverse else n

    @contextmanager
    def over_batch(self, t: Value | None = None, opens: bool = True) -> Iterator[Place]:
        """Open loops over the batch; what is yielded are the index and how far the inputs are.

        With `t`, these are at that time.
        """
        loop, w = self.loop, self.w
        zero: Value = w.constant(0, INT64)
        found: Place = dict.fromkeys(("index", "initial", "matrix", "offset", "right"), zero)
        leads = {"initial": 1, "offset": 1, "matrix": int(not loop.fixed)}
        with ExitStack() as stack:
            for axis in range(loop.batch if opens else 0):
                size = self.dim("initial", 1 + axis)
                k = stack.enter_context(w.loop(0, size))
                found["index"] = found["index"] * size + k
                for name, lead in leads.items():
                    if self.has(name) and (name != "matrix" or loop.matrix_batched):
                        found[name] = found[name] + k * self.stride(name, axis + lead)
            for name in ("offset", *([] if loop.fixed else ["matrix", "right"])):
                if t is not None and self.has(name):
                    found[name] = found[name] + t * self.stride(name, 0)
            yield found

    # Matrices

    def given(self, name: str, place: Place) -> Matrix:
        """Return an input as a matrix: of one row if it is a vector."""
        d, m = self.size, self.width
        sizes: tuple[Value, Value] = (m, d) if self.loop.is_turned() else (d, m)
        if name in ("matrix", "mask", "right"):
            sizes = (m, m) if name == "right" else (d, d)
        elif name == "other":
            sizes = self.w.constant(1, INT64), self.dim(name, 1)
        is_row = name == "other" or (self.op.vector and name in ("offset", "initial"))
        strides = 0 if is_row else self.stride(name, -2), self.stride(name, -1)
        pointer = self.w.offset(self.data(name), place[name])
        return Matrix(pointer, self.loop.dtype, *sizes, *strides)

    def state_at(self, pointer: Value) -> Matrix:
        """Return a state as a matrix ``(d, m)``."""
        d, m, item, dtype = self.size, self.width, self.loop.itemsize, self.loop.dtype
        if self.loop.is_turned():
            return Matrix(pointer, dtype, m, d, d * item, item).turned
        return Matrix(pointer, dtype, d, m, m * item, item)

    def copy(self, target: Value, source: Matrix) -> Matrix:
        """Write the copy of a matrix to contiguous memory."""
        w, size = self.w, source.itemsize
        with w.loop(0, source.rows) as i, w.loop(0, source.columns) as k:
            j = plainly(w, k)
            place = i * source.row_stride + j * source.column_stride
            value = load_number(w, source.dtype, source.pointer, place)
            store_number(w, target, (i * source.columns + j) * size, value)
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
