"""Loops that read arrays at computed places, on devices, where they are no kernels."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.cuda_device import check_calls
from tests.families import both

pytestmark = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")
RNG = np.random.default_rng(0)


def automaton():
    """States are places in a table, for one channel."""
    table, x, s = pt.lmatrix("table"), pt.lvector("x"), pt.lscalar("s")
    trace = scanlib.scan(lambda x, s, table: table[x, s], x, s, table, return_updates=False)
    return [table, x, s], [trace]


def regimes():
    """Channels with states of their own that choose parameters; the gradients' loops."""
    table, x, s, y = pt.lmatrix("table"), pt.lvector("x"), pt.lvector("s"), pt.dvector("y")
    mu, phi = pt.dvector("mu"), pt.dvector("phi")

    def step(x, s, y, table, mu, phi):
        s = table[x, s]
        return s, mu[s] + phi[s] * y

    trace = scanlib.scan(step, x, [s, y], [table, mu, phi], return_updates=False)[1]
    return [table, x, s, y, mu, phi], [trace]


def rows():
    """Places in rows of a sequence, and columns of a matrix along the channels."""
    i, x, w, h = pt.lvector("i"), pt.dmatrix("x"), pt.dmatrix("w"), pt.dvector("h")
    trace = scanlib.scan(
        lambda i, x, h, w: 0.5 * h + x[i] * w[i], [i, x], h, w, return_updates=False
    )
    return [i, x, w, h], [trace]


def until_accepted():
    """A walk through a table of successors that ends where it should."""
    table, s, goal = pt.lvector("table"), pt.lscalar("s"), pt.lscalar("goal")
    trace = scanlib.scan(
        lambda s, table, goal: (table[s], scanlib.until(pt.eq(table[s], goal))),
        outputs_info=s, non_sequences=[table, goal], n_steps=50, return_updates=False,
    )  # fmt: skip
    return [table, s, goal], [trace]


def buffers():
    """States that are written at a place."""
    i, x, h = pt.lvector("i"), pt.dvector("x"), pt.dvector("h")
    trace = scanlib.scan(
        lambda i, x, h: pt.set_subtensor((0.5 * h)[i], x), [i, x], h, return_updates=False
    )
    return [i, x, h], [trace, trace[-1]]


def integers(low, high, *shape):
    return RNG.integers(low, high, shape)


CASES = [
    (automaton, [(integers(-6, 6, 3, 6), integers(-3, 3, n), np.int64(2)) for n in (0, 1, 40)]),
    (regimes, [(integers(-3, 3, 2, 3), integers(0, 2, n), integers(0, 3, c), RNG.normal(size=c),
                RNG.normal(size=3), RNG.uniform(-0.9, 0.9, 3)) for n, c in ((1, 4), (30, 7))]),
    (rows, [(integers(-4, 4, n), RNG.normal(size=(n, 4))[:, ::-1], RNG.normal(size=(5, 4)).T,
             RNG.normal(size=5)) for n in (0, 1, 33)]),
    (until_accepted, [(np.roll(np.arange(9), -1), np.int64(2), np.int64(k)) for k in (8, 3, 1)]),
    (buffers, [(integers(-5, 5, n), RNG.normal(size=n), RNG.normal(size=5)) for n in (1, 2, 30)]),
]  # fmt: skip
cases = pytest.mark.parametrize("graph, data", CASES, ids=lambda v: getattr(v, "__name__", ""))


@cases
def test_pytorch(torch_on_device, graph, data):
    check_calls(*both(*graph(), "PYTORCH"), data[1:])


@cases
def test_jax(jax_on_device, graph, data):
    check_calls(*both(*graph(), "JAX"), data[1:])
