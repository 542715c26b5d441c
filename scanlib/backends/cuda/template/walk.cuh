/* Blocks of threads that share the steps of a few channels.
 *
 * `lanes` channels that lie side by side form a tile, and a block walks the tile's steps, a stretch
 * of SCANLIB_THREADS / lanes · SCANLIB_ITEMS at a time: thread `t` has the channel ``t % lanes`` and
 * the segment ``t / lanes`` of SCANLIB_ITEMS steps. A stretch is
 *
 * 1. read, neighbours by neighbours, into shared memory;
 * 2. composed: each thread its segment, then one thread in SCANLIB_RAKE so many segments, and these
 *    each other (W. D. Hillis and G. L. Steele, "Data parallel algorithms", Communications of the
 *    ACM 29, 1986);
 * 3. walked: each thread from the value before its segment, by the steps as they are;
 * 4. stored, neighbours by neighbours.
 *
 * Where composing cannot be trusted, one thread walks the stretch to find the values before the
 * segments, and 3 is done again. So results never depend on it, but for rounding.
 *
 * A block walks all steps of its tile, or one stretch, which is then called a chunk (`look_back.cuh`).
 *
 * Functions of a stretch have a copy for stretches as long as they get, `WHOLE`, without tests.
 */
#define SCANLIB_RAKE 8
#define SCANLIB_RAKE_BITS 3
template <class L> struct scanlib_tile {
  typename L::Fixed fixed;
  int64_t c;
  int lane, segment;
  bool active;

  SCANLIB_METHOD void locate(const Params &p, int64_t tile, int t) {
    lane = t & ((int)p.lanes - 1);
    segment = t >> (int)p.lane_bits;
    c = tile * p.lanes + lane;
    active = c < p.channels;
    L::fix(p, channel(p), fixed);
  }
  /* Found anew by each phase: it is large. */
  SCANLIB_METHOD scanlib_channel channel(const Params &p) const {
    scanlib_channel found;
    scanlib_locate(p, active ? c : 0, found);
    return found;
  }
};

/* What a thread keeps of its segment. */
template <class L> struct scanlib_segment {
  typename L::Rows rows[SCANLIB_ITEMS];
  typename L::Summary before; /* all segments of the lane before it, composed */
  typename L::State state;
  typename L::Sums sums;
  int count; /* of steps */
};

/* Where the value of a place in a stretch is in shared memory; gaps keep threads off each other. */
SCANLIB_DEVICE int scanlib_slot(const Params &p, int place) {
  const int bits = (int)p.lane_bits;
  return place + (place >> (SCANLIB_ITEM_BITS + bits) << bits);
}
/* That of step `k` of a segment, and of the `k`-th step that thread `t` reads or stores; where
 * stretches are `WHOLE`, SCANLIB_ITEMS times the lanes divide the threads. */
SCANLIB_DEVICE int scanlib_held(const Params &p, int segment, int k, int lane) {
  return (segment * (SCANLIB_ITEMS + 1) + k) * (int)p.lanes + lane;
}
template <bool WHOLE> SCANLIB_DEVICE int scanlib_dealt(const Params &p, int t, int k) {
  if (!WHOLE) return scanlib_slot(p, t + k * SCANLIB_THREADS);
  return scanlib_slot(p, t) + k * (SCANLIB_THREADS + SCANLIB_THREADS / SCANLIB_ITEMS);
}
#define SCANLIB_SLOTS (SCANLIB_THREADS * SCANLIB_ITEMS + SCANLIB_THREADS)

/* Read a stretch of `n` steps, and give each thread the rows of its segment. */
template <class L, bool WHOLE>
SCANLIB_DEVICE void scanlib_read(const Params &p, typename L::Rows *shared, int64_t begin, int n,
                                 scanlib_each<scanlib_tile<L> > &tile,
                                 scanlib_each<scanlib_segment<L> > &own) {
  const int apart = SCANLIB_THREADS >> (int)p.lane_bits;
  const int64_t further = L::row(p.steps, apart) - L::row(p.steps, 0);
  SCANLIB_EACH(t) {
    if (tile[t].active) {
      scanlib_channel here = tile[t].channel(p);
      scanlib_advance(here, L::row(p.steps, begin + tile[t].segment));
      SCANLIB_UNROLL
      for (int k = 0; k < SCANLIB_ITEMS; k++) {
        if (WHOLE || tile[t].segment + k * apart < n)
          L::load(here, 0, shared[scanlib_dealt<WHOLE>(p, t, k)]);
        scanlib_advance(here, further);
      }
    }
  }
  SCANLIB_SYNC();
  SCANLIB_EACH(t) {
    const int first = tile[t].segment * SCANLIB_ITEMS, left = WHOLE ? SCANLIB_ITEMS : n - first;
    own[t].count = !tile[t].active || left < 0 ? 0 : left < SCANLIB_ITEMS ? left : SCANLIB_ITEMS;
    SCANLIB_UNROLL
    for (int k = 0; k < SCANLIB_ITEMS; k++)
      own[t].rows[k] = shared[scanlib_held(p, tile[t].segment, k, tile[t].lane)];
  }
  SCANLIB_SYNC();
}

/* Summaries of a block: of all segments, with gaps, and twice of those that one thread composes. */
#define SCANLIB_RAKES (SCANLIB_THREADS / SCANLIB_RAKE + SCANLIB_LANES)
#define SCANLIB_COMPOSED (SCANLIB_THREADS + SCANLIB_THREADS / SCANLIB_RAKE + 2 * SCANLIB_RAKES)

SCANLIB_DEVICE int scanlib_part(const Params &p, int segment, int lane) {
  return (segment + (segment >> SCANLIB_RAKE_BITS)) * (int)p.lanes + lane;
}

/* Compose the steps of each segment. */
template <class L, bool WHOLE>
SCANLIB_DEVICE void scanlib_lift(const Params &p, typename L::Summary *parts,
                                 scanlib_each<scanlib_tile<L> > &tile,
                                 scanlib_each<scanlib_segment<L> > &own) {
  SCANLIB_EACH(t) {
    if (own[t].count) {
      typename L::Summary all, one;
      L::lift(tile[t].fixed, own[t].rows[0], all);
      SCANLIB_UNROLL
      for (int k = 1; k < SCANLIB_ITEMS; k++)
        if (WHOLE || k < own[t].count) {
          L::lift(tile[t].fixed, own[t].rows[k], one);
          L::extend(all, one);
        }
      parts[scanlib_part(p, tile[t].segment, tile[t].lane)] = all;
    }
  }
  SCANLIB_SYNC();
}

/* Compose the segments of each lane: those before each of them (`own.before`), and all (`whole`). */
template <class L, bool WHOLE>
SCANLIB_DEVICE void scanlib_compose(const Params &p, int n, typename L::Summary *parts,
                                    typename L::Summary *whole,
                                    scanlib_each<scanlib_tile<L> > &tile,
                                    scanlib_each<scanlib_segment<L> > &own) {
  typedef typename L::Summary Summary;
  const int lanes = (int)p.lanes, bits = (int)p.lane_bits;
  const int used = WHOLE ? SCANLIB_THREADS >> bits : (n + SCANLIB_ITEMS - 1) / SCANLIB_ITEMS;
  const int rakes = (used + SCANLIB_RAKE - 1) / SCANLIB_RAKE * lanes;
  Summary *from = parts + SCANLIB_THREADS + SCANLIB_THREADS / SCANLIB_RAKE;
  Summary *to = from + SCANLIB_RAKES;
  scanlib_lift<L, WHOLE>(p, parts, tile, own);
  SCANLIB_EACH(t) {
    if (t < rakes) {
      const int first = (t >> bits) * SCANLIB_RAKE;
      Summary all = parts[scanlib_part(p, first, tile[t].lane)];
      for (int k = first + 1; k < first + SCANLIB_RAKE && k < used; k++)
        L::compose(all, parts[scanlib_part(p, k, tile[t].lane)]);
      from[t] = all;
    }
  }
  SCANLIB_SYNC();
  for (int distance = lanes; distance < rakes; distance *= 2) {
    SCANLIB_EACH(t) {
      if (t < rakes) {
        Summary all = from[t];
        if (t >= distance) {
          all = from[t - distance];
          L::compose(all, from[t]);
        }
        to[t] = all;
      }
    }
    SCANLIB_SYNC();
    Summary *other = from;
    from = to;
    to = other;
  }
  SCANLIB_EACH(t) {
    if (t < rakes) {
      const int first = (t >> bits) * SCANLIB_RAKE;
      if (t >= rakes - lanes) whole[tile[t].lane] = from[t];
      Summary before = from[t < lanes ? t : t - lanes];
      for (int k = first; k < first + SCANLIB_RAKE && k < used; k++) {
        Summary &place = parts[scanlib_part(p, k, tile[t].lane)], one = place;
        place = before;
        if (k)
          L::compose(before, one);
        else
          before = one; /* nothing is before the first one */
      }
    }
  }
  SCANLIB_SYNC();
  SCANLIB_EACH(t) {
    if (own[t].count) own[t].before = parts[scanlib_part(p, tile[t].segment, tile[t].lane)];
  }
  SCANLIB_SYNC();
}

/* Walk a segment from `state`; returns whether all values stay far from overflow. */
template <class L, bool WHOLE>
SCANLIB_DEVICE bool scanlib_segment_steps(const Params &p, const scanlib_tile<L> &tile,
                                          const scanlib_segment<L> &own, typename L::State &state,
                                          typename L::Sums &sums, typename L::Results *shared) {
  bool moderate = true;
  SCANLIB_UNROLL
  for (int k = 0; k < SCANLIB_ITEMS; k++)
    if (WHOLE || k < own.count) {
      typename L::Results results;
      const typename L::State before = state;
      L::step(tile.fixed, own.rows[k], state, sums, results);
      moderate &= L::moderate(before, state);
      shared[scanlib_held(p, tile.segment, k, tile.lane)] = results;
    }
  return moderate;
}

/* Walk a stretch by one thread, from `state`, to find the values before its segments. */
template <class L>
SCANLIB_DEVICE bool scanlib_entries(const Params &p, scanlib_tile<L> &tile, int64_t begin, int n,
                                    typename L::State state, typename L::State *entries) {
  typename L::Sums sums = {};
  typename L::Results results;
  typename L::Rows rows;
  const scanlib_channel channel = tile.channel(p);
  bool moderate = true;
  SCANLIB_NOTE();
  for (int k = 0; k < n; k++) {
    if (k % SCANLIB_ITEMS == 0) entries[k / SCANLIB_ITEMS * (int)p.lanes + tile.lane] = state;
    const typename L::State before = state;
    L::load(channel, L::row(p.steps, begin + k), rows);
    L::step(tile.fixed, rows, state, sums, results);
    moderate &= L::moderate(before, state);
  }
  return moderate;
}

/* What the threads of a block share, and what each has of its own. */
template <class L> struct scanlib_shared {
  typedef typename L::Rows Rows;
  typedef typename L::Results Results;
  typedef typename L::Sums Sums;
  typedef typename L::State State;
  typedef typename L::Summary Summary;
  enum {
    ROW = sizeof(Rows) > sizeof(Results) ? sizeof(Rows) : sizeof(Results),
    ROWS = SCANLIB_SLOTS * ROW,
    TOTALS = SCANLIB_THREADS * sizeof(Sums),
    LARGE = ROWS > TOTALS ? ROWS : TOTALS,
    COMPOSED = SCANLIB_COMPOSED * sizeof(Summary)
  };
  /* rows, then what is composed, then results; at the end, sums */
  alignas(16) char memory[LARGE > COMPOSED ? LARGE : COMPOSED];
  alignas(16) char entries_[SCANLIB_THREADS * sizeof(State)];
  alignas(16) char current_[SCANLIB_LANES * sizeof(State)];
  alignas(16) char whole_[SCANLIB_LANES * sizeof(Summary)];
  int redo[SCANLIB_LANES], alarm[SCANLIB_LANES]; /* of each lane */
  int again; /* whether any is to be walked again */

  SCANLIB_METHOD Rows *rows() { return (Rows *)memory; }
  SCANLIB_METHOD Results *results() { return (Results *)memory; }
  SCANLIB_METHOD Summary *composed() { return (Summary *)memory; }
  SCANLIB_METHOD Summary *whole() { return (Summary *)whole_; } /* of each lane */
  SCANLIB_METHOD Sums *totals() { return (Sums *)memory; }
  SCANLIB_METHOD State *entries() { return (State *)entries_; } /* before each segment */
  SCANLIB_METHOD State *current() { return (State *)current_; } /* before the stretch */
};

template <class L> struct scanlib_own {
  scanlib_each<scanlib_tile<L> > tile;
  scanlib_each<scanlib_segment<L> > segment;
  scanlib_each<typename L::Sums> sums;
};

/* Find the channels of each thread, and the values before the first step. */
template <class L>
SCANLIB_DEVICE void scanlib_enter(const Params &p, int64_t tile, bool first, scanlib_own<L> &own,
                                  scanlib_shared<L> &shared) {
  SCANLIB_EACH(t) {
    own.tile[t].locate(p, tile, t);
    own.sums[t] = typename L::Sums();
    if (t < (int)p.lanes) {
      shared.redo[t] = shared.alarm[t] = shared.again = 0;
      if (own.tile[t].active)
        L::start(own.tile[t].channel(p), p.steps, shared.current()[t], first);
    }
  }
}

/* Walk all segments from composed values. In lanes where that cannot be trusted, one thread walks the
 * stretch to find the values before its segments, and these are walked once more. */
template <class L, bool WHOLE>
SCANLIB_DEVICE void scanlib_segments(const Params &p, int64_t begin, int n, scanlib_own<L> &own,
                                     scanlib_shared<L> &shared) {
  SCANLIB_ROLLED
  for (int again = 0; again < 2; again++) {
    SCANLIB_EACH(t) {
      scanlib_tile<L> &tile = own.tile[t];
      scanlib_segment<L> &segment = own.segment[t];
      if (segment.count && (!again || shared.redo[tile.lane])) {
        bool good = true;
        segment.sums = own.sums[t];
        segment.state = again ? shared.entries()[t] : shared.current()[tile.lane];
        if (tile.segment && !again) good = L::apply(segment.before, segment.state);
        good &= scanlib_segment_steps<L, WHOLE>(p, tile, segment, segment.state, segment.sums,
                                                shared.results());
        if (!good && !again) shared.redo[tile.lane] = shared.again = 1;
      }
    }
    SCANLIB_SYNC();
    if (again || !shared.again) break;
    SCANLIB_EACH(t) {
      if (t < (int)p.lanes && own.tile[t].active && shared.redo[t] &&
          !scanlib_entries<L>(p, own.tile[t], begin, n, shared.current()[t], shared.entries()))
        shared.alarm[t] = 1;
    }
    SCANLIB_SYNC();
  }
  SCANLIB_EACH(t) {
    const scanlib_segment<L> &segment = own.segment[t];
    if (segment.count) {
      own.sums[t] = segment.sums;
      if (own.tile[t].segment * SCANLIB_ITEMS + segment.count == n)
        shared.current()[own.tile[t].lane] = segment.state;
    }
  }
  SCANLIB_SYNC();
}

template <class L, bool WHOLE>
SCANLIB_DEVICE void scanlib_store(const Params &p, int64_t begin, int n, scanlib_own<L> &own,
                                  scanlib_shared<L> &shared) {
  const int lanes = (int)p.lanes, apart = SCANLIB_THREADS >> (int)p.lane_bits;
  const int64_t further = L::row(p.steps, apart) - L::row(p.steps, 0);
  SCANLIB_EACH(t) {
    const scanlib_tile<L> &tile = own.tile[t];
    if (t < lanes) shared.redo[t] = shared.again = 0;
    if (tile.active) {
      scanlib_channel here = tile.channel(p);
      scanlib_advance(here, L::row(p.steps, begin + tile.segment));
      SCANLIB_UNROLL
      for (int k = 0; k < SCANLIB_ITEMS; k++) {
        if (WHOLE || tile.segment + k * apart < n)
          L::store(here, 0, shared.results()[scanlib_dealt<WHOLE>(p, t, k)]);
        scanlib_advance(here, further);
      }
    }
  }
  SCANLIB_SYNC();
}

/* Write the sums of a chunk, and the last values of the loop. */
template <class L>
SCANLIB_DEVICE void scanlib_leave(const Params &p, int64_t chunk, scanlib_own<L> &own,
                                  scanlib_shared<L> &shared) {
  const int lanes = (int)p.lanes;
  SCANLIB_EACH(t) { shared.totals()[t] = own.sums[t]; }
  SCANLIB_SYNC();
  SCANLIB_EACH(t) {
    const scanlib_tile<L> &tile = own.tile[t];
    if (t < lanes && tile.active) {
      typename L::Sums total = shared.totals()[t];
      for (int other = t + lanes; L::SUMS && other < SCANLIB_THREADS; other += lanes)
        L::add(total, shared.totals()[other]);
      const scanlib_channel here = tile.channel(p);
      L::keep(here, chunk, total);
      if (chunk == p.chunks - 1) L::finish(here, shared.current()[t], p.steps);
    }
  }
}

/* Walk all steps of one tile. */
template <class L> SCANLIB_DEVICE void scanlib_walk(const Params &p, int64_t block) {
  SCANLIB_SHARED scanlib_shared<L> shared;
  scanlib_own<L> own;
  const int stretch = (SCANLIB_THREADS >> (int)p.lane_bits) * SCANLIB_ITEMS;
  scanlib_enter<L>(p, block, true, own, shared);
  for (int64_t begin = 0; begin < p.steps; begin += stretch) {
    const int n = p.steps - begin < stretch ? (int)(p.steps - begin) : stretch;
    scanlib_read<L, false>(p, shared.rows(), begin, n, own.tile, own.segment);
    scanlib_compose<L, false>(p, n, shared.composed(), shared.whole(), own.tile, own.segment);
    scanlib_segments<L, false>(p, begin, n, own, shared);
    scanlib_store<L, false>(p, begin, n, own, shared);
  }
  scanlib_leave<L>(p, 0, own, shared);
}
