/* Sums over steps and channels, in a fixed order: a block, or a thread, for each item of the result.
 *
 * `S` is a sum: of the items of the array TERMS over the axes that are not in the mask KEPT, and over
 * its rows if ROWS, is made the array RESULT; what the array GIVEN has is added, if it is not -1.
 */

/* Find the places along the axes that are kept, or along the others; return what is left: a row. */
template <class S>
SCANLIB_DEVICE int64_t scanlib_split(const Params &p, bool kept, int64_t number, int64_t *e) {
  SCANLIB_UNROLL
  for (int axis = Params::SIZES - 1; axis >= 0; axis--)
    if ((S::KEPT >> axis & 1) == kept) {
      e[axis] = number % p.n[axis];
      number /= p.n[axis];
    }
  return number;
}
/* How many items the result has, or how many terms belong to each. */
template <class S> SCANLIB_DEVICE int64_t scanlib_count(const Params &p, bool kept, bool rows) {
  int64_t count = rows ? S::ROWS ? p.chunks : p.steps : 1;
  SCANLIB_UNROLL
  for (int axis = 0; axis < Params::SIZES; axis++)
    if ((S::KEPT >> axis & 1) == kept) count *= p.n[axis];
  return count;
}
SCANLIB_DEVICE char *scanlib_address(const Params &p, int array, int64_t row, const int64_t *e) {
  char *place = p.at[array].data + row * p.at[array].t;
  SCANLIB_UNROLL
  for (int axis = 0; axis < Params::SIZES; axis++)
    if (Params::along(array, axis)) place += e[axis] * p.at[array].e[axis];
  return place;
}
/* Term `k` of the item whose places are `e`, in the row `row`; terms count over `inner` channels. */
template <class S>
SCANLIB_DEVICE typename S::Total scanlib_term(const Params &p, int64_t row, int64_t *e,
                                              int64_t inner, int64_t k) {
  const int64_t zero = 0;
  if (inner == 1) { /* divisions take long */
    scanlib_split<S>(p, false, zero, e);
    row = S::ROWS ? k : row;
  } else {
    const int64_t left = scanlib_split<S>(p, false, k, e);
    row = S::ROWS ? left : row;
  }
  return typename S::Total(*(const typename S::Term *)scanlib_address(p, S::TERMS, row, e));
}
template <class S>
SCANLIB_DEVICE void scanlib_write(const Params &p, int64_t row, const int64_t *e,
                                  typename S::Total total) {
  typedef typename S::Item Item;
  typedef typename S::Memory Memory;
  if (S::GIVEN >= 0)
    total = Item(*(const Memory *)scanlib_address(p, S::GIVEN >= 0 ? S::GIVEN : 0, 0, e)) + total;
  *(Memory *)scanlib_address(p, S::RESULT, row, e) = Memory(Item(total));
}

template <class S> SCANLIB_DEVICE void scanlib_sum(const Params &p, int64_t item) {
  typedef typename S::Total Total;
  enum { AHEAD = 8 };
  SCANLIB_SHARED Total shared[SCANLIB_THREADS];
  const int64_t inner = scanlib_count<S>(p, false, false);
  const int64_t count = scanlib_count<S>(p, false, S::ROWS);
  int64_t e[Params::SIZES + 1];
  const int64_t row = scanlib_split<S>(p, true, item, e);
  SCANLIB_EACH(t) {
    Total total = Total(0);
    for (int64_t first = t; first < count; first += AHEAD * SCANLIB_THREADS) {
      Total some[AHEAD]; /* asked for before the first is added */
      SCANLIB_UNROLL
      for (int j = 0; j < AHEAD; j++) {
        const int64_t k = first + j * SCANLIB_THREADS;
        some[j] = k < count ? scanlib_term<S>(p, row, e, inner, k) : Total(0);
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
    if (t == 0) scanlib_write<S>(p, row, e, shared[0]);
  }
}

template <class S> SCANLIB_DEVICE void scanlib_short_sum(const Params &p, int64_t item) {
  if (item >= scanlib_count<S>(p, true, !S::ROWS)) return;
  const int64_t inner = scanlib_count<S>(p, false, false);
  const int64_t count = scanlib_count<S>(p, false, S::ROWS);
  int64_t e[Params::SIZES + 1];
  const int64_t row = scanlib_split<S>(p, true, item, e);
  typename S::Total total = typename S::Total(0);
  for (int64_t k = 0; k < count; k++) total += scanlib_term<S>(p, row, e, inner, k);
  scanlib_write<S>(p, row, e, total);
}
