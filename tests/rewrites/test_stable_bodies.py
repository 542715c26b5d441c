"""Logarithms of sums of exponentials in steps: exponentials are all zero or infinite."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.tensor.math import Max
from scipy.special import erfc, expit, logsumexp

import scanlib
from scanlib.ops.graph import depends_on
from scanlib.ops.logaddexp import LogAddExp
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from tests.modes import MODES

rng = np.random.default_rng(2)
COST = 2000 * rng.random((5, 5))
LINKERS = {**MODES, "FAST_COMPILE": "FAST_COMPILE", "JAX": "JAX"}


@pytest.fixture(params=LINKERS)
def linker(request):
    if request.param == "JAX":
        pytest.importorskip("jax")
    return request.param


def plain_walk(cost, steps):
    g, rows = np.zeros(len(cost)), []
    for _ in range(steps):
        f = -logsumexp(g[None, :] - cost, axis=1)
        g = -logsumexp(f[:, None] - cost, axis=0)
        rows.append(f)
    return np.array(rows)


def test_sinkhorn(linker):
    cost = pt.dmatrix("cost")

    def step(f, g, cost):
        f = -pt.logsumexp(g[None, :] - cost, axis=1)
        return f, -pt.logsumexp(f[:, None] - cost, axis=0)

    f, _ = scanlib.scan(
        step, None, [pt.zeros(5), pt.zeros(5)], cost, n_steps=6, return_updates=False
    )
    outputs = [f, pytensor.grad(f[-1].sum(), cost)]
    found, derivative = pytensor.function([cost], outputs, mode=LINKERS[linker])(COST)
    np.testing.assert_allclose(found, plain_walk(COST, 6), rtol=1e-12)
    for place in ((0, 0), (2, 3), (4, 1)):
        ends = []
        for sign in (1, -1):
            moved = COST.copy()
            moved[place] += sign * 1e-3
            ends.append(plain_walk(moved, 6)[-1].sum())
        np.testing.assert_allclose(derivative[place], (ends[0] - ends[1]) / 2e-3, atol=1e-6)


def test_loop_in_a_loop(linker):
    x = pt.dmatrix("x")

    def inner(v, h):
        return pt.logsumexp(pt.outer(v, h), axis=1) * 0.5 + v

    def step(row, h):
        return h + scanlib.scan(inner, row, h, return_updates=False)[-1] * 0.01

    y = scanlib.scan(step, x[:, :, None] * np.ones(3), pt.ones(3), return_updates=False)
    value = 400 * rng.normal(size=(3, 4))
    h, expected = np.ones(3), []
    for row in value:
        level = h
        for v in row:
            level = logsumexp(np.outer(np.full(3, v), level), axis=1) * 0.5 + v
        h = h + level * 0.01
        expected.append(h)
    found = pytensor.function([x], y, mode=LINKERS[linker])(value)
    np.testing.assert_allclose(found, expected, rtol=1e-12)


STEPS = {
    "log softmax": (
        lambda z, h: pt.log(pt.special.softmax(400 * z)),
        lambda z, h: 400 * z - logsumexp(400 * z),
    ),
    "softplus": (
        lambda z, h: pt.log(1 + pt.exp(2000 * z)) / 1000,
        lambda z, h: np.logaddexp(0, 2000 * z) / 1000,
    ),
    "log of the other side": (
        lambda z, h: pt.log(1 - pt.sigmoid(1000 * z)) / 1000,
        lambda z, h: -np.logaddexp(0, 1000 * z) / 1000,
    ),
    "log1p of the other side": (
        lambda z, h: pt.log1p(-pt.sigmoid(1000 * z)) / 1000,
        lambda z, h: -np.logaddexp(0, 1000 * z) / 1000,
    ),
    "the other side": (lambda z, h: 1 - pt.sigmoid(40 * z), lambda z, h: expit(-40 * z)),
    "log of a sum": (
        lambda z, h: h + pt.logsumexp(1000 * z) / 1000,
        lambda z, h: h + logsumexp(1000 * z) / 1000,
    ),
    "log of a mean": (
        lambda z, h: h + pt.log(pt.mean(pt.exp(1000 * z))) / 1000,
        lambda z, h: h + (logsumexp(1000 * z) - np.log(4)) / 1000,
    ),
    "log of means of rows": (
        lambda z, h: pt.log(2 * pt.exp(900 * pt.outer(h, z)).mean(1, keepdims=True))[:, 0] / 900,
        lambda z, h: (logsumexp(900 * np.outer(h, z), axis=1) - np.log(2)) / 900,
    ),
    "a far tail": (lambda z, h: 1 - pt.erf(5 * z), lambda z, h: erfc(5 * z)),
}


@pytest.mark.parametrize("name", STEPS)
def test_naive_forms(name, linker):
    step, plain = STEPS[name]
    W, start = pt.dmatrix("W"), pt.dvector("start")
    y = scanlib.scan(
        lambda h, W: step(pt.dot(W, h), h), None, start, W, n_steps=3, return_updates=False
    )
    outputs = [y, pytensor.grad(y[-1].sum(), W)]
    matrix, h, expected = rng.normal(size=(4, 4)), np.array([1.0, -1.0, 0.5, 2.0]), []
    found, derivative = pytensor.function([start, W], outputs, mode=LINKERS[linker])(h, matrix)
    for _ in range(3):
        expected.append(h := plain(matrix @ h, h))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-300)
    if linker not in ("py", "FAST_COMPILE"):  # there, steps keep terms that are zero times infinity
        assert np.isfinite(derivative).all()


LEAVE = {
    "logsumexp": (
        lambda x, h, W: pt.dot(W, h) + pt.logsumexp(x),
        lambda x, h, W: W @ h + logsumexp(x),
    ),
    "log softmax": (
        lambda x, h, W: pt.dot(W, h) + pt.log(pt.special.softmax(x)),
        lambda x, h, W: W @ h + x - logsumexp(x),
    ),
    "an item": (
        lambda x, h, W: h + pt.log(pt.special.softmax(x))[1],
        lambda x, h, W: h + (x - logsumexp(x))[1],
    ),
    "softmax": (
        lambda x, h, W: h * 0.5 + pt.exp(x) / pt.sum(pt.exp(x)),
        lambda x, h, W: h * 0.5 + np.exp(x - logsumexp(x)),
    ),
}


@pytest.mark.parametrize("name", LEAVE)
def test_what_leaves_a_loop(name, linker):
    """It is computed for all steps at once."""
    step, plain = LEAVE[name]
    x, start, W = pt.dmatrix("x"), pt.dvector("start"), pt.dmatrix("W")
    y = scanlib.scan(step, x, start, W, return_updates=False)
    rows, h, matrix = 800 * rng.normal(size=(4, 3)), rng.normal(size=3), 0.3 * np.eye(3)
    function = pytensor.function([x, start, W], y, mode=LINKERS[linker], on_unused_input="ignore")
    found, expected = function(rows, h, matrix), []
    for row in rows:
        expected.append(h := plain(row, h, matrix))
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-300)


def test_gradients_compute_no_logarithm_again():
    """PyTensor's derivative of `logsumexp` may be an Op with a graph, which does."""
    x, h = pt.dmatrix("x"), pt.dvector("h")
    trace = scanlib.scan(lambda x, h: 0.5 * h - pt.logsumexp(h + x), [x], [h], return_updates=False)
    f = pytensor.function([x, h], pytensor.grad(trace.sum(), [x, h]), mode="NUMBA")
    (gradient,) = (
        node.op
        for node in f.maker.fgraph.apply_nodes
        if isinstance(node.op, Scan) and node.op.signature.reverse
    )
    assert not any(isinstance(node.op, Max) for node in gradient.body.apply_nodes)


LOGS = {
    "nested": (
        lambda h, x, y, z: pt.logaddexp(pt.logaddexp(h, x), pt.logaddexp(y, z)),
        lambda h, x, y, z: logsumexp([h, x, y, z]),
    ),
    "stacked": (
        lambda h, x, y, z: -0.5 * pt.logsumexp(pt.stack([-2 * h, x, 3 * y, z])),
        lambda h, x, y, z: -0.5 * logsumexp([-2 * h, x, 3 * y, z]),
    ),
    "in a logarithm": (
        lambda h, x, y, z: pt.log(pt.exp(x) + pt.exp(pt.sin(h)) + pt.exp(y) + pt.exp(z)),
        lambda h, x, y, z: logsumexp([x, np.sin(h), y, z]),
    ),
}


@pytest.mark.parametrize("name", LOGS)
def test_logarithms_of_states_are_added_last(name):
    """One logarithm of a sum of two exponentials waits for the step before."""
    step, plain = LOGS[name]
    rows = pt.dvectors("x", "y", "z")
    trace = scanlib.scan(lambda x, y, z, h: step(h, x, y, z), rows, 0.3, return_updates=False)
    f = pytensor.function(rows, trace)
    (op,) = (node.op for node in f.maker.fgraph.apply_nodes if isinstance(node.op, ElemwiseScan))
    late = depends_on(op.body.outputs, op.signature.split_body_inputs(op.body.inputs).taps[0])
    logs = [node.outputs[0] for node in op.body.toposort() if isinstance(node.op, LogAddExp)]
    assert [log in late for log in logs].count(True) == 1 < len(logs)
    values, h, expected = rng.normal(size=(7, 3)), 0.3, []
    for row in values:
        h = plain(h, *row)
        expected.append(h)
    np.testing.assert_allclose(f(*values.T), expected, rtol=1e-12)
