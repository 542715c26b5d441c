/* Where an item of a matrix is, in row `i` and column `j`, or one of a vector: item `i`; where states
 * are not cut into vectors, it is in column `j`. */
template <class L>
SCANLIB_DEVICE char *scanlib_item_place(const Params &p, const scanlib_channel &l, int array,
                                        int64_t t, int i, int j) {
  const int64_t *e = p.at[array].e;
  return l.at[array] + t * l.t[array] + i * e[L::I] + j * e[L::J];
}
