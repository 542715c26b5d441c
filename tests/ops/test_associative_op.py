"""`AssociativeScan` as an Op: derivatives, batches, the tree, and what PyTensor asks of an Op."""

import pickle

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from pytensor.gradient import pushforward
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors, explicit_graph_inputs

import scanlib
from scanlib.ops.loop import Loop
from scanlib.ops.lowered.associative_scan import AssociativeScan, combines
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from tests.checks import assert_derivatives, assert_same, evaluate
from tests.combine import affine, argmax, data, running, running_one, variables
from tests.derivatives import directional_derivative, random_directions


class TestDerivatives:
    @pytest.mark.slow
    @pytest.mark.parametrize("reverse", [False, True])
    def test_affine(self, mode, reverse):
        a, b = pt.dvector("a"), pt.dmatrix("b")
        x = {a: data(4), b: data(4, 2, seed=1)}
        weights = data(4, 2, seed=2)
        wide = pt.repeat(a[:, None], 2, axis=1)
        _, h = scanlib.associative_scan(affine, (wide, b), reverse=reverse)

        def reference(a, b):
            _, h = running(affine, [np.repeat(a[:, None], 2, axis=1), b], reverse)
            return np.sum(weights * h**2)

        assert_derivatives(pt.sum(weights * h**2), x, reference, mode)

    @pytest.mark.slow
    def test_matrices_and_captured_variables(self, mode):
        x, w = pt.dtensor3("x"), pt.dmatrix("w")
        values = {x: data(4, 2, 2), w: data(2, 2, seed=1)}
        y = scanlib.associative_scan(lambda a, b: a @ w @ b, x)

        def reference(x, w):
            return np.sum(np.sin(running_one(lambda a, b: a @ w @ b, x)))

        assert_derivatives(pt.sum(pt.sin(y)), values, reference, mode)

    @pytest.mark.slow
    @pytest.mark.parametrize("reverse", [False, True])
    def test_reduction_and_scan_together(self, reverse, fast_mode):
        x = pt.tensor("x", dtype="float64", shape=(5, 2, 2))
        total = scanlib.associative_reduce(pt.dot, x, reverse=reverse)
        rows = scanlib.associative_scan(pt.dot, x, reverse=reverse)

        def reference(x):
            y = running_one(np.dot, x, reverse)
            return np.sum(y[0 if reverse else -1] ** 2) + np.sum(y[1] * y[2])

        cost = pt.sum(total**2) + pt.sum(rows[1] * rows[2])
        assert_derivatives(cost, {x: data(5, 2, 2)}, reference, fast_mode)

    def test_parts_without_derivatives(self, fast_mode):
        """A part that is not read has a zero derivative, an index has none."""
        x, k = pt.dvector("x"), pt.lvector("k")
        value, _ = scanlib.associative_scan(lambda a, b: argmax(a, b, pt), (x, k))
        data_ = np.array([1.0, 3.0, 2.0, 5.0])
        gradient = pytensor.grad(value.sum(), x)
        assert_same(evaluate([gradient], {x: data_, k: np.arange(4)}, fast_mode), [[1.0, 2, 0, 1]])
        a, b = pt.dvectors("a", "b")
        first, _ = scanlib.associative_scan(affine, (a, b))
        with pytest.raises(pytensor.gradient.DisconnectedInputError):
            pytensor.grad(first.sum(), b)

    def test_only_later_elements_count(self, mode):
        """The coefficient of the first affine map is never read."""
        a, b = pt.dvectors("a", "b")
        _, h = scanlib.associative_scan(affine, (a, b))
        f = pytensor.function([a, b], pytensor.grad(h.sum(), [a, b]), mode=mode)
        assert_same(f([1.0, 2, 3], [1.0, 1, 1]), [[0.0, 4, 3], [9.0, 4, 1]])
        assert_same(f([2.0], [1.0]), [[0.0], [1.0]])
        assert_same(f([], []), [np.zeros(0), np.zeros(0)])

    @pytest.mark.parametrize("reverse", [False, True])
    def test_no_elements(self, reverse, mode):
        """Gradients of nothing are empty, also with respect to variables from outside."""
        x, w = pt.dmatrix("x"), pt.dvector("w")
        y = scanlib.associative_scan(lambda a, b: a * b * w, x, reverse=reverse)
        f = pytensor.function([x, w], [y, *pytensor.grad((y**2).sum(), [x, w])], mode=mode)
        assert_same(f(np.zeros((0, 3)), np.ones(3)), [np.zeros((0, 3))] * 2 + [np.zeros(3)])

    @pytest.mark.parametrize("length", [1, 4])
    @pytest.mark.parametrize("reverse", [False, True])
    def test_forward_mode(self, length, reverse, fast_mode):
        values = [data(length, 2), data(length, 2, seed=1)]
        tangents = random_directions(values, seed=2)
        inputs = variables(values)
        _, h = scanlib.associative_scan(affine, tuple(inputs), reverse=reverse)
        expected = directional_derivative(
            lambda a, b: running(affine, [a, b], reverse)[1], values, tangents
        )
        for direct in (True, False):
            jvp = pushforward(h, inputs, tangents, use_op_pushforward=direct)
            actual = evaluate(jvp, dict(zip(inputs, values, strict=True)), fast_mode)
            np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-9)

    def test_one_loop_forward_and_one_back(self):
        """Value and gradient of a reduction share the forward loop, and store what they need."""
        x = pt.dtensor3("x")
        total = scanlib.associative_reduce(pt.dot, x)
        f = pytensor.function([x], [total, pytensor.grad(total.sum(), x)], mode="CVM")
        nodes = f.maker.fgraph.apply_nodes
        assert sum(isinstance(n.op, Scan | LinearScan) for n in nodes) == 2


class TestBatches:
    @pytest.mark.parametrize("which", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
    @pytest.mark.parametrize("reverse", [False, True])
    def test_some_inputs_are_batched(self, which, reverse, fast_mode):
        a, b, w = pt.matrix("a"), pt.matrix("b"), pt.vector("w")
        outputs = scanlib.associative_scan(
            lambda p, q: (p[0] * q[0], (p[1] * q[0]) * w + q[1]), (a, b), reverse=reverse
        )
        values = [data(4, 3), data(4, 3, seed=1), data(3, seed=2)]
        cores = [a, b, w]
        batched, given_, sizes = {}, [], []
        for core, value, own in zip(cores, values, which, strict=True):
            new = pt.tensor(dtype="float64", shape=(None,) * (core.ndim + own)) if own else core
            batched[core] = new
            given_.append(np.stack([value, 2 * value - 1]) if own else value)
            sizes.append(own)
        changed = {core: new for core, new in batched.items() if core is not new}
        new_outputs = vectorize_graph([*outputs], changed)
        assert all(map(loops_above, new_outputs))
        results = pytensor.function([*batched.values()], new_outputs, mode=fast_mode)(*given_)
        single = pytensor.function(cores, [*outputs], mode=fast_mode)
        for i in range(2):
            rows = [x[i] if own else x for x, own in zip(given_, sizes, strict=True)]
            for actual, expected in zip(results, single(*rows), strict=True):
                np.testing.assert_allclose(
                    actual[i] if actual.ndim > expected.ndim else actual, expected, rtol=1e-12
                )

    @pytest.mark.slow
    def test_two_dimensions_that_broadcast(self, mode):
        x, w = pt.tensor3("x"), pt.matrix("w")
        y = scanlib.associative_scan(lambda a, b: a @ w @ b, x)
        x2 = pt.tensor("x2", dtype="float64", shape=(2, 1, None, None, None))
        w2 = pt.tensor("w2", dtype="float64", shape=(1, 3, None, None))
        batch = vectorize_graph(y, {x: x2, w: w2})
        xs, ws = data(2, 1, 4, 2, 2), data(1, 3, 2, 2, seed=1)
        (actual,) = evaluate([batch], {x2: xs, w2: ws}, mode)
        assert actual.shape == (2, 3, 4, 2, 2)
        for i, j in np.ndindex(2, 3):
            expected = running_one(lambda a, b, w=ws[0, j]: a @ w @ b, xs[i, 0])
            np.testing.assert_allclose(actual[i, j], expected, rtol=1e-12)

    def test_a_batch_of_gradients(self, fast_mode):
        a, b = pt.dvectors("a", "b")
        gradient = pytensor.grad(scanlib.associative_scan(affine, (a, b))[1].sum(), [a, b])
        many = pt.dmatrices("as", "bs")
        values = [data(3, 4), data(3, 4, seed=1)]
        batch = vectorize_graph(gradient, dict(zip([a, b], many, strict=True)))
        results = evaluate(batch, dict(zip(many, values, strict=True)), fast_mode)
        one = pytensor.function([a, b], gradient, mode=fast_mode)
        for i in range(3):
            assert_same([r[i] for r in results], one(values[0][i], values[1][i]))


def loops_above(variable):
    """The loops above a variable that rows could be combined for in a tree."""
    nodes = (value.owner for value in ancestors([variable]))
    return [node for node in nodes if node is not None and combines(node.op)]


class TestOp:
    def node(self, **options):
        a, b = pt.dvectors("a", "b")
        (node,) = set(loops_above(scanlib.associative_scan(affine, (a, b), **options)[0]))
        return node

    def test_equality(self):
        first, second = self.node(), self.node()
        assert first.op == second.op
        assert hash(first.op) == hash(second.op)
        assert first.op != self.node(reverse=True).op

    def test_a_loop_that_promises_nothing_is_another(self):
        loop = Loop.from_node(self.node())
        loop.associative = False
        assert loop.apply().node.op != self.node().op
        assert not combines(loop.apply().node.op)

    @pytest.mark.parametrize("reverse", [False, True])
    def test_in_place_of_the_loop(self, reverse):
        """The Op that stands for a tree runs by itself, and its shape is known without running."""
        node = self.node(reverse=reverse)
        op = AssociativeScan(pickle.loads(pickle.dumps(node.op)))
        assert str(op) == "AssociativeScan{associative_scan}"
        outputs = op.make_node(*node.inputs).outputs
        arrays = list(explicit_graph_inputs(outputs))
        f = pytensor.function(arrays, outputs, mode=Mode("py", None))
        for length in (1, 5):
            values = [data(length), data(length, seed=1)]
            assert_same(f(*values), running(affine, values, reverse))
        shape = pytensor.function(arrays, outputs[1].shape, mode="CVM")
        assert not any(isinstance(n.op, AssociativeScan) for n in shape.maker.fgraph.apply_nodes)
        assert shape(data(4), data(4)) == [4]
