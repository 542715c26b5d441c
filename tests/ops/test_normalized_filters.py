"""States that are multiplied by a matrix and normalized at every step, against the plain loop."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from scipy.special import logsumexp

import scanlib
from tests.checks import assert_derivatives
from tests.modes import MODES

RUN = {"c": MODES["c"], "numba": MODES["numba"]}


def in_numbers(xp):
    def step(like, alpha, p):
        joint = (alpha @ p) * like
        total = joint.sum()
        return joint / total, xp.log(total)

    return step


def in_logs(xp, total):
    def step(like, alpha, p):
        joint = total(alpha[:, None] + p, axis=0) + like
        norm = total(joint, axis=0)
        return joint - norm, norm

    return step


SYMBOLIC = {"numbers": in_numbers(pt), "logs": in_logs(pt, pt.logsumexp)}
NUMPY = {"numbers": in_numbers(np), "logs": in_logs(np, logsumexp)}


def graph(kind):
    like, alpha, p = pt.matrix("like"), pt.vector("alpha"), pt.matrix("p")
    states, scores = scanlib.scan(SYMBOLIC[kind], like, [alpha, None], p, return_updates=False)
    return [like, alpha, p], states, scores


def values(kind, steps, size, seed=0):
    rng = np.random.default_rng([steps, size, seed])
    like, alpha, p = (rng.uniform(0.1, 1, s) for s in ((steps, size), (size,), (size, size)))
    p /= p.sum(axis=1, keepdims=True)
    found = [like, alpha / alpha.sum(), p]
    return [np.log(v) for v in found] if kind == "logs" else found


def walk(kind, like, alpha, p):
    states, scores = [], []
    for row in like:
        alpha, score = NUMPY[kind](row, alpha, p)
        states.append(alpha)
        scores.append(score)
    return np.array(states).reshape(len(like), len(alpha)), np.array(scores)


@pytest.fixture(scope="module")
def filters():
    known = {}

    def get(kind, mode):
        if (kind, mode) not in known:
            inputs, states, scores = graph(kind)
            cost = scores.sum()
            outputs = [states, cost, *pytensor.grad(cost, inputs)]
            known[kind, mode] = pytensor.function(inputs, outputs, mode=RUN[mode])
        return known[kind, mode]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("mode", RUN)
@pytest.mark.parametrize("kind", SYMBOLIC)
def test_values(filters, kind, mode):
    function = filters(kind, mode)
    for steps, size in [(0, 3), (1, 1), (1, 4), (7, 2), (30, 5), (4, 70)]:
        given = values(kind, steps, size)
        before = [value.copy() for value in given]
        states, cost, *slopes = function(*given)
        expected, scores = walk(kind, *given)
        np.testing.assert_allclose(states, expected, rtol=1e-11, atol=1e-13)
        np.testing.assert_allclose(cost, scores.sum(), rtol=1e-11, atol=1e-13)
        rng = np.random.default_rng(1)
        for k, slope in enumerate(slopes):
            assert slope.shape == given[k].shape
            direction, costs = rng.normal(size=slope.shape), []
            for h in (-1e-6, 1e-6):
                moved = [v + h * direction if j == k else v for j, v in enumerate(given)]
                costs.append(walk(kind, *moved)[1].sum())
            wanted = (costs[1] - costs[0]) / 2e-6
            np.testing.assert_allclose((slope * direction).sum(), wanted, rtol=2e-6, atol=1e-6)
        for value, old in zip(given, before, strict=True):
            np.testing.assert_array_equal(value, old)


@pytest.mark.parametrize("kind", SYMBOLIC)
def test_nothing_underflows(filters, kind):
    """The product of the norms lies far below the smallest number, the states do not."""
    like, alpha, p = values(kind, 3000, 3)
    like = like - 50.0 if kind == "logs" else like * np.exp(-50.0)
    states, cost, *slopes = filters(kind, "c")(like, alpha, p)
    expected, scores = walk(kind, like, alpha, p)
    assert scores.sum() < -100_000
    np.testing.assert_allclose(states, expected, rtol=1e-9)
    np.testing.assert_allclose(cost, scores.sum(), rtol=1e-12)
    assert all(np.isfinite(slope).all() for slope in slopes)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SYMBOLIC)
def test_second_derivatives(kind):
    inputs, states, scores = graph(kind)
    given = values(kind, 4, 3)

    def reference(*arguments):
        states, scores = walk(kind, *arguments)
        return float(scores.sum() + (states**2).sum())

    cost = scores.sum() + (states**2).sum()
    assert_derivatives(cost, dict(zip(inputs, given, strict=True)), reference, MODES["c"])


def test_a_sum_of_logarithms_beside():
    """The score as a state of its own, and a norm taken out as a factor."""
    like, alpha, p = pt.matrix("like"), pt.vector("alpha"), pt.matrix("p")

    def step(like, alpha, score, p):
        joint = like * pt.dot(p.T, alpha)
        return joint * (1 / joint.sum()), score + pt.log(joint.sum())

    _, score = scanlib.scan(step, like, [alpha, np.float64(0.0)], p, return_updates=False)
    function = pytensor.function([like, alpha, p], score[-1], mode=MODES["c"])
    given = values("numbers", 9, 4)
    np.testing.assert_allclose(function(*given), walk("numbers", *given)[1].sum(), rtol=1e-12)


# Products with vectors inside a step, written as loops


@pytest.mark.slow
@pytest.mark.parametrize("mode", RUN)
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
def test_products_with_vectors(mode, dtype):
    """Rows, columns and outer products, small and large, matrices in any order of memory."""
    x, h = pt.matrix("x", dtype=dtype), pt.vector("h", dtype=dtype)
    a, b = pt.matrix("a", dtype=dtype), pt.matrix("b", dtype=dtype)

    def step(x, h, a, b):
        sum_ = pt.tanh(pt.dot(a, h).real + pt.dot(h, b).real).astype(dtype)
        return sum_ + x, pt.outer(h, x), pt.dot(a[0] * x[0], h)

    traces = scanlib.scan(step, x, [h, None, None], [a, b], return_updates=False)
    function = pytensor.function([x, h, a, b], traces, mode=RUN[mode])
    rng = np.random.default_rng(0)
    for steps, n in [(0, 3), (3, 1), (5, 4), (2, 65), (2, 90)]:
        shapes = (steps, n), (n,), (n, n), (n, n)
        xs, hs, m1, m2 = (rng.uniform(-0.1, 0.1, s).astype(dtype) for s in shapes)
        for left, right in ((m1, m2), (m1.T, m2[::-1]), (np.asfortranarray(m1), m2.T)):
            state, expected = hs, ([], [], [])
            for row in xs:
                inner = np.tanh((left @ state).real + (state @ right).real).astype(dtype)
                news = inner + row, np.outer(state, row), (left[0] * row[0]) @ state
                for column, new in zip(expected, news, strict=True):
                    column.append(new)
                state = news[0]
            for actual, wanted in zip(function(xs, hs, left, right), expected, strict=True):
                assert len(actual) == steps
                if steps:
                    rtol = 2e-5 if dtype == "float32" else 1e-11
                    np.testing.assert_allclose(actual, np.array(wanted), rtol=rtol, atol=rtol / 10)


def test_products_of_vectors_of_the_wrong_length():
    x, h, a = pt.vector("x"), pt.vector("h"), pt.matrix("a")
    trace = scanlib.scan(
        lambda x, h, a: pt.tanh(pt.dot(a, h)) * h.max() + x, x, h, a, return_updates=False
    )
    function = pytensor.function([x, h, a], trace, mode=MODES["c"])
    with pytest.raises(ValueError, match=r"\(3, 4\) times \(3, 1\)"):
        function(np.ones(2), np.ones(3), np.ones((3, 4)))
