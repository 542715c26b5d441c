"""Gradients of arrays that a step writes read the items that the step has read, or take back what
it wrote, and no array is stored for each step."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.tensor.extra_ops import SearchsortedOp
from pytensor.tensor.sort import ArgSortOp

import scanlib
from scanlib.rewrites.simplify.last_rows import is_loop
from tests.checks import assert_derivatives, in_python

N = 4
rng = np.random.default_rng(5)

# Steps that write into a state, of indices `t` from one on, sequence rows and a matrix.
VECTORS = {
    "row": lambda t, x, h, W: h[t].set(pt.tanh(W @ h[t - 1] + x)),
    "two_rows": lambda t, x, h, W: h[t].set(pt.tanh(W @ h[t - 1] + x * h[t // 2])),
    "column": lambda t, x, h, W: h[:, t].set(pt.sin(h[:, t - 1] * x)),
    "added": lambda t, x, h, W: h[t].inc(pt.exp(-(h[t - 1] ** 2)) @ W + x),
    "cache": lambda t, x, h, W: h[t].set(pt.special.softmax(h @ x) @ h @ W),
    "column_of_all": lambda t, x, h, W: h[:, t].set(pt.sin(h.sum(axis=1) * x)),
}
NUMBERS = {
    "item": lambda t, x, h, W: h[t].set(pt.tanh(W[0, 0] * h[t - 1] + x)),
    "items": lambda t, x, h, W: h[t].set(pt.sin(h[t - 1]) * h[t // 2] + x),
    "slice": lambda t, x, h, W: h[t].set(pt.sin(h[t - 1 : t] * x).sum()),
    "places": lambda t, x, h, W: h[t].set(pt.sin(h[t - 1 - pt.arange(2)] * x).sum()),
    "sum": lambda t, x, h, W: h[t].set(pt.sin(h.sum() * x)),
    "sum_added": lambda t, x, h, W: h[t - 1].inc(pt.sin((h**2).sum() * x)),
    "twice": lambda t, x, h, W: h[t].set(pt.sin(h**2).sum())[t - 1].inc(x * h[0]),
    "to_places": lambda t, x, h, W: h[t - pt.arange(2)].set(pt.sin(h.sum() * x)),
    "overlapping": lambda t, x, h, W: h[pt.stack([t, t, 0])].inc(pt.sin(pt.cos(h).sum() * x)),
    "chosen": lambda t, x, h, W: pt.switch(x > 0, h[t].set(h.sum()), h[0].inc(pt.cos(h).sum() * x)),
}


def filled(name, read=lambda tables: tables[-1], stops=False):
    """Return a cost of a filled array, with what it is computed from and values; a loop that
    `stops` does so before the last step."""
    of_vectors = name in VECTORS
    x, W = pt.dmatrix("x") if of_vectors else pt.dvector("x"), pt.dmatrix("W")
    plain = (VECTORS | NUMBERS)[name]

    def step(t, x, h, W):
        return (plain(t, x, h, W), scanlib.until(t > N - 3)) if stops else plain(t, x, h, W)

    steps = pt.arange(1, x.shape[0])
    start = pt.ones((x.shape[0], x.shape[0])) / 2 if name == "column" else pt.ones_like(x) / 2
    tables = scanlib.scan(step, [steps, x[1:]], start, W, return_updates=False)
    values = [rng.normal(size=(N, N) if of_vectors else N), rng.normal(size=(N, N)) / 2]
    return (read(tables) ** 2).sum(), [x, W], values


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("name", VECTORS | NUMBERS)
def test_no_array_is_kept_for_each_step(name, stops, fast_mode):
    cost, inputs, values = filled(name, stops=stops)
    gradients = pytensor.grad(cost, inputs, disconnected_inputs="ignore")
    function = pytensor.function(inputs, [cost, *gradients], mode=fast_mode)
    forward, _ = (n for n in function.maker.fgraph.toposort() if is_loop(n))
    assert all(forward.op.signature.untraced)
    walk = in_python(inputs, cost)
    assert_derivatives(
        cost, dict(zip(inputs, values, strict=True)), walk, fast_mode, disconnected_inputs="ignore"
    )


def test_arrays_of_two_steps_before(fast_mode):
    """The step writes into the array before the one before, which is still read: it is no carry."""
    x = pt.dvector("x")
    start = {"initial": pt.stack([x, pt.cos(x)]), "taps": [-2]}
    arrays = scanlib.scan(
        lambda t, x, h: h[t].set(pt.sin(h.sum() * x)),
        [pt.arange(x.shape[0]), x],
        start,
        return_updates=False,
    )

    def plain(x):
        before, last = x, np.cos(x)
        for t in range(len(x)):
            before, last = last, before.copy()
            last[t] = np.sin(last.sum() * x[t])
        return last

    value = rng.normal(size=5)
    last = pytensor.function([x], arrays[-1], mode=fast_mode)
    np.testing.assert_allclose(last(value), plain(value))
    cost, reference = (arrays[-1] ** 2).sum(), lambda x: (plain(x) ** 2).sum()
    assert_derivatives(cost, {x: value}, reference, fast_mode, order=1)


def test_small_arrays_are_kept(fast_mode):
    x = pt.dvector("x")
    start = pt.ones(3) / 2
    last = scanlib.scan(lambda x, h: h[0].set(pt.sin(h.sum() * x)), x, start, return_updates=False)
    function = pytensor.function([x], pytensor.grad(last[-1].sum(), x), mode=fast_mode)
    forward, _ = (n for n in function.maker.fgraph.toposort() if hasattr(n.op, "signature"))
    assert forward.op.signature.untraced == (False,)


def test_arrays_that_are_read_by_others_are_kept(fast_mode):
    cost, inputs, values = filled("row", read=lambda tables: tables)
    gradients = pytensor.grad(cost, inputs)
    function = pytensor.function(inputs, gradients, mode=fast_mode)
    forward = next(n for n in function.maker.fgraph.toposort() if is_loop(n))
    assert forward.op.signature.untraced == (False,)
    walk = in_python(inputs, cost)
    assert_derivatives(cost, dict(zip(inputs, values, strict=True)), walk, fast_mode, order=1)


def test_parts_of_a_size_that_changes_are_not_stored(fast_mode):
    """Elimination: each step reads one row and one column less."""
    A = pt.dmatrix("A")

    def step(k, A):
        return A[k + 1 :].inc(-A[k + 1 :, k][:, None] / A[k, k] * A[k])

    def plain(A):
        A = A.copy()
        for k in range(N - 1):
            A[k + 1 :] -= A[k + 1 :, k][:, None] / A[k, k] * A[k]
        return (A**2).sum()

    eliminated = scanlib.scan(step, pt.arange(A.shape[0] - 1), A, return_updates=False)[-1]
    values = {A: rng.normal(size=(N, N)) + 3 * np.eye(N)}
    assert_derivatives((eliminated**2).sum(), values, plain, fast_mode)


ORDERS = {
    "searched": lambda x, h: h[pt.searchsorted(pt.cumsum(pt.exp(x * h[0])), x) % N] * x,
    "ranked": lambda x, h: pt.sin(h[pt.argsort(x + h)]) * x,
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_not_found_again(name, fast_mode):
    x, start = pt.dmatrix("x"), pt.dvector("start")
    y = scanlib.scan(ORDERS[name], [x], [start], return_updates=False)
    inputs, cost = [x, start], (y**2).sum()
    f = pytensor.function(inputs, pytensor.grad(cost, inputs), mode=fast_mode)
    _, backward = (node for node in f.maker.fgraph.toposort() if is_loop(node))
    orders = (ArgSortOp, SearchsortedOp)
    assert not any(isinstance(node.op, orders) for node in backward.op.body.apply_nodes)
    values = {x: rng.normal(size=(N, N)), start: rng.normal(size=N)}
    assert_derivatives(cost, values, in_python(inputs, cost), fast_mode)
