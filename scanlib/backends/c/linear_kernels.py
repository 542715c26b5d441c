"""C++ functions of `LinearScan`: the recurrences of `scanlib.ops.linear_scan`, for all its options.

The schedules are those of the numba backend (`scanlib.backends.numba.linear_scan`). Arrays are
contiguous; the history holds ``steps + 1`` rows, or two where only the last row is wanted. Options
are constants of the template, so that what a recurrence does not need is not compiled. `F` has the
functions of the log semiring, in a form that compilers vectorize.
"""

from scanlib.backends.c.linear_small import SMALL_KERNELS

_STEPS = r"""
#ifndef SCANLIB_LINEAR
#define SCANLIB_LINEAR
#include <limits>
#include <type_traits>
#include <vector>

enum { SCANLIB_REAL, SCANLIB_LOG, SCANLIB_MAX, SCANLIB_MIN };
template <int SEMIRING> struct scanlib_semiring {};

/* Complex numbers as NumPy multiplies them: without the tests for infinities of std::complex. */
template <class R> struct scanlib_complex {
  R re, im;
  scanlib_complex() {}
  scanlib_complex(R real) : re(real), im(0) {}
  scanlib_complex(R real, R imaginary) : re(real), im(imaginary) {}
  scanlib_complex operator+(const scanlib_complex &b) const {
    return scanlib_complex(re + b.re, im + b.im);
  }
  scanlib_complex operator*(const scanlib_complex &b) const {
    return scanlib_complex(re * b.re - im * b.im, re * b.im + im * b.re);
  }
  scanlib_complex &operator+=(const scanlib_complex &b) { return *this = *this + b; }
  bool operator!=(const scanlib_complex &b) const { return re != b.re || im != b.im; }
};

/* out = add + sum of factors[j] times row j; add may be missing. */
template <class T>
static void scanlib_combine(T *__restrict out, const T *factors, const T *rows, npy_intp count,
                            npy_intp width, const T *add) {
  for (npy_intp i = 0; i < width; i++) out[i] = add ? add[i] : T(0);
  npy_intp j = 0;
  for (; j + 4 <= count; j += 4) {
    const T f0 = factors[j], f1 = factors[j + 1], f2 = factors[j + 2], f3 = factors[j + 3];
    const T *r0 = rows + j * width, *r1 = r0 + width, *r2 = r1 + width, *r3 = r2 + width;
    for (npy_intp i = 0; i < width; i++)
      out[i] += (f0 * r0[i] + f1 * r1[i]) + (f2 * r2[i] + f3 * r3[i]);
  }
  for (; j < count; j++) {
    const T f = factors[j], *r = rows + j * width;
    for (npy_intp i = 0; i < width; i++) out[i] += f * r[i];
  }
}

/* The sum of products, with parts that do not wait for one another. */
template <class T> static T scanlib_dot(const T *a, const T *b, npy_intp count) {
  T parts[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  npy_intp j = 0;
  for (; j + 8 <= count; j += 8)
    for (int k = 0; k < 8; k++) parts[k] += a[j + k] * b[j + k];
  T total = ((parts[0] + parts[1]) + (parts[2] + parts[3])) +
            ((parts[4] + parts[5]) + (parts[6] + parts[7]));
  for (; j < count; j++) total += a[j] * b[j];
  return total;
}

/* The extreme, or the logarithm of the sum of exponentials, of a[j * a_step] + b[j * b_step]. */
template <class T, int SEMIRING>
static T scanlib_terms(const T *a, npy_intp a_step, const T *b, npy_intp b_step, npy_intp count) {
  const T infinity = std::numeric_limits<T>::infinity();
  T best = SEMIRING == SCANLIB_MIN ? infinity : -infinity;
  for (npy_intp j = 0; j < count; j++) {
    const T term = a[j * a_step] + b[j * b_step];
    if ((SEMIRING == SCANLIB_MIN ? term < best : term > best) || term != term) best = term;
  }
  if (SEMIRING != SCANLIB_LOG || !std::isfinite(best)) return best;
  T total = 0;
  for (npy_intp j = 0; j < count; j++)
    total += std::exp(a[j * a_step] + b[j * b_step] - best);
  return best + std::log(total);
}
"""

_RECURRENCE = r"""
template <class T, int SEMIRING, bool FIXED, bool LEFT, bool VECTOR, bool REVERSE, bool UNTRACED,
          bool OFFSET, bool SHARED, class F>
struct scanlib_linear {
  T *history;
  const T *matrix, *offset;
  const T *right; /* the matrices at the right of products from both sides, or NULL */
  const npy_bool *mask; /* which items the matrix has, or NULL */
  npy_intp steps, batches, d, m;
  std::vector<T> columns, largest, weights, half;

  const T *matrix_at(npy_intp t, npy_intp k) const {
    return matrix + ((FIXED ? 0 : t * (SHARED ? 1 : batches)) + (SHARED ? 0 : k)) * d * d;
  }
  /* The columns of fixed matrices, or of the exponentials of matrices, as rows. */
  void lay_out() {
    const npy_intp count = SHARED ? 1 : batches;
    const npy_intp row = LEFT ? d : 1, column = LEFT ? 1 : d;
    columns.resize(count * d * d);
    if (SEMIRING == SCANLIB_LOG) {
      largest.resize(count * d);
      weights.resize(d);
    }
    for (npy_intp k = 0; k < count; k++)
      for (npy_intp i = 0; i < d; i++)
        lay_out_row(scanlib_semiring<SEMIRING>(), matrix_at(0, k) + i * row, column, k, i);
  }
  template <int OTHER>
  void lay_out_row(scanlib_semiring<OTHER>, const T *a, npy_intp column, npy_intp k, npy_intp i) {
    const T zero = 0;
    T top = scanlib_terms<T, SCANLIB_MAX>(a, column, &zero, 0, d);
    if (!std::isfinite(top)) top = 0;
    largest[k * d + i] = top;
    for (npy_intp j = 0; j < d; j++)
      columns[(k * d + j) * d + i] = std::exp(a[j * column] - top);
  }
  void lay_out_row(scanlib_semiring<SCANLIB_REAL>, const T *a, npy_intp column, npy_intp k,
                   npy_intp i) {
    for (npy_intp j = 0; j < d; j++) columns[(k * d + j) * d + i] = a[j * column];
  }
  void real_step(T *after, const T *before, const T *add, npy_intp t, npy_intp k) {
    const T *a = matrix_at(t, k);
    if (VECTOR && FIXED)
      scanlib_combine<T>(after, before, &columns[SHARED ? 0 : k * d * d], d, d, add);
    else if (VECTOR && !LEFT)
      scanlib_combine<T>(after, before, a, d, d, add);
    else if (VECTOR)
      for (npy_intp i = 0; i < d; i++)
        after[i] = scanlib_dot<T>(a + i * d, before, d) + (OFFSET ? add[i] : T(0));
    else if (right) {
      const T *r = right + (FIXED ? 0 : t * m * m);
      for (npy_intp i = 0; i < d; i++)
        scanlib_combine<T>(&half[0], a + i * d, before, d, m, NULL),
            scanlib_combine<T>(after + i * m, &half[0], r, m, m, OFFSET ? add + i * m : NULL);
    } else if (LEFT)
      for (npy_intp i = 0; i < d; i++)
        scanlib_combine<T>(after + i * m, a + i * d, before, d, m, OFFSET ? add + i * m : NULL);
    else
      for (npy_intp i = 0; i < m; i++)
        scanlib_combine<T>(after + i * d, before + i * d, a, d, d, OFFSET ? add + i * d : NULL);
  }
  /* A step without the items that the mask leaves out. */
  void masked_step(T *after, const T *before, const T *add, npy_intp t, npy_intp k) {
    const T *a = matrix_at(t, k);
    const npy_intp row = LEFT ? d : 1, column = LEFT ? 1 : d, others = VECTOR ? 1 : m;
    const npy_intp along = VECTOR || !LEFT ? 1 : m, across = LEFT ? 1 : d;
    for (npy_intp i = 0; i < d; i++)
      for (npy_intp c = 0; c < others; c++) {
        const npy_intp place = i * along + c * across;
        T total = OFFSET ? add[place] : T(0);
        for (npy_intp j = 0; j < d; j++)
          if (mask[i * row + j * column])
            total += a[i * row + j * column] * before[j * along + c * across];
        after[place] = total;
      }
  }
  void checked_step(T *after, const T *before, const T *add, npy_intp t, npy_intp k) {
    real_step(after, before, add, t, k);
    if (!mask) return;
    T check = 0;
    for (npy_intp i = 0; i < (VECTOR ? d : d * m); i++) check += after[i] * T(0);
    if (check != check) masked_step(after, before, add, t, k);
  }
  void terms_step(T *after, const T *before, const T *add, npy_intp t, npy_intp k) {
    const T *a = matrix_at(t, k);
    const npy_intp row = LEFT ? d : 1, column = LEFT ? 1 : d, others = VECTOR ? 1 : m;
    const npy_intp along = VECTOR || !LEFT ? 1 : m, across = LEFT ? 1 : d;
    for (npy_intp i = 0; i < d; i++)
      for (npy_intp c = 0; c < others; c++) {
        const npy_intp place = i * along + c * across;
        after[place] = scanlib_terms<T, SEMIRING>(a + i * row, column, before + c * across, along,
                                                  d) + (OFFSET ? add[place] : T(0));
      }
  }
  void log_step(T *after, const T *before, const T *add, npy_intp t, npy_intp k) {
    const T zero = 0, infinity = std::numeric_limits<T>::infinity();
    const T top = scanlib_terms<T, SCANLIB_MAX>(before, 1, &zero, 0, d);
    if (!std::isfinite(top)) return terms_step(after, before, add, t, k);
    const T *a = matrix_at(t, k), *tops = &largest[SHARED ? 0 : k * d];
    const npy_intp row = LEFT ? d : 1, column = LEFT ? 1 : d;
    const T epsilon = std::numeric_limits<T>::epsilon();
    const T smallest = std::numeric_limits<T>::min() / (epsilon * epsilon);
    for (npy_intp j = 0; j < d; j++) weights[j] = F::exp(before[j] - top);
    scanlib_combine<T>(after, weights.data(), &columns[SHARED ? 0 : k * d * d], d, d, NULL);
    npy_intp outside = 0;
    for (npy_intp i = 0; i < d; i++) outside += !(after[i] > smallest) | !(after[i] < infinity);
    if (!outside)
      for (npy_intp i = 0; i < d; i++)
        after[i] = F::log(after[i]) + (top + tops[i]) + (OFFSET ? add[i] : T(0));
    for (npy_intp i = 0; outside && i < d; i++) {
      const T sum = after[i];
      after[i] = sum > smallest && sum < infinity
                     ? F::log(sum) + (top + tops[i])
                     : scanlib_terms<T, SEMIRING>(a + i * row, column, before, 1, d);
      if (OFFSET) after[i] += add[i];
    }
  }
  void run() {
    const bool laid_out = FIXED && VECTOR && (SEMIRING == SCANLIB_REAL || SEMIRING == SCANLIB_LOG);
    const npy_intp cells = VECTOR ? d : d * m;
    if (!cells || !batches || !steps) return;
    if (laid_out) lay_out();
    if (right) half.resize(m);
    const bool small = laid_out && SEMIRING == SCANLIB_REAL && !UNTRACED && batches == 1;
    if (small && run_small(std::is_floating_point<T>())) return;
    const bool each = !FIXED && VECTOR && SEMIRING == SCANLIB_REAL && !UNTRACED && batches == 1;
    if (each && !mask && run_small_each(std::is_floating_point<T>())) return;
    for (npy_intp n = 0; n < steps; n++) {
      const npy_intp t = REVERSE ? steps - 1 - n : n;
      const npy_intp before = UNTRACED ? n % 2 : REVERSE ? t + 1 : t;
      const npy_intp after = UNTRACED ? 1 - n % 2 : REVERSE ? t : t + 1;
      for (npy_intp k = 0; k < batches; k++) {
        T *to = history + (after * batches + k) * cells;
        const T *from = history + (before * batches + k) * cells;
        const T *add = OFFSET ? offset + (t * batches + k) * cells : NULL;
        step(scanlib_semiring<SEMIRING>(), laid_out, to, from, add, t, k);
      }
    }
  }
  void step(scanlib_semiring<SCANLIB_REAL>, bool, T *to, const T *from, const T *add, npy_intp t,
            npy_intp k) {
    checked_step(to, from, add, t, k);
  }
  void step(scanlib_semiring<SCANLIB_LOG>, bool laid_out, T *to, const T *from, const T *add,
            npy_intp t, npy_intp k) {
    if (laid_out)
      log_step(to, from, add, t, k);
    else
      terms_step(to, from, add, t, k);
  }
  template <int OTHER>
  void step(scanlib_semiring<OTHER>, bool, T *to, const T *from, const T *add, npy_intp t,
            npy_intp k) {
    terms_step(to, from, add, t, k);
  }
  /* Takes all steps if the matrix is small (vectors hold no complex numbers); returns whether. */
  bool run_small(std::false_type) { return false; }
  bool run_small(std::true_type) {
    T *row = history + (REVERSE ? steps * d : 0);
    const T *add = OFFSET && REVERSE ? offset + (steps - 1) * d : offset;
    const npy_intp step = REVERSE ? -d : d;
    auto again = [&](npy_intp done, npy_intp count) {
      for (npy_intp n = done; mask && n < done + count; n++) {
        const npy_intp t = REVERSE ? steps - 1 - n : n, old = REVERSE ? t + 1 : t;
        masked_step(history + (REVERSE ? t : t + 1) * d, history + old * d,
                    OFFSET ? offset + t * d : NULL, t, 0);
      }
    };
    switch (d) {
#define SCANLIB_CASE(SIZE, AHEAD)                                                             \
  case SIZE:                                                                                  \
    scanlib_small<T, SIZE, AHEAD, OFFSET>::all(row, step, columns.data(), add, step, steps,   \
                                               again);                                        \
    return true;
      SCANLIB_CASE(2, 4)
      SCANLIB_CASE(3, 4)
      SCANLIB_CASE(4, 4)
      SCANLIB_CASE(5, 2)
      SCANLIB_CASE(6, 2)
      SCANLIB_CASE(7, 2)
      SCANLIB_CASE(8, 2)
#undef SCANLIB_CASE
    }
    return false;
  }
  bool run_small_each(std::false_type) { return false; }
  bool run_small_each(std::true_type) {
    T *row = history + (REVERSE ? steps * d : 0);
    const T *add = OFFSET && REVERSE ? offset + (steps - 1) * d : offset;
    const T *first = matrix_at(REVERSE ? steps - 1 : 0, 0);
    const npy_intp step = REVERSE ? -d : d;
    switch (d) {
#define SCANLIB_CASE(SIZE)                                                                    \
  case SIZE:                                                                                  \
    scanlib_small_each<T, SIZE, LEFT, OFFSET>::all(row, step, first, add, steps);             \
    return true;
      SCANLIB_CASE(2)
      SCANLIB_CASE(3)
      SCANLIB_CASE(4)
      SCANLIB_CASE(5)
      SCANLIB_CASE(6)
      SCANLIB_CASE(8)
#undef SCANLIB_CASE
    }
    return false;
  }
};
#endif
"""

LINEAR_KERNELS = f"{_STEPS}{SMALL_KERNELS}{_RECURRENCE}"
