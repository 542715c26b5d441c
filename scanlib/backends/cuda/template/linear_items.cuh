/* Where the items of a matrix recurrence are, and which rows belong to a step. */
template <class L> SCANLIB_DEVICE int64_t scanlib_before(int64_t steps) {
  return L::REVERSE ? steps : 0;
}
template <class L> SCANLIB_DEVICE int64_t scanlib_after(int64_t t) {
  return L::REVERSE ? t : t + 1;
}
/* An item of a matrix, in row `i` and column `j`, or one of a vector: item `i`; where states are not
 * cut into vectors, it is in column `j`. */
template <class L>
SCANLIB_DEVICE char *scanlib_item_place(const Params &p, const scanlib_channel &l, int array,
                                        int64_t t, int i, int j) {
  const int64_t *e = p.at[array].e;
  return l.at[array] + t * l.t[array] + i * e[L::I] + j * e[L::J];
}
template <class L>
SCANLIB_DEVICE typename L::Item scanlib_item(const Params &p, const scanlib_channel &l, int array,
                                             int64_t t, int i, int j) {
  const char *place = scanlib_item_place<L>(p, l, array, t, i, j);
  return typename L::Item(scanlib_fetch<typename L::Memory>(place));
}
template <class L>
SCANLIB_DEVICE void scanlib_store(const Params &p, const scanlib_channel &l, int64_t t, int i, int j,
                                  typename L::Item value) {
  char *place = scanlib_item_place<L>(p, l, Params::y, t, i, j);
  *(typename L::Memory *)place = typename L::Memory(value);
}
/* Which items of row `i` the mask keeps. */
template <class L>
SCANLIB_DEVICE uint64_t scanlib_kept(const Params &p, const scanlib_channel &l, int i) {
  uint64_t bits = 0;
  for (int j = 0; j < L::SIZE; j++)
    bits |= uint64_t(*scanlib_item_place<L>(p, l, L::MASK, 0, i, j) != 0) << j;
  return bits;
}
