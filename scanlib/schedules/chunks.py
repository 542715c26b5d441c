"""Blocks of steps of one channel, in chunks of the steps, each in a thread of its own.

The first thread runs the first chunk. Every other one composes steps before its chunk, which gives
the value from which it runs the chunk as one thread would. A chunk whose value is not found so is
run after the one before it. So is one whose value turns out not to be what counts, once the chunk
before it has been run. How the steps are cut depends on the flags and their number alone, and what
is run again on the values: results are the same, bit by bit, at every run. There are two ways to
compose (`scanlib.ops.lowered.thread_splits.chunks_by`).

**Decay**, for affine recurrences whose elements depend on no state. A thread composes the steps
before its chunk, the last one first, until their map is a constant: that is the value before its
chunk. It was not what counts, and the chunk is run once more, if the last value before it is not
finite (composing may have hidden an overflow), or if the value before the composed steps is so
large that it was not yet forgotten; for that, values at the ends of all blocks are kept. Before
threads are started, one block tells whether the coefficients decay fast enough. Where they do not,
as in a random walk, composing all steps would take as long as it saves, and one thread runs the
loop.

**All steps**, for running extremes, sums, and logarithms of sums, whose elements depend on no
state. To compose steps of these is to find the extreme or the sum of all their elements: nothing
waits for the step before, and nothing is stored. Chunks get shorter from one to the next, by what
composing takes of the time (`ops.thread_splits.composing_cost`), so that all end together. A
running extreme is right if it is what the chunk before ends with. A sum, or its logarithm, is
rounded less than by one step after the other; it is taken if both are finite: then no step on the
way has overflowed, and composing gives up where it does, or an element is infinity or NaN. Minus
infinity, the logarithm of nothing, must be in both.

**Memory.** A chunk has a record in the workspace: the values before it, those after it (which are
its latest while it runs, and its own sums), whether its value was found, and what else decides. A
traced state is scanned where its history is stored; the rows before a chunk are the last ones of
the chunk before, which another thread writes, so the first block of a chunk is scanned in a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from pytensor.configdefaults import config

from scanlib.kernels.language import FLOAT64, INT64, POINTER, Kernel, Local, Type, Value, Writer
from scanlib.kernels.program import AGAIN, TableKernel
from scanlib.kernels.scalars import Number
from scanlib.kernels.spans import Items, Span, added, load_number, store_number
from scanlib.ops.lowered.elemwise_scan import Recurrence
from scanlib.ops.lowered.thread_splits import BLOCKS_OF_A_CHUNK, composing_cost, simple_family
from scanlib.recurrences import lanes
from scanlib.recurrences.composition import (
    SMALL,
    blocks_to_forget,
    compose_affine,
    compose_extreme,
    compose_logs,
    compose_sum,
    is_forgotten,
    log_of,
)
from scanlib.schedules.blocks import BlocksRun
from scanlib.schedules.elementwise import (
    AFRESH,
    PROBE,
    RUN,
    ElemwiseLoop,
    Storage,
    write_result,
)

_LINES = 128  # bytes: what two threads write lies so far apart
_WORD = 8

Past = tuple[int, int]  # a part, and which of its latest rows, in the order of memory


class Composition(Protocol):
    """A way to find the value before a chunk."""

    @property
    def names(self) -> Sequence[str]:
        """What else a record has a word for."""

    def ends(self) -> int:
        """Return how many values are kept for each block."""

    def probes(self) -> bool:
        """Whether one block decides, before there are threads, whether they pay."""

    def bound(self, w: Writer, steps: Value, chunks: Value, k: Value) -> Value:
        """Write where chunk `k` begins."""

    def compose(self, run: ChunksRun) -> Value:
        """Write the values before a chunk; return whether they are found."""

    def keep(self, run: ChunksRun) -> None:
        """Write what is kept of the values before a block."""

    def decide(self, then: Then) -> Value:
        """Return how many chunks run, after the probe."""

    def is_right(self, then: Then, chunk: Value) -> Value:
        """Return whether a chunk was run from what the one before it ends with."""


class Records:
    """Where the records of the chunks are in the workspace."""

    def __init__(self, loop: ElemwiseLoop, pasts: Sequence[Past], composition: Composition) -> None:
        self.loop, self.pasts = loop, tuple(pasts)
        names = ["known", *composition.names]
        self.before = {past: _WORD * k for k, past in enumerate(pasts)}
        self.after = {past: _WORD * (len(pasts) + k) for k, past in enumerate(pasts)}
        first = _WORD * 2 * len(pasts)
        self.names = {name: first + _WORD * k for k, name in enumerate(names)}
        self.size = -(-(first + _WORD * len(names)) // _LINES) * _LINES
        self.ends = {past: k for k, past in enumerate(pasts[: composition.ends()])}

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

    def __init__(self, loop: ElemwiseLoop, how: str) -> None:
        super().__init__(loop)
        n = loop.signature.n_states
        self.dtypes = {part: self.dtype_of(part) for part in self.depths}
        self.dtypes |= {n + i: self.dtype_of(n + i) for i in self.sums}
        self.pasts = [
            (part, row) for part in self.dtypes for row in range(self.depths.get(part, 1))
        ]
        self.composition: Composition = Decay(self) if how == "decay" else AllSteps(self)
        recurrent = [past for past in self.pasts if past[0] in self.depths]
        others = [past for past in self.pasts if past[0] not in self.depths]
        self.records = Records(loop, [*recurrent, *others], self.composition)
        loop.chunks = config.scanlib__threads
        loop.least_chunk = max(config.scanlib__parallel_steps, BLOCKS_OF_A_CHUNK * self.size)
        loop.probes = self.composition.probes()
        loop.extra_bytes = lambda w, steps: self.records.bytes(w, steps, self.size)

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
        bound = self.composition.bound
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
                found = self.composition.compose(self)
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
        self.composition.keep(self)

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

    def element(self, number: int, k: int | None, otherwise: float) -> Items:
        part = self.loop.op.recurrences[number].parts[0]
        return self.same(otherwise, part) if k is None else self.elements[number, k]

    def find(self, past: Past, value: Value) -> None:
        """Write a value before the chunk."""
        value = self.w.cast(value, self.dtypes[past[0]])
        self.w.store(self.memory, self.latest + self.records.before[past], value)


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
        if self.run.composition.probes():
            with w.when(job.equals(PROBE)):
                chunks = self.run.composition.decide(self)
                self.out.write_word(words.chunks, chunks)
                self.order(RUN, w.constant(0, INT64), chunks)
        chunk = w.local(w.select(job.equals(RUN), 1, part + 1))
        wrong = w.local(False, Type("bool"))
        with w.loop_while(lambda: (w.copy(chunk) < self.chunks) & ~w.copy(wrong)):
            right = self.run.composition.is_right(self, w.copy(chunk))
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


class Decay:
    """Composes affine recurrences until their coefficients are small.

    The map of recurrence `r` takes the values that its steps read, of all its parts, to as many
    values: coefficients, and what is added.
    """

    def __init__(self, run: ChunksRun) -> None:
        self.depths = run.depths
        self.recurrences = run.loop.op.recurrences
        self.block = run.size
        self.values: list[list[Past]] = [
            [
                (part, row)
                for part in recurrence.parts
                for back in range(1, run.depths[part] + 1)
                for row in [back - 1 if run.reverse else run.depths[part] - back]
            ]
            for recurrence in self.recurrences
        ]
        self.names = ["forgotten", *(f"mul{r}" for r in range(len(self.values)))]

    def ends(self) -> int:
        return sum(len(values) for values in self.values)

    def probes(self) -> bool:
        return True

    def bound(self, w: Writer, steps: Value, chunks: Value, k: Value) -> Value:
        size = w.constant(self.block, INT64)
        return w.apply("quotient", w.apply("quotient", steps * k, chunks), size) * self.block

    def compose(self, run: ChunksRun) -> Value:
        """Write the composition of the steps before a chunk."""
        w = run.w
        maps = [_Map(w, len(values)) for values in self.values]
        i = w.local(run.first)
        blocks = w.apply("quotient", run.window, w.constant(BLOCKS_OF_A_CHUNK * self.block, INT64))
        probe = run.job.equals(PROBE)
        lowest = run.first - w.select(probe, self.block, blocks * self.block)

        def is_small() -> Value:
            found: Value = w.constant(True, Type("bool"))
            for map_ in maps:
                found = found & map_.is_small()
            return found

        with w.loop_while(lambda: (w.copy(i) > lowest) & ~is_small()):
            w.assign(i, w.copy(i) - self.block)
            run.compose_block(w.copy(i))
            for number, map_ in enumerate(maps):
                self.compose_recurrence(run, number, map_)
        run.set("forgotten", w.apply("quotient", w.copy(i), w.constant(self.block, INT64)))
        for number, (map_, values) in enumerate(zip(maps, self.values, strict=True)):
            run.set(f"mul{number}", _largest(w, [w.copy(m) for m in map_.coefficients]))
            square = self.recurrences[number].family == "affine in squares"
            for past, local in zip(values, map_.added, strict=True):
                value: Value = w.copy(local)
                run.find(past, w.apply("sqrt", value) if square else value)
        return is_small()

    def compose_recurrence(self, run: ChunksRun, number: int, map_: _Map) -> None:
        recurrence = self.recurrences[number]
        if len(self.values[number]) > 1 or len(recurrence.terms[0]) > 1:
            _Coupled(run, recurrence, number, self.values[number]).compose(map_)
            return
        (part,), ((term,),) = recurrence.parts, recurrence.terms
        a = run.element(number, term.coefficient, 1.0)
        b = run.element(number, recurrence.constants[0], 0.0)
        (mul,), (add,) = map_.coefficients, map_.added
        compose_affine(run.block, a, b, mul, add, part in run.sums_first)

    def keep(self, run: ChunksRun) -> None:
        w = run.w
        number = w.apply("quotient", run.i, w.constant(self.block, INT64))
        for past in run.records.ends:
            part, row = past
            if part in run.sums_first:
                value = run.w.copy(run.kept[part][0])
            else:
                value = run.histories[part].real(run.n + row if run.reverse else row)
            place = run.records.end(past, number, run.steps, self.block)
            w.store(run.memory, place, value)

    def decide(self, then: Then) -> Value:
        """Return one chunk where coefficients do not decay fast enough."""
        w, chunks = then.w, then.chunks
        window = self.bound(w, then.steps, chunks, w.constant(1, INT64))
        blocks = w.apply("quotient", window, w.constant(BLOCKS_OF_A_CHUNK * self.block, INT64))
        most = w.cast(blocks, "float64")
        fast: Value = w.constant(True, Type("bool"))
        for number in range(len(self.values)):
            mul = then.word(f"mul{number}", chunks - 1, FLOAT64)
            fast = fast & (blocks_to_forget(w, mul) <= most)
        return w.select(fast, chunks, 1)

    def is_right(self, then: Then, chunk: Value) -> Value:
        w = then.w
        found = then.word("known", chunk).differs(0)
        # Where the chunk was not run, nothing of this may have been written.
        forgotten = w.select(found, then.word("forgotten", chunk), 0)
        for number, values in enumerate(self.values):
            ends, starts = [], []
            for past in values:
                found = found & (abs(then.after(past, chunk - 1)) < float("inf"))
                place = then.records.end(past, forgotten, then.steps, self.block)
                ends.append(w.cast(then.value(past, place), "float64"))
                starts.append(w.cast(then.before(past, chunk), "float64"))
            end, start = _largest(w, ends), _largest(w, starts)
            if self.recurrences[number].family == "affine in squares":
                end, start = end * end, start * start
            found = found & is_forgotten(w, then.word(f"mul{number}", chunk, FLOAT64), end, start)
        return found


class _Map:
    """An affine map of some values, at first the identity."""

    def __init__(self, w: Writer, count: int) -> None:
        self.w, self.count = w, count
        self.coefficients: list[Local] = [
            w.local(float(i == k), FLOAT64) for i in range(count) for k in range(count)
        ]
        self.added: list[Local] = [w.local(0.0, FLOAT64) for _ in range(count)]

    def coefficient(self, i: int, k: int) -> Local:
        return self.coefficients[i * self.count + k]

    def is_small(self) -> Value:
        found: Value = self.w.constant(True, Type("bool"))
        for local in self.coefficients:
            found = found & (abs(self.w.copy(local)) <= SMALL)
        return found


class _Coupled:
    """Composes a map with the steps of a block that read several values.

    The map of the block is where it takes unit vectors: column `k` is that of value `k`, the last
    column that of zeros, with the constants.
    """

    def __init__(
        self, run: ChunksRun, recurrence: Recurrence, number: int, values: list[Past]
    ) -> None:
        self.run, self.w, self.recurrence, self.number = run, run.w, recurrence, number
        # By part, and how far back.
        self.values = [(part, run.back(part, row)) for part, row in values]

    def compose(self, map_: _Map) -> None:
        w, count = self.w, len(self.values)
        columns = [
            [w.local(float(i == k), FLOAT64) for i in range(count)] for k in range(count + 1)
        ]
        with w.loop(0, self.run.n) as t:
            self.step(columns, self.run.block.step(t))
        places = range(count)
        for i in places:
            total: Value = w.copy(map_.added[i])
            for k in places:
                total = w.fma(w.copy(map_.coefficient(i, k)), w.copy(columns[count][k]), total)
            w.assign(map_.added[i], total)
        products = {}
        for i in places:
            for k in places:
                product: Value = w.constant(0.0, FLOAT64)
                for m in places:
                    product = w.fma(w.copy(map_.coefficient(i, m)), w.copy(columns[k][m]), product)
                products[i, k] = product
        for (i, k), product in products.items():
            w.assign(map_.coefficient(i, k), product)

    def step(self, columns: list[list[Local]], j: Value) -> None:
        """Write one step of all columns; values move on to be those of one step earlier."""
        w, recurrence = self.w, self.recurrence
        used = {term.coefficient for terms in recurrence.terms for term in terms}
        read: dict[int | None, Value] = {}
        for k in sorted(k for k in {*used, *recurrence.constants} if k is not None):
            items: Items = self.run.elements[self.number, k]
            read[k] = w.cast(items.real(j), "float64")
        for place, column in enumerate(columns):
            new: dict[int, Value] = {}
            rows = zip(recurrence.parts, recurrence.terms, recurrence.constants, strict=True)
            for part, terms, constant in rows:
                total: Value = w.constant(0.0, FLOAT64)
                if constant is not None and place == len(self.values):
                    total = read[constant]
                for term in terms:
                    value = w.copy(column[self.values.index((term.part, -term.tap))])
                    if term.coefficient is None:
                        total = total + value
                    else:
                        total = w.fma(read[term.coefficient], value, total)
                new[part] = total
            for i, (part, back) in reversed(list(enumerate(self.values))):
                w.assign(column[i], new[part] if back == 1 else w.copy(column[i - 1]))


class AllSteps:
    """Composes all steps before a chunk: extremes, sums, and logarithms of sums."""

    names: Sequence[str] = ()

    def __init__(self, run: ChunksRun) -> None:
        self.recurrences = run.loop.op.recurrences
        self.block = run.size
        self.share = 1 - composing_cost(run.loop.op)

    def ends(self) -> int:
        return 0

    def probes(self) -> bool:
        return False

    def bound(self, w: Writer, steps: Value, chunks: Value, k: Value) -> Value:
        """Write chunks of one block and a share of the rest, each shorter than the one before."""
        shares, done, share = (w.local(number, FLOAT64) for number in (0.0, 0.0, 1.0))
        with w.loop(0, chunks) as m:
            both = w.copy(shares) + w.copy(share)
            w.assign(shares, both)
            w.assign(done, w.select(m < k, both, w.copy(done)))
            w.assign(share, w.copy(share) * self.share)
        rest = w.cast(steps - chunks * self.block, "float64")
        own = w.cast(rest * (w.copy(done) / w.copy(shares)), "int64")
        return (w.apply("quotient", own, w.constant(self.block, INT64)) + k) * self.block

    def compose(self, run: ChunksRun) -> Value:
        """Write the composition of all steps before a chunk."""
        w = run.w
        composed = [self.value(run, recurrence) for recurrence in self.recurrences]
        fine = w.local(True, Type("bool"))
        i = w.local(0, INT64)
        with w.loop_while(lambda: w.copy(fine) & (w.copy(i) < run.first)):
            run.compose_block(w.copy(i))
            for number, (compose, _) in enumerate(composed):
                w.assign(fine, w.copy(fine) & compose(number))
            w.assign(i, w.copy(i) + self.block)
        for recurrence, (_, value) in zip(self.recurrences, composed, strict=True):
            run.find((recurrence.parts[0], 0), value())
        return w.copy(fine)

    def value(
        self, run: ChunksRun, recurrence: Recurrence
    ) -> tuple[Callable[[int], Value], Callable[[], Value]]:
        """Return what composes a recurrence with a block, and what gives the value in the end."""
        w, part, family = run.w, recurrence.parts[0], simple_family(recurrence)
        first = run.first_value((part, 0))
        assert isinstance(first, Value)
        k = recurrence.constants[0]
        if family in ("maximum", "minimum"):
            local = w.local(first)

            def extreme(number: int) -> Value:
                b = run.element(number, k, 0.0)
                return compose_extreme(run.block, b, local, family == "maximum")

            return extreme, lambda: w.copy(local)
        wide = w.local(w.cast(first, "float64"))
        if family == "sum":
            return (
                lambda number: compose_sum(run.block, run.element(number, k, 0.0), wide),
                lambda: w.copy(wide),
            )
        total = w.local(1.0, FLOAT64)
        work = run.buffers.span(run.dtypes[part], self.block)
        coefficient = recurrence.terms[0][0].coefficient

        def logs(number: int) -> Value:
            b = run.element(number, k, 0.0)
            a = None if coefficient is None else run.elements[number, coefficient]
            return compose_logs(run.block, a, b, work, wide, total)

        return logs, lambda: w.copy(wide) + log_of(w, w.copy(total))

    def keep(self, run: ChunksRun) -> None:
        pass

    def decide(self, then: Then) -> Value:
        return then.chunks

    def is_right(self, then: Then, chunk: Value) -> Value:
        found = then.word("known", chunk).differs(0)
        for recurrence in self.recurrences:
            past = (recurrence.parts[0], 0)
            end, start = then.after(past, chunk - 1), then.before(past, chunk)
            same = end.equals(start)
            if simple_family(recurrence) in ("log-affine", "sum"):
                finite = (abs(end) < float("inf")) & (abs(start) < float("inf"))
                same = same | finite
            found = found & same
        return found
