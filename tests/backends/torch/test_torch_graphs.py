"""`torch.compile` sees a loop, its gradient and what is around them as one graph."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.raise_op import Assert

import scanlib
from tests.checks import keeping_inputs

torch = pytest.importorskip("torch", reason="the PyTorch linker needs PyTorch")

rng = np.random.default_rng(31)


def loop(step, *args, **kwargs):
    return scanlib.scan(step, *args, return_updates=False, **kwargs)


def with_gradient(result, *inputs):
    return [result, *pytensor.grad((result**2).sum(), inputs)]


def plain_affine(a, b, start):
    """Values and gradients of ``h = a h + b``, as long as the shorter one of `a` and `b`."""
    steps = min(len(a), len(b))
    h = np.empty((steps, *start.shape))
    before = start
    for t in range(steps):
        h[t] = before = a[t] * before + b[t]
    d_a, d_b, owed = np.zeros_like(a), np.zeros_like(b), np.zeros_like(start)
    for t in reversed(range(steps)):
        owed = owed + 2 * h[t]
        d_a[t] = owed * (h[t - 1] if t else start)
        d_b[t] = owed
        owed = owed * a[t]
    return [h, d_a, d_b]


def affine():
    a, b, start = pt.dmatrix("a"), pt.dmatrix("b"), pt.dvector("start")
    h = loop(lambda a, b, h: a * h + b, [a, b], start)

    def values(steps):
        return rng.normal(size=(steps, 3)), rng.normal(size=(steps + 2, 3)), np.ones(3)

    return [a, b, start], with_gradient(h, a, b), values, plain_affine


def plain_window(x):
    h, before = np.zeros(max(len(x) - 1, 0)), 0.0
    for t in range(len(h)):
        h[t] = before = 0.5 * before + x[t] * x[t + 1]
    d_x, owed = np.zeros_like(x), 0.0
    for t in reversed(range(len(h))):
        owed = 0.5 * owed + 2 * h[t]
        d_x[t] += owed * x[t + 1]
        d_x[t + 1] += owed * x[t]
    return [h, d_x]


def window():
    x = pt.dvector("x")
    sequences = {"input": x, "taps": [-1, 0]}
    h = loop(lambda past, now, h: 0.5 * h + past * now, sequences, pt.zeros(()))
    return [x], with_gradient(h, x), lambda steps: [rng.normal(size=steps + 1)], plain_window


def plain_backwards(x):
    h, before = np.zeros_like(x), 0.0
    for t, row in enumerate(x[::-1]):
        h[t] = before = np.tanh(before) + row
    return [h[-3:][::-1]]


def backwards():
    x = pt.dvector("x")
    h = loop(lambda x, h: pt.tanh(h) + x, x, pt.zeros(()), go_backwards=True)
    return [x], [h[-3:][::-1]], lambda steps: [rng.normal(size=steps)], plain_backwards


def plain_rows(x):
    return [np.cumsum(x, axis=0).reshape(len(x) * x.shape[1]), np.full(len(x) // 2, 1.5)]


def shaped():
    x = pt.dmatrix("x")
    h = loop(lambda x, h: h + x, x, pt.zeros(x.shape[1]))
    flat = h.reshape((x.shape[0] * x.shape[1],))
    half = pt.full((x.shape[0] // 2,), 1.5)
    return [x], [flat, half], lambda steps: [rng.normal(size=(steps, 2))], plain_rows


LOOPS = {"affine": affine, "window": window, "backwards": backwards, "shaped": shaped}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_one_graph(name):
    """For each of several lengths; torch makes one more graph where lengths begin to vary."""
    inputs, outputs, values, plain = LOOPS[name]()
    function = pytensor.function(inputs, outputs, mode="PYTORCH")
    call = keeping_inputs(function)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for steps in (4, 4, 7, 9, 1, 0):
        given = values(steps)
        for one, other in zip(call(*given), plain(*given), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
        if steps == 4:
            assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_conditions_on_sizes():
    """They hold at every call, not only at the one for which the graph is made."""
    x, w = pt.dvector("x"), pt.dvector("w")
    rows = Assert("x and w differ")(x, pt.eq(x.shape[0], w.shape[0]))
    h = loop(lambda x, w, h: 0.5 * h + x * w, [rows, w], pt.zeros(()))
    function = pytensor.function([x, w], h, mode="PYTORCH")
    ones = [np.ones(steps) for steps in range(6)]
    for steps in (5, 3, 4, 2):
        assert len(function(ones[steps], ones[steps])) == steps
        with pytest.raises(AssertionError, match="x and w differ"):
            function(ones[steps], ones[steps - 1])


def test_no_number_from_data():
    """A length that data tell is none that shapes tell."""
    x, n = pt.dvector("x"), pt.lscalar("n")
    h = loop(lambda x, h: h + x, x[: pt.minimum(n, x.shape[0])], pt.zeros(()))
    function = pytensor.function([x, n], h, mode="PYTORCH")
    values = rng.normal(size=6)
    for count in (4, 2, 0, 9):
        np.testing.assert_allclose(function(values, count), np.cumsum(values[:count]))
