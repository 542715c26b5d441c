"""Chunks of the steps in threads of their own, where composing takes less than running.

For running extremes, sums, and logarithms of sums, whose elements depend on no state. A thread
composes all steps before its chunk while the chunks before it are run. Chunks get shorter from one
to the next, so that all end together. The numba backend does the same, and says when a chunk is
right (`scanlib.backends.numba.elemwise.prefixes`).
"""

from __future__ import annotations

from scanlib.backends.c.chunks import ChunkPrinter
from scanlib.backends.c.source import c_type
from scanlib.ops.elemwise_scan import Recurrence
from scanlib.ops.parts import composing_cost, simple_family


class PrefixPrinter(ChunkPrinter):
    """Writes chunks of running extremes, sums, and logarithms of sums."""

    def write_maps(self) -> None:
        """Write the composition of all steps before a chunk."""
        line, recurrences = self.source.line, self.op.recurrences
        for recurrence in recurrences:
            (part,) = recurrence.parts
            if recurrence.family == "log-affine":
                line(f"npy_float64 V{part} = chunks.before{part}_1[0], S{part} = 1;")
            elif simple_family(recurrence) == "sum":
                line(f"npy_float64 V{part} = chunks.before{part}_1[0];")
            else:
                line(f"{self.kept_parts[part]} V{part} = chunks.before{part}_1[0];")
        line("bool runs = true;")
        head = f"for (npy_intp i = 0; runs && i < chunks.bounds[chunk]; i += {self.block})"
        with self.source.block(head), self.scalars.scope():
            line(f"const npy_intp n = {self.block};")
            line(f"const npy_intp low = {'steps - i - n' if self.reverse else 'i'};")
            self.write_views_of_rows()
            for number, recurrence in enumerate(recurrences):
                self.write_elements(number)
                line(f"runs = runs && {self.composition(number, recurrence)};")
        line("chunks.known[chunk] = runs;")
        for recurrence in recurrences:
            (part,) = recurrence.parts
            sums = f"V{part} + log(S{part})" if recurrence.family == "log-affine" else f"V{part}"
            line(f"chunks.before{part}_1[chunk] = {sums};")

    def composition(self, number: int, recurrence: Recurrence) -> str:
        """Return the call that composes the steps of a block, and says whether it could."""
        (part,), ((term,),), (constant, *_) = (
            recurrence.parts,
            recurrence.terms,
            recurrence.constants,
        )
        dtype = self.dtype_of(part)
        bound = self.array(number, constant, dtype, "0")
        if simple_family(recurrence) == "sum":
            return f"scanlib_compose_sum({bound}, n, V{part})"
        if recurrence.family != "log-affine":
            return f"scanlib_compose_pick<scanlib_{recurrence.family}>({bound}, n, V{part})"
        shift = f"({c_type(dtype)} *)NULL"
        if term.coefficient is not None:
            shift = self.array(number, term.coefficient, dtype, "0")
        work = self.source.name("W")
        self.buffer(work, dtype, self.block)
        self.scalars.vectors[dtype] = None
        types = f"{'true' if self.reverse else 'false'}, scanlib_vector_{dtype}"
        return f"scanlib_compose_logs<{types}>({shift}, {bound}, n, {work}, V{part}, S{part})"

    def write_cuts(self) -> None:
        """Write chunks of one block and a share of the rest, each shorter than the one before."""
        line, less = self.source.line, 1 - composing_cost(self.op)
        line("npy_float64 shares = 0, share = 1, done = 0;")
        line(f"for (npy_intp k = 0; k < count; k++, share *= {less!r}) shares += share;")
        line(f"const npy_float64 rest = (npy_float64)(steps - count * {self.block});")
        line("share = 1;")
        with self.source.block(f"for (npy_intp k = 0; k < count; k++, share *= {less!r})"):
            line(f"const npy_intp blocks = k + (npy_intp)(rest * (done / shares)) / {self.block};")
            line(f"chunks.bounds[k] = blocks * {self.block};")
            line("done += share;")
        line("chunks.bounds[count] = steps;")

    def is_right(self) -> str:
        tests = ["chunks.known[k]"]
        for recurrence in self.op.recurrences:
            part = recurrence.parts[0]
            values = f"chunks.after{part}_1[k - 1]", f"chunks.before{part}_1[k]"
            test = f"{values[0]} == {values[1]}"
            if simple_family(recurrence) in ("log-affine", "sum"):
                finite = (f"{value} - {value} == 0" for value in values)
                test = f"({test} || ({' && '.join(finite)}))"
            tests.append(test)
        return " && ".join(tests)


COMPOSE_PICKS = r"""
#ifndef SCANLIB_COMPOSE_PICKS
#define SCANLIB_COMPOSE_PICKS
template <class T> static inline void scanlib_pick_all(scanlib_maximum, const T *b, npy_intp n,
                                                       T &value) {
  T most = value;
#pragma omp simd reduction(max : most)
  for (npy_intp j = 0; j < n; j++) most = b[j] > most ? b[j] : most;
  value = most;
}
template <class T> static inline void scanlib_pick_all(scanlib_minimum, const T *b, npy_intp n,
                                                       T &value) {
  T least = value;
#pragma omp simd reduction(min : least)
  for (npy_intp j = 0; j < n; j++) least = b[j] < least ? b[j] : least;
  value = least;
}
/* The extreme of a value and the elements of n steps, unless there is a NaN among them. */
template <class P, class T> static bool scanlib_compose_pick(const T *b, npy_intp n, T &value) {
  if (value != value || scanlib_some_nan(b, n)) return false;
  scanlib_pick_all(P(), b, n, value);
  return true;
}
/* The sum of a value and the elements of n steps, if it is finite. */
template <class T> static bool scanlib_compose_sum(const T *b, npy_intp n, npy_float64 &value) {
  npy_float64 total = 0;
#pragma omp simd reduction(+ : total)
  for (npy_intp j = 0; j < n; j++) total += b[j];
  value += total;
  return value - value == 0;
}
#endif
"""

COMPOSE_LOGS = r"""
#ifndef SCANLIB_COMPOSE_LOGS
#define SCANLIB_COMPOSE_LOGS
/* Composes exp(largest) * total with the steps h = logaddexp(h + a, b) of a block, without `a`
 * where it is NULL; `b` meets all later shifts. F has the functions, `work` n numbers. */
template <bool BACK, class F, class T>
static bool scanlib_compose_logs(const T *a, const T *b, npy_intp n, T *__restrict__ work,
                                 npy_float64 &largest, npy_float64 &total) {
  T shift = 0;
  if (a) {
    for (npy_intp k = 0; k < n; k++) {
      const npy_intp j = BACK ? k : n - 1 - k;
      work[j] = b[j] + shift;
      shift += a[j];
    }
  } else {
    for (npy_intp j = 0; j < n; j++) work[j] = b[j];
  }
  largest += shift;
  if (!(largest < NPY_INFINITY) || !scanlib_all_below_infinity(work, n)) return false;
  T most = -NPY_INFINITYF;
  scanlib_pick_all(scanlib_maximum(), work, n, most);
  if (most == -NPY_INFINITYF) return true;
  T sum = 0;
#pragma omp simd reduction(+ : sum)
  for (npy_intp j = 0; j < n; j++) sum += F::exp(work[j] - most);
  if (most > largest) {
    total = exp(largest - most) * total + sum;
    largest = most;
  } else {
    total += exp(most - largest) * sum;
  }
  return true;
}
#endif
"""
