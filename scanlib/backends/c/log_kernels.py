"""C++ kernel of the log-affine family for one block of steps of one channel.

It is the one of `scanlib.backends.numba.elemwise.logs`, which explains it: with the running maximum
and the rescaled sum, exponentials and logarithms are functions of arrays.
"""

LOG_KERNELS = r"""
#ifndef SCANLIB_LOG_KERNELS
#define SCANLIB_LOG_KERNELS
/* The running maximum, four steps at a time. NaN may get lost: the sum keeps it. */
template <bool BACK, class T>
static inline void scanlib_log_maximum(const T *b, T *__restrict__ m, npy_intp n) {
  const npy_intp sign = BACK ? -1 : 1;
  npy_intp j = BACK ? n - 1 : 0, k = 0;
  T state = m[j - sign];
  for (; k + 4 <= n; k += 4, j += 4 * sign) {
    const T b1 = b[j], b2 = scanlib_maximum::pick(b1, b[j + sign]);
    const T b3 = scanlib_maximum::pick(b2, b[j + 2 * sign]);
    const T b4 = scanlib_maximum::pick(b3, b[j + 3 * sign]);
    m[j] = scanlib_maximum::pick(b1, state);
    m[j + sign] = scanlib_maximum::pick(b2, state);
    m[j + 2 * sign] = scanlib_maximum::pick(b3, state);
    m[j + 3 * sign] = state = scanlib_maximum::pick(b4, state);
  }
  for (; k < n; k++, j += sign) m[j] = state = scanlib_maximum::pick(b[j], state);
}

/* The same of m + a, each sum rounded as the loop itself rounds it. */
template <bool BACK, class T>
static inline void scanlib_log_maximum(const T *a, const T *b, T *__restrict__ m, npy_intp n) {
  const npy_intp sign = BACK ? -1 : 1;
  npy_intp j = BACK ? n - 1 : 0;
  T state = m[j - sign];
  for (npy_intp k = 0; k < n; k++, j += sign)
    m[j] = state = scanlib_maximum::pick(b[j], state + a[j]);
}

/* Whether no value is NaN or infinity; minus infinity is none of these. */
template <class T>
static inline bool scanlib_all_below_infinity(const T *values, npy_intp n) {
  int found = 0;
#pragma omp simd reduction(| : found)
  for (npy_intp j = 0; j < n; j++) found |= !(values[j] < (T)NPY_INFINITY);
  return !found;
}

/* h = logaddexp(h + a, b), without a where it is NULL; F has the functions, `work` 3 n numbers. */
template <bool BACK, class F, class T>
static int scanlib_log_affine(const T *a, const T *b, T *h, npy_intp n, T *work) {
  if (!scanlib_all_below_infinity(b, n) || (a && !scanlib_all_below_infinity(a, n))) return 0;
  T *__restrict__ scale = work, *__restrict__ added = work + n, *__restrict__ sum = work + 2 * n;
  const T *old = BACK ? h + 1 : h - 1;
  if (a)
    scanlib_log_maximum<BACK>(a, b, h, n);
  else
    scanlib_log_maximum<BACK>(b, h, n);
  for (npy_intp j = 0; j < n; j++) added[j] = a ? old[j] + a[j] : old[j];
#pragma omp simd
  for (npy_intp j = 0; j < n; j++) {
    const T p = added[j], e = F::exp(-(b[j] == p ? T(0) : F::size_of(b[j] - p)));
    scale[j] = b[j] > p ? e : T(1);
    added[j] = b[j] > p ? T(1) : e;
  }
  const scanlib_each<T> scales = {scale};
  scanlib_walk<T> walk = scanlib_affine_groups<BACK, false>(scales, added, sum, n, T(1),
                                                            scanlib_ahead<0>());
  scanlib_affine_rest<BACK, false>(walk, scales, added, sum, n);
#pragma omp simd
  for (npy_intp j = 0; j < n; j++) h[j] += F::log(sum[j]);
  return 1;
}
#endif
"""
