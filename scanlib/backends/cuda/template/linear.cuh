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
  enum { AHEAD = L::AHEAD ? L::AHEAD : 1 };

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
};

enum { SCANLIB_WALK, SCANLIB_PROBE, SCANLIB_SKIP }; /* store results, keep bounds, or neither */

/* What the lanes of a block share: the items of vectors before a step and after it. */
template <class L> struct scanlib_vectors {
  enum { BLOCK = L::ALONE ? 1 : SCANLIB_THREADS };
  typename L::Item x[2][BLOCK];
  typename L::Real lost[2][BLOCK];
  int wrong[SCANLIB_THREADS];
};

template <class L> struct scanlib_groups {
  typedef typename L::Item Item;
  typedef typename L::Real Real;
  typedef scanlib_lane<L> Lane;
  enum { AHEAD = Lane::AHEAD };
  const Params &p;
  scanlib_vectors<L> &all;
  int now; /* which of the two vectors holds the state */
  scanlib_each<Lane> own;
  SCANLIB_METHOD scanlib_groups(const Params &given, scanlib_vectors<L> &memory)
      : p(given), all(memory), now(0) {}

  /* Which group of the whole grid a thread belongs to. */
  SCANLIB_METHOD static int64_t job(int64_t block, int t) {
    return block * (SCANLIB_THREADS / L::GROUP) + t / L::GROUP;
  }
  /* The whole vector, and the items that belong to a thread. */
  SCANLIB_METHOD const Item *vector(int t) {
    return L::ALONE ? own[t].x : all.x[now] + own[t].base;
  }
  SCANLIB_METHOD Item &item(int t, int r, int which) {
    return L::ALONE ? own[t].x[r] : all.x[which][L::ALONE ? 0 : t];
  }
  SCANLIB_METHOD Real &error(int t, int r, int which) {
    return L::ALONE ? own[t].lost[r] : all.lost[which][L::ALONE ? 0 : t];
  }

  /* Step `k` of one thread; idle threads keep their value. */
  template <int KIND>
  SCANLIB_METHOD void step(int t, int64_t k, typename Lane::terms &terms) {
    Lane &mine = own[t];
    Real lost[L::ROWS];
    if (!mine.works || mine.first + k >= mine.last) {
      if (!L::ALONE) item(t, 0, 1 - now) = item(t, 0, now);
      return;
    }
    if (!L::AHEAD) mine.fetch(p, k, terms);
    const int64_t row = scanlib_row<L>(p.steps, mine.first + k);
    const Item *x = vector(t), *a = L::STEPS ? terms.a : mine.a;
    const Real *before = L::ALONE ? mine.lost : all.lost[now] + mine.base;
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) {
      const Item b = L::OFFSET && mine.with_offset ? terms.b[L::OFFSET ? r : 0] : Item(0);
      const Item *line = a + r * L::SIZE;
      mine.y[r] = L::product(line, x, mine.kept[r]);
      if (L::OFFSET) mine.y[r] = mine.y[r] + b;
      if (KIND == SCANLIB_PROBE)
        lost[r] = L::watch(line, x, before, mine.kept[r], b, mine.y[r], mine.peak[r]);
      if (KIND == SCANLIB_WALK && !L::LAST)
        scanlib_store<L>(p, mine.channel, scanlib_after<L>(row), mine.row + r, 0, mine.y[r]);
    }
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) {
      item(t, r, 1 - now) = mine.y[r];
      if (KIND == SCANLIB_PROBE) error(t, r, 1 - now) = lost[r];
    }
  }

  /* All groups take `count` steps, with AHEAD of them read before they are needed. */
  template <int KIND> SCANLIB_METHOD void take_steps(int64_t count) {
    SCANLIB_EACH(t) {
      SCANLIB_UNROLL
      for (int k = 0; k < AHEAD && L::AHEAD; k++) own[t].fetch(p, k, own[t].coming[k]);
    }
    SCANLIB_ROLLED
    for (int64_t low = 0; low < count; low += AHEAD) {
      SCANLIB_EACH(t) {
        SCANLIB_UNROLL
        for (int k = 0; k < AHEAD && L::AHEAD; k++) {
          own[t].now[k] = own[t].coming[k];
          own[t].fetch(p, low + k + AHEAD, own[t].coming[k]);
        }
      }
      SCANLIB_UNROLL
      for (int k = 0; k < AHEAD; k++) {
        SCANLIB_EACH(t) { step<KIND>(t, low + k, own[t].now[k]); }
        if (!L::ALONE) SCANLIB_SYNC();
        now = 1 - now;
      }
    }
  }
};

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
  return L::trusted(peaks, losts, x, peak, lost, y);
}

/* A group walks one chunk of one vector; where only the last row is wanted, the last one. */
template <class L> SCANLIB_DEVICE void scanlib_walk(const Params &p, int64_t block) {
  SCANLIB_SHARED scanlib_vectors<L> all;
  scanlib_groups<L> groups(p, all);
  SCANLIB_EACH(t) {
    scanlib_lane<L> &mine = groups.own[t];
    const int64_t job = groups.job(block, t), chunk = L::LAST ? p.chunks - 1 : job / p.channels;
    const bool active = job < p.channels * (L::LAST ? 1 : p.chunks);
    mine.locate(p, t, active ? job % p.channels : 0, active);
    mine.first = chunk * p.chunk;
    mine.last = mine.first + p.chunk < p.steps ? mine.first + p.chunk : p.steps;
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) {
      typename L::Item x = typename L::Item(0);
      if (mine.works) {
        x = p.chunks > 1 ? scanlib_state_before<L>(p, mine.s, chunk, mine.row + r)
                         : scanlib_item<L>(p, mine.channel, L::INITIAL, 0, mine.row + r, 0);
        if (!L::LAST && chunk == 0)
          scanlib_store<L>(p, mine.channel, scanlib_before<L>(p.steps), mine.row + r, 0, x);
      }
      groups.item(t, r, 0) = x;
    }
  }
  SCANLIB_SYNC();
  groups.template take_steps<SCANLIB_WALK>(p.steps < p.chunk ? p.steps : p.chunk);
  SCANLIB_EACH(t) {
    const scanlib_lane<L> &mine = groups.own[t];
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++)
      if (L::LAST && mine.works)
        scanlib_store<L>(p, mine.channel, 0, mine.row + r, 0, groups.item(t, r, groups.now));
  }
}

/* A group walks one column of one chunk of one vector. Groups side by side share matrices where these
 * change from step to step. */
template <class L> SCANLIB_DEVICE void scanlib_probe(const Params &p, int64_t block) {
  SCANLIB_SHARED scanlib_vectors<L> all;
  scanlib_groups<L> groups(p, all);
  SCANLIB_EACH(t) {
    scanlib_lane<L> &mine = groups.own[t];
    const int64_t chunks = p.chunks - 1, every = p.channels * chunks;
    int64_t job = groups.job(block, t);
    bool active = job < every * L::COLUMNS;
    if (!active) job = 0;
    mine.column = (int)(L::STEPS ? job % L::COLUMNS : job / every);
    const int64_t rest = L::STEPS ? job / L::COLUMNS : job % every;
    mine.chunk = rest / p.channels;
    if (L::ONE_POWER && mine.column < L::SIZE && mine.chunk) active = false;
    mine.locate(p, t, rest % p.channels, active);
    mine.first = mine.chunk * p.chunk;
    mine.last = mine.first + p.chunk;
    mine.with_offset = L::OFFSET && (!L::LINEAR || mine.column == L::SIZE);
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) {
      groups.item(t, r, 0) = mine.row + r == mine.column ? L::unit() : L::zero();
      groups.error(t, r, 0) = typename L::Real(0);
    }
  }
  SCANLIB_SYNC();
  groups.template take_steps<SCANLIB_PROBE>(p.chunk);
  SCANLIB_EACH(t) {
    const scanlib_lane<L> &mine = groups.own[t];
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++)
      if (mine.works) {
        const int64_t place =
            scanlib_column_place<L>(p, mine.s, mine.chunk, mine.column, mine.row + r);
        ((typename L::Item *)p.columns)[place] = groups.item(t, r, groups.now);
        ((typename L::Real *)p.bounds)[2 * place] = mine.peak[r];
        ((typename L::Real *)p.bounds)[2 * place + 1] = groups.error(t, r, groups.now);
      }
  }
}

/* Find the states before each chunk. Where one cannot be trusted, its group walks the chunk. */
template <class L> SCANLIB_DEVICE void scanlib_carry(const Params &p, int64_t block) {
  SCANLIB_SHARED scanlib_vectors<L> all;
  scanlib_groups<L> groups(p, all);
  SCANLIB_EACH(t) {
    scanlib_lane<L> &mine = groups.own[t];
    const int64_t s = groups.job(block, t);
    mine.locate(p, t, s < p.channels ? s : 0, s < p.channels);
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++)
      groups.item(t, r, 0) =
          mine.works ? scanlib_item<L>(p, mine.channel, L::INITIAL, 0, mine.row + r, 0)
                     : typename L::Item(0);
  }
  SCANLIB_SYNC();
  for (int64_t chunk = 0; chunk < p.chunks; chunk++) {
    SCANLIB_EACH(t) {
      scanlib_lane<L> &mine = groups.own[t];
      all.wrong[t] = 0;
      SCANLIB_UNROLL
      for (int r = 0; r < L::ROWS; r++)
        if (mine.works) {
          const int i = mine.row + r;
          scanlib_state_before<L>(p, mine.s, chunk, i) = groups.item(t, r, groups.now);
          if (chunk < p.chunks - 1 &&
              !scanlib_apply_chunk<L>(p, mine.s, chunk, i, groups.vector(t), mine.y[r]))
            all.wrong[t] = 1;
        }
    }
    SCANLIB_SYNC();
    if (chunk == p.chunks - 1) return;
    bool walk = false;
    for (int t = 0; t < SCANLIB_THREADS; t++) walk = walk || all.wrong[t];
    SCANLIB_EACH(t) {
      scanlib_lane<L> &mine = groups.own[t];
      bool wrong = false;
      for (int k = 0; k < L::GROUP; k++) wrong = wrong || all.wrong[mine.base + k];
      mine.first = chunk * p.chunk;
      mine.last = wrong ? mine.first + p.chunk : mine.first;
      SCANLIB_UNROLL
      for (int r = 0; r < L::ROWS; r++)
        if (mine.works && !wrong) groups.item(t, r, groups.now) = mine.y[r];
    }
    SCANLIB_SYNC();
    if (!walk) continue;
    SCANLIB_NOTE();
    groups.template take_steps<SCANLIB_SKIP>(p.chunk);
  }
}
