"""Work on whole sequences that moves into elementwise loops, and what is not stored for it."""

from functools import partial

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.tensor.basic import Join
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.subtensor import IncSubtensor

import scanlib
from scanlib.ops import ElemwiseScan, Scan
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.rewrites.over_time.written_rows import is_of_loop
from tests.modes import MODES


def autoregression(x, a):
    return scanlib.scan(
        lambda x, a, h: a * h + x, sequences=[x, a], outputs_info=[0.5], return_updates=False
    )


def walk(x, a):
    h, trace = 0.5, []
    for x_t, a_t in zip(x, a, strict=False):
        h = a_t * h + x_t
        trace.append(h)
    return np.array(trace)


def nodes(function, kind):
    return [node for node in function.maker.fgraph.toposort() if isinstance(node.op, kind)]


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    return rng.standard_normal(1100), rng.uniform(0.5, 1.0, 1100)


class TestSums:
    def test_a_cost_is_summed_in_the_loop(self, data):
        x, a = pt.dvectors("x", "a")
        cost = pt.log1p(autoregression(x, a) ** 2 + x[: a.shape[0]] ** 2 * 0).sum()
        function = pytensor.function([x, a], cost, mode=MODES["numba"])
        np.testing.assert_allclose(function(*data), np.log1p(walk(*data) ** 2).sum(), rtol=1e-12)

    def test_a_trace_that_only_the_cost_reads_is_not_stored(self, data):
        x, a = pt.dvectors("x", "a")
        cost = (autoregression(x, a) ** 2).sum()
        function = pytensor.function([x, a], cost, mode=MODES["numba"])
        assert not nodes(function, CAReduce)
        (loop,) = nodes(function, ElemwiseScan)
        assert loop.op.signature.untraced == (True,)
        np.testing.assert_allclose(function(*data), (walk(*data) ** 2).sum(), rtol=1e-12)
        assert function(np.zeros(0), np.zeros(0)) == 0.0

    def test_two_costs_of_one_loop(self, data):
        x, a = pt.dvectors("x", "a")
        y = autoregression(x, a)
        function = pytensor.function([x, a], [y.sum(), (y**2).sum(), y], mode=MODES["numba"])
        assert len(nodes(function, ElemwiseScan)) == 1
        assert not nodes(function, CAReduce)
        trace = walk(*data)
        for actual, wanted in zip(
            function(*data), [trace.sum(), (trace**2).sum(), trace], strict=True
        ):
            np.testing.assert_allclose(actual, wanted, rtol=1e-11)

    def test_a_sum_that_reads_another_result_of_the_loop_stays(self, data):
        """Inside the loop, the mean of the trace is not known yet."""
        x, a = pt.dvectors("x", "a")
        y = autoregression(x, a)
        function = pytensor.function([x, a], ((y - y.mean()) ** 2).sum(), mode=MODES["numba"])
        trace = walk(*data)
        np.testing.assert_allclose(function(*data), ((trace - trace.mean()) ** 2).sum(), rtol=1e-10)

    def test_single_precision_sums_are_collected_in_double(self):
        x = pt.fvector("x")
        y = scanlib.scan(
            lambda x, h: np.float32(0.5) * h + x,
            sequences=x,
            outputs_info=np.float32(0),
            return_updates=False,
        )
        function = pytensor.function([x], y.sum(), mode=MODES["numba"])
        values = np.full(200_000, 0.1, "float32")
        result = function(values)
        assert result.dtype == "float32"
        np.testing.assert_allclose(result, 0.2 * 200_000 - 0.2, rtol=2e-6)

    def test_rows_of_channels(self):
        x = pt.dmatrix("x")
        y = scanlib.scan(
            lambda x, h: pt.tanh(h + x), sequences=x, outputs_info=pt.zeros(3), return_updates=False
        )
        function = pytensor.function([x], (y**2).sum(), mode=MODES["numba"])
        assert not nodes(function, CAReduce)
        values = np.random.default_rng(1).standard_normal((20, 3))
        h, total = np.zeros(3), 0.0
        for row in values:
            h = np.tanh(h + row)
            total += (h**2).sum()
        np.testing.assert_allclose(function(values), total, rtol=1e-12)


class TestProducers:
    def test_elementwise_work_for_one_loop_moves_in(self, data):
        x, a = pt.dvectors("x", "a")
        y = autoregression(pt.exp(-x) * 2.0, pt.sigmoid(a))
        function = pytensor.function([x, a], y, mode=MODES["numba"])
        assert not [n for n in nodes(function, Elemwise) if n.outputs[0].type.ndim]
        sigmoid = 1 / (1 + np.exp(-data[1]))
        np.testing.assert_allclose(function(*data), walk(2 * np.exp(-data[0]), sigmoid), rtol=1e-11)

    def test_work_that_others_read_stays(self, data):
        x, a = pt.dvectors("x", "a")
        z = pt.exp(-x)
        function = pytensor.function([x, a], [autoregression(z, a), z], mode=MODES["numba"])
        assert [n for n in nodes(function, Elemwise) if n.outputs[0].type.ndim]
        np.testing.assert_allclose(function(*data)[0], walk(np.exp(-data[0]), data[1]), rtol=1e-11)

    def test_scalars_and_rows_that_are_broadcast(self):
        x, scale, shift = pt.dmatrix("x"), pt.dscalar("scale"), pt.dvector("shift")
        y = scanlib.scan(
            lambda x, h: 0.5 * h + x,
            sequences=x * scale + shift,
            outputs_info=pt.zeros(3),
            return_updates=False,
        )
        function = pytensor.function([x, scale, shift], y, mode=MODES["numba"])
        rng = np.random.default_rng(2)
        values, row = rng.standard_normal((6, 3)), rng.standard_normal(3)
        h, expected = np.zeros(3), []
        for x_t in values * 1.5 + row:
            h = 0.5 * h + x_t
            expected.append(h)
        np.testing.assert_allclose(function(values, 1.5, row), expected, rtol=1e-12)


class TestGradients:
    @pytest.mark.parametrize("lengths", [(9, 9), (9, 6), (5, 9), (0, 4)])
    @pytest.mark.parametrize("linker", ["numba", "c"])
    def test_rows_that_no_step_reads_have_no_gradient(self, lengths, linker):
        x, a = pt.dvectors("x", "a")
        cost = (autoregression(x, a) ** 2).sum()
        gradients = pytensor.grad(cost, [x, a])
        function = pytensor.function([x, a], gradients, mode=MODES[linker])
        assert not nodes(function, Scan)
        rng = np.random.default_rng(3)
        values = [rng.standard_normal(length) for length in lengths]
        results = function(*values)
        for position, (result, value) in enumerate(zip(results, values, strict=True)):
            assert result.shape == value.shape
            for i in range(len(value)):
                moved = [[v.copy() for v in values] for _ in range(2)]
                moved[0][position][i] += 1e-6
                moved[1][position][i] -= 1e-6
                up, down = ((walk(*m) ** 2).sum() for m in moved)
                np.testing.assert_allclose(result[i], (up - down) / 2e-6, rtol=1e-6, atol=1e-7)

    @pytest.mark.parametrize("mode", ["numba", "c"])
    def test_padding_is_a_view_where_lengths_are_equal(self, data, mode):
        x, a = pt.dvectors("x", "a")
        gradients = pytensor.grad((autoregression(x, a) ** 2).sum(), [x, a])
        function = pytensor.function([x, a], gradients, mode=MODES[mode])
        assert len(nodes(function, PaddedRows)) == 2

    def test_a_row_written_to_many_places(self):
        x, n = pt.tensor("x", dtype="float64", shape=(1,)), pt.lscalar("n")
        h, y = scanlib.scan(
            lambda x, h: [pt.sin(x + h), pt.cos(h)], x, [0.3, None], return_updates=False
        )
        function = pytensor.function([x, n], [h, pt.zeros(n)[:3].inc(2 * y)], mode=MODES["c"])
        np.testing.assert_allclose(function([1.0], 5)[1], 2 * np.cos(0.3) * (np.arange(5) < 3))

    @pytest.mark.parametrize("backwards", [False, True])
    @pytest.mark.parametrize("mode", ["numba", "c"])
    def test_a_row_that_only_the_run_tells_to_be_single_is_repeated(self, mode, backwards):
        x, size, n = pt.dvector("x"), pt.dvector("size"), pt.lscalar("n")
        loop = partial(scanlib.scan, go_backwards=backwards, return_updates=False)
        h = loop(lambda x, h: pt.sin(x + h), x, 0.3)
        h = h[::-1] if backwards else h  # in the order in which it is stored
        zeros = pt.zeros_like(size)
        results = [zeros[:2].inc(h)[2:].inc(size[2:]), zeros[2:].inc(h), zeros[:n].inc(h)]
        function = pytensor.function([x, size, n], results, mode=MODES[mode])
        given, row, expected = np.arange(5.0), np.sin(0.7 + 0.3), np.zeros((3, 5))
        expected[0, :2], expected[0, 2:] = row, given[2:]
        expected[1, 2:], expected[2, :3] = row, row
        for result, wanted in zip(function([0.7], given, 3), expected, strict=True):
            np.testing.assert_allclose(result, wanted)
        with pytest.raises(ValueError, match=r"assign|broadcast"):
            function([0.7, 0.1, 0.2], given, 3)

    def test_what_is_read_several_times_is_looked_at_once(self):
        x = pt.dvector("x")
        for start, expected in ((x, False), (autoregression(x, x), True)):
            y = start
            for _ in range(60):  # seen once for each path, it would never end
                y = y * pt.sigmoid(y)
            assert is_of_loop(y) is expected

    @pytest.mark.parametrize("mode", ["numba", "c"])
    def test_matrices_of_each_step(self, mode):
        A, b, start = pt.dtensor3("A"), pt.dmatrix("b"), pt.dvector("start")
        h = scanlib.scan(lambda A, b, h: A @ h + b, [A, b], start, return_updates=False)
        gradients = pytensor.grad((h**2).sum(), [A, b])
        function = pytensor.function([A, b, start], gradients, mode=MODES[mode])
        assert len(nodes(function, PaddedRows)) == 2
        assert not nodes(function, IncSubtensor)
        rng = np.random.default_rng(4)
        matrices, rows, first = rng.normal(size=(9, 3, 3)), rng.normal(size=(9, 3)), np.ones(3)
        for n, m in ((9, 9), (9, 5), (5, 9)):
            history = [first]
            for matrix, row in zip(matrices[:n], rows[:m], strict=False):
                history.append(matrix @ history[-1] + row)
            by_matrices, by_rows, owed = np.zeros((n, 3, 3)), np.zeros((m, 3)), np.zeros(3)
            for t in reversed(range(min(n, m))):
                owed = owed + 2 * history[t + 1]
                by_matrices[t], by_rows[t] = np.outer(owed, history[t]), owed
                owed = matrices[t].T @ owed
            for actual, expected in zip(
                function(matrices[:n], rows[:m], first), (by_matrices, by_rows), strict=True
            ):
                np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-11)


def test_switched_off(data):
    x, a = pt.dvectors("x", "a")
    cost = (autoregression(2.0 * x, a) ** 2).sum()
    with pytensor.config.change_flags(scanlib__lower=False):
        function = pytensor.function([x, a], cost, mode=MODES["numba"])
    assert not nodes(function, ElemwiseScan)
    np.testing.assert_allclose(function(*data), (walk(2 * data[0], data[1]) ** 2).sum(), rtol=1e-11)


def test_a_loop_that_starts_from_the_first_row():
    """The gradient of an array whose first row is the start and whose others are read is joined."""
    x, a = pt.dvector("x"), pt.dscalar("a")
    y = scanlib.scan(lambda x, h, a: a * h + x, x[1:], x[0], a, return_updates=False)
    gradient = pytensor.grad((y**2).sum(), x)
    plain = MODES["c"].excluding("scanlib_joined_rows")
    joined, written = (
        pytensor.function([x, a], gradient, mode=mode) for mode in (MODES["c"], plain)
    )
    for rows in (1, 2, 7):
        values = np.random.default_rng(rows).normal(size=rows), 0.7
        np.testing.assert_allclose(joined(*values), written(*values), rtol=1e-13)
    assert inner_nodes(joined, Join)


def inner_nodes(function, kind):
    """The nodes of a kind, also inside of nodes that hold graphs."""
    every = function.maker.fgraph.toposort()
    inside = (getattr(node.op, "fgraph", None) for node in every)
    every = [*every, *(own for graph in inside if graph is not None for own in graph.toposort())]
    return [node for node in every if isinstance(node.op, kind)]


@pytest.mark.parametrize("mode", ["numba", "c", "JAX"])
def test_slices_that_end_at_the_first_row_hold_none(mode):
    if mode == "JAX":
        pytest.importorskip("jax")
    x = pt.dvector("x")
    trace = scanlib.scan(lambda x, h: pt.sin(x + h), x, 0.3, return_updates=False)
    history = trace.owner.inputs[0]
    empty = [trace[:0], history[1:0], history[-1:-2]]
    outputs = [*((2 * rows + 1).sum() for rows in empty), *(rows.shape[0] for rows in empty)]
    gradient = pytensor.grad(trace[-1] + outputs[0], x)
    expected = pytensor.grad(trace[-1], x)
    function = pytensor.function([x], [*outputs, gradient - expected], mode=MODES.get(mode, mode))
    *counts, difference = function(np.array([0.2, 0.4, 0.7]))
    assert not np.any(counts)
    np.testing.assert_allclose(difference, np.zeros(3), atol=1e-14)
