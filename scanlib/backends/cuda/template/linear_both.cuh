/* Matrix recurrences X_t = A_t X_{t-1} R_t + B_t: one block, with the state in shared memory. */
template <class L>
SCANLIB_DEVICE typename L::Item scanlib_item(const Params &p, const scanlib_channel &l, int array,
                                             int64_t t, int i, int j) {
  const char *place = scanlib_item_place<L>(p, l, array, t, i, j);
  return typename L::Item(scanlib_fetch<typename L::Outer>(place));
}
template <class L> SCANLIB_DEVICE void scanlib_walk(const Params &p, int64_t) {
  typedef typename L::Item Item;
  enum { ITEMS = L::SIZE * L::WIDTH };
  SCANLIB_SHARED Item state[ITEMS], half[ITEMS];
  scanlib_channel l;
  scanlib_locate(p, 0, l);
  for (int64_t step = -1; step < p.steps; step++) {
    SCANLIB_EACH(t) {
      for (int k = t; k < ITEMS && step >= 0; k += SCANLIB_THREADS) {
        Item total = Item(0);
        for (int j = 0; j < L::SIZE; j++)
          total = L::times_plus(scanlib_item<L>(p, l, L::MATRIX, step, k / L::WIDTH, j),
                                state[j * L::WIDTH + k % L::WIDTH], total);
        half[k] = total;
      }
    }
    SCANLIB_SYNC();
    SCANLIB_EACH(t) {
      for (int k = t; k < ITEMS; k += SCANLIB_THREADS) {
        const int i = k / L::WIDTH, c = k % L::WIDTH;
        Item total = Item(0);
        if (step < 0) total = scanlib_item<L>(p, l, Params::x, 0, i, c);
        for (int j = 0; j < L::WIDTH && step >= 0; j++)
          total = L::times_plus(half[i * L::WIDTH + j],
                                scanlib_item<L>(p, l, L::RIGHT, step, j, c), total);
        if (L::OFFSET && step >= 0) total = total + scanlib_item<L>(p, l, L::ADDED, step, i, c);
        state[k] = total;
        if (L::TRACED || step == p.steps - 1)
          *(typename L::Outer *)scanlib_item_place<L>(p, l, Params::y, L::TRACED ? step + 1 : 0, i,
                                                      c) = typename L::Outer(total);
      }
    }
    SCANLIB_SYNC();
  }
}
