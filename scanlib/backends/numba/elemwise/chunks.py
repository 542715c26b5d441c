"""Blocks of steps of one channel, in chunks of the steps, each in a thread of its own.

For affine recurrences whose elements depend on no state and whose coefficients decay. The first
thread runs the first chunk. Every other one composes the steps before its chunk, the last one
first, until their map is a constant (see `compose`): that is the value before its chunk, which it
then runs as one thread would. A chunk whose value is not found so is run after the one before it.
So is one whose value turns out not to be what counts, once the chunk before it has been run:

* the last value before it is not finite: composing may have hidden an overflow;
* the value before the composed steps is so large that it was not yet forgotten.

For that, values at the ends of all blocks are kept. How the steps are cut depends on the flags and
their number alone, and what is run again on the values: results are the same, bit by bit, at every
run. Before threads are started, one block tells whether the coefficients decay fast enough. Where
they do not, as in a random walk, composing all steps would take as long as it saves, and one thread
runs the loop.

A traced state is scanned where its history is stored. The row before a chunk is the last one of the
chunk before, which another thread writes; so the first block of a chunk is scanned in a buffer.
"""

from __future__ import annotations

from collections.abc import Callable

from pytensor.configdefaults import config

from scanlib.backends.numba import threads
from scanlib.backends.numba.elemwise import compose
from scanlib.backends.numba.elemwise.block import BlockWriter
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.parts import can_chunk

FORGETTING = 4  # a chunk's steps before it are composed up to one in so many of a chunk

# What the function of a chunk does.
PROBE, RUN, AGAIN, DONE = range(4)


def blocks_writer(op: ElemwiseScan) -> BlockWriter:
    """Return what writes a loop in blocks, in chunks where that is asked for and possible."""
    chunked = threads.wanted_threads() > 1 and can_chunk(op)
    return ChunkWriter(op) if chunked else BlockWriter(op)


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
        self.maps = [recurrence.parts[0] for recurrence in op.recurrences]

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
                line(f"G{part} = np.empty(longest + 1, {self.dtypes[part]})")
                line(f"h{part} = unshared(h{part})")
        for i in range(self.signature.n_outputs):
            line(f"z{i} = unshared(z{i})")
        line("runs = True")
        with self.source.block(f"if job == {PROBE} or chunk > 0 and job == {RUN}:"), self.scope():
            self.write_maps()
        with self.source.block("if runs:"), self.scope():
            self.write_run()

    def write_maps(self) -> None:
        """Write the composition of the steps before a chunk."""
        line = self.source.line
        self.write_constants()
        for part in self.maps:
            line(f"M{part}, A{part} = 1.0, 0.0")
        line("i = bounds[chunk]")
        line(f"lowest = i - {self.block} if job == {PROBE} else i - window")
        small = [f"abs(M{part}) <= {compose.SMALL!r}" for part in self.maps]
        with self.source.block(f"while i > lowest and not ({' and '.join(small)}):"):
            line(f"n = {self.block}")
            line("i -= n")
            line("low = steps - i - n" if self.reverse else "low = i")
            self.write_views_of_rows()
            for number in range(len(self.maps)):
                self.write_elements(number)
                self.write_composition(number)
        line(f"runs = job == {RUN} and {' and '.join(small)}")
        line(f"known[chunk], forgotten[chunk] = runs, i // {self.block}")
        for part, recurrence in zip(self.maps, self.lowered.recurrences, strict=True):
            square = recurrence.family == "affine in squares"
            line(f"mul{part}[chunk] = M{part}")
            line(f"before{part}[chunk] = {f'np.sqrt(A{part})' if square else f'A{part}'}")

    def write_composition(self, number: int) -> None:
        recurrence = self.lowered.recurrences[number]
        (part,), ((term,),) = recurrence.parts, recurrence.terms
        chosen = (term.coefficient, "1.0"), (recurrence.constants[0], "0.0")
        elements = [other if k is None else self.elements[number, k] for k, other in chosen]
        first = part in self.sums_first
        key = f"scanlib compose {self.reverse} {first} {compose.VERSION}"
        function = self.source.function(compose.COMPOSE[self.reverse, first], key)
        call = f"{function}({', '.join(elements)}, n, M{part}, A{part})"
        self.source.line(f"M{part}, A{part} = {call}")

    def write_run(self) -> None:
        """Write the run of a chunk from the values before it to those after it."""
        line, n = self.source.line, self.signature.n_states
        self.write_constants()
        for part, dtype in self.dtypes.items():
            if part >= n:
                line(f"c{part - n} = before{part}[chunk]")
            elif not self.is_direct(part):
                line(f"h{part} = np.empty(1, {dtype})")
                line(f"h{part}[0] = before{part}[chunk]")
        line("first, last = bounds[chunk], bounds[chunk + 1]")
        self.write_blocks("first", "last")
        for part in self.dtypes:
            value = f"c{part - n}" if part >= n else f"h{part}[0]"
            if self.is_direct(part):
                value = f"h{part}[{'steps - last' if self.reverse else 'last'}]"
            line(f"after{part}[chunk] = {value}")

    def write_views(self) -> None:
        super().write_views()
        for part in self.maps:
            value = f"H{part}[{'n' if self.reverse else '0'}]"
            value = f"kept{part}" if part in self.sums_first else value
            self.source.line(f"ends{part}[i // {self.block}] = {value}")

    def write_view_of_history(self, part: int) -> None:
        with self.source.block("if i == first:"):
            self.source.line(f"H{part} = G{part}[:n + 1]")
            place = "n" if self.reverse else "0"
            self.source.line(f"H{part}[{place}] = before{part}[chunk]")
        with self.source.block("else:"):
            super().write_view_of_history(part)

    def move_on(self) -> None:
        super().move_on()
        shift = 0 if self.reverse else 1
        for part in self.depths:
            if self.is_direct(part):
                with self.source.block("if i == first:"), self.source.block("for j in range(n):"):
                    self.source.line(f"h{part}[low + j + {shift}] = G{part}[j + {shift}]")

    # All chunks

    def write_bounds(self) -> None:
        """Write how the steps are cut, and the arrays that chunks read and write."""
        line = self.source.line
        least = max(config.scanlib__parallel_steps, FORGETTING * self.block)
        line(f"chunks = max(1, min({config.scanlib__threads}, steps // {least}))")
        line("bounds = np.empty(chunks + 1, np.int64)")
        with self.source.block("for k in range(chunks):"):
            line(f"bounds[k] = steps * k // chunks // {self.block} * {self.block}")
        line("bounds[chunks] = steps")
        line(f"window = bounds[1] // {FORGETTING * self.block} * {self.block}")
        line("known, forgotten = np.empty(chunks, np.bool_), np.empty(chunks, np.int64)")
        for part, dtype in self.dtypes.items():
            line(f"before{part} = np.empty(chunks, {dtype})")
            line(f"after{part} = np.empty(chunks, {dtype})")
        for part in self.maps:
            line(f"mul{part} = np.empty(chunks, np.float64)")
            line(f"ends{part} = np.empty(steps // {self.block} + 1, {self.dtypes[part]})")
        line(f"job, first_chunk, together = {PROBE}, chunks - 1, 1")
        with self.source.block("if chunks == 1:"):
            line(f"job = {RUN}")
            self.write_first_values()

    def write_first_values(self) -> None:
        """Write the values before the first chunk, and those of the sums before all others."""
        n = self.signature.n_states
        for part in self.dtypes:
            value = f"c{part - n}" if part >= n else f"h{part}[0]"
            if self.is_direct(part) and self.reverse:
                value = f"h{part}[steps]"
            if part in self.sums:
                with self.source.block("for k in range(chunks):"):
                    self.source.line(f"before{part}[k] = 0")
            self.source.line(f"before{part}[0] = {value}")

    def write_jobs(self, call: str) -> None:
        """Write the calls: the probe, all chunks at the same time, then some once more."""
        line = self.source.line
        with self.source.block(f"while job != {DONE}:"):
            line(call)
            with self.source.block(f"if job == {PROBE}:"):
                self.write_decision()
            with self.source.block("else:"):
                line(f"chunk = 1 if job == {RUN} else first_chunk + 1")
                with self.source.block(f"while chunk < chunks and ({self.is_right()}):"):
                    line("chunk += 1")
                line(f"job, first_chunk, together = {AGAIN}, chunk, 1")
                with self.source.block("if chunk < chunks:"):
                    for part in self.maps:
                        line(f"before{part}[chunk] = after{part}[chunk - 1]")
                with self.source.block("else:"):
                    line(f"job = {DONE}")

    def write_decision(self) -> None:
        """Write whether coefficients decay fast enough, and that one thread runs all if not."""
        line = self.source.line
        key = f"scanlib blocks to forget {compose.VERSION}"
        blocks = self.source.function(compose.blocks_to_forget, key)
        needed = [f"{blocks}(mul{part}[chunks - 1])" for part in self.maps]
        with self.source.block(
            f"if not max({', '.join(['0.0', *needed])}) <= window // {self.block}:"
        ):
            line("chunks = 1")
            line("bounds[1] = steps")
        line(f"job, first_chunk, together = {RUN}, 0, chunks")
        self.write_first_values()

    def is_right(self) -> str:
        """Return the test whether a chunk was run from what the one before it ends with."""
        key = f"scanlib forgotten {compose.VERSION}"
        function = self.source.function(compose.is_forgotten, key)
        tests = ["known[chunk]"]
        for part, recurrence in zip(self.maps, self.lowered.recurrences, strict=True):
            values = [f"ends{part}[forgotten[chunk]]", f"before{part}[chunk]"]
            if recurrence.family == "affine in squares":
                values = [f"np.float64({value}) ** 2" for value in values]
            tests.append(f"np.isfinite(after{part}[chunk - 1])")
            tests.append(f"{function}(mul{part}[chunk], {', '.join(values)})")
        return " and ".join(tests)

    def write_last_values(self) -> None:
        line, n = self.source.line, self.signature.n_states
        for part, dtype in self.dtypes.items():
            if part in self.sums:
                line(f"c{part - n} = after{part}[0]")
                with self.source.block("for k in range(1, chunks):"):
                    line(f"c{part - n} = {dtype}(c{part - n} + after{part}[k])")
            elif part >= n:
                line(f"c{part - n} = after{part}[chunks - 1]")
            elif not self.is_direct(part):
                line(f"h{part}[0] = after{part}[chunks - 1]")
