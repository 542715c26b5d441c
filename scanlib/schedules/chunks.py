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
those after it in the end, with sums of its own, and whether it was run. The rows before a chunk are
the last ones of the chunk before, which another thread writes: so states are scanned in a buffer,
from which the rows of a traced one are copied.
"""

from pytensor.configdefaults import config

from scanlib.kernels.language import BOOL, INT64, Kernel, Type, Value
from scanlib.kernels.scalars import Number, added, real
from scanlib.kernels.spans import Cell, load_number, store_number
from scanlib.recurrences.trust import WORDS
from scanlib.schedules.blocks import BlocksRun
from scanlib.schedules.elementwise import LAST, RUN, ElemwiseLoop
from scanlib.schedules.loop_kernels import write_result

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
        self.dtypes = {part: self.dtype_of(part) for part in self.nexts}
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
        return self.workspace, self.own + place

    def is_direct(self, part: int) -> bool:
        """Return False: rows before a chunk are written by another thread."""
        return False

    def keeps_latest(self, part: int) -> bool:
        return True

    # The kernel

    def kernel(self) -> Kernel:
        w, words = self.w, self.words
        self.steps = self.out.number(words.steps, "steps")
        own = self.out.number(words.part, "part")
        self.chunks = self.out.number(words.chunks, "chunks")
        self.is_last_round = self.out.number(words.job, "job").differs(RUN)
        self.prepare_buffers()
        self.write_constants()
        with w.when(own.equals(0) & ~self.is_last_round):
            for (part, row), place in self.before.items():
                behind = self.reverse and self.is_traced(part)
                found = BlocksRun.place_of_value(self, part, self.steps + row if behind else row)
                value = load_number(w, self.dtypes[part], *found)
                store_number(w, self.workspace, place, value)
        end = w.select(self.is_last_round, self.chunks, own + 1)
        with w.loop(w.select(self.is_last_round, 1, own), end) as self.chunk:
            self.own = self.chunk * self.record
            self.first = self.bound(self.chunk)
            last = self.bound(self.chunk + 1)
            self.last = w.select((self.chunk + 1).equals(self.chunks), self.steps, last)
            # Whether it was run from the values that the chunk before it ends with, which are the
            # values before it from now on.
            is_done = w.local(False, BOOL)
            with w.when(self.is_last_round):
                was_run = w.load(INT64, self.workspace, self.own + self.known).differs(0)
                w.assign(is_done, self.keep_values(self.own - self.record) & was_run)
            with w.when(~w.copy(is_done)):
                w.store(self.workspace, self.own + self.known, w.constant(0, INT64))
                self.write_runs(self.is_last_round | self.chunk.equals(0))
        with w.when(self.is_last_round) as choice:
            self.write_last_values()
        with w.otherwise(choice):
            self.out.write_word(words.job, LAST)
        write_result(self, self.steps, self.steps)
        return self.finished()

    def bound(self, k: Value) -> Value:
        """Write where chunk `k` begins."""
        w, size = self.w, self.w.constant(self.size, INT64)
        return w.apply("quotient", w.apply("quotient", self.steps * k, self.chunks), size) * size

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
                same = self.keep_values(self.own)
                w.assign(back, w.copy(back) << now)
                again = w.select(w.copy(back) > most, 3, w.constant(0, INT64))
                w.assign(run, w.select(now.equals(0), 1, w.select(same, 2, again)))
            with w.otherwise(choice):
                w.store(self.workspace, self.own + self.known, w.constant(1, INT64))
                w.assign(run, 3)

    def start_from(self, past: Past, place: int, now: Value) -> None:
        """Write the latest value before a run."""
        w = self.w
        value = real(load_number(w, self.dtypes[past[0]], self.workspace, self.own + place))
        if past[0] not in self.nexts:  # a sum of its own
            value = w.select(self.chunk.equals(0), value, w.constant(0, value.type))
        else:
            value = w.select(self.guesses, w.cast(now, value.type.dtype), value)
        store_number(w, self.workspace, self.own + self.after[past], value)

    def keep_values(self, record: Value) -> Value:
        """Write that the latest values of a record are those before the chunk.

        Return whether they were, bit by bit.
        """
        w, same = self.w, self.w.as_value(True, BOOL)
        for past, place in self.before.items():
            if past[0] not in self.nexts:
                continue
            word = Type(WORDS[self.dtypes[past[0]]])
            value = w.load(word, self.workspace, record + self.after[past])
            same = same & value.equals(w.load(word, self.workspace, self.own + place))
            w.store(self.workspace, self.own + place, value)
        return same

    # One block

    def write_map(self) -> None:
        with self.w.when(~self.guesses):
            super().write_map()

    def move_on(self) -> None:
        super().move_on()
        w = self.w
        with w.when(~self.guesses):
            for part in filter(self.is_traced, self.depths):
                history, own = self.history_of(part).at(0), self.histories[part].at(0)
                to, of = (w.offset(k.pointer, k.start) for k in (history, own))
                w.move(to, of, self.n * own.itemsize)

    # After all chunks

    def write_last_values(self) -> None:
        """Write the results of all chunks: the last values, and the sums of sums."""
        w = self.w

        def value_after(past: Past, chunk: Value) -> Number:
            place = chunk * self.record + self.after[past]
            return load_number(w, self.dtypes[past[0]], self.workspace, place)

        for past in self.pasts:
            part, row = past
            if self.is_traced(part):
                continue
            value = value_after(past, self.chunks - 1)
            if part not in self.nexts:
                total = Cell(w, value_after(past, w.constant(0, INT64)))
                with w.loop(1, self.chunks) as k:
                    total.value = added(total.value, value_after(past, k))
                value = total.value
            store_number(w, *BlocksRun.place_of_value(self, part, row), value)
