/* Walks of several chunks: what comes before each, and what to do where that was wrong. */

/* Compose all steps of one chunk of one tile. */
template <class L> SCANLIB_DEVICE void scanlib_summarize(const Params &p, int64_t block) {
  typedef typename L::Rows Rows;
  typedef typename L::Summary Summary;
  alignas(16) SCANLIB_SHARED char memory[scanlib_shared<L>::LARGE > scanlib_shared<L>::COMPOSED
                                             ? scanlib_shared<L>::LARGE
                                             : scanlib_shared<L>::COMPOSED];
  alignas(16) SCANLIB_SHARED char whole_memory[SCANLIB_LANES * sizeof(Summary)];
  Summary *lane_whole = (Summary *)whole_memory;
  const int lanes = (int)p.lanes, stretch = (SCANLIB_THREADS >> (int)p.lane_bits) * SCANLIB_ITEMS;
  const int64_t tiles = (p.channels + lanes - 1) / lanes, chunk = block / tiles;
  const int64_t first = chunk * p.chunk;
  const int64_t last = first + p.chunk < p.steps ? first + p.chunk : p.steps;
  scanlib_each<scanlib_tile<L> > tile;
  scanlib_each<scanlib_segment<L> > own;
  scanlib_each<Summary> whole; /* of the threads that end a stretch */
  SCANLIB_EACH(t) { tile[t].locate(p, block % tiles, t); }
  for (int64_t begin = first; begin < last; begin += stretch) {
    const int n = last - begin < stretch ? (int)(last - begin) : stretch;
    scanlib_read<L, false>(p, (Rows *)memory, begin, n, tile, own);
    scanlib_compose<L, false>(p, n, (Summary *)memory, lane_whole, tile, own);
    SCANLIB_EACH(t) {
      if (t < lanes) {
        if (begin == first)
          whole[t] = lane_whole[t];
        else
          L::compose(whole[t], lane_whole[t]);
      }
    }
    SCANLIB_SYNC();
  }
  SCANLIB_EACH(t) {
    if (t < lanes && tile[t].active) L::summaries(p)[chunk * p.channels + tile[t].c] = whole[t];
  }
}

/* Find the values before each chunk of channel `c`, one chunk after the other. The alarms say, until
 * `scanlib_leave`, which chunks were walked here: what comes after these is right. */
template <class L> SCANLIB_DEVICE void scanlib_carry(const Params &p, int64_t c) {
  enum { AHEAD = 8 };
  if (c >= p.channels) return;
  typename L::Channel channel;
  typename L::Fixed fixed;
  typename L::State state;
  typename L::Sums sums = {};
  typename L::Summary some[AHEAD];
  L::locate(p, c, channel);
  L::fix(channel, fixed);
  L::start(channel, p.steps, state, false);
  for (int64_t low = 0; low < p.chunks; low += AHEAD) {
    SCANLIB_UNROLL
    for (int k = 0; k < AHEAD; k++)
      if (low + k < p.chunks - 1) some[k] = L::summaries(p)[(low + k) * p.channels + c];
    SCANLIB_UNROLL
    for (int k = 0; k < AHEAD; k++)
      if (low + k < p.chunks) {
        L::states(p)[(low + k) * p.channels + c] = state;
        const typename L::State before = state;
        const bool walked = low + k < p.chunks - 1 && !L::apply(some[k], state);
        L::alarms(p)[(low + k) * p.channels + c] = walked;
        if (walked) {
          state = before;
          for (int64_t i = (low + k) * p.chunk; i < (low + k + 1) * p.chunk; i++) {
            typename L::Rows rows;
            typename L::Results results;
            L::load(channel, L::row(p.steps, i), rows);
            L::step(fixed, rows, state, sums, results);
          }
        }
      }
  }
}

/* Walk from a chunk on, one by one, from the true state before it. */
template <class L>
SCANLIB_DEVICE void scanlib_walk_on(const Params &p, int64_t c, int64_t chunk,
                                    typename L::State state) {
  typename L::Channel channel;
  typename L::Fixed fixed;
  typename L::Sums sums = {};
  const typename L::Sums none = {};
  L::locate(p, c, channel);
  L::fix(channel, fixed);
  scanlib_steps<L, 4>(channel, fixed, p.steps, chunk * p.chunk, p.steps, state, sums);
  L::finish(channel, state);
  L::keep(p, chunk * p.channels + c, sums);
  for (int64_t k = chunk + 1; L::SUMS && k < p.chunks; k++) L::keep(p, k * p.channels + c, none);
}

/* Walk what follows a chunk in which values came near to overflow, once more and one by one: the
 * composition of that chunk may not have seen it. */
template <class L> SCANLIB_DEVICE void scanlib_repair(const Params &p, int64_t c) {
  if (c >= p.channels) return;
  int64_t chunk = 0;
  while (chunk < p.chunks && !L::alarms(p)[chunk * p.channels + c]) chunk++;
  if (chunk < p.chunks) scanlib_walk_on<L>(p, c, chunk, L::states(p)[chunk * p.channels + c]);
}
