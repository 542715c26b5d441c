/* One thread per channel: it walks all steps. Threads side by side read channels side by side.
 *
 * `L` is the loop (see `printer.py`): what it keeps per channel, and one step. Rows are read ahead,
 * `AHEAD` steps at a time, since the memory answers long after it was asked.
 *
 * A condition that ends a loop reads nothing that differs between channels, so that all threads end
 * after the same step. Rows of results beyond it are left as they are.
 */

/* Walk the steps from `i` to `end`; results are stored. Returns how many are taken by then. */
template <class L, int AHEAD>
SCANLIB_DEVICE int64_t scanlib_steps(const scanlib_channel &channel, const typename L::Fixed &fixed,
                                     int64_t i, int64_t end, typename L::State &state,
                                     typename L::Sums &sums) {
  typename L::Results results;
  typename L::Rows rows[AHEAD], coming[AHEAD];
  if (i + AHEAD <= end) {
    SCANLIB_UNROLL
    for (int k = 0; k < AHEAD; k++) L::load(channel, i + k, rows[k]);
  }
  for (; i + AHEAD <= end; i += AHEAD) {
    if (i + 2 * AHEAD <= end) {
      SCANLIB_UNROLL
      for (int k = 0; k < AHEAD; k++) L::load(channel, i + AHEAD + k, coming[k]);
    }
    SCANLIB_UNROLL
    for (int k = 0; k < AHEAD; k++) {
      const bool ends = L::step(fixed, rows[k], state, sums, results);
      L::store(channel, i + k, results);
      if (ends) return i + k + 1;
    }
    SCANLIB_UNROLL
    for (int k = 0; k < AHEAD; k++) rows[k] = coming[k];
  }
  for (; i < end; i++) {
    L::load(channel, i, rows[0]);
    const bool ends = L::step(fixed, rows[0], state, sums, results);
    L::store(channel, i, results);
    if (ends) return i + 1;
  }
  return end;
}

template <class L, int AHEAD> SCANLIB_DEVICE void scanlib_serial(const Params &p, int64_t c) {
  if (c >= p.channels) return;
  scanlib_channel channel;
  typename L::Fixed fixed;
  typename L::State state;
  typename L::Sums sums = {};
  scanlib_locate(p, c, channel);
  L::fix(p, channel, fixed);
  L::start(channel, state, true);
  const int64_t taken = scanlib_steps<L, AHEAD>(channel, fixed, 0, p.steps, state, sums);
  L::finish(channel, state, taken);
  L::keep(channel, 0, sums);
}
