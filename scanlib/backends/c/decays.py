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
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.parts import BLOCKS_OF_A_CHUNK


class DecayPrinter(ChunkPrinter):
    """Writes chunks of affine recurrences whose coefficients decay.

    The map of recurrence `r` takes the values that its steps read, of all its parts, to as many
    values: its coefficients are ``M0[1][2]`` (of recurrence 0, for value 1, that of value 2), and
    ``A0[1]`` is what it adds.
    """

    def __init__(self, op: ElemwiseScan) -> None:
        super().__init__(op)
        self.values = [
            [(part, back) for part in recurrence.parts for back in self.backs(part)]
            for recurrence in op.recurrences
        ]

    def write_members(self) -> None:
        most = config.scanlib__threads
        self.source.line(f"npy_intp window, forgotten[{most}];")
        for number, values in enumerate(self.values):
            self.source.line(f"npy_float64 mul{number}[{most}];")
            for part, back in values:
                self.source.line(f"{self.kept_parts[part]} *ends{part}_{back};")

    def write_maps(self) -> None:
        """Write the composition of the steps before a chunk."""
        line = self.source.line
        for number, values in enumerate(self.values):
            size = len(values)
            line(f"npy_float64 M{number}[{size}][{size}] = {{}}, A{number}[{size}] = {{}};")
            line(f"for (int k = 0; k < {size}; k++) M{number}[k][k] = 1;")
        line("npy_intp i = chunks.bounds[chunk];")
        line(f"const npy_intp lowest = i - (job == {PROBE} ? {self.block} : chunks.window);")
        largest = [f"scanlib_largest(M{number})" for number in range(len(self.values))]
        small = " && ".join(f"{size} <= 0x1p-120" for size in largest)
        with self.source.block(f"while (i > lowest && !({small}))"), self.scalars.scope():
            line(f"const npy_intp n = {self.block};")
            line("i -= n;")
            line(f"const npy_intp low = {'steps - i - n' if self.reverse else 'i'};")
            self.write_views_of_rows()
            for number in range(len(self.values)):
                self.write_elements(number)
                self.write_composition(number)
        line(f"chunks.known[chunk] = job == {RUN} && {small};")
        line(f"chunks.forgotten[chunk] = i / {self.block};")
        for number, recurrence in enumerate(self.op.recurrences):
            square = recurrence.family == "affine in squares"
            line(f"chunks.mul{number}[chunk] = {largest[number]};")
            for i, (part, back) in enumerate(self.values[number]):
                value = f"sqrt(A{number}[{i}])" if square else f"A{number}[{i}]"
                line(f"chunks.before{part}_{back}[chunk] = {value};")

    def write_composition(self, number: int) -> None:
        """Write the composition of a map with the steps of the block before it."""
        recurrence = self.op.recurrences[number]
        if len(self.values[number]) > 1 or len(recurrence.terms[0]) > 1:
            self.write_coupled_composition(number)
            return
        (part,), ((term,),) = recurrence.parts, recurrence.terms
        chosen = (term.coefficient, "1."), (recurrence.constants[0], "0.")
        texts = [other if k is None else self.elements[number, k] for k, other in chosen]
        kind = f"{self.reverse}, {part in self.sums_first}".lower()
        names = f"M{number}[0][0], A{number}[0]"
        self.source.line(f"scanlib_compose<{kind}>({', '.join(texts)}, n, {names});")

    def write_coupled_composition(self, number: int) -> None:
        """Write it for several values: the map of the block is where it takes unit vectors.

        Column `k` is that of value `k`, the last column that of zeros, with the constants.
        """
        line, size = self.source.line, len(self.values[number])
        line(f"npy_float64 v{number}[{size + 1}][{size}] = {{}};")
        line(f"for (int k = 0; k < {size}; k++) v{number}[k][k] = 1;")
        with self.source.block("for (npy_intp t = 0; t < n; t++)"):
            line(f"const npy_intp j = {'n - 1 - t' if self.reverse else 't'};")
            self.write_step_of_columns(number)
        line(f"scanlib_compose_columns(M{number}, A{number}, v{number});")

    def write_step_of_columns(self, number: int) -> None:
        """Write one step of all columns; values move on to be those of one step earlier."""
        recurrence, values = self.op.recurrences[number], self.values[number]
        line = self.source.line
        used = {term.coefficient for terms in recurrence.terms for term in terms}
        for k in sorted(k for k in {*used, *recurrence.constants} if k is not None):
            name = self.elements[number, k]
            line(f"const npy_float64 q_{k} = {name if name[0] == 'e' else f'{name}[j]'};")
        for column in range(len(values) + 1):
            own = f"v{number}[{column}]"
            rows = zip(recurrence.parts, recurrence.terms, recurrence.constants, strict=True)
            for part, terms, constant in rows:
                text = [
                    f"{'' if t.coefficient is None else f'q_{t.coefficient} * '}"
                    f"{own}[{values.index((t.part, -t.tap))}]"
                    for t in terms
                ]
                if constant is not None and column == len(values):
                    text.append(f"q_{constant}")
                line(f"const npy_float64 u{column}_{part} = {' + '.join(text) or '0'};")
            for i, (part, back) in reversed(list(enumerate(values))):
                line(f"{own}[{i}] = {f'u{column}_{part}' if back == 1 else f'{own}[{i - 1}]'};")

    def write_views(self) -> None:
        super().write_views()
        for part in self.depths:
            for back in self.backs(part):
                value = f"H{part}[{self.place_before(part, back)}]"
                value = f"kept{part}" if part in self.sums_first else value
                self.source.line(f"chunks.ends{part}_{back}[i / {self.block}] = {value};")

    def write_cuts(self) -> None:
        line = self.source.line
        line("for (npy_intp k = 0; k < count; k++)")
        line(f"  chunks.bounds[k] = steps * k / count / {self.block} * {self.block};")
        line("chunks.bounds[count] = steps;")
        line(f"chunks.window = chunks.bounds[1] / {BLOCKS_OF_A_CHUNK * self.block} * {self.block};")
        for part in self.depths:
            for name in (f"ends{part}_{back}" for back in self.backs(part)):
                item = self.kept_parts[part]
                line(f"scanlib_memory {name};")
                line(f"if ({name}.get((steps / {self.block} + 1) * sizeof({item}))) return -1;")
                line(f"chunks.{name} = ({item} *){name}.data;")
        with self.source.block("if (count > 1)"):
            line(f"{NODE}_chunk(data, chunks, count - 1, {PROBE});")
            fast = " && ".join(
                f"scanlib_blocks_to_forget(chunks.mul{number}[count - 1]) <= blocks"
                for number in range(len(self.values))
            )
            line(f"const npy_float64 blocks = chunks.window / {self.block};")
            with self.source.block(f"if (!({fast}))"):
                line("count = 1;")
                line("chunks.bounds[1] = steps;")

    def is_right(self) -> str:
        tests = ["chunks.known[k]"]
        for number, recurrence in enumerate(self.op.recurrences):
            pasts = [f"{part}_{back}" for part, back in self.values[number]]
            tests += [f"scanlib_is_finite(chunks.after{past}[k - 1])" for past in pasts]
            square = "true" if recurrence.family == "affine in squares" else "false"
            ends = _largest([f"chunks.ends{past}[chunks.forgotten[k]]" for past in pasts])
            starts = _largest([f"chunks.before{past}[k]" for past in pasts])
            values = f"chunks.mul{number}[k], {ends}, {starts}"
            tests.append(f"scanlib_is_forgotten({values}, {square})")
        return " && ".join(tests)


def _largest(names: list[str]) -> str:
    """Return the largest size of some numbers."""
    text = f"fabs({names[0]})"
    for name in names[1:]:
        text = f"fmax({text}, fabs({name}))"
    return text


COMPOSE = r"""
#ifndef SCANLIB_COMPOSE
#define SCANLIB_COMPOSE
/* Item j of an array, or the number that all items are. */
template <class T> static inline npy_float64 scanlib_item(const T *items, npy_intp j) {
  return items[j];
}
static inline npy_float64 scanlib_item(npy_float64 value, npy_intp) { return value; }

static inline bool scanlib_is_finite(npy_float64 value) { return value - value == 0; }

/* The largest size of some coefficients; NaN if one is. */
template <int N> static inline npy_float64 scanlib_largest(const npy_float64 (&values)[N][N]) {
  npy_float64 largest = 0;
  for (int i = 0; i < N; i++)
    for (int k = 0; k < N; k++)
      if (!(fabs(values[i][k]) <= largest)) largest = fabs(values[i][k]);
  return largest;
}

/* Composes a map with the one before it, whose columns are given, last what it adds. */
template <int N>
static inline void scanlib_compose_columns(npy_float64 (&mul)[N][N], npy_float64 (&add)[N],
                                           const npy_float64 (&columns)[N + 1][N]) {
  for (int i = 0; i < N; i++) {
    npy_float64 row[N] = {};
    for (int m = 0; m < N; m++) add[i] += mul[i][m] * columns[N][m];
    for (int k = 0; k < N; k++)
      for (int m = 0; m < N; m++) row[k] += mul[i][m] * columns[k][m];
    memcpy(mul[i], row, sizeof row);
  }
}

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
