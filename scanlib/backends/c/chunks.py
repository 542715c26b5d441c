"""Blocks of steps of one channel, in chunks of the steps, each in a thread of its own.

The first thread runs the first chunk. Every other one composes steps before its chunk, which gives
the value from which it runs the chunk as one thread would: see `decays`, where a few steps are
enough, and `prefixes`, where composing all of them is cheap. A chunk whose value is not found so is
run after the one before it. So is one whose value turns out not to be what counts, once the chunk
before it has been run. How the steps are cut depends on the flags and their number alone, and what
is run again on the values. The numba backend does the same.

In the code, ``before0_1[k]`` is the last value of the first part before chunk `k`, ``before0_2[k]``
the one before that, where a step reads it, and ``after0_1[k]`` the last value of the chunk.
"""

from __future__ import annotations

from pytensor.configdefaults import config

from scanlib.backends.c.block import STACK, BlockPrinter
from scanlib.backends.c.source import added, c_type
from scanlib.ops.c_code import NODE_NAME as NODE
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.parts import BLOCKS_OF_A_CHUNK

# What the function of a chunk does.
PROBE, RUN, AGAIN = range(3)


class ChunkPrinter(BlockPrinter):
    """Writes an elementwise loop of one channel in chunks of blocks of steps."""

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        n = self.signature.n_states
        self.sums = [n + i for i, is_sum in enumerate(self.layout.sums) if is_sum]
        self.kept_parts = {
            part: c_type(
                self.inner.taps[part][0].type.dtype
                if part < n
                else self.inner.carries[part - n].type.dtype
            )
            for part in [*self.depths, *self.sums]
        }
        self.pasts = [(part, back) for part in self.kept_parts for back in self.backs(part)]

    def backs(self, part: int) -> range:
        """Return how far back the values of a part are that a step reads."""
        return range(1, self.depths.get(part, 1) + 1)

    def kept_row(self, part: int, back: int) -> int:
        """Return where such a value is among the rows before the first step, or the last ones."""
        return back - 1 if self.reverse else self.depths[part] - back

    def place_before(self, part: int, back: int) -> str:
        """Return where it is before a block, in what the block is scanned in."""
        return f"n + {back - 1}" if self.reverse else f"{self.depths[part] - back}"

    def fits(self) -> bool:
        """Whether buffers, now that all is written, are on the stack: threads raise no errors."""
        return self.bytes <= STACK

    # What kinds of chunks differ in

    def write_members(self) -> None:
        """Write the members of the struct of all chunks that this kind needs."""

    def write_maps(self) -> None:
        """Write the composition of steps before a chunk, and the value before it."""
        raise NotImplementedError

    def write_cuts(self) -> None:
        """Write how the steps are cut, and what comes before all threads."""
        raise NotImplementedError

    def is_right(self) -> str:
        """Return the test whether a chunk was run from what the one before it ends with."""
        raise NotImplementedError

    def write_struct(self) -> None:
        super().write_struct()
        most = config.scanlib__threads
        with self.source.block(f"struct {NODE}_chunks"):
            self.source.line(f"npy_intp bounds[{most + 1}];")
            self.source.line(f"bool known[{most}];")
            for part, back in self.pasts:
                names = f"before{part}_{back}[{most}], after{part}_{back}[{most}]"
                self.source.line(f"{self.kept_parts[part]} {names};")
            self.write_members()
        self.source.lines[-1] += ";"

    # One chunk

    def write_run(self) -> None:
        line = self.source.line
        arguments = f"{NODE}_data &data, {NODE}_chunks &chunks, npy_intp chunk, int job"
        with self.source.block(f"static int {NODE}_chunk({arguments})"), self.scalars.scope():
            self.write_numbers()
            start = len(self.source.lines)
            self.write_storage()
            self.write_constants()
            with self.source.block(f"if (job == {PROBE} || (job == {RUN} && chunk > 0))"):
                self.write_maps()
                line("if (!chunks.known[chunk]) return 0;")
            self.write_first_values()
            line("const npy_intp first = chunks.bounds[chunk], last = chunks.bounds[chunk + 1];")
            with self.source.block(f"for (npy_intp i = first; i < last; i += {self.block})"):
                line(f"const npy_intp n = last - i < {self.block} ? last - i : {self.block};")
                line(f"const npy_intp low = {'steps - i - n' if self.reverse else 'i'};")
                with self.scalars.scope():
                    self.write_block()
            self.write_values_after()
            line("return 0;")
            self.source.lines[start:start] = self.memory()

    def write_storage(self) -> None:
        n = self.signature.n_states
        for part, depth in self.depths.items():
            if part in self.sums_first:
                if self.output_of_sums(part) is None:
                    self.buffer(f"T{part}", self.dtype_of(part), self.block)
                self.source.line(f"{self.kept_parts[part]} kept{part};")
                continue
            letter = "G" if self.is_direct(part) else "B"
            self.buffer(f"{letter}{part}", self.dtype_of(part), self.block + depth)
        for part in self.sums:
            self.source.line(f"{self.kept_parts[part]} c{part - n};")
        for i, row in enumerate(self.inner.rows):
            self.buffer(f"R{i}", row.type.dtype, self.block)
        for number in range(len(self.op.recurrences)):
            self.write_buffers(number)

    def write_first_values(self) -> None:
        n = self.signature.n_states
        for part, back in self.pasts:
            value = f"chunks.before{part}_{back}[chunk]"
            if part in self.sums:
                self.source.line(f"c{part - n} = {value};")
            elif part in self.sums_first:
                self.source.line(f"kept{part} = {value};")
            elif not self.is_direct(part):
                self.source.line(f"B{part}[{self.kept_row(part, back)}] = {value};")

    def write_views(self) -> None:
        super().write_views()
        for part, back in self.pasts:
            if part in self.depths and self.is_direct(part):
                place = f"H{part}[{self.place_before(part, back)}]"
                value = f"chunks.before{part}_{back}[chunk]"
                self.source.line(f"if (i == first) {place} = {value};")

    def rows_of_history(self, part: int) -> str:
        return f"i == first ? G{part} : {super().rows_of_history(part)}"

    def move_on(self) -> None:
        super().move_on()
        for part, item in self.kept_parts.items():
            if part in self.depths and self.is_direct(part):
                shift = 0 if self.reverse else self.depths[part]
                target = f"({item} *)data.h{part} + low + {shift}"
                copy = f"memcpy({target}, G{part} + {shift}, n * sizeof({item}));"
                self.source.line(f"if (i == first) {copy}")

    def write_values_after(self) -> None:
        n = self.signature.n_states
        for part, back in self.pasts:
            if part in self.sums:
                value = f"c{part - n}"
            elif part in self.sums_first:
                value = f"kept{part}"
            elif self.is_direct(part):
                row = f"steps - last + {self.kept_row(part, back)}"
                row = row if self.reverse else f"last + {self.kept_row(part, back)}"
                value = f"(({self.kept_parts[part]} *)data.h{part})[{row}]"
            else:
                value = f"B{part}[{self.kept_row(part, back)}]"
            self.source.line(f"chunks.after{part}_{back}[chunk] = {value};")

    # All chunks

    def place(self, part: int, back: int) -> str:
        """Return where the results of a part are that has no history."""
        n, item = self.signature.n_states, self.kept_parts[part]
        if part >= n:
            return f"*({item} *)data.c{part - n}"
        return f"(({item} *)data.h{part})[{self.kept_row(part, back)}]"

    def write_start(self) -> None:
        line = self.source.line
        least = max(config.scanlib__parallel_steps, BLOCKS_OF_A_CHUNK * self.block)
        line(f"{NODE}_chunks chunks;")
        line(f"npy_intp count = steps / {least};")
        line(f"if (count > {config.scanlib__threads}) count = {config.scanlib__threads};")
        line("if (count < 1) count = 1;")
        self.write_cuts()
        self.write_values_before()
        line(f"const auto walk = [&](npy_intp k) {{ {NODE}_chunk(data, chunks, k, {RUN}); }};")
        line("if (count > 1) scanlib_in_threads(count, walk); else walk(0);")
        with self.source.block("for (npy_intp k = 1; k < count; k++)"):
            line(f"if ({self.is_right()}) continue;")
            for part, back in self.pasts:
                if part in self.depths:
                    names = f"{part}_{back}[k]", f"{part}_{back}[k - 1]"
                    line(f"chunks.before{names[0]} = chunks.after{names[1]};")
            line(f"{NODE}_chunk(data, chunks, k, {AGAIN});")
        self.write_last_values()
        line("data.taken = steps;")

    def write_values_before(self) -> None:
        """Write the values before the first chunk, and those of the sums before all others."""
        n = self.signature.n_states
        for part, back in self.pasts:
            item = self.kept_parts[part]
            if part in self.sums:
                self.source.line(
                    f"for (npy_intp k = 1; k < count; k++) chunks.before{part}_1[k] = 0;"
                )
            value = f"*(const {item} *)data.c{part - n}"
            if part < n:
                name = self.outer.initials[part]
                row = f"{self.kept_row(part, back)} * data.{name}_s[0]"
                value = f"*(const {item} *)(data.{name} + {row})"
            self.source.line(f"chunks.before{part}_{back}[0] = {value};")

    def write_last_values(self) -> None:
        n = self.signature.n_states
        for part, back in self.pasts:
            if part in self.sums:
                place, dtype = self.place(part, back), self.inner.carries[part - n].type.dtype
                total = added(place, f"chunks.after{part}_1[k]", dtype)
                self.source.line(f"{place} = chunks.after{part}_1[0];")
                self.source.line(f"for (npy_intp k = 1; k < count; k++) {place} = {total};")
            elif not self.is_direct(part):
                value = f"chunks.after{part}_{back}[count - 1]"
                self.source.line(f"{self.place(part, back)} = {value};")
