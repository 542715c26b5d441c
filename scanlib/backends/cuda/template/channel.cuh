/* Where the items of one channel are: in every array one, or one for each row. */
struct scanlib_channel {
  char *at[Params::ARRAYS];
  int64_t t[Params::ARRAYS]; /* bytes from row to row */
};

SCANLIB_DEVICE void scanlib_locate(const Params &p, int64_t c, scanlib_channel &l) {
  int64_t e[Params::SIZES + 1]; /* the channel's places along the axes */
  SCANLIB_UNROLL
  for (int axis = Params::SIZES - 1; axis >= 0; axis--) {
    e[axis] = axis ? c % p.n[axis] : c; /* what is left for the first is its own */
    if (axis) c /= p.n[axis];
  }
  SCANLIB_UNROLL
  for (int k = 0; k < Params::ARRAYS; k++) {
    l.at[k] = p.at[k].data;
    l.t[k] = p.at[k].t;
    SCANLIB_UNROLL
    for (int axis = 0; axis < Params::SIZES; axis++)
      if (Params::along(k, axis)) l.at[k] += e[axis] * p.at[k].e[axis];
  }
}
SCANLIB_DEVICE void scanlib_advance(scanlib_channel &l, int64_t rows) {
  SCANLIB_UNROLL
  for (int k = 0; k < Params::ARRAYS; k++) l.at[k] += rows * l.t[k];
}
