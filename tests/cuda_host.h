/* What stands in for a GPU in the tests: blocks and threads are loops of the CPU.
 *
 * `scanlib/backends/cuda/template/device.cuh` includes it in place of its own definitions.
 */
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

/* GCC 12.2 drops stores at -O1 to what functions read through pointers: products of rows of six complex
 * numbers were wrong, and right at -O0, at -O2, under its sanitizers, and without this pass. */
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("no-ipa-modref")
#endif

#define SCANLIB_DEVICE static inline
#define SCANLIB_METHOD inline
#define SCANLIB_SHARED static thread_local /* blocks may be threads */
#define SCANLIB_SYNC()
#define SCANLIB_UNROLL
#define SCANLIB_ROLLED
extern "C" {
int64_t scanlib_walked_again = 0;
int32_t scanlib_seed = 1, scanlib_waits = 0; /* 0 for no sleeps; how often one waited */
}
#define SCANLIB_NOTE() __atomic_fetch_add(&scanlib_walked_again, 1, __ATOMIC_RELAXED)
#ifdef SCANLIB_LAST_THREAD_FIRST /* the order of the threads must not matter */
#define SCANLIB_EACH(t) for (int t = SCANLIB_THREADS - 1; t >= 0; t--)
#else
#define SCANLIB_EACH(t) for (int t = 0; t < SCANLIB_THREADS; t++)
#endif

template <class T> struct scanlib_each {
  T value[SCANLIB_THREADS];
  T &operator[](int t) { return value[t]; }
};

#define SCANLIB_FLAT_KERNEL(name, call)                                           \
  extern "C" void name(int64_t blocks, int64_t threads, const Params *given) {   \
    const Params &p = *given;                                                      \
    for (int64_t index = 0; index < blocks * threads; index++) call;              \
  }
#define SCANLIB_BLOCK_KERNEL(name, call)                                           \
  extern "C" void name(int64_t blocks, int64_t, const Params *given) {           \
    const Params &p = *given;                                                      \
    for (int64_t block = 0; block < blocks; block++) call;                        \
  }

static inline float scanlib_widened(uint16_t bits) {
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  float value;
  if (exponent == 31)
    value = digits ? NAN : INFINITY;
  else
    value = ldexpf((float)(digits + (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
  return bits >> 15 ? -value : value;
}
/* To the nearest, of two equally near ones to the even. */
static inline uint16_t scanlib_narrowed(float value) {
  const uint16_t sign = signbit(value) ? 0x8000 : 0;
  if (value != value) return sign | 0x7e00;
  const float size = fabsf(value);
  if (size == 0) return sign;
  if (size >= 65520.0f) return sign | 0x7c00;
  int exponent;
  frexpf(size, &exponent);
  const int last = exponent - 11 < -24 ? -24 : exponent - 11; /* the exponent of the last digit */
  const int digits = (int)nearbyintf(ldexpf(size, -last));
  return sign | (uint16_t)(digits + ((last + 24) << 10));
}
template <class T> static inline T scanlib_fetch(const char *place) { return *(const T *)place; }

/* Blocks that wait for each other are threads, of which a few run at a time; sleeps change who is
 * first. */
#define SCANLIB_AT_ONCE 6
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
template <class P> struct scanlib_grid {
  void (*block)(const P &);
  const P *p;
  int64_t left;
  static void *resident(void *argument) {
    scanlib_grid &grid = *(scanlib_grid *)argument;
    while (__atomic_fetch_sub(&grid.left, 1, __ATOMIC_RELAXED) > 0) grid.block(*grid.p);
    return NULL;
  }
};
template <class P>
static void scanlib_run_blocks(void (*block)(const P &), int64_t blocks, const P *p) {
  pthread_t threads[SCANLIB_AT_ONCE];
  scanlib_grid<P> grid = {block, p, blocks};
  int started = 0;
  while (started < SCANLIB_AT_ONCE && started < blocks &&
         !pthread_create(&threads[started], NULL, scanlib_grid<P>::resident, &grid))
    started++;
  if (!started) scanlib_grid<P>::resident(&grid);
  while (started) pthread_join(threads[--started], NULL);
}
#define SCANLIB_CONCURRENT_KERNEL(name, threads, call)                                             \
  static void name##_block(const Params &given) { call; }                                          \
  extern "C" void name(int64_t blocks, int64_t, const Params *p) {                               \
    scanlib_run_blocks(name##_block, blocks, p);                                                   \
  }
