/* Sums over steps and channels, in a fixed order: a block, or a thread, for each item of the result.
 *
 * `S` is a sum (see `sums.py`): where its terms are, and what becomes of the total.
 */
template <class S> SCANLIB_DEVICE void scanlib_sum(const Params &p, int64_t item) {
  typedef typename S::Total Total;
  enum { AHEAD = 8 };
  SCANLIB_SHARED Total shared[SCANLIB_THREADS];
  const int64_t inner = S::reduced(p), count = inner * S::parts(p);
  SCANLIB_EACH(t) {
    Total total = 0;
    for (int64_t first = t; first < count; first += AHEAD * SCANLIB_THREADS) {
      Total some[AHEAD]; /* asked for before the first is added */
      SCANLIB_UNROLL
      for (int j = 0; j < AHEAD; j++) {
        const int64_t k = first + j * SCANLIB_THREADS;
        some[j] = Total(0);
        if (k < count)
          some[j] = S::part(p, inner == 1 ? S::place(p, item, 0, k) /* divisions take long */
                                          : S::place(p, item, k % inner, k / inner));
      }
      SCANLIB_UNROLL
      for (int j = 0; j < AHEAD; j++) total += some[j];
    }
    shared[t] = total;
  }
  SCANLIB_SYNC();
  for (int half = SCANLIB_THREADS / 2; half; half /= 2) {
    SCANLIB_EACH(t) {
      if (t < half) shared[t] += shared[t + half];
    }
    SCANLIB_SYNC();
  }
  SCANLIB_EACH(t) {
    if (t == 0) S::write(p, item, shared[0]);
  }
}

template <class S> SCANLIB_DEVICE void scanlib_short_sum(const Params &p, int64_t item) {
  if (item >= S::items(p)) return;
  const int64_t inner = S::reduced(p), parts = S::parts(p);
  typename S::Total total = 0;
  for (int64_t part = 0; part < parts; part++)
    for (int64_t k = 0; k < inner; k++) total += S::part(p, S::place(p, item, k, part));
  S::write(p, item, total);
}
