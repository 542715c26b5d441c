"""Loops of every recurrence class for tests over many devices, with data."""

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib

rng = np.random.default_rng(17)


def scan(*arguments, **options):
    return scanlib.scan(*arguments, return_updates=False, **options)


def _with_gradient(inputs, h, wrt):
    return inputs, [h, *pytensor.grad((h**2).sum(), wrt)]


def affine(T):
    x, a = pt.dmatrix("x"), pt.dvector("a")
    h = scan(lambda x, h, a: a * h + x, x, pt.zeros(a.shape), non_sequences=a)
    data = rng.normal(size=(T, 3)), rng.uniform(-0.9, 0.9, 3)
    return *_with_gradient([x, a], h, [x, a]), data, "t-"


def log_affine(T):
    x, a = pt.dmatrix("x"), pt.dvector("a")
    h = scan(lambda x, h, a: pt.logaddexp(h + a, x), x, pt.zeros(a.shape), non_sequences=a)
    data = rng.normal(size=(T, 3)), rng.normal(size=3)
    return *_with_gradient([x, a], h, [x, a]), data, "t-"


def max_affine(T):
    x, a = pt.dmatrix("x"), pt.dvector("a")
    h = scan(lambda x, h, a: pt.maximum(h + a * x, 0.0), x, pt.zeros(a.shape), non_sequences=a)
    data = rng.normal(size=(T, 3)), rng.normal(size=3)
    return *_with_gradient([x, a], h, [x, a]), data, "t-"


def running_maximum(T):
    x = pt.dmatrix("x")
    h = scan(lambda x, h: pt.maximum(h, x), x, pt.zeros(3))
    return *_with_gradient([x], h, [x]), (rng.normal(size=(T, 3)),), "t"


def ar2(T):
    x, h0, p = pt.dvector("x"), pt.dvector("h0"), pt.dvector("p")
    step = lambda x, h1, h2, p: p[0] * h1 + p[1] * h2 + x  # noqa: E731
    h = scan(step, x, {"initial": h0, "taps": [-1, -2]}, non_sequences=p)
    data = rng.normal(size=T), rng.normal(size=2), np.array([0.5, 0.3])
    return *_with_gradient([x, h0, p], h, [x, h0, p]), data, "t--"


def two_in_order(T):
    """A state whose coefficients another one gives."""
    x, a = pt.dmatrix("x"), pt.dvector("a")
    step = lambda x, h, g, a: (a * h + x, pt.tanh(h) * g + x)  # noqa: E731
    _, g = scan(step, x, [pt.zeros(3), pt.ones(3)], non_sequences=a)
    data = rng.normal(size=(T, 3)), rng.uniform(-0.9, 0.9, 3)
    return *_with_gradient([x, a], g, [x, a]), data, "t-"


def matrix(T):
    x, A = pt.dmatrix("x"), pt.dtensor3("A")
    h = scan(lambda x, A, h: A @ h + x, [x, A], pt.zeros(4))
    data = rng.normal(size=(T, 4)), rng.normal(size=(T, 4, 4)) / 3
    return *_with_gradient([x, A], h, [x, A]), data, "tt"


def fixed_matrix(T):
    x, A = pt.dmatrix("x"), pt.dmatrix("A")
    h = scan(lambda x, h, A: A @ h + x, x, pt.zeros(4), non_sequences=A)
    data = rng.normal(size=(T, 4)), rng.normal(size=(4, 4)) / 3
    return *_with_gradient([x, A], h, [x, A]), data, "t-"


def hidden_markov(T):
    p, M = pt.dmatrix("p"), pt.dmatrix("M")
    step = lambda p, h, M: pt.logsumexp(h[:, None] + M, axis=0) + p  # noqa: E731
    density = pt.logsumexp(scan(step, p, pt.zeros(3), non_sequences=M)[-1])
    M_ = rng.normal(size=(3, 3))
    M_ -= np.logaddexp.reduce(M_, axis=1, keepdims=True)
    data = rng.normal(size=(T, 3)), M_
    return [p, M], [density, *pytensor.grad(density, [p, M])], data, "t-"


def garch(T):
    e, w = pt.dvector("e"), pt.dvector("w")
    step = lambda e, v, w: w[0] + w[1] * e**2 + w[2] * v  # noqa: E731
    v = scan(step, e[:-1], e.var(), non_sequences=w)
    density = (-0.5 * (pt.log(v) + e[1:] ** 2 / v)).sum()
    data = rng.normal(size=T), np.array([0.1, 0.2, 0.6])
    return [e, w], [density, *pytensor.grad(density, [w, e])], data, "t-"


def volatility(T):
    """GARCH written for the standard deviation: affine in its square."""
    e, w = pt.dvector("e"), pt.dvector("w")
    step = lambda e, s, w: pt.sqrt(w[0] + w[1] * e**2 + w[2] * s**2)  # noqa: E731
    h = scan(step, e, pt.constant(1.0), non_sequences=w)
    data = rng.normal(size=T), np.array([0.1, 0.2, 0.6])
    return *_with_gradient([e, w], h, [e, w]), data, "t-"


def around(T):
    """Maps, lags, windows, sums, products, extremes around a loop."""
    x, b = pt.dmatrix("x"), pt.dvector("b")
    y = pt.tanh(x @ b)
    moving = (y[2:] + y[1:-1] + y[:-2]) / 3
    lagged = pt.concatenate([pt.zeros(1), y[:-1]])
    h = scan(lambda y, z, h: 0.5 * h * z + y, [y, lagged], pt.constant(0.0))
    outputs = [
        moving,
        lagged,
        h.sum(),
        h.max(),
        (h * y).mean(),
        h[-1] - h[0],
        pt.cumsum(y),
        x.T @ h,
        scan(lambda y, h: 0.5 * h + y, y[::-1], pt.constant(0.0))[::-1],
        pt.set_subtensor(y[1:4], h[-3:]),
    ]
    cost = (h**2).sum() + moving.sum() + lagged[3]
    data = rng.normal(size=(T, 4)), rng.normal(size=4)
    return [x, b], [*outputs, *pytensor.grad(cost, [x, b])], data, "t-"


CASES = [affine, log_affine, max_affine, running_maximum, ar2, two_in_order, matrix,
         fixed_matrix, hidden_markov, garch, volatility, around]  # fmt: skip
