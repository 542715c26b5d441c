/* Products of a row of a matrix and a vector, in four semirings.
 *
 * A semiring `S` has
 *
 *   zero(), unit()           the items of the identity matrix
 *   product<N>(a, x, kept)   the row `a` times the vector `x`; bit j of `kept` says whether item j
 *                            is there
 *   watch<N>(...)            what one step did to the bounds below, for one item of a vector
 *   trusted<N>(...)          whether the value of several steps at once is what single steps give
 *   settled<N>(x)            whether all further values are NaN, since `x` holds one
 *
 * Several steps are one map: its columns are what the steps make of the identity's columns, and, in
 * the real semiring, of zero with the offsets. Composed items may leave the range of their type where
 * single steps do not, so each has two bounds: of the largest number on the way (`peak`), and of the
 * error from underflow (`lost`). From both follow bounds for the true state. What is not trusted is
 * thrown away, and the steps are done one after the other.
 */
/* Where numbers of a type are safe: above `least` they keep their digits, below `large` no product
 * of a few of them overflows, and `digit` is the relative error of one rounding. */
template <class T> struct scanlib_range;
template <> struct scanlib_range<float> {
  SCANLIB_METHOD static float least() { return 0x1p-126f; } /* smaller numbers lose digits */
  SCANLIB_METHOD static float large() { return 0x1p100f; }
  SCANLIB_METHOD static float digit() { return 0x1p-24f; }
};
template <> struct scanlib_range<double> {
  SCANLIB_METHOD static double least() { return 0x1p-1022; }
  SCANLIB_METHOD static double large() { return 0x1p900; }
  SCANLIB_METHOD static double digit() { return 0x1p-53; }
};
/* A product and a sum, rounded once. */
SCANLIB_DEVICE float scanlib_times_plus(float x, float y, float z) { return fmaf(x, y, z); }
SCANLIB_DEVICE double scanlib_times_plus(double x, double y, double z) { return fma(x, y, z); }

template <class T> struct scanlib_real_products {
  typedef typename scanlib_real<T>::type R;
  typedef scanlib_range<R> range;
  enum { LINEAR = 1 };
  SCANLIB_METHOD static T zero() { return T(0); }
  SCANLIB_METHOD static T unit() { return T(1); }
  template <int N> SCANLIB_METHOD static T product(const T *a, const T *x, uint64_t kept) {
    T total = T(0);
    SCANLIB_UNROLL
    for (int j = 0; j < N; j++)
      if (kept >> j & 1) total = scanlib_times_plus(a[j], x[j], total);
    return total;
  }
  /* `carried` are the errors of `x`; the new one is returned. */
  template <int N>
  SCANLIB_METHOD static R watch(const T *a, const T *x, const R *carried, uint64_t kept, T offset,
                                T, R &peak) {
    R scale = R(0), lost = R(0);
    SCANLIB_UNROLL
    for (int j = 0; j < N; j++)
      if (kept >> j & 1) {
        scale = scanlib_times_plus(scanlib_size(a[j]), scanlib_size(x[j]), scale);
        lost = scanlib_times_plus(scanlib_size(a[j]), carried[j], lost);
      }
    /* Only sums of tiny terms can have lost what shows. */
    if (scale < range::least() / range::digit()) {
      bool under = false;
      SCANLIB_UNROLL
      for (int j = 0; j < N; j++)
        under = under || ((kept >> j & 1) && a[j] != T(0) && x[j] != T(0) &&
                          scanlib_size(a[j]) * scanlib_size(x[j]) < range::least());
      if (under) lost += N * range::least();
    }
    scale += scanlib_size(offset);
    if (scale > peak) peak = scale;
    if (!(scale < range::large())) peak = R(INFINITY); /* NaN as well */
    return lost;
  }
  /* `peaks`, `losts`: of an item of each column; `peak`, `lost`: of the column that starts at zero. */
  template <int N>
  SCANLIB_METHOD static bool trusted(const R *peaks, const R *losts, const T *x, R peak, R lost,
                                     T result) {
    SCANLIB_UNROLL
    for (int j = 0; j < N; j++) {
      peak = scanlib_times_plus(peaks[j], scanlib_size(x[j]), peak);
      lost = scanlib_times_plus(losts[j], scanlib_size(x[j]), lost);
    }
    return peak < range::large() && lost <= range::digit() * scanlib_size(result);
  }
  template <int N> SCANLIB_METHOD static bool settled(const T *x) {
    bool any = false;
    SCANLIB_UNROLL
    for (int j = 0; j < N; j++) any = any || x[j] != x[j];
    return any;
  }
};

/* What the other semirings share: offsets are factors there, so a map has no constant. A value is
 * ordinary if it is zero, an infinity, or far from overflow: then no sum on the way was NaN. */
template <class T, class S> struct scanlib_ordered_products {
  typedef T R;
  typedef scanlib_range<R> range;
  enum { LINEAR = 0 };
  SCANLIB_METHOD static T unit() { return T(0); }
  SCANLIB_METHOD static bool ordinary(T x) { return x == S::zero() || fabs(x) < range::large(); }
  template <int N>
  SCANLIB_METHOD static R watch(const T *a, const T *, const R *, uint64_t, T offset, T value,
                                R &peak) {
    bool good = ordinary(offset) && ordinary(value);
    SCANLIB_UNROLL
    for (int j = 0; j < N; j++) good = good && ordinary(a[j]);
    if (!good) peak = R(INFINITY);
    return R(0);
  }
  template <int N>
  SCANLIB_METHOD static bool trusted(const R *peaks, const R *, const T *x, R, R, T result) {
    bool good = ordinary(result);
    SCANLIB_UNROLL
    for (int j = 0; j < N; j++) good = good && ordinary(x[j]) && peaks[j] < range::large();
    return good;
  }
  template <int N> SCANLIB_METHOD static bool settled(const T *x) {
    return scanlib_real_products<T>::template settled<N>(x);
  }
};

template <class T> SCANLIB_DEVICE T scanlib_larger(T x, T y) { return y > x || y != y ? y : x; }
template <class T> SCANLIB_DEVICE T scanlib_smaller(T x, T y) { return y < x || y != y ? y : x; }

template <class T>
struct scanlib_max_products : scanlib_ordered_products<T, scanlib_max_products<T> > {
  SCANLIB_METHOD static T zero() { return T(-INFINITY); }
  template <int N> SCANLIB_METHOD static T product(const T *a, const T *x, uint64_t) {
    T most = a[0] + x[0];
    SCANLIB_UNROLL
    for (int j = 1; j < N; j++) most = scanlib_larger(most, a[j] + x[j]);
    return most;
  }
};

template <class T>
struct scanlib_min_products : scanlib_ordered_products<T, scanlib_min_products<T> > {
  SCANLIB_METHOD static T zero() { return T(INFINITY); }
  template <int N> SCANLIB_METHOD static T product(const T *a, const T *x, uint64_t) {
    T least = a[0] + x[0];
    SCANLIB_UNROLL
    for (int j = 1; j < N; j++) least = scanlib_smaller(least, a[j] + x[j]);
    return least;
  }
};

/* Shifted by the largest term, so that no exponential overflows; see `LinearWriter.functions`. */
template <class T>
struct scanlib_log_products : scanlib_ordered_products<T, scanlib_log_products<T> > {
  SCANLIB_METHOD static T zero() { return T(-INFINITY); }
  template <int N> SCANLIB_METHOD static T product(const T *a, const T *x, uint64_t kept) {
    const T most = scanlib_max_products<T>::template product<N>(a, x, kept);
    const T shift = most - most == T(0) ? most : T(0);
    T total = T(0);
    SCANLIB_UNROLL
    for (int j = 0; j < N; j++) total += scanlib_exp(a[j] + x[j] - shift);
    return shift + scanlib_log(total);
  }
};
