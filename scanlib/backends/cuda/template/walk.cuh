/* Blocks of threads that share the steps of a few channels.
 *
 * `lanes` channels that lie side by side form a tile, and a block walks the tile's steps, a stretch
 * of SCANLIB_THREADS / lanes · SCANLIB_ITEMS at a time: thread `t` has the channel ``t % lanes`` and
 * the segment ``t / lanes`` of SCANLIB_ITEMS steps. A stretch is
 *
 * 1. read, neighbours by neighbours, into shared memory;
 * 2. composed: each thread its segment, then the block its segments (W. D. Hillis and G. L. Steele,
 *    "Data parallel algorithms", Communications of the ACM 29, 1986);
 * 3. walked: each thread from the value before its segment, by the steps as they are;
 * 4. stored, neighbours by neighbours.
 *
 * Where composing cannot be trusted, one thread walks the stretch to find the values before the
 * segments, and 3 is done again. So results never depend on it, but for rounding.
 *
 * A block walks a chunk of the steps. With several chunks, `scanlib_summarize` composes the steps of
 * each first, and `scanlib_carry` finds the values before each.
 */
template <class L> struct scanlib_tile {
  typename L::Channel channel;
  typename L::Fixed fixed;
  npy_intp c;
  int lane, segment;
  bool active;

  SCANLIB_METHOD void locate(const Params &p, npy_intp tile, int t) {
    lane = t % (int)p.lanes;
    segment = t / (int)p.lanes;
    c = tile * p.lanes + lane;
    active = c < p.channels;
    L::locate(p, active ? c : 0, channel);
    L::fix(channel, fixed);
  }
};

/* What a thread keeps of its segment. */
template <class L> struct scanlib_segment {
  typename L::Rows rows[SCANLIB_ITEMS];
  typename L::State state;
  typename L::Sums sums;
  int count; /* of steps */
};

/* Where the value of a place in a stretch is in shared memory; gaps keep threads off each other. */
SCANLIB_DEVICE int scanlib_slot(const Params &p, int place) {
  const int bits = (int)p.lane_bits;
  return place + (place >> (SCANLIB_ITEM_BITS + bits) << bits);
}
#define SCANLIB_SLOTS (SCANLIB_THREADS * SCANLIB_ITEMS + SCANLIB_THREADS)

/* Read a stretch of `n` steps, and give each thread the rows of its segment. */
template <class L>
SCANLIB_DEVICE void scanlib_read(const Params &p, typename L::Rows *shared, npy_intp begin, int n,
                                 scanlib_each<scanlib_tile<L> > &tile,
                                 scanlib_each<scanlib_segment<L> > &own) {
  const int lanes = (int)p.lanes, apart = SCANLIB_THREADS / lanes;
  SCANLIB_EACH(t) {
    SCANLIB_UNROLL
    for (int k = 0; k < SCANLIB_ITEMS; k++) {
      const int step = tile[t].segment + k * apart;
      if (step < n && tile[t].active)
        L::load(tile[t].channel, L::row(p.steps, begin + step),
                shared[scanlib_slot(p, step * lanes + tile[t].lane)]);
    }
  }
  SCANLIB_SYNC();
  SCANLIB_EACH(t) {
    const int first = tile[t].segment * SCANLIB_ITEMS, left = n - first;
    own[t].count = !tile[t].active || left < 0 ? 0 : left < SCANLIB_ITEMS ? left : SCANLIB_ITEMS;
    SCANLIB_UNROLL
    for (int k = 0; k < SCANLIB_ITEMS; k++)
      if (k < own[t].count)
        own[t].rows[k] = shared[scanlib_slot(p, (first + k) * lanes + tile[t].lane)];
  }
  SCANLIB_SYNC();
}

/* Compose the segments of each lane: of two halves of `shared`, the one that is returned holds, for
 * each thread, the composition of its segment and all before it. */
template <class L>
SCANLIB_DEVICE typename L::Summary *scanlib_compose(const Params &p, typename L::Summary *shared,
                                                    scanlib_each<scanlib_tile<L> > &tile,
                                                    scanlib_each<scanlib_segment<L> > &own) {
  typename L::Summary *from = shared, *to = shared + SCANLIB_THREADS;
  SCANLIB_EACH(t) {
    typename L::Summary all = {};
    SCANLIB_UNROLL
    for (int k = 0; k < SCANLIB_ITEMS; k++)
      if (k < own[t].count) {
        typename L::Summary one;
        L::lift(tile[t].fixed, own[t].rows[k], one);
        if (k)
          L::compose(all, one);
        else
          all = one;
      }
    from[t] = all;
  }
  SCANLIB_SYNC();
  for (int distance = (int)p.lanes; distance < SCANLIB_THREADS; distance *= 2) {
    SCANLIB_EACH(t) {
      typename L::Summary all = from[t];
      if (t >= distance && own[t].count) {
        all = from[t - distance];
        L::compose(all, from[t]);
      }
      to[t] = all;
    }
    SCANLIB_SYNC();
    typename L::Summary *other = from;
    from = to;
    to = other;
  }
  return from;
}

/* Walk a segment from `state`; returns whether all values stay far from overflow. */
template <class L>
SCANLIB_DEVICE bool scanlib_segment_steps(const Params &p, scanlib_tile<L> &tile,
                                          scanlib_segment<L> &own, typename L::State &state,
                                          typename L::Sums &sums, typename L::Results *shared) {
  const int lanes = (int)p.lanes;
  bool moderate = true;
  SCANLIB_UNROLL
  for (int k = 0; k < SCANLIB_ITEMS; k++)
    if (k < own.count) {
      typename L::Results results;
      const typename L::State before = state;
      L::step(tile.fixed, own.rows[k], state, sums, results);
      moderate = moderate && L::moderate(before, state);
      shared[scanlib_slot(p, (tile.segment * SCANLIB_ITEMS + k) * lanes + tile.lane)] = results;
    }
  return moderate;
}

/* Walk a stretch by one thread, from `state`, to find the values before its segments. */
template <class L>
SCANLIB_DEVICE bool scanlib_entries(const Params &p, scanlib_tile<L> &tile, npy_intp begin, int n,
                                    typename L::State state, typename L::State *entries) {
  typename L::Sums sums = {};
  typename L::Results results;
  typename L::Rows rows;
  bool moderate = true;
  SCANLIB_NOTE();
  for (int k = 0; k < n; k++) {
    if (k % SCANLIB_ITEMS == 0) entries[k / SCANLIB_ITEMS * (int)p.lanes + tile.lane] = state;
    const typename L::State before = state;
    L::load(tile.channel, L::row(p.steps, begin + k), rows);
    L::step(tile.fixed, rows, state, sums, results);
    moderate = moderate && L::moderate(before, state);
  }
  return moderate;
}

/* What the threads of a block share, and what each has of its own. */
template <class L> struct scanlib_shared {
  typedef typename L::Rows Rows;
  typedef typename L::Results Results;
  typedef typename L::Sums Sums;
  typedef typename L::State State;
  enum {
    ROW = sizeof(Rows) > sizeof(Results) ? sizeof(Rows) : sizeof(Results),
    ROWS = SCANLIB_SLOTS * ROW,
    TOTALS = SCANLIB_THREADS * sizeof(Sums)
  };
  alignas(16) char memory[ROWS > TOTALS ? ROWS : TOTALS]; /* rows, then results; at the end, sums */
  alignas(16) char composed[2 * SCANLIB_THREADS * sizeof(typename L::Summary)];
  alignas(16) char entries_[SCANLIB_THREADS * sizeof(State)];
  alignas(16) char current_[SCANLIB_LANES * sizeof(State)];
  int redo[SCANLIB_LANES], alarm[SCANLIB_LANES]; /* of each lane */

  SCANLIB_METHOD Rows *rows() { return (Rows *)memory; }
  SCANLIB_METHOD Results *results() { return (Results *)memory; }
  SCANLIB_METHOD Sums *totals() { return (Sums *)memory; }
  SCANLIB_METHOD State *entries() { return (State *)entries_; } /* before each segment */
  SCANLIB_METHOD State *current() { return (State *)current_; } /* before the stretch */
};

template <class L> struct scanlib_own {
  scanlib_each<scanlib_tile<L> > tile;
  scanlib_each<scanlib_segment<L> > segment;
  scanlib_each<typename L::Sums> sums;
};

/* Find the channels of each thread, and the values before the chunk. */
template <class L>
SCANLIB_DEVICE void scanlib_enter(const Params &p, npy_intp tile, npy_intp chunk,
                                  scanlib_own<L> &own, scanlib_shared<L> &shared) {
  SCANLIB_EACH(t) {
    own.tile[t].locate(p, tile, t);
    own.sums[t] = typename L::Sums();
    if (t < (int)p.lanes) {
      shared.redo[t] = shared.alarm[t] = 0;
      if (own.tile[t].active) {
        typename L::State &state = shared.current()[t];
        L::start(own.tile[t].channel, p.steps, state, chunk == 0);
        if (p.chunks > 1) state = L::states(p)[chunk * p.channels + own.tile[t].c];
      }
    }
  }
}

/* Walk all segments from composed values; note the lanes where that cannot be trusted. */
template <class L>
SCANLIB_DEVICE void scanlib_try(const Params &p, const typename L::Summary *composed,
                                scanlib_own<L> &own, scanlib_shared<L> &shared) {
  SCANLIB_EACH(t) {
    scanlib_tile<L> &tile = own.tile[t];
    scanlib_segment<L> &segment = own.segment[t];
    if (segment.count) {
      segment.state = shared.current()[tile.lane];
      segment.sums = own.sums[t];
      bool good = true;
      if (tile.segment) good = L::apply(composed[t - (int)p.lanes], segment.state);
      good &= scanlib_segment_steps<L>(p, tile, segment, segment.state, segment.sums,
                                       shared.results());
      if (!good) shared.redo[tile.lane] = 1;
    }
  }
  SCANLIB_SYNC();
}

/* Where that was so, walk once more from true values; then take over what was found. */
template <class L>
SCANLIB_DEVICE void scanlib_settle(const Params &p, npy_intp begin, int n, scanlib_own<L> &own,
                                   scanlib_shared<L> &shared) {
  SCANLIB_EACH(t) {
    if (t < (int)p.lanes && own.tile[t].active && shared.redo[t] &&
        !scanlib_entries<L>(p, own.tile[t], begin, n, shared.current()[t], shared.entries()))
      shared.alarm[t] = 1;
  }
  SCANLIB_SYNC();
  SCANLIB_EACH(t) {
    scanlib_tile<L> &tile = own.tile[t];
    scanlib_segment<L> &segment = own.segment[t];
    if (segment.count) {
      if (shared.redo[tile.lane]) {
        segment.state = shared.entries()[t];
        segment.sums = own.sums[t];
        scanlib_segment_steps<L>(p, tile, segment, segment.state, segment.sums, shared.results());
      }
      own.sums[t] = segment.sums;
      if (tile.segment * SCANLIB_ITEMS + segment.count == n)
        shared.current()[tile.lane] = segment.state;
    }
  }
  SCANLIB_SYNC();
}

template <class L>
SCANLIB_DEVICE void scanlib_store(const Params &p, npy_intp begin, int n, scanlib_own<L> &own,
                                  scanlib_shared<L> &shared) {
  const int lanes = (int)p.lanes, apart = SCANLIB_THREADS / lanes;
  SCANLIB_EACH(t) {
    const scanlib_tile<L> &tile = own.tile[t];
    if (t < lanes) shared.redo[t] = 0;
    SCANLIB_UNROLL
    for (int k = 0; k < SCANLIB_ITEMS; k++) {
      const int step = tile.segment + k * apart;
      if (step < n && tile.active)
        L::store(tile.channel, L::row(p.steps, begin + step),
                 shared.results()[scanlib_slot(p, step * lanes + tile.lane)]);
    }
  }
  SCANLIB_SYNC();
}

/* Write the last values, sums and alarms of a chunk. */
template <class L>
SCANLIB_DEVICE void scanlib_leave(const Params &p, npy_intp chunk, scanlib_own<L> &own,
                                  scanlib_shared<L> &shared) {
  const int lanes = (int)p.lanes;
  SCANLIB_SYNC();
  SCANLIB_EACH(t) { shared.totals()[t] = own.sums[t]; }
  SCANLIB_SYNC();
  SCANLIB_EACH(t) {
    const scanlib_tile<L> &tile = own.tile[t];
    if (t < lanes && tile.active) {
      typename L::Sums total = shared.totals()[t];
      for (int other = t + lanes; other < SCANLIB_THREADS; other += lanes)
        L::add(total, shared.totals()[other]);
      L::keep(p, chunk * p.channels + tile.c, total);
      if (chunk == p.chunks - 1) L::finish(tile.channel, shared.current()[t]);
      if (p.chunks > 1) {
        npy_int32 &found = L::alarms(p)[chunk * p.channels + tile.c];
        found = shared.alarm[t] && !found;
      }
    }
  }
}

/* Walk one chunk of one tile. */
template <class L> SCANLIB_DEVICE void scanlib_walk(const Params &p, npy_intp block) {
  SCANLIB_SHARED scanlib_shared<L> shared;
  scanlib_own<L> own;
  const int lanes = (int)p.lanes, stretch = SCANLIB_THREADS / lanes * SCANLIB_ITEMS;
  const npy_intp tiles = (p.channels + lanes - 1) / lanes, chunk = block / tiles;
  const npy_intp first = chunk * p.chunk;
  const npy_intp last = first + p.chunk < p.steps ? first + p.chunk : p.steps;
  scanlib_enter<L>(p, block % tiles, chunk, own, shared);
  for (npy_intp begin = first; begin < last; begin += stretch) {
    const int n = last - begin < stretch ? (int)(last - begin) : stretch;
    scanlib_read<L>(p, shared.rows(), begin, n, own.tile, own.segment);
    typename L::Summary *composed = scanlib_compose<L>(
        p, (typename L::Summary *)shared.composed, own.tile, own.segment);
    scanlib_try<L>(p, composed, own, shared);
    scanlib_settle<L>(p, begin, n, own, shared);
    scanlib_store<L>(p, begin, n, own, shared);
  }
  scanlib_leave<L>(p, chunk, own, shared);
}
