/* Complex numbers, as pairs: what the schedules and semirings ask of them. */
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
  SCANLIB_METHOD friend bool operator==(given x, given y) {
    return x.real == y.real && x.imag == y.imag;
  }
  SCANLIB_METHOD friend bool operator!=(given x, given y) { return !(x == y); }
  SCANLIB_METHOD scanlib_complex &operator+=(given y) { return *this = *this + y; }
};
template <class T>
SCANLIB_DEVICE scanlib_complex<T> scanlib_times_plus(const scanlib_complex<T> &x,
                                                     const scanlib_complex<T> &y,
                                                     const scanlib_complex<T> &z) {
  return scanlib_complex<T>(fma(x.real, y.real, fma(-x.imag, y.imag, z.real)),
                            fma(x.real, y.imag, fma(x.imag, y.real, z.imag)));
}
template <class T> SCANLIB_DEVICE T scanlib_size(const scanlib_complex<T> &z) {
  return fabs(z.real) + fabs(z.imag);
}
template <> SCANLIB_METHOD scanlib_complex<float> scanlib_fetch(const char *place) {
  return scanlib_complex<float>(scanlib_fetch<float>(place), scanlib_fetch<float>(place + 4));
}
template <> SCANLIB_METHOD scanlib_complex<double> scanlib_fetch(const char *place) {
  return scanlib_complex<double>(scanlib_fetch<double>(place), scanlib_fetch<double>(place + 8));
}
template <class T> struct scanlib_real<scanlib_complex<T> > {
  typedef T type;
};
