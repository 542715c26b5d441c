"""Loops taken apart: what leaves them, what stays, and that values and gradients stay the same."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.raise_op import Assert

import scanlib
from scanlib.ops import ElemwiseScan, Scan
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.lowered.linear_scan import LinearScan
from tests.checks import assert_derivatives, assert_same
from tests.modes import MODES
from tests.split_cases import MAPS, PRODUCTS, RECURRENT, K, N, T, build, count, loops_of, unfused


class TestMaps:
    @pytest.mark.parametrize("name", MAPS)
    def test_no_loop_remains(self, name):
        case = MAPS[name]
        built = build(case)
        function = pytensor.function(built.inputs, built.traces, mode=unfused("c"))
        assert count(function, Scan) == 0
        assert count(function, ElemwiseScan) == case.kernels
        assert count(function, PRODUCTS) >= case.products

    @pytest.mark.parametrize("steps", [T, 1, 0])
    @pytest.mark.parametrize("name", MAPS)
    def test_values(self, name, steps):
        built = build(MAPS[name], steps)
        function = pytensor.function(built.inputs, built.traces, mode=MODES["c"])
        assert_same(function(*built.values.values()), built.walk(*built.values.values()))

    @pytest.mark.parametrize("name", ["a function of a product", "a lookup", "a check"])
    def test_values_in_numba_mode(self, name):
        built = build(MAPS[name])
        function = pytensor.function(built.inputs, built.traces, mode=MODES["numba"])
        assert count(function, Scan) == 0
        assert_same(function(*built.values.values()), built.walk(*built.values.values()))

    def test_a_check_still_fails(self):
        x = pt.dvector("x")
        y = scanlib.map(
            lambda row: Assert("must be positive")(row, row > 0), x, return_updates=False
        )
        function = pytensor.function([x], y, mode=MODES["c"])
        assert count(function, Scan) == 0
        np.testing.assert_array_equal(function([1.0, 2.0]), [1.0, 2.0])
        assert function([]).shape == (0,)
        with pytest.raises(AssertionError, match="must be positive"):
            function([1.0, -2.0, 3.0])

    def test_sequences_of_different_lengths_are_an_error(self):
        x, z, n = pt.dvector("x"), pt.dvector("z"), pt.lscalar("n")
        y = scanlib.scan(lambda a, b: a + b, [x, z], n_steps=n, return_updates=False)
        function = pytensor.function([x, z, n], y, mode=MODES["c"])
        assert count(function, Scan) == 0
        np.testing.assert_array_equal(function(np.ones(4), np.ones(3), 2), [2.0, 2.0])
        with pytest.raises(SequenceLengthError):
            function(np.ones(4), np.ones(3), 4)

    @pytest.mark.slow
    @pytest.mark.parametrize("name", ["a function of a product", "a matrix and a vector"])
    def test_derivatives(self, name, fast_mode):
        case = MAPS[name]
        built = build(case, 3)
        cost = sum(pt.sum(pt.sin(trace)) for trace in built.traces)
        assert_derivatives(
            cost,
            dict(zip(built.inputs, built.values.values(), strict=True)),
            lambda *arrays: sum(float(np.sin(t).sum()) for t in built.walk(*arrays)),
            fast_mode,
        )


class TestRecurrences:
    @pytest.mark.parametrize("name", RECURRENT)
    def test_what_remains(self, name):
        case = RECURRENT[name]
        built = build(case)
        function = pytensor.function(built.inputs, built.traces, mode=unfused("c"))
        assert count(function, Scan) == case.scans
        assert count(function, (ElemwiseScan, LinearScan)) == case.kernels
        assert count(function, PRODUCTS) == case.products

    @pytest.mark.slow
    @pytest.mark.parametrize("steps", [T, 1, 0])
    @pytest.mark.parametrize("name", RECURRENT)
    def test_values(self, name, steps):
        built = build(RECURRENT[name], steps)
        function = pytensor.function(built.inputs, built.traces, mode=MODES["c"])
        assert_same(function(*built.values.values()), built.walk(*built.values.values()))

    def test_values_in_numba_mode(self):
        built = build(RECURRENT["a product after"])
        function = pytensor.function(built.inputs, built.traces, mode=MODES["numba"])
        assert_same(function(*built.values.values()), built.walk(*built.values.values()))

    @pytest.mark.slow
    def test_derivatives(self, fast_mode):
        built = build(RECURRENT["a product before"], 3)
        cost = sum(pt.sum(pt.sin(trace)) for trace in built.traces)
        assert_derivatives(
            cost,
            dict(zip(built.inputs, built.values.values(), strict=True)),
            lambda *arrays: sum(float(np.sin(t).sum()) for t in built.walk(*arrays)),
            fast_mode,
        )

    def test_what_remains_reads_no_more_than_it_needs(self):
        built = build(RECURRENT["a product before"])
        function = pytensor.function(built.inputs, built.traces, mode=MODES["c"])
        (loop,) = loops_of(function)
        assert loop.op.signature.n_sequences == 1
        assert loop.op.signature.n_non_sequences == 1


class TestUntil:
    """A loop that may end early stays whole; its gradient does not."""

    def build(self, reverse: bool = False):
        x, V, U = pt.dmatrix("x"), pt.dmatrix("V"), pt.dmatrix("U")

        def step(x, h, V, U):
            new = pt.tanh(x @ V + h @ U)
            return [new, new @ V + x, pt.outer(new, x)], scanlib.until(new[0] > 0.6)

        h, y, _ = scanlib.scan(
            step, x, [pt.zeros(N), None, None], [V, U], go_backwards=reverse, return_updates=False
        )
        return [x, V, U], [h, y]

    def walk(self, x, V, U):
        h, hs, ys = np.zeros(N), [], []
        for row in x:
            h = np.tanh(row @ V + h @ U)
            hs.append(h)
            ys.append(h @ V + row)
            if h[0] > 0.6:
                break
        return [np.array(hs).reshape(-1, N), np.array(ys).reshape(-1, N)]

    @pytest.mark.parametrize("steps", [12, 1, 0])
    def test_values(self, steps):
        inputs, outputs = self.build()
        function = pytensor.function(inputs, outputs, mode=unfused("c"))
        assert count(function, Scan) == 1
        assert count(function, PRODUCTS) == 0
        rng = np.random.default_rng(1)
        values = [0.3 * rng.standard_normal(s) for s in ((steps, N), (N, N), (N, N))]
        if steps > 5:
            values[0][5] = 3 * np.linalg.pinv(values[1])[:, 0]
        expected = self.walk(*values)
        assert steps < 5 or 0 < len(expected[0]) < steps
        assert_same(function(*values), expected)

    @pytest.mark.slow
    def test_gradient(self, fast_mode):
        inputs, outputs = self.build()
        rng = np.random.default_rng(1)
        values = [0.3 * rng.standard_normal(s) for s in ((7, N), (N, N), (N, N))]
        values[0][3] = 3 * np.linalg.pinv(values[1])[:, 0]
        assert len(self.walk(*values)[0]) == 4
        assert_derivatives(
            sum(pt.sum(pt.sin(out)) for out in outputs),
            dict(zip(inputs, values, strict=True)),
            lambda *arrays: sum(float(np.sin(t).sum()) for t in self.walk(*arrays)),
            fast_mode,
            order=1,
        )


class TestSums:
    def test_a_sum_of_elementwise_work_stores_nothing(self):
        x = pt.dvector("x")
        total = scanlib.reduce(lambda x, c: c + pt.exp(-x) * x, x, 0.0, return_updates=False)
        function = pytensor.function([x], total, mode=MODES["c"])
        (kernel,) = (n for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan))
        assert all(out.type.ndim <= 1 for out in kernel.outputs)
        assert all(kernel.op.signature.untraced)
        values = np.linspace(0, 1, 1001)
        np.testing.assert_allclose(function(values), np.sum(np.exp(-values) * values), rtol=1e-12)

    def test_a_sum_of_a_product_stores_the_product_alone(self):
        x, W = pt.dmatrix("x"), pt.dmatrix("W")
        total = scanlib.scan(
            lambda x, c: c + pt.exp(x @ W).sum(), x, [np.float64(0)], return_updates=False
        )[-1]
        function = pytensor.function([x, W], total, mode=unfused("c"))
        assert count(function, Scan) == 0
        assert count(function, PRODUCTS) == 1
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((T, N)), rng.standard_normal((N, K))
        np.testing.assert_allclose(function(a, b), np.exp(a @ b).sum(), rtol=1e-12)

    @pytest.mark.parametrize(
        "outer",
        [
            pt.outer,
            lambda x, z: x[:, None] * z[None, :],
            lambda x, z: pt.mul(x[:, None] - 1, z[None, :], (x**2)[:, None]),
        ],
    )
    def test_a_sum_of_outer_products_is_one_product(self, outer):
        x, z = pt.dmatrix("x"), pt.dmatrix("z")
        total = scanlib.scan(
            lambda x, z, c: c + outer(x, z), [x, z], [pt.zeros((N, K))], return_updates=False
        )[-1]
        function = pytensor.function([x, z], total, mode=unfused("c"))
        assert count(function, (Scan, ElemwiseScan)) == 0
        assert count(function, PRODUCTS) == 1
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((T, N)), rng.standard_normal((T, K))
        step = pytensor.function([p := pt.dvector(), q := pt.dvector()], outer(p, q))
        expected = sum(step(p, q) for p, q in zip(a, b, strict=True))
        np.testing.assert_allclose(function(a, b), expected, rtol=1e-10, atol=1e-12)
        with pytest.raises(IndexError, match="fewer than 1 step"):
            function(a[:0], b[:0])

    def test_sums_of_several_outer_products_leave(self):
        """A matrix that a step uses twice: its gradient adds two products."""
        h0, A, B = pt.vector(shape=(N,)), pt.matrix(shape=(N, N)), pt.matrix(shape=(N, N))
        x = pt.matrix(shape=(None, N))

        def step(x, h, g, A, B):
            return pt.tanh(A @ h - B @ g + x), A @ g + pt.tanh(B @ h)

        traces = scanlib.scan(step, x, [h0, 2 * h0], [A, B], return_updates=False)
        cost = sum((trace**2).sum() for trace in traces)
        inputs = [x, h0, A, B]
        gradient = pytensor.grad(cost, inputs)
        function = pytensor.function(inputs, gradient, mode=unfused("c"))
        loops = [n for n in function.maker.fgraph.toposort() if isinstance(n.op, Scan)]
        shapes = [out.type.shape for node in loops for out in node.outputs]
        assert shapes
        assert not any(shape[-2:] == (N, N) for shape in shapes)  # no sum of products stays
        assert count(function, PRODUCTS) >= 4
        rng = np.random.default_rng(0)
        data = [rng.standard_normal(v.type.shape or (1,)) for v in inputs[1:]]
        data = [rng.standard_normal((T, N)), *(own / 2 for own in data)]
        plain = pytensor.function(inputs, gradient, mode=MODES["py"])
        for one, two in zip(function(*data), plain(*data), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-11)

    def test_products_of_an_elementwise_recurrence(self):
        """The product leaves before a kernel would take it as elementwise work."""
        x, z = pt.dmatrix("x"), pt.dmatrix("z")
        _, total = scanlib.scan(
            lambda x, z, h, c: (h := pt.tanh(h + x), c + h[:, None] * z[None, :]),
            [x, z],
            [pt.zeros(N), pt.zeros((N, K))],
            return_updates=False,
        )
        function = pytensor.function([x, z], total[-1], mode=unfused("c"))
        (kernel,) = (n for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan))
        assert all(out.type.ndim == 2 for out in kernel.outputs)  # rows of h, none of c
        assert count(function, PRODUCTS) == 1
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((T, N)), rng.standard_normal((T, K))
        h, rows = np.zeros(N), []
        for row in a:
            h = np.tanh(h + row)
            rows.append(h)
        np.testing.assert_allclose(function(a, b), np.array(rows).T @ b, rtol=1e-12)

    def test_sums_of_a_state_that_is_not_stored(self):
        """A product leaves the loop; both sums of rows that only the loop knows stay."""
        x, z, W = pt.dmatrix("x"), pt.dmatrix("z"), pt.dmatrix("W")
        traces = scanlib.scan(
            lambda x, z, h, c, one, two: (
                pt.tanh(W @ h + x),
                c + pt.outer(x, z),
                one + h * x,
                two + h * h,
            ),
            [x, z],
            [pt.ones(N), pt.zeros((N, K)), pt.zeros(N), pt.zeros(N)],
            return_updates=False,
        )
        function = pytensor.function([x, z, W], [trace[-1] for trace in traces], mode=unfused("c"))
        assert count(function, PRODUCTS) == 1
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((T, N)), rng.standard_normal((T, K))
        weights = rng.standard_normal((N, N))
        h, expected = np.ones(N), [np.zeros(N), np.zeros(N)]
        for row in a:
            expected = [expected[0] + h * row, expected[1] + h * h]
            h = np.tanh(weights @ h + row)
        assert_same(function(a, b, weights), [h, a.T @ b, *expected])

    def test_a_sum_that_another_part_reads_runs_in_the_loop(self):
        x = pt.dmatrix("x")

        def step(x, c, d):
            c = c + pt.outer(x, x)
            return [c, d + c @ c]

        sums = scanlib.scan(step, x, [pt.zeros((N, N))] * 2, return_updates=False)
        outputs = [trace[-1] for trace in sums]
        function = pytensor.function([x], outputs, mode=MODES["c"])
        a = np.random.default_rng(0).standard_normal((T, N))
        running = np.cumsum(a[:, :, None] * a[:, None, :], axis=0)
        assert_same(function(a), [running[-1], (running @ running).sum(axis=0)])

    @pytest.mark.slow
    @pytest.mark.parametrize("size", [0, 2])
    def test_products_with_rows_of_no_items(self, size):
        """Rows that are known to have no items are joined without dividing by their length."""
        w, n = pt.dmatrix("w"), pt.lscalar("n")
        start = pt.tensor("h", shape=(3, size), dtype="float64")
        trace = scanlib.scan(
            lambda h, w: pt.tanh(0.4 * pt.dot(0.4 * pt.dot(h, w), w)),
            outputs_info=start,
            non_sequences=w,
            n_steps=n,
            return_updates=False,
        )
        function = pytensor.function(
            [start, w, n], pt.grad(trace.sum(), [start, w]), mode=MODES["c"]
        )
        for steps in 1, 5:
            shapes = [value.shape for value in function(np.ones((3, size)), np.eye(size), steps)]
            assert shapes == [(3, size), (size, size)]


class TestStored:
    def test_functions_of_what_the_loop_stores(self):
        """They read the stored rows; the state that these come from is not stored."""
        x, U, W = pt.dmatrices("x", "U", "W")

        def step(x, c, U, W):
            s = pt.sin(c) * x + c
            return pt.tanh(s @ U), pt.exp(s) @ W

        c, y = scanlib.scan(step, x, [pt.ones(N), None], [U, W], return_updates=False)
        function = pytensor.function([x, U, W], [c[-1], y], mode=unfused("c"))
        (loop,) = loops_of(function)
        assert loop.op.signature.untraced == (True,)
        assert count(function, PRODUCTS) == 1
        rng = np.random.default_rng(0)
        values = [rng.standard_normal(shape) for shape in ((T, N), (N, N), (N, K))]
        last, rows = np.ones(N), []
        for row in values[0]:
            s = np.sin(last) * row + last
            last = np.tanh(s @ values[1])
            rows.append(np.exp(s) @ values[2])
        assert_same(function(*values), [last, np.array(rows)], rtol=1e-10)


class TestWhatStays:
    def test_inner_loops(self):
        x = pt.dmatrix("x")
        y = scanlib.map(
            lambda row: scanlib.scan(
                lambda v, h: pt.tanh(h + v), row, np.float64(0), return_updates=False
            )[-1],
            x,
            return_updates=False,
        )
        function = pytensor.function([x], y, mode=MODES["c"])
        assert count(function, Scan) == 1
        values = np.random.default_rng(0).standard_normal((3, 4))
        expected = []
        for row in values:
            h = 0.0
            for v in row:
                h = np.tanh(h + v)
            expected.append(h)
        np.testing.assert_allclose(function(values), expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["c", "numba"])
@pytest.mark.parametrize("name", ["a matrix", "a row", "an item set", "a row added to"])
def test_places_outside_of_an_array_are_an_error(name, mode):
    x, k, W = pt.dmatrix("x"), pt.lvector("k"), pt.dmatrix("W")
    step = {
        "a matrix": lambda x, k, W: W[k] @ W,
        "a row": lambda x, k, W: W @ x * x[k],
        "an item set": lambda x, k, W: W @ pt.set_subtensor(x[k], 7.0),
        "a row added to": lambda x, k, W: pt.inc_subtensor(pt.zeros((N, N))[k], W @ x).sum(axis=0),
    }[name]
    y = scanlib.scan(step, [x, k], None, W, return_updates=False)
    function = pytensor.function([x, k, W], y, mode=MODES[mode], on_unused_input="ignore")
    assert count(function, Scan) == 0
    values = np.random.default_rng(0).normal(size=(2, N, N))
    np.testing.assert_allclose(
        function(values[0], [0, N - 1, -N], values[1]), function(values[0], [0, -1, 0], values[1])
    )
    for place in (N, -N - 1):
        with pytest.raises(IndexError):
            function(values[0], [0, place, 1], values[1])


@pytest.mark.parametrize("open_size", ["-1", "flatten", "symbolic"])
def test_rows_in_another_shape_of_no_steps(open_size, python_kernels, fast_mode):
    """An array without rows does not tell what -1 stands for; the sizes of a row do."""
    x, n = pt.matrix("x"), pt.lscalar("n")
    step = {
        "-1": lambda x, n: pt.exp(x.reshape((-1, 2))),
        "flatten": lambda x, n: pt.outer(x, x).flatten(),
        "symbolic": lambda x, n: pt.cumsum(x.reshape((n, 3)), axis=1),
    }[open_size]
    rows = scanlib.scan(step, x, non_sequences=n, return_updates=False)
    f = pytensor.function([x, n], rows, mode=fast_mode, on_unused_input="ignore")
    row = {"-1": (3, 2), "flatten": (36,), "symbolic": (2, 3)}[open_size]
    for size in (-1, 2):
        for steps in (0, 1, 2):
            assert f(np.ones((steps, 6)), size).shape == (steps, *row)


def test_arrays_of_another_shape_at_each_step_are_not_stored():
    """What a mask selects goes into products, which gradients would read from the forward loop."""
    rows = np.array([[1.0, np.nan, 3.0], [0.5, 1.0, 2.0], [np.nan] * 3, [1.0, np.nan, np.nan]])
    A, W = pt.dmatrix("A"), pt.dmatrix("W")

    def step(y, s, total, A, W):
        there = ~pt.isnan(y)
        v = y[there] - A[there] @ s
        return pt.tanh(W @ s) + A[there].T @ v, total - v @ v + (A[there] @ pt.ones(2)).sum()

    states, totals = scanlib.scan(
        step, pt.constant(rows), [pt.zeros(2), pt.zeros(())], [A, W], return_updates=False
    )

    def reference(A, W):
        s, total, cost = np.zeros(2), 0.0, 0.0
        for y in rows:
            there = ~np.isnan(y)
            v = y[there] - A[there] @ s
            total += (A[there] @ np.ones(2)).sum() - v @ v
            s = np.tanh(W @ s) + A[there].T @ v
            cost += (s**2).sum()
        return cost + total

    values = {A: np.arange(6.0).reshape(3, 2) / 10, W: np.array([[0.5, 0.1], [0.2, 0.3]])}
    cost = (states**2).sum() + totals[-1]
    with pytensor.config.change_flags(scanlib__perform="python"):
        assert_derivatives(cost, values, reference, MODES["c"])


@pytest.mark.parametrize("projected", [False, True])
def test_a_written_array_is_read_in_the_loop(projected, fast_mode):
    """Attention over a cache: an array for each step would be as many rows as the steps squared."""
    X, W = pt.dmatrix("X"), pt.dtensor3("W")

    def step(x, t, K, W):
        K = K[t].set(x @ W[0])
        weights = pt.special.softmax(pt.switch(pt.arange(K.shape[0]) <= t, K @ (x @ W[1]), -np.inf))
        found = weights @ K
        return K, found @ W[2] if projected else found

    steps = pt.arange(X.shape[0])
    _, rows = scanlib.scan(
        step, [X, steps], [pt.zeros_like(X), None], W, return_updates=False, name="cache"
    )

    def plain(X, W):
        keys, wanted = X @ W[0], X @ W[1]
        found = []
        for t in range(len(X)):
            weights = np.exp(keys[: t + 1] @ wanted[t])
            found.append(weights @ keys[: t + 1] / weights.sum())
        return np.array(found) @ W[2] if projected else np.array(found)

    rng = np.random.default_rng(3)
    values = [rng.normal(size=(5, 3)), rng.normal(size=(3, 3, 3)) / 2]
    for outputs in ([rows], [rows, *pytensor.grad((rows**2).sum(), [X, W])]):
        f = pytensor.function([X, W], outputs, mode=fast_mode)
        np.testing.assert_allclose(f(*values)[0], plain(*values), rtol=1e-9)
        assert all(loops_of(f)[0].op.signature.untraced)
        kept = [v for n in loops_of(f) for v in n.op.signature.split_outputs(n.outputs).outputs]
        assert max(v.type.broadcastable.count(False) for v in kept) == 2
    cost = (rows**2).sum()
    reference = lambda X, W: (plain(X, W) ** 2).sum()  # noqa: E731
    assert_derivatives(cost, {X: values[0], W: values[1]}, reference, fast_mode, order=1)
