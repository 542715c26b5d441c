"""C++ templates that scan running extremes and clamped shifts, for `scanlib.backends.c.kernels`."""

EXTREME_KERNELS = r"""
struct scanlib_maximum {
  template <class T> static inline T pick(T a, T b) { return a > b ? a : b; }
};
struct scanlib_minimum {
  template <class T> static inline T pick(T a, T b) { return a < b ? a : b; }
};

/* Steps that are done in lanes, of types that have vectors: returns how many, -1 if there is a NaN
 * among them. */
template <bool BACK, class P, class T, class AHEAD>
static inline npy_intp scanlib_pick_lanes(const T *, T *, npy_intp, T *, const AHEAD &) {
  return 0;
}
#ifdef SCANLIB_BYTES
template <bool BACK, class P, class T, class AHEAD>
static inline npy_intp scanlib_pick_vectors(const T *b, T *h, npy_intp n, T *state,
                                            const AHEAD &ahead) {
  typedef scanlib_lanes<BACK, T> L;
  typename L::V before = L::all(*state);
  typename L::M found = {};
  npy_intp k = 0;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = L::place(k, n);
    ahead.template fetch<SCANLIB_BYTES>(j * sizeof(T));
    typename L::V v = L::load(b + j);
    found |= scanlib_above(L::bits(v), (T)NPY_INFINITYF);
    v = P::pick(L::template earlier_or_same<1, L::N>(v), v);
    v = P::pick(L::template earlier_or_same<2, L::N>(v), v);
    if (L::N > 4) v = P::pick(L::template earlier_or_same<(L::N > 4 ? 4 : 1), L::N>(v), v);
    if (L::N > 8) v = P::pick(L::template earlier_or_same<(L::N > 8 ? 8 : 1), L::N>(v), v);
    L::store(h + j, P::pick(v, before));
    before = P::pick(L::template last<0, L::N>(v), before);
  }
  *state = before[0];
  return L::some_negative(found) ? -1 : k;
}
template <bool BACK, class P, class AHEAD>
static inline npy_intp scanlib_pick_lanes(const npy_float64 *b, npy_float64 *h, npy_intp n,
                                          npy_float64 *state, const AHEAD &ahead) {
  return scanlib_pick_vectors<BACK, P>(b, h, n, state, ahead);
}
template <bool BACK, class P, class AHEAD>
static inline npy_intp scanlib_pick_lanes(const npy_float32 *b, npy_float32 *h, npy_intp n,
                                          npy_float32 *state, const AHEAD &ahead) {
  return scanlib_pick_vectors<BACK, P>(b, h, n, state, ahead);
}
#endif

/* h = max(b, h) or min(b, h); a comparison would lose a NaN. */
template <bool BACK, class P, class T, class AHEAD>
static int scanlib_pick(const T *b, T *__restrict__ h, npy_intp n, const AHEAD &ahead) {
  const npy_intp sign = BACK ? -1 : 1;
  T state = BACK ? h[n] : h[-1];
  npy_intp k = scanlib_pick_lanes<BACK, P>(b, h, n, &state, ahead), j = BACK ? n - 1 - k : k;
  if (k < 0 || state != state || scanlib_some_nan(BACK ? b : b + k, n - k)) return 0;
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
template <class L, int BY>
static inline void scanlib_clamp_earlier(typename L::V &a, typename L::V &low,
                                         typename L::V &high) {
  const typename L::V zeros = {}, most = zeros + NPY_INFINITYF;
  const typename L::V low1 = L::template earlier<BY, L::N>(low, -most) + a;
  const typename L::V high1 = L::template earlier<BY, L::N>(high, most) + a;
  high = scanlib_clamped(high1, low, high);
  low = scanlib_maximum::pick(low1, low);
  a = L::template earlier<BY, L::N>(a, -zeros) + a;
}
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
  typedef scanlib_lanes<BACK, T> L;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = L::place(k, n);
    typename L::V shift = L::load(a + j), least = L::load(low + j), most = L::load(high + j);
    scanlib_clamp_earlier<L, 1>(shift, least, most);
    scanlib_clamp_earlier<L, 2>(shift, least, most);
    if (L::N > 4) scanlib_clamp_earlier<L, (L::N > 4 ? 4 : 1)>(shift, least, most);
    if (L::N > 8) scanlib_clamp_earlier<L, (L::N > 8 ? 8 : 1)>(shift, least, most);
    const typename L::V values = scanlib_clamped(shift + state, least, most);
    L::store(h + j, values);
    state = values[BACK ? 0 : L::N - 1];
  }
#endif
  for (; k < n; k++) {
    const npy_intp j = BACK ? n - 1 - k : k;
    h[j] = state = scanlib_clamped(state + a[j], low[j], high[j]);
  }
  return 1;
}
"""
