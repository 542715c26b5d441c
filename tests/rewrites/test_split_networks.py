"""Networks taken apart; flags, batches and explanations of the split."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape

import scanlib
from scanlib.ops import Scan
from scanlib.ops.row_ops.step_products import StepProducts
from tests.checks import assert_derivatives, assert_same
from tests.modes import MODES
from tests.split_cases import (
    MAPS,
    PRODUCTS,
    K,
    N,
    T,
    build,
    core,
    count,
    loops_of,
    network,
    unfused,
)


class TestNetworks:
    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
    @pytest.mark.parametrize("batch", [True, False])
    def test_weight_gradients_are_single_products(self, kind, batch):
        inputs, states, weights, _ = network(kind, batch)
        gradients = pytensor.grad(pt.sum(states**2), weights)
        function = pytensor.function(inputs, gradients, mode=unfused("c"))
        forward, backward = loops_of(function)
        # One product for each weight, and of one series x W before the loop.
        assert count(function, PRODUCTS) == len(weights) + (not batch)
        products = [n for n in forward.op.body.toposort() if isinstance(n.op, Dot)]
        assert len(products) == len(weights) - (not batch)
        for output in function.maker.fgraph.outputs:
            product = output if isinstance(output.owner.op, PRODUCTS) else output.owner.inputs[0]
            assert isinstance(product.owner.op, PRODUCTS)
        # The backward loop multiplies with the transposed weights alone, and sums nothing.
        products = [n for n in backward.op.body.toposort() if isinstance(n.op, Dot)]
        assert len(products) == len(weights) - 1
        assert forward.op.signature.n_carries == 0
        assert backward.op.signature.n_carries == (2 if kind == "lstm" else 1)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["rnn", "lstm"])
    def test_in_numba_mode_they_are_single_nodes(self, kind):
        inputs, states, weights, values = network(kind)
        gradients = pytensor.grad(pt.sum(states**2), weights)
        function = pytensor.function(inputs, gradients, mode=MODES["numba"])
        nodes = function.maker.fgraph.toposort()
        assert count(function, StepProducts) == len(weights)
        assert not any(isinstance(core(node), Dot | BatchedDot | Reshape) for node in nodes)
        for output in function.maker.fgraph.outputs:
            assert isinstance(output.owner.op, StepProducts)
            assert output.owner.op.total
        expected = pytensor.function(inputs, gradients, mode=MODES["c"])(*values)
        assert_same(function(*values), expected, rtol=1e-9, atol=1e-11)

    @pytest.mark.parametrize("kind", ["gru", "lstm"])
    @pytest.mark.parametrize("stops", [False, True])
    def test_the_backward_loop_computes_no_gate_again(self, kind, stops):
        inputs, states, weights, _ = network(kind, stops=stops)
        gradients = pytensor.grad(pt.sum(states**2), weights)
        function = pytensor.function(inputs, gradients, mode=unfused("c"))
        forward, backward = loops_of(function)
        assert not any("sigmoid" in str(n.op).lower() for n in backward.op.body.toposort())
        assert forward.op.signature.n_outputs > 0

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
    @pytest.mark.parametrize("steps", [T, 1, 0])
    @pytest.mark.parametrize("batch, stops", [(True, False), (False, False), (True, True)])
    def test_gradients(self, kind, steps, batch, stops):
        inputs, states, _, values = network(kind, batch, stops)
        values[0] = values[0][:steps]
        outputs = [pt.sum(states**2), *pytensor.grad(pt.sum(states**2), inputs)]
        with pytensor.config.change_flags(scanlib__split=False):
            plain = pytensor.function(inputs, outputs, mode=MODES["c"])
        function = pytensor.function(inputs, outputs, mode=MODES["c"])
        assert_same(function(*values), plain(*values), rtol=1e-9, atol=1e-11)

    @pytest.mark.slow
    @pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
    def test_derivatives_in_all_modes(self, kind, mode):
        inputs, states, _, values = network(kind)
        values[0] = values[0][:3]
        walk = pytensor.function(inputs, pt.sum(pt.sin(states)), mode=MODES["py"])
        assert_derivatives(
            pt.sum(pt.sin(states)),
            dict(zip(inputs, values, strict=True)),
            lambda *arrays: float(walk(*arrays)),
            mode,
            order=1,
        )


class TestFlags:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "flag, scans, products",
        [
            ("scanlib__split", 2, 0),
            ("scanlib__split_maps", 2, 2),
            ("scanlib__split_sums", 2, 1),
        ],
    )
    def test_networks(self, flag, scans, products):
        inputs, states, weights, values = network("lstm", batch=False)
        outputs = pytensor.grad(pt.sum(states**2), weights)
        expected = pytensor.function(inputs, outputs, mode=unfused("c"))(*values)
        with pytensor.config.change_flags(**{flag: False}):
            function = pytensor.function(inputs, outputs, mode=unfused("c"))
        assert count(function, Scan) == scans
        assert count(function, PRODUCTS) == products
        assert_same(function(*values), expected)

    @pytest.mark.parametrize("flag", ["scanlib__split", "scanlib__split_maps"])
    def test_maps(self, flag):
        built = build(MAPS["a product"])
        with pytensor.config.change_flags(**{flag: False}):
            function = pytensor.function(built.inputs, built.traces, mode=MODES["c"])
        assert count(function, Scan) == 1


class TestBatches:
    def test_a_batch_of_loops_reads_its_matrix_once_for_all_rows(self):
        """One series multiplies before the loop; a step of many series reads `V` once already."""
        x, h, U, V = pt.dmatrix("x"), pt.dvector("h"), pt.dmatrix("U"), pt.dmatrix("V")
        trace = scanlib.scan(
            lambda x, h, U, V: pt.tanh(x @ V + h @ U), x, h, [U, V], return_updates=False
        )
        xs, hs = pt.dtensor3("xs"), pt.dmatrix("hs")
        batch = vectorize_graph(trace, {x: xs, h: hs})
        function = pytensor.function([xs, hs, U, V], batch, mode=unfused("c"))
        (loop,) = loops_of(function)
        inner = [n for n in loop.op.body.toposort() if isinstance(core(n), Dot)]
        assert len(inner) == 2
        single = pytensor.function([x, h, U, V], trace, mode=unfused("c"))
        (loop,) = loops_of(single)
        assert sum(isinstance(core(n), Dot) for n in loop.op.body.toposort()) == 1
        rng = np.random.default_rng(0)
        values = [0.5 * rng.standard_normal(s) for s in ((4, T, N), (4, N), (N, N), (N, N))]
        a, b, u, v = values
        expected = np.empty((4, T, N))
        for k in range(4):
            row = b[k]
            for t in range(T):
                row = expected[k, t] = np.tanh(a[k, t] @ v + row @ u)
        np.testing.assert_allclose(function(*values), expected, rtol=1e-10)

    def test_a_batch_of_maps_has_no_loop(self):
        x, W = pt.dmatrix("x"), pt.dmatrix("W")
        y = scanlib.map(lambda x: x @ W + 1, x, return_updates=False)
        xs = pt.dtensor3("xs")
        function = pytensor.function([xs, W], vectorize_graph(y, {x: xs}), mode=MODES["c"])
        assert count(function, Scan) == 0
        a, b = np.random.default_rng(0).standard_normal((2, T, N)), np.ones((N, K))
        np.testing.assert_allclose(function(a, b), a @ b + 1, rtol=1e-12)


class TestExplain:
    def test_it_says_what_left_a_loop(self):
        inputs, states, weights, _ = network("lstm", batch=False)
        gradient = pytensor.grad(states.sum(), weights)
        said = scanlib.explain(pytensor.function(inputs, gradient, mode=MODES["c"]))
        assert ("lstm", "1 value computed for all steps before the loop") in said.splits
        (backward,) = (what for name, what in said.splits if name == "lstm_gradient")
        assert "2 sums taken over all steps at once" in backward
        assert "computed outside 'lstm': 1 value" in str(said)
        assert "computed outside &#x27;lstm&#x27;: 1 value" in said._repr_html_()
        assert said.to_dict()["splits"] == said.splits

    def test_it_says_that_no_loop_remains(self):
        x, V = pt.dmatrix("x"), pt.dmatrix("V")
        y = scanlib.map(lambda x: x @ V, x, name="map of rows", return_updates=False)
        said = scanlib.explain(y, MODES["c"])
        assert said.loops == []
        assert said.splits == [("map of rows", "1 output computed for all steps; no loop remains")]
        assert "no loop remains" in str(said)
