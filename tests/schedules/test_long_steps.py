"""Steps of thousands of operations and loops of many states compile, as kernels."""

import pickle

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.assumptions.core import DIAGONAL
from pytensor.compile.mode import Mode
from pytensor.graph.fg import FunctionGraph
from pytensor.tensor.basic import AllocDiag
from pytensor.tensor.math import Dot

import scanlib
from scanlib.kernels.language import If
from scanlib.ops.errors import InitialRowsError
from scanlib.ops.graph import MOST_TERMS, taken_apart
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.rewrites.pytensor_rewrites import (
    CANONICAL,
    LONG,
    MOST_AT_ONCE,
    flatten_long_sums,
    run_query,
)
from scanlib.schedules.array_loops import graph_program
from scanlib.schedules.selection import schedule
from tests.modes import MODES

CALLS = 1000  # that Python's stack holds


def chain(h, x, a, count, module):
    """Return a state after `count` operations."""
    for k in range(count):
        h = (module.tanh(h), h * a, h + x)[k % 3]
    return h


def loop_of_chain(count):
    """Return a loop whose steps are chains, and its inputs."""
    xs, a = pt.dvector("xs"), pt.dscalar("a")
    out = scanlib.scan(
        lambda x, h, a: chain(h, x, a, count, pt),
        sequences=[xs],
        outputs_info=[pt.constant(0.1)],
        non_sequences=[a],
        return_updates=False,
    )
    return xs, a, out


def chain_by_hand(xs, a, count):
    h, rows = 0.1, []
    for x in xs:
        h = chain(h, x, a, count, np)
        rows.append(h)
    return np.array(rows)


def kernels(function):
    return [n for n in function.maker.fgraph.apply_nodes if isinstance(n.op, ElemwiseScan)]


@pytest.mark.parametrize("mode", ["numba", "c"])
def test_chain_keeps_its_kernel(mode, caplog):
    xs, a, out = loop_of_chain(CALLS)
    function = pytensor.function([xs, a], out, mode=MODES[mode])
    data = np.array([0.3, -0.2, 0.1])
    np.testing.assert_allclose(function(data, 0.4), chain_by_hand(data, 0.4, CALLS), rtol=1e-12)
    assert len(kernels(function)) == 1
    assert not caplog.records


def test_gradient_of_chain(caplog):
    count = 250
    xs, a, out = loop_of_chain(count)
    function = pytensor.function([xs, a], pytensor.grad(out.sum(), a), mode=MODES["c"])
    data = np.array([0.3, -0.2, 0.1])
    step = 1e-6
    up, down = (chain_by_hand(data, 0.9 + sign * step, count).sum() for sign in (1, -1))
    np.testing.assert_allclose(function(data, 0.9), (up - down) / (2 * step), rtol=1e-6)
    assert len(kernels(function)) == 2
    assert not caplog.records


@pytest.mark.slow
def test_deep_gradient_in_numba_mode():
    """Deeper than Python's stack, and walked step by step: blocks would write the step thrice."""
    count = 500
    xs, a, out = loop_of_chain(count)
    function = pytensor.function([xs, a], pytensor.grad(out.sum(), a), mode=MODES["numba"])
    assert all(schedule(node.op) == "steps" for node in kernels(function))
    data = np.array([0.3, -0.2])
    step = 1e-6
    high, low = (chain_by_hand(data, 0.4 + s * step, count).sum() for s in (1, -1))
    np.testing.assert_allclose(function(data, 0.4), (high - low) / (2 * step), rtol=1e-6)


@pytest.mark.parametrize("mode", ["numba", "c"])
def test_horner(mode, caplog):
    coefficients = np.random.default_rng(1).normal(size=120)

    def value(y, zero):
        total = zero
        for c in coefficients:
            total = total * y + c
        return total * 0.05

    out = scanlib.scan(
        lambda h: value(h, pt.zeros_like(h)),
        outputs_info=[pt.constant(0.5)],
        n_steps=3,
        return_updates=False,
    )
    function = pytensor.function([], out, mode=MODES[mode])
    h, expected = 0.5, []
    for _ in range(3):
        h = value(h, 0.0)
        expected.append(h)
    np.testing.assert_allclose(function(), expected, rtol=1e-10)
    assert len(kernels(function)) == 1
    assert not caplog.records


@pytest.mark.parametrize("mode", ["numba", "c"])
def test_gradient_of_horner(mode, caplog):
    coefficients = np.random.default_rng(1).normal(size=80)
    start, steps = pt.dscalar("start"), 3

    def value(y):
        total = 0.0 * y
        for c in coefficients:
            total = total * y + c
        return total * 0.05

    out = scanlib.scan(value, None, start, n_steps=steps, return_updates=False)
    gradient = pytensor.grad(out[-1], start)
    h, slope = 0.5, 1.0
    polynomial = np.polynomial.Polynomial(0.05 * coefficients[::-1])
    for _ in range(steps):
        h, slope = polynomial(h), slope * polynomial.deriv()(h)
    found = pytensor.function([start], [out[-1], gradient], mode=MODES[mode])(0.5)
    np.testing.assert_allclose(found, [h, slope], rtol=1e-9)
    assert not caplog.records


def many_states(count, initials=None):
    """Return loops of `count` states that do not meet, and the sum of their last rows."""
    xs = pt.dvector("xs")
    states = scanlib.scan(
        lambda x, *hs: [pt.tanh(h + x * (k + 1)) for k, h in enumerate(hs)],
        sequences=[xs],
        outputs_info=initials or [pt.constant(0.01 * k) for k in range(count)],
        return_updates=False,
    )
    return xs, states, sum(state[-1] for state in states)


@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.slow)])
def test_many_states(count, caplog):
    xs, _, total = many_states(count)
    function = pytensor.function([xs], total, mode=MODES["numba"])
    data = np.array([0.3, -0.2, 0.1])
    h = 0.01 * np.arange(count)
    for x in data:
        h = np.tanh(h + x * np.arange(1, count + 1))
    np.testing.assert_allclose(function(data), h.sum(), rtol=1e-12)
    assert not caplog.records


def test_starts_of_many_states_in_one_vector():
    """Around the loop stand as many items as states, whose arrays are not copied."""
    count, starts = 300, pt.dvector("starts")
    out = scanlib.scan(
        lambda *hs: [h + 1.0 for h in hs],
        outputs_info=[starts[k] for k in range(count)],
        n_steps=2,
        return_updates=False,
    )
    function = pytensor.function(
        [starts], pt.stack([trace[-1] for trace in out]), mode=MODES["numba"]
    )
    data = np.arange(2.0 * count)[::2]  # not in order of memory
    np.testing.assert_allclose(function(data), data + 2.0)


def test_graph_of_many_arrays():
    parts = [pt.dvector(f"part{k}") for k in range(600)]
    items = graph_program(FunctionGraph(parts, [part[-1] for part in parts]))
    whole = graph_program(FunctionGraph(parts, [pt.concatenate(parts)]))
    copies = [
        [isinstance(own, If) for own in program.kernels.run[0].body.statements]
        for program in (items, whole)
    ]
    assert not any(copies[0])
    assert any(copies[1])  # of more parts than Python's stack holds calls


def test_a_number_that_a_vector_does_not_have():
    parts = pt.dscalars("a", "b")
    program = graph_program(FunctionGraph(parts, [pt.stack(parts)[np.array(2)] + 1.0], clone=False))
    assert any("out of bounds" in failure.template for failure in program.failures.values())


@pytest.mark.parametrize("count", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_gradient_of_many_states(count):
    xs, a = pt.dvector("xs"), pt.dscalar("a")
    starts = 0.01 * np.arange(count)
    traces = scanlib.scan(
        lambda x, *hs: [pt.tanh(a * h + x) for h in hs],
        sequences=[xs],
        outputs_info=[pt.constant(start) for start in starts],
        return_updates=False,
    )
    cost = pt.add(*[(trace**2).sum() for trace in traces])
    results = [*traces, traces[3][1:], traces[5][::2], cost, pytensor.grad(cost, a)]
    function = pytensor.function([xs, a], results, mode=MODES["numba"])
    for data in (np.array([0.3, -0.2, 0.1]), np.array([])):
        h, tangent = starts, np.zeros(count)
        rows, total, slope = [], 0.0, 0.0
        for x in data:
            new = np.tanh(0.4 * h + x)
            tangent = (1 - new**2) * (h + 0.4 * tangent)
            h = new
            rows.append(h)
            total, slope = total + (h**2).sum(), slope + (2 * h * tangent).sum()
        columns = np.array(rows).reshape(-1, count).T
        *found, later, second, cost_value, gradient = function(data, 0.4)
        np.testing.assert_allclose(found, columns, rtol=1e-12)
        np.testing.assert_allclose(later, columns[3][1:], rtol=1e-12)
        np.testing.assert_allclose(second, columns[5][::2], rtol=1e-12)
        np.testing.assert_allclose([cost_value, gradient], [total, slope], rtol=1e-10)
        for trace in found:
            trace += 1.0  # it is the caller's own


def test_error_of_one_of_many_states():
    initials = [pt.dvector(f"first{k}") for k in range(10)]
    infos = [{"initial": initial, "taps": [-1, -2]} for initial in initials]
    out = scanlib.scan(
        lambda *hs: [hs[2 * k] + hs[2 * k + 1] for k in range(10)],
        outputs_info=infos,
        n_steps=3,
        return_updates=False,
    )
    function = pytensor.function(initials, [row[-1] for row in out], mode=MODES["numba"])
    rows = [np.ones(2) for _ in initials]
    np.testing.assert_allclose(function(*rows), [5.0] * 10)
    rows[7] = np.ones(1)
    with pytest.raises(InitialRowsError, match=r"7.*needs 2 initial rows.*got 1"):
        function(*rows)


def test_long_bodies_are_pickled_flat():
    _, _, out = loop_of_chain(2 * CALLS)
    op = next(
        node.op
        for node in pytensor.graph.traversal.toposort([out])
        if isinstance(node.op, scanlib.ops.scan.Scan)
    )
    assert pickle.loads(pickle.dumps(op)) == op


def test_sum_of_many_terms_is_left_whole():
    x = pt.dscalar("x")
    total = x
    for _ in range(60):
        total = total + total
    inputs = {total: None}
    assert taken_apart(total, lambda v: v.owner and v.owner.inputs) == list(inputs)
    assert MOST_TERMS < 2**60


def test_sums_deeper_than_the_stack():
    """PyTensor's rewrites of nested sums call themselves for each term."""
    count, x = 1500, pt.dvector("x")
    total = x[0]
    for k in range(1, count):
        total = total + x[k]
    graph = FunctionGraph([x], [total], clone=True)
    flatten_long_sums(graph)
    sums = [node for node in graph.apply_nodes if node.op == pt.add]
    assert sum(len(node.inputs) - 1 for node in sums) == count - 1
    assert max(len(node.inputs) for node in sums) == MOST_AT_ONCE
    data = np.random.default_rng(1).normal(size=count)
    value = pytensor.function(graph.inputs, graph.outputs, mode=Mode("py", None))(data)
    np.testing.assert_allclose(value, [data.sum()])


def test_sums_that_others_read_stay():
    x = pt.dvector("x")
    partial = total = x[0]
    for k in range(1, 200):
        total = total + x[k]
        partial = total if k == 100 else partial
    graph = FunctionGraph([x], [total, pt.exp(partial)], clone=True)
    flatten_long_sums(graph)
    assert len([node for node in graph.apply_nodes if node.op == pt.add]) < 20
    assert len(graph.clients[graph.outputs[1].owner.inputs[0]]) == 2
    data = np.linspace(-1, 1, 200)
    values = pytensor.function(graph.inputs, graph.outputs, mode=Mode("py", None))(data)
    np.testing.assert_allclose(values, [data.sum(), np.exp(data[:101].sum())], atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["numba", "c"])
def test_two_thousand_operations(mode, caplog):
    count = 2000
    xs, a, out = loop_of_chain(count)
    gradient = pytensor.grad(out.sum(), a)
    function = pytensor.function([xs, a], [out, gradient], mode=MODES[mode])
    data, step = np.array([0.3, -0.2, 0.1]), 1e-6
    up, down = (chain_by_hand(data, 0.9 + sign * step, count).sum() for sign in (1, -1))
    rows, slope = function(data, 0.9)
    np.testing.assert_allclose(rows, chain_by_hand(data, 0.9, count), rtol=1e-12)
    np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-5, atol=1e-12)
    assert len(kernels(function)) == 2
    assert not caplog.records


@pytest.mark.parametrize("count", [8, pytest.param(150, marks=pytest.mark.slow)])
def test_shift_register(count):
    """A loop whose steps read and write each state: LLVM is kept from comparing all of them."""
    weights = np.array([0.5, 0.3])
    states = scanlib.scan(
        lambda *hs: [*hs[1:], hs[0] * weights[0] + hs[1] * weights[1]],
        outputs_info=[pt.constant(0.1 * k) for k in range(count)],
        n_steps=20,
        return_updates=False,
    )
    function = pytensor.function([], pt.stack([state[-1] for state in states]), mode=MODES["numba"])
    h = 0.1 * np.arange(count)
    for _ in range(20):
        h = np.append(h[1:], h[:2] @ weights)
    np.testing.assert_allclose(function(), h, rtol=1e-12)


@pytest.mark.parametrize("is_diagonal", [False, True])
def test_factors_of_products_are_not_searched_for_diagonals(is_diagonal):
    """That goes through all of a long step for each product, unless a diagonal matrix is made."""
    h, W, x = pt.dvector("h"), pt.dmatrix("W"), pt.dvector("x")
    matrix = pt.diag(pt.exp(x)) if is_diagonal else W
    values = chain(h, x, x, LONG, pt)
    graph = FunctionGraph([h, W, x], [matrix @ (W @ values)], clone=False)
    run_query(CANONICAL, graph)
    asked = getattr(graph, "assumption_feature", None)
    assert any(key is DIAGONAL for _, key in getattr(asked, "cache", ())) == is_diagonal
    products = [node for node in graph.apply_nodes if isinstance(node.op, Dot)]
    assert not any(isinstance(node.inputs[0].owner_op, AllocDiag) for node in products)
