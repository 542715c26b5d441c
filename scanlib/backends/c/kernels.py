"""C++ templates that scan one block of steps of one channel.

Each takes the elements of `n` steps in contiguous arrays and the place `h` of the new values; the
state before the block is ``h[-1]``, or ``h[n]`` where `BACK` says that the loop walks backwards;
arrays are in the order of memory in both cases. The result is whether the new values can be
trusted: composing several steps could lose what one step after the other keeps, or keep what it
loses, where a value comes near to overflow or is not finite, or where products of coefficients may
leave the range of their dtype. The block is then run step by step.

Steps are composed in vectors (see `lanes`); in double precision with a coefficient for each step
and registers of four numbers, four at a time without vectors: only one multiplication and one
addition of a group of steps wait for the state before.
"""

from scanlib.backends.c.extreme_kernels import EXTREME_KERNELS
from scanlib.backends.c.lanes import LANES

_BOUNDS = r"""
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

"""

_AFFINE_KERNELS = r"""
/* Affine recurrences: h = a * h + b, or, where the sum comes FIRST, s = h + b and h = a * s, of
 * which s is kept. What scans most of a block returns the state h after the steps that it did, and
 * how many these are.
 *
 * Four steps at a time, without vectors. */
template <bool BACK, bool FIRST, class T, class A, class AHEAD>
static inline T scanlib_affine_fours(A a, const T *b, T *__restrict__ h, npy_intp n, T state,
                                     const AHEAD &ahead, npy_intp *done) {
  const npy_intp sign = BACK ? -1 : 1;
  npy_intp k = 0;
  for (; k + 4 <= n; k += 4) {
    const npy_intp j0 = BACK ? n - 1 - k : k, j1 = j0 + sign, j2 = j1 + sign, j3 = j2 + sign;
    ahead.template fetch<4 * sizeof(T)>((BACK ? j3 : j0) * sizeof(T));
    const T last = a[j3], b0 = b[j0], b1 = b[j1], b2 = b[j2], b3 = b[j3];
    const T a0 = FIRST ? T(1) : T(a[j0]), a1 = a[FIRST ? j0 : j1], a2 = a[FIRST ? j1 : j2];
    const T a3 = FIRST ? T(a[j2]) : last;
    const T a01 = a1 * a0, b01 = a1 * b0 + b1;
    const T a23 = a3 * a2, b23 = a3 * b2 + b3;
    const T a03 = a23 * a01, b03 = a23 * b01 + b23;
    const T second = a01 * state + b01;
    h[j0] = a0 * state + b0;
    h[j1] = second;
    h[j2] = a2 * second + b2;
    h[j3] = a03 * state + b03;
    state = FIRST ? (last * a03) * state + last * b03 : h[j3];
  }
  *done = k;
  return state;
}

#ifdef SCANLIB_BYTES
/* The maps of the steps of a group up to each: a and b of the BY steps before are composed. */
template <class L, bool PRODUCT, int BY>
static inline void scanlib_compose_earlier(typename L::V &a, typename L::V &b) {
  const typename L::V zeros = {}, ones = zeros + 1;
  if (!PRODUCT) b = a * L::template earlier<BY, L::GROUP>(b, zeros) + b;
  a = a * L::template earlier<BY, L::GROUP>(a, ones);
}

/* In vectors, a coefficient for each step. Without b where the recurrence is a PRODUCT. */
template <bool BACK, bool FIRST, bool PRODUCT, class T, class AHEAD>
static inline T scanlib_affine_lanes(const T *coefficients, const T *b, T *__restrict__ h,
                                     npy_intp n, T start, const AHEAD &ahead, npy_intp *done) {
  typedef scanlib_lanes<BACK, T> L;
  typedef typename L::V V;
  enum { G = L::GROUP };
  const V zeros = {}, ones = zeros + 1;
  V state = L::all(start);
  npy_intp k = 0;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = L::place(k, n);
    ahead.template fetch<sizeof(V)>(j * sizeof(T));
    const V own = L::load(coefficients + j);
    V a = FIRST ? L::template earlier<1, G>(own, ones) : own, t = PRODUCT ? zeros : L::load(b + j);
    scanlib_compose_earlier<L, PRODUCT, 1>(a, t);
    scanlib_compose_earlier<L, PRODUCT, 2>(a, t);
    if (G > 4) scanlib_compose_earlier<L, PRODUCT, (G > 4 ? 4 : 1)>(a, t);
    const V factor = FIRST ? own * a : a, term = FIRST ? own * t : t;
    V before = state;
    state = L::template last<0, G>(factor) * state;
    if (!PRODUCT) state = state + L::template last<0, G>(term);
    if (L::GROUPS > 1) {
      before = L::groups(before, state);
      state = L::template last<L::GROUPS - 1, G>(factor) * state;
      if (!PRODUCT) state = state + L::template last<L::GROUPS - 1, G>(term);
    }
    L::store(h + j, PRODUCT ? a * before : a * before + t);
  }
  *done = k;
  return state[0];
}

/* In vectors, one coefficient, whose powers are computed once. In single precision, powers that are
 * rounded at each product would change it, and states that are rounded at each vector add up
 * errors: both are in double precision. */
template <class L, bool FIRST> struct scanlib_powers {
  typedef typename L::V V;
  V each, p1, p2, p4, p8;
  npy_float64 one, whole;
  template <class T> explicit scanlib_powers(T a) {
    npy_float64 powers[L::N + 1] = {1};
    for (int k = 0; k < L::N; k++) powers[k + 1] = powers[k] * a;
    for (int k = 0; k < L::N; k++)
      each[k] = (T)powers[L::template step<L::N>(k) + (FIRST ? 0 : 1)];
    p1 = L::all(a);
    p2 = L::all((T)powers[2]);
    p4 = L::all((T)powers[4]);
    p8 = L::all((T)powers[L::N > 8 ? 8 : 0]);
    one = a;
    whole = powers[L::N];
  }
  inline V sums(V v) const {
    const V zeros = {};
    v = p1 * L::template earlier<1, L::N>(v, zeros) + v;
    v = p2 * L::template earlier<2, L::N>(v, zeros) + v;
    if (L::N > 4) v = p4 * L::template earlier<(L::N > 4 ? 4 : 1), L::N>(v, zeros) + v;
    if (L::N > 8) v = p8 * L::template earlier<(L::N > 8 ? 8 : 1), L::N>(v, zeros) + v;
    return v;
  }
};

template <bool BACK, bool FIRST, class AHEAD>
static inline npy_float64 scanlib_affine_powers(npy_float64 a, const npy_float64 *b,
                                                npy_float64 *__restrict__ h, npy_intp n,
                                                npy_float64 start, const AHEAD &ahead,
                                                npy_intp *done) {
  typedef scanlib_lanes<BACK, npy_float64> L;
  const scanlib_powers<L, FIRST> powers(a);
  const typename L::V whole = L::all(powers.whole), one = L::all(a);
  typename L::V state = L::all(start);
  npy_intp k = 0;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = L::place(k, n);
    ahead.template fetch<SCANLIB_BYTES>(j * sizeof(npy_float64));
    const typename L::V v = powers.sums(L::load(b + j)), last = L::template last<0, L::N>(v);
    L::store(h + j, powers.each * state + v);
    state = whole * state + (FIRST ? one * last : last);
  }
  *done = k;
  return state[0];
}
template <bool BACK, bool FIRST, class AHEAD>
static inline npy_float32 scanlib_affine_powers(npy_float32 a, const npy_float32 *b,
                                                npy_float32 *__restrict__ h, npy_intp n,
                                                npy_float32 start, const AHEAD &ahead,
                                                npy_intp *done) {
  typedef scanlib_lanes<BACK, npy_float32> L;
  const scanlib_powers<L, FIRST> powers(a);
  npy_float64 state = start;
  npy_intp k = 0;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = L::place(k, n);
    ahead.template fetch<SCANLIB_BYTES>(j * sizeof(npy_float32));
    const typename L::V v = powers.sums(L::load(b + j));
    const npy_float64 last = L::template last<0, L::N>(v)[0];
    L::store(h + j, powers.each * (npy_float32)state + v);
    state = powers.whole * state + (FIRST ? powers.one * last : last);
  }
  *done = k;
  return (npy_float32)state;
}

/* In double precision, coefficients for each step and vectors of four: moving lanes costs more than
 * it saves. */
template <bool BACK, bool FIRST, class T, class AHEAD>
static inline T scanlib_affine_groups(scanlib_each<T> a, const T *b, T *__restrict__ h, npy_intp n,
                                      T state, const AHEAD &ahead, npy_intp *done) {
  if (SCANLIB_BYTES / sizeof(T) < 8)
    return scanlib_affine_fours<BACK, FIRST>(a, b, h, n, state, ahead, done);
  return scanlib_affine_lanes<BACK, FIRST, false>(a.values, b, h, n, state, ahead, done);
}
template <bool BACK, bool FIRST, class T, class AHEAD>
static inline T scanlib_affine_groups(scanlib_same<T> a, const T *b, T *__restrict__ h, npy_intp n,
                                      T state, const AHEAD &ahead, npy_intp *done) {
  return scanlib_affine_powers<BACK, FIRST>(a.value, b, h, n, state, ahead, done);
}
#else
template <bool BACK, bool FIRST, class T, class A, class AHEAD>
static inline T scanlib_affine_groups(A a, const T *b, T *__restrict__ h, npy_intp n, T state,
                                      const AHEAD &ahead, npy_intp *done) {
  return scanlib_affine_fours<BACK, FIRST>(a, b, h, n, state, ahead, done);
}
/* In single precision, rounding at every step adds up: the state is in double precision. */
template <bool BACK, bool FIRST, class AHEAD>
static inline npy_float32 scanlib_affine_groups(scanlib_same<npy_float32> a, const npy_float32 *b,
                                                npy_float32 *__restrict__ h, npy_intp n,
                                                npy_float32 start, const AHEAD &, npy_intp *done) {
  npy_float64 state = start;
  for (npy_intp k = 0; k < n; k++) {
    const npy_intp j = BACK ? n - 1 - k : k;
    const npy_float64 total = FIRST ? state + b[j] : a.value * state + b[j];
    h[j] = (npy_float32)total;
    state = FIRST ? a.value * total : total;
  }
  *done = n;
  return (npy_float32)state;
}
#endif

/* h = a * h + b. */
template <bool BACK, class T, class A, class AHEAD>
static int scanlib_affine(A a, const T *b, T *__restrict__ h, npy_intp n, const AHEAD &ahead) {
  if (a.extreme(n)) return 0;
  npy_intp k;
  T state = scanlib_affine_groups<BACK, false>(a, b, h, n, BACK ? h[n] : h[-1], ahead, &k);
  for (; k < n; k++) {
    const npy_intp j = BACK ? n - 1 - k : k;
    h[j] = state = a[j] * state + b[j];
  }
  return scanlib_all_moderate(BACK ? h : h - 1, n + 1);
}

/* s = h + b, h = a * s; `after` gets the state h. See scanlib.ops.sums_first. */
template <bool BACK, class T, class A, class AHEAD>
static int scanlib_sums_first(A a, const T *b, T *__restrict__ s, npy_intp n, T state, T *after,
                              const AHEAD &ahead) {
  if (a.extreme(n) || !scanlib_moderate(state)) return 0;
  npy_intp k;
  state = scanlib_affine_groups<BACK, true>(a, b, s, n, state, ahead, &k);
  for (; k < n; k++) {
    const npy_intp j = BACK ? n - 1 - k : k;
    s[j] = state + b[j];
    state = a[j] * s[j];
  }
  *after = state;
  return scanlib_all_moderate(s, n);
}

/* h = a * h. */
template <bool BACK, class T, class AHEAD>
static int scanlib_product(const T *a, T *__restrict__ h, npy_intp n, const AHEAD &ahead) {
  if (scanlib_some_extreme(a, n)) return 0;
  const npy_intp sign = BACK ? -1 : 1;
  npy_intp k = 0;
  T state = BACK ? h[n] : h[-1];
#ifdef SCANLIB_BYTES
  state = scanlib_affine_lanes<BACK, false, true>(a, a, h, n, state, ahead, &k);
#endif
  npy_intp j = BACK ? n - 1 - k : k;
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

KERNELS = f"{_BOUNDS}{LANES}{_AFFINE_KERNELS}{EXTREME_KERNELS}#endif\n"
