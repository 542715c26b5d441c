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
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.parts import BLOCKS_OF_A_CHUNK


class DecayWriter(ChunkWriter):
    """Writes chunks of affine recurrences whose coefficients decay.

    The map of recurrence `r` takes the values that its steps read, of all its parts, to as many
    values: its coefficients are ``M0_1_2`` (of recurrence 0, for value 1, that of value 2), and
    ``A0_1`` is what it adds.
    """

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        self.values = [
            [(part, back) for part in recurrence.parts for back in self.backs(part)]
            for recurrence in op.recurrences
        ]

    def coefficients(self, number: int) -> list[str]:
        places = range(len(self.values[number]))
        return [f"M{number}_{i}_{k}" for i in places for k in places]

    def write_maps(self) -> None:
        """Write the composition of the steps before a chunk."""
        line, numbers = self.source.line, range(len(self.values))
        self.write_constants()
        for number in numbers:
            for i in range(len(self.values[number])):
                line(f"A{number}_{i} = 0.0")
                for k in range(len(self.values[number])):
                    line(f"M{number}_{i}_{k} = {float(i == k)}")
        line("i = bounds[chunk]")
        line(f"lowest = i - {self.block} if job == {PROBE} else i - window")
        names = [name for number in numbers for name in self.coefficients(number)]
        small = " and ".join(f"abs({name}) <= {compose.SMALL!r}" for name in names)
        with self.source.block(f"while i > lowest and not ({small}):"):
            line(f"n = {self.block}")
            line("i -= n")
            line("low = steps - i - n" if self.reverse else "low = i")
            self.write_views_of_rows()
            for number in numbers:
                self.write_elements(number)
                self.write_composition(number)
        line(f"runs = job == {RUN} and {small}")
        line(f"known[chunk], forgotten[chunk] = runs, i // {self.block}")
        for number, recurrence in enumerate(self.lowered.recurrences):
            line(f"mul{number}[chunk] = {_largest(self.coefficients(number))}")
            square = recurrence.family == "affine in squares"
            for i, (part, back) in enumerate(self.values[number]):
                value = f"np.sqrt(A{number}_{i})" if square else f"A{number}_{i}"
                line(f"before{part}_{back}[chunk] = {value}")

    def write_composition(self, number: int) -> None:
        """Write the composition of a map with the steps of the block before it."""
        recurrence = self.lowered.recurrences[number]
        if len(self.values[number]) > 1 or len(recurrence.terms[0]) > 1:
            self.write_coupled_composition(number)
            return
        (part,), ((term,),) = recurrence.parts, recurrence.terms
        chosen = (term.coefficient, "1.0"), (recurrence.constants[0], "0.0")
        elements = [other if k is None else self.elements[number, k] for k, other in chosen]
        first = part in self.sums_first
        key = f"scanlib compose {self.reverse} {first} {compose.VERSION}"
        function = self.source.function(compose.COMPOSE[self.reverse, first], key)
        names = f"M{number}_0_0, A{number}_0"
        self.source.line(f"{names} = {function}({', '.join(elements)}, n, {names})")

    def write_coupled_composition(self, number: int) -> None:
        """Write it for several values: the map of the block is where it takes unit vectors.

        Column `k` is that of value `k`, the last column that of zeros, with the constants.
        """
        line, values = self.source.line, self.values[number]
        places, columns = range(len(values)), range(len(values) + 1)
        for k in columns:
            for i in places:
                line(f"v{k}_{i} = {float(i == k)}")
        with self.source.block("for t in range(n):"):
            line("j = n - 1 - t" if self.reverse else "j = t")
            self.write_step_of_columns(number, columns)
        for i in places:
            sums = [f"M{number}_{i}_{k} * v{len(values)}_{k}" for k in places]
            line(f"A{number}_{i} += {' + '.join(sums)}")
        for i in places:
            for k in places:
                products = [f"M{number}_{i}_{m} * v{k}_{m}" for m in places]
                line(f"p{i}_{k} = {' + '.join(products)}")
        for i in places:
            for k in places:
                line(f"M{number}_{i}_{k} = p{i}_{k}")

    def write_step_of_columns(self, number: int, columns: range) -> None:
        """Write one step of all columns; values move on to be those of one step earlier."""
        recurrence, values = self.lowered.recurrences[number], self.values[number]
        line = self.source.line
        used = {term.coefficient for terms in recurrence.terms for term in terms}
        for k in sorted(k for k in {*used, *recurrence.constants} if k is not None):
            name = self.elements[number, k]
            line(f"q{number}_{k} = np.float64({name if name[0] == 'e' else f'{name}[j]'})")
        for column in columns:
            new = {}
            rows = zip(recurrence.parts, recurrence.terms, recurrence.constants, strict=True)
            for part, terms, constant in rows:
                text = [
                    f"{'' if t.coefficient is None else f'q{number}_{t.coefficient} * '}"
                    f"v{column}_{values.index((t.part, -t.tap))}"
                    for t in terms
                ]
                if constant is not None and column == len(values):
                    text.append(f"q{number}_{constant}")
                new[part] = f"u{number}_{part}"
                line(f"{new[part]} = {' + '.join(text) or '0.0'}")
            for i, (part, back) in reversed(list(enumerate(values))):
                line(f"v{column}_{i} = {new[part] if back == 1 else f'v{column}_{i - 1}'}")

    def write_views(self) -> None:
        super().write_views()
        for part, depth in self.depths.items():
            for back in self.backs(part):
                place = f"n + {back - 1}" if self.reverse else f"{depth - back}"
                value = f"kept{part}" if part in self.sums_first else f"H{part}[{place}]"
                self.source.line(f"ends{part}_{back}[i // {self.block}] = {value}")

    def write_cuts(self) -> None:
        line = self.source.line
        with self.source.block("for k in range(chunks):"):
            line(f"bounds[k] = steps * k // chunks // {self.block} * {self.block}")

    def write_first_job(self) -> None:
        line = self.source.line
        line(f"window = bounds[1] // {BLOCKS_OF_A_CHUNK * self.block} * {self.block}")
        line("forgotten = np.empty(chunks, np.int64)")
        for number, values in enumerate(self.values):
            line(f"mul{number} = np.empty(chunks, np.float64)")
            for part, back in values:
                size = f"steps // {self.block} + 1"
                line(f"ends{part}_{back} = np.empty({size}, {self.dtypes[part]})")
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
        needed = [f"{blocks}(mul{number}[chunks - 1])" for number in range(len(self.values))]
        with self.source.block(
            f"if not max({', '.join(['0.0', *needed])}) <= window // {self.block}:"
        ):
            line("chunks = 1")
            line("bounds[1] = steps")
        line(f"job, first_chunk, together = {RUN}, 0, chunks")
        self.write_first_values()

    def is_right(self) -> str:
        key = f"scanlib forgotten {compose.VERSION}"
        function = self.source.function(compose.is_forgotten, key)
        tests = ["known[chunk]"]
        for number, recurrence in enumerate(self.lowered.recurrences):
            pasts = [f"{part}_{back}" for part, back in self.values[number]]
            tests += [f"np.isfinite(after{past}[chunk - 1])" for past in pasts]
            ends = _largest([f"np.float64(ends{past}[forgotten[chunk]])" for past in pasts])
            starts = _largest([f"np.float64(before{past}[chunk])" for past in pasts])
            if recurrence.family == "affine in squares":
                ends, starts = f"{ends} ** 2", f"{starts} ** 2"
            tests.append(f"{function}(mul{number}[chunk], {ends}, {starts})")
        return " and ".join(tests)


def _largest(names: list[str]) -> str:
    """Return the largest size of some numbers; NaN if the first is."""
    sizes = [f"abs({name})" for name in names]
    return sizes[0] if len(sizes) == 1 else f"max({', '.join(sizes)})"
