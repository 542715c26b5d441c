/* One pass over memory: every block takes one stretch of the steps, composes it, looks back at what
 * comes before it, and walks it; the rows stay where they were read to.
 *
 * Blocks that look back at others are the idea of D. Merrill and M. Garland, "Single-pass parallel
 * prefix scan with decoupled look-back" (NVIDIA technical report NVR-2016-002, 2016). There, a block
 * takes whatever the blocks before it have found so far, and the results of floating-point sums
 * depend on who was first. Here, what is composed with what follows from the place of a stretch alone:
 *
 *   group     as many stretches as `scanlib_group` says
 *   region    as many groups
 *   state     before a stretch: the state that the last stretch of the region before has ended with,
 *             then the groups of its own region before its own, then the stretches of its own group
 *             before it; each as one function, composed in a tree of one form
 *
 * So a stretch publishes its function, the last one of a group that of the group, and each one the
 * state with which it ends. A block waits for stretches with lower numbers only. It takes its own
 * number when it starts, so that these have started.
 *
 * Where a composed function cannot be trusted, the state is that with which the group before, or the
 * stretch before, has ended: it was walked there, step by step. Where values have come near to
 * overflow, composing may have hidden one from those that look back: `scanlib_mend` walks from the
 * first such stretch on.
 */
#ifndef SCANLIB_GROUP
#define SCANLIB_GROUP 64 /* stretches of a group, at most */
#endif
enum { SCANLIB_STRETCH, SCANLIB_WHOLE_GROUP, SCANLIB_END }; /* what is published */

/* The flags begin with the number of the next block, and for each channel how many chunks there are
 * from the first one on that came near to overflow. */
SCANLIB_DEVICE int32_t *scanlib_flags(const Params &p) {
  return (int32_t *)p.at[Params::flags].data;
}
SCANLIB_DEVICE int32_t *scanlib_near(const Params &p, int64_t c) { return scanlib_flags(p) + 1 + c; }
SCANLIB_DEVICE int32_t *scanlib_flag(const Params &p, int what, int64_t place, int64_t c) {
  return scanlib_flags(p) + 1 + p.channels + (what * p.chunks + place) * p.channels + c;
}
SCANLIB_DEVICE void scanlib_reset(const Params &p, int64_t index) {
  if (index < 1 + p.channels + 3 * p.chunks * p.channels) scanlib_flags(p)[index] = 0;
}

template <class L> SCANLIB_DEVICE typename L::State *scanlib_states(const Params &p) {
  return (typename L::State *)p.at[Params::states].data;
}
template <class L>
SCANLIB_DEVICE typename L::Summary &scanlib_published(const Params &p, int what, int64_t place,
                                                      int64_t c) {
  typename L::Summary *first = (typename L::Summary *)p.at[Params::summaries].data;
  return first[(what * p.chunks + place) * p.channels + c];
}
template <class L>
SCANLIB_DEVICE void scanlib_publish(const Params &p, int what, int64_t place, int64_t c,
                                    const typename L::Summary &value) {
  SCANLIB_SHAKE();
  scanlib_published<L>(p, what, place, c) = value;
  scanlib_raise(scanlib_flag(p, what, place, c));
}
template <class L>
SCANLIB_DEVICE void scanlib_await(const Params &p, int what, int64_t place, int64_t c) {
  const int32_t *flag = scanlib_flag(p, what, place, c);
  SCANLIB_SHAKE();
  while (!scanlib_is_raised(flag)) SCANLIB_REST();
}
template <class L>
SCANLIB_DEVICE typename L::State scanlib_end_of(const Params &p, int64_t chunk, int64_t c) {
  scanlib_await<L>(p, SCANLIB_END, chunk, c);
  return scanlib_states<L>(p)[chunk * p.channels + c];
}

/* So many that half of the threads of a block have one for each lane. */
SCANLIB_DEVICE int scanlib_group(const Params &p) {
  const int most = SCANLIB_THREADS / 2 >> (int)p.lane_bits;
  return most < SCANLIB_GROUP ? most : SCANLIB_GROUP;
}

/* Where a stretch is: how many stretches of its group, and groups of its region, are before it. */
struct scanlib_place {
  int64_t chunk;
  int group, stretches, groups;
  SCANLIB_METHOD scanlib_place(const Params &p, int64_t given)
      : chunk(given), group(scanlib_group(p)), stretches((int)(given % group)),
        groups((int)(given / group % group)) {}
  SCANLIB_METHOD int64_t first() const { return chunk - stretches; } /* of its group */
  SCANLIB_METHOD int64_t region() const { return first() - (int64_t)groups * group; }
};

/* Collect what is before a stretch: the first half of the threads its group, the others the groups
 * of its region; each half composes what it has. */
template <class L>
SCANLIB_DEVICE void scanlib_collect(scanlib_block<L> &b, const scanlib_place &place) {
  enum { HALF = SCANLIB_THREADS / 2 };
  typename L::Summary *found = b.shared.composed();
  SCANLIB_EACH(t) {
    const bool of_groups = t >= HALF;
    const int slot = (t % HALF) >> b.bits, count = of_groups ? place.groups : place.stretches;
    if (slot < count && b.own[t].active) {
      const int what = of_groups ? SCANLIB_WHOLE_GROUP : SCANLIB_STRETCH;
      const int64_t first = of_groups ? place.region() / place.group : place.first();
      scanlib_await<L>(b.p, what, first + slot, b.own[t].c);
      found[t] = scanlib_published<L>(b.p, what, first + slot, b.own[t].c);
    }
  }
  SCANLIB_SYNC();
  for (int half = 1; half < place.group; half *= 2) {
    SCANLIB_EACH(t) {
      const int slot = (t % HALF) >> b.bits, count = t >= HALF ? place.groups : place.stretches;
      if (slot % (2 * half) == 0 && slot + half < count)
        L::compose(found[t], found[t + (half << b.bits)]);
    }
    SCANLIB_SYNC();
  }
}

/* Find the state before a stretch, and publish what its group does. */
template <class L>
SCANLIB_DEVICE void scanlib_look(scanlib_block<L> &b, const scanlib_place &place) {
  const typename L::Summary *before = b.shared.composed(), *groups = before + SCANLIB_THREADS / 2;
  SCANLIB_EACH(t) {
    if (b.leads(t))
      scanlib_publish<L>(b.p, SCANLIB_STRETCH, place.chunk, b.own[t].c, b.shared.whole()[t]);
  }
  scanlib_collect(b, place);
  SCANLIB_EACH(t) {
    if (b.leads(t)) {
      const int64_t c = b.own[t].c;
      if (place.stretches == place.group - 1) {
        typename L::Summary all = before[t];
        L::compose(all, b.shared.whole()[t]);
        scanlib_publish<L>(b.p, SCANLIB_WHOLE_GROUP, place.chunk / place.group, c, all);
      }
      typename L::State &state = b.shared.current()[t];
      if (place.region()) state = scanlib_end_of<L>(b.p, place.region() - 1, c);
      if (place.groups && !L::apply(groups[t], state))
        state = scanlib_end_of<L>(b.p, place.first() - 1, c);
      if (place.stretches && !L::apply(before[t], state))
        state = scanlib_end_of<L>(b.p, place.chunk - 1, c);
    }
  }
  SCANLIB_SYNC();
}

template <class L, bool WHOLE>
SCANLIB_DEVICE void scanlib_one_stretch(scanlib_block<L> &b, int64_t chunk, int n) {
  const int64_t begin = chunk * b.p.chunk;
  b.template read<WHOLE>(begin, n);
  b.template compose<WHOLE>(n);
  scanlib_look(b, scanlib_place(b.p, chunk));
  b.template walk<WHOLE>(begin, n);
  SCANLIB_EACH(t) {
    if (b.leads(t)) {
      const int64_t c = b.own[t].c;
      SCANLIB_SHAKE();
      scanlib_states<L>(b.p)[chunk * b.p.channels + c] = b.shared.current()[t];
      scanlib_raise(scanlib_flag(b.p, SCANLIB_END, chunk, c));
      if (b.shared.alarm[t]) scanlib_at_least(scanlib_near(b.p, c), (int32_t)(b.p.chunks - chunk));
    }
  }
  b.template store<WHOLE>(begin, n);
}

template <class L> SCANLIB_DEVICE void scanlib_look_back(const Params &p) {
  SCANLIB_SHARED scanlib_shared<L> shared;
  SCANLIB_SHARED int32_t ticket;
  SCANLIB_EACH(t) {
    if (t == 0) ticket = scanlib_ticket(scanlib_flags(p));
  }
  SCANLIB_SYNC();
  SCANLIB_SHAKE();
  scanlib_block<L> block(p, shared);
  const int tiles = (int)((p.channels + p.lanes - 1) >> block.bits), chunk = ticket / tiles;
  const int64_t left = p.steps - chunk * p.chunk;
  block.enter(ticket - chunk * tiles, chunk == 0);
  if (left >= p.chunk)
    scanlib_one_stretch<L, true>(block, chunk, (int)p.chunk);
  else
    scanlib_one_stretch<L, false>(block, chunk, (int)left);
  block.leave(chunk);
}

/* Walk a channel, one by one, from its first stretch on that came near to overflow. */
template <class L> SCANLIB_DEVICE void scanlib_mend(const Params &p, int64_t c) {
  if (c >= p.channels || !*scanlib_near(p, c)) return;
  const int64_t chunk = p.chunks - *scanlib_near(p, c);
  scanlib_channel channel;
  typename L::Fixed fixed;
  typename L::State state;
  typename L::Sums sums = {};
  const typename L::Sums none = {};
  scanlib_locate(p, c, channel);
  L::fix(p, channel, fixed);
  L::start(channel, state, false);
  if (chunk) state = scanlib_states<L>(p)[(chunk - 1) * p.channels + c];
  scanlib_steps<L, 4>(channel, fixed, chunk * p.chunk, p.steps, state, sums);
  L::finish(channel, state, p.steps);
  L::keep(channel, chunk, sums);
  for (int64_t k = chunk + 1; L::SUMS && k < p.chunks; k++) L::keep(channel, k, none);
}
