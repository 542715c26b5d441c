"""C++ templates that scan one block of steps of one channel.

Each takes the elements of `n` steps in contiguous arrays and the place `h` of the new values; the
state before the block is ``h[-1]``, or ``h[n]`` where `BACK` says that the loop walks backwards;
arrays are in the order of memory in both cases. The result is whether the new values can be
trusted: composing several steps could lose what one step after the other keeps, or keep what it
loses, where a value comes near to overflow or is not finite, or where products of coefficients may
leave the range of their dtype. The block is then run step by step.

Steps are composed in vectors (see `lanes`); in double precision with a coefficient for each step
and registers of four numbers, four at a time without vectors: only one multiplication and one
addition of a group of steps wait for the state before.
"""

from scanlib.backends.c.affine_kernels import AFFINE_KERNELS
from scanlib.backends.c.extreme_kernels import EXTREME_KERNELS
from scanlib.backends.c.lanes import LANES

_BOUNDS = r"""
#ifndef SCANLIB_KERNELS
#define SCANLIB_KERNELS
template <class T> struct scanlib_bounds;
template <> struct scanlib_bounds<npy_float64> {
  typedef npy_int64 word;
  static word all_but_sign() { return 0x7fffffffffffffff; }
  static npy_float64 low() { return 0x1p-120; }
  static npy_float64 high() { return 0x1p120; }
  static npy_float64 moderate() { return 0x1p800; }
  static npy_float64 large() { return 0x1p1000; }
};
template <> struct scanlib_bounds<npy_float32> {
  typedef npy_int32 word;
  static word all_but_sign() { return 0x7fffffff; }
  static npy_float32 low() { return 0x1p-15f; }
  static npy_float32 high() { return 0x1p15f; }
  static npy_float32 moderate() { return 0x1p100f; }
  static npy_float32 large() { return 0x1p120f; }
};

template <class T> static inline T scanlib_abs(T value) { return value < 0 ? -value : value; }

/* Whether products of a coefficient may leave the range of its dtype, zero aside. */
template <class T> static inline int scanlib_extreme(T a) {
  const T size = scanlib_abs(a);
  return !(((size >= scanlib_bounds<T>::low()) & (size <= scanlib_bounds<T>::high())) | (a == 0));
}

/* Whether a value is so far from overflow that no step from it overflows. */
template <class T> static inline int scanlib_moderate(T value) {
  return scanlib_abs(value) <= scanlib_bounds<T>::moderate();
}

/* The bits of a number without its sign: they order like the numbers, infinities and NaN come last.
 * A difference of two such words is negative where the first is smaller, and the signs of many
 * differences are collected by |. */
template <class T> static inline typename scanlib_bounds<T>::word scanlib_bits(T value) {
  typename scanlib_bounds<T>::word bits;
  memcpy(&bits, &value, sizeof bits);
  return bits & scanlib_bounds<T>::all_but_sign();
}
/* Negative where products of a coefficient may leave the range of its dtype; zero may not. */
template <class T, class W> static inline W scanlib_outside(W bits) {
  typedef typename scanlib_bounds<T>::word word;
  const word low = scanlib_bits(scanlib_bounds<T>::low());
  const word high = scanlib_bits(scanlib_bounds<T>::high());
  return ((bits - low) & ~(bits - 1)) | (high - bits);
}
/* Negative where a value is above a limit, or no number. */
template <class T, class W> static inline W scanlib_above(W bits, T limit) {
  return scanlib_bits(limit) - bits;
}

template <class T> static int scanlib_some_extreme(const T *a, npy_intp n) {
  typename scanlib_bounds<T>::word found = 0;
#pragma omp simd reduction(| : found)
  for (npy_intp j = 0; j < n; j++) found |= scanlib_outside<T>(scanlib_bits(a[j]));
  return found < 0;
}

template <class T> static int scanlib_some_above(const T *h, npy_intp n, T limit) {
  typename scanlib_bounds<T>::word found = 0;
#pragma omp simd reduction(| : found)
  for (npy_intp j = 0; j < n; j++) found |= scanlib_above(scanlib_bits(h[j]), limit);
  return found < 0;
}
template <class T> static int scanlib_all_moderate(const T *h, npy_intp n) {
  return !scanlib_some_above(h, n, scanlib_bounds<T>::moderate());
}
template <class T> static int scanlib_some_large(const T *a, npy_intp n) {
  return scanlib_some_above(a, n, scanlib_bounds<T>::large());
}

template <class T> static int scanlib_some_nan(const T *, npy_intp) { return 0; }
static inline int scanlib_some_nan(const npy_float64 *b, npy_intp n) {
  return scanlib_some_above(b, n, (npy_float64)NPY_INFINITYF);
}
static inline int scanlib_some_nan(const npy_float32 *b, npy_intp n) {
  return scanlib_some_above(b, n, NPY_INFINITYF);
}

/* The coefficients of an affine recurrence: one for each step, or the same for all. */
template <class T> struct scanlib_each {
  const T *values;
  T operator[](npy_intp j) const { return values[j]; }
  int extreme(npy_intp n) const { return scanlib_some_extreme(values, n); }
};
template <class T> struct scanlib_same {
  T value;
  T operator[](npy_intp) const { return value; }
  int extreme(npy_intp) const { return scanlib_extreme(value); }
};

"""

KERNELS = f"{_BOUNDS}{LANES}{AFFINE_KERNELS}{EXTREME_KERNELS}#endif\n"
