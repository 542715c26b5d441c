"""One step after the other: how a kernel takes the steps of a loop, and what it leaves behind."""

from __future__ import annotations

from scanlib.kernels.language import BOOL, FULL, INT64, Local, Value, Writer
from scanlib.schedules.elementwise import L, Storage, TableReader, write_result
from scanlib.schedules.turns import turns


class TakesSteps(TableReader[L]):
    """Writes the loop over the steps; what a step is, `step` of a schedule says.

    Attributes
    ----------
    steps, begin : Value
        How many steps there are, and the first one that this call takes.
    i, t : Value
        The number of the step that is written, and its row in the arrays.
    stopped : Local
        Set by a step of a loop that may stop.
    """

    storage: Storage[L]
    steps: Value
    begin: Value
    i: Value
    t: Value
    turn: Local
    stopped: Local

    def step(self, i: Value) -> None:
        raise NotImplementedError

    def take_steps(self) -> Value:
        """Write all steps; return how many are taken by then."""
        loop, w = self.loop, self.w
        end = self.steps
        if loop.grows:
            capacity = self.out.number(self.words.capacity, "capacity")
            end = w.select(capacity < end, capacity, end)
        self.turn = w.local(self.begin)
        if loop.signature.has_stop:
            self.stopped = w.local(False, BOOL)
            self.steps_until(end)
        else:
            self.steps_in_turns(end)
        taken = w.copy(self.turn)
        self.out.write_word(self.words.taken, taken)
        return taken

    def steps_in_turns(self, end: Value) -> None:
        """Write all steps, with a chance to interrupt them now and then."""
        length = self.out.number(self.words.turn, "turn")
        with turns(self.w, self.turn, end, length) as (first, last), self.w.loop(first, last) as i:
            self.step(i)

    def steps_until(self, end: Value) -> None:
        w, length = self.w, self.out.number(self.words.turn, "turn")

        def stopped() -> Value:
            return w.copy(self.stopped)

        with (
            turns(w, self.turn, end, length, stopped) as (_, last),
            w.loop_while(lambda: (w.copy(self.turn) < last) & ~stopped()),
        ):
            i = w.copy(self.turn)
            self.step(i)
            w.assign(self.turn, i + 1)

    # Rows of states

    def row_of(self, i: int, offset: int) -> Value:
        """Return where a state's row is, `offset` steps after this one's."""
        loop, w = self.loop, self.w
        depth = loop.signature.depths[i]
        if loop.has_ring(i):
            return place_in_ring(w, self.i + (depth + offset), depth) * self.storage.row_sizes[i]
        return (self.t + (-offset if loop.reverse else depth + offset)) * self.storage.row_sizes[i]

    def memory_of(self, i: int) -> Value:
        """Return the memory that holds the rows of a state."""
        return self.storage.spaces[i] if self.loop.has_ring(i) else self.data(f"h{i}")

    # After the last step

    def finish(self, taken: Value) -> None:
        """Write what becomes of the results when all steps are taken, or outputs are full."""
        loop, w = self.loop, self.w
        if loop.signature.has_stop:
            full = (taken < self.steps) & ~w.copy(self.stopped)
            with w.when(full):
                w.end(FULL)
        for i in range(loop.signature.n_states):
            if loop.has_ring(i):
                self.write_last_rows(i, taken)
        write_result(self, self.steps, taken)

    def write_last_rows(self, i: int, taken: Value) -> None:
        """Write the rows of a ring to the output."""
        loop, w = self.loop, self.w
        depth, size = loop.signature.depths[i], self.storage.row_sizes[i]
        for k in range(1, depth + 1):
            row = k - 1 if loop.reverse else depth - k
            source = place_in_ring(w, taken + (depth - k), depth) * size
            target = w.offset(self.data(f"h{i}"), size * row)
            w.move(target, w.offset(self.storage.spaces[i], source), size)


def place_in_ring(w: Writer, row: Value, depth: int) -> Value:
    """Return where a row, which is no negative number, is among the ``depth + 1`` that are kept."""
    if depth & (depth + 1) == 0:
        return row & depth  # a remainder takes six instructions a step
    return w.apply("remainder", row, w.constant(depth + 1, INT64))
