"""Chunks of the steps in threads of their own, where coefficients decay.

For affine recurrences whose elements depend on no state. A thread composes the steps before its
chunk, the last one first, until their map is a constant (see `compose`): that is the value before
its chunk. It was not what counts, and the chunk is run once more, if

* the last value before it is not finite: composing may have hidden an overflow;
* the value before the composed steps is so large that it was not yet forgotten.

For that, values at the ends of all blocks are kept. Before threads are started, one block tells
whether the coefficients decay fast enough. Where they do not, as in a random walk, composing all
steps would take as long as it saves, and one thread runs the loop.
"""

from __future__ import annotations

from scanlib.backends.numba.elemwise import compose
from scanlib.backends.numba.elemwise.chunks import PROBE, RUN, ChunkWriter
from scanlib.ops.parts import BLOCKS_OF_A_CHUNK


class DecayWriter(ChunkWriter):
    """Writes chunks of affine recurrences whose coefficients decay."""

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

    def write_views(self) -> None:
        super().write_views()
        for part in self.maps:
            value = f"H{part}[{'n' if self.reverse else '0'}]"
            value = f"kept{part}" if part in self.sums_first else value
            self.source.line(f"ends{part}[i // {self.block}] = {value}")

    def write_cuts(self) -> None:
        line = self.source.line
        with self.source.block("for k in range(chunks):"):
            line(f"bounds[k] = steps * k // chunks // {self.block} * {self.block}")

    def write_first_job(self) -> None:
        line = self.source.line
        line(f"window = bounds[1] // {BLOCKS_OF_A_CHUNK * self.block} * {self.block}")
        line("forgotten = np.empty(chunks, np.int64)")
        for part in self.maps:
            line(f"mul{part} = np.empty(chunks, np.float64)")
            line(f"ends{part} = np.empty(steps // {self.block} + 1, {self.dtypes[part]})")
        line(f"job, first_chunk, together = {PROBE}, chunks - 1, 1")
        with self.source.block("if chunks == 1:"):
            line(f"job = {RUN}")
            self.write_first_values()

    def write_next_job(self) -> None:
        with self.source.block(f"if job == {PROBE}:"):
            self.write_decision()
        with self.source.block("else:"):
            super().write_next_job()

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
