"""C++ vectors for scans in registers: lanes that are moved to later steps, and what is fetched.

With one step in each lane, a scan by halves (J. Sklansky, "Conditional-sum addition logic", 1960)
composes the second lane of each pair with the first, then the second pair of each four with the
last lane of the first pair, then the second four of each eight with the last lane of the first. In
the shortest halves, lanes move within the parts of a register that they move in most cheaply. The
lanes are in the order of memory; `BACK` says that the last one is the first step. No more than
eight steps are composed, so that products of their coefficients stay in range: a vector of sixteen
numbers holds two groups.

Lanes without an earlier one get what does nothing: zero or one, or stay as they are.

A block is scanned while the memory waits: the elements before and the results after are computed
faster than they are read and written. So a scan asks for the same steps of the next block, of all
that it reads and writes (`scanlib_ahead`).
"""

LANES = r"""
/* Addresses of what the next block reads and writes, which need not exist. */
template <int COUNT> struct scanlib_ahead {
  size_t places[COUNT + 1];
  /* Asks for so many bytes from a place on, in the first-level cache. */
  template <int BYTES> inline void fetch(npy_intp place) const {
#if defined(__GNUC__)
    for (int k = 0; k < COUNT; k++)
      for (int line = 0; line < BYTES; line += 64)
        __builtin_prefetch((const char *)(places[k] + (size_t)place + line), 0, 3);
#endif
  }
};
template <bool BACK, class T> static inline size_t scanlib_next(const T *rows, npy_intp n) {
  const size_t bytes = (size_t)n * sizeof(T);
  return BACK ? (size_t)rows - bytes : (size_t)rows + bytes;
}

/* Vectors as long as the machine's: compilers take longer ones apart number by number. */
#if defined(__GNUC__) && !defined(__clang__) && defined(__AVX512F__)
#define SCANLIB_BYTES 64
#elif defined(__GNUC__) && !defined(__clang__) && defined(__AVX2__)
#define SCANLIB_BYTES 32
#endif

#ifdef SCANLIB_BYTES
template <int K> struct scanlib_int { enum { value = K }; };

/* Vectors of places: that of lane k is F::at(k); N and more count what the other vector holds. */
template <class M, int N> struct scanlib_places;
#define SCANLIB_AT(K) scanlib_int<F::at(K)>::value
template <class M> struct scanlib_places<M, 4> {
  template <class F> static inline M make() {
    return (M){SCANLIB_AT(0), SCANLIB_AT(1), SCANLIB_AT(2), SCANLIB_AT(3)};
  }
};
template <class M> struct scanlib_places<M, 8> {
  template <class F> static inline M make() {
    return (M){SCANLIB_AT(0), SCANLIB_AT(1), SCANLIB_AT(2), SCANLIB_AT(3),
               SCANLIB_AT(4), SCANLIB_AT(5), SCANLIB_AT(6), SCANLIB_AT(7)};
  }
};
template <class M> struct scanlib_places<M, 16> {
  template <class F> static inline M make() {
    return (M){SCANLIB_AT(0),  SCANLIB_AT(1),  SCANLIB_AT(2),  SCANLIB_AT(3),
               SCANLIB_AT(4),  SCANLIB_AT(5),  SCANLIB_AT(6),  SCANLIB_AT(7),
               SCANLIB_AT(8),  SCANLIB_AT(9),  SCANLIB_AT(10), SCANLIB_AT(11),
               SCANLIB_AT(12), SCANLIB_AT(13), SCANLIB_AT(14), SCANLIB_AT(15)};
  }
};
#undef SCANLIB_AT

template <class T> struct scanlib_vectors;
template <> struct scanlib_vectors<npy_float32> {
  typedef npy_float32 V __attribute__((vector_size(SCANLIB_BYTES)));
  typedef npy_int32 M __attribute__((vector_size(SCANLIB_BYTES)));
};
template <> struct scanlib_vectors<npy_float64> {
  typedef npy_float64 V __attribute__((vector_size(SCANLIB_BYTES)));
  typedef npy_int64 M __attribute__((vector_size(SCANLIB_BYTES)));
};

template <bool BACK, class T> struct scanlib_lanes {
  typedef typename scanlib_vectors<T>::V V;
  typedef typename scanlib_vectors<T>::M M;
  enum { N = SCANLIB_BYTES / sizeof(T), GROUP = N < 8 ? N : 8, GROUPS = N / GROUP };

  /* Which step of a group of G lanes a lane is. */
  template <int G> static constexpr int step(int lane) {
    return BACK ? G - 1 - lane % G : lane % G;
  }
  template <int G> static constexpr int lane(int k, int step) {
    return k - k % G + (BACK ? G - 1 - step : step);
  }
  template <int G> struct of_step_before {
    static constexpr int at(int k) {
      return step<G>(k) == 0 ? N + k : lane<G>(k, step<G>(k) - 1);
    }
  };
  template <int G, int HALF, bool SAME> struct of_earlier {
    static constexpr int at(int k) {
      return step<G>(k) & HALF ? lane<G>(k, step<G>(k) / HALF * HALF - 1) : SAME ? k : N + k;
    }
  };
  template <int G, int WHICH> struct of_last {
    static constexpr int at(int) {
      return BACK ? N - G * (WHICH + 1) : G * (WHICH + 1) - 1;
    }
  };
  struct of_groups {
    static constexpr int at(int k) {
      return (BACK ? k >= N - GROUP : k < GROUP) ? k : N + k;
    }
  };
  template <class F> static inline M places() {
    return scanlib_places<M, N>::template make<F>();
  }

  static inline V all(T value) { return -(V){} + value; } /* adding zero would change -0 */
  static inline V load(const T *p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
  }
  static inline void store(T *p, V v) { memcpy(p, &v, sizeof v); }
  /* In each lane the step before it, or that of `otherwise` where its group has none. */
  template <int G> static inline V step_before(V v, V otherwise) {
    return __builtin_shuffle(v, otherwise, places<of_step_before<G> >());
  }
  /* In the second HALF of each 2 * HALF lanes the last one of the first half; else `otherwise`. */
  template <int HALF, int G> static inline V earlier(V v, V otherwise) {
    return __builtin_shuffle(v, otherwise, places<of_earlier<G, HALF, false> >());
  }
  /* The same, or itself. */
  template <int HALF, int G> static inline V earlier_or_same(V v) {
    return __builtin_shuffle(v, places<of_earlier<G, HALF, true> >());
  }
  /* The last step of group WHICH, in all lanes. */
  template <int WHICH, int G> static inline V last(V v) {
    return __builtin_shuffle(v, places<of_last<G, WHICH> >());
  }
  /* The first group of one vector and the second of another. */
  static inline V groups(V first, V second) {
    return __builtin_shuffle(first, second, places<of_groups>());
  }
  /* As scanlib_bits of each lane. */
  static inline M bits(V v) { return (M)v & scanlib_bounds<T>::all_but_sign(); }
  /* Whether a lane of one of the vectors that were put together by | is negative. */
  static inline int some_negative(M words) {
    npy_intp count = 0;
    for (int k = 0; k < N; k++) count += words[k] < 0;
    return count > 0;
  }
  /* Where the first lane in memory of step k is, of n steps. */
  static inline npy_intp place(npy_intp k, npy_intp n) { return BACK ? n - N - k : k; }
};
#endif
"""
