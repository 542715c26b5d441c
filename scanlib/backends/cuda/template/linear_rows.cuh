/* Matrix recurrences by a group of threads for each vector: thread `i` has row `i` of the matrix.
 *
 * A group has GROUP threads, of which SIZE work; a block of SCANLIB_THREADS has several groups. The
 * vectors are in shared memory, twice: one is read while the other is written. All groups of a block
 * take equally many steps, some of them idly, so that threads wait for each other at the same places.
 */
template <class L> struct scanlib_lane {
  typename L::Channel channel;
  typename L::Item a[L::SIZE], coming[L::AHEAD ? L::SIZE : 1], b;
  typename L::Real peak;
  uint64_t kept;
  int64_t s, chunk, first, last; /* steps */
  int row, base, column;
  bool works, with_offset;

  SCANLIB_METHOD void locate(const Params &p, int t, int64_t series, bool active) {
    row = t % L::GROUP;
    base = t - row;
    works = active && row < L::SIZE;
    s = series;
    with_offset = L::OFFSET;
    peak = typename L::Real(0);
    b = typename L::Item(0);
    kept = ~uint64_t(0);
    L::locate(p, s, channel);
    if (works && L::MASKED) kept = L::kept(p, channel, row);
    if (works && !L::STEPS) fetch(p, 0, a);
  }
  SCANLIB_METHOD void fetch(const Params &p, int64_t t, typename L::Item *to) const {
    SCANLIB_UNROLL
    for (int j = 0; j < L::SIZE; j++) to[j] = L::matrix(p, channel, t, row, j);
  }
};

/* The vectors of a block: where the item of thread `t` is, before a step and after it. */
template <class L> struct scanlib_vectors {
  typename L::Item x[2][SCANLIB_THREADS];
  typename L::Real lost[2][SCANLIB_THREADS];
  int wrong[SCANLIB_THREADS];
};

enum { SCANLIB_WALK, SCANLIB_PROBE, SCANLIB_SKIP }; /* store results, keep bounds, or neither */

/* One step of one thread, number `i` of the recurrence; idle threads keep their value. */
template <class L, int KIND>
SCANLIB_DEVICE void scanlib_lane_step(const Params &p, scanlib_lane<L> &lane,
                                      scanlib_vectors<L> &all, int t, int now, int64_t i) {
  typedef typename L::Item Item;
  const Item *x = all.x[now] + lane.base;
  Item y = all.x[now][t];
  if (lane.works && i < lane.last) {
    const int64_t row = L::row(p.steps, i);
    if (L::STEPS && L::AHEAD) {
      if (i == lane.first) lane.fetch(p, row, lane.coming);
      SCANLIB_UNROLL
      for (int j = 0; j < L::SIZE; j++) lane.a[j] = lane.coming[j];
      if (i + 1 < lane.last) lane.fetch(p, L::row(p.steps, i + 1), lane.coming);
    } else if (L::STEPS) {
      lane.fetch(p, row, lane.a);
    }
    const Item b = lane.with_offset ? L::offset(p, lane.channel, row, lane.row) : Item(0);
    y = L::Semiring::template product<L::SIZE>(lane.a, x, lane.kept) + b;
    if (KIND == SCANLIB_PROBE)
      all.lost[1 - now][t] = L::Semiring::template watch<L::SIZE>(
          lane.a, x, all.lost[now] + lane.base, lane.kept, b, y, lane.peak);
    if (KIND == SCANLIB_WALK && !L::LAST)
      L::store(p, lane.channel, L::after(row), lane.row, y);
  }
  all.x[1 - now][t] = y;
}

/* All groups take `count` steps; returns which of the two vectors holds the result. */
template <class L, int KIND>
SCANLIB_DEVICE int scanlib_group_steps(const Params &p, scanlib_each<scanlib_lane<L> > &lane,
                                       scanlib_vectors<L> &all, int64_t count, int now) {
  for (int64_t k = 0; k < count; k++) {
    SCANLIB_EACH(t) {
      scanlib_lane_step<L, KIND>(p, lane[t], all, t, now, lane[t].first + k);
    }
    SCANLIB_SYNC();
    now = 1 - now;
  }
  return now;
}

template <class L> SCANLIB_DEVICE void scanlib_walk_groups(const Params &p, int64_t block) {
  SCANLIB_SHARED scanlib_vectors<L> all;
  scanlib_each<scanlib_lane<L> > lane;
  SCANLIB_EACH(t) {
    const scanlib_stretch<L> own(p, block * (SCANLIB_THREADS / L::GROUP) + t / L::GROUP);
    lane[t].locate(p, t, own.s, own.active);
    lane[t].first = own.first;
    lane[t].last = own.last;
    typename L::Item x = typename L::Item(0);
    if (lane[t].works) {
      const int i = lane[t].row;
      x = p.chunks > 1 ? ((const typename L::Item *)
                              p.states)[scanlib_state_place<L>(p, own.s, own.chunk, i)]
                       : L::initial(p, lane[t].channel, i);
      if (!L::LAST && own.chunk == 0) L::store(p, lane[t].channel, L::before(p.steps), i, x);
    }
    all.x[0][t] = x;
  }
  SCANLIB_SYNC();
  const int64_t count = p.steps < p.chunk ? p.steps : p.chunk;
  const int now = scanlib_group_steps<L, SCANLIB_WALK>(p, lane, all, count, 0);
  SCANLIB_EACH(t) {
    if (L::LAST && lane[t].works)
      L::store(p, lane[t].channel, 0, lane[t].row, all.x[now][t]);
  }
}

template <class L> SCANLIB_DEVICE void scanlib_probe_groups(const Params &p, int64_t block) {
  typedef typename L::Semiring S;
  SCANLIB_SHARED scanlib_vectors<L> all;
  scanlib_each<scanlib_lane<L> > lane;
  SCANLIB_EACH(t) {
    const scanlib_probed<L> own(p, block * (SCANLIB_THREADS / L::GROUP) + t / L::GROUP);
    lane[t].locate(p, t, own.s, own.active);
    lane[t].chunk = own.chunk;
    lane[t].column = own.column;
    lane[t].first = own.chunk * p.chunk;
    lane[t].last = lane[t].first + p.chunk;
    lane[t].with_offset = L::OFFSET && (!S::LINEAR || own.column == L::SIZE);
    all.x[0][t] = lane[t].row == own.column ? S::unit() : S::zero();
    all.lost[0][t] = typename L::Real(0);
  }
  SCANLIB_SYNC();
  const int now = scanlib_group_steps<L, SCANLIB_PROBE>(p, lane, all, p.chunk, 0);
  SCANLIB_EACH(t) {
    const scanlib_lane<L> &own = lane[t];
    if (own.works)
      scanlib_keep_column<L>(p,
                             scanlib_column_place<L>(p, own.s, own.chunk, own.column, own.row),
                             all.x[now][t], own.peak, all.lost[now][t]);
  }
}

/* Find the states before each chunk. Where one cannot be trusted, its group walks the chunk. */
template <class L> SCANLIB_DEVICE void scanlib_carry_groups(const Params &p, int64_t block) {
  typedef typename L::Item Item;
  SCANLIB_SHARED scanlib_vectors<L> all;
  scanlib_each<scanlib_lane<L> > lane;
  int now = 0;
  SCANLIB_EACH(t) {
    const int64_t s = block * (SCANLIB_THREADS / L::GROUP) + t / L::GROUP;
    lane[t].locate(p, t, s < p.channels ? s : 0, s < p.channels);
    all.x[0][t] = lane[t].works ? L::initial(p, lane[t].channel, lane[t].row) : Item(0);
  }
  SCANLIB_SYNC();
  for (int64_t chunk = 0; chunk < p.chunks; chunk++) {
    SCANLIB_EACH(t) {
      const scanlib_lane<L> &own = lane[t];
      all.wrong[t] = 0;
      if (own.works) {
        ((Item *)p.states)[scanlib_state_place<L>(p, own.s, chunk, own.row)] = all.x[now][t];
        if (chunk < p.chunks - 1)
          all.wrong[t] = !scanlib_apply_chunk<L>(p, own.s, chunk, own.row,
                                                 all.x[now] + own.base, all.x[1 - now][t]);
      }
    }
    SCANLIB_SYNC();
    if (chunk == p.chunks - 1) return;
    bool walk = false;
    for (int t = 0; t < SCANLIB_THREADS; t++) walk = walk || all.wrong[t];
    SCANLIB_SYNC(); /* all know it before a thread goes on */
    now = 1 - now;
    if (!walk) continue;
    SCANLIB_NOTE();
    SCANLIB_EACH(t) {
      bool wrong = false;
      for (int k = 0; k < L::SIZE; k++) wrong = wrong || all.wrong[lane[t].base + k];
      lane[t].first = chunk * p.chunk;
      lane[t].last = wrong ? lane[t].first + p.chunk : lane[t].first;
      lane[t].b = wrong ? all.x[1 - now][t] : all.x[now][t]; /* from where the steps start */
    }
    SCANLIB_SYNC();
    SCANLIB_EACH(t) { all.x[now][t] = lane[t].b; }
    SCANLIB_SYNC();
    now = scanlib_group_steps<L, SCANLIB_SKIP>(p, lane, all, p.chunk, now);
  }
}
