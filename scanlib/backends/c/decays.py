"""Chunks of the steps in threads of their own, where coefficients decay.

For affine recurrences whose elements depend on no state. A thread composes the steps before its
chunk, the last one first, until their map is a constant: that is the value before its chunk. It was
not what counts, and the chunk is run once more, if

* the last value before it is not finite: composing may have hidden an overflow;
* the value before the composed steps is so large that it was not yet forgotten.

Before threads are started, one block tells whether the coefficients decay fast enough; if not, one
thread runs the loop. The numba backend does the same (`scanlib.backends.numba.elemwise.decays`;
`compose` beside it says why rounding is no worse than that of the steps).
"""

from __future__ import annotations

from pytensor.configdefaults import config

from scanlib.backends.c.chunks import PROBE, RUN, ChunkPrinter
from scanlib.ops.c_code import NODE_NAME as NODE
from scanlib.ops.parts import BLOCKS_OF_A_CHUNK


class DecayPrinter(ChunkPrinter):
    """Writes chunks of affine recurrences whose coefficients decay."""

    def write_members(self) -> None:
        most = config.scanlib__threads
        self.source.line(f"npy_intp window, forgotten[{most}];")
        for part in self.depths:
            self.source.line(f"npy_float64 mul{part}[{most}];")
            self.source.line(f"{self.kept_parts[part]} *ends{part};")

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

    def write_views(self) -> None:
        super().write_views()
        for part in self.depths:
            place = f"H{part}[{'n' if self.reverse else '0'}]"
            place = f"kept{part}" if part in self.sums_first else place
            self.source.line(f"chunks.ends{part}[i / {self.block}] = {place};")

    def write_cuts(self) -> None:
        line = self.source.line
        line("for (npy_intp k = 0; k < count; k++)")
        line(f"  chunks.bounds[k] = steps * k / count / {self.block} * {self.block};")
        line("chunks.bounds[count] = steps;")
        line(f"chunks.window = chunks.bounds[1] / {BLOCKS_OF_A_CHUNK * self.block} * {self.block};")
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
