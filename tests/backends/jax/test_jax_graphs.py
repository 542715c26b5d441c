"""Loops taken apart, nested, with taps or random draws under the JAX linker."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.replace import clone_replace, vectorize_graph

import scanlib
from scanlib.ops.row_ops.step_products import StepProducts
from scanlib.ops.scan import Scan
from tests.checks import assert_derivatives, assert_same, in_python
from tests.jax_loops import compiled, loop_ops, run_python
from tests.reference import reference_scan

pytest.importorskip("jax", reason="jax is not installed")

from pytensor.compile.mode import get_mode

JAX = get_mode("JAX")
rng = np.random.default_rng(11)


class TestSplit:
    """Loops are taken apart where all lengths are known when JAX compiles."""

    def network(self):
        X, W, U = pt.dtensor3("X"), pt.dmatrix("W"), pt.dmatrix("U")
        h = scanlib.scan(
            lambda x, h, W, U: pt.tanh(x @ W + h @ U),
            X,
            pt.zeros((2, 3)),
            [W, U],
            return_updates=False,
        )
        return [X, W, U], pt.sum(h**2)

    def walk(self, X, W, U):
        h, total = np.zeros((2, 3)), 0.0
        for x in X:
            h = np.tanh(x @ W + h @ U)
            total += np.sum(h**2)
        return total

    def values(self, steps=5):
        rng = np.random.default_rng(0)
        weights = [0.5 * rng.standard_normal((n, 3)) for n in (4, 3)]
        return [rng.standard_normal((steps, 2, 4)), *weights]

    def test_weight_gradients_are_single_products(self):
        inputs, cost = self.network()
        function = compiled(inputs, pytensor.grad(cost, inputs[1:]))
        loops = [op for op in loop_ops(function) if isinstance(op, Scan)]
        sums = [op.signature.n_carries for op in loops]
        assert sorted(sums) == [0, 1]  # the adjoint alone
        nodes = function.maker.fgraph.apply_nodes
        assert sum(isinstance(node.op, StepProducts) for node in nodes) == 2

    def test_derivatives(self):
        inputs, cost = self.network()
        values = dict(zip(inputs, self.values(), strict=True))
        assert_derivatives(cost, values, self.walk, JAX, order=1)

    @pytest.mark.parametrize("steps", [1, 0])
    def test_few_steps(self, steps):
        inputs, cost = self.network()
        outputs = [cost, *pytensor.grad(cost, inputs)]
        values = self.values(steps)
        plain = in_python(inputs, outputs)
        assert_same(compiled(inputs, outputs)(*values), plain(*values), rtol=1e-10)

    def test_a_map_is_no_loop(self):
        x, W = pt.dmatrix("x"), pt.dmatrix("W")
        y = scanlib.map(lambda r, W: pt.tanh(r @ W), x, non_sequences=W, return_updates=False)
        function = compiled([x, W], y)
        assert not any(isinstance(op, Scan) for op in loop_ops(function))
        a, b = np.random.default_rng(0).standard_normal((2, 3, 3))
        np.testing.assert_allclose(function(a, b), np.tanh(a @ b), rtol=1e-12)

    def test_a_length_that_a_value_decides_keeps_loops_whole(self):
        x, W, limit = pt.dmatrix("x"), pt.dmatrix("W"), pt.dscalar("limit")
        y = scanlib.scan(
            lambda r, W: (r @ W, scanlib.until(pt.sum(r) > limit)), x, non_sequences=W,
            return_updates=False,
        )  # fmt: skip
        function = compiled([x, W, limit], y)
        assert any(isinstance(op, Scan) for op in loop_ops(function))
        a, b = np.ones((5, 2)) * np.arange(5)[:, None], np.eye(2)
        np.testing.assert_allclose(function(a, b, 3.5), a[:3])


class TestOtherLoops:
    @pytest.mark.slow
    def test_nested(self):
        X, a = pt.dmatrix("X"), pt.dscalar("a")

        def outer(x, h):
            inner = scanlib.scan(
                lambda xi, g: pt.sin(g * a + xi), x, h, go_backwards=True, return_updates=False
            )
            return inner[-1]

        h = scanlib.scan(outer, X, a, return_updates=False)

        def reference(X, a):
            h, total = a, 0.0
            for x in X:
                for xi in x[::-1]:
                    h = np.sin(h * a + xi)
                total += h**2
            return total

        values = {X: rng.normal(size=(3, 2)), a: np.array(0.6)}
        assert_derivatives((h**2).sum(), values, reference, JAX)

    def test_taps_and_several_states(self):
        x, y0, z0 = pt.dvector("x"), pt.dvector("y0"), pt.dvector("z0")

        def step(xp):
            return lambda x0, x1, y1, y3, z2, w: [
                xp.tanh(y1 - 0.5 * y3 + x0), 0.5 * z2 + y1 * x1, xp.sin(w) * y3,
            ]  # fmt: skip

        outputs = scanlib.scan(
            step(pt),
            {"input": x, "taps": [0, 1]},
            [{"initial": y0, "taps": [-1, -3]}, {"initial": z0, "taps": [-2]}, None],
            pt.constant(0.7),
            return_updates=False,
        )
        values = rng.normal(size=7), rng.normal(size=3), rng.normal(size=2)
        expected = reference_scan(
            step(np),
            [{"input": values[0], "taps": [0, 1]}],
            [
                {"initial": values[1], "taps": [-1, -3]},
                {"initial": values[2], "taps": [-2]},
                None,
            ],
            [0.7],
        )
        results = compiled([x, y0, z0], outputs)(*values)
        assert_same([np.asarray(r) for r in results], expected)

    @pytest.mark.parametrize("length", [0, 1, 5])
    def test_rows_read_at_places_of_their_own(self, length):
        """A batch of all steps reads them with a range as long as the loop."""
        x, places, weights = pt.dmatrix("x"), pt.lvector("places"), pt.dmatrix("weights")
        y = scanlib.scan(
            lambda row, place, weights: (weights @ row) * row[place],
            [x, places],
            None,
            weights,
            return_updates=False,
        )
        rows, matrix = rng.normal(size=(length, 3)), rng.normal(size=(3, 3))
        at = rng.integers(0, 3, size=length)

        def plain(rows, matrix):
            found = [(matrix @ row) * row[i] for row, i in zip(rows, at, strict=True)]
            return np.array(found).reshape(length, 3)

        results = compiled([x, places, weights], [y, pt.arange(x.shape[0])])(rows, at, matrix)
        assert_same([np.asarray(r) for r in results], [plain(rows, matrix), np.arange(length)])
        cost = clone_replace(pt.sin(y).sum(), {places: pt.constant(at)})
        assert_derivatives(
            cost,
            {x: rows, weights: matrix},
            lambda rows, matrix: np.sin(plain(rows, matrix)).sum(),
            JAX,
            order=1,
        )

    def test_random_draws(self):
        """JAX draws other numbers than NumPy; they differ from step to step and call to call."""
        stream = pt.random.RandomStream(3)
        draws, updates = scanlib.scan(lambda: stream.normal(size=2), n_steps=50)
        with pytest.warns(UserWarning, match="copy will be used"):
            function = pytensor.function([], draws, updates=updates, mode=JAX)
        first, second = np.asarray(function()), np.asarray(function())
        both = np.concatenate([first, second]).ravel()
        assert first.shape == (50, 2)
        assert len(set(both.tolist())) == 200
        assert abs(both.mean()) < 0.4
        assert 0.7 < both.std() < 1.3

    @pytest.mark.slow
    def test_single_precision(self):
        """With ``floatX=float32`` PyTensor turns 64-bit numbers of JAX off."""
        code = (
            "import numpy as np, pytensor, pytensor.tensor as pt, scanlib\n"
            "x = pt.fmatrix()\n"
            "y = scanlib.scan(lambda x, y: 0.5 * y + x, x, pt.zeros(3), return_updates=False)\n"
            "f = pytensor.function([x], [y, pytensor.grad(y.sum(), x)], mode='JAX')\n"
            "a, b = f(np.ones((2, 3), 'float32'))\n"
            "assert a.dtype == b.dtype == 'float32'\n"
            "assert a.tolist() == [[1.0] * 3, [1.5] * 3] and b.tolist() == [[1.5] * 3, [1.0] * 3]"
        )
        run_python(code, floatX="float32")

    def test_shape_errors(self):
        x, h0 = pt.dmatrix("x"), pt.dvector("h0")
        h = scanlib.scan(lambda x, h: h + pt.tanh(x), x, h0, return_updates=False)
        with pytest.raises(ValueError):  # noqa: PT011 -- a StepShapeError or XLA's
            compiled([x, h0], h)(np.ones((3, 2)), np.ones(1))


def test_items_of_rows_in_a_step():
    """PyTensor compares the sizes of index arrays side by side; JAX must know the result."""
    x, y, w = pt.dtensor3("x"), pt.lmatrix("y"), pt.dmatrix("w")

    def step(x, y, total, w):
        scores = pt.special.log_softmax(x @ w, axis=1)
        return total + scores[pt.arange(x.shape[0]), y].sum()

    total = scanlib.scan(step, [x, y], pt.constant(0.0), w, return_updates=False)[-1]
    function = compiled([x, y, w], [total, *pytensor.grad(total, [x, w])])
    values = rng.normal(size=(4, 3, 2)), rng.integers(0, 5, (4, 3)), rng.normal(size=(2, 5))
    scores = values[0] @ values[2]
    scores = scores - np.log(np.exp(scores).sum(axis=2, keepdims=True))
    chosen = np.eye(5)[values[1]]
    owed = chosen - np.exp(scores)
    expected = [(scores * chosen).sum(), owed @ values[2].T]
    expected.append(np.einsum("tbi,tbj->ij", values[0], owed))
    assert_same([np.asarray(value) for value in function(*values)], expected)


def test_slices_of_slices_that_loops_read():
    """Sequences are cut to the shortest one; their gradient reads a slice of that."""
    A, x = pt.dtensor3("A"), pt.dmatrix("x")
    h = scanlib.scan(lambda A, x, h: A @ h + x, [A, x], pt.zeros(2), return_updates=False)
    outputs = [h, *pytensor.grad((h**2).sum(), [A, x])]
    values = rng.normal(size=(5, 2, 2)), rng.normal(size=(4, 2))
    found = [np.asarray(value) for value in compiled([A, x], outputs)(*values)]
    assert_same(found, in_python([A, x], outputs)(*values))


WIDE = np.linspace(-1, 1, 6)


@pytest.mark.parametrize("as_steps", [False, True], ids=["kernels", "lax"])
@pytest.mark.parametrize("name", ["read", "written"])
def test_slices_of_a_known_length(name, as_steps, monkeypatch):
    """Between places that steps compute, of one array and of a batch of them."""
    x, X = pt.dvector("x"), pt.dmatrix("X")
    n = x.shape[0]
    if name == "read":
        rows = scanlib.scan(
            lambda t: (x[t - 6 : t] * WIDE).std(), pt.arange(6, n), return_updates=False
        )
    else:
        rows = scanlib.scan(
            lambda t, h: h[t].set(pt.tanh(h[t - 6 : t] @ WIDE + x[t]))[t - 3 : t + 3].inc(WIDE),
            pt.arange(6, n),
            pt.ones(n + 3),
            return_updates=False,
        )[-1]
    if as_steps:
        monkeypatch.setattr(pytensor.config, "cxx", "")
    data = rng.uniform(0.1, 0.9, (3, 9))
    for inp, result, given in ((x, rows, data[0]), (X, vectorize_graph(rows, {x: X}), data)):
        outputs = [result, pytensor.grad(pt.tanh(result).sum(), inp)]
        expected = pytensor.function([inp], outputs, mode="FAST_COMPILE")(given)
        found = pytensor.function([inp], outputs, mode=JAX)(given)
        assert_same([np.asarray(each) for each in found], expected)
