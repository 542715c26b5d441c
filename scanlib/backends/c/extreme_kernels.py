"""C++ templates that scan running extremes and clamped shifts, for `scanlib.backends.c.kernels`."""

EXTREME_KERNELS = r"""
struct scanlib_maximum {
  template <class T> static inline T pick(T a, T b) { return a > b ? a : b; }
};
struct scanlib_minimum {
  template <class T> static inline T pick(T a, T b) { return a < b ? a : b; }
};

/* Steps that are done in lanes, of types that have vectors: returns how many. */
template <bool BACK, class P, class T>
static inline npy_intp scanlib_pick_lanes(const T *, T *, npy_intp, T *) {
  return 0;
}
#ifdef SCANLIB_BYTES
template <class P, class V, class M> struct scanlib_pick_steps {
  V b;
  inline void compose(M places) { b = P::pick(b, __builtin_shuffle(b, b, places)); }
};

template <bool BACK, class P, class T>
static inline npy_intp scanlib_pick_vectors(const T *b, T *h, npy_intp n, T *state) {
  typedef scanlib_lanes<T> L;
  const typename L::V zeros = {};
  typename L::V before = zeros + *state;
  const typename L::M last = ((typename L::M){}) + (L::N - 1);
  npy_intp k = 0;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = BACK ? n - L::N - k : k;
    scanlib_pick_steps<P, typename L::V, typename L::M> steps = {scanlib_load<BACK>(b + j)};
    scanlib_scan<L>(steps);
    scanlib_store<BACK>(h + j, P::pick(steps.b, before));
    before = P::pick(__builtin_shuffle(steps.b, last), before);
  }
  *state = before[0];
  return k;
}
template <bool BACK, class P>
static inline npy_intp scanlib_pick_lanes(const npy_float64 *b, npy_float64 *h, npy_intp n,
                                          npy_float64 *state) {
  return scanlib_pick_vectors<BACK, P>(b, h, n, state);
}
template <bool BACK, class P>
static inline npy_intp scanlib_pick_lanes(const npy_float32 *b, npy_float32 *h, npy_intp n,
                                          npy_float32 *state) {
  return scanlib_pick_vectors<BACK, P>(b, h, n, state);
}
#endif

/* h = max(b, h) or min(b, h); a comparison would lose a NaN. */
template <bool BACK, class P, class T>
static int scanlib_pick(const T *b, T *__restrict__ h, npy_intp n) {
  const npy_intp sign = BACK ? -1 : 1;
  T state = BACK ? h[n] : h[-1];
  if (state != state || scanlib_some_nan(b, n)) return 0;
  npy_intp k = scanlib_pick_lanes<BACK, P>(b, h, n, &state), j = BACK ? n - 1 - k : k;
  for (; k + 4 <= n; k += 4, j += 4 * sign) {
    const T b0 = b[j], b1 = b[j + sign], b2 = b[j + 2 * sign], b3 = b[j + 3 * sign];
    const T b01 = P::pick(b0, b1), b02 = P::pick(b01, b2), b03 = P::pick(b01, P::pick(b2, b3));
    h[j] = P::pick(b0, state);
    h[j + sign] = P::pick(b01, state);
    h[j + 2 * sign] = P::pick(b02, state);
    h[j + 3 * sign] = state = P::pick(b03, state);
  }
  for (; k < n; k++, j += sign) h[j] = state = P::pick(b[j], state);
  return 1;
}

template <class T> static inline T scanlib_clamped(T value, T low, T high) {
  return scanlib_minimum::pick(scanlib_maximum::pick(value, low), high);
}

#ifdef SCANLIB_BYTES
template <class V, class M> struct scanlib_clamp_steps {
  V a, low, high;
  inline void compose(M places) {
    const V zeros = {}, most = zeros + NPY_INFINITYF;
    const V low1 = __builtin_shuffle(low, -most, places) + a;
    const V high1 = __builtin_shuffle(high, most, places) + a;
    high = scanlib_clamped(high1, low, high);
    low = scanlib_maximum::pick(low1, low);
    a = __builtin_shuffle(a, zeros, places) + a;
  }
};
#endif

/* h = min(max(h + a, low), high). */
template <bool BACK, class T>
static int scanlib_clamp(const T *a, const T *low, const T *high, T *__restrict__ h, npy_intp n) {
  T state = BACK ? h[n] : h[-1];
  if (state != state || scanlib_some_large(a, n) || scanlib_some_nan(low, n) ||
      scanlib_some_nan(high, n))
    return 0;
  npy_intp k = 0;
#ifdef SCANLIB_BYTES
  typedef scanlib_lanes<T> L;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = BACK ? n - L::N - k : k;
    scanlib_clamp_steps<typename L::V, typename L::M> steps = {scanlib_load<BACK>(a + j),
                                                               scanlib_load<BACK>(low + j),
                                                               scanlib_load<BACK>(high + j)};
    scanlib_scan<L>(steps);
    const typename L::V values = scanlib_clamped(steps.a + state, steps.low, steps.high);
    scanlib_store<BACK>(h + j, values);
    state = values[L::N - 1];
  }
#endif
  for (; k < n; k++) {
    const npy_intp j = BACK ? n - 1 - k : k;
    h[j] = state = scanlib_clamped(state + a[j], low[j], high[j]);
  }
  return 1;
}
"""
