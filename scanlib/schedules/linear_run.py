"""The steps of a matrix recurrence; `scanlib.schedules.linear_steps` says what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from scanlib.kernels.language import INT64, Kernel, Type, Value
from scanlib.kernels.scalars import Number, Pair
from scanlib.kernels.semiring_products import Combination, Dots, Lines, plainly, write_multiple
from scanlib.schedules.linear_logs import LogSteps
from scanlib.schedules.linear_table import Recurrence, States
from scanlib.schedules.linear_vectors import BothSides, FixedSteps, MatrixSteps
from scanlib.schedules.turns import steps_of_a_turn, turns

WORK_OF_A_TURN = 1 << 23  # multiplications, after which a kernel can be interrupted

Place = dict[str, Value]  # which state of the batch it is, and how far the inputs are


class Run(States):
    """Writes the kernel that takes the steps."""

    def __init__(self, loop: Recurrence) -> None:
        super().__init__(loop, "steps")

    def kernel(self) -> Kernel:
        loop, w = self.loop, self.w
        self.prepare_memory()
        self.prepare_inputs()
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

    # Inputs

    def prepare_inputs(self) -> None:
        """Write whether the rows of inputs are contiguous, and lay out fixed matrices."""
        loop, op, w = self.loop, self.op, self.w
        self.contiguous: Place = {}
        if loop.half:
            return
        for name in ("offset", "matrix", "right", "other"):
            if (name == "other" and loop.outer) or (name != "other" and self.has(name)):
                is_unit = self.stride(name, -1).equals(loop.itemsize)
                self.contiguous[name] = is_unit | (self.dim(name, -1) < 2)
        if loop.is_laid_out():
            with self.over_batch(loop.matrix_batched) as place:
                source = w.offset(self.data("matrix"), place["matrix"])
                target = w.offset(self.space["matrix"], self.laid_out_at(place["index"]))
                line, step = self.strides_at_left()
                if loop.combines_rows():
                    line, step = step, line
                self.copy_square(target, source, line, step)
        if op.side == "both" and loop.fixed:
            strides = self.stride("right", -2), self.stride("right", -1)
            self.copy(self.space["right"], self.data("right"), (self.width, self.width), strides)

    def strides_at_left(self) -> tuple[Value, Value]:
        """Return the strides of the matrix as it stands at the left of the state."""
        found = self.stride("matrix", -2), self.stride("matrix", -1)
        return found[::-1] if self.op.side == "right" else found

    def laid_out_at(self, index: Value) -> Value:
        size = self.size * self.size * self.loop.itemsize
        return index * size if self.loop.matrix_batched else self.w.constant(0, INT64)

    def copy_square(self, target: Value, source: Value, line: Value, step: Value) -> None:
        self.copy(target, source, (self.size, self.size), (line, step))

    def copy(
        self,
        target: Value,
        source: Value,
        sizes: tuple[Value, Value],
        strides: tuple[Value, Value],
    ) -> None:
        """Write the copy of a matrix to contiguous memory."""
        w, item = self.w, Type(self.loop.dtype)
        with w.loop(0, sizes[0]) as i, w.loop(0, sizes[1]) as k:
            j = plainly(w, k)
            value = w.load(item, source, i * strides[0] + j * strides[1])
            w.store(target, (i * sizes[1] + j) * item.itemsize, value)

    def lines(self, name: str, pointer: Value, sizes: tuple[Value, Value]) -> Lines:
        """Return the lines of an input, copied to the workspace if they are not contiguous."""
        w, is_unit = self.w, self.contiguous[name]
        own = self.stride(name, -2)
        found = w.local(pointer)
        space = {"offset": "row"}.get(name, name)
        with w.when(~is_unit):
            self.copy(self.space[space], pointer, sizes, (own, self.stride(name, -1)))
            w.assign(found, self.space[space])
        packed = sizes[1] * self.loop.itemsize
        return Lines(w.copy(found), w.select(is_unit, own, packed), self.loop.itemsize)

    def offset_lines(self, place: Value) -> Lines | None:
        """Return the lines of the offset; `place` is how far its row is."""
        if not self.has("offset"):
            return None
        d, m = self.size, self.width
        one = self.w.constant(1, INT64)
        sizes = (one, d) if self.op.vector else (m, d) if self.op.side == "right" else (d, m)
        return self.lines("offset", self.w.offset(self.data("offset"), place), sizes)

    def matrix_lines(self, place: Value) -> Lines:
        """Return the lines of a matrix per step; `place` is how far it is."""
        pointer = self.w.offset(self.data("matrix"), place)
        return self.lines("matrix", pointer, (self.size, self.size))

    @contextmanager
    def over_batch(self, opens: bool = True) -> Iterator[Place]:
        """Open loops over the batch; what is yielded are the index and how far the inputs are."""
        loop, w = self.loop, self.w
        zero: Value = w.constant(0, INT64)
        found = {"index": zero, "matrix": zero, "offset": zero}
        with ExitStack() as stack:
            for axis in range(loop.batch if opens else 0):
                size = self.dim("initial", 1 + axis)
                k = stack.enter_context(w.loop(0, size))
                found["index"] = found["index"] * size + k
                if loop.matrix_batched:
                    own = axis + (not loop.fixed)
                    found["matrix"] = found["matrix"] + k * self.stride("matrix", own)
                if self.has("offset"):
                    found["offset"] = found["offset"] + k * self.stride("offset", 1 + axis)
            yield found

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
        with self.turns(work) as n:
            t = self.time(n)
            with self.over_batch() as place:
                if not loop.fixed:
                    place["matrix"] = place["matrix"] + t * self.stride("matrix", 0)
                if self.has("offset"):
                    place["offset"] = place["offset"] + t * self.stride("offset", 0)
                cell = place["index"] * self.cells
                old = w.offset(self.history, self.row_of(n) + cell)
                new = w.offset(self.history, self.row_of(n + 1) + cell)
                if loop.half:
                    self.write_items(t, place, old, new)
                elif logs is not None:
                    logs.step(place, old, new)
                else:
                    self.write_step(t, place, old, new)
                    if op.has_mask:
                        self.check_step(t, place, old, new)
        if loop.outer:
            self.write_products()

    def write_step(self, t: Value, place: Place, old: Value, new: Value) -> None:
        """Write one step of a state."""
        op, w = self.op, self.w
        d, m, item = self.size, self.width, self.loop.itemsize
        add = self.offset_lines(place["offset"])
        one = w.constant(1, INT64)
        if op.side == "both":
            half, left = self.space["half"], self.left_lines(place)
            self.combine(Lines(half, m * item), left, Lines(old, m * item), None, (d, d, m))
            factors = Lines(half, m * item, item)
            self.combine(Lines(new, m * item), factors, self.right_lines(t), add, (d, m, m))
        elif not op.vector and op.side == "left":
            factors = self.left_lines(place)
            self.combine(Lines(new, m * item), factors, Lines(old, m * item), add, (d, d, m))
        elif op.vector and op.side == "left" and not self.loop.fixed and op.semiring != "log":
            own = None if add is None else add.pointer
            rows = self.matrix_lines(place["matrix"])
            Dots(w, op.semiring, self.loop.dtype, new, rows, old, own, d).write()
        else:
            lines = one if op.vector else m
            rows = self.rows(place)
            self.combine(Lines(new, d * item), Lines(old, d * item, item), rows, add, (lines, d, d))

    def combine(
        self,
        out: Lines,
        factors: Lines,
        rows: Lines,
        add: Lines | None,
        sizes: tuple[Value, Value, Value],
    ) -> None:
        op = self.op
        Combination(self.w, op.semiring, self.loop.dtype, out, factors, rows, add, *sizes).write()

    def left_lines(self, place: Place) -> Lines:
        """Return the lines of the matrix at the left of a state."""
        if not self.loop.fixed:
            return self.matrix_lines(place["matrix"])
        item = self.loop.itemsize
        pointer = self.w.offset(self.space["matrix"], self.laid_out_at(place["index"]))
        return Lines(pointer, self.size * item, item)

    def rows(self, place: Place) -> Lines:
        """Return the columns of the matrix at the left of the state, each of them contiguous."""
        w, item = self.w, self.loop.itemsize
        if self.loop.is_laid_out():
            pointer = w.offset(self.space["matrix"], self.laid_out_at(place["index"]))
            return Lines(pointer, self.size * item)
        if self.op.side == "right":
            return self.matrix_lines(place["matrix"])
        source, strides = w.offset(self.data("matrix"), place["matrix"]), self.strides_at_left()
        self.copy_square(self.space["matrix"], source, strides[1], strides[0])
        return Lines(self.space["matrix"], self.size * item)

    def right_lines(self, t: Value) -> Lines:
        m = self.width
        if self.loop.fixed:
            return Lines(self.space["right"], m * self.loop.itemsize)
        pointer = self.w.offset(self.data("right"), t * self.stride("right", 0))
        return self.lines("right", pointer, (m, m))

    # Item by item: complex numbers, and steps with a mask

    def load(self, pointer: Value, offset: Value) -> Number:
        w, half = self.w, self.loop.half
        if half is None:
            return w.load(Type(self.loop.dtype), pointer, offset)
        kind = Type(half)
        return Pair(w.load(kind, pointer, offset), w.load(kind, pointer, offset + kind.itemsize))

    def store(self, pointer: Value, offset: Value, value: Number) -> None:
        if isinstance(value, Value):
            self.w.store(pointer, offset, value)
            return
        self.w.store(pointer, offset, value.real)
        self.w.store(pointer, offset + value.real.type.itemsize, value.imag)

    def write_items(
        self, t: Value, place: Place, old: Value, new: Value, masked: bool = False
    ) -> None:
        """Write one step of a state item by item."""
        d, m, op, item = self.size, self.width, self.op, self.loop.itemsize
        matrix = self.w.offset(self.data("matrix"), place["matrix"])
        strides = self.strides_at_left()
        turned = op.side == "right" and not op.vector
        # Of the state that stands at the right of the matrix.
        lines = (item, d * item) if turned else (m * item, item)
        add = None
        if self.has("offset"):
            axes = (-1, -2) if turned else (-1, -1) if op.vector else (-2, -1)
            pointer = self.w.offset(self.data("offset"), place["offset"])
            add = Lines(pointer, *(self.stride("offset", axis) for axis in axes))
        state = Lines(old, *lines)
        if op.side == "both":
            half = Lines(self.space["half"], *lines)
            self.items(half, Lines(matrix, *strides), state, None, (d, d, m))
            right = self.w.offset(self.data("right"), self.right_at(t))
            across = Lines(right, self.stride("right", -2), self.stride("right", -1))
            self.items(Lines(new, *lines), half, across, add, (d, m, m))
            return
        self.items(Lines(new, *lines), Lines(matrix, *strides), state, add, (d, d, m), masked)

    def right_at(self, t: Value) -> Value:
        return self.w.constant(0, INT64) if self.loop.fixed else t * self.stride("right", 0)

    def items(
        self,
        out: Lines,
        factors: Lines,
        rows: Lines,
        add: Lines | None,
        sizes: tuple[Value, Value, Value],
        masked: bool = False,
    ) -> None:
        """Write a product, one number after the other."""
        w, (lines, terms, width) = self.w, sizes
        kind = Type(self.loop.half or self.loop.dtype)
        with w.loop(0, lines) as i, w.loop(0, width) as c:
            totals = [w.local(w.constant(0, kind)) for _ in range(2 if self.loop.half else 1)]
            with w.loop(0, terms) as j, ExitStack() as stack:
                if masked:
                    at = self.mask_at(i, j)
                    there = w.load(Type("bool"), self.data("mask"), at)
                    stack.enter_context(w.when(there))
                x = self.load(factors.pointer, i * factors.line + j * factors.step)
                y = self.load(rows.pointer, j * rows.line + c * rows.step)
                for total, terms_of in zip(totals, _product_terms(x, y), strict=True):
                    value: Value = w.copy(total)
                    for a, b in terms_of:
                        value = w.fma(a, b, value)
                    w.assign(total, value)
            found: Number = w.copy(totals[0])
            if self.loop.half:
                found = Pair(w.copy(totals[0]), w.copy(totals[1]))
            if add is not None:
                more = self.load(add.pointer, i * add.line + c * add.step)
                found = _sum(found, more)
            self.store(out.pointer, i * out.line + c * out.step, found)

    def mask_at(self, i: Value, j: Value) -> Value:
        strides = self.stride("mask", -2), self.stride("mask", -1)
        if self.op.side == "right":
            strides = strides[::-1]
        return i * strides[0] + j * strides[1]

    def check_step(self, t: Value, place: Place, old: Value, new: Value) -> None:
        """Write what is done about a step whose results are not finite."""
        w, loop = self.w, self.loop
        kind = Type(loop.half or loop.dtype)
        wrong = w.local(0, INT64)
        with w.loop(0, self.cells, kind.itemsize) as byte:
            value = w.load(kind, new, byte)
            is_wrong = (value * 0.0).differs(0.0)
            w.assign(wrong, w.copy(wrong) | w.cast(is_wrong, "int64"))
        with w.when(w.copy(wrong).differs(0)):
            self.write_items(t, place, old, new, masked=True)

    def masked_steps(self, first: Value, last: Value) -> None:
        """Write some steps without the items that the mask leaves out; there is no batch."""
        w = self.w
        zero = w.constant(0, INT64)
        with w.loop(first, last) as n:
            t = self.time(n)
            place: Place = {"index": zero, "matrix": zero, "offset": zero}
            if not self.loop.fixed:
                place["matrix"] = t * self.stride("matrix", 0)
            if self.has("offset"):
                place["offset"] = t * self.stride("offset", 0)
            old, new = (w.offset(self.history, self.row_of(k)) for k in (n, n + 1))
            self.write_items(t, place, old, new, masked=True)

    # Products of states and other rows

    def has_products(self) -> Value:
        rows = self.out.number(self.words.outputs[1] + 1, "product_rows")
        return rows > 0

    def write_products(self) -> None:
        """Write the products of all states, after the steps."""
        w, item = self.w, Type(self.loop.dtype)
        rows = self.out.number(self.words.outputs[1] + 1, "product_rows")
        d, width = self.size, self.dim("other", 1)
        after = self.loop.outer == "after"
        sizes = (d, width) if after else (width, d)
        with w.loop(0, rows) as t:
            place = w.offset(self.data("other"), t * self.stride("other", 0))
            other = self.lines("other", place, (w.constant(1, INT64), width)).pointer
            state = w.offset(self.history, t * self.row_bytes)
            left, right = (state, other) if after else (other, state)
            first = w.offset(self.result(1), t * (d * width) * item.itemsize)
            with w.loop(0, sizes[0]) as i:
                factor = w.load(item, left, i * item.itemsize)
                target = w.offset(first, i * sizes[1] * item.itemsize)
                write_multiple(w, target, factor, right, sizes[1])


def _product_terms(x: Number, y: Number) -> list[list[tuple[Value, Value]]]:
    """Return, for each part of a product, the factors of its terms."""
    if isinstance(x, Pair) and isinstance(y, Pair):
        return [
            [(x.real, y.real), (-x.imag, y.imag)],
            [(x.real, y.imag), (x.imag, y.real)],
        ]
    assert isinstance(x, Value)
    assert isinstance(y, Value)
    return [[(x, y)]]


def _sum(x: Number, y: Number) -> Number:
    if isinstance(x, Pair) and isinstance(y, Pair):
        return Pair(x.real + y.real, x.imag + y.imag)
    assert isinstance(x, Value)
    assert isinstance(y, Value)
    return x + y
