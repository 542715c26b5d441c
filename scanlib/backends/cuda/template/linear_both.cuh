/* Matrix recurrences X_t = A_t X_{t-1} R_t + B_t: one block, with the state in shared memory. */
template <class L> SCANLIB_DEVICE void scanlib_walk(const Params &p, int64_t) {
  typedef typename L::Item Item;
  enum { ITEMS = L::SIZE * L::WIDTH };
  SCANLIB_SHARED Item state[ITEMS], half[ITEMS];
  scanlib_channel channel;
  scanlib_locate(p, 0, channel);
  for (int64_t step = -1; step < p.steps; step++) {
    const int64_t row = scanlib_row<L>(p.steps, step < 0 ? 0 : step);
    const int64_t to = step < 0 ? scanlib_before<L>(p.steps) : scanlib_after<L>(row);
    SCANLIB_EACH(t) {
      for (int k = t; k < ITEMS && step >= 0; k += SCANLIB_THREADS) {
        Item total = Item(0);
        for (int j = 0; j < L::SIZE; j++)
          total = L::times_plus(
              scanlib_item<L>(p, channel, L::MATRIX, row, k / L::WIDTH, j),
              state[j * L::WIDTH + k % L::WIDTH], total);
        half[k] = total;
      }
    }
    SCANLIB_SYNC();
    SCANLIB_EACH(t) {
      for (int k = t; k < ITEMS; k += SCANLIB_THREADS) {
        const int i = k / L::WIDTH, c = k % L::WIDTH;
        Item total = Item(0);
        if (step < 0) total = scanlib_item<L>(p, channel, L::INITIAL, 0, i, c);
        for (int j = 0; j < L::WIDTH && step >= 0; j++)
          total = L::times_plus(half[i * L::WIDTH + j],
                                     scanlib_item<L>(p, channel, L::RIGHT, row, j, c), total);
        if (L::OFFSET && step >= 0)
          total = total + scanlib_item<L>(p, channel, L::ADDED, row, i, c);
        state[k] = total;
        if (!L::LAST || step == p.steps - 1)
          scanlib_store<L>(p, channel, L::LAST ? 0 : to, i, c, total);
      }
    }
    SCANLIB_SYNC();
  }
}
