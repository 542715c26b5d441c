/* Complex numbers, as pairs; with the arithmetic that PyTensor's scalar code asks of them. */
template <class T> struct scanlib_complex {
  T real, imag;
  scanlib_complex() = default;
  SCANLIB_METHOD scanlib_complex(T r, T i = T(0)) : real(r), imag(i) {}
  template <class U>
  SCANLIB_METHOD explicit scanlib_complex(const scanlib_complex<U> &z)
      : real(T(z.real)), imag(T(z.imag)) {}
  typedef const scanlib_complex &given;
  SCANLIB_METHOD friend scanlib_complex operator+(given x, given y) {
    return scanlib_complex(x.real + y.real, x.imag + y.imag);
  }
  SCANLIB_METHOD friend scanlib_complex operator-(given x, given y) {
    return scanlib_complex(x.real - y.real, x.imag - y.imag);
  }
  SCANLIB_METHOD friend scanlib_complex operator-(given x) {
    return scanlib_complex(-x.real, -x.imag);
  }
  SCANLIB_METHOD friend scanlib_complex operator*(given x, given y) {
    return scanlib_complex(x.real * y.real - x.imag * y.imag, x.real * y.imag + x.imag * y.real);
  }
  /* The larger part of the divisor is divided by first, so that its square does not overflow. */
  SCANLIB_METHOD friend scanlib_complex operator/(given x, given y) {
    if (fabs(y.real) >= fabs(y.imag)) {
      const T ratio = y.imag / y.real, size = y.real + y.imag * ratio;
      return scanlib_complex((x.real + x.imag * ratio) / size, (x.imag - x.real * ratio) / size);
    }
    const T ratio = y.real / y.imag, size = y.real * ratio + y.imag;
    return scanlib_complex((x.real * ratio + x.imag) / size, (x.imag * ratio - x.real) / size);
  }
  SCANLIB_METHOD friend bool operator==(given x, given y) {
    return x.real == y.real && x.imag == y.imag;
  }
  SCANLIB_METHOD friend bool operator!=(given x, given y) { return !(x == y); }
  SCANLIB_METHOD scanlib_complex &operator+=(given y) { return *this = *this + y; }
};
/* The names by which PyTensor's code reads the parts. */
template <class T> SCANLIB_METHOD T get_real(const scanlib_complex<T> &z) { return z.real; }
template <class T> SCANLIB_METHOD T get_imag(const scanlib_complex<T> &z) { return z.imag; }
typedef scanlib_complex<float> pytensor_complex64;
typedef scanlib_complex<double> pytensor_complex128;

SCANLIB_DEVICE float scanlib_size(const pytensor_complex64 &z) { return fabsf(z.real) + fabsf(z.imag); }
SCANLIB_DEVICE double scanlib_size(const pytensor_complex128 &z) {
  return fabs(z.real) + fabs(z.imag);
}
SCANLIB_DEVICE bool scanlib_is_nan(const pytensor_complex64 &z) {
  return z.real != z.real && z.imag != z.imag;
}
SCANLIB_DEVICE bool scanlib_is_nan(const pytensor_complex128 &z) {
  return z.real != z.real && z.imag != z.imag;
}
template <> SCANLIB_METHOD pytensor_complex64 scanlib_fetch(const char *place) {
  return pytensor_complex64(scanlib_fetch<float>(place), scanlib_fetch<float>(place + 4));
}
template <> SCANLIB_METHOD pytensor_complex128 scanlib_fetch(const char *place) {
  return pytensor_complex128(scanlib_fetch<double>(place), scanlib_fetch<double>(place + 8));
}
template <> struct scanlib_real<pytensor_complex64> {
  typedef float type;
};
template <> struct scanlib_real<pytensor_complex128> {
  typedef double type;
};
