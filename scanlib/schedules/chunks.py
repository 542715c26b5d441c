"""Blocks of steps of one channel, in chunks of the steps, each in a thread of its own.

The first thread runs the first chunk. Every other one guesses the values before its chunk: it runs
some blocks of steps before it, of which nothing is kept, from zeros and again from ones. Where both
end with the same values, bit by bit, these are where the chunk starts; where they do not, twice as
many blocks are run, up to an eighth of a chunk. A chunk without such values is run after the one
before it. So is one that was run from other values than the chunk before it turns out to end with,
bit by bit. The steps are cut between blocks: results are those of one thread, but for sums over the
steps, which each chunk has of its own.

That pays where states forget those long before them, as those of affine recurrences do whose
coefficients are below one. Where they do not forget, the first thread is not kept waiting, and the
chunks follow one another.

**Memory.** A chunk has a record in the workspace: the values before it, its latest ones, which are
those after it in the end, with sums of its own, and whether it was run. A traced state is scanned
where its history is stored. The rows before a chunk are the last ones of the chunk before, which
another thread writes: so the first block of a chunk, and those before it, are scanned in a buffer.
"""

from __future__ import annotations

from pytensor.configdefaults import config

from scanlib.kernels.language import BOOL, INT64, POINTER, Kernel, Type, Value, Writer
from scanlib.kernels.program import AGAIN, TableKernel
from scanlib.kernels.scalars import Number, added
from scanlib.kernels.spans import Span, load_number, store_number
from scanlib.recurrences.trust import WORDS
from scanlib.schedules.blocks import BlocksRun
from scanlib.schedules.elementwise import AFRESH, RUN, ElemwiseLoop, write_result

LEAST_BLOCKS = 4  # of a chunk
BLOCKS_TO_GUESS = 8  # blocks of a chunk for each one before it that is run
_LINES = 128  # bytes: what two threads write lies so far apart
_WORD = 8

Past = tuple[int, int]  # a part, and which of its latest rows, in the order of memory


class ChunksRun(BlocksRun):
    """Writes the kernel that runs one chunk, from values that it guesses or is given."""

    def __init__(self, loop: ElemwiseLoop) -> None:
        super().__init__(loop)
        n = loop.signature.n_states
        self.dtypes = {part: self.dtype_of(part) for part in self.depths}
        self.dtypes |= {n + i: self.dtype_of(n + i) for i in self.sums}
        self.pasts: list[Past] = [
            (part, row) for part in self.dtypes for row in range(self.depths.get(part, 1))
        ]
        # Where they are in the record of a chunk.
        self.before = {past: _WORD * k for k, past in enumerate(self.pasts)}
        self.after = {past: _WORD * (len(self.pasts) + k) for k, past in enumerate(self.pasts)}
        self.known = 2 * _WORD * len(self.pasts)
        self.record = -(-(self.known + _WORD) // _LINES) * _LINES
        loop.chunks = config.scanlib__threads
        loop.least_chunk = max(config.scanlib__parallel_steps, LEAST_BLOCKS * self.size)
        loop.extra_bytes = self.record * loop.chunks

    # Memory

    def own_memory(self) -> tuple[Value, Value]:
        address, place = super().own_memory()
        return address, place + self.record * self.loop.chunks

    def output_of_sums(self, part: int) -> int | None:
        """Return None: what is guessed is written to no output."""
        return None

    def place_of_value(self, part: int, row: Value | int) -> tuple[Value, Value | int]:
        place = self.w.as_value(row, INT64) * _WORD + self.after[part, 0]
        return self.memory, self.own + place

    def history_of(self, part: int) -> Span:
        """Return the history, or a buffer with the values before the block."""
        w, dtype = self.w, self.dtypes[part]
        own, history = self.first_rows[part], super().history_of(part)
        with w.when(self.is_apart):
            for row in range(self.depths[part]):
                value = load_number(w, dtype, *self.place_of_value(part, row))
                own.store(self.n + row if self.reverse else row, value)
        pointer = w.select(self.is_apart, own.pointer, history.pointer)
        return Span(w, dtype, pointer, w.select(self.is_apart, own.start, history.start))

    # The kernel

    def kernel(self) -> Kernel:
        w, words = self.w, self.words
        self.steps = self.out.number(words.steps, "steps")
        self.memory = self.workspace
        self.chunk = self.out.number(words.part, "part")
        self.chunks = self.out.number(words.chunks, "chunks")
        self.prepare_buffers()
        self.first_rows = {
            part: self.buffers.span(self.dtypes[part], self.size + depth)
            for part, depth in self.depths.items()
            if self.is_direct(part)
        }
        self.own = self.chunk * self.record
        self.first = self.bound(self.chunk)
        last = self.bound(self.chunk + 1)
        self.last = w.select((self.chunk + 1).equals(self.chunks), self.steps, last)
        self.write_constants()
        is_first = self.chunk.equals(0)
        with w.when(is_first):
            for past, place in self.before.items():
                store_number(w, self.memory, place, self.value_before(past, 0))
        w.store(self.memory, self.own + self.known, w.constant(0, INT64))
        self.write_runs(is_first | self.out.number(words.job, "job").equals(AFRESH))
        write_result(self, self.steps, self.steps)
        return self.finished()

    def bound(self, k: Value) -> Value:
        """Write where chunk `k` begins."""
        w, size = self.w, self.w.constant(self.size, INT64)
        return w.apply("quotient", w.apply("quotient", self.steps * k, self.chunks), size) * size

    def value_before(self, past: Past, n: Value | int) -> Number:
        """Return a row of a history before step `n`, or, without one, what `start` has put."""
        part, row = past
        at: Value | int = row
        if self.is_direct(part):
            at = (self.steps - n if self.reverse else n) + row
        found = BlocksRun.place_of_value(self, part, at)
        return load_number(self.w, self.dtypes[part], *found)

    def write_runs(self, is_known: Value) -> None:
        """Write the runs: those that guess, from zeros and from ones, and that of the chunk."""
        w = self.w
        apart = w.constant(BLOCKS_TO_GUESS * self.size, INT64)
        most = w.apply("quotient", self.bound(w.constant(1, INT64)), apart)
        # The number that a guess starts from, 2 for the chunk, 3 when there is nothing left to do.
        run, back = w.local(w.select(is_known, 2, w.constant(0, INT64))), w.local(1, INT64)
        with w.loop_while(lambda: w.copy(run) < 3):
            now = w.copy(run)
            self.guesses = now < 2
            for past, place in self.before.items():
                self.start_from(past, place, now)
            begin = self.first - w.select(self.guesses, w.copy(back) * self.size, 0)
            self.write_blocks(begin, w.select(self.guesses, self.first, self.last))
            with w.when(self.guesses) as choice:
                same = self.keep_values(w, self.memory, self.own, self.own)
                w.assign(back, w.copy(back) << now)
                again = w.select(w.copy(back) > most, 3, w.constant(0, INT64))
                w.assign(run, w.select(now.equals(0), 1, w.select(same, 2, again)))
            with w.otherwise(choice):
                self.write_values_after()
                w.store(self.memory, self.own + self.known, w.constant(1, INT64))
                w.assign(run, 3)

    def start_from(self, past: Past, place: int, now: Value) -> None:
        """Write the latest value before a run."""
        w = self.w
        value = load_number(w, self.dtypes[past[0]], self.memory, self.own + place)
        assert isinstance(value, Value)
        if past[0] not in self.depths:  # a sum of its own
            value = w.select(self.chunk.equals(0), value, w.constant(0, value.type))
        else:
            value = w.select(self.guesses, w.cast(now, value.type.dtype), value)
        store_number(w, self.memory, self.own + self.after[past], value)

    def keep_values(self, w: Writer, memory: Value, source: Value, target: Value) -> Value:
        """Write that the latest values of one record are those before the chunk of another.

        Return whether they were, bit by bit. Records are given by their places in `memory`.
        """
        same: Value = w.constant(True, BOOL)
        for past, place in self.before.items():
            if past[0] not in self.depths:
                continue
            word = Type(WORDS[self.dtypes[past[0]]])
            value = w.load(word, memory, source + self.after[past])
            same = same & value.equals(w.load(word, memory, target + place))
            w.store(memory, target + place, value)
        return same

    def write_values_after(self) -> None:
        """Write the last rows of histories to the record."""
        for past in self.pasts:
            if past[0] in self.first_rows:
                value = self.value_before(past, self.last)
                store_number(self.w, *self.place_of_value(*past), value)

    # One block

    def write_steps(self, i: Value, last: Value) -> None:
        self.is_apart = self.guesses | i.equals(self.first)
        super().write_steps(i, last)

    def write_map(self) -> None:
        with self.w.when(~self.guesses):
            super().write_map()

    def move_on(self) -> None:
        super().move_on()
        w = self.w
        for part, own in self.first_rows.items():
            depth = self.depths[part]
            with w.when(self.guesses) as choice:
                for row in range(depth):
                    value = own.load(w.constant(row, INT64) if self.reverse else self.n + row)
                    store_number(w, *self.place_of_value(part, row), value)
            with w.otherwise(choice), w.when(self.is_apart), w.loop(0, self.n) as j:
                place = j if self.reverse else j + depth
                BlocksRun.history_of(self, part).store(place, own.load(place))


class Then:
    """Writes the kernel that decides, after a round, what is run next."""

    def __init__(self, run: ChunksRun) -> None:
        self.run, self.loop = run, run.loop
        self.out = TableKernel("then")
        self.w, self.words = self.out.writer, run.words
        self.memory = self.out.word(self.words.workspace, POINTER, "workspace")
        self.chunks = self.out.number(self.words.chunks, "chunks")

    def kernel(self) -> Kernel:
        w, words, run = self.w, self.words, self.run
        job, part = self.out.number(words.job, "job"), self.out.number(words.part, "part")
        chunk = w.local(w.select(job.equals(RUN), 1, part + 1))
        with w.loop_while(lambda: w.copy(chunk) < self.chunks):
            place = w.copy(chunk) * run.record
            was_run = w.load(INT64, self.memory, place + run.known).differs(0)
            same = run.keep_values(w, self.memory, place - run.record, place)
            with w.when(~(was_run & same)):
                self.out.write_word(words.job, AFRESH)
                self.out.write_word(words.part, w.copy(chunk))
                self.out.write_word(words.parts, 1)
                w.end(AGAIN)
            w.assign(chunk, w.copy(chunk) + 1)
        self.write_last_values()
        return self.out.kernel()

    def value_after(self, past: Past, chunk: Value) -> Value:
        dtype, place = self.run.dtypes[past[0]], chunk * self.run.record + self.run.after[past]
        found = load_number(self.w, dtype, self.memory, place)
        assert isinstance(found, Value)
        return found

    def write_last_values(self) -> None:
        """Write the results of all chunks: the last values, and the sums of sums."""
        w, n = self.w, self.loop.signature.n_states
        for past in self.run.pasts:
            part, row = past
            if part < n and self.run.is_direct(part):
                continue
            name = f"h{part}" if part < n else f"c{part - n}"
            array = self.loop.arrays[name]
            data = self.out.word(self.words.outputs[array.number], POINTER, f"{name}_data")
            value = self.value_after(past, self.chunks - 1)
            if part not in self.run.depths:
                total = w.local(self.value_after(past, w.constant(0, INT64)))
                with w.loop(1, self.chunks) as k:
                    w.assign(total, added(w.copy(total), self.value_after(past, k)))
                value = w.copy(total)
            w.store(data, row * array.itemsize, value)
