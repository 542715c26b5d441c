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

#ifdef __CUDACC__
SCANLIB_DEVICE void scanlib_raise(int32_t *flag) {
  asm volatile("st.release.gpu.s32 [%0], 1;" ::"l"(flag) : "memory");
}
SCANLIB_DEVICE bool scanlib_is_raised(const int32_t *flag) {
  int32_t value;
  asm volatile("ld.acquire.gpu.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value != 0;
}
SCANLIB_DEVICE int32_t scanlib_ticket(int32_t *next) { return atomicAdd(next, 1); }
SCANLIB_DEVICE void scanlib_at_least(int32_t *most, int32_t value) { atomicMax(most, value); }
#define SCANLIB_REST() __nanosleep(32)
#define SCANLIB_SHAKE() /* for tests */
#define SCANLIB_CONCURRENT_KERNEL(name, threads, call)                                             \
  extern "C" __global__ void __launch_bounds__(SCANLIB_THREADS, threads / SCANLIB_THREADS)         \
      name(const __grid_constant__ Params given) {                                                 \
    call;                                                                                          \
  }
#else
/* On a CPU, blocks are threads, of which a few run at a time; sleeps change who is first. */
#include <pthread.h>
#include <sched.h>
#include <time.h>
#define SCANLIB_AT_ONCE 6
extern "C" {
int32_t scanlib_seed = 1, scanlib_waits = 0; /* for tests: 0 for no sleeps; how often one waited */
}
static inline void scanlib_raise(int32_t *flag) { __atomic_store_n(flag, 1, __ATOMIC_RELEASE); }
static inline bool scanlib_is_raised(const int32_t *flag) {
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE) != 0;
}
static inline int32_t scanlib_ticket(int32_t *next) {
  return __atomic_fetch_add(next, 1, __ATOMIC_RELAXED);
}
static inline void scanlib_at_least(int32_t *most, int32_t value) {
  int32_t now = __atomic_load_n(most, __ATOMIC_RELAXED);
  while (now < value &&
         !__atomic_compare_exchange_n(most, &now, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}
static inline void scanlib_rest() {
  __atomic_fetch_add(&scanlib_waits, 1, __ATOMIC_RELAXED);
  sched_yield();
}
static inline void scanlib_shake() {
  if (!__atomic_load_n(&scanlib_seed, __ATOMIC_RELAXED)) return;
  const uint32_t drawn = __atomic_add_fetch((uint32_t *)&scanlib_seed, 2, __ATOMIC_RELAXED);
  const uint32_t mixed = (drawn * 2654435769u) >> 20;
  const timespec some = {0, (long)(mixed % 64) * 1000};
  if (mixed % 8 == 0) nanosleep(&some, NULL);
}
#define SCANLIB_REST() scanlib_rest()
#define SCANLIB_SHAKE() scanlib_shake()
struct scanlib_grid {
  void (*block)(const Params &);
  const Params *p;
  int64_t left;
};
static void *scanlib_resident(void *argument) {
  scanlib_grid &grid = *(scanlib_grid *)argument;
  while (__atomic_fetch_sub(&grid.left, 1, __ATOMIC_RELAXED) > 0) grid.block(*grid.p);
  return NULL;
}
static void scanlib_run_blocks(void (*block)(const Params &), int64_t blocks, const Params *p) {
  pthread_t threads[SCANLIB_AT_ONCE];
  scanlib_grid grid = {block, p, blocks};
  int started = 0;
  while (started < SCANLIB_AT_ONCE && started < blocks &&
         !pthread_create(&threads[started], NULL, scanlib_resident, &grid))
    started++;
  if (!started) scanlib_resident(&grid);
  while (started) pthread_join(threads[--started], NULL);
}
#define SCANLIB_CONCURRENT_KERNEL(name, threads, call)                                             \
  static void name##_block(const Params &given) { call; }                                          \
  extern "C" void name(int64_t blocks, int64_t, const Params *p) {                               \
    scanlib_run_blocks(name##_block, blocks, p);                                                   \
  }
#endif

/* The flags begin with the number of the next block, and for each channel how many chunks there are
 * from the first one on that came near to overflow. */
template <class L> SCANLIB_DEVICE int32_t *scanlib_near(const Params &p, int64_t c) {
  return L::flags(p) + 1 + c;
}
template <class L>
SCANLIB_DEVICE int32_t *scanlib_flag(const Params &p, int what, int64_t place, int64_t c) {
  return L::flags(p) + 1 + p.channels + (what * p.chunks + place) * p.channels + c;
}
template <class L> SCANLIB_DEVICE void scanlib_reset(const Params &p, int64_t index) {
  if (index < 1 + p.channels + 3 * p.chunks * p.channels) L::flags(p)[index] = 0;
}

template <class L>
SCANLIB_DEVICE typename L::Summary &scanlib_published(const Params &p, int what, int64_t place,
                                                      int64_t c) {
  return L::summaries(p)[(what * p.chunks + place) * p.channels + c];
}
template <class L>
SCANLIB_DEVICE void scanlib_publish(const Params &p, int what, int64_t place, int64_t c,
                                    const typename L::Summary &value) {
  SCANLIB_SHAKE();
  scanlib_published<L>(p, what, place, c) = value;
  scanlib_raise(scanlib_flag<L>(p, what, place, c));
}
template <class L>
SCANLIB_DEVICE void scanlib_await(const Params &p, int what, int64_t place, int64_t c) {
  const int32_t *flag = scanlib_flag<L>(p, what, place, c);
  SCANLIB_SHAKE();
  while (!scanlib_is_raised(flag)) SCANLIB_REST();
}
template <class L>
SCANLIB_DEVICE typename L::State scanlib_end_of(const Params &p, int64_t chunk, int64_t c) {
  scanlib_await<L>(p, SCANLIB_END, chunk, c);
  return L::states(p)[chunk * p.channels + c];
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
SCANLIB_DEVICE void scanlib_collect(const Params &p, const scanlib_place &place, scanlib_own<L> &own,
                                    typename L::Summary *found) {
  enum { HALF = SCANLIB_THREADS / 2 };
  const int bits = (int)p.lane_bits;
  SCANLIB_EACH(t) {
    const bool of_groups = t >= HALF;
    const int slot = (t % HALF) >> bits, count = of_groups ? place.groups : place.stretches;
    if (slot < count && own.tile[t].active) {
      const int what = of_groups ? SCANLIB_WHOLE_GROUP : SCANLIB_STRETCH;
      const int64_t which = of_groups ? place.region() / place.group + slot : place.first() + slot;
      scanlib_await<L>(p, what, which, own.tile[t].c);
      found[t] = scanlib_published<L>(p, what, which, own.tile[t].c);
    }
  }
  SCANLIB_SYNC();
  for (int half = 1; half < place.group; half *= 2) {
    SCANLIB_EACH(t) {
      const int slot = (t % HALF) >> bits, count = t >= HALF ? place.groups : place.stretches;
      if (slot % (2 * half) == 0 && slot + half < count) L::compose(found[t], found[t + (half << bits)]);
    }
    SCANLIB_SYNC();
  }
}

/* Find the state before a stretch, and publish what its group does. */
template <class L>
SCANLIB_DEVICE void scanlib_look(const Params &p, const scanlib_place &place, scanlib_own<L> &own,
                                 scanlib_shared<L> &shared) {
  typedef typename L::Summary Summary;
  const Summary *before = shared.composed(), *groups = before + SCANLIB_THREADS / 2;
  SCANLIB_EACH(t) {
    if (t < (int)p.lanes && own.tile[t].active)
      scanlib_publish<L>(p, SCANLIB_STRETCH, place.chunk, own.tile[t].c, shared.whole()[t]);
  }
  scanlib_collect<L>(p, place, own, shared.composed());
  SCANLIB_EACH(t) {
    if (t < (int)p.lanes && own.tile[t].active) {
      const int64_t c = own.tile[t].c;
      if (place.stretches == place.group - 1) {
        Summary all = before[t];
        L::compose(all, shared.whole()[t]);
        scanlib_publish<L>(p, SCANLIB_WHOLE_GROUP, place.chunk / place.group, c, all);
      }
      typename L::State &state = shared.current()[t];
      if (place.region()) state = scanlib_end_of<L>(p, place.region() - 1, c);
      if (place.groups && !L::apply(groups[t], state))
        state = scanlib_end_of<L>(p, place.first() - 1, c);
      if (place.stretches && !L::apply(before[t], state))
        state = scanlib_end_of<L>(p, place.chunk - 1, c);
    }
  }
  SCANLIB_SYNC();
}

template <class L, bool WHOLE>
SCANLIB_DEVICE void scanlib_one_stretch(const Params &p, int64_t chunk, int n, scanlib_own<L> &own,
                                        scanlib_shared<L> &shared) {
  const int64_t begin = chunk * p.chunk;
  scanlib_read<L, WHOLE>(p, shared.rows(), begin, n, own.tile, own.segment);
  scanlib_compose<L, WHOLE>(p, n, shared.composed(), shared.whole(), own.tile, own.segment);
  scanlib_look<L>(p, scanlib_place(p, chunk), own, shared);
  scanlib_segments<L, WHOLE>(p, begin, n, own, shared);
  SCANLIB_EACH(t) {
    if (t < (int)p.lanes && own.tile[t].active) {
      const int64_t c = own.tile[t].c;
      SCANLIB_SHAKE();
      L::states(p)[chunk * p.channels + c] = shared.current()[t];
      scanlib_raise(scanlib_flag<L>(p, SCANLIB_END, chunk, c));
      if (shared.alarm[t]) scanlib_at_least(scanlib_near<L>(p, c), (int32_t)(p.chunks - chunk));
    }
  }
  scanlib_store<L, WHOLE>(p, begin, n, own, shared);
}

template <class L> SCANLIB_DEVICE void scanlib_look_back(const Params &p) {
  SCANLIB_SHARED scanlib_shared<L> shared;
  SCANLIB_SHARED int32_t ticket;
  scanlib_own<L> own;
  SCANLIB_EACH(t) {
    if (t == 0) ticket = scanlib_ticket(L::flags(p));
  }
  SCANLIB_SYNC();
  SCANLIB_SHAKE();
  const int tiles = (int)((p.channels + p.lanes - 1) >> (int)p.lane_bits), chunk = ticket / tiles;
  const int64_t left = p.steps - chunk * p.chunk;
  SCANLIB_EACH(t) {
    own.tile[t].locate(p, ticket - chunk * tiles, t);
    own.sums[t] = typename L::Sums();
    if (t < (int)p.lanes) {
      shared.redo[t] = shared.alarm[t] = shared.again = 0;
      if (own.tile[t].active)
        L::start(own.tile[t].channel(p), p.steps, shared.current()[t], chunk == 0);
    }
  }
  if (left >= p.chunk)
    scanlib_one_stretch<L, true>(p, chunk, (int)p.chunk, own, shared);
  else
    scanlib_one_stretch<L, false>(p, chunk, (int)left, own, shared);
  scanlib_leave<L>(p, chunk, own, shared);
}

/* Walk a channel from its first stretch on that came near to overflow. */
template <class L> SCANLIB_DEVICE void scanlib_mend(const Params &p, int64_t c) {
  if (c >= p.channels || !*scanlib_near<L>(p, c)) return;
  const int64_t chunk = p.chunks - *scanlib_near<L>(p, c);
  typename L::Channel channel;
  typename L::State state;
  L::locate(p, c, channel);
  L::start(channel, p.steps, state, false);
  if (chunk) state = L::states(p)[(chunk - 1) * p.channels + c];
  scanlib_walk_on<L>(p, c, chunk, state);
}
