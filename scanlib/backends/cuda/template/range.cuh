/* Where numbers of a type are safe: above `least` they keep their digits, below `large` no product
 * of a few of them overflows, and `digit` is the relative error of one rounding. */
template <class T> struct scanlib_range;
template <> struct scanlib_range<npy_float32> {
  SCANLIB_METHOD static npy_float32 least() { return 0x1p-126f; } /* smaller numbers lose digits */
  SCANLIB_METHOD static npy_float32 large() { return 0x1p100f; }
  SCANLIB_METHOD static npy_float32 digit() { return 0x1p-24f; }
};
template <> struct scanlib_range<npy_float64> {
  SCANLIB_METHOD static npy_float64 least() { return 0x1p-1022; }
  SCANLIB_METHOD static npy_float64 large() { return 0x1p900; }
  SCANLIB_METHOD static npy_float64 digit() { return 0x1p-53; }
};
