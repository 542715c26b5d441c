/* Recurrence families: functions of one state that are closed under composition.
 *
 * An object is the function of one step, or of several steps one after the other. Each has
 *
 *   then(later)              the function that does first this one, then `later`
 *   once(later)              the same where `later` is one step
 *   of(h)                    its value
 *   trusted(before, after, forgets)
 *                            whether `after`, its value at `before`, is what single steps give;
 *                            NaN stays NaN, unless a step `forgets` a value: it then chooses
 *                            another one, and its coefficient is zero
 *   moderate(h)              whether a value is so far from overflow that no composition that
 *                            leads there can have hidden one
 *
 * Composed coefficients may leave the range of their type where single steps do not. A result that
 * is not trusted is thrown away, and the steps are done one after the other.
 */
/* h -> a h + b. Products of coefficients below one vanish in time, and should: but what has been
 * lost must not matter. `lost_a` and `lost_b` bound the errors of `a` and `b` from underflow. */
template <class T> struct scanlib_affine {
  typedef typename scanlib_real<T>::type R;
  typedef scanlib_range<R> range;
  T a, b;
  R lost_a, lost_b;
  SCANLIB_METHOD static scanlib_affine make(T a, T b) {
    const scanlib_affine made = {a, b, R(0), R(0)};
    return made;
  }
  SCANLIB_METHOD scanlib_affine then(const scanlib_affine &later) const {
    const R size = scanlib_size(later.a);
    const T product = later.a * a;
    const bool under = scanlib_size(product) < range::least() && a != T(0) && later.a != T(0);
    scanlib_affine both;
    both.a = product;
    both.b = later.a * b + later.b;
    both.lost_a = size * lost_a + later.lost_a * (scanlib_size(a) + lost_a);
    both.lost_a += under ? range::least() : R(0);
    both.lost_b = size * lost_b + later.lost_b + later.lost_a * (scanlib_size(b) + lost_b);
    return both;
  }
  SCANLIB_METHOD scanlib_affine once(const scanlib_affine &later) const {
    const R size = scanlib_size(later.a);
    const T product = later.a * a;
    const bool under = scanlib_size(product) < range::least() && a != T(0) && later.a != T(0);
    scanlib_affine both;
    both.a = product;
    both.b = later.a * b + later.b;
    both.lost_a = size * lost_a + (under ? range::least() : R(0));
    both.lost_b = size * lost_b;
    return both;
  }
  SCANLIB_METHOD T of(T h) const { return a * h + b; }
  SCANLIB_METHOD bool trusted(T before, T after, bool forgets) const {
    if (scanlib_is_nan(before)) return !forgets || scanlib_size(a) > R(0);
    const R size = scanlib_size(after);
    return scanlib_size(a) <= range::large() && scanlib_size(b) <= range::large() &&
           size <= range::large() &&
           lost_a * scanlib_size(before) + lost_b <= range::digit() * size;
  }
  SCANLIB_METHOD static bool moderate(T h) { return scanlib_size(h) <= range::large(); }
};

/* The same for integers, which wrap around and lose nothing. */
template <class T> struct scanlib_whole_affine {
  T a, b;
  typedef npy_uint64 U;
  SCANLIB_METHOD static scanlib_whole_affine make(T a, T b) {
    const scanlib_whole_affine made = {a, b};
    return made;
  }
  SCANLIB_METHOD scanlib_whole_affine then(const scanlib_whole_affine &later) const {
    return make(T(U(later.a) * U(a)), T(U(later.a) * U(b) + U(later.b)));
  }
  SCANLIB_METHOD scanlib_whole_affine once(const scanlib_whole_affine &later) const { return then(later); }
  SCANLIB_METHOD T of(T h) const { return T(U(a) * U(h) + U(b)); }
  SCANLIB_METHOD bool trusted(T, T, bool) const { return true; }
  SCANLIB_METHOD static bool moderate(T) { return true; }
};

SCANLIB_DEVICE npy_float32 scanlib_log1p_exp(npy_float32 x) { return log1pf(expf(x)); }
SCANLIB_DEVICE npy_float64 scanlib_log1p_exp(npy_float64 x) { return log1p(exp(x)); }

template <class T> SCANLIB_DEVICE T scanlib_logaddexp(T x, T y) {
  const T most = x > y ? x : y, difference = x > y ? y - x : x - y;
  if (x != x || y != y) return x + y;
  return x == y ? x + T(0.69314718055994530942) : most + scanlib_log1p_exp(difference);
}

/* h -> log(exp(h + a) + exp(b)). */
template <class T> struct scanlib_log_affine {
  T a, b;
  typedef scanlib_range<T> range;
  SCANLIB_METHOD static scanlib_log_affine make(T a, T b) {
    const scanlib_log_affine made = {a, b};
    return made;
  }
  SCANLIB_METHOD scanlib_log_affine then(const scanlib_log_affine &later) const {
    return make(a + later.a, scanlib_logaddexp(b + later.a, later.b));
  }
  SCANLIB_METHOD scanlib_log_affine once(const scanlib_log_affine &later) const { return then(later); }
  SCANLIB_METHOD T of(T h) const { return scanlib_logaddexp(h + a, b); }
  SCANLIB_METHOD bool trusted(T before, T after, bool) const {
    if (before != before) return true;
    return moderate(a) && moderate(b) && moderate(after);
  }
  SCANLIB_METHOD static bool moderate(T h) {
    return h <= range::large() && (h >= -range::large() || h == T(-NPY_INFINITY));
  }
};

/* h -> max(h, b); NaN wins, as in a single step. */
template <class T> struct scanlib_maximum {
  T b;
  SCANLIB_METHOD static scanlib_maximum make(T b) {
    const scanlib_maximum made = {b};
    return made;
  }
  SCANLIB_METHOD static T pick(T x, T y) { return x != x || x >= y ? x : y; }
  SCANLIB_METHOD scanlib_maximum then(const scanlib_maximum &later) const {
    return make(pick(b, later.b));
  }
  SCANLIB_METHOD scanlib_maximum once(const scanlib_maximum &later) const { return then(later); }
  SCANLIB_METHOD T of(T h) const { return pick(h, b); }
  SCANLIB_METHOD bool trusted(T, T, bool) const { return true; }
  SCANLIB_METHOD static bool moderate(T) { return true; }
};

/* h -> min(h, b). */
template <class T> struct scanlib_minimum {
  T b;
  SCANLIB_METHOD static scanlib_minimum make(T b) {
    const scanlib_minimum made = {b};
    return made;
  }
  SCANLIB_METHOD static T pick(T x, T y) { return x != x || x <= y ? x : y; }
  SCANLIB_METHOD scanlib_minimum then(const scanlib_minimum &later) const {
    return make(pick(b, later.b));
  }
  SCANLIB_METHOD scanlib_minimum once(const scanlib_minimum &later) const { return then(later); }
  SCANLIB_METHOD T of(T h) const { return pick(h, b); }
  SCANLIB_METHOD bool trusted(T, T, bool) const { return true; }
  SCANLIB_METHOD static bool moderate(T) { return true; }
};
