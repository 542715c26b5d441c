/* What the kernels need of the machine they run on.
 *
 * The same text is compiled for a GPU by NVRTC, and for a CPU by the tests, whose header
 * SCANLIB_HOST makes loops of blocks and threads. A kernel is a sequence of phases.
 * `SCANLIB_EACH(t)` runs what follows for every thread of the block; between two phases that
 * exchange values stands `SCANLIB_SYNC()`. What a thread keeps from one phase to the next is in
 * `scanlib_each`, what all share is `SCANLIB_SHARED`.
 */
#ifdef SCANLIB_HOST
#include SCANLIB_HOST
#else
typedef signed char int8_t; /* NVRTC has no headers */
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define NAN __int_as_float(0x7fc00000)
#define INFINITY __int_as_float(0x7f800000)
#define SCANLIB_DEVICE static __device__ __forceinline__
#define SCANLIB_METHOD __device__ __forceinline__
#define SCANLIB_SHARED __shared__
#define SCANLIB_SYNC() __syncthreads()
#define SCANLIB_EACH(t) for (int t = threadIdx.x, once_ = 1; once_; once_ = 0)
#define SCANLIB_UNROLL _Pragma("unroll")
#define SCANLIB_ROLLED _Pragma("unroll 1")
#define SCANLIB_NOTE()  /* for tests */
#define SCANLIB_SHAKE() /* for tests */

template <class T> struct scanlib_each {
  T value;
  __device__ __forceinline__ T &operator[](int) { return value; }
};

/* `call` is run by every thread: `index` is its number in the whole grid. */
#define SCANLIB_FLAT_KERNEL(name, call)                                                            \
  extern "C" __global__ void __launch_bounds__(256) name(const __grid_constant__ Params p) {       \
    const int64_t index = (int64_t)blockIdx.x * blockDim.x + threadIdx.x;                        \
    call;                                                                                          \
  }
/* `call` is run by blocks whose threads work together: `block` is the number of the block. */
#define SCANLIB_BLOCK_KERNEL(name, call)                                                           \
  extern "C" __global__ void __launch_bounds__(SCANLIB_THREADS)                                    \
      name(const __grid_constant__ Params p) {                                                     \
    const int64_t block = blockIdx.x;                                                             \
    call;                                                                                          \
  }
/* The same for blocks that wait for each other, with so many threads of a multiprocessor. */
#define SCANLIB_CONCURRENT_KERNEL(name, threads, call)                                             \
  extern "C" __global__ void __launch_bounds__(SCANLIB_THREADS, threads / SCANLIB_THREADS)         \
      name(const __grid_constant__ Params given) {                                                 \
    call;                                                                                          \
  }

/* Half precision is kept in memory only. */
SCANLIB_DEVICE float scanlib_widened(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}
SCANLIB_DEVICE uint16_t scanlib_narrowed(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
/* Read what no kernel writes while this one runs. */
template <class T> SCANLIB_DEVICE T scanlib_fetch(const char *place) {
  return __ldg((const T *)place);
}

/* Flags between blocks. */
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
#endif

struct scanlib_half {
  uint16_t bits;
  SCANLIB_METHOD explicit scanlib_half(float value) : bits(scanlib_narrowed(value)) {}
  SCANLIB_METHOD operator float() const { return scanlib_widened(bits); }
};
template <> SCANLIB_METHOD scanlib_half scanlib_fetch<scanlib_half>(const char *place) {
  scanlib_half half(0.0f);
  half.bits = scanlib_fetch<uint16_t>(place);
  return half;
}
