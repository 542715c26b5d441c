/* What the kernels need of the machine they run on.
 *
 * The same text is compiled for a GPU, by NVRTC or nvcc, and for a CPU, where blocks and threads are
 * loops: so the tests run the code of the kernels without a GPU. A kernel is a sequence of phases.
 * `SCANLIB_EACH(t)` runs what follows for every thread of the block; between two phases that
 * exchange values stands `SCANLIB_SYNC()`. What a thread keeps from one phase to the next is in
 * `scanlib_each`, what all share is `SCANLIB_SHARED`.
 */
#ifdef __CUDACC_RTC__ /* has no headers */
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
#define NAN __int_as_float(0x7fc00000)
#define INFINITY __int_as_float(0x7f800000)
#else
#include <math.h>
#include <stdint.h>
#include <string.h>
#endif

#ifdef __CUDACC__
#define SCANLIB_DEVICE static __device__ __forceinline__
#define SCANLIB_METHOD __device__ __forceinline__
#define SCANLIB_SHARED __shared__
#define SCANLIB_SYNC() __syncthreads()
#define SCANLIB_EACH(t) for (int t = threadIdx.x, once_ = 1; once_; once_ = 0)
#define SCANLIB_UNROLL _Pragma("unroll")
#define SCANLIB_ROLLED _Pragma("unroll 1")
#define SCANLIB_NOTE() /* for tests */

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
#else
#define SCANLIB_DEVICE static inline
#define SCANLIB_METHOD inline
#define SCANLIB_SHARED static thread_local /* blocks may be threads */
#define SCANLIB_SYNC()
extern "C" {
int64_t scanlib_walked_again = 0;
}
#define SCANLIB_NOTE() __atomic_fetch_add(&scanlib_walked_again, 1, __ATOMIC_RELAXED)
#ifdef SCANLIB_LAST_THREAD_FIRST /* the order of the threads must not matter */
#define SCANLIB_EACH(t) for (int t = SCANLIB_THREADS - 1; t >= 0; t--)
#else
#define SCANLIB_EACH(t) for (int t = 0; t < SCANLIB_THREADS; t++)
#endif
#define SCANLIB_UNROLL
#define SCANLIB_ROLLED

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
#endif

/* Half precision is kept in memory only. */
#ifdef __CUDACC__
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
#else
SCANLIB_DEVICE float scanlib_widened(uint16_t bits) {
  const int exponent = bits >> 10 & 31, digits = bits & 1023;
  float value;
  if (exponent == 31)
    value = digits ? NAN : INFINITY;
  else
    value = ldexpf((float)(digits + (exponent ? 1024 : 0)), (exponent ? exponent : 1) - 25);
  return bits >> 15 ? -value : value;
}
/* To the nearest, of two equally near ones to the even. */
SCANLIB_DEVICE uint16_t scanlib_narrowed(float value) {
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
#endif

struct scanlib_half {
  uint16_t bits;
  SCANLIB_METHOD explicit scanlib_half(float value) : bits(scanlib_narrowed(value)) {}
  SCANLIB_METHOD operator float() const { return scanlib_widened(bits); }
};

/* Read what no kernel writes while this one runs. */
template <class T> SCANLIB_DEVICE T scanlib_fetch(const char *place) {
#ifdef __CUDACC__
  return __ldg((const T *)place);
#else
  return *(const T *)place;
#endif
}
template <> SCANLIB_METHOD scanlib_half scanlib_fetch<scanlib_half>(const char *place) {
  scanlib_half half(0.0f);
  half.bits = scanlib_fetch<uint16_t>(place);
  return half;
}

/* The type of a number's size, and the size. */
template <class T> struct scanlib_real {
  typedef T type;
};
SCANLIB_DEVICE float scanlib_size(float x) { return fabsf(x); }
SCANLIB_DEVICE double scanlib_size(double x) { return fabs(x); }
