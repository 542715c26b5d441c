"""Loops in their surroundings: shared variables, other types, nesting, memory, processes."""

import pickle
import subprocess
import sys

import numpy as np
import pytensor
import pytensor.sparse
import pytensor.tensor as pt
import pytest
import scipy.sparse

import scanlib
from tests.checks import evaluate
from tests.modes import MODES


class TestSharedVariables:
    def test_found_without_being_given(self, mode):
        x, w = pt.vector("x"), pytensor.shared(2.0)
        h, updates = scanlib.scan(lambda x, h: h * w + x, x, pt.as_tensor(0.0))
        assert not updates
        f = pytensor.function([x], h, mode=mode)
        assert f([1.0, 1.0]).tolist() == [1.0, 3.0]
        w.set_value(3.0)
        assert f([1.0, 1.0]).tolist() == [1.0, 4.0]

    def test_captured_variables_and_their_graphs(self, mode):
        x, w = pt.vector("x"), pt.vector("w")
        scale = pt.exp(w).sum()
        h, _ = scanlib.scan(lambda x, h: h * scale + x + w[0], x, pt.as_tensor(0.0))
        values = {x: [1.0, 1.0], w: [0.0, 0.0]}
        assert evaluate(h, values, mode).tolist() == [1.0, 3.0]

    @pytest.mark.parametrize("form", [dict, lambda pairs: pairs], ids=["dict", "pairs"])
    def test_updates_with_outputs_and_until(self, mode, form):
        count, seen = pytensor.shared(0), pytensor.shared(np.zeros(2))
        x = pt.matrix("x")

        def step(x, h):
            h = h + x
            return [h], form([(count, count + 1), (seen, seen * 2 + x)]), scanlib.until(h[0] > 2.5)

        h, updates = scanlib.scan(step, x, pt.zeros(2))
        assert set(updates) == {count, seen}
        f = pytensor.function([x], h, updates=updates, mode=mode)
        assert f(np.ones((5, 2))).tolist() == [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]
        assert count.get_value() == 3
        assert seen.get_value().tolist() == [7.0, 7.0]
        assert f(np.ones((0, 2))).shape == (0, 2)
        assert count.get_value() == 3

    def test_update_read_by_the_step(self, mode):
        a = pytensor.shared(1)
        values, updates = scanlib.scan(lambda: (a * 10, {a: a + 1}), n_steps=3)
        f = pytensor.function([], values, updates=updates, mode=mode)
        assert f().tolist() == [10, 20, 30]
        assert f().tolist() == [40, 50, 60]


class TestOtherTypes:
    @pytest.mark.slow
    def test_sparse_non_sequence(self, mode):
        A = pytensor.sparse.csr_matrix("A")
        x0 = pt.matrix("x0")
        x, _ = scanlib.scan(
            lambda x, A: pytensor.sparse.structured_dot(A, x) * 0.5,
            outputs_info=x0,
            non_sequences=A,
            n_steps=3,
        )
        value = scipy.sparse.random_array((4, 4), density=0.5, rng=3, format="csr")
        start = np.arange(8.0).reshape(4, 2)
        f = pytensor.function([A, x0], x, mode=mode)
        got = f(scipy.sparse.csr_matrix(value), start)
        expected = [0.5 * value.toarray() @ start]
        for _ in range(2):
            expected.append(0.5 * value.toarray() @ expected[-1])
        np.testing.assert_allclose(got, expected, rtol=1e-12)

    def test_sparse_state(self, python_kernels, fast_mode):
        """It has no history, so its last value is what the loop returns, and what `reduce` does."""
        x, M = pt.vector("x"), pytensor.sparse.csr_matrix("M")
        with pytest.warns(UserWarning, match="only its last value"):
            last = scanlib.reduce(lambda x, M: M * x, x, M, return_updates=False)
        f = pytensor.function([x, M], last, mode=fast_mode)
        start = scipy.sparse.csr_matrix(np.eye(3))
        np.testing.assert_array_equal(f([2.0, 3.0], start).toarray(), 6 * np.eye(3))
        np.testing.assert_array_equal(start.toarray(), np.eye(3))

    @pytest.mark.parametrize("wrt", ["dense", "sparse"])
    def test_gradients_with_a_sparse_matrix(self, fast_mode, wrt):
        m, x = pytensor.sparse.csr_matrix("m"), pt.matrix("x")
        h, _ = scanlib.scan(
            lambda h, m: pytensor.sparse.structured_dot(m, h),
            outputs_info=x,
            non_sequences=m,
            n_steps=3,
        )
        gradient = pytensor.grad(h.sum(), x if wrt == "dense" else m)
        f = pytensor.function([m, x], gradient, mode=fast_mode)
        result = f(scipy.sparse.csr_matrix(2 * np.eye(2)), np.ones((2, 1)))
        if wrt == "dense":
            np.testing.assert_allclose(result, [[14], [14]])
        else:
            np.testing.assert_allclose(result.toarray(), 17 * np.eye(2))

    def test_gradient_past_a_sparse_matrix(self, fast_mode):
        A = pytensor.sparse.csr_matrix("A")
        x0 = pt.matrix("x0")
        x, _ = scanlib.scan(
            lambda x, A: pytensor.sparse.structured_dot(A, x),
            outputs_info=x0,
            non_sequences=A,
            n_steps=2,
        )
        value = scipy.sparse.csr_matrix(np.array([[0.0, 2.0], [1.0, 3.0]]))
        gradient = evaluate(
            pytensor.grad(x[-1].sum(), x0), {A: value, x0: np.ones((2, 1))}, fast_mode
        )
        dense = value.toarray()
        np.testing.assert_allclose(gradient[:, 0], (dense @ dense).sum(axis=0), rtol=1e-12)

    def test_sizes_of_a_sparse_matrix(self):
        """A column's gradient is put into zeros with as many rows as the matrix has."""
        A, x0 = pytensor.sparse.csr_matrix("A"), pt.vector("x0")
        x, _ = scanlib.scan(
            lambda x, A: pytensor.sparse.structured_dot(A, x[:, None])[:, 0],
            outputs_info=x0,
            non_sequences=A,
            n_steps=2,
        )
        value = scipy.sparse.csr_matrix(np.array([[0.0, 2.0], [1.0, 3.0]]))
        gradient = evaluate(
            pytensor.grad(x[-1].sum(), x0), {A: value, x0: np.ones(2)}, MODES["numba"]
        )
        dense = value.toarray()
        np.testing.assert_allclose(gradient, (dense @ dense).sum(axis=0), rtol=1e-12)

    def test_complex_state(self, mode):
        z = pt.zvector("z")
        h, _ = scanlib.scan(lambda z, h: h * 1j + z, z, pt.constant(0j))
        value = np.array([1.0, 2.0 + 1j, -1j])
        expected = [1.0, 2.0 + 2j, -2.0 + 1j]
        np.testing.assert_allclose(evaluate(h, {z: value}, mode), expected)


class TestNesting:
    def test_inner_loop_with_its_own_length(self, mode):
        lengths = pt.lvector("lengths")

        def factorial(n):
            product, _ = scanlib.scan(
                lambda k, p: p * (k + 1), pt.arange(n), outputs_info=pt.as_tensor(np.int64(1))
            )
            return pt.concatenate([[1], product])[-1]

        out, _ = scanlib.scan(factorial, lengths)
        assert evaluate(out, {lengths: [0, 1, 5, 3]}, mode).tolist() == [1, 1, 120, 6]

    def test_inner_loop_with_until_and_captured_state(self, mode):
        x = pt.vector("x")

        def halvings(x, count):
            inner, _ = scanlib.scan(
                lambda h: (h / 2 + 0 * x, scanlib.until(h < 1)), outputs_info=x, n_steps=50
            )
            return count + inner.shape[0]

        out, _ = scanlib.scan(halvings, x, pt.as_tensor(np.int64(0)))
        assert evaluate(out, {x: [0.5, 4.0, 1.0]}, mode).tolist() == [1, 5, 7]


class TestMemory:
    """A loop neither keeps nor changes what belongs to its caller."""

    def loop(self):
        x, h0, W = pt.matrix("x"), pt.matrix("h0"), pt.matrix("W")
        (h, last), _ = scanlib.scan(
            lambda x, h_1, h_2, W: [pt.tanh(pt.dot(h_2, W) + x * h_1), h_1],
            sequences=x,
            outputs_info=[{"initial": h0, "taps": [-1, -2]}, None],
            non_sequences=W,
        )
        return [x, h0, W], [h, last]

    def values(self):
        generator = np.random.default_rng(11)
        return [generator.normal(size=shape) for shape in [(6, 3), (2, 3), (3, 3)]]

    def test_layouts(self, mode):
        inputs, outputs = self.loop()
        f = pytensor.function(inputs, outputs, mode=mode)
        values = self.values()
        expected = f(*values)
        layouts = [
            [np.asfortranarray(value) for value in values],
            [value[::-1][::-1] for value in values],
            [np.repeat(value, 2, axis=0)[::2] for value in values],
            [np.repeat(value, 2, axis=1)[:, ::2] for value in values],
        ]
        for arrays in layouts:
            for got, wanted in zip(f(*arrays), expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-13)

    @pytest.mark.slow
    def test_read_only_inputs(self, mode):
        inputs, outputs = self.loop()
        values = self.values()
        for value in values:
            value.flags.writeable = False
        cost = sum(pt.sum(out**2) for out in outputs)
        f = pytensor.function(inputs, [*outputs, *pytensor.grad(cost, inputs)], mode=mode)
        g = pytensor.function(inputs, [*outputs, *pytensor.grad(cost, inputs)], mode=mode)
        for got, wanted in zip(f(*values), g(*self.values()), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-13)

    def test_calls_do_not_share_results(self, mode):
        inputs, outputs = self.loop()
        f = pytensor.function(inputs, outputs, mode=mode)
        first = f(*self.values())
        kept = [array.copy() for array in first]
        for array in f(*self.values()):
            array.fill(-1.0)
        for array, copy in zip(first, kept, strict=True):
            assert array.tobytes() == copy.tobytes()

    def test_results_are_not_the_inputs(self, mode):
        x, h0 = pt.matrix("x"), pt.vector("h0")
        (echo, kept), _ = scanlib.scan(lambda x, h, k: [x, k], x, outputs_info=[h0, h0])
        f = pytensor.function([x, h0], [echo, kept, echo[-1]], mode=mode)
        rows, start = np.arange(6.0).reshape(3, 2), np.array([7.0, 8.0])
        for array in f(rows, start):
            array.fill(-1.0)
        assert rows.tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        assert start.tolist() == [7.0, 8.0]


class TestProcesses:
    def test_import_loads_no_backend(self):
        """Not even numba: it loads with the first loop."""
        code = (
            "import sys, scanlib; "
            "loaded = {name.split('.')[0] for name in sys.modules}; "
            "print(sorted({'jax', 'torch', 'numba'} & loaded))"
        )
        printed = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert printed.stdout.strip() == "[]"

    @pytest.mark.slow
    def test_pickled_function(self, mode):
        x, h0 = pt.vector("x"), pt.scalar("h0")
        h, _ = scanlib.scan(lambda x, h: pt.tanh(h + x), x, h0)
        f = pytensor.function([x, h0], [h, pytensor.grad(h.sum(), h0)], mode=mode)
        expected = f([0.5, 1.0], 0.1)
        again = pickle.loads(pickle.dumps(f))
        for got, wanted in zip(again([0.5, 1.0], 0.1), expected, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-14)

    def test_pickled_graph(self, fast_mode):
        x = pt.vector("x")
        h, _ = scanlib.scan(lambda x, h: h * 2 + x, x, pt.as_tensor(0.0))
        x_again, h_again = pickle.loads(pickle.dumps((x, h)))
        assert evaluate(h_again, {x_again: [1.0, 1.0]}, fast_mode).tolist() == [1.0, 3.0]
