/* Matrix recurrences x_t = A_t x_{t-1} + b_t by one thread for each vector: all is in registers.
 *
 * `L` is the recurrence (see `linear_writer.py`): where a vector's items are, its SIZE, and its
 * `Semiring`. There is one vector for each item of the batch and each column of the state. The steps
 * of few vectors are cut into chunks:
 *
 * 1. `scanlib_probe` runs every chunk from the columns of the identity, and from zero: what the chunk
 *    does to any state follows from where these end;
 * 2. `scanlib_carry_vectors` finds the state before each chunk;
 * 3. `scanlib_walk_vectors` runs all chunks from there.
 */

/* What belongs to all steps, and to one. */
template <class L> struct scanlib_constants {
  typedef typename L::Item Item;
  enum { ITEMS = L::STEPS ? 1 : L::SIZE * L::SIZE, ROWS = L::MASKED ? L::SIZE : 1 };
  Item a[ITEMS];
  uint64_t kept_[ROWS];
  SCANLIB_METHOD void fetch(const Params &p, const typename L::Channel &channel) {
    SCANLIB_UNROLL
    for (int k = 0; k < ITEMS && !L::STEPS; k++)
      a[k] = L::matrix(p, channel, 0, k / L::SIZE, k % L::SIZE);
    SCANLIB_UNROLL
    for (int i = 0; i < ROWS && L::MASKED; i++) kept_[i] = L::kept(p, channel, i);
  }
  SCANLIB_METHOD uint64_t kept(int i) const { return L::MASKED ? kept_[i] : ~uint64_t(0); }
};

template <class L> struct scanlib_terms {
  typedef typename L::Item Item;
  enum { ITEMS = L::STEPS ? L::SIZE * L::SIZE : 1, ROWS = L::OFFSET ? L::SIZE : 1 };
  Item a[ITEMS], b[ROWS];
  SCANLIB_METHOD void fetch(const Params &p, const typename L::Channel &channel, int64_t t) {
    SCANLIB_UNROLL
    for (int k = 0; k < ITEMS && L::STEPS; k++)
      a[k] = L::matrix(p, channel, t, k / L::SIZE, k % L::SIZE);
    SCANLIB_UNROLL
    for (int i = 0; i < ROWS && L::OFFSET; i++) b[i] = L::offset(p, channel, t, i);
  }
};

/* Steps of one vector; results are stored if `STORE`. */
template <class L, bool STORE> struct scanlib_walker {
  typedef typename L::Item Item;
  Item x[L::SIZE];
  SCANLIB_METHOD void step(const Params &p, const typename L::Channel &channel,
                           const scanlib_constants<L> &constants, const scanlib_terms<L> &terms,
                           int64_t t) {
    Item y[L::SIZE];
    const Item *a = L::STEPS ? terms.a : constants.a;
    SCANLIB_UNROLL
    for (int i = 0; i < L::SIZE; i++) {
      y[i] = L::Semiring::template product<L::SIZE>(a + i * L::SIZE, x, constants.kept(i));
      if (L::OFFSET) y[i] = y[i] + terms.b[i];
    }
    SCANLIB_UNROLL
    for (int i = 0; i < L::SIZE; i++) {
      x[i] = y[i];
      if (STORE) L::store(p, channel, L::after(t), i, y[i]);
    }
  }
};

/* Steps of one column of a chunk's map, with its bounds. */
template <class L> struct scanlib_prober {
  typedef typename L::Item Item;
  typedef typename L::Real Real;
  Item x[L::SIZE];
  Real peak[L::SIZE], lost[L::SIZE];
  bool with_offset;
  SCANLIB_METHOD void start(int column) {
    with_offset = L::OFFSET && (!L::Semiring::LINEAR || column == L::SIZE);
    SCANLIB_UNROLL
    for (int i = 0; i < L::SIZE; i++) {
      x[i] = i == column ? L::Semiring::unit() : L::Semiring::zero();
      peak[i] = lost[i] = Real(0);
    }
  }
  SCANLIB_METHOD void step(const Params &, const typename L::Channel &,
                           const scanlib_constants<L> &constants, const scanlib_terms<L> &terms,
                           int64_t) {
    Item y[L::SIZE];
    Real error[L::SIZE];
    const Item *a = L::STEPS ? terms.a : constants.a;
    SCANLIB_UNROLL
    for (int i = 0; i < L::SIZE; i++) {
      const Item b = L::OFFSET && with_offset ? terms.b[i] : Item(0);
      y[i] = L::Semiring::template product<L::SIZE>(a + i * L::SIZE, x, constants.kept(i)) + b;
      error[i] = L::Semiring::template watch<L::SIZE>(a + i * L::SIZE, x, lost, constants.kept(i),
                                                      b, y[i], peak[i]);
    }
    SCANLIB_UNROLL
    for (int i = 0; i < L::SIZE; i++) {
      x[i] = y[i];
      lost[i] = error[i];
    }
  }
};

/* Take the steps from `i` to `end`, with AHEAD of them read before they are needed. */
template <class L, class Job>
SCANLIB_DEVICE void scanlib_take_steps(const Params &p, const typename L::Channel &channel,
                                       const scanlib_constants<L> &constants, int64_t i,
                                       int64_t end, Job &job) {
  enum { AHEAD = L::AHEAD ? L::AHEAD : 1 };
  scanlib_terms<L> now[AHEAD], coming[AHEAD];
  if (L::AHEAD && i + AHEAD <= end) {
    SCANLIB_UNROLL
    for (int k = 0; k < AHEAD; k++) now[k].fetch(p, channel, L::row(p.steps, i + k));
  }
  for (; L::AHEAD && i + AHEAD <= end; i += AHEAD) {
    if (i + 2 * AHEAD <= end) {
      SCANLIB_UNROLL
      for (int k = 0; k < AHEAD; k++)
        coming[k].fetch(p, channel, L::row(p.steps, i + AHEAD + k));
    }
    SCANLIB_UNROLL
    for (int k = 0; k < AHEAD; k++)
      job.step(p, channel, constants, now[k], L::row(p.steps, i + k));
    SCANLIB_UNROLL
    for (int k = 0; k < AHEAD; k++) now[k] = coming[k];
  }
  for (; i < end; i++) {
    now[0].fetch(p, channel, L::row(p.steps, i));
    job.step(p, channel, constants, now[0], L::row(p.steps, i));
  }
}

/* Which chunk of which vector a thread, or a group of threads, walks. Where only the last row is
 * wanted, that is the last one. */
template <class L> struct scanlib_stretch {
  int64_t s, chunk, first, last;
  bool active;
  SCANLIB_METHOD scanlib_stretch(const Params &p, int64_t job) {
    s = job % p.channels;
    chunk = L::LAST ? p.chunks - 1 : job / p.channels;
    active = job < p.channels * (L::LAST ? 1 : p.chunks);
    first = chunk * p.chunk;
    last = first + p.chunk < p.steps ? first + p.chunk : p.steps;
    if (!active) s = chunk = first = last = 0;
  }
};

/* Which column of which chunk of which vector. Threads side by side share matrices where these
 * change from step to step. Powers of one matrix are the same for all chunks, and found once. */
template <class L> struct scanlib_probed {
  int64_t s, chunk;
  int column;
  bool active;
  SCANLIB_METHOD scanlib_probed(const Params &p, int64_t job) {
    const int64_t chunks = p.chunks - 1, all = p.channels * chunks;
    active = job < all * L::COLUMNS;
    if (!active) job = 0;
    column = (int)(L::STEPS ? job % L::COLUMNS : job / all);
    const int64_t rest = L::STEPS ? job / L::COLUMNS : job % all;
    s = rest % p.channels;
    chunk = rest / p.channels;
    if (L::ONE_POWER && column < L::SIZE && chunk) active = false;
  }
};

/* Where an item of a column is kept, and of the state before a chunk. */
template <class L>
SCANLIB_DEVICE int64_t scanlib_column_place(const Params &p, int64_t s, int64_t chunk, int column,
                                             int i) {
  if (L::ONE_POWER && column < L::SIZE) chunk = 0;
  return ((chunk * p.channels + s) * L::COLUMNS + column) * L::SIZE + i;
}
template <class L>
SCANLIB_DEVICE int64_t scanlib_state_place(const Params &p, int64_t s, int64_t chunk, int i) {
  return (chunk * p.channels + s) * L::SIZE + i;
}
template <class L>
SCANLIB_DEVICE void scanlib_keep_column(const Params &p, int64_t place, typename L::Item x,
                                        typename L::Real peak, typename L::Real lost) {
  ((typename L::Item *)p.columns)[place] = x;
  ((typename L::Real *)p.bounds)[2 * place] = peak;
  ((typename L::Real *)p.bounds)[2 * place + 1] = lost;
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
  y = L::Semiring::template product<L::SIZE>(a, x, ~uint64_t(0)) + b;
  if (!L::MASKED && L::Semiring::template settled<L::SIZE>(x)) return true; /* so is y */
  return L::Semiring::template trusted<L::SIZE>(peaks, losts, x, peak, lost, y);
}

template <class L> SCANLIB_DEVICE void scanlib_walk_vectors(const Params &p, int64_t index) {
  const scanlib_stretch<L> own(p, index);
  if (!own.active) return;
  typename L::Channel channel;
  scanlib_constants<L> constants;
  scanlib_walker<L, !L::LAST> walker;
  L::locate(p, own.s, channel);
  constants.fetch(p, channel);
  SCANLIB_UNROLL
  for (int i = 0; i < L::SIZE; i++) {
    walker.x[i] = p.chunks > 1 ? ((const typename L::Item *)
                                      p.states)[scanlib_state_place<L>(p, own.s, own.chunk, i)]
                               : L::initial(p, channel, i);
    if (!L::LAST && own.chunk == 0) L::store(p, channel, L::before(p.steps), i, walker.x[i]);
  }
  scanlib_take_steps<L>(p, channel, constants, own.first, own.last, walker);
  SCANLIB_UNROLL
  for (int i = 0; i < L::SIZE; i++)
    if (L::LAST) L::store(p, channel, 0, i, walker.x[i]);
}

template <class L> SCANLIB_DEVICE void scanlib_probe(const Params &p, int64_t index) {
  const scanlib_probed<L> own(p, index);
  if (!own.active) return;
  typename L::Channel channel;
  scanlib_constants<L> constants;
  scanlib_prober<L> prober;
  L::locate(p, own.s, channel);
  constants.fetch(p, channel);
  prober.start(own.column);
  const int64_t first = own.chunk * p.chunk;
  scanlib_take_steps<L>(p, channel, constants, first, first + p.chunk, prober);
  SCANLIB_UNROLL
  for (int i = 0; i < L::SIZE; i++)
    scanlib_keep_column<L>(p, scanlib_column_place<L>(p, own.s, own.chunk, own.column, i),
                           prober.x[i], prober.peak[i], prober.lost[i]);
}

template <class L> SCANLIB_DEVICE void scanlib_carry_vectors(const Params &p, int64_t s) {
  if (s >= p.channels) return;
  typedef typename L::Item Item;
  typename L::Channel channel;
  scanlib_constants<L> constants;
  scanlib_walker<L, false> walker;
  L::locate(p, s, channel);
  constants.fetch(p, channel);
  SCANLIB_UNROLL
  for (int i = 0; i < L::SIZE; i++) walker.x[i] = L::initial(p, channel, i);
  for (int64_t chunk = 0; chunk < p.chunks; chunk++) {
    Item y[L::SIZE];
    bool good = true;
    SCANLIB_UNROLL
    for (int i = 0; i < L::SIZE; i++)
      ((Item *)p.states)[scanlib_state_place<L>(p, s, chunk, i)] = walker.x[i];
    if (chunk == p.chunks - 1) return;
    SCANLIB_UNROLL
    for (int i = 0; i < L::SIZE; i++)
      good = scanlib_apply_chunk<L>(p, s, chunk, i, walker.x, y[i]) && good;
    if (good) {
      SCANLIB_UNROLL
      for (int i = 0; i < L::SIZE; i++) walker.x[i] = y[i];
    } else {
      SCANLIB_NOTE();
      scanlib_take_steps<L>(p, channel, constants, chunk * p.chunk, (chunk + 1) * p.chunk, walker);
    }
  }
}
