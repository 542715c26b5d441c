"""One step after the other: how a kernel takes the steps of a loop, and what it leaves behind."""

from scanlib.kernels.language import BOOL, FULL, INT64, Local, Value, Writer
from scanlib.kernels.scalars import Number
from scanlib.kernels.spans import Cell, load_number, shift, store_number
from scanlib.schedules.loop_kernels import L, TableReader, write_result
from scanlib.schedules.polls import between_polls


class TakesSteps(TableReader[L]):
    """Writes the loop over the steps; what a step is, `step` of a schedule says.

    This call takes those from `begin` on. `i` and `t` are the number of the step that is written
    and its row in the arrays, `done` the first step that is not taken yet, `stopped` is set by a
    step of a loop that may stop. `registers` have the latest values of the states and carries that
    live in local variables, the last first.
    """

    steps: Value
    begin: Value
    i: Value
    t: Value
    done: Local
    stopped: Local

    def step(self) -> None:
        raise NotImplementedError

    def begin_steps(self) -> None:
        """Write where everything is that the steps read and write."""
        self.rings = {
            name: self.w.offset(self.workspace, self.value_of(first))
            for name, first in self.loop.rings.items()
        }
        self.steps = self.out.number(self.words.steps, "steps")
        self.begin = self.out.number(self.words.begin, "begin")

    def write_loop(self) -> None:
        """Write all steps, with what comes right before them and after."""
        self.read_locals()
        taken = self.take_steps()
        self.write_locals()
        self.finish(taken)

    def take_steps(self) -> Value:
        """Write all steps; return how many are taken by then."""
        loop, w = self.loop, self.w
        end = self.steps
        if loop.grows:
            capacity = self.out.number(self.words.capacity, "capacity")
            end = w.select(capacity < end, capacity, end)
        self.done = w.local(self.begin)
        if loop.signature.has_stop:
            self.stopped = w.local(False, BOOL)
            self.steps_until(end)
        else:
            self.steps_to(end)
        taken = w.copy(self.done)
        self.out.write_word(self.words.taken, taken)
        return taken

    def steps_to(self, end: Value) -> None:
        """Write all steps, with a chance to interrupt them now and then."""
        length = self.out.number(self.words.steps_per_poll, "steps_per_poll")
        with (
            between_polls(self.w, self.done, end, length) as (first, last),
            self.w.loop(first, last) as i,
        ):
            self.be_at(i)
            self.step()

    def be_at(self, i: Value) -> None:
        """Let `step` and `row_of` write for one step."""
        self.i, self.t = i, self.time(i)

    def time(self, i: Value) -> Value:
        """Return the row of a step in the arrays."""
        return self.steps - 1 - i if self.loop.reverse else i

    def steps_until(self, end: Value) -> None:
        w, length = self.w, self.out.number(self.words.steps_per_poll, "steps_per_poll")

        def stopped() -> Value:
            return w.copy(self.stopped)

        with (
            between_polls(w, self.done, end, length, stopped) as (_, last),
            w.loop_while(lambda: (w.copy(self.done) < last) & ~stopped()),
        ):
            i = w.copy(self.done)
            self.be_at(i)
            self.step()
            w.assign(self.done, i + 1)

    def own_part(self, count: Value) -> tuple[Value, Value]:
        """Return between which of so many things those of this part of the loop are."""
        part, parts = (self.out.number(getattr(self.words, k), k) for k in ("part", "parts"))
        first, last = (self.w.apply("quotient", count * k, parts) for k in (part, part + 1))
        return first, last

    # Rows of states

    def row_of(self, name: str, offset: int) -> Value:
        """Return where the row of a state or a carry is, `offset` steps after this one's."""
        depth, w = self.loop.depths[name], self.w
        if name in self.rings:
            place = place_in_ring(w, self.i + (depth + offset), depth)
            return place * self.value_of(self.loop.starts[name].row)
        if depth == 1 and not self.loop.is_traced(name):
            return w.constant(0, INT64)
        row: Value | int = -offset if self.loop.reverse else depth + offset
        row = self.t + row if self.loop.is_traced(name) else row - self.loop.reverse
        return w.as_value(row, INT64) * self.stride_of(name, 0)

    def memory_of(self, name: str) -> Value:
        """Return the memory that holds the rows of an array."""
        return self.rings[name] if name in self.rings else self.data(name)

    # States and carries in local variables

    def read_locals(self) -> None:
        """Write locals for the states and carries without channels."""
        loop = self.loop
        self.be_at(self.begin)

        def read(name: str, k: int) -> Cell:
            number = loop.arrays[name].dtype, self.data(name), self.row_of(name, -k)
            return Cell(self.w, load_number(self.w, *number))

        self.registers = {
            name: [read(name, k) for k in range(1, depth + 1)]
            for name, depth in loop.depths.items()
            if loop.is_local(name)
        }

    def push(self, name: str, value: Number) -> None:
        """Write the next value of what lives in local variables."""
        shift(self.registers[name], value)

    def write_locals(self) -> None:
        """Write what locals hold to where the outputs are."""
        for name, cells in self.registers.items():
            if not self.loop.is_traced(name):
                for k, cell in enumerate(cells, 1):
                    store_number(self.w, self.data(name), self.row_of(name, -k), cell.value)

    # After the last step

    def finish(self, taken: Value) -> None:
        """Write what becomes of the results when all steps are taken, or outputs are full."""
        loop, w = self.loop, self.w
        if loop.signature.has_stop:
            full = (taken < self.steps) & ~w.copy(self.stopped)
            with w.when(full):
                w.fail(FULL)
        for name in self.rings:
            self.write_last_rows(name, taken)
        write_result(self, self.steps, taken)

    def write_last_rows(self, name: str, taken: Value) -> None:
        """Write the rows of a ring to the output, or this part's channels of them."""
        w, depth, start = self.w, self.loop.depths[name], self.loop.starts[name]
        size = self.value_of(start.row)
        first, count = w.as_value(0, INT64), size
        if self.loop.slices > 1:
            item = self.value_of(self.loop.arrays[name].strides[1])
            first, last = (place * item for place in self.own_part(self.dim(start.name, 1)))
            count = last - first
        for k in range(1, depth + 1):
            row = k - 1 if self.loop.reverse else depth - k
            source = place_in_ring(w, taken + (depth - k), depth) * size
            target = w.offset(self.data(name), size * row + first)
            w.move(target, w.offset(self.rings[name], source + first), count)


def place_in_ring(w: Writer, row: Value, depth: int) -> Value:
    """Return where a row, which is no negative number, is among the ``depth + 1`` that are kept."""
    if depth & (depth + 1) == 0:
        return row & depth  # a remainder takes six instructions a step
    return w.apply("remainder", row, w.constant(depth + 1, INT64))
