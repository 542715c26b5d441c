/* Loops that end by a condition: one thread per channel walks until it holds.
 *
 * The condition is that of the whole loop, so that it reads nothing that differs between channels, and
 * all threads end after the same step. Rows of results beyond it are left as they are. One step is
 * read ahead.
 */
template <class L> SCANLIB_DEVICE void scanlib_until(const Params &p, int64_t c) {
  if (c >= p.channels) return;
  typename L::Channel channel;
  typename L::Fixed fixed;
  typename L::State state;
  typename L::Sums sums = {};
  typename L::Rows rows, coming;
  typename L::Results results;
  int64_t i = 0;
  bool ends = false;
  L::locate(p, c, channel);
  L::fix(channel, fixed);
  L::start(channel, p.steps, state, true);
  if (p.steps) L::load(channel, L::row(p.steps, 0), coming);
  while (i < p.steps && !ends) {
    rows = coming;
    if (i + 1 < p.steps) L::load(channel, L::row(p.steps, i + 1), coming);
    ends = L::step(fixed, rows, state, sums, results);
    L::store(channel, L::row(p.steps, i), results);
    i++;
  }
  L::finish(channel, state);
  L::keep(p, c, sums);
  if (c == 0) L::taken(channel, i);
}
