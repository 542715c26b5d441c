"""Loops of `pytensor.scan`: what they read at each step, and when they stop."""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt
from pytensor.scan.utils import until

from tests.legacy_cases import X2, A, B, T, X, loop, run, scan, uniform

# Sequences


@loop(X, X[::-1].copy())
def elementwise_map():
    def build(x, y):
        return scan(lambda x, y: [x * y, x + y], [x, y])

    return build, lambda x, y: [x * y, x + y]


@loop(X, uniform(T + 2), A)
def sequences_of_different_lengths():
    def build(x, y, a):
        return scan(lambda x, y, s, a: a * s + x * y, [x, y], [a], a)

    return build, lambda x, y, a: [run(lambda x, y, s: a * s + x * y, a, x, y)]


@loop(uniform(T + 3), A)
def taps_of_a_sequence():
    def build(x, a):
        taps = {"input": x, "taps": [-1, 0, 2]}
        return scan(lambda before, now, ahead, y, a: a * y + before * now - ahead, taps, [a], a)

    def plain(x, a):
        return [run(lambda p, n, q, y: a * y + p * n - q, a, x[:-3], x[1:-2], x[3:])]

    return build, plain


@loop(X, A, B)
def moving_average_part():
    def build(x, a, b):
        taps = {"input": x, "taps": [0, -1]}
        return scan(lambda now, before, y, a, b: a * y + now + b * before, taps, [a], a, b)

    return build, lambda x, a, b: [run(lambda n, p, y: a * y + n + b * p, a, x[1:], x[:-1])]


@loop(X, A)
def fewer_steps_than_rows():
    def build(x, a):
        return scan(lambda x, y, a: pt.tanh(a * y) + x, x, [a], a, n_steps=4)

    return build, lambda x, a: [run(lambda x, y: np.tanh(a * y) + x, a, x[:4])]


@loop(X, A)
def steps_known_at_run_time():
    def build(x, a):
        steps = pt.cast(pt.round(pt.sum(x * 0) + 4), "int64")
        return scan(lambda x, y, a: pt.tanh(a * y) + x, x, [a], a, n_steps=steps)

    return build, lambda x, a: [run(lambda x, y: np.tanh(a * y) + x, a, x[:4])]


@loop(A, uniform(3))
def powers():
    def build(a, v):
        return scan(lambda y, a, v: a * y * v, None, [pt.ones_like(v)], a, v, n_steps=5)

    return build, lambda a, v: [np.array([(a * v) ** k for k in range(1, 6)])]


@loop(X2)
def rows_by_index():
    def build(x):
        return scan(lambda i, s, x: s + x[i] * x[i - 1], pt.arange(1, T), [pt.zeros(3)], x)

    return build, lambda x: [np.cumsum(x[1:] * x[:-1], axis=0)]


@loop(X, A)
def backwards():
    def build(x, a):
        return scan(lambda x, y, a: pt.tanh(a * y + x), x, [a], a, go_backwards=True)

    return build, lambda x, a: [run(lambda x, y: np.tanh(a * y + x), a, x[::-1])]


@loop(X, A)
def backwards_and_turned_round():
    def build(x, a):
        return [scan(lambda x, g, a: x + a * g, x, [0.0 * a], a, go_backwards=True)[0][::-1]]

    return build, lambda x, a: [run(lambda x, g: x + a * g, 0.0, x[::-1])[::-1]]


@loop(X, uniform(2))
def backwards_with_two_taps():
    def build(x, start):
        initial = {"initial": start, "taps": [-1, -2]}
        found = scan(lambda x, y1, y2: 0.5 * y1 + x * y2, x, [initial], go_backwards=True)[0]
        return [found[::-1]]

    def plain(x, start):
        rows = list(start)
        for x_t in x[::-1]:
            rows.append(0.5 * rows[-1] + x_t * rows[-2])
        return [np.array(rows[2:])[::-1]]

    return build, plain


# `until`


@loop(X, np.array(1.2))
def outputs_until():
    def build(x, a):
        return scan(lambda i, x, a: (pt.sin(a * x), until(i >= 3)), [pt.arange(T), x], None, a)

    return build, lambda x, a: [np.sin(a * x[:4])]


@loop(X, np.array(1.2))
def outputs_until_that_never_comes():
    def build(x, a):
        return scan(lambda x, a: (pt.sin(a * x), until(x > 5)), x, None, a)

    return build, lambda x, a: [np.sin(a * x)]


@loop(X, A, order=0)
def state_until():
    def build(x, a):
        return scan(lambda x, y, a: (a * y + x, until(y > 0.5)), x, [a + 0.2], a)

    def plain(x, a):
        rows = [a + 0.2]
        for x_t in x:
            stop = rows[-1] > 0.5
            rows.append(a * rows[-1] + x_t)
            if stop:
                break
        return [np.array(rows[1:])]

    return build, plain


@loop(np.array(7.0), order=0)
def newton():
    def build(a):
        def step(r, a):
            new = 0.5 * (r + a / r)
            return new, until(pt.abs(new - r) < 1e-10)

        return [scan(step, None, [a], a, n_steps=50)[0][-1]]

    return build, lambda a: [np.sqrt(a)]
