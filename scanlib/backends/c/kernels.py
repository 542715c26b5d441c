"""C++ templates that scan one block of steps of one channel.

Each takes the elements of `n` steps in contiguous arrays and the place `h` of the new values; the
state before the block is ``h[-1]``, or ``h[n]`` where `BACK` says that the loop walks backwards;
arrays are in the order of memory in both cases. The result is whether the new values can be
trusted: composing several steps could lose what one step after the other keeps, or keep what it
loses, where a value comes near to overflow or is not finite, or where products of coefficients may
leave the range of their dtype. The block is then run step by step.

Steps are composed four at a time (P. Kogge and H. Stone, "A parallel algorithm for the efficient
solution of a general class of recurrence equations", 1973): only one multiplication and one
addition of four steps wait for the state before. Where the coefficient is the same for all steps,
and in float32, steps are composed in vectors, by doubling: lanes are moved to later steps by one,
by two, by four.
"""

from scanlib.backends.c.extreme_kernels import EXTREME_KERNELS

_AFFINE_KERNELS = r"""
#ifndef SCANLIB_KERNELS
#define SCANLIB_KERNELS
template <class T> struct scanlib_bounds;
template <> struct scanlib_bounds<npy_float64> {
  typedef npy_int64 count;
  static npy_float64 low() { return 0x1p-120; }
  static npy_float64 high() { return 0x1p120; }
  static npy_float64 moderate() { return 0x1p800; }
  static npy_float64 large() { return 0x1p1000; }
};
template <> struct scanlib_bounds<npy_float32> {
  typedef npy_int32 count;
  static npy_float32 low() { return 0x1p-15f; }
  static npy_float32 high() { return 0x1p15f; }
  static npy_float32 moderate() { return 0x1p100f; }
  static npy_float32 large() { return 0x1p120f; }
};

template <class T> static inline T scanlib_abs(T value) { return value < 0 ? -value : value; }

/* Whether products of a coefficient may leave the range of its dtype, zero aside. */
template <class T> static inline int scanlib_extreme(T a) {
  const T size = scanlib_abs(a);
  return !(((size >= scanlib_bounds<T>::low()) & (size <= scanlib_bounds<T>::high())) | (a == 0));
}

/* Whether a value is so far from overflow that no step from it overflows. */
template <class T> static inline int scanlib_moderate(T value) {
  return scanlib_abs(value) <= scanlib_bounds<T>::moderate();
}

/* NaN does not count: it shows in the values. */
template <class T> static int scanlib_some_extreme(const T *a, npy_intp n) {
  T least = 1, most = 0;
#pragma omp simd reduction(min : least) reduction(max : most)
  for (npy_intp j = 0; j < n; j++) {
    const T size = scanlib_abs(a[j]), other = size == 0 ? T(1) : size;
    least = other < least ? other : least;
    most = size > most ? size : most;
  }
  return least < scanlib_bounds<T>::low() || most > scanlib_bounds<T>::high();
}

template <class T> static int scanlib_all_moderate(const T *h, npy_intp n) {
  typename scanlib_bounds<T>::count count = 0;  /* as wide as T: lanes of one size */
#pragma omp simd reduction(+ : count)
  for (npy_intp j = 0; j < n; j++) count += scanlib_moderate(h[j]) ? 0 : 1;
  return count == 0;
}

template <class T> static int scanlib_some_nan(const T *b, npy_intp n) {
  int count = 0;
#pragma omp simd reduction(+ : count)
  for (npy_intp j = 0; j < n; j++) count += b[j] != b[j];
  return count > 0;
}

template <class T> static int scanlib_some_large(const T *a, npy_intp n) {
  int count = 0;
#pragma omp simd reduction(+ : count)
  for (npy_intp j = 0; j < n; j++) count += !(scanlib_abs(a[j]) < scanlib_bounds<T>::large());
  return count > 0;
}

/* The coefficients of an affine recurrence: one for each step, or the same for all. */
template <class T> struct scanlib_each {
  const T *values;
  T operator[](npy_intp j) const { return values[j]; }
  int extreme(npy_intp n) const { return scanlib_some_extreme(values, n); }
};
template <class T> struct scanlib_same {
  T value;
  T operator[](npy_intp) const { return value; }
  int extreme(npy_intp) const { return scanlib_extreme(value); }
};

/* h = a * h + b, four steps at a time; returns the state after the last whole group. */
template <bool BACK, class T, class A>
static inline T scanlib_affine_groups(A a, const T *b, T *__restrict__ h, npy_intp n, T state,
                                      npy_intp *done) {
  const npy_intp sign = BACK ? -1 : 1;
  npy_intp k = 0;
  for (; k + 4 <= n; k += 4) {
    const npy_intp j0 = BACK ? n - 1 - k : k, j1 = j0 + sign, j2 = j1 + sign, j3 = j2 + sign;
    const T a0 = a[j0], a1 = a[j1], a2 = a[j2], a3 = a[j3];
    const T b0 = b[j0], b1 = b[j1], b2 = b[j2], b3 = b[j3];
    const T a01 = a1 * a0, b01 = a1 * b0 + b1;
    const T a23 = a3 * a2, b23 = a3 * b2 + b3;
    const T a03 = a23 * a01, b03 = a23 * b01 + b23;
    const T second = a01 * state + b01;
    h[j0] = a0 * state + b0;
    h[j1] = second;
    h[j2] = a2 * second + b2;
    state = a03 * state + b03;
    h[j3] = state;
  }
  *done = k;
  return state;
}

/* Vectors as long as the machine's: compilers take longer ones apart number by number. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX512F__)
#define SCANLIB_BYTES 64
#elif defined(__GNUC__) && !defined(__clang__) && defined(__AVX2__)
#define SCANLIB_BYTES 32
#endif

#ifdef SCANLIB_BYTES
/* Where lanes come from that move to later steps by 1, 2, 4, 8; N and more: from what enters. */
template <class M, int N> struct scanlib_places;
template <class M> struct scanlib_places<M, 4> {
  static inline M by1() { return (M){4, 0, 1, 2}; }
  static inline M by2() { return (M){4, 5, 0, 1}; }
  static inline M by4() { return (M){4, 5, 6, 7}; }
  static inline M by8() { return by4(); }
  static inline M turned() { return (M){3, 2, 1, 0}; }
};
template <class M> struct scanlib_places<M, 8> {
  static inline M by1() { return (M){8, 0, 1, 2, 3, 4, 5, 6}; }
  static inline M by2() { return (M){8, 9, 0, 1, 2, 3, 4, 5}; }
  static inline M by4() { return (M){8, 9, 10, 11, 0, 1, 2, 3}; }
  static inline M by8() { return (M){8, 9, 10, 11, 12, 13, 14, 15}; }
  static inline M turned() { return (M){7, 6, 5, 4, 3, 2, 1, 0}; }
};
template <class M> struct scanlib_places<M, 16> {
  static inline M by1() { return (M){16, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14}; }
  static inline M by2() { return (M){16, 17, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}; }
  static inline M by4() { return (M){16, 17, 18, 19, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}; }
  static inline M by8() { return (M){16, 17, 18, 19, 20, 21, 22, 23, 0, 1, 2, 3, 4, 5, 6, 7}; }
  static inline M turned() { return (M){15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}; }
};

template <class T> struct scanlib_lanes;
template <> struct scanlib_lanes<npy_float32> {
  typedef npy_float32 V __attribute__((vector_size(SCANLIB_BYTES)));
  typedef npy_int32 M __attribute__((vector_size(SCANLIB_BYTES)));
  enum { N = SCANLIB_BYTES / 4 };
  typedef scanlib_places<M, N> places;
};
template <> struct scanlib_lanes<npy_float64> {
  typedef npy_float64 V __attribute__((vector_size(SCANLIB_BYTES)));
  typedef npy_int64 M __attribute__((vector_size(SCANLIB_BYTES)));
  enum { N = SCANLIB_BYTES / 8 };
  typedef scanlib_places<M, N> places;
};

/* Composes each lane of `steps` with all lanes before it. */
template <class L, class S> static inline void scanlib_scan(S &steps) {
  steps.compose(L::places::by1());
  steps.compose(L::places::by2());
  if (L::N > 4) steps.compose(L::places::by4());
  if (L::N > 8) steps.compose(L::places::by8());
}

template <bool BACK, class T>
static inline typename scanlib_lanes<T>::V scanlib_load(const T *p) {
  typename scanlib_lanes<T>::V v;
  memcpy(&v, p, sizeof v);
  return BACK ? __builtin_shuffle(v, scanlib_lanes<T>::places::turned()) : v;
}
template <bool BACK, class T>
static inline void scanlib_store(T *p, typename scanlib_lanes<T>::V v) {
  if (BACK) v = __builtin_shuffle(v, scanlib_lanes<T>::places::turned());
  memcpy(p, &v, sizeof v);
}
template <bool BACK, class T>
static inline typename scanlib_lanes<T>::V scanlib_load(scanlib_each<T> a, npy_intp j) {
  return scanlib_load<BACK>(a.values + j);
}
template <class V, class M> struct scanlib_affine_steps {
  V a, b;
  inline void compose(M places) {
    const V zeros = {}, ones = zeros + 1;
    b = a * __builtin_shuffle(b, zeros, places) + b;
    a = a * __builtin_shuffle(a, ones, places);
  }
};

template <bool BACK, class T, class A>
static inline T scanlib_affine_lanes(A a, const T *b, T *__restrict__ h, npy_intp n, T state,
                                     npy_intp *done) {
  typedef scanlib_lanes<T> L;
  npy_intp k = 0;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = BACK ? n - L::N - k : k;
    scanlib_affine_steps<typename L::V, typename L::M> steps = {scanlib_load<BACK>(a, j),
                                                                scanlib_load<BACK>(b + j)};
    scanlib_scan<L>(steps);
    scanlib_store<BACK>(h + j, steps.a * state + steps.b);
    state = steps.a[L::N - 1] * state + steps.b[L::N - 1];
  }
  *done = k;
  return state;
}

/* For float64 with a coefficient for each step, moving lanes costs more than it saves. */
template <bool BACK>
static inline npy_float32 scanlib_affine_groups(scanlib_each<npy_float32> a, const npy_float32 *b,
                                                npy_float32 *__restrict__ h, npy_intp n,
                                                npy_float32 state, npy_intp *done) {
  return scanlib_affine_lanes<BACK>(a, b, h, n, state, done);
}

/* One coefficient for all steps: its powers are computed once. In single precision, powers that are
 * rounded at each product would change it, and states that are rounded at each vector add up
 * errors: both are in double precision. */
template <bool BACK, class T>
static inline T scanlib_affine_groups(scanlib_same<T> a, const T *b, T *__restrict__ h, npy_intp n,
                                      T start, npy_intp *done) {
  typedef scanlib_lanes<T> L;
  typedef typename L::places places;
  const typename L::V zeros = {};
  typename L::V powers;
  npy_float64 state = start, power = 1;
  for (int lane = 0; lane < L::N; lane++) powers[lane] = (T)(power *= a.value);
  const T p1 = powers[0], p2 = powers[1], p4 = powers[3], p8 = powers[L::N > 8 ? 7 : 0];
  npy_intp k = 0;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = BACK ? n - L::N - k : k;
    typename L::V v = scanlib_load<BACK>(b + j);
    v = p1 * __builtin_shuffle(v, zeros, places::by1()) + v;
    v = p2 * __builtin_shuffle(v, zeros, places::by2()) + v;
    if (L::N > 4) v = p4 * __builtin_shuffle(v, zeros, places::by4()) + v;
    if (L::N > 8) v = p8 * __builtin_shuffle(v, zeros, places::by8()) + v;
    scanlib_store<BACK>(h + j, powers * (T)state + v);
    state = power * state + v[L::N - 1];
  }
  *done = k;
  return (T)state;
}
#else
/* In single precision, rounding at every step adds up: the state is in double precision. */
template <bool BACK>
static inline npy_float32 scanlib_affine_groups(scanlib_same<npy_float32> a, const npy_float32 *b,
                                                npy_float32 *__restrict__ h, npy_intp n,
                                                npy_float32 start, npy_intp *done) {
  npy_float64 state = start;
  for (npy_intp k = 0; k < n; k++) {
    const npy_intp j = BACK ? n - 1 - k : k;
    state = a.value * state + b[j];
    h[j] = (npy_float32)state;
  }
  *done = n;
  return (npy_float32)state;
}
#endif

/* h = a * h + b. */
template <bool BACK, class T, class A>
static int scanlib_affine(A a, const T *b, T *__restrict__ h, npy_intp n) {
  if (a.extreme(n)) return 0;
  npy_intp k;
  T state = scanlib_affine_groups<BACK>(a, b, h, n, BACK ? h[n] : h[-1], &k);
  for (; k < n; k++) {
    const npy_intp j = BACK ? n - 1 - k : k;
    h[j] = state = a[j] * state + b[j];
  }
  return scanlib_all_moderate(BACK ? h : h - 1, n + 1);
}

/* h = a * h. */
template <bool BACK, class T>
static int scanlib_product(const T *a, T *__restrict__ h, npy_intp n) {
  if (scanlib_some_extreme(a, n)) return 0;
  const npy_intp sign = BACK ? -1 : 1;
  npy_intp j = BACK ? n - 1 : 0, k = 0;
  T state = h[j - sign];
  for (; k + 4 <= n; k += 4, j += 4 * sign) {
    const T a0 = a[j], a1 = a[j + sign], a2 = a[j + 2 * sign], a3 = a[j + 3 * sign];
    const T a01 = a0 * a1, a02 = a01 * a2, a03 = a01 * (a2 * a3);
    h[j] = a0 * state;
    h[j + sign] = a01 * state;
    h[j + 2 * sign] = a02 * state;
    h[j + 3 * sign] = state = a03 * state;
  }
  for (; k < n; k++, j += sign) h[j] = state = a[j] * state;
  return scanlib_all_moderate(BACK ? h : h - 1, n + 1);
}
"""

KERNELS = f"{_AFFINE_KERNELS}{EXTREME_KERNELS}#endif\n"
