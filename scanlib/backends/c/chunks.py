"""Blocks of steps of one channel, in chunks of the steps, each in a thread of its own.

For affine recurrences whose elements depend on no state and whose coefficients decay. The first
thread runs the first chunk. Every other one composes the steps before its chunk, the last one
first, until their map is a constant: that is the value before its chunk, which it then runs as one
thread would. A chunk whose value is not found so is run after the one before it. So is one whose
value turns out not to be what counts, once the chunk before it has been run:

* the last value before it is not finite: composing may have hidden an overflow;
* the value before the composed steps is so large that it was not yet forgotten.

Before threads are started, one block tells whether the coefficients decay fast enough; if not, one
thread runs the loop. How the steps are cut depends on the flags and their number alone, and what is
run again on the values. The numba backend does the same (`scanlib.backends.numba.elemwise.chunks`,
where `compose` says why rounding is no worse than that of the steps).
"""

from __future__ import annotations

from pytensor.configdefaults import config

from scanlib.backends.c.block import STACK, BlockPrinter
from scanlib.backends.c.source import added, c_type
from scanlib.ops.c_code import NODE_NAME as NODE
from scanlib.ops.elemwise_scan import ElemwiseScan

FORGETTING = 4  # a chunk's steps before it are composed up to one in so many of a chunk

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

    def fits(self) -> bool:
        """Whether buffers, now that all is written, are on the stack: threads raise no errors."""
        return self.bytes <= STACK

    def write_struct(self) -> None:
        super().write_struct()
        most = config.scanlib__threads
        with self.source.block(f"struct {NODE}_chunks"):
            self.source.line(f"npy_intp window, bounds[{most + 1}], forgotten[{most}];")
            self.source.line(f"bool known[{most}];")
            for part, item in self.kept_parts.items():
                self.source.line(f"{item} before{part}[{most}], after{part}[{most}];")
            for part in self.depths:
                self.source.line(f"npy_float64 mul{part}[{most}];")
                self.source.line(f"{self.kept_parts[part]} *ends{part};")
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

    def write_maps(self) -> None:
        """Write the composition of the steps before a chunk."""
        line = self.source.line
        for part in self.depths:
            line(f"npy_float64 M{part} = 1, A{part} = 0;")
        line("npy_intp i = chunks.bounds[chunk];")
        line(f"const npy_intp lowest = i - (job == {PROBE} ? {self.block} : chunks.window);")
        small = " && ".join(f"scanlib_is_small(M{part})" for part in self.depths)
        with self.source.block(f"while (i > lowest && !({small}))"), self.scalars.scope():
            line(f"const npy_intp n = {self.block};")
            line("i -= n;")
            line(f"const npy_intp low = {'steps - i - n' if self.reverse else 'i'};")
            self.write_views_of_rows()
            for number, recurrence in enumerate(self.op.recurrences):
                self.write_elements(number)
                (part,), ((term,),) = recurrence.parts, recurrence.terms
                chosen = (term.coefficient, "1."), (recurrence.constants[0], "0.")
                texts = [other if k is None else self.elements[number, k] for k, other in chosen]
                kind = f"{self.reverse}, {part in self.sums_first}".lower()
                call = f"scanlib_compose<{kind}>({', '.join(texts)}, n, M{part}, A{part})"
                line(f"{call};")
        line(f"chunks.known[chunk] = job == {RUN} && {small};")
        line(f"chunks.forgotten[chunk] = i / {self.block};")
        for recurrence in self.op.recurrences:
            part = recurrence.parts[0]
            square = recurrence.family == "affine in squares"
            line(f"chunks.mul{part}[chunk] = M{part};")
            line(f"chunks.before{part}[chunk] = {f'sqrt(A{part})' if square else f'A{part}'};")

    def write_first_values(self) -> None:
        n = self.signature.n_states
        for part in self.kept_parts:
            if part in self.sums:
                self.source.line(f"c{part - n} = chunks.before{part}[chunk];")
            elif part in self.sums_first:
                self.source.line(f"kept{part} = chunks.before{part}[chunk];")
            elif not self.is_direct(part):
                self.source.line(f"B{part}[0] = chunks.before{part}[chunk];")

    def write_views(self) -> None:
        super().write_views()
        for part in self.depths:
            place = f"H{part}[{'n' if self.reverse else '0'}]"
            if part in self.sums_first:
                place = f"kept{part}"
            if self.is_direct(part):
                self.source.line(f"if (i == first) {place} = chunks.before{part}[chunk];")
            self.source.line(f"chunks.ends{part}[i / {self.block}] = {place};")

    def rows_of_history(self, part: int) -> str:
        return f"i == first ? G{part} : {super().rows_of_history(part)}"

    def move_on(self) -> None:
        super().move_on()
        for part, item in self.kept_parts.items():
            if part in self.depths and self.is_direct(part):
                shift = 0 if self.reverse else 1
                target = f"({item} *)data.h{part} + low + {shift}"
                copy = f"memcpy({target}, G{part} + {shift}, n * sizeof({item}));"
                self.source.line(f"if (i == first) {copy}")

    def write_values_after(self) -> None:
        n = self.signature.n_states
        for part, item in self.kept_parts.items():
            value = f"c{part - n}" if part in self.sums else f"B{part}[0]"
            if part in self.sums_first:
                value = f"kept{part}"
            if part in self.depths and self.is_direct(part):
                value = f"(({item} *)data.h{part})[{'steps - last' if self.reverse else 'last'}]"
            self.source.line(f"chunks.after{part}[chunk] = {value};")

    # All chunks

    def place(self, part: int) -> str:
        """Return where the result of a part is that has no history."""
        n, item = self.signature.n_states, self.kept_parts[part]
        return f"*({item} *)data.{f'h{part}' if part < n else f'c{part - n}'}"

    def write_start(self) -> None:
        line = self.source.line
        least = max(config.scanlib__parallel_steps, FORGETTING * self.block)
        line(f"{NODE}_chunks chunks;")
        line(f"npy_intp count = steps / {least};")
        line(f"if (count > {config.scanlib__threads}) count = {config.scanlib__threads};")
        line("if (count < 1) count = 1;")
        line("for (npy_intp k = 0; k < count; k++)")
        line(f"  chunks.bounds[k] = steps * k / count / {self.block} * {self.block};")
        line("chunks.bounds[count] = steps;")
        line(f"chunks.window = chunks.bounds[1] / {FORGETTING * self.block} * {self.block};")
        for part in self.depths:
            item = self.kept_parts[part]
            line(f"scanlib_memory ends{part};")
            line(f"if (ends{part}.get((steps / {self.block} + 1) * sizeof({item}))) return -1;")
            line(f"chunks.ends{part} = ({item} *)ends{part}.data;")
        with self.source.block("if (count > 1)"):
            line(f"{NODE}_chunk(data, chunks, count - 1, {PROBE});")
            fast = " && ".join(
                f"scanlib_blocks_to_forget(chunks.mul{part}[count - 1]) <= blocks"
                for part in self.depths
            )
            line(f"const npy_float64 blocks = chunks.window / {self.block};")
            with self.source.block(f"if (!({fast}))"):
                line("count = 1;")
                line("chunks.bounds[1] = steps;")
        self.write_values_before()
        line(f"const auto walk = [&](npy_intp k) {{ {NODE}_chunk(data, chunks, k, {RUN}); }};")
        line("if (count > 1) scanlib_in_threads(count, walk); else walk(0);")
        with self.source.block("for (npy_intp k = 1; k < count; k++)"):
            line(f"if ({self.is_right()}) continue;")
            for part in self.depths:
                line(f"chunks.before{part}[k] = chunks.after{part}[k - 1];")
            line(f"{NODE}_chunk(data, chunks, k, {AGAIN});")
        self.write_last_values()
        line("data.taken = steps;")

    def write_values_before(self) -> None:
        """Write the values before the first chunk, and those of the sums before all others."""
        n = self.signature.n_states
        for part, item in self.kept_parts.items():
            if part in self.sums:
                self.source.line(
                    f"for (npy_intp k = 1; k < count; k++) chunks.before{part}[k] = 0;"
                )
            value = f"*(const {item} *)data.c{part - n}"
            if part < n:
                value = f"*(const {item} *)data.{self.outer.initials[part]}"
            self.source.line(f"chunks.before{part}[0] = {value};")

    def is_right(self) -> str:
        """Return the test whether a chunk was run from what the one before it ends with."""
        tests = ["chunks.known[k]"]
        for recurrence in self.op.recurrences:
            part = recurrence.parts[0]
            square = "true" if recurrence.family == "affine in squares" else "false"
            values = f"chunks.ends{part}[chunks.forgotten[k]], chunks.before{part}[k]"
            tests.append(f"scanlib_is_finite(chunks.after{part}[k - 1])")
            tests.append(f"scanlib_is_forgotten(chunks.mul{part}[k], {values}, {square})")
        return " && ".join(tests)

    def write_last_values(self) -> None:
        n = self.signature.n_states
        for part in self.kept_parts:
            if part in self.sums:
                place, dtype = self.place(part), self.inner.carries[part - n].type.dtype
                total = added(place, f"chunks.after{part}[k]", dtype)
                self.source.line(f"{place} = chunks.after{part}[0];")
                self.source.line(f"for (npy_intp k = 1; k < count; k++) {place} = {total};")
            elif not self.is_direct(part):
                self.source.line(f"{self.place(part)} = chunks.after{part}[count - 1];")


COMPOSE = r"""
#ifndef SCANLIB_COMPOSE
#define SCANLIB_COMPOSE
/* Item j of an array, or the number that all items are. */
template <class T> static inline npy_float64 scanlib_item(const T *items, npy_intp j) {
  return items[j];
}
static inline npy_float64 scanlib_item(npy_float64 value, npy_intp) { return value; }

static inline bool scanlib_is_finite(npy_float64 value) { return value - value == 0; }

/* Whether no value before such a coefficient counts any more. */
static inline bool scanlib_is_small(npy_float64 mul) { return fabs(mul) <= 0x1p-120; }

/* How many blocks make a coefficient small if one makes it mul. */
static inline npy_float64 scanlib_blocks_to_forget(npy_float64 mul) {
  return fabs(mul) < 1 ? -120 / log2(fabs(mul)) : HUGE_VAL;
}

/* Whether mul * before, or its square, is nothing next to a finite value. */
static inline bool scanlib_is_forgotten(
    npy_float64 mul, npy_float64 before, npy_float64 value, bool square) {
  const npy_float64 size = fabs(mul) < 0x1p-900 ? 0x1p-900 : fabs(mul);
  const npy_float64 what = fabs(square ? before * before : before);
  const npy_float64 other = fabs(square ? value * value : value);
  return scanlib_is_finite(other) && size * what <= 0x1p-60 * other;
}

/* Composes a map with the n steps of the block before it, from eight strips. The steps are
 * h = a * h + b, or h = a * (h + b) where the sum comes FIRST. */
template <bool BACK, bool FIRST, class A, class B>
static void scanlib_compose(A a, B b, npy_intp n, npy_float64 &mul, npy_float64 &add) {
  const npy_intp size = n / 8, sign = BACK ? -1 : 1, start = BACK ? n - 1 : 0;
  for (npy_intp k = n - 1; k >= 8 * size; k--) {
    const npy_float64 after = mul;
    mul *= scanlib_item(a, start + sign * k);
    add += (FIRST ? mul : after) * scanlib_item(b, start + sign * k);
  }
  npy_float64 m[8] = {1, 1, 1, 1, 1, 1, 1, 1}, s[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  for (npy_intp k = 0; k < size; k++) {
    const npy_intp j = start + sign * k;
#pragma GCC unroll 8
    for (int strip = 0; strip < 8; strip++) {
      const npy_intp place = j + sign * strip * size;
      const npy_float64 x = scanlib_item(a, place);
      m[strip] *= x;
      const npy_float64 y = scanlib_item(b, place);
      s[strip] = FIRST ? (s[strip] + y) * x : s[strip] * x + y;
    }
  }
  for (int strip = 7; strip >= 0; strip--) {
    add += mul * s[strip];
    mul *= m[strip];
  }
}
#endif
"""
