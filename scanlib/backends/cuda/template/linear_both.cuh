/* Matrix recurrences X_t = A_t X_{t-1} R_t + B_t: one block, with the state in shared memory. */
template <class L> SCANLIB_DEVICE void scanlib_walk_both(const Params &p, int64_t) {
  typedef typename L::Item Item;
  enum { ITEMS = L::SIZE * L::WIDTH };
  SCANLIB_SHARED Item state[ITEMS], half[ITEMS];
  typename L::Channel channel;
  L::locate(p, 0, channel);
  SCANLIB_EACH(t) {
    for (int k = t; k < ITEMS; k += SCANLIB_THREADS) {
      state[k] = L::initial(p, channel, k / L::WIDTH, k % L::WIDTH);
      if (!L::LAST)
        L::store(p, channel, L::before(p.steps), k / L::WIDTH, k % L::WIDTH, state[k]);
    }
  }
  SCANLIB_SYNC();
  for (int64_t step = 0; step < p.steps; step++) {
    const int64_t row = L::row(p.steps, step);
    SCANLIB_EACH(t) {
      for (int k = t; k < ITEMS; k += SCANLIB_THREADS) {
        Item total = Item(0);
        for (int j = 0; j < L::SIZE; j++)
          total = scanlib_times_plus(L::matrix(p, channel, row, k / L::WIDTH, j),
                                     state[j * L::WIDTH + k % L::WIDTH], total);
        half[k] = total;
      }
    }
    SCANLIB_SYNC();
    SCANLIB_EACH(t) {
      for (int k = t; k < ITEMS; k += SCANLIB_THREADS) {
        Item total = Item(0);
        for (int j = 0; j < L::WIDTH; j++)
          total = scanlib_times_plus(half[k / L::WIDTH * L::WIDTH + j],
                                     L::right(p, channel, row, j, k % L::WIDTH), total);
        if (L::OFFSET) total = total + L::offset(p, channel, row, k / L::WIDTH, k % L::WIDTH);
        state[k] = total;
        if (!L::LAST)
          L::store(p, channel, L::after(row), k / L::WIDTH, k % L::WIDTH, total);
      }
    }
    SCANLIB_SYNC();
  }
  SCANLIB_EACH(t) {
    for (int k = t; k < ITEMS && L::LAST; k += SCANLIB_THREADS)
      L::store(p, channel, 0, k / L::WIDTH, k % L::WIDTH, state[k]);
  }
}
