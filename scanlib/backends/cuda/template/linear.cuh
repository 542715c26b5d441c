/* Matrix recurrences x_t = A_t x_{t-1} + b_t by a group of threads for each vector.
 *
 * `L` is the recurrence (see `linear.py`): its sizes, arrays, and products of its items. There is
 * one vector for each channel: an item of the batch and a column of the state. A group has GROUP
 * threads, of which each has ROWS rows of the matrix: one thread has all of them, and the vector, in
 * registers (ALONE), or SIZE threads have one row each. Then vectors are in shared memory, twice: one
 * is read while the other is written. All groups of a block take equally many steps, some of them
 * idly, so that threads wait for each other at the same places.
 *
 * The steps of few vectors are cut into chunks. Four kernels follow one another, all of which walk:
 *
 * 1. `probe` every chunk from the columns of the identity, and from zero: what the chunk does to any
 *    state follows from where these end, the columns of `m`;
 * 2. `carry` the chunks themselves, as steps with the matrices `m`: the states before them, `s`;
 * 3. `walk` all chunks from there, which end with `e`; `scale`, how large each item was after the last two steps;
 * 4. `mend`: where a chunk did not end with the state from which the next one was walked, but for
 *    rounding, that one is walked once more.
 */
template <class L> struct scanlib_lane {
  typedef typename L::Item Item;
  /* What belongs to one step. */
  struct terms {
    Item a[L::STEPS ? L::ROWS * L::SIZE : 1], b[L::OFFSET ? L::ROWS : 1];
  };
  enum { AHEAD = L::AHEAD ? L::AHEAD : 1 };

  scanlib_channel channel;
  terms now[AHEAD], coming[AHEAD];
  Item a[L::STEPS ? 1 : L::ROWS * L::SIZE];
  Item x[L::ROWS], y[L::ROWS];
  uint64_t kept[L::ROWS];
  int64_t chunk, first, last; /* steps */
  int row, base, column;
  bool works, with_offset;

  SCANLIB_METHOD void locate(const Params &p, int t, int64_t series, bool active) {
    row = t % L::GROUP * L::ROWS;
    base = t - t % L::GROUP;
    works = active && row < L::SIZE;
    with_offset = L::OFFSET;
    scanlib_locate(p, series, channel);
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) kept[r] = works && L::MASKED ? mask(p, row + r) : ~uint64_t(0);
    if (works && !L::STEPS) fetch_matrix(p, 0, a);
  }
  /* Take up a chunk; of `carry`, all of them. */
  SCANLIB_METHOD void enter(const Params &p, int64_t which) {
    const int64_t end = (which + 1) * p.chunk;
    chunk = which;
    first = L::CARRIES ? 0 : which * p.chunk;
    last = L::CARRIES ? p.chunks - 1 : end < p.steps ? end : p.steps;
  }
  /* Where an item of a matrix is, in row `i` and column `j`, or one of a vector: item `i`. */
  SCANLIB_METHOD char *place(const Params &p, int array, int64_t t, int i, int j = 0) const {
    const int64_t *e = p.at[array].e;
    return channel.at[array] + t * channel.t[array] + i * e[L::I] + j * e[L::J];
  }
  /* Which items of row `i` the mask keeps. */
  SCANLIB_METHOD uint64_t mask(const Params &p, int i) const {
    uint64_t bits = 0;
    for (int j = 0; j < L::SIZE; j++) bits |= uint64_t(*place(p, L::MASK, 0, i, j) != 0) << j;
    return bits;
  }
  SCANLIB_METHOD void fetch_matrix(const Params &p, int64_t t, Item *to) const {
    SCANLIB_UNROLL
    for (int k = 0; k < L::ROWS * L::SIZE; k++)
      to[k] = Item(scanlib_fetch<typename L::Memory>(
          place(p, L::MATRIX, t, row + k / L::SIZE, k % L::SIZE)));
  }
  SCANLIB_METHOD void fetch(const Params &p, int64_t k, terms &to) const {
    if (!works || first + k >= last) return;
    if (L::STEPS) fetch_matrix(p, first + k, to.a);
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS && L::OFFSET; r++)
      to.b[r] = Item(scanlib_fetch<typename L::Memory>(
          place(p, L::ADDED, first + k, row + r, L::ADDED_COLUMN)));
  }
};

/* What the lanes of a block share: the items of vectors before a step and after it. */
template <class L> struct scanlib_vectors {
  typename L::Item x[2][L::ALONE ? 1 : SCANLIB_THREADS];
  int32_t found[SCANLIB_THREADS];
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

  /* Step `k` of one thread; idle threads keep their value. */
  SCANLIB_METHOD void step(int t, int64_t k, typename Lane::terms &terms) {
    Lane &mine = own[t];
    if (!mine.works || mine.first + k >= mine.last) {
      if (!L::ALONE) item(t, 0, 1 - now) = item(t, 0, now);
      return;
    }
    if (!L::AHEAD) mine.fetch(p, k, terms);
    const Item *x = vector(t), *a = L::STEPS ? terms.a : mine.a;
    const int64_t left = mine.last - mine.first - k;
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) {
      mine.y[r] = L::product(a + r * L::SIZE, x, mine.kept[r]);
      if (L::OFFSET)
        mine.y[r] = mine.y[r] + (mine.with_offset ? terms.b[L::OFFSET ? r : 0] : Item(0));
      if (L::TRACED)
        *(typename L::Memory *)mine.place(p, L::RESULT, mine.first + k + 1, mine.row + r) =
            typename L::Memory(mine.y[r]);
    }
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) item(t, r, 1 - now) = mine.y[r];
    if (L::PROBES || L::CARRIES || p.chunks == 1 || left > 2) return;
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) {
      Real &most = *(Real *)mine.place(p, Params::scale, mine.chunk, mine.row + r);
      most = L::scale(mine.y[r], left == 2 || k == 0 ? Real(0) : most);
    }
  }

  /* All groups take `count` steps, with AHEAD of them read before they are needed. */
  SCANLIB_METHOD void take_steps(int64_t count) {
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
        SCANLIB_EACH(t) { step(t, low + k, own[t].now[k]); }
        if (!L::ALONE) SCANLIB_SYNC();
        now = 1 - now;
      }
    }
  }

  /* Whether the items of a thread are those of the state before a chunk, but for rounding. */
  SCANLIB_METHOD bool agrees(int t, int64_t chunk) {
    const Lane &mine = own[t];
    bool same = true;
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS && mine.works; r++) {
      const Item state = *(Item *)mine.place(p, Params::s, chunk, mine.row + r);
      const Real scale = *(Real *)mine.place(p, Params::scale, chunk - 1, mine.row + r);
      same = same && L::agrees(item(t, r, now), state, scale);
    }
    return same;
  }
  /* Keep what a chunk has ended with; of a result of one row, that is the last chunk's. */
  SCANLIB_METHOD void keep(int t) {
    const Lane &mine = own[t];
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS && mine.works; r++) {
      const Item &x = item(t, r, now);
      if (p.chunks > 1) *(Item *)mine.place(p, Params::e, mine.chunk, mine.row + r) = x;
      if (!L::TRACED && mine.chunk == p.chunks - 1)
        *(typename L::Memory *)mine.place(p, L::RESULT, 0, mine.row + r) = typename L::Memory(x);
    }
  }
  /* From which chunk on a vector is to be walked again, counted from the end. */
  SCANLIB_METHOD int32_t *near(int t) { return (int32_t *)own[t].channel.at[Params::near]; }
};

/* Each group walks one chunk of one vector or column; of `carry`, all chunks. */
template <class L> SCANLIB_DEVICE void scanlib_walk(const Params &p, int64_t block) {
  typedef typename L::Item Item;
  SCANLIB_SHARED scanlib_vectors<L> all;
  scanlib_groups<L> groups(p, all);
  SCANLIB_EACH(t) {
    scanlib_lane<L> &mine = groups.own[t];
    const int64_t chunks = L::CARRIES ? 1 : L::PROBES ? p.chunks - 1 : p.chunks;
    int64_t job = groups.job(block, t);
    const bool active = job < p.channels * chunks * L::COLUMNS;
    if (!active) job = 0;
    mine.column = (int)(job % L::COLUMNS);
    job /= L::COLUMNS;
    mine.locate(p, t, job % p.channels, active);
    mine.enter(p, job / p.channels);
    if (L::PROBES) mine.with_offset = L::OFFSET && (!L::LINEAR || mine.column == L::SIZE);
    if (L::CARRIES && mine.works && !mine.row) *groups.near(t) = 0;
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS; r++) {
      const int i = mine.row + r;
      Item x = i == mine.column ? L::unit() : L::zero();
      if (!L::PROBES && mine.works) {
        const bool cut = !L::CARRIES && p.chunks > 1;
        x = cut ? *(Item *)mine.place(p, Params::s, mine.chunk, i)
                : Item(scanlib_fetch<typename L::Outer>(mine.place(p, Params::x, 0, i)));
        if (L::TRACED && mine.chunk == 0)
          *(typename L::Memory *)mine.place(p, L::RESULT, 0, i) = typename L::Memory(x);
      }
      groups.item(t, r, 0) = x;
    }
  }
  SCANLIB_SYNC();
  groups.take_steps(L::CARRIES ? p.chunks - 1 : p.steps < p.chunk ? p.steps : p.chunk);
  SCANLIB_EACH(t) {
    const scanlib_lane<L> &mine = groups.own[t];
    SCANLIB_UNROLL
    for (int r = 0; r < L::ROWS && L::PROBES && mine.works; r++)
      *(Item *)mine.place(p, Params::m, mine.chunk, mine.row + r, mine.column) =
          groups.item(t, r, groups.now);
    if (L::PROBES || L::CARRIES) continue;
    groups.keep(t);
    if (mine.chunk < p.chunks - 1 && !groups.agrees(t, mine.chunk + 1))
      scanlib_at_least(groups.near(t), (int32_t)(p.chunks - 1 - mine.chunk));
  }
}

/* A group walks chunks of one vector again. A block begins with the first of any of its vectors. */
template <class L> SCANLIB_DEVICE void scanlib_mend(const Params &p, int64_t block) {
  typedef typename L::Item Item;
  SCANLIB_SHARED scanlib_vectors<L> all;
  scanlib_groups<L> groups(p, all);
  SCANLIB_EACH(t) {
    const int64_t s = groups.job(block, t);
    groups.own[t].locate(p, t, s < p.channels ? s : 0, s < p.channels);
    all.found[t] = groups.own[t].works ? *groups.near(t) : 0;
  }
  SCANLIB_SYNC();
  int32_t most = 0;
  for (int t = 0; t < SCANLIB_THREADS; t++) most = all.found[t] > most ? all.found[t] : most;
  for (int64_t chunk = p.chunks - most; chunk < p.chunks; chunk++) {
    SCANLIB_SYNC();
    SCANLIB_EACH(t) {
      const scanlib_lane<L> &mine = groups.own[t];
      SCANLIB_UNROLL
      for (int r = 0; r < L::ROWS && mine.works; r++)
        groups.item(t, r, groups.now) = *(Item *)mine.place(p, Params::e, chunk - 1, mine.row + r);
    }
    SCANLIB_SYNC();
    SCANLIB_EACH(t) { all.found[t] = !groups.agrees(t, chunk); }
    SCANLIB_SYNC();
    bool any = false;
    for (int t = 0; t < SCANLIB_THREADS; t++) any = any || all.found[t];
    SCANLIB_EACH(t) {
      scanlib_lane<L> &mine = groups.own[t];
      bool found = false;
      for (int k = 0; k < L::GROUP; k++) found = found || all.found[mine.base + k];
      mine.enter(p, chunk);
      if (!found) mine.last = mine.first;
    }
    if (!any) continue;
    SCANLIB_NOTE();
    groups.take_steps(p.chunk);
    SCANLIB_EACH(t) {
      if (groups.own[t].last > groups.own[t].first) groups.keep(t);
    }
  }
}
