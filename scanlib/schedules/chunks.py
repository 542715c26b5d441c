"""Blocks of steps of one channel, in chunks of the steps, each in a thread of its own.

The first thread runs the first chunk. Every other one composes steps before its chunk, which gives
the value from which it runs the chunk as one thread would. A chunk whose value is not found so is
run after the one before it. So is one whose value turns out not to be what counts, once the chunk
before it has been run. How the steps are cut depends on the flags and their number alone, and what
is run again on the values: results are the same, bit by bit, at every run. Composing takes
affine recurrences of real numbers whose elements depend on no state, with a few past values.

A thread composes the steps before its chunk, the last block first, until their map is a constant:
that is the value before its chunk. The map of a block is where its steps take the unit vectors,
and zero with the constants. It was not what counts, and the chunk is run once more, if the last
value before it is not finite (composing may have hidden an overflow), or if the value before the
composed steps is so large that it was not yet forgotten; for that, values at the ends of all blocks
are kept. Before threads are started, one block tells whether the coefficients decay fast enough.
Where they do not, as in a random walk, composing all steps would take as long as it saves, and one
thread runs the loop.

**Memory.** A chunk has a record in the workspace: the values before it, those after it (which are
its latest while it runs, and its own sums), whether its value was found, and what else decides. A
traced state is scanned where its history is stored; the rows before a chunk are the last ones of
the chunk before, which another thread writes, so the first block of a chunk is scanned in a buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pytensor.configdefaults import config

from scanlib.kernels.elementary import vector_function
from scanlib.kernels.language import FLOAT64, INT64, POINTER, Kernel, Local, Type, Value, Writer
from scanlib.kernels.program import AGAIN, TableKernel
from scanlib.kernels.scalars import Number
from scanlib.kernels.spans import Span, added, load_number, store_number
from scanlib.recurrences import lanes, squares
from scanlib.schedules.blocks import BlocksRun
from scanlib.schedules.elementwise import (
    AFRESH,
    PROBE,
    RUN,
    ElemwiseLoop,
    Storage,
    write_result,
)
from scanlib.schedules.selection import BLOCKS_OF_A_CHUNK

SMALL = 2.0**-120  # coefficients of values that count no more
_UNDERFLOW = 2.0**-900  # what products may have lost
_ROUNDING = 2.0**-60  # of a value, in doubles: less than half a unit in the last place
_LINES = 128  # bytes: what two threads write lies so far apart
_WORD = 8

Past = tuple[int, int]  # a part, and which of its latest rows, in the order of memory


class Records:
    """Where the records of the chunks are in the workspace."""

    def __init__(self, loop: ElemwiseLoop, pasts: Sequence[Past], recurrent: int) -> None:
        self.loop, self.pasts = loop, tuple(pasts)
        maps = [f"mul{number}" for number in range(len(loop.op.recurrences))]
        names = ["known", "forgotten", *maps]
        self.before = {past: _WORD * k for k, past in enumerate(pasts)}
        self.after = {past: _WORD * (len(pasts) + k) for k, past in enumerate(pasts)}
        first = _WORD * 2 * len(pasts)
        self.names = {name: first + _WORD * k for k, name in enumerate(names)}
        self.size = -(-(first + _WORD * len(names)) // _LINES) * _LINES
        self.ends = {past: k for k, past in enumerate(pasts[:recurrent])}

    def bytes(self, w: Writer, steps: Value, block: int) -> Value:
        """Write how much memory there is."""
        blocks = w.apply("quotient", steps, w.constant(block, INT64)) + 2
        return blocks * (_WORD * len(self.ends)) + self.size * self.loop.chunks

    def place(self, chunk: Value, offset: int) -> Value:
        return chunk * self.size + offset

    def end(self, past: Past, number: Value, steps: Value, block: int) -> Value:
        """Return where the value before a block is kept."""
        w = number.writer
        assert w is not None
        blocks = w.apply("quotient", steps, w.constant(block, INT64)) + 2
        return (blocks * self.ends[past] + number) * _WORD + self.size * self.loop.chunks


class ChunksRun(BlocksRun):
    """Writes the kernel that runs one chunk, or composes the steps before it."""

    def __init__(self, loop: ElemwiseLoop) -> None:
        super().__init__(loop)
        n = loop.signature.n_states
        self.dtypes = {part: self.dtype_of(part) for part in self.depths}
        self.dtypes |= {n + i: self.dtype_of(n + i) for i in self.sums}
        # What the steps of each recurrence read, the latest value of a part first.
        self.read: list[list[Past]] = [
            [
                (part, back - 1 if self.reverse else self.depths[part] - back)
                for part in recurrence.parts
                for back in range(1, self.depths[part] + 1)
            ]
            for recurrence in loop.op.recurrences
        ]
        recurrent = [past for own in self.read for past in own]
        others = [(part, 0) for part in self.dtypes if part not in self.depths]
        self.records = Records(loop, [*recurrent, *others], len(recurrent))
        loop.chunks = config.scanlib__threads
        loop.least_chunk = max(config.scanlib__parallel_steps, BLOCKS_OF_A_CHUNK * self.size)
        loop.extra_bytes = lambda w, steps: self.records.bytes(w, steps, self.size)

    def bound(self, w: Writer, steps: Value, chunks: Value, k: Value) -> Value:
        """Write where chunk `k` begins."""
        size = w.constant(self.size, INT64)
        return w.apply("quotient", w.apply("quotient", steps * k, chunks), size) * self.size

    def back(self, part: int, row: int) -> int:
        """Return how many steps back one of the latest rows is."""
        return row + 1 if self.reverse else self.depths.get(part, 1) - row

    # Memory

    def workspace(self) -> tuple[Value, Value]:
        address, place = super().workspace()
        return address, place + self.records.bytes(self.w, self.steps, self.size)

    def place_of_value(self, part: int, row: Value | int) -> tuple[Value, Value | int]:
        if self.is_direct(part):
            return super().place_of_value(part, row)
        return self.memory, self.latest + (self.w.as_value(row, INT64) * _WORD) + (
            self.records.after[part, 0]
        )

    def history_of(self, part: int) -> Span:
        """Return the history, or, for the first block of a chunk, a buffer with what is before."""
        w, depth, dtype = self.w, self.depths[part], self.dtypes[part]
        own, history = self.first_rows[part], super().history_of(part)
        first = self.i.equals(self.first)
        with w.when(first):
            for row in range(depth):
                value = load_number(
                    w, dtype, self.memory, self.latest + self.records.before[part, row]
                )
                own.store(self.n + row if self.reverse else row, value)
        pointer = w.select(first, own.pointer, history.pointer)
        return Span(w, dtype, pointer, w.select(first, own.start, history.start))

    # The kernel

    def kernel(self) -> Kernel:
        w, words = self.w, self.words
        self.storage = Storage(self)
        self.steps = self.out.number(words.steps, "steps")
        self.memory = self.out.word(words.workspace, POINTER, "workspace")
        self.chunk = self.out.number(words.part, "part")
        self.job = self.out.number(words.job, "job")
        chunks = self.out.number(words.chunks, "chunks")
        self.prepare_buffers()
        self.first_rows = {
            part: self.buffers.span(self.dtypes[part], self.size + depth)
            for part, depth in self.depths.items()
            if self.is_direct(part)
        }
        self.latest = self.chunk * self.records.size
        bound = self.bound
        self.first = bound(w, self.steps, chunks, self.chunk)
        last = bound(w, self.steps, chunks, self.chunk + 1)
        self.last = w.select((self.chunk + 1).equals(chunks), self.steps, last)
        self.window = bound(w, self.steps, chunks, w.constant(1, INT64))
        self.write_constants()
        runs = w.local(True, Type("bool"))
        with w.when(self.chunk.equals(0)):
            self.read_first_values()
        probes = self.job.equals(PROBE)
        with w.when(probes | ((self.chunk > 0) & self.job.equals(RUN))):
            with self.scalars.scope():
                found = self.compose()
            self.set("known", w.cast(found, "int64"))
            w.assign(runs, found & ~probes)
        with w.when(w.copy(runs)):
            self.write_run()
        write_result(self, self.steps, self.steps)
        return self.finished()

    def set(self, name: str, value: Value) -> None:
        """Write a word of the chunk's record."""
        self.w.store(self.memory, self.latest + self.records.names[name], value)

    def read_first_values(self) -> None:
        """Write the values before the first chunk."""
        w = self.w
        for past, place in self.records.before.items():
            store_number(w, self.memory, place, self.first_value(past))

    def first_value(self, past: Past) -> Number:
        """Return a value before the first chunk, where `start` has put it."""
        part, row = past
        at: Value | int = row
        if self.is_direct(part) and self.reverse:
            at = self.steps + row
        found = BlocksRun.place_of_value(self, part, at)
        return load_number(self.w, self.dtypes[part], *found)

    def write_run(self) -> None:
        """Write the run of a chunk from the values before it to those after it."""
        w, records, n = self.w, self.records, self.loop.signature.n_states
        for (part, row), place in records.before.items():
            value = load_number(w, self.dtypes[part], self.memory, self.latest + place)
            if part not in self.depths:
                # A sum of its own, of all chunks but the first one.
                assert isinstance(value, Value)
                value = w.select(self.chunk.equals(0), value, w.constant(0, value.type))
            store_number(w, self.memory, self.latest + records.after[part, row], value)
        self.write_blocks(self.first, self.last)
        for part, row in records.before:
            if part < n and self.is_direct(part):
                back = self.back(part, row)
                at = self.last + (self.depths[part] - back)
                if self.reverse:
                    at = self.steps - self.last + (back - 1)
                value = load_number(w, self.dtypes[part], *BlocksRun.place_of_value(self, part, at))
                store_number(w, self.memory, self.latest + records.after[part, row], value)

    def write_views(self) -> None:
        super().write_views()
        self.keep()

    def move_on(self) -> None:
        super().move_on()
        w = self.w
        for part, own in self.first_rows.items():
            first = 0 if self.reverse else self.depths[part]
            with w.when(self.i.equals(self.first)), w.loop(0, self.n) as j:
                history = BlocksRun.history_of(self, part)
                history.store(j + first, own.load(j + first))

    # What composes

    def compose_block(self, i: Value) -> None:
        """Write the elements of the block that begins with a step, all of whose steps there are."""
        w = self.w
        self.n = w.constant(self.size, INT64)
        self.low = self.steps - i - self.n if self.reverse else i
        self.rows = [self.row_span(k) for k in range(len(self.inner.rows))]
        self.block = lanes.Block(w, self.n, self.reverse)
        for number in range(len(self.loop.op.recurrences)):
            self.write_elements(number)

    def compose(self) -> Value:
        """Write the values before a chunk, from steps before it; return whether they are found."""
        w = self.w
        maps = [_Map(w, len(values)) for values in self.read]
        i = w.local(self.first)
        blocks = blocks_before(w, self.window, self.size)
        probe = self.job.equals(PROBE)
        lowest = self.first - w.select(probe, self.size, blocks * self.size)

        def are_small() -> Value:
            found: Value = w.constant(True, Type("bool"))
            for map_ in maps:
                found = found & map_.is_small()
            return found

        with w.loop_while(lambda: (w.copy(i) > lowest) & ~are_small()):
            w.assign(i, w.copy(i) - self.size)
            self.compose_block(w.copy(i))
            for number, map_ in enumerate(maps):
                self.compose_map(number, map_)
        self.set("forgotten", w.apply("quotient", w.copy(i), w.constant(self.size, INT64)))
        for number, (map_, values) in enumerate(zip(maps, self.read, strict=True)):
            self.set(f"mul{number}", _largest(w, [w.copy(m) for m in map_.coefficients.values()]))
            for past, local in zip(values, map_.added, strict=True):
                value: Value = w.copy(local)
                if self.is_square(number):
                    value = w.apply("sqrt", value)
                value = w.cast(value, self.dtypes[past[0]])
                w.store(self.memory, self.latest + self.records.before[past], value)
        return are_small()

    def is_square(self, number: int) -> bool:
        return self.loop.op.recurrences[number].family == squares.FAMILY

    def compose_map(self, number: int, map_: _Map) -> None:
        """Write that a map is composed with the steps of a block before it."""
        w, count = self.w, len(self.read[number])
        columns = [
            [w.local(float(i == k), FLOAT64) for i in range(count)] for k in range(count + 1)
        ]
        with w.loop(0, self.n) as t:
            self.step_of_columns(number, columns, self.block.step(t))
        map_.follow(columns)

    def step_of_columns(self, number: int, columns: list[list[Local]], j: Value) -> None:
        """Write one step of all columns; values move on to be those of one step earlier."""
        w, recurrence = self.w, self.loop.op.recurrences[number]
        values = [(part, self.back(part, row)) for part, row in self.read[number]]
        used = {term.coefficient for terms in recurrence.terms for term in terms}
        read: dict[int | None, Value] = {}
        for k in sorted(k for k in {*used, *recurrence.constants} if k is not None):
            read[k] = w.cast(self.elements[number, k].real(j), "float64")
        for place, column in enumerate(columns):
            new: dict[int, Value] = {}
            rows = zip(recurrence.parts, recurrence.terms, recurrence.constants, strict=True)
            for part, terms, constant in rows:
                total: Value = w.constant(0.0, FLOAT64)
                if constant is not None and place == len(values):
                    total = read[constant]
                for term in terms:
                    value: Value = w.copy(column[values.index((term.part, -term.tap))])
                    if part in self.sums_first:
                        total = read[term.coefficient] * (total + value)
                    elif term.coefficient is None:
                        total = total + value
                    else:
                        total = w.fma(read[term.coefficient], value, total)
                new[part] = total
            for i, (part, back) in reversed(list(enumerate(values))):
                w.assign(column[i], new[part] if back == 1 else w.copy(column[i - 1]))

    def keep(self) -> None:
        """Write what is kept of the values before a block."""
        w = self.w
        number = w.apply("quotient", self.i, w.constant(self.size, INT64))
        for past in self.records.ends:
            part, row = past
            if part in self.sums_first:
                value: Value = w.copy(self.kept[part][0])
            else:
                value = self.histories[part].real(self.n + row if self.reverse else row)
            w.store(self.memory, self.records.end(past, number, self.steps, self.size), value)


class Then:
    """Writes the kernel that decides, after a round, what is run next."""

    def __init__(self, run: ChunksRun) -> None:
        self.run, self.loop, self.records = run, run.loop, run.records
        self.out = TableKernel("then")
        self.w, self.words = self.out.writer, run.words
        self.memory = self.out.word(self.words.workspace, POINTER, "workspace")
        self.steps = self.out.number(self.words.steps, "steps")
        self.chunks = self.out.number(self.words.chunks, "chunks")

    def kernel(self) -> Kernel:
        w, words = self.w, self.words
        job = self.out.number(words.job, "job")
        part = self.out.number(words.part, "part")
        with w.when(job.equals(PROBE)):
            chunks = self.decide()
            self.out.write_word(words.chunks, chunks)
            self.order(RUN, w.constant(0, INT64), chunks)
        chunk = w.local(w.select(job.equals(RUN), 1, part + 1))
        wrong = w.local(False, Type("bool"))
        with w.loop_while(lambda: (w.copy(chunk) < self.chunks) & ~w.copy(wrong)):
            right = self.is_right(w.copy(chunk))
            w.assign(wrong, ~right)
            w.assign(chunk, w.select(right, w.copy(chunk) + 1, w.copy(chunk)))
        with w.when(w.copy(chunk) < self.chunks):
            for past in self.records.pasts:
                if past[0] in self.run.depths:
                    value = self.after(past, w.copy(chunk) - 1)
                    place = self.records.place(w.copy(chunk), self.records.before[past])
                    store_number(w, self.memory, place, value)
            self.order(AFRESH, w.copy(chunk), w.constant(1, INT64))
        self.write_last_values()
        return self.out.kernel()

    def decide(self) -> Value:
        """Return how many chunks run: one where coefficients do not decay fast enough."""
        w, chunks, run = self.w, self.chunks, self.run
        window = run.bound(w, self.steps, chunks, w.constant(1, INT64))
        most = w.cast(blocks_before(w, window, run.size), "float64")
        fast: Value = w.constant(True, Type("bool"))
        for number in range(len(run.read)):
            mul = self.word(f"mul{number}", chunks - 1, FLOAT64)
            fast = fast & (blocks_to_forget(w, mul) <= most)
        return w.select(fast, chunks, 1)

    def is_right(self, chunk: Value) -> Value:
        """Return whether a chunk was run from what the one before it ends with."""
        w, run = self.w, self.run
        found = self.word("known", chunk).differs(0)
        # Where the chunk was not run, nothing of this may have been written.
        forgotten = w.select(found, self.word("forgotten", chunk), 0)
        for number, values in enumerate(run.read):
            ends, starts = [], []
            for past in values:
                found = found & (abs(self.after(past, chunk - 1)) < float("inf"))
                place = self.records.end(past, forgotten, self.steps, run.size)
                ends.append(w.cast(self.value(past, place), "float64"))
                starts.append(w.cast(self.before(past, chunk), "float64"))
            end, start = _largest(w, ends), _largest(w, starts)
            if run.is_square(number):
                end, start = end * end, start * start
            found = found & is_forgotten(w, self.word(f"mul{number}", chunk, FLOAT64), end, start)
        return found

    def order(self, job: int, part: Value, parts: Value) -> None:
        """Write that some chunks are run next."""
        w, words = self.w, self.words
        self.out.write_word(words.job, w.constant(job, INT64))
        self.out.write_word(words.part, part)
        self.out.write_word(words.parts, parts)
        w.end(AGAIN)

    def value(self, past: Past, place: Value) -> Value:
        found = load_number(self.w, self.run.dtypes[past[0]], self.memory, place)
        assert isinstance(found, Value)
        return found

    def after(self, past: Past, chunk: Value) -> Value:
        return self.value(past, self.records.place(chunk, self.records.after[past]))

    def before(self, past: Past, chunk: Value) -> Value:
        return self.value(past, self.records.place(chunk, self.records.before[past]))

    def word(self, name: str, chunk: Value, type: Type = INT64) -> Value:
        place = self.records.place(chunk, self.records.names[name])
        return self.w.load(type, self.memory, place)

    def write_last_values(self) -> None:
        """Write the results of all chunks: the last values, and the sums of sums."""
        w, n = self.w, self.loop.signature.n_states
        for past in self.records.pasts:
            part, row = past
            if part < n and self.run.is_direct(part):
                continue
            name = f"h{part}" if part < n else f"c{part - n}"
            array = self.loop.arrays[name]
            data = self.out.word(self.words.outputs[array.number], POINTER, f"{name}_data")
            value = self.after(past, self.chunks - 1)
            if part not in self.run.depths:
                total = w.local(self.after(past, w.constant(0, INT64)))
                with w.loop(1, self.chunks) as k:
                    w.assign(total, added(w.copy(total), self.after(past, k)))
                value = w.copy(total)
            w.store(data, row * array.itemsize, value)


def _largest(w: Writer, values: Sequence[Value]) -> Value:
    """Return the largest size of some numbers; NaN if the first is."""
    found = abs(values[0])
    for value in values[1:]:
        size = abs(value)
        found = w.select(size > found, size, found)
    return found


def blocks_before(w: Writer, window: Value, block: int) -> Value:
    """Return how many blocks before a chunk may be composed."""
    return w.apply("quotient", window, w.constant(BLOCKS_OF_A_CHUNK * block, INT64))


def is_forgotten(w: Writer, mul: Value, before: Value, value: Value) -> Value:
    """Return whether ``mul * before`` is nothing next to a value; not if one is not finite."""
    size = abs(mul)
    lost = w.select(size < _UNDERFLOW, _UNDERFLOW, size) * abs(before)
    enough = _ROUNDING * abs(value)
    return (lost <= enough) & (enough < float("inf"))


def blocks_to_forget(w: Writer, mul: Value) -> Value:
    """Return how many blocks make a coefficient small if one makes it `mul`."""
    (own,) = w.call(vector_function("log", "float64", 1), abs(mul))
    return w.select(abs(mul) < 1.0, float(np.log(SMALL)) / own, float("inf"))


class _Map:
    """An affine map of some values, at first the identity."""

    def __init__(self, w: Writer, count: int) -> None:
        self.w, self.places = w, range(count)
        self.coefficients: dict[tuple[int, int], Local] = {
            (i, k): w.local(float(i == k), FLOAT64) for i in self.places for k in self.places
        }
        self.added: list[Local] = [w.local(0.0, FLOAT64) for _ in self.places]

    def is_small(self) -> Value:
        found: Value = self.w.constant(True, Type("bool"))
        for local in self.coefficients.values():
            found = found & (abs(self.w.copy(local)) <= SMALL)
        return found

    def follow(self, columns: list[list[Local]]) -> None:
        """Write the composition with a map that comes first: its columns, then what it adds."""
        w = self.w

        def row(i: int, column: list[Local], total: Value) -> Value:
            for k in self.places:
                total = w.fma(w.copy(self.coefficients[i, k]), w.copy(column[k]), total)
            return total

        for i, local in enumerate(self.added):
            w.assign(local, row(i, columns[-1], w.copy(local)))
        zero = w.constant(0.0, FLOAT64)
        products = {(i, k): row(i, columns[k], zero) for i, k in self.coefficients}
        for place, product in products.items():
            w.assign(self.coefficients[place], product)
