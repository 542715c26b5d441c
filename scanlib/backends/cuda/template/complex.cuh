/* Complex numbers, as pairs: what the schedules ask of them. */
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
  SCANLIB_METHOD scanlib_complex &operator+=(given y) { return *this = *this + y; }
};
template <> SCANLIB_METHOD scanlib_complex<float> scanlib_fetch(const char *place) {
  return scanlib_complex<float>(scanlib_fetch<float>(place), scanlib_fetch<float>(place + 4));
}
template <> SCANLIB_METHOD scanlib_complex<double> scanlib_fetch(const char *place) {
  return scanlib_complex<double>(scanlib_fetch<double>(place), scanlib_fetch<double>(place + 8));
}
