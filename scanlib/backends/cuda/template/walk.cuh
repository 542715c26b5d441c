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
#define SCANLIB_SLOTS (SCANLIB_THREADS * SCANLIB_ITEMS + SCANLIB_THREADS)
/* Summaries of a block: of all segments, with gaps, and twice of those that one thread composes. */
#define SCANLIB_RAKES (SCANLIB_THREADS / SCANLIB_RAKE + SCANLIB_LANES)
#define SCANLIB_COMPOSED (SCANLIB_THREADS + SCANLIB_THREADS / SCANLIB_RAKE + 2 * SCANLIB_RAKES)

/* What a thread has of its own: a channel, a segment, sums of all its steps. */
template <class L> struct scanlib_thread {
  typename L::Fixed fixed;
  typename L::Rows rows[SCANLIB_ITEMS];
  typename L::Summary before; /* all segments of the lane before it, composed */
  typename L::State state;
  typename L::Sums sums, segment_sums;
  int64_t c;
  int lane, segment, count; /* count of steps */
  bool active;

  /* Found anew by each phase: it is large. */
  SCANLIB_METHOD scanlib_channel channel(const Params &p) const {
    scanlib_channel found;
    scanlib_locate(p, active ? c : 0, found);
    return found;
  }
};

/* What the threads of a block share. */
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

template <class L> struct scanlib_block {
  typedef typename L::Rows Rows;
  typedef typename L::Results Results;
  typedef typename L::Sums Sums;
  typedef typename L::State State;
  typedef typename L::Summary Summary;
  const Params &p;
  scanlib_shared<L> &shared;
  const int lanes, bits, apart; /* channels; threads of each */
  scanlib_each<scanlib_thread<L> > own;

  SCANLIB_METHOD scanlib_block(const Params &given, scanlib_shared<L> &memory)
      : p(given), shared(memory), lanes((int)given.lanes), bits((int)given.lane_bits),
        apart(SCANLIB_THREADS >> (int)given.lane_bits) {}

  /* Whether a thread is the one that speaks for its channel. */
  SCANLIB_METHOD bool leads(int t) { return t < lanes && own[t].active; }

  /* Find the channels of each thread, and the values before the first step. */
  SCANLIB_METHOD void enter(int64_t tile, bool first) {
    SCANLIB_EACH(t) {
      scanlib_thread<L> &mine = own[t];
      mine.lane = t & (lanes - 1);
      mine.segment = t >> bits;
      mine.c = tile * lanes + mine.lane;
      mine.active = mine.c < p.channels;
      mine.sums = Sums();
      L::fix(p, mine.channel(p), mine.fixed);
      if (t < lanes) shared.redo[t] = shared.alarm[t] = shared.again = 0;
      if (leads(t)) L::start(mine.channel(p), shared.current()[t], first);
    }
  }

  /* Where step `k` of a segment is in shared memory, and the `k`-th step that thread `t` reads or
   * stores; gaps keep threads off each other. Where stretches are `WHOLE`, SCANLIB_ITEMS times the
   * lanes divide the threads. */
  SCANLIB_METHOD int held(int segment, int k, int lane) const {
    return (segment * (SCANLIB_ITEMS + 1) + k) * lanes + lane;
  }
  SCANLIB_METHOD int slot(int place) const {
    return place + (place >> (SCANLIB_ITEM_BITS + bits) << bits);
  }
  template <bool WHOLE> SCANLIB_METHOD int dealt(int t, int k) const {
    if (!WHOLE) return slot(t + k * SCANLIB_THREADS);
    return slot(t) + k * (SCANLIB_THREADS + SCANLIB_THREADS / SCANLIB_ITEMS);
  }
  SCANLIB_METHOD int part(int segment, int lane) const {
    return (segment + (segment >> SCANLIB_RAKE_BITS)) * lanes + lane;
  }

  /* Read a stretch of `n` steps, and give each thread the rows of its segment. */
  template <bool WHOLE> SCANLIB_METHOD void read(int64_t begin, int n) {
    SCANLIB_EACH(t) {
      if (own[t].active) {
        scanlib_channel here = own[t].channel(p);
        scanlib_advance(here, begin + own[t].segment);
        SCANLIB_UNROLL
        for (int k = 0; k < SCANLIB_ITEMS; k++) {
          if (WHOLE || own[t].segment + k * apart < n)
            L::load(here, 0, shared.rows()[dealt<WHOLE>(t, k)]);
          scanlib_advance(here, apart);
        }
      }
    }
    SCANLIB_SYNC();
    SCANLIB_EACH(t) {
      const int first = own[t].segment * SCANLIB_ITEMS, left = WHOLE ? SCANLIB_ITEMS : n - first;
      own[t].count = !own[t].active || left < 0 ? 0 : left < SCANLIB_ITEMS ? left : SCANLIB_ITEMS;
      SCANLIB_UNROLL
      for (int k = 0; k < SCANLIB_ITEMS; k++)
        own[t].rows[k] = shared.rows()[held(own[t].segment, k, own[t].lane)];
    }
    SCANLIB_SYNC();
  }

  /* Compose the steps of each segment. */
  template <bool WHOLE> SCANLIB_METHOD void lift(Summary *parts) {
    SCANLIB_EACH(t) {
      if (own[t].count) {
        Summary all, one;
        L::lift(own[t].fixed, own[t].rows[0], all);
        SCANLIB_UNROLL
        for (int k = 1; k < SCANLIB_ITEMS; k++)
          if (WHOLE || k < own[t].count) {
            L::lift(own[t].fixed, own[t].rows[k], one);
            L::extend(all, one);
          }
        parts[part(own[t].segment, own[t].lane)] = all;
      }
    }
    SCANLIB_SYNC();
  }

  /* Compose the segments of each lane: those before each of them (`before`), and all (`whole`). */
  template <bool WHOLE> SCANLIB_METHOD void compose(int n) {
    const int used = WHOLE ? SCANLIB_THREADS >> bits : (n + SCANLIB_ITEMS - 1) / SCANLIB_ITEMS;
    const int rakes = (used + SCANLIB_RAKE - 1) / SCANLIB_RAKE * lanes;
    Summary *parts = shared.composed();
    Summary *from = parts + SCANLIB_THREADS + SCANLIB_THREADS / SCANLIB_RAKE;
    Summary *to = from + SCANLIB_RAKES;
    lift<WHOLE>(parts);
    SCANLIB_EACH(t) {
      if (t < rakes) {
        const int first = (t >> bits) * SCANLIB_RAKE;
        Summary all = parts[part(first, own[t].lane)];
        for (int k = first + 1; k < first + SCANLIB_RAKE && k < used; k++)
          L::compose(all, parts[part(k, own[t].lane)]);
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
        if (t >= rakes - lanes) shared.whole()[own[t].lane] = from[t];
        Summary before = from[t < lanes ? t : t - lanes];
        for (int k = first; k < first + SCANLIB_RAKE && k < used; k++) {
          Summary &place = parts[part(k, own[t].lane)], one = place;
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
      if (own[t].count) own[t].before = parts[part(own[t].segment, own[t].lane)];
    }
    SCANLIB_SYNC();
  }

  /* Walk a segment; returns whether all values stay far from overflow. */
  template <bool WHOLE> SCANLIB_METHOD bool walk_segment(scanlib_thread<L> &mine) {
    bool moderate = true;
    SCANLIB_UNROLL
    for (int k = 0; k < SCANLIB_ITEMS; k++)
      if (WHOLE || k < mine.count) {
        Results results;
        const State before = mine.state;
        L::step(mine.fixed, mine.rows[k], mine.state, mine.segment_sums, results);
        moderate &= L::moderate(before, mine.state);
        shared.results()[held(mine.segment, k, mine.lane)] = results;
      }
    return moderate;
  }

  /* Walk a stretch by one thread, from `state`, to find the values before its segments. */
  SCANLIB_METHOD bool find_entries(const scanlib_thread<L> &mine, int64_t begin, int n, State state) {
    Sums sums = {};
    Results results;
    Rows rows;
    const scanlib_channel channel = mine.channel(p);
    bool moderate = true;
    SCANLIB_NOTE();
    for (int k = 0; k < n; k++) {
      if (k % SCANLIB_ITEMS == 0) shared.entries()[k / SCANLIB_ITEMS * lanes + mine.lane] = state;
      const State before = state;
      L::load(channel, begin + k, rows);
      L::step(mine.fixed, rows, state, sums, results);
      moderate &= L::moderate(before, state);
    }
    return moderate;
  }

  /* Walk all segments from composed values. In lanes where that cannot be trusted, one thread walks
   * the stretch to find the values before its segments, and these are walked once more. */
  template <bool WHOLE> SCANLIB_METHOD void walk(int64_t begin, int n) {
    SCANLIB_ROLLED
    for (int again = 0; again < 2; again++) {
      SCANLIB_EACH(t) {
        scanlib_thread<L> &mine = own[t];
        if (mine.count && (!again || shared.redo[mine.lane])) {
          bool good = true;
          mine.segment_sums = mine.sums;
          mine.state = again ? shared.entries()[t] : shared.current()[mine.lane];
          if (mine.segment && !again) good = L::apply(mine.before, mine.state);
          good &= walk_segment<WHOLE>(mine);
          if (!good && !again) shared.redo[mine.lane] = shared.again = 1;
        }
      }
      SCANLIB_SYNC();
      if (again || !shared.again) break;
      SCANLIB_EACH(t) {
        if (leads(t) && shared.redo[t] && !find_entries(own[t], begin, n, shared.current()[t]))
          shared.alarm[t] = 1;
      }
      SCANLIB_SYNC();
    }
    SCANLIB_EACH(t) {
      if (own[t].count) {
        own[t].sums = own[t].segment_sums;
        if (own[t].segment * SCANLIB_ITEMS + own[t].count == n)
          shared.current()[own[t].lane] = own[t].state;
      }
    }
    SCANLIB_SYNC();
  }

  template <bool WHOLE> SCANLIB_METHOD void store(int64_t begin, int n) {
    SCANLIB_EACH(t) {
      if (t < lanes) shared.redo[t] = shared.again = 0;
      if (own[t].active) {
        scanlib_channel here = own[t].channel(p);
        scanlib_advance(here, begin + own[t].segment);
        SCANLIB_UNROLL
        for (int k = 0; k < SCANLIB_ITEMS; k++) {
          if (WHOLE || own[t].segment + k * apart < n)
            L::store(here, 0, shared.results()[dealt<WHOLE>(t, k)]);
          scanlib_advance(here, apart);
        }
      }
    }
    SCANLIB_SYNC();
  }

  /* Write the sums of a chunk, and the last values of the loop. */
  SCANLIB_METHOD void leave(int64_t chunk) {
    SCANLIB_EACH(t) { shared.totals()[t] = own[t].sums; }
    SCANLIB_SYNC();
    SCANLIB_EACH(t) {
      if (leads(t)) {
        Sums total = shared.totals()[t];
        for (int other = t + lanes; L::SUMS && other < SCANLIB_THREADS; other += lanes)
          L::add(total, shared.totals()[other]);
        const scanlib_channel here = own[t].channel(p);
        L::keep(here, chunk, total);
        if (chunk == p.chunks - 1) L::finish(here, shared.current()[t], p.steps);
      }
    }
  }
};

/* Walk all steps of one tile. */
template <class L> SCANLIB_DEVICE void scanlib_walk(const Params &p, int64_t tile) {
  SCANLIB_SHARED scanlib_shared<L> shared;
  scanlib_block<L> block(p, shared);
  const int stretch = block.apart * SCANLIB_ITEMS;
  block.enter(tile, true);
  for (int64_t begin = 0; begin < p.steps; begin += stretch) {
    const int n = p.steps - begin < stretch ? (int)(p.steps - begin) : stretch;
    block.template read<false>(begin, n);
    block.template compose<false>(n);
    block.template walk<false>(begin, n);
    block.template store<false>(begin, n);
  }
  block.leave(0);
}
