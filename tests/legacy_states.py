"""Loops of `pytensor.scan`: states of all kinds, and what readers do with results."""

from __future__ import annotations

import numpy as np
import pytensor.tensor as pt

from tests.legacy_cases import X2, A, B, W, X, loop, run, scan, uniform

# States


@loop(X)
def running_sum():
    def build(x):
        return scan(lambda x, y: x + y, x, [pt.constant(0.0, dtype="float64")])

    return build, lambda x: [np.cumsum(x)]


@loop(X, A, B)
def affine():
    def build(x, a, y0):
        return scan(lambda x, y, a: a * y + x, x, [y0], a)

    return build, lambda x, a, y0: [run(lambda x, y: a * y + x, y0, x)]


@loop(X, X + 0.2, B)
def affine_in_time():
    def build(x, a, y0):
        return scan(lambda x, a, y: a * y + x, [x, a], [y0])

    return build, lambda x, a, y0: [run(lambda x, a, y: a * y + x, y0, x, a)]


@loop(X, A, B)
def nonlinear():
    def build(x, a, y0):
        return scan(lambda x, y, a: pt.tanh(a * y + x), x, [y0], a)

    return build, lambda x, a, y0: [run(lambda x, y: np.tanh(a * y + x), y0, x)]


@loop(X, A, B)
def last_value_only():
    def build(x, a, y0):
        return [scan(lambda x, y, a: pt.tanh(a * y + x), x, [y0], a)[0][-1]]

    return build, lambda x, a, y0: [run(lambda x, y: np.tanh(a * y + x), y0, x)[-1]]


def two_lags(x, a, b, start):
    rows = list(start)
    for x_t in x:
        rows.append(a * rows[-1] + b * rows[-2] + x_t)
    return np.array(rows[2:])


@loop(X, A, B, uniform(2))
def two_taps():
    def build(x, a, b, start):
        initial = {"initial": start, "taps": [-1, -2]}
        return scan(lambda x, y1, y2, a, b: a * y1 + b * y2 + x, x, [initial], a, b)

    return build, lambda *values: [two_lags(*values)]


@loop(X, A, B, uniform(4))
def two_taps_with_rows_to_spare():
    def build(x, a, b, start):
        initial = {"initial": start, "taps": [-2, -1]}
        return scan(lambda x, y2, y1, a, b: a * y1 + b * y2 + x, x, [initial], a, b)

    return build, lambda x, a, b, start: [two_lags(x, a, b, start[:2])]


@loop(X, A, uniform(3))
def taps_with_a_gap():
    def build(x, a, start):
        initial = {"initial": start, "taps": [-1, -3]}
        found = scan(lambda x, y1, y3, a: pt.sin(y1) * y3 + a * x, x, [initial], a)
        return [found[0][-2:]]

    def plain(x, a, start):
        rows = list(start)
        for x_t in x:
            rows.append(np.sin(rows[-1]) * rows[-3] + a * x_t)
        return [np.array(rows[-2:])]

    return build, plain


@loop(X, uniform(2))
def only_the_second_tap():
    def build(x, start):
        return scan(lambda x, y: y * x, x, [{"initial": start, "taps": [-2]}])

    def plain(x, start):
        rows = list(start)
        for x_t in x:
            rows.append(rows[-2] * x_t)
        return [np.array(rows[2:])]

    return build, plain


@loop(X, A, B)
def two_states_and_an_output():
    def build(x, u0, v0):
        def step(x, u, v):
            return [pt.tanh(u + v * x), u * v, u - x]

        return scan(step, x, [u0, v0, None])

    def plain(x, u, v):
        us, vs, outs = [], [], []
        for x_t in x:
            outs.append(u - x_t)
            u, v = np.tanh(u + v * x_t), u * v
            us.append(u)
            vs.append(v)
        return [np.array(us), np.array(vs), np.array(outs)]

    return build, plain


@loop(X, A, B)
def states_that_change_places():
    def build(x, u0, v0):
        return scan(lambda x, u, v: [v, x], x, [u0, v0])

    def plain(x, u, v):
        us, vs = [], []
        for x_t in x:
            u, v = v, x_t
            us.append(u)
            vs.append(v)
        return [np.array(us), np.array(vs)]

    return build, plain


@loop(X2, W, uniform(3))
def vector_state():
    def build(x, w, y0):
        return scan(lambda x, y, w: pt.tanh(pt.dot(w, y) + x), x, [y0], w)

    return build, lambda x, w, y0: [run(lambda x, y: np.tanh(w @ y + x), y0, x)]


@loop(W, uniform(3, 2))
def matrix_state():
    def build(w, h0):
        return [scan(lambda h, w: pt.dot(w, h), None, [h0], w, n_steps=4)[0][-1]]

    return build, lambda w, h0: [np.linalg.matrix_power(w, 4) @ h0]


@loop(X2, uniform(2, 3), W)
def vector_autoregression():
    def build(x, start, w):
        initial = {"initial": start, "taps": [-1, -2]}
        return scan(lambda x, y1, y2, w: pt.dot(w, y1) - 0.5 * y2 + x, x, [initial], w)

    def plain(x, start, w):
        rows = list(start)
        for x_t in x:
            rows.append(w @ rows[-1] - 0.5 * rows[-2] + x_t)
        return [np.array(rows[2:])]

    return build, plain


@loop(X2, uniform(1, 3))
def state_with_one_row():
    def build(x, y0):
        fixed = pt.specify_broadcastable(y0, 0)
        return scan(lambda x, y: pt.cos(y) * x, x, [fixed])

    return build, lambda x, y0: [run(lambda x, y: np.cos(y) * x, y0, x)]


@loop(X.astype("float32"), A.astype("float32"), order=0)
def single_precision():
    def build(x, a):
        return scan(lambda x, y, a: a * y + x, x, [pt.constant(np.float32(0))], a)

    return build, lambda x, a: [run(lambda x, y: a * y + x, np.float32(0), x)]


@loop(X, order=0)
def counter():
    def build(x):
        def step(x, n):
            return n + pt.cast(x > 0, "int64")

        return scan(step, x, [pt.constant(0, dtype="int64")])

    return build, lambda x: [np.cumsum(x > 0)]


@loop(X, order=0)
def complex_state():
    def build(x):
        turn = pt.constant(0.6 + 0.5j)
        return [pt.abs(scan(lambda x, z, turn: turn * z + x, x, [pt.constant(1j)], turn)[0])]

    return build, lambda x: [np.abs(run(lambda x, z: (0.6 + 0.5j) * z + x, 1j, x))]


# What is read of a result


@loop(X, A, B)
def parts_of_a_trace():
    def build(x, a, y0):
        y = scan(lambda x, y, a: pt.tanh(a * y) + x, x, [y0], a)[0]
        return [y[2], y[1:4], y[::2], y.mean(), y[:-1] * y[1:]]

    def plain(x, a, y0):
        y = run(lambda x, y: np.tanh(a * y) + x, y0, x)
        return [y[2], y[1:4], y[::2], y.mean(), y[:-1] * y[1:]]

    return build, plain


@loop(X, A, B)
def history_with_the_initial_row():
    def build(x, a, y0):
        return [scan(lambda x, y, a: a * y + x, x, [y0], a)[0].owner.inputs[0]]

    return build, lambda x, a, y0: [np.append(y0, run(lambda x, y: a * y + x, y0, x))]


@loop(X, A)
def loop_after_loop():
    def build(x, a):
        first = scan(lambda x, y, a: pt.tanh(a * y + x), x, [a], a)[0]
        return scan(lambda y, before, z: z * y + before, [first[1:], first[:-1]], [a])

    def plain(x, a):
        y = run(lambda x, y: np.tanh(a * y + x), a, x)
        return [run(lambda y, before, z: z * y + before, a, y[1:], y[:-1])]

    return build, plain
