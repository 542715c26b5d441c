"""The steps of a matrix recurrence; `scanlib.schedules.linear_steps` says what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from scanlib.kernels.language import INT64, Kernel, Type, Value
from scanlib.kernels.linalg.matrices import Matrix
from scanlib.kernels.linalg.products import write_product
from scanlib.kernels.linalg.semiring_products import Combination, Dots, write_multiple
from scanlib.schedules.linear_logs import LogSteps
from scanlib.schedules.linear_table import Place, Recurrence, Table
from scanlib.schedules.linear_vectors import BothSides, FixedSteps, MatrixSteps
from scanlib.schedules.turns import steps_of_a_turn, turns

WORK_OF_A_TURN = 1 << 23  # multiplications, after which a kernel can be interrupted

Multiply = Callable[[Matrix, Matrix, Matrix, "Matrix | None"], None]  # out = a h + add


class Run(Table):
    """Writes the kernel that takes the steps."""

    def __init__(self, loop: Recurrence) -> None:
        super().__init__(loop, "steps")

    def kernel(self) -> Kernel:
        loop, w = self.loop, self.w
        self.prepare_memory()
        self.right: Matrix | None = None
        self.prepare_matrices()
        cases: list[tuple[Value, Callable[[], None]]] = []
        for size in loop.in_registers():
            steps = FixedSteps(self, size) if loop.fixed else MatrixSteps(self, size, loop.outer)
            cases.append((self.size.equals(size), steps.write))
        for rows, columns in loop.shapes_in_registers():
            fits = self.size.equals(rows) & self.width.equals(columns)
            cases.append((fits, BothSides(self, rows, columns).write))
        self.choose(cases)
        if self.op.untraced:
            item = Type(loop.half or loop.dtype)
            last = self.row_of(self.steps)
            with w.loop(0, self.row_bytes, item.itemsize) as byte:
                w.store(self.result(), byte, w.load(item, self.history, last + byte))
        return self.out.kernel()

    def choose(self, cases: list[tuple[Value, Callable[[], None]]]) -> None:
        """Write the first case that there is, and the general code behind all."""
        loop = self.loop
        known = loop.size is not None and loop.width is not None
        if not cases:
            self.write_all_steps()
            return
        (condition, write), *rest = cases
        if loop.outer:
            condition = condition & self.has_products() & self.dim("other", 1).equals(self.size)
        elif known:
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
        for name in ("offset", "matrix", "right", "other"):
            if self.has(name) and not loop.half:
                stride, size = self.stride(name, -1), self.dim(name, -1)
                self.units[stride] = stride.equals(loop.itemsize) | (size < 2)
        if loop.is_laid_out():
            with self.over_batch(opens=loop.matrix_batched) as place:
                source = self.oriented("matrix", place)
                target = w.offset(self.space["matrix"], self.laid_out_at(place["index"]))
                self.copy(target, source.turned if loop.is_turned() else source)
        if loop.fixed and self.op.side == "both" and not loop.half:
            with self.over_batch() as place:
                self.right = self.copy(self.space["right"], self.given("right", place))

    def laid_out_at(self, index: Value) -> Value:
        size = self.size * self.size * self.loop.itemsize
        return index * size if self.loop.matrix_batched else self.w.constant(0, INT64)

    def oriented(self, name: str, place: Place) -> Matrix:
        """Return an input as it stands in ``A ⊗ h + b``."""
        matrix = self.given(name, place)
        is_turned = self.loop.is_turned()
        if name in ("matrix", "mask"):
            is_turned = self.op.side == "right"
        return matrix.turned if is_turned else matrix

    def matrix_at(self, place: Place) -> Matrix:
        """Return the matrix of a step."""
        loop, d, item = self.loop, self.size, self.loop.itemsize
        if not loop.is_laid_out():
            return self.oriented("matrix", place)
        pointer = self.w.offset(self.space["matrix"], self.laid_out_at(place["index"]))
        matrix = Matrix(pointer, loop.dtype, d, d, d * item, item)
        return matrix.turned if loop.is_turned() else matrix

    def right_at(self, place: Place) -> Matrix:
        """Return the matrix at the right of the state."""
        return self.given("right", place) if self.right is None else self.right

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
        work = self.size * self.size * self.width * self.batches()
        if logs is not None or op.semiring == "log":
            work = work * 16
        with self.turns(work) as n, self.over_batch(self.time(n)) as place:
            cell = place["index"] * self.cells
            old, new = (w.offset(self.history, self.row_of(k) + cell) for k in (n, n + 1))
            if logs is not None:
                logs.step(place, old, new)
            elif loop.half:
                self.write_step(place, old, new, self.one_by_one)
            else:
                self.write_step(place, old, new, self.combine)
                if op.has_mask:
                    self.check_step(place, old, new)
        if loop.outer:
            self.write_products()

    def write_step(self, place: Place, old: Value, new: Value, multiply: Multiply) -> None:
        """Write one step of a state."""
        state, out = self.state_at(old), self.state_at(new)
        matrix, add = self.matrix_at(place), self.offset_at(place)
        if self.op.side == "both":
            half = self.state_at(self.space["half"])
            multiply(half, matrix, state, None)
            matrix, state = half, self.right_at(place)
        multiply(out, matrix, state, add)

    def combine(self, out: Matrix, a: Matrix, h: Matrix, add: Matrix | None) -> None:
        """Write a product as combinations of contiguous rows, or as sums over them."""
        w, op, loop = self.w, self.op, self.loop
        if not loop.is_turned():
            a, rows = self.in_rows(a, "matrix"), self.in_rows(h, "right")
        elif op.vector and op.side == "left" and not loop.fixed and op.semiring != "log":
            own = None if add is None else self.in_rows(add.turned, "row").pointer
            rows = self.in_rows(a, "matrix")
            Dots(w, op.semiring, out.pointer, rows, h.pointer, own).write()
            return
        else:
            rows, a, out = self.in_rows(a.turned, "matrix"), h.turned, out.turned
            add = None if add is None else add.turned
        add = None if add is None else self.in_rows(add, "row")
        Combination(w, op.semiring, out, a, rows, add).write()

    def one_by_one(self, out: Matrix, a: Matrix, h: Matrix, add: Matrix | None) -> None:
        """Write a product, one number after the other."""
        write_product(self.w, a, h, out, add)

    def masked(self, out: Matrix, a: Matrix, h: Matrix, add: Matrix | None) -> None:
        """Write a product without the items that the mask leaves out."""
        mask = replace(self.oriented("mask", {"mask": self.w.constant(0, INT64)}), dtype="bool")
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
