/* Matrix recurrences x_t = A_t x_{t-1} + b_t by a group of threads for each vector.
 *
 * `L` is the recurrence (see `linear.py`): its sizes, arrays, and products of its items. There is
 * one vector for each channel: an item of the batch and a column of the state. A group has GROUP
 * threads, of which each has ROWS rows of the matrix: one thread has all of them, and the vector, in
 * registers (ALONE), or SIZE threads have one row each. Then vectors are in shared memory, twice: one
 * is read while the other is written. All groups of a block take equally many steps, some of them
 * idly, so that threads wait for each other at the same places.
 *
 * The steps of few vectors are cut into chunks:
 *
 * 1. `scanlib_probe` runs every chunk from the columns of the identity, and from zero: what the chunk
 *    does to any state follows from where these end;
 * 2. `scanlib_carry` finds the state before each chunk;
 * 3. `scanlib_walk` runs all chunks from there.
 */
template <class L> struct scanlib_lane {
  typedef typename L::Item Item;
  typedef typename L::Real Real;
  /* What belongs to one step. */
  struct terms {
    Item a[L::STEPS ? L::ROWS * L::SIZE : 1], b[L::OFFSET ? L::ROWS : 1];
  };
  enum { AHEAD = L::AHEAD ? L::AHEAD : 1, BLOCK = L::ALONE ? 1 : SCANLIB_THREADS };
  /* What the lanes of a block share: the items of vectors before a step and after it. */
  struct shared {
    Item x[2][BLOCK];
    Real lost[2][BLOCK];
    int wrong[SCANLIB_THREADS];
  };

  scanlib_channel channel;
  terms now[AHEAD], coming[AHEAD];
  Item a[L::STEPS ? 1 : L::ROWS * L::SIZE];
  Item x[L::ROWS], y[L::ROWS];
  Real lost[L::ROWS], peak[L::ROWS];
  uint64_t kept[L::ROWS];
  int64_t s, chunk, first, last; /* the channel; steps */
  int row, base, column;
  bool works, with_offset;

  SCANLIB_METHOD void locate(const Params &p, int t, int64_t series, bool active) {
    row = t % L::GROUP * L::ROWS;
    base = t - t % L::GROUP;
    works = active && row < L::SIZE;
    s = series;
    with_offset = L::OFFSET;
    scanlib_locate(p, s, channel);
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) {
      peak[r] = lost[r] = Real(0);
      kept[r] = works && L::MASKED ? scanlib_kept<L>(p, channel, row + r) : ~uint64_t(0);
    }
    if (works && !L::STEPS) fetch_matrix(p, 0, a);
  }
  SCANLIB_METHOD void fetch_matrix(const Params &p, int64_t t, Item *to) const {
    SCANLIB_UNROLL
    for (int k = 0; k < L::ROWS * L::SIZE; k++)
      to[k] = scanlib_item<L>(p, channel, L::MATRIX, t, row + k / L::SIZE, k % L::SIZE);
  }
  SCANLIB_METHOD void fetch(const Params &p, int64_t k, terms &to) const {
    if (!works || first + k >= last) return;
    const int64_t t = scanlib_row<L>(p.steps, first + k);
    if (L::STEPS) fetch_matrix(p, t, to.a);
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS && L::OFFSET; r++)
      to.b[r] = scanlib_item<L>(p, channel, L::ADDED, t, row + r, 0);
  }
  /* The whole vector, and the items that belong to this thread. */
  SCANLIB_METHOD const Item *vector(const shared &all, int now) const {
    return L::ALONE ? x : all.x[now] + base;
  }
  SCANLIB_METHOD Item &item(shared &all, int now, int t, int r) {
    return L::ALONE ? x[r] : all.x[now][L::ALONE ? 0 : t];
  }
  SCANLIB_METHOD Real &error(shared &all, int now, int t, int r) {
    return L::ALONE ? lost[r] : all.lost[now][L::ALONE ? 0 : t];
  }
};

enum { SCANLIB_WALK, SCANLIB_PROBE, SCANLIB_SKIP }; /* store results, keep bounds, or neither */

/* Step `k` of one thread; idle threads keep their value. */
template <class L, int KIND>
SCANLIB_DEVICE void scanlib_lane_step(const Params &p, scanlib_lane<L> &own,
                                      typename scanlib_lane<L>::terms &terms,
                                      typename scanlib_lane<L>::shared &all, int t, int now,
                                      int64_t k) {
  typedef typename L::Item Item;
  typename L::Real lost[L::ROWS];
  if (!own.works || own.first + k >= own.last) {
    if (!L::ALONE) own.item(all, 1 - now, t, 0) = own.item(all, now, t, 0);
    return;
  }
  if (!L::AHEAD) own.fetch(p, k, terms);
  const int64_t row = scanlib_row<L>(p.steps, own.first + k);
  const Item *x = own.vector(all, now), *a = L::STEPS ? terms.a : own.a;
  const typename L::Real *before = L::ALONE ? own.lost : all.lost[now] + own.base;
  SCANLIB_UNROLL
  for (int r = 0; r < L::ROWS; r++) {
    const Item b = L::OFFSET && own.with_offset ? terms.b[L::OFFSET ? r : 0] : Item(0);
    const Item *line = a + r * L::SIZE;
    own.y[r] = L::product(line, x, own.kept[r]);
    if (L::OFFSET) own.y[r] = own.y[r] + b;
    if (KIND == SCANLIB_PROBE)
      lost[r] = L::watch(line, x, before, own.kept[r], b, own.y[r],
                                                     own.peak[r]);
    if (KIND == SCANLIB_WALK && !L::LAST)
      scanlib_store<L>(p, own.channel, scanlib_after<L>(row), own.row + r, 0, own.y[r]);
  }
  SCANLIB_UNROLL
  for (int r = 0; r < L::ROWS; r++) {
    own.item(all, 1 - now, t, r) = own.y[r];
    if (KIND == SCANLIB_PROBE) own.error(all, 1 - now, t, r) = lost[r];
  }
}

/* All groups take `count` steps, with AHEAD of them read before they are needed; returns which of the
 * two vectors holds the result. */
template <class L, int KIND>
SCANLIB_DEVICE int scanlib_take_steps(const Params &p, scanlib_each<scanlib_lane<L> > &lane,
                                      typename scanlib_lane<L>::shared &all, int64_t count,
                                      int now) {
  enum { AHEAD = scanlib_lane<L>::AHEAD };
  SCANLIB_EACH(t) {
    SCANLIB_UNROLL
    for (int k = 0; k < AHEAD && L::AHEAD; k++) lane[t].fetch(p, k, lane[t].coming[k]);
  }
  SCANLIB_ROLLED
  for (int64_t low = 0; low < count; low += AHEAD) {
    SCANLIB_EACH(t) {
      SCANLIB_UNROLL
      for (int k = 0; k < AHEAD && L::AHEAD; k++) {
        lane[t].now[k] = lane[t].coming[k];
        lane[t].fetch(p, low + k + AHEAD, lane[t].coming[k]);
      }
    }
    SCANLIB_UNROLL
    for (int k = 0; k < AHEAD; k++) {
      SCANLIB_EACH(t) {
        scanlib_lane_step<L, KIND>(p, lane[t], lane[t].now[k], all, t, now, low + k);
      }
      if (!L::ALONE) SCANLIB_SYNC();
      now = 1 - now;
    }
  }
  return now;
}

/* Where an item of a column of a chunk is kept, and of the state before a chunk. Powers of one matrix
 * are the same for all chunks, and found once. */
template <class L>
SCANLIB_DEVICE int64_t scanlib_column_place(const Params &p, int64_t s, int64_t chunk, int column,
                                             int i) {
  if (L::ONE_POWER && column < L::SIZE) chunk = 0;
  return ((chunk * p.channels + s) * L::COLUMNS + column) * L::SIZE + i;
}
template <class L>
SCANLIB_DEVICE typename L::Item &scanlib_state_before(const Params &p, int64_t s, int64_t chunk,
                                                      int i) {
  return ((typename L::Item *)p.states)[(chunk * p.channels + s) * L::SIZE + i];
}

/* Item `i` of what a chunk makes of the state `x`; returns whether it can be trusted. */
template <class L>
SCANLIB_DEVICE bool scanlib_apply_chunk(const Params &p, int64_t s, int64_t chunk, int i,
                                        const typename L::Item *x, typename L::Item &y) {
  typedef typename L::Item Item;
  typedef typename L::Real Real;
  const Item *columns = (const Item *)p.columns;
  const Real *bounds = (const Real *)p.bounds;
  Item a[L::SIZE], b = Item(0);
  Real peaks[L::SIZE], losts[L::SIZE], peak = Real(0), lost = Real(0);
  SCANLIB_UNROLL
  for (int j = 0; j < L::SIZE; j++) {
    const int64_t place = scanlib_column_place<L>(p, s, chunk, j, i);
    a[j] = columns[place];
    peaks[j] = bounds[2 * place];
    losts[j] = bounds[2 * place + 1];
  }
  if (L::COLUMNS > L::SIZE) {
    const int64_t place = scanlib_column_place<L>(p, s, chunk, L::SIZE, i);
    b = columns[place];
    peak = bounds[2 * place];
    lost = bounds[2 * place + 1];
  }
  y = L::product(a, x, ~uint64_t(0)) + b;
  if (!L::MASKED && L::settled(x)) return true; /* so is y */
  return L::trusted(peaks, losts, x, peak, lost, y);
}

/* Which group of the whole grid a thread belongs to. */
template <class L> SCANLIB_DEVICE int64_t scanlib_job(int64_t block, int t) {
  return block * (SCANLIB_THREADS / L::GROUP) + t / L::GROUP;
}

/* A group walks one chunk of one vector; where only the last row is wanted, the last one. */
template <class L> SCANLIB_DEVICE void scanlib_walk(const Params &p, int64_t block) {
  SCANLIB_SHARED typename scanlib_lane<L>::shared all;
  scanlib_each<scanlib_lane<L> > lane;
  SCANLIB_EACH(t) {
    scanlib_lane<L> &own = lane[t];
    const int64_t job = scanlib_job<L>(block, t);
    const int64_t chunk = L::LAST ? p.chunks - 1 : job / p.channels;
    const bool active = job < p.channels * (L::LAST ? 1 : p.chunks);
    own.locate(p, t, active ? job % p.channels : 0, active);
    own.first = chunk * p.chunk;
    own.last = own.first + p.chunk < p.steps ? own.first + p.chunk : p.steps;
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) {
      typename L::Item x = typename L::Item(0);
      if (own.works) {
        x = p.chunks > 1 ? scanlib_state_before<L>(p, own.s, chunk, own.row + r)
                         : scanlib_item<L>(p, own.channel, L::INITIAL, 0, own.row + r, 0);
        if (!L::LAST && chunk == 0)
          scanlib_store<L>(p, own.channel, scanlib_before<L>(p.steps), own.row + r, 0, x);
      }
      own.item(all, 0, t, r) = x;
    }
  }
  SCANLIB_SYNC();
  const int64_t count = p.steps < p.chunk ? p.steps : p.chunk;
  const int now = scanlib_take_steps<L, SCANLIB_WALK>(p, lane, all, count, 0);
  SCANLIB_EACH(t) {
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++)
      if (L::LAST && lane[t].works)
        scanlib_store<L>(p, lane[t].channel, 0, lane[t].row + r, 0, lane[t].item(all, now, t, r));
  }
}

/* A group walks one column of one chunk of one vector. Groups side by side share matrices where these
 * change from step to step. */
template <class L> SCANLIB_DEVICE void scanlib_probe(const Params &p, int64_t block) {
  SCANLIB_SHARED typename scanlib_lane<L>::shared all;
  scanlib_each<scanlib_lane<L> > lane;
  SCANLIB_EACH(t) {
    scanlib_lane<L> &own = lane[t];
    const int64_t chunks = p.chunks - 1, every = p.channels * chunks;
    int64_t job = scanlib_job<L>(block, t);
    bool active = job < every * L::COLUMNS;
    if (!active) job = 0;
    own.column = (int)(L::STEPS ? job % L::COLUMNS : job / every);
    const int64_t rest = L::STEPS ? job / L::COLUMNS : job % every;
    own.chunk = rest / p.channels;
    if (L::ONE_POWER && own.column < L::SIZE && own.chunk) active = false;
    own.locate(p, t, rest % p.channels, active);
    own.first = own.chunk * p.chunk;
    own.last = own.first + p.chunk;
    own.with_offset = L::OFFSET && (!L::LINEAR || own.column == L::SIZE);
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) {
      own.item(all, 0, t, r) = own.row + r == own.column ? L::unit() : L::zero();
      own.error(all, 0, t, r) = typename L::Real(0);
    }
  }
  SCANLIB_SYNC();
  const int now = scanlib_take_steps<L, SCANLIB_PROBE>(p, lane, all, p.chunk, 0);
  SCANLIB_EACH(t) {
    scanlib_lane<L> &own = lane[t];
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++)
      if (own.works) {
        const int64_t place =
            scanlib_column_place<L>(p, own.s, own.chunk, own.column, own.row + r);
        ((typename L::Item *)p.columns)[place] = own.item(all, now, t, r);
        ((typename L::Real *)p.bounds)[2 * place] = own.peak[r];
        ((typename L::Real *)p.bounds)[2 * place + 1] = own.error(all, now, t, r);
      }
  }
}

/* Find the states before each chunk. Where one cannot be trusted, its group walks the chunk. */
template <class L> SCANLIB_DEVICE void scanlib_carry(const Params &p, int64_t block) {
  SCANLIB_SHARED typename scanlib_lane<L>::shared all;
  scanlib_each<scanlib_lane<L> > lane;
  int now = 0;
  SCANLIB_EACH(t) {
    scanlib_lane<L> &own = lane[t];
    const int64_t s = scanlib_job<L>(block, t);
    own.locate(p, t, s < p.channels ? s : 0, s < p.channels);
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++)
      own.item(all, 0, t, r) =
          own.works ? scanlib_item<L>(p, own.channel, L::INITIAL, 0, own.row + r, 0)
                    : typename L::Item(0);
  }
  SCANLIB_SYNC();
  for (int64_t chunk = 0; chunk < p.chunks; chunk++) {
    SCANLIB_EACH(t) {
      scanlib_lane<L> &own = lane[t];
      all.wrong[t] = 0;
      SCANLIB_UNROLL
      for (int r = 0; r < L::ROWS; r++)
        if (own.works) {
          const int i = own.row + r;
          scanlib_state_before<L>(p, own.s, chunk, i) = own.item(all, now, t, r);
          if (chunk < p.chunks - 1 &&
              !scanlib_apply_chunk<L>(p, own.s, chunk, i, own.vector(all, now), own.y[r]))
            all.wrong[t] = 1;
        }
    }
    SCANLIB_SYNC();
    if (chunk == p.chunks - 1) return;
    bool walk = false;
    for (int t = 0; t < SCANLIB_THREADS; t++) walk = walk || all.wrong[t];
    SCANLIB_EACH(t) {
      scanlib_lane<L> &own = lane[t];
      bool wrong = false;
      for (int k = 0; k < L::GROUP; k++) wrong = wrong || all.wrong[own.base + k];
      own.first = chunk * p.chunk;
      own.last = wrong ? own.first + p.chunk : own.first;
      SCANLIB_UNROLL
      for (int r = 0; r < L::ROWS; r++)
        if (own.works && !wrong) own.item(all, now, t, r) = own.y[r];
    }
    SCANLIB_SYNC();
    if (!walk) continue;
    SCANLIB_NOTE();
    now = scanlib_take_steps<L, SCANLIB_SKIP>(p, lane, all, p.chunk, now);
  }
}
