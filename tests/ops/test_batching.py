"""Batches of loops by `vectorize_graph` against one loop after the other."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors, graph_inputs
from pytensor.ifelse import ifelse
from pytensor.tensor.basic import Split
from pytensor.tensor.blockwise import Blockwise

import scanlib
from scanlib.ops.scan import Scan
from tests.modes import MODES

rng = np.random.default_rng(7)


def batched(variable, rank):
    return pt.TensorType(variable.type.dtype, shape=(None,) * (rank + variable.type.ndim))()


def check_rows(outputs, inputs, data, ranks, mode, shape=(3,)):
    """Hold the batched function against the plain one, row by row of the batch."""
    new = [batched(v, rank) if rank else v for v, rank in zip(inputs, ranks, strict=True)]
    changed = {old: v for old, v, rank in zip(inputs, new, ranks, strict=True) if rank}
    together = pytensor.function(new, vectorize_graph(outputs, changed), mode=mode)
    one = pytensor.function(inputs, outputs, mode=mode)
    results = together(*data)
    for index in np.ndindex(shape):
        arguments = [x[index] if rank else x for x, rank in zip(data, ranks, strict=True)]
        for actual, expected in zip(results, one(*arguments), strict=True):
            row = actual[index] if actual.ndim > expected.ndim else actual
            np.testing.assert_allclose(row, expected, rtol=1e-10)


@pytest.fixture(scope="module")
def two_taps():
    x, h0, w = pt.matrix("x"), pt.vector("h0"), pt.matrix("w")
    traces = scanlib.scan(
        lambda x, h1, h2, w: [pt.tanh(h1 @ w + x + 0.1 * h2), (h1 * x).sum()],
        sequences=x,
        outputs_info=[{"initial": pt.stack([h0, 2 * h0]), "taps": [-1, -2]}, None],
        non_sequences=w,
        return_updates=False,
    )
    return traces, [x, h0, w]


@pytest.mark.slow
@pytest.mark.parametrize("which", [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1), (1, 0, 1)])
def test_some_inputs_are_batched(two_taps, which, fast_mode):
    outputs, inputs = two_taps
    shapes = [(5, 4), (4,), (4, 4)]
    data = [rng.normal(size=(3,) * b + shape) for b, shape in zip(which, shapes, strict=True)]
    check_rows(outputs, inputs, data, which, fast_mode)


def test_under_every_linker(two_taps, mode):
    outputs, inputs = two_taps
    data = [rng.normal(size=shape) for shape in [(3, 5, 4), (3, 4), (4, 4)]]
    check_rows(outputs, inputs, data, (1, 1, 0), mode)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(1, 0), (0, 1), (1, 1), (2, 0)])
def test_sequences_that_are_cut_to_the_shortest(ranks, fast_mode):
    """Lengths are the same for the whole batch: slices by them stay slices."""
    x, y = pt.dvector("x"), pt.dvector("y")
    h = scanlib.scan(
        lambda x, y, h: 0.5 * h + x * y, [x, y], pt.constant(0.0), return_updates=False
    )
    outputs = [h, *pytensor.grad((h**2).sum(), [x, y])]
    shape = (3, 2)[: max(ranks)]
    data = [rng.normal(size=(*shape * bool(r), n)) for r, n in zip(ranks, (5, 4), strict=True)]
    check_rows(outputs, [x, y], data, ranks, fast_mode, shape)
    new = [batched(v, rank) if rank else v for v, rank in zip([x, y], ranks, strict=True)]
    changed = {old: v for old, v, rank in zip([x, y], new, ranks, strict=True) if rank}
    function = pytensor.function(new, vectorize_graph(outputs, changed), mode=fast_mode)
    assert not any(isinstance(n.op, Blockwise) for n in function.maker.fgraph.apply_nodes)


@pytest.mark.slow
def test_two_batch_dimensions_and_broadcasting(two_taps, fast_mode):
    outputs, (x, h0, w) = two_taps
    x2 = pt.TensorType("float64", shape=(2, 1, None, None))()
    h2 = pt.TensorType("float64", shape=(1, 3, None))()
    f = pytensor.function([x2, h2, w], vectorize_graph(outputs, {x: x2, h0: h2}), mode=fast_mode)
    one = pytensor.function([x, h0, w], outputs, mode=fast_mode)
    xs, hs, ws = rng.normal(size=(2, 1, 5, 4)), rng.normal(size=(1, 3, 4)), rng.normal(size=(4, 4))
    states, sums = f(xs, hs, ws)
    assert states.shape == (2, 3, 5, 4)
    for i, j in np.ndindex(2, 3):
        expected = one(xs[i, 0], hs[0, j], ws)
        np.testing.assert_allclose(states[i, j], expected[0])
        np.testing.assert_allclose(sums[i, j], expected[1])


def test_backwards_echo_and_integers(fast_mode):
    x, n = pt.vector("x"), pt.lscalar("n")
    outputs = scanlib.scan(
        lambda x, echo, count, n: [x, count + n],
        sequences=x,
        outputs_info=[pt.constant(0.0), pt.constant(0, dtype="int64")],
        non_sequences=n,
        go_backwards=True,
        return_updates=False,
    )
    check_rows(outputs, [x, n], [rng.normal(size=(3, 5)), np.array([1, 2, 3])], (1, 1), fast_mode)


def test_a_loop_that_starts_from_what_is_the_same_in_the_batch_of_another(fast_mode):
    x, batch = pt.vector("x"), pt.matrix("batch")
    power, total = pt.constant(1.0), pt.constant(0.0)
    for _ in range(2):
        powers, sums = scanlib.scan(
            lambda x, h, total: [2 * h, total + x],
            sequences=x,
            outputs_info=[power, total],
            return_updates=False,
        )
        power, total = powers[-1], sums[-1]
    (result,) = vectorize_graph([power * total], {x: batch})
    f = pytensor.function([batch], result, mode=fast_mode)
    np.testing.assert_array_equal(f(np.ones((4, 2))), np.full(4, 64.0))


@pytest.mark.slow
def test_gradient_of_a_batch_is_a_batch_of_gradients(two_taps, fast_mode):
    (states, _), inputs = two_taps
    gradients = pytensor.grad((states**2).sum(), inputs)
    data = [rng.normal(size=shape) for shape in [(3, 5, 4), (3, 4), (3, 4, 4)]]
    check_rows(gradients, inputs, data, (1, 1, 1), fast_mode)


class TestUntil:
    """Every row stops by itself and keeps its last values until all have stopped."""

    @staticmethod
    def newton():
        a = pt.scalar("a")
        roots, products = scanlib.scan(
            lambda y, a: (
                [y - (y * y - a) / (2 * y), y * a],
                scanlib.until(abs(y * y - a) < 1e-10),
            ),
            outputs_info=[a, None],
            non_sequences=a,
            n_steps=100,
            return_updates=False,
        )
        return a, roots, products

    def test_rows_stop_by_themselves(self, mode):
        a, roots, products = self.newton()
        many = pt.vector("many")
        together = pytensor.function(
            [many], vectorize_graph([roots, products], {a: many}), mode=mode
        )
        one = pytensor.function([a], [roots, products], mode=mode)
        values = np.array([2.0, 9.0, 1000.0, 1.0])
        results = together(values)
        lengths = []
        for i, value in enumerate(values):
            expected = one(value)
            steps = len(expected[0])
            lengths.append(steps)
            for actual, alone in zip(results, expected, strict=True):
                np.testing.assert_allclose(actual[i, :steps], alone)
                assert (actual[i, steps:] == alone[-1]).all()
        assert len(set(lengths)) > 1
        assert results[0].shape == (4, max(lengths))

    @pytest.mark.slow
    def test_gradient_of_the_last_row(self, fast_mode):
        a, roots, _ = self.newton()
        many = pt.vector("many")
        last = vectorize_graph(roots[-1], {a: many})
        gradient = pytensor.function([many], pytensor.grad(last.sum(), many), mode=fast_mode)
        values = np.array([2.0, 9.0, 1000.0])
        np.testing.assert_allclose(gradient(values), 0.5 / np.sqrt(values), rtol=1e-8)

    def test_outputs_as_long_as_a_row_of_the_batch(self, mode):
        w, limit = pt.vector("w"), pt.scalar("limit")
        traces = scanlib.scan(
            lambda h, w, limit: ([h * 2, w * h], scanlib.until(h * 2 > limit)),
            outputs_info=[pt.constant(1.0), None],
            non_sequences=[w, limit],
            n_steps=10,
            return_updates=False,
        )
        last = [trace[-1] for trace in traces]
        data = [rng.normal(size=(3, 4)), np.array([3.0, 40.0, 9.0])]
        check_rows(last, [w, limit], data, (1, 1), mode)


class TestGradientsUntil:
    """A batch of gradients passes over the steps that a loop did not run."""

    data = (
        rng.uniform(0.5, 1.0, size=(3, 12)),
        np.array([[1.0, 0.5], [0.5, 0.5], [3.0, 1.0]]),
        np.array([2.0, 1.5, 1.2]),
    )

    @staticmethod
    def growth(**options):
        x, start, a = pt.vector("x"), pt.vector("start"), pt.scalar("a")
        traces = scanlib.scan(
            lambda x, early, late, a: (
                [a * late + pt.sin(x) * early, late * x],
                scanlib.until(a * late > 9),
            ),
            sequences=x,
            outputs_info=[{"initial": start, "taps": [-2, -1]}, None],
            non_sequences=a,
            return_updates=False,
            **options,
        )
        return traces, [x, start, a]

    @pytest.mark.slow
    def test_of_last_rows(self, mode):
        (sizes, products), inputs = self.growth()
        gradients = pytensor.grad(sizes[-1] ** 2 * products[-1], inputs)
        check_rows(gradients, inputs, self.data, (1, 1, 1), mode)

    @pytest.mark.slow
    @pytest.mark.parametrize("which", [(1, 0, 0), (0, 1, 0), (0, 0, 1)])
    def test_of_all_rows(self, which, fast_mode):
        (sizes, products), inputs = self.growth()
        gradients = pytensor.grad(pt.sum(sizes * products) + products[-1] + sizes[-1], inputs)
        data = [d if b else d[0] for b, d in zip(which, self.data, strict=True)]
        check_rows(gradients, inputs, data, which, fast_mode)

    @pytest.mark.slow
    def test_second_order(self, python_kernels, fast_mode):
        (sizes, products), inputs = self.growth()
        gradients = pytensor.grad(sizes[-1] * products[-1], inputs)
        second = pytensor.grad(sum(pt.sum(g**2) for g in gradients), inputs)
        check_rows(second, inputs, self.data, (1, 1, 1), fast_mode)

    @pytest.mark.parametrize("order", [2, 1])
    @pytest.mark.parametrize("at_once", [False, True])
    def test_batches_of_batches(self, order, at_once, python_kernels, fast_mode):
        """Two axes of unlike lengths, added together or one after the other."""
        a, limit = pt.scalar("a"), pt.scalar("limit")
        trace = scanlib.scan(
            lambda y, a, limit: (a * y + pt.sin(y), scanlib.until(a * y > limit)),
            outputs_info=a,
            non_sequences=[a, limit],
            n_steps=20,
            return_updates=False,
        )
        found = pytensor.grad(pt.sum(trace**2) + trace[-1] ** 3, a)
        if order == 2:
            found = pytensor.grad(pt.sin(found), a)
        one = pytensor.function([a, limit], found, mode=fast_mode)
        many, more = pt.vector("many"), pt.matrix("more")
        limits, columns = pt.vector("limits"), pt.matrix("columns")
        if at_once:
            batch = vectorize_graph(found, {a: more, limit: columns})
        else:
            batch = vectorize_graph(found, {a: many, limit: limits})
            batch = vectorize_graph(batch, {many: more, limits: columns})
        together = pytensor.function([more, columns], batch, mode=fast_mode)
        values = np.array([[1.1, 1.7, 1.3], [2.0, 1.2, 1.5]])
        bounds = np.array([[9.0, 2.0, 3.0], [8.0, 2.5, 40.0]])
        expected = [
            [one(*pair) for pair in zip(*rows, strict=True)]
            for rows in zip(values, bounds, strict=True)
        ]
        np.testing.assert_allclose(together(values, bounds), expected, rtol=1e-9)

    @pytest.mark.slow
    def test_nothing_but_the_number_of_steps_is_read(self, fast_mode):
        start, limit = pt.scalar("start"), pt.scalar("limit")
        trace = scanlib.scan(
            lambda y, limit: (2 * y, scanlib.until(2 * y > limit)),
            outputs_info=start,
            non_sequences=limit,
            n_steps=20,
            return_updates=False,
        )
        gradient = pytensor.grad(trace[-1], start)
        data = [np.array([1.0, 3.0, 0.5]), np.array([3.0, 45.0, 2.0])]
        check_rows([gradient], [start, limit], data, (1, 1), fast_mode)

    def test_inside_a_step(self, python_kernels, fast_mode):
        x, a = pt.vector("x"), pt.scalar("a")

        def step(x, h, a):
            inner = scanlib.scan(
                lambda u, a: (a * u + pt.sin(x), scanlib.until(a * u > 2)),
                outputs_info=h,
                non_sequences=a,
                n_steps=6,
                return_updates=False,
            )
            return pt.tanh(inner[-1])

        h = scanlib.scan(step, x, a, a, return_updates=False)
        gradients = pytensor.grad(pt.sum(h**2), [x, a])
        data = [rng.uniform(0.1, 1.0, size=(3, 4)), np.array([0.9, 1.8, 1.3])]
        check_rows(gradients, [x, a], data, (1, 1), fast_mode)

    def test_of_the_last_steps_are_refused(self):
        (sizes, _), (_, start, a) = self.growth(truncate_gradient=2)
        gradient = pytensor.grad(sizes[-1], start)
        with pytest.raises(NotImplementedError, match="gradient of the batch"):
            vectorize_graph(gradient, {a: pt.vector("many")})


@pytest.mark.slow
def test_rows_that_a_matrix_recurrence_reads_beside_it(fast_mode):
    """A batch of ``table[place]`` reads of every table its own place: no gather of rows."""
    place, table, A, h = pt.lvector("place"), pt.vector("table"), pt.matrix("A"), pt.vector("h")
    traces = scanlib.scan(
        lambda p, h, A, table: [A @ h + table[p], table[p] * h],
        place, [h, None], [A, table], return_updates=False,
    )  # fmt: skip
    places, tables = np.array([[0, 1, 2], [2, 1, 0], [1, 1, 0]]), rng.normal(size=(3, 3))
    data = [places, tables, rng.normal(size=(2, 2)), rng.normal(size=2)]
    check_rows(traces, [place, table, A, h], data, (1, 1, 0, 0), fast_mode)


class TestNumbersOfSteps:
    """All loops of a batch are known to take as many steps."""

    @staticmethod
    def smoothed(steps):
        x = pt.vector("x")
        return x, scanlib.scan(
            lambda x, h: 0.9 * h + 0.1 * x, x, 0.0, n_steps=steps(x), return_updates=False
        )

    LENGTHS = {  # noqa: RUF012
        "as long": lambda x: x.shape[0],
        "one less": lambda x: x.shape[0] - 1,
        "at most": lambda x: pt.minimum(x.shape[0], 3),
        "another dtype": lambda x: x.shape[0].astype("int32"),
    }

    @pytest.mark.parametrize("name", LENGTHS)
    def test_lengths_of_the_batch(self, name, mode):
        x, trace = self.smoothed(self.LENGTHS[name])
        check_rows([trace, trace[-1]], [x], [rng.normal(size=(3, 5))], (1,), mode)
        empty = vectorize_graph(trace, {x: batched(x, 1)})
        steps = {"one less": 4, "at most": 3}.get(name, 5)
        (new,) = (v for v in graph_inputs([empty]) if v.type.ndim == 2)
        assert pytensor.function([new], empty, mode=mode)(np.ones((0, 5))).shape == (0, steps)

    def test_no_sequence(self, mode):
        x, h = pt.vector("x"), pt.scalar("h")
        last = scanlib.scan(
            lambda h, x: h * 0.5 + x.sum(), outputs_info=h, non_sequences=x, n_steps=x.shape[0],
            return_updates=False,
        )[-1]  # fmt: skip
        check_rows([last], [x, h], [rng.normal(size=(3, 5)), np.ones(3)], (1, 1), mode)

    @pytest.mark.slow
    def test_two_axes_and_gradients(self, fast_mode):
        x, trace = self.smoothed(lambda x: x.shape[0] - 1)
        outputs = [trace, pytensor.grad((trace**2).sum(), x)]
        check_rows(outputs, [x], [rng.normal(size=(2, 3, 5))], (2,), fast_mode, shape=(2, 3))

    def test_with_until(self, fast_mode):
        x = pt.vector("x")
        trace = scanlib.scan(
            lambda x, h: (h + x, scanlib.until(h > 1)), x, 0.0, n_steps=x.shape[0],
            return_updates=False,
        )  # fmt: skip
        check_rows([trace[-1]], [x], [rng.uniform(0, 1, size=(3, 9))], (1,), fast_mode)

    def test_slices_are_one_slice(self):
        """Sequences of unknown lengths are cut to the shortest, all rows of a batch at once."""
        x, y = pt.vector("x"), pt.vector("y")
        trace = scanlib.scan(lambda x, y, h: h + x * y, [x, y], 0.0, return_updates=False)
        batch = vectorize_graph(trace, {x: pt.matrix(), y: pt.matrix()})
        loop = next(v.owner for v in ancestors([batch]) if v.owner and isinstance(v.owner.op, Scan))
        above = [v.owner.op for v in ancestors(loop.inputs) if v.owner is not None]
        assert not any(isinstance(op, Blockwise) for op in above)
        check_rows([trace], [x, y], [np.ones((3, 5)), rng.normal(size=(3, 7))], (1, 1), MODES["c"])

    def test_inner_loops_whose_numbers_of_steps_are_a_sequence(self, fast_mode):
        """Cut to the length of a batch beside it, it is one sequence for all still."""
        counts, x, w = pt.lvector("counts"), pt.vector("x"), pt.scalar("w")

        def step(count, x, h, w):
            inner = scanlib.scan(
                lambda g, x, w: pt.tanh(g * w + x), None, h, [x, w], count, return_updates=False
            )
            return h + inner.sum()

        trace = scanlib.scan(step, [counts, x], 0.3, w, return_updates=False)
        data = [np.array([2, 0, 3]), rng.normal(size=(3, 5)), np.float64(0.7)]
        check_rows([trace], [counts, x, w], data, (0, 1, 0), fast_mode)

    def test_numbers_that_may_differ(self):
        n, many, x = pt.lscalar("n"), pt.lvector("many"), pt.vector("x")
        trace = scanlib.scan(
            lambda x, h: h + x, x, 0.0, n_steps=n, name="sum", return_updates=False
        )
        with pytest.raises(NotImplementedError, match=r"sum.*the same number for every loop"):
            vectorize_graph(trace, {n: many, x: pt.matrix("rows")})

    def test_another_number(self, fast_mode):
        """The number of steps may be replaced by one for all."""
        n, m, x = pt.lscalar("n"), pt.lscalar("m"), pt.vector("x")
        trace = scanlib.scan(lambda x, h: h + x, x, 0.0, n_steps=n, return_updates=False)
        rows = pt.matrix("rows")
        function = pytensor.function(
            [rows, m], vectorize_graph(trace, {x: rows, n: m + 1}), mode=fast_mode
        )
        np.testing.assert_allclose(function(np.ones((2, 5)), 2), [[1, 2, 3]] * 2)


def test_an_index_that_differs_between_rows(mode):
    """The step reads it as a scalar, not as a tensor."""
    x, start, i = pt.vector("x"), pt.vector("start"), pt.lscalar("i")
    table = scanlib.scan(
        lambda x, table: pt.set_subtensor(table[i], table[i] * 0.5 + x),
        sequences=x,
        outputs_info=start,
        return_updates=False,
    )
    data = [rng.normal(size=4), rng.normal(size=(3, 5)), np.array([3, 0, 4])]
    check_rows([table], [x, start, i], data, (0, 1, 1), mode)
    check_rows([table], [x, start, i], [data[0], data[1][0], data[2]], (0, 0, 1), mode)


@pytest.mark.parametrize("linker", [MODES["numba"], "JAX"])
def test_what_is_joined_with_what_is_the_same_for_all(linker):
    """JAX refuses the batch that PyTensor 3.0.7 makes of it, around loops and in steps."""
    if linker == "JAX":
        pytest.importorskip("jax")
    x, W = pt.vector("x"), pt.matrix("W")

    def step(late, now, h):
        return pt.concatenate([h[1:], [0.5]], axis=-1) * now + late

    late = pt.concatenate([pt.zeros(2), x])[: x.shape[0]]
    start = pt.concatenate([W, np.ones((1, 2))])[:, 0]
    rows = scanlib.scan(step, [late, x], start, return_updates=False)
    data = [rng.normal(size=(3, 5)), rng.normal(size=(4, 2))]
    check_rows([rows], [x, W], data, (1, 0), linker)
    check_rows([rows], [x, W], [data[0][0], rng.normal(size=(3, 4, 2))], (0, 1), linker)


def test_tables_with_scores_of_items_that_differ_between_rows(fast_mode):
    """What is read at a place that each row has of its own has the size of a row: the table of a
    batch is written as one array, not row by row."""
    first, second, S = pt.lvector("first"), pt.lvector("second"), pt.matrix("S")

    def row(i, D):
        def cell(j, D):
            new = D[i - 1, j - 1] + S[first[i - 1], second[j - 1]] + S[first[i - 1], :2].sum()
            return D[i, j].set(pt.maximum(new, 0.5 * D[i, j - 1]))

        columns = pt.arange(1, second.shape[0] + 1)
        return scanlib.scan(cell, columns, D, return_updates=False)[-1]

    rows, start = pt.arange(1, first.shape[0] + 1), pt.zeros((first.shape[0] + 1, 6))
    table = scanlib.scan(row, rows, start, return_updates=False)[-1]
    data = [rng.integers(3, size=(3, 4)), rng.integers(3, size=(3, 5)), rng.normal(size=(3, 3))]
    inputs = [first, second, S]
    check_rows([table, pytensor.grad(table[-1, -1], S)], inputs, data, (1, 1, 0), fast_mode)
    whole = vectorize_graph(table, {first: pt.lmatrix(), second: pt.lmatrix()})

    def depth(graph):
        inner = [node.op.body for node in graph.apply_nodes if isinstance(node.op, Scan)]
        return 1 + max(map(depth, inner)) if inner else 0

    assert depth(FunctionGraph(outputs=[whole], clone=True)) == 2


def test_slices_that_differ_between_rows(mode):
    x, start, i = pt.vector("x"), pt.vector("start"), pt.lscalar("i")
    rows = scanlib.scan(
        lambda x, h: pt.concatenate([h[2:], h[i : i + 2] * x]),
        sequences=x,
        outputs_info=start,
        return_updates=False,
    )
    data = [rng.normal(size=4), rng.normal(size=(3, 5)), np.array([3, 0, 1])]
    check_rows([rows], [x, start, i], data, (0, 1, 1), mode)


def _sum_of_slice(x, k, h, a):
    return pt.tanh(h / 2 + a * (x[:k] * (1 + h)).sum())


def _inner_steps(x, k, h, a):
    trace = scanlib.scan(
        lambda g: pt.tanh(a * g + x[0]), outputs_info=h, n_steps=k, return_updates=False
    )
    return trace.sum() / 2


def _sized_array(x, k, h, a):
    return h / 2 + (a ** pt.arange(k)).sum() + (pt.zeros(k) + x[1]).sum()


@pytest.mark.parametrize("step", [_sum_of_slice, _inner_steps, _sized_array])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (0,)])
def test_arrays_of_other_sizes_in_every_row(step, shape, fast_mode):
    """The batch is no array then, neither are slices of it, nor what an inner loop stores."""
    x, k, a = pt.tensor("x", shape=(None, 4)), pt.lvector("k"), pt.scalar("a")
    trace = scanlib.scan(step, [x, k], pt.ones(()), a, return_updates=False)
    gradients = pytensor.grad((trace**2).sum(), [x, a], disconnected_inputs="ignore")
    second = pytensor.grad(gradients[1], a, disconnected_inputs="ignore")
    rank, size = len(shape), (*shape, 5)
    data = [rng.normal(size=(*size, 4)), rng.integers(1, 4, size=size), rng.random(shape)]
    outputs = [trace, *gradients, second]
    check_rows(outputs, [x, k, a], data, (rank,) * 3, fast_mode, shape)


@pytest.mark.parametrize("steps", [0, 3])
def test_slices_and_sizes_by_the_shape_of_a_state(steps, mode):
    """They are those of the whole batch, so that kernels write them, and known without a step."""
    x, start = pt.vector("x"), pt.vector("start")

    def step(x, h):
        n = h.shape[0]
        moved = pt.concatenate([h[n // 2 :] * x, h[: n // 2] + x])
        return moved, pt.alloc(x, n, 2)

    traces = scanlib.scan(step, x, [start, None], return_updates=False)
    data = [rng.normal(size=steps), rng.normal(size=(3, 5))]
    check_rows(traces, [x, start], data, (0, 1), mode)


@pytest.mark.parametrize("steps", [0, 3])
def test_sizes_that_are_captured(steps, mode):
    """A length of a batch of arrays is one number also where a step is given it."""
    x, y = pt.vector("x"), pt.vector("y")

    def step(x, h):
        n = y.shape[0]
        return h[: n - 1].sum() * pt.ones_like(h) + x, pt.alloc(x, n, 2)

    traces = scanlib.scan(step, x, [pt.zeros(5), None], return_updates=False)
    data = [rng.normal(size=steps), rng.normal(size=(3, 4))]
    check_rows(traces, [x, y], data, (0, 1), mode)


def test_sizes_of_what_a_loop_starts_from_are_the_same_in_the_batch(fast_mode):
    """An initial value that grows to the size of a row is filled in once for the whole batch."""
    x, y, data = pt.matrix("x"), pt.matrix("y"), rng.normal(size=(3, 4, 2))
    outputs = [scanlib.linear_scan(0.5, x), scanlib.cummax(pt.full_like(y, 0.5) * x.shape[0])]
    check_rows(outputs, [x, y], [data, data], (1, 1), fast_mode)
    rows = pt.tensor3("rows")
    f = pytensor.function([rows], vectorize_graph(outputs[0], {x: rows}), mode=fast_mode)
    assert not any(isinstance(node.op, Blockwise) for node in f.maker.fgraph.apply_nodes)


def test_random_draws_differ_between_rows(fast_mode):
    generator, mean = pytensor.shared(np.random.default_rng(3)), pt.scalar("mean")

    def step(rng_state, mean):
        new_state, draw = pt.random.normal(mean, 1, rng=rng_state).owner.outputs
        return [new_state, draw]

    _, draws = scanlib.scan(
        step, outputs_info=[generator, None], non_sequences=mean, n_steps=4, return_updates=False
    )
    means = pt.vector("means")
    f = pytensor.function([means], vectorize_graph(draws, {mean: means}), mode=fast_mode)
    values = f([0.0, 100.0])
    assert values.shape == (2, 4)
    assert (np.abs(values[0]) < 10).all()
    assert (np.abs(values[1] - 100) < 10).all()
    assert len(np.unique(values)) == 8


def test_pieces_by_the_shape_of_a_state(fast_mode):
    """What was put together of pieces is split in one way for the whole batch."""
    x, X = pt.dmatrix("x"), pt.dtensor3("X")
    trace = scanlib.scan(
        lambda x, h: pt.tanh(pt.roll(h, 1) * x), x, pt.full(3, 0.5), return_updates=False
    )
    gradient = pytensor.grad((trace**2).sum(), x)
    batch = vectorize_graph(gradient, {x: X})
    loops = [v.owner.op for v in ancestors([batch]) if v.owner and isinstance(v.owner.op, Scan)]
    nodes = [node.op for op in loops for node in op.fgraph.toposort()]
    assert any(isinstance(op, Split) for op in nodes)
    check_rows([trace, gradient], [x], [rng.normal(size=(3, 4, 3))], (1,), fast_mode)


def slices_from_data():
    """Three items that the data say where to find, read, and written where another one says."""
    x, places = pt.dvector("x"), pt.lmatrix("places")

    def step(h, k):
        seen = 0.7 * h[2 * k[0] : 2 * k[0] + 3] + h[0]
        return h[k[1] : k[1] + 3].set(seen), (h[k[1] : k[1] + 3] ** 2).sum()

    h, y = scanlib.loop(step, x, places)
    return [x, places], [h, y, pytensor.grad((h**3).sum() + y.sum(), x)]


def test_slices_that_begin_elsewhere_in_each_member(mode):
    inputs, outputs = slices_from_data()
    places = np.stack([rng.integers(0, 3, (3, 5)), rng.integers(-7, -3, (3, 5))], axis=2)
    check_rows(outputs, inputs, [rng.normal(size=(3, 7)), places], (1, 1), mode)


@pytest.mark.parametrize("first", [5, -2])
def test_slices_of_a_batch_that_reach_beyond_an_end(first, fast_mode):
    """They end there, as in one loop, and have fewer items than what is written."""
    inputs, outputs = slices_from_data()
    batches = {v: batched(v, 1) for v in inputs}
    f = pytensor.function(
        [*batches.values()], vectorize_graph(outputs[:2], batches), mode=fast_mode
    )
    with pytest.raises(ValueError, match=r"(?i)shape"):
        f(np.ones((2, 7)), [[[0, 0]], [[0, first]]])


COMPOSED = {
    "logarithm of a sum": lambda x, h: x + pt.logsumexp(h[:, None] + x, axis=0),
    "xlogy": lambda x, h: pt.tanh(pt.special.xlogy(h, pt.abs(x)) + x),
    "diagonals": lambda x, h: pt.tanh(pt.diag(h, 1)[:3, :3] @ x + pt.diag(h) @ x),
    "filled": lambda x, h: (
        pt.fill_diagonal(pt.outer(h, x), x[0]) @ x
        + pt.fill_diagonal_offset(pt.outer(x, h), 1.0, 1) @ h * 0.1
    ),
    "kronecker": lambda x, h: pt.tanh(pt.linalg.kron(h[None], x[:, None]).sum(1) + h),
    "contracted": lambda x, h: pt.tanh(pt.tensordot(pt.outer(h, x), pt.outer(x, x), 2) * h),
    "blocks": lambda x, h: pt.linalg.block_diag(pt.outer(h, x), h[None])[:3, :3] @ x,
    "edges": lambda x, h: pt.tanh(
        pt.pad(h, 1, mode="wrap")[2:] * x
        + pt.pad(h, 2, mode="reflect")[1:-3] * pt.pad(x, 1, mode="edge")[:3]
        + pt.pad(h, 1)[2:]
    ),
    "triangles": lambda x, h: pt.tanh(pt.tril(pt.outer(h, x)) @ x + pt.eye(h.shape[0]) @ h),
    "factors": lambda x, h: pt.linalg.cholesky(pt.outer(h, h) + 3 * pt.eye(3)) @ x,
    "orders": lambda x, h: pt.sort(pt.tanh(h * x)) + pt.median(h) * x,
    "masks": lambda x, h: pt.tanh(h[x > 0].set(0.5) + x[h > 0.5].inc(x[0])),
    "choices": lambda x, h: ifelse(x[0] > 0, pt.tanh(h) + x, h * x),
    "put in a triangle": lambda x, h: (
        pt.set_subtensor(pt.zeros((3, 3))[np.tril_indices(3)], pt.concatenate([h, x])) @ x
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_composite_functions(name):
    """Steps of a batch, and of batches of gradients, are kernels as those of one loop are."""
    x, X = pt.dmatrix("x"), pt.dtensor3("X")
    trace = scanlib.scan(COMPOSED[name], x, pt.full(3, 0.5), return_updates=False)
    results = [trace, pytensor.grad((trace**2).sum(), x)]
    batch = vectorize_graph(trace, {x: X})
    data = rng.normal(size=(2, 4, 3))
    members = map(pytensor.function([x], results), data)
    expected = [np.stack(values) for values in zip(*members, strict=True)]
    for graph in (
        vectorize_graph(results, {x: X}),
        [batch, pytensor.grad((batch**2).sum(), X)],
    ):
        function = pytensor.function([X], graph, mode="NUMBA")
        for actual, whole in zip(function(data), expected, strict=True):
            np.testing.assert_allclose(actual, whole, rtol=1e-9, atol=1e-12)
        for loop in scanlib.explain(function).loops:
            assert "numba compiles" not in loop.runs, loop
