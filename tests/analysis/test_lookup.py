"""Loops that read tables at places that their states give, against the plain loop."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scanlib
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from tests.checks import assert_derivatives
from tests.modes import MODES

RUN = {"c": MODES["c"], "numba": MODES["numba"]}


def loops(function):
    nodes = function.maker.fgraph.toposort()
    return [node.op for node in nodes if isinstance(node.op, (ElemwiseScan, Scan))]


def walk(table, x, s):
    states = []
    for symbol in x:
        s = table[symbol, s]
        states.append(s)
    return np.array(states, dtype="int64").reshape((len(x), *np.shape(s)))


@pytest.fixture(scope="module")
def automata():
    """Return, by mode and rank of the state, functions of a table, symbols and a first state."""
    known = {}

    def get(mode, ndim, dtype="int64"):
        if (mode, ndim, dtype) not in known:
            table, x = pt.matrix("table", dtype=dtype), pt.lvector("x")
            s = pt.tensor("s", dtype=dtype, shape=(None,) * ndim)
            states = scanlib.scan(
                lambda x, s, table: table[x, s], x, s, table, return_updates=False
            )
            known[mode, ndim, dtype] = pytensor.function([table, x, s], states, mode=RUN[mode])
        return known[mode, ndim, dtype]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("mode", RUN)
@pytest.mark.parametrize("ndim", [0, 1])
@settings(max_examples=20)
@given(
    steps=st.sampled_from([0, 1, 2, 40]),
    size=st.integers(1, 6),
    symbols=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_automata(automata, mode, ndim, steps, size, symbols, seed):
    rng = np.random.default_rng([steps, size, symbols, seed])
    table = rng.integers(-size, size, (symbols, size))
    x, s = rng.integers(-symbols, symbols, steps), rng.integers(-size, size, (3,) * ndim)
    function = automata(mode, ndim)
    assert [type(op) for op in loops(function)] == [Scan]
    before = table.copy()
    np.testing.assert_array_equal(function(table, x, s), walk(table, x, s))
    np.testing.assert_array_equal(table, before)
    np.testing.assert_array_equal(function(table.T.copy().T, x, s), walk(table, x, s))


@pytest.mark.parametrize("mode", RUN)
@pytest.mark.parametrize("ndim", [0, 1])
def test_places_outside_a_table(automata, mode, ndim):
    function = automata(mode, ndim)
    table = np.array([[1, 2, 0], [0, 0, 7], [0, 0, -9]])
    start = np.zeros((2,) * ndim, dtype="int64")
    good = function(table, np.array([0, 0, 1]), start)
    assert good[-1].ravel()[0] == 7
    for x in ([0, 0, 1, 0], [0, 0, 2, 0], [0, 3], [0, -4]):
        with pytest.raises(IndexError):
            function(table, np.array(x), start)
    with pytest.raises(IndexError):
        function(table[:, :0], np.array([0]), start)
    assert len(function(table[:, :0], np.array([], dtype="int64"), start)) == 0


def test_small_integers(automata):
    function = automata("c", 0, "int8")
    table, x = np.array([[1, 2, 0], [2, 0, 1]], dtype="int8"), np.array([0, 1, 1, 0, 0])
    np.testing.assert_array_equal(function(table, x, np.int8(1)), walk(table, x, 1))


def test_a_table_of_successors_and_flat_places():
    """``next[s]``, and a place computed from state and symbol."""
    table, x, s = pt.lvector("table"), pt.lvector("x"), pt.lscalar("s")
    chain = scanlib.scan(
        lambda s, table: table[s], outputs_info=s, non_sequences=table, n_steps=9,
        return_updates=False,
    )  # fmt: skip
    flat = scanlib.scan(lambda x, s, table: table[3 * x + s], x, s, table, return_updates=False)
    f = pytensor.function([table, s], chain, mode=MODES["c"])
    g = pytensor.function([table, x, s], flat, mode=MODES["c"])
    values = np.array([1, 2, 0, 2, 0, 1])
    expected, state = [], 1
    for _ in range(9):
        state = values[state]
        expected.append(state)
    np.testing.assert_array_equal(f(values, 1), expected)
    symbols = np.array([0, 1, 1, 0])
    np.testing.assert_array_equal(g(values, symbols, 1), walk(values.reshape(2, 3), symbols, 1))


# Parameters of regimes: tables of numbers read at a state


def regimes(x, s, y, table, mu, phi):
    s = table[x, s]
    return s, phi[s] * y + mu[s]


def plain_regimes(x, table, s, y, mu, phi):
    trace = []
    for symbol in x:
        s = table[symbol, s]
        y = phi[s] * y + mu[s]
        trace.append(y)
    return np.array(trace)


@pytest.fixture(scope="module")
def switching():
    def make(ndim, mode):
        table, x = pt.lmatrix("table"), pt.lvector("x")
        s = pt.tensor("s", dtype="int64", shape=(None,) * ndim)
        y = pt.tensor("y", dtype="float64", shape=(None,) * ndim)
        mu, phi = pt.vector("mu"), pt.vector("phi")
        trace = scanlib.scan(regimes, x, [s, y], [table, mu, phi], return_updates=False)[1]
        return [table, x, s, y, mu, phi], trace

    return make


@pytest.mark.parametrize("mode", RUN)
@pytest.mark.parametrize("ndim", [0, 1])
def test_regimes(switching, ndim, mode):
    inputs, trace = switching(ndim, mode)
    gradient = pytensor.grad((trace**2).sum(), inputs[3:])
    function = pytensor.function(inputs, [trace, *gradient], mode=RUN[mode])
    assert [type(op) for op in loops(function)] == [Scan, Scan]
    rng = np.random.default_rng(0)
    for steps in (0, 1, 30):
        table, x = rng.integers(-3, 3, (2, 3)), rng.integers(0, 2, steps)
        shape = (4,) * ndim
        s, y = rng.integers(0, 3, shape), rng.normal(size=shape)
        mu, phi = rng.normal(size=3), rng.uniform(-0.9, 0.9, 3)
        actual, *slopes = function(table, x, s, y, mu, phi)
        expected = plain_regimes(x, table, s, y, mu, phi).reshape((steps, *shape))
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
        given = [y, mu, phi]
        for k, slope in enumerate(slopes):
            direction = rng.normal(size=np.shape(given[k]))
            costs = []
            for h in (-1e-6, 1e-6):
                moved = [v + h * direction if j == k else v for j, v in enumerate(given)]
                costs.append((plain_regimes(x, table, s, *moved) ** 2).sum())
            wanted = (costs[1] - costs[0]) / 2e-6
            np.testing.assert_allclose((slope * direction).sum(), wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("ndim", [0, 1])
def test_second_derivatives_of_regimes(switching, ndim):
    inputs, trace = switching(ndim, "c")
    rng = np.random.default_rng(3)
    table, x, shape = rng.integers(-3, 3, (2, 3)), rng.integers(0, 2, 6), (4,) * ndim
    s = rng.integers(0, 3, shape)
    fixed = dict(zip(inputs[:3], map(pt.constant, (table, x, s)), strict=True))
    from pytensor.graph.replace import clone_replace

    (cost,) = clone_replace([(trace**2).sum()], fixed)
    numbers = [rng.normal(size=shape), rng.normal(size=3), rng.uniform(-0.9, 0.9, 3)]
    assert_derivatives(
        cost,
        dict(zip(inputs[3:], numbers, strict=True)),
        lambda y, mu, phi: float((plain_regimes(x, table, s, y, mu, phi) ** 2).sum()),
        MODES["c"],
    )


def test_a_state_that_is_a_number_as_well_as_a_place():
    def plain(x, s, t):
        return t[x, s] + s

    x, s, t = pt.lvector("x"), pt.lscalar("s"), pt.lmatrix("t")
    trace = scanlib.scan(plain, x, s, t, return_updates=False)
    function = pytensor.function([x, s, t], trace, mode=MODES["c"])
    table = np.array([[-1, 0], [0, -1]])
    symbols, state, expected = np.array([0, 1, 1, 0]), 1, []
    for symbol in symbols:
        state = plain(symbol, state, table)
        expected.append(state)
    np.testing.assert_array_equal(function(symbols, 1, table), expected)
