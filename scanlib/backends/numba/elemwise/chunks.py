"""Blocks of steps of one channel, in chunks of the steps, each in a thread of its own.

The first thread runs the first chunk. Every other one composes steps before its chunk, which gives
the value from which it runs the chunk as one thread would: see `decays`, where a few steps are
enough, and `prefixes`, where composing all of them is cheap. A chunk whose value is not found so is
run after the one before it. So is one whose value turns out not to be what counts, once the chunk
before it has been run. How the steps are cut depends on the flags and their number alone, and what
is run again on the values: results are the same, bit by bit, at every run.

A traced state is scanned where its history is stored. The rows before a chunk are the last ones of
the chunk before, which another thread writes; so the first block of a chunk is scanned in a buffer.

In the code, ``before0_1[k]`` is the last value of the first part before chunk `k`, ``before0_2[k]``
the one before that, where a step reads it, and ``after0_1[k]`` the last value of the chunk.
"""

from __future__ import annotations

from collections.abc import Callable

from pytensor.configdefaults import config

from scanlib.backends.numba import threads
from scanlib.backends.numba.elemwise.block import BlockWriter
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.parts import BLOCKS_OF_A_CHUNK

# What the function of a chunk does.
PROBE, RUN, AGAIN, DONE = range(4)


class ChunkWriter(BlockWriter):
    """Writes an elementwise loop of one channel in chunks of blocks of steps."""

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        self.buffers: list[str] = []
        n = self.signature.n_states
        self.sums = [n + i for i, is_sum in enumerate(self.layout.sums) if is_sum]
        self.dtypes = {
            part: self.emitter._dtype(
                self.inner.taps[part][0] if part < n else self.inner.carries[part - n]
            )
            for part in [*self.depths, *self.sums]
        }
        self.pasts = [(part, back) for part in self.dtypes for back in self.backs(part)]

    def backs(self, part: int) -> range:
        """Return how far back the values of a part are that a step reads."""
        return range(1, self.depths.get(part, 1) + 1)

    def row_before(self, part: int, back: int, step: str) -> str:
        """Return where, in a history, the value is that a part had `back` steps before a step."""
        depth = self.depths[part]
        return f"steps - 1 - {step} + {back}" if self.reverse else f"{step} + {depth - back}"

    def kept_row(self, part: int, back: int) -> int:
        """Return where it is among the rows of a state that is not traced."""
        return back - 1 if self.reverse else self.depths[part] - back

    # What kinds of chunks differ in

    def write_maps(self) -> None:
        """Write the composition of steps before a chunk, and the value before it."""
        raise NotImplementedError

    def write_cuts(self) -> None:
        """Write how the steps are cut."""
        raise NotImplementedError

    def write_first_job(self) -> None:
        """Write what is called first."""
        raise NotImplementedError

    def is_right(self) -> str:
        """Return the test whether a chunk was run from what the one before it ends with."""
        raise NotImplementedError

    def own(self, text: str) -> None:
        self.buffers.append(text)

    def write(self) -> tuple[Callable, str | None]:
        self.write_checks()
        self.write_storage()
        outside, self.source.lines = self.source.lines, []
        self.write_chunk()
        inside, self.source.lines = self.source.lines, outside
        if not self.source.cacheable:
            # It calls what may be Python, which a thread must not.
            return BlockWriter(self.lowered).write()
        self.write_bounds()
        own = {f"c{i}" for i in range(self.signature.n_carries)}
        own |= {f"h{i}" for i, untraced in enumerate(self.signature.untraced) if untraced}
        shared = threads.shared_names(outside, self.arguments, inside)
        arguments = [name for name in shared if name not in own]
        self.source.lines = inside
        function, key = self.source.compile("scan_chunk", ["k", "parts", *arguments], self.version)
        self.source.lines = outside
        assert key is not None
        most = config.scanlib__threads
        call = threads.in_threads(function, key, most)
        name = self.source.function(call, f"{threads.VERSION} {most} {key}", "threads")
        self.write_jobs(f"{name}(together, ({', '.join(arguments)},))")
        self.write_last_values()
        self.source.line("i = steps")
        self.write_return()
        return self.source.compile("scan_loop", self.arguments, self.version)

    # One chunk

    def write_chunk(self) -> None:
        """Write the function that composes the steps before a chunk, and runs it."""
        line = self.source.line
        line("chunk = first_chunk + k")
        for text in self.buffers:
            line(text)
        self.source.object("unshared", threads.unshared)
        for part in self.depths:
            if self.is_direct(part):
                line(f"G{part} = np.empty(longest + {self.depths[part]}, {self.dtypes[part]})")
                line(f"h{part} = unshared(h{part})")
        for i in range(self.signature.n_outputs):
            line(f"z{i} = unshared(z{i})")
        line("runs = True")
        with self.source.block(f"if job == {PROBE} or chunk > 0 and job == {RUN}:"), self.scope():
            self.write_maps()
        with self.source.block("if runs:"), self.scope():
            self.write_run()

    def write_run(self) -> None:
        """Write the run of a chunk from the values before it to those after it."""
        line, n = self.source.line, self.signature.n_states
        self.write_constants()
        for part, dtype in self.dtypes.items():
            if part < n and not self.is_direct(part):
                line(f"h{part} = np.empty({self.depths[part]}, {dtype})")
        for part, back in self.pasts:
            value = f"before{part}_{back}[chunk]"
            if part >= n:
                line(f"c{part - n} = {value}")
            elif not self.is_direct(part):
                line(f"h{part}[{self.kept_row(part, back)}] = {value}")
        line("first, last = bounds[chunk], bounds[chunk + 1]")
        self.write_blocks("first", "last")
        for part, back in self.pasts:
            line(f"after{part}_{back}[chunk] = {self.last_value(part, back, 'last')}")

    def last_value(self, part: int, back: int, step: str) -> str:
        """Return the value that a part had `back` steps before a step that comes next."""
        n = self.signature.n_states
        if part >= n:
            return f"c{part - n}"
        if self.is_direct(part):
            return f"h{part}[{self.row_before(part, back, step)}]"
        return f"h{part}[{self.kept_row(part, back)}]"

    def write_view_of_history(self, part: int) -> None:
        with self.source.block("if i == first:"):
            depth = self.depths[part]
            self.source.line(f"H{part} = G{part}[:n + {depth}]")
            for back in self.backs(part):
                place = f"n + {back - 1}" if self.reverse else f"{depth - back}"
                self.source.line(f"H{part}[{place}] = before{part}_{back}[chunk]")
        with self.source.block("else:"):
            super().write_view_of_history(part)

    def move_on(self) -> None:
        super().move_on()
        for part, depth in self.depths.items():
            shift = 0 if self.reverse else depth
            if self.is_direct(part):
                with self.source.block("if i == first:"), self.source.block("for j in range(n):"):
                    self.source.line(f"h{part}[low + j + {shift}] = G{part}[j + {shift}]")

    # All chunks

    def write_bounds(self) -> None:
        """Write how the steps are cut, and the arrays that chunks read and write."""
        line = self.source.line
        least = max(config.scanlib__parallel_steps, BLOCKS_OF_A_CHUNK * self.block)
        line(f"chunks = max(1, min({config.scanlib__threads}, steps // {least}))")
        line("bounds = np.empty(chunks + 1, np.int64)")
        self.write_cuts()
        line("bounds[chunks] = steps")
        line("known = np.empty(chunks, np.bool_)")
        for part, back in self.pasts:
            line(f"before{part}_{back} = np.empty(chunks, {self.dtypes[part]})")
            line(f"after{part}_{back} = np.empty(chunks, {self.dtypes[part]})")
        self.write_first_job()

    def write_first_values(self) -> None:
        """Write the values before the first chunk, and those of the sums before all others."""
        for part, back in self.pasts:
            if part in self.sums:
                with self.source.block("for k in range(chunks):"):
                    self.source.line(f"before{part}_1[k] = 0")
            self.source.line(f"before{part}_{back}[0] = {self.last_value(part, back, '0')}")

    def write_jobs(self, call: str) -> None:
        """Write the calls: all chunks at the same time, then some once more."""
        with self.source.block(f"while job != {DONE}:"):
            self.source.line(call)
            self.write_next_job()

    def write_next_job(self) -> None:
        """Write which chunk is run once more, if there is one."""
        line = self.source.line
        line(f"chunk = 1 if job == {RUN} else first_chunk + 1")
        with self.source.block(f"while chunk < chunks and ({self.is_right()}):"):
            line("chunk += 1")
        line(f"job, first_chunk, together = {AGAIN}, chunk, 1")
        with self.source.block("if chunk < chunks:"):
            for part, back in self.pasts:
                if part in self.depths:
                    line(f"before{part}_{back}[chunk] = after{part}_{back}[chunk - 1]")
        with self.source.block("else:"):
            line(f"job = {DONE}")

    def write_last_values(self) -> None:
        line, n = self.source.line, self.signature.n_states
        for part, back in self.pasts:
            if part in self.sums:
                line(f"c{part - n} = after{part}_1[0]")
                with self.source.block("for k in range(1, chunks):"):
                    total = f"c{part - n} + after{part}_1[k]"
                    line(f"c{part - n} = {self.dtypes[part]}({total})")
            elif part >= n or not self.is_direct(part):
                line(f"{self.last_value(part, back, 'steps')} = after{part}_{back}[chunks - 1]")
