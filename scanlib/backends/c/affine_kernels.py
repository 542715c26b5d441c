"""C++ templates that scan affine recurrences of one state, for `scanlib.backends.c.kernels`.

They write ``h = a * h + b``, or, where the sum comes first (`scanlib.ops.sums_first`), the sums of
``s = h + b``, ``h = a * s``. Vectors also look at what they read and write: numbers that are out of
bounds are found without another pass.
"""

AFFINE_KERNELS = r"""
/* The steps of a block that were done, the state h after them, and whether it can be trusted. */
template <class T> struct scanlib_walk {
  npy_intp done;
  T state;
  int safe;
};

/* Four steps at a time, without vectors. */
template <bool BACK, bool FIRST, class T, class A, class AHEAD>
static inline scanlib_walk<T> scanlib_affine_fours(A a, const T *b, T *__restrict__ h, npy_intp n,
                                                   T state, const AHEAD &ahead) {
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
  const int safe = !a.extreme(n) && scanlib_all_moderate(BACK ? h + n - k : h, k);
  return scanlib_walk<T>{k, state, safe};
}

#ifdef SCANLIB_BYTES
/* Composes maps with those of the halves before them; adding zero would change -0. */
template <class L, bool PRODUCT, int HALF>
static inline void scanlib_compose_earlier(typename L::V &a, typename L::V &b) {
  const typename L::V zeros = {}, ones = zeros + 1;
  if (!PRODUCT) b = a * L::template earlier<HALF, L::GROUP>(b, -zeros) + b;
  a = a * L::template earlier<HALF, L::GROUP>(a, ones);
}

/* In vectors, a coefficient for each step. Without b where the recurrence is a PRODUCT. */
template <bool BACK, bool FIRST, bool PRODUCT, class T, class AHEAD>
static inline scanlib_walk<T> scanlib_affine_lanes(const T *coefficients, const T *b,
                                                   T *__restrict__ h, npy_intp n, T start,
                                                   const AHEAD &ahead) {
  typedef scanlib_lanes<BACK, T> L;
  typedef typename L::V V;
  enum { G = L::GROUP };
  const V zeros = {}, ones = zeros + 1;
  typename L::M found = {};
  V state = L::all(start);
  npy_intp k = 0;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = L::place(k, n);
    ahead.template fetch<sizeof(V)>(j * sizeof(T));
    const V own = L::load(coefficients + j);
    V a = FIRST ? L::template step_before<G>(own, ones) : own, t = PRODUCT ? zeros : L::load(b + j);
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
    const V values = PRODUCT ? a * before : a * before + t;
    L::store(h + j, values);
    found |= scanlib_outside<T>(L::bits(own));
    found |= scanlib_above(L::bits(values), scanlib_bounds<T>::moderate());
  }
  return scanlib_walk<T>{k, state[0], !L::some_negative(found)};
}

/* In vectors, one coefficient, whose powers are computed once. In single precision, powers that are
 * rounded at each product would change it, and states that are rounded at each vector add up
 * errors: both are in double precision. */
template <class L, bool FIRST> struct scanlib_powers {
  typedef typename L::V V;
  V each, w1, w2, w4, w8;
  npy_float64 one, whole;
  template <class T> explicit scanlib_powers(T a) {
    npy_float64 powers[L::N + 1] = {1};
    for (int k = 0; k < L::N; k++) powers[k + 1] = powers[k] * a;
    for (int k = 0; k < L::N; k++) {
      const int step = L::template step<L::N>(k);
      each[k] = (T)powers[step + (FIRST ? 0 : 1)];
      w1[k] = weight<T>(powers, step, 1);
      w2[k] = weight<T>(powers, step, 2);
      w4[k] = weight<T>(powers, step, 4);
      w8[k] = weight<T>(powers, step, 8);
    }
    one = a;
    whole = powers[L::N];
  }
  /* What the last step of the half before counts with; zero where there is none. */
  template <class T> static T weight(const npy_float64 *powers, int step, int half) {
    return step & half ? (T)powers[step % half + 1] : T(0);
  }
  /* Where there is no step before, what is not finite spreads, but never gets lost. */
  inline V sums(V v) const {
    v = w1 * L::template earlier_or_same<1, L::N>(v) + v;
    v = w2 * L::template earlier_or_same<2, L::N>(v) + v;
    if (L::N > 4) v = w4 * L::template earlier_or_same<(L::N > 4 ? 4 : 1), L::N>(v) + v;
    if (L::N > 8) v = w8 * L::template earlier_or_same<(L::N > 8 ? 8 : 1), L::N>(v) + v;
    return v;
  }
};

/* The state between vectors, in double precision: in all lanes, or a number. */
template <class L> struct scanlib_state_in_lanes {
  typename L::V state, whole, one;
  template <class P> scanlib_state_in_lanes(const P &powers, npy_float64 start)
      : state(L::all(start)), whole(L::all(powers.whole)), one(L::all(powers.one)) {}
  inline typename L::V before() const { return state; }
  template <bool FIRST> inline void move_on(typename L::V last) {
    state = whole * state + (FIRST ? one * last : last);
  }
  inline npy_float64 value() const { return state[0]; }
};
template <class L> struct scanlib_state_as_number {
  npy_float64 state, whole, one;
  template <class P> scanlib_state_as_number(const P &powers, npy_float64 start)
      : state(start), whole(powers.whole), one(powers.one) {}
  inline typename L::V before() const { return L::all((npy_float32)state); }
  template <bool FIRST> inline void move_on(typename L::V last) {
    state = whole * state + (FIRST ? one * last[0] : (npy_float64)last[0]);
  }
  inline npy_float32 value() const { return (npy_float32)state; }
};
template <class L, class T> struct scanlib_state_for {
  typedef scanlib_state_in_lanes<L> type;
};
template <class L> struct scanlib_state_for<L, npy_float32> {
  typedef scanlib_state_as_number<L> type;
};

template <bool BACK, bool FIRST, class T, class AHEAD>
static inline scanlib_walk<T> scanlib_affine_powers(T a, const T *b, T *__restrict__ h, npy_intp n,
                                                    T start, const AHEAD &ahead) {
  typedef scanlib_lanes<BACK, T> L;
  const scanlib_powers<L, FIRST> powers(a);
  typename scanlib_state_for<L, T>::type state(powers, start);
  typename L::M found = {};
  npy_intp k = 0;
  for (; k + L::N <= n; k += L::N) {
    const npy_intp j = L::place(k, n);
    ahead.template fetch<SCANLIB_BYTES>(j * sizeof(T));
    const typename L::V v = powers.sums(L::load(b + j)), values = powers.each * state.before() + v;
    L::store(h + j, values);
    found |= scanlib_above(L::bits(values), scanlib_bounds<T>::moderate());
    state.template move_on<FIRST>(L::template last<0, L::N>(v));
  }
  return scanlib_walk<T>{k, state.value(), !scanlib_extreme(a) && !L::some_negative(found)};
}

/* In double precision, coefficients for each step and vectors of four: moving lanes costs more than
 * it saves. */
template <bool BACK, bool FIRST, class T, class AHEAD>
static inline scanlib_walk<T> scanlib_affine_groups(scanlib_each<T> a, const T *b,
                                                    T *__restrict__ h, npy_intp n, T state,
                                                    const AHEAD &ahead) {
  if (SCANLIB_BYTES / sizeof(T) < 8)
    return scanlib_affine_fours<BACK, FIRST>(a, b, h, n, state, ahead);
  return scanlib_affine_lanes<BACK, FIRST, false>(a.values, b, h, n, state, ahead);
}
template <bool BACK, bool FIRST, class T, class AHEAD>
static inline scanlib_walk<T> scanlib_affine_groups(scanlib_same<T> a, const T *b,
                                                    T *__restrict__ h, npy_intp n, T state,
                                                    const AHEAD &ahead) {
  return scanlib_affine_powers<BACK, FIRST>(a.value, b, h, n, state, ahead);
}
#else
template <bool BACK, bool FIRST, class T, class A, class AHEAD>
static inline scanlib_walk<T> scanlib_affine_groups(A a, const T *b, T *__restrict__ h, npy_intp n,
                                                    T state, const AHEAD &ahead) {
  return scanlib_affine_fours<BACK, FIRST>(a, b, h, n, state, ahead);
}
/* In single precision, rounding at every step adds up: the state is in double precision. */
template <bool BACK, bool FIRST, class AHEAD>
static inline scanlib_walk<npy_float32> scanlib_affine_groups(scanlib_same<npy_float32> a,
                                                              const npy_float32 *b,
                                                              npy_float32 *__restrict__ h,
                                                              npy_intp n, npy_float32 start,
                                                              const AHEAD &) {
  npy_float64 state = start;
  for (npy_intp k = 0; k < n; k++) {
    const npy_intp j = BACK ? n - 1 - k : k;
    const npy_float64 total = FIRST ? state + b[j] : a.value * state + b[j];
    h[j] = (npy_float32)total;
    state = FIRST ? a.value * total : total;
  }
  const int safe = !scanlib_extreme(a.value) && scanlib_all_moderate(h, n);
  return scanlib_walk<npy_float32>{n, (npy_float32)state, safe};
}
#endif

/* The steps of a block that are left, one by one. */
template <bool BACK, bool FIRST, class T, class A>
static inline void scanlib_affine_rest(scanlib_walk<T> &walk, A a, const T *b, T *__restrict__ h,
                                       npy_intp n) {
  for (; walk.done < n; walk.done++) {
    const npy_intp j = BACK ? n - 1 - walk.done : walk.done;
    h[j] = FIRST ? walk.state + b[j] : a[j] * walk.state + b[j];
    walk.state = FIRST ? a[j] * h[j] : h[j];
    walk.safe &= !scanlib_extreme(T(a[j])) & scanlib_moderate(h[j]);
  }
}

/* h = a * h + b. */
template <bool BACK, class T, class A, class AHEAD>
static int scanlib_affine(A a, const T *b, T *__restrict__ h, npy_intp n, const AHEAD &ahead) {
  const T state = BACK ? h[n] : h[-1];
  if (!scanlib_moderate(state)) return 0;
  scanlib_walk<T> walk = scanlib_affine_groups<BACK, false>(a, b, h, n, state, ahead);
  scanlib_affine_rest<BACK, false>(walk, a, b, h, n);
  return walk.safe;
}

/* s = h + b, h = a * s; takes and returns the state h. */
template <bool BACK, class T, class A, class AHEAD>
static int scanlib_sums_first(A a, const T *b, T *__restrict__ s, npy_intp n, T state, T *after,
                              const AHEAD &ahead) {
  if (!scanlib_moderate(state)) return 0;
  scanlib_walk<T> walk = scanlib_affine_groups<BACK, true>(a, b, s, n, state, ahead);
  scanlib_affine_rest<BACK, true>(walk, a, b, s, n);
  *after = walk.state;
  return walk.safe;
}

/* h = a * h. */
template <bool BACK, class T, class AHEAD>
static int scanlib_product(const T *a, T *__restrict__ h, npy_intp n, const AHEAD &ahead) {
  const npy_intp sign = BACK ? -1 : 1;
  scanlib_walk<T> walk = {0, BACK ? h[n] : h[-1], 1};
  if (!scanlib_moderate(walk.state)) return 0;
#ifdef SCANLIB_BYTES
  walk = scanlib_affine_lanes<BACK, false, true>(a, a, h, n, walk.state, ahead);
#endif
  const npy_intp rest = n - walk.done, first = BACK ? 0 : walk.done;
  T state = walk.state;
  npy_intp k = walk.done, j = BACK ? rest - 1 : k;
  for (; k + 4 <= n; k += 4, j += 4 * sign) {
    const T a0 = a[j], a1 = a[j + sign], a2 = a[j + 2 * sign], a3 = a[j + 3 * sign];
    const T a01 = a0 * a1, a02 = a01 * a2, a03 = a01 * (a2 * a3);
    h[j] = a0 * state;
    h[j + sign] = a01 * state;
    h[j + 2 * sign] = a02 * state;
    h[j + 3 * sign] = state = a03 * state;
  }
  for (; k < n; k++, j += sign) h[j] = state = a[j] * state;
  return walk.safe && !scanlib_some_extreme(a + first, rest) &&
         scanlib_all_moderate(h + first, rest);
}
"""
