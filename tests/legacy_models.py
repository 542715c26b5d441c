"""Loops of `pytensor.scan`: those that people write, loops in loops, derivatives as loops."""

from __future__ import annotations

import numpy as np
import pytensor
import pytensor.tensor as pt
from pytensor.scan.checkpoints import scan_checkpoints
from pytensor.scan.views import foldr, reduce

from tests.legacy_cases import X2, A, B, T, W, X, loop, run, scan, uniform

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
