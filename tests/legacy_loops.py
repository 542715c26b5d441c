"""Loops built with `pytensor.scan`, each beside the plain Python loop that says what it computes.

A `LegacyLoop` builds a graph of its inputs with PyTensor's own functions; `plain` computes the
same from arrays, with NumPy and ``for``. The collection has all kinds of loops that PyTensor
knows: states with one and several taps, outputs, untraced states, taps of sequences, `until`,
both directions, nested loops, random draws, and what readers do with results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.scan.checkpoints import scan_checkpoints
from pytensor.scan.utils import until
from pytensor.scan.views import foldr, reduce

T = 6
RNG = np.random.default_rng(7)


@dataclass(frozen=True)
class LegacyLoop:
    """One loop.

    Attributes
    ----------
    build : callable
        From variables to the list of results, with `pytensor.scan`.
    plain : callable
        From arrays to the same results.
    values : tuple of ndarray
        Where both are evaluated.
    order : int
        The highest derivative that is compared; 0 where there is none.
    """

    build: Callable
    plain: Callable
    values: tuple[np.ndarray, ...]
    order: int = 2


LOOPS: dict[str, LegacyLoop] = {}


def loop(*values: Any, order: int = 2) -> Callable:
    """Register ``(build, plain)``, returned by a function of the loop's name."""

    def register(make: Callable) -> Callable:
        build, plain = make()
        given = tuple(np.asarray(v) for v in values)
        LOOPS[make.__name__] = LegacyLoop(build, plain, given, order)
        return make

    return register


def scan(step, sequences=None, initial=None, *others, **options):
    """`pytensor.scan` without updates, always a list."""
    return pytensor.scan(
        step,
        sequences=sequences,
        outputs_info=initial,
        non_sequences=list(others),
        return_updates=False,
        return_list=True,
        **options,
    )


def uniform(*shape):
    return RNG.uniform(-0.8, 0.8, shape)


X, X2, W = uniform(T), uniform(T, 3), uniform(3, 3)
A, B, C = np.array(0.4), np.array(0.3), np.array(-0.2)


def run(step, y, *rows):
    """The plain loop with one state: all its values after the first."""
    found = []
    for row in zip(*rows, strict=False):
        y = step(*row, y)
        found.append(y)
    return np.array(found)


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


# Loops that people write


@loop(X, np.array(0.1), np.array(0.2), np.array(0.6))
def garch():
    def build(x, omega, alpha, beta):
        def step(x, s, omega, alpha, beta):
            return pt.sqrt(omega + alpha * x**2 + beta * s**2)

        s = scan(step, x, [omega], omega, alpha, beta)[0]
        return [pt.sum(pt.log(s) + 0.5 * (x / s) ** 2)]

    def plain(x, omega, alpha, beta):
        s = run(lambda x, s: np.sqrt(omega + alpha * x**2 + beta * s**2), omega, x)
        return [np.sum(np.log(s) + 0.5 * (x / s) ** 2)]

    return build, plain


@loop(X, np.array(0.3), np.array(0.2), A, B)
def holt():
    def build(x, alpha, beta, level0, trend0):
        def step(x, level, trend, alpha, beta):
            new = alpha * x + (1 - alpha) * (level + trend)
            return [new, beta * (new - level) + (1 - beta) * trend, level + trend]

        found = scan(step, x, [level0, trend0, None], alpha, beta)
        return [found[2]]

    def plain(x, alpha, beta, level, trend):
        found = []
        for x_t in x:
            found.append(level + trend)
            new = alpha * x_t + (1 - alpha) * (level + trend)
            trend = beta * (new - level) + (1 - beta) * trend
            level = new
        return [np.array(found)]

    return build, plain


@loop(uniform(T, 2), uniform(2, 2), uniform(2), np.array([[0.5, 0.1], [0.1, 0.4]]))
def kalman():
    def build(y, f, m0, q):
        def step(y, m, p, f, q):
            m, p = pt.dot(f, m), f @ p @ f.T + q @ q.T + pt.eye(2)
            s = p + pt.eye(2)
            gain = p @ pt.linalg.inv(s)
            error = y - m
            fit = pt.log(pt.linalg.det(s)) + error @ pt.linalg.inv(s) @ error
            return [m + gain @ error, p - gain @ s @ gain.T, fit]

        return [scan(step, y, [m0, q @ q.T, None], f, q)[2].sum()]

    def plain(y, f, m, q):
        p, total = q @ q.T, 0.0
        for y_t in y:
            m, p = f @ m, f @ p @ f.T + q @ q.T + np.eye(2)
            s = p + np.eye(2)
            gain = p @ np.linalg.inv(s)
            error = y_t - m
            total = total + np.log(np.linalg.det(s)) + error @ np.linalg.inv(s) @ error
            m, p = m + gain @ error, p - gain @ s @ gain.T
        return [np.asarray(total)]

    return build, plain


@loop(X2, W, uniform(3))
def hidden_markov_chain():
    def build(emission, transition, start):
        def step(e, a, transition):
            return pt.logsumexp(a[:, None] + transition, axis=0) + e

        return [pt.logsumexp(scan(step, emission, [start], transition)[0][-1])]

    def plain(emission, transition, a):
        for e in emission:
            a = np.log(np.sum(np.exp(a[:, None] + transition), axis=0)) + e
        return [np.log(np.sum(np.exp(a)))]

    return build, plain


@loop(X2, W, uniform(3), order=1)
def best_path():
    def build(emission, transition, start):
        def step(e, a, transition):
            return pt.max(a[:, None] + transition, axis=0) + e

        return [pt.max(scan(step, emission, [start], transition)[0][-1])]

    def plain(emission, transition, a):
        for e in emission:
            a = np.max(a[:, None] + transition, axis=0) + e
        return [np.max(a)]

    return build, plain


@loop(np.array([0.8, 0.15, 0.05]), A, B)
def epidemic():
    def build(start, beta, gamma):
        def step(s, i, r, beta, gamma):
            new, out = beta * s * i, gamma * i
            return [s - new, i + new - out, r + out]

        return scan(step, None, [start[0], start[1], start[2]], beta, gamma, n_steps=7)

    def plain(start, beta, gamma):
        s, i, r = start
        rows = []
        for _ in range(7):
            new, out = beta * s * i, gamma * i
            s, i, r = s - new, i + new - out, r + out
            rows.append((s, i, r))
        return list(np.array(rows).T)

    return build, plain


@loop(X, np.array(0.7))
def adstock():
    def build(x, decay):
        return scan(lambda x, y, decay: x + decay * y, x, [pt.zeros(())], decay)

    return build, lambda x, decay: [run(lambda x, y: x + decay * y, 0.0, x)]


@loop(X, A)
def folded():
    def build(x, a):
        right = foldr(lambda x, s: s * 0.5 + x, x, a, return_updates=False)
        left = reduce(lambda x, s: s * x + 1.0, x, a, return_updates=False)
        return [right, left]

    def plain(x, a):
        right, left = a, a
        for x_t in x:
            left = left * x_t + 1.0
        for x_t in x[::-1]:
            right = right * 0.5 + x_t
        return [np.asarray(right), np.asarray(left)]

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


# Loops in loops, derivatives as loops


@loop(X2, A)
def map_of_loops():
    def build(x, a):
        def row(x, a):
            return scan(lambda x, y, a: pt.tanh(a * y + x), x, [a], a)[0]

        return scan(row, x, None, a)

    def plain(x, a):
        return [np.array([run(lambda x, y: np.tanh(a * y + x), a, row) for row in x])]

    return build, plain


@loop(X, A)
def loop_in_a_recurrence():
    def build(x, a):
        def step(x, y, a):
            inner = scan(lambda z, y: pt.sin(z) * y, None, [x], y, n_steps=3)[0][-1]
            return inner + a * y

        return scan(step, x, [a], a)

    def plain(x, a):
        def step(x, y):
            z = x
            for _ in range(3):
                z = np.sin(z) * y
            return z + a * y

        return [run(step, a, x)]

    return build, plain


@loop(X, A, order=1)
def jacobian():
    def build(x, a):
        y = scan(lambda x, y, a: a * y + x * x, x, [a], a)[0]
        return [pytensor.gradient.jacobian(y, x)]

    def plain(x, a):
        rows = range(len(x))
        power = [[a ** (t - s) if t >= s else 0.0 for s in rows] for t in rows]
        return [np.array(power) * 2 * x]

    return build, plain


@loop(X, A, order=1)
def forward_derivative():
    def build(x, a):
        y = scan(lambda x, y, a: pt.tanh(a * y + x), x, [a], a)[0]
        return [pytensor.gradient.pushforward(y, [x], [x * 0 + 1.0], use_op_pushforward=True)]

    def plain(x, a):
        y, dy, rows = a, 0.0, []
        for x_t in x:
            y = np.tanh(a * y + x_t)
            dy = (1 - y**2) * (a * dy + 1.0)
            rows.append(dy)
        return [np.array(rows)]

    return build, plain


@loop(X, A, order=1)
def gradient_as_a_result():
    def build(x, a):
        y = scan(lambda x, y, a: pt.tanh(a * y + x), x, [a], a)[0]
        return pytensor.grad((y**2).sum(), [x, a])

    def plain(x, a):
        ys = np.append(a, run(lambda x, y: np.tanh(a * y + x), a, x))
        g, ga, gx = 0.0, 0.0, np.zeros_like(x)
        for t in range(len(x) - 1, -1, -1):
            g = (2 * ys[t + 1] + g) * (1 - ys[t + 1] ** 2)
            gx[t] = g
            ga += g * ys[t]
            g = a * g
        return [gx, np.asarray(ga + g)]

    return build, plain


@loop(uniform(16), A)
def checkpoints():
    def build(x, a):
        options = {"save_every_N": 4, "return_updates": False}
        return [scan_checkpoints(lambda x, y, a: pt.tanh(a * y + x), [x], [a], [a], **options)]

    return build, lambda x, a: [run(lambda x, y: np.tanh(a * y + x), a, x)[3::4]]
