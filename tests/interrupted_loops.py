"""Loops that would take minutes, each interrupted; run as a program, with the name of a linker.

A timer of the process's own time sends the signal, so that other processes do not count.
"""

import signal
import sys
import time

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.ifelse import ifelse

from scanlib import scan, until

DELAY, LATEST = 0.1, 0.1  # seconds of processor time


noise = pytensor.shared(np.random.default_rng(1))


def last(step, initial, *others):
    return scan(step, [], [initial], list(others), n_steps=n)[0][-1]


def draw(h):
    following, number = pt.random.normal(rng=noise).owner.outputs
    return 0.5 * h + number, {noise: following}


n, x, A = pt.lscalar("n"), pt.dvector("x"), pt.dmatrix("A")
# Results, and the sizes of x and A in the call that is interrupted.
LOOPS = {
    "one channel": (last(lambda h: 3.7 * h * (1.0 - h), x[0]), 3),
    "until": (last(lambda h: (3.7 * h * (1.0 - h), until(h > 2.0)), x[0]), 3),
    "wide": (last(lambda h, x: pt.tanh(h + x), x, x), 200_000),
    "two axes": (last(lambda h, A: pt.tanh(h + A), A, A), 1000),
    "arrays": (last(lambda h, x, A: pt.tanh(A @ pt.sin(h) + x), x, x, A), 300),
    "products": (last(lambda h, A: pt.tanh(h @ A), A, A), 300),
    "draws": (last(draw, x[0]), 3),
    "branches": (last(lambda h, x: ifelse(h[0] > 0.0, pt.sort(h), x), x, x), 300),
    "inner loop": (
        last(lambda h, x: pt.tanh(last(lambda g, x: pt.cos(g + x[0]), h, x)), x[0], x),
        3,
    ),
}
MODES = {"numba": "NUMBA", "c": "FAST_RUN", "perform": "FAST_COMPILE", "torch": "PYTORCH"}


def interrupt(*arguments):
    raise KeyboardInterrupt


def main(linker, names):
    signal.signal(signal.SIGPROF, interrupt)
    for name in names or LOOPS:
        out, size = LOOPS[name]
        f = pytensor.function([x, A, n], out, mode=MODES[linker], on_unused_input="ignore")
        small = np.full(3, 0.25), np.full((3, 3), 0.25), 5
        rows = min(size, 1000)
        large = np.full(size, 0.25), np.full((rows, rows), 1.0 / rows), 5
        before = f(*small)
        f(*large)
        try:
            signal.setitimer(signal.ITIMER_PROF, DELAY)
            start = time.process_time()
            f(*large[:2], 10**12)
            print(f"{name}: came to its end")
        except KeyboardInterrupt:
            late = time.process_time() - start - DELAY
            print(f"{name}: {late:.3f} s", "TOO LATE" if late > LATEST else "", flush=True)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if name != "draws":
            np.testing.assert_array_equal(f(*small), before)
        assert np.isfinite(f(*large)).all()
        assert (large[0] == 0.25).all()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
    print("all ended", flush=True)
