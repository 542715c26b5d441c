"""Elementwise loops with channels: broadcasting, sums over channels, sizes, stopping, gradients."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.kernels.printers.llvm import MOST_COPIES
from tests.checks import assert_derivatives, evaluate
from tests.families import assert_lowered, both, kernels, loops
from tests.modes import MODES

rng = np.random.default_rng(17)


@pytest.fixture(
    params=["numba", pytest.param("C", marks=pytest.mark.slow)], autouse=True, scope="module"
)
def backend(request):
    with kernels(request.param):
        yield request.param


def draw(*shape):
    return rng.uniform(-0.9, 0.9, shape)


def check(inputs, outputs, data, mode=MODES["c"], n_loops=1):
    """Compare a lowered function with the Python loop without lowering, for several values."""
    function, plain = both(inputs, outputs, mode)
    ops = assert_lowered(function, n_loops)
    for values in data:
        copies = [np.array(value) for value in values]
        results = function(*values)
        for actual, expected in zip(results, plain(*values), strict=True):
            assert actual.shape == expected.shape
            assert actual.dtype == expected.dtype
            np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-12)
        for value, copy in zip(values, copies, strict=True):
            np.testing.assert_array_equal(value, copy)
        for actual, again in zip(results, function(*values), strict=True):
            assert actual.tobytes() == again.tobytes()
    return ops


class TestChannels:
    def test_vectors_with_scalars_beside_them(self):
        """A scalar state and a scalar sequence beside vectors.

        The loop of the gradient is a plain one: the scalar's cotangent is a sum over channels.
        """
        x, a, u = pt.matrix("x"), pt.vector("a"), pt.scalar("u")
        traces = scanlib.scan(
            lambda x, a, h, g, u: [pt.tanh(a * h + x * g), 0.5 * g + a * u, x * g],
            [x, a], [pt.zeros(x.shape[1]), 1.0, None], u, return_updates=False,
        )  # fmt: skip
        cost = sum((trace**2).sum() for trace in traces)
        data = [(draw(t, n), draw(t), 0.3) for t, n in ((5, 3), (0, 3), (4, 0), (1, 1), (70, 17))]
        check([x, a, u], traces, data)
        function, plain = both([x, a, u], pytensor.grad(cost, [x, a, u]), MODES["c"])
        for values in data:
            for actual, expected in zip(function(*values), plain(*values), strict=True):
                np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-12)

    def test_rows_that_broadcast(self):
        """(T, 1, n) and (T, m, 1) make (m, n), and gradients sum over the axes that they lack."""
        x = pt.tensor("x", dtype="float64", shape=(None, 1, None))
        y = pt.tensor("y", dtype="float64", shape=(None, None, 1))
        h0 = pt.matrix("h0")
        trace = scanlib.scan(lambda x, y, h: h * x + y, [x, y], h0, return_updates=False)
        gradients = pytensor.grad((trace**2).sum(), [x, y, h0])
        data = [
            (draw(t, 1, n), draw(t, m, 1), draw(m, n))
            for t, m, n in ((3, 2, 4), (0, 2, 4), (2, 0, 3), (2, 3, 0), (2, 1, 1), (40, 5, 1))
        ]
        check([x, y, h0], [trace, *gradients], data, n_loops=2)

    def test_three_axes(self):
        x, w = pt.tensor4("x"), pt.vector("w")
        trace, rows = scanlib.scan(
            lambda x, h, w: [0.5 * h + x * w, (x * h).sum(axis=2)],
            x, [pt.zeros(x.shape[1:]), None], w, return_updates=False,
        )  # fmt: skip
        data = [(draw(t, k, m, n), draw(n)) for t, k, m, n in ((4, 2, 3, 5), (1, 1, 1, 1))]
        check([x, w], [trace, rows, pytensor.grad((trace**2).sum() + rows.sum(), w)], data)

    def test_more_exponentials_than_are_inlined(self):
        """What calls a function with a vector passes it as the function takes it."""
        x, h0 = pt.matrix("x"), pt.vector("h0")

        def step(x, h):
            for k in range(MOST_COPIES + 2):
                h = pt.exp(-(k + 1) * h**2 / 100) + x / 10
            return h

        trace = scanlib.scan(step, x, h0, return_updates=False)
        data = [(draw(3, n), draw(n)) for n in (1, 37)]
        check([x, h0], [trace], data)

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", [(1,), (1, 1), (3, 1), (1, 3), (1, 4, 1)])
    def test_axes_of_length_one_in_the_types(self, shape):
        x = pt.tensor("x", dtype="float64", shape=(None, *shape))
        h0 = pt.tensor("h0", dtype="float64", shape=shape)
        trace = scanlib.scan(lambda x, h: 0.5 * h + x, x, h0, return_updates=False)
        gradients = pytensor.grad((trace**2).sum(), [x, h0])
        data = [(draw(t, *shape), draw(*shape)) for t in (0, 1, 9, 1025)]
        check([x, h0], [trace, *gradients], data, n_loops=2)

    def test_a_vector_of_unknown_size_beside_a_column(self):
        """The axis of length one of one state is not that of another."""
        x = pt.tensor("x", dtype="float64", shape=(None, None, 1))
        y = pt.matrix("y")
        traces = scanlib.scan(
            lambda x, y, h: [0.5 * h + x, 2 * y], [x, y], [pt.zeros((x.shape[1], 1)), None],
            return_updates=False,
        )  # fmt: skip
        check([x, y], traces, [(draw(4, 3, 1), draw(4, 5)), (draw(4, 1, 1), draw(4, 0))])

    def test_a_non_sequence_along_two_axes(self):
        w, h0 = pt.vector("w"), pt.matrix("h0")
        trace = scanlib.scan(
            lambda h, w: 0.5 * h + w[:, None] * w[None, :], None, h0, w, n_steps=4,
            return_updates=False,
        )  # fmt: skip
        check([w, h0], [trace], [(draw(n), draw(n, n)) for n in (3, 1, 0)])

    def test_states_of_different_sizes(self):
        """Nothing relates the sizes of states that do not meet."""
        x, y = pt.matrix("x"), pt.matrix("y")
        traces = scanlib.scan(
            lambda x, y, h, g: [pt.tanh(h) + x, 0.5 * g + y, y.sum(), (x * 2).T],
            [x, y], [pt.zeros(x.shape[1]), pt.zeros(y.shape[1]), None, None],
            return_updates=False,
        )  # fmt: skip
        data = [(draw(4, m), draw(4, n)) for m, n in ((3, 5), (5, 3), (0, 4), (4, 1), (2, 2))]
        check([x, y], traces, data)

    def test_a_transposed_output(self):
        x = pt.tensor3("x")
        traces = scanlib.scan(
            lambda x, h: [0.5 * h + x, x.T, x.T.sum(axis=0)],
            x, [pt.zeros(x.shape[1:]), None, None], return_updates=False,
        )  # fmt: skip
        check([x], traces, [(draw(4, m, n),) for m, n in ((3, 5), (5, 3), (1, 4))])

    def test_a_vector_beside_a_matrix(self):
        """The vector stands for rows of the matrix, or for its columns, or for neither."""
        x, y = pt.tensor3("x"), pt.matrix("y")
        traces = scanlib.scan(
            lambda x, y, h, g: [0.5 * h + x * x, pt.tanh(g + y), (x * y[:, None]).sum(axis=1)],
            [x, y], [pt.zeros(x.shape[1:]), pt.zeros(y.shape[1]), None], return_updates=False,
        )  # fmt: skip
        check([x, y], traces, [(draw(4, m, n), draw(4, m)) for m, n in ((3, 5), (2, 1), (0, 2))])

    @pytest.mark.slow
    def test_accumulators_over_some_axes(self):
        """Cotangents of non-sequences sum over time and over the axes that these lack."""
        x = pt.tensor3("x")
        a, b, c, d = pt.matrix("a"), pt.vector("b"), pt.scalar("c"), pt.col("d")
        trace = scanlib.scan(
            lambda x, h, a, b, c, d: pt.tanh(a * h + b * x + c + d * x),
            x, pt.zeros(x.shape[1:]), [a, b, c, d], return_updates=False,
        )  # fmt: skip
        gradients = pytensor.grad((trace**2).sum(), [x, a, b, c, d])
        data = [
            (draw(t, m, n), draw(m, n), draw(n), 0.4, draw(m, 1))
            for t, m, n in ((4, 3, 5), (0, 3, 5), (2, 0, 3), (2, 3, 0), (1, 1, 1))
        ]
        check([x, a, b, c, d], [trace, *gradients], data, n_loops=2)

    @pytest.mark.parametrize("dtype", ["float32", "complex128", "int8", "int64", "uint8", "bool"])
    def test_dtypes(self, dtype):
        x = pt.tensor("x", dtype=dtype, shape=(None, None))
        h0 = pt.vector("h0", dtype=dtype)

        def step(x, h):
            if dtype == "bool":
                return [h ^ x, h & x]
            return [h * x + x, x - h]

        traces = scanlib.scan(step, x, [h0, None], return_updates=False)
        function, plain = both([x, h0], traces, MODES["c"])
        assert_lowered(function)
        values = (draw(9, 4) * 90).astype(dtype), (draw(4) * 90).astype(dtype)
        with np.errstate(all="ignore"):
            expected = plain(*values)
        for actual, wanted in zip(function(*values), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-4 if dtype == "float32" else 1e-11)
            assert actual.dtype == wanted.dtype

    def test_arrays_that_are_not_contiguous(self):
        x, h0 = pt.matrix("x"), pt.vector("h0")
        trace = scanlib.scan(lambda x, h: 0.5 * h + x, x, h0, return_updates=False)
        wide, start = draw(12, 10), draw(20)
        data = [
            (wide[::2, ::2], start[:5]), (wide[::-1], start[::2]), (wide.T, start[:12]),
            (wide[:, ::-3], start[-4:][::-1]), (np.asfortranarray(wide), start[:10]),
        ]  # fmt: skip
        check([x, h0], [trace, pytensor.grad((trace**2).sum(), x)], data, n_loops=2)

    @pytest.mark.slow
    def test_in_numba_mode(self):
        x = pt.tensor("x", dtype="float64", shape=(None, 1, None))
        w, h0 = pt.vector("w"), pt.matrix("h0")
        traces = scanlib.scan(
            lambda x, h, s, w: [0.5 * h + x * w, s + w * s, (h * x).sum()],
            x, [h0, pt.ones_like(w), None], w, return_updates=False,
        )  # fmt: skip
        data = [(draw(t, 1, n), draw(n), draw(m, n)) for t, m, n in ((5, 3, 4), (0, 2, 2))]
        check([x, w, h0], traces, data, MODES["numba"])
        # The loop of the gradient adds sums over channels, and is a plain one.
        gradient = pytensor.grad(traces[0].sum() + traces[2].sum(), w)
        function, plain = both([x, w, h0], [gradient], MODES["numba"])
        for values in data:
            np.testing.assert_allclose(function(*values)[0], plain(*values)[0], rtol=1e-11)


class TestSizes:
    """What does not fit is an error of the same class, lowered or not."""

    @staticmethod
    def errors(inputs, outputs, values):
        function = pytensor.function(inputs, outputs, mode=MODES["numba"])
        assert_lowered(function)
        with pytensor.config.change_flags(scanlib__lower=False):
            plain = pytensor.function(inputs, outputs, mode=MODES["numba"])
        found = []
        for each in (function, plain):
            with pytest.raises(Exception) as caught:  # noqa: PT011 -- the classes are compared
                each(*values)
            found.append(caught.type)
        return found

    def test_rows_and_states(self):
        x, h0 = pt.matrix("x"), pt.vector("h0")
        trace = scanlib.scan(lambda x, h: 0.5 * h + x, x, h0, return_updates=False)
        lowered, plain = self.errors([x, h0], trace, (draw(4, 3), draw(2)))
        assert lowered is plain

    def test_a_state_that_changes_its_size(self):
        x, h0 = pt.matrix("x"), pt.vector("h0")
        traces = scanlib.scan(lambda x, h: [2 * x, h * 2], x, [h0, None], return_updates=False)
        lowered, plain = self.errors([x, h0], traces, (draw(4, 3), draw(2)))
        assert lowered is plain

    def test_sequences_of_different_lengths(self):
        x, y = pt.matrix("x"), pt.matrix("y")
        trace = scanlib.scan(
            lambda x, y, h: 0.5 * h + x * y, [x, y], pt.zeros(3), n_steps=4, return_updates=False
        )
        lowered, plain = self.errors([x, y], trace, (draw(4, 3), draw(2, 3)))
        assert lowered is plain

    def test_arrays_of_a_size_of_their_own(self):
        """A step may make arrays; only those of the size of something it reads are channels."""
        x, n = pt.matrix("x"), pt.lscalar("n")
        trace, filled = scanlib.scan(
            lambda x, h: [0.5 * h + x, pt.alloc(x[0], n)], x, [pt.zeros(3), None],
            return_updates=False,
        )  # fmt: skip
        results = evaluate([trace, filled], {x: draw(4, 3), n: 5}, MODES["c"])
        assert results[0].shape == (4, 3)
        assert results[1].shape == (4, 5)

    def test_outputs_filled_to_the_size_of_another_value(self):
        """What an output is filled with does not tell its size; what it is like does."""
        x, y, v = pt.matrix("x"), pt.matrix("y"), pt.vector("v")
        traces = scanlib.scan(
            lambda x, y, v, h: [0.5 * h + x, pt.full_like(y, v), pt.zeros_like(x)],
            [x, y, v], [pt.zeros(3), None, None], return_updates=False,
        )  # fmt: skip
        f = pytensor.function([x, y, v], traces, mode=MODES["c"])
        for size in (5, 3, 0):
            values = draw(4, 3), draw(4, size), draw(4)
            _, filled, zeros = f(*values)
            np.testing.assert_array_equal(filled, np.repeat(values[2][:, None], size, axis=1))
            np.testing.assert_array_equal(zeros, np.zeros((4, 3)))


class TestStopping:
    def test_scalars(self):
        x, h0 = pt.vector("x"), pt.scalar("h0")

        def step(x, h, g):
            new = 0.5 * h + x
            return [new, g + new], scanlib.until(new > 1.0)

        traces = scanlib.scan(step, x, [h0, 0.0], return_updates=False)
        gradients = pytensor.grad(sum((t**2).sum() for t in traces), [x, h0])
        data = [(np.r_[np.full(k, 0.1), 2.0, draw(300)], 0.0) for k in (0, 1, 63, 64, 65, 200)]
        check([x, h0], [*traces, *gradients], [*data, (draw(0), 1.0), (np.zeros(70), 0.0)])

    def test_vectors(self):
        x, y, h0 = pt.matrix("x"), pt.vector("y"), pt.vector("h0")

        def step(x, y, h):
            return [0.5 * h + x, x * y], scanlib.until(y > 0.95)

        traces = scanlib.scan(step, [x, y], [h0, None], return_updates=False)
        gradient = pytensor.grad((traces[0] ** 2).sum(), x)
        data = []
        for stop in (0, 1, 63, 64, 65, 130):
            y_value = draw(150)
            y_value[stop] = 1.0
            data.append((draw(150, 3), y_value, draw(3)))
        check([x, y, h0], [*traces, gradient], data)


class TestStates:
    @pytest.mark.slow
    def test_taps_and_last_rows(self):
        x, h0 = pt.matrix("x"), pt.matrix("h0")
        trace, other = scanlib.scan(
            lambda x, h1, h3, g: [pt.tanh(h1 - h3) + x, g * x],
            x, [{"initial": h0, "taps": [-1, -3]}, pt.ones(x.shape[1])], return_updates=False,
        )  # fmt: skip
        data = [(draw(t, n), draw(3, n)) for t, n in ((1, 3), (2, 1), (3, 0), (9, 5))]
        check([x, h0], [trace[-1], other[-1]], data)
        gradient = pytensor.grad((trace**2).sum(), [x, h0])
        check([x, h0], [trace, *gradient], data, n_loops=2)

    def test_states_that_swap(self):
        a0, b0, c0 = pt.vectors("a0", "b0", "c0")
        traces = scanlib.scan(
            lambda a, b, c: [b, c, a], outputs_info=[a0, b0, c0], n_steps=5, return_updates=False
        )
        check([a0, b0, c0], traces, [(draw(3), draw(3), draw(3))])

    def test_reading_the_loop_of_another(self):
        """Loops inside a step are no elementwise operation; what is left outside still is."""
        x = pt.matrix("x")
        trace = scanlib.scan(
            lambda x, h: h + scanlib.scan(lambda y, g: g * 0.5 + y, x, 0.0, return_updates=False),
            x, pt.zeros(x.shape[1]), return_updates=False,
        )  # fmt: skip
        function, plain = both([x], trace, MODES["c"])
        assert len(loops(function)) >= 1
        value = draw(4, 3)
        np.testing.assert_allclose(function(value), plain(value), rtol=1e-12)


def exponential_smoothing(x, level, trend, alpha, beta):
    new = pt.switch(pt.isnan(x), level + trend, alpha * x + (1 - alpha) * (level + trend))
    return [new, beta * (new - level) + (1 - beta) * trend]


MODELS = {
    "affine": (lambda x, h, a, b: [a * h + b * x], 1, (0.8, 0.5)),
    "garch": (lambda x, v, w, a, b: [w + a * x**2 + b * v], 1, (0.2, 0.3, 0.5)),
    "deviation": (lambda x, s, w, a: [pt.sqrt(w + a * x**2 + 0.5 * s**2)], 1, (0.2, 0.3)),
    "tanh": (lambda x, h, w, u: [pt.tanh(w * h + u * x)], 1, (0.7, 0.4)),
    "epidemic": (
        lambda x, s, i, b, g: [s - b * s * i, i + b * s * i - g * i + 0.01 * x**2],
        2, (0.3, 0.2),
    ),
    "q-learning": (
        lambda x, q0, q1, a: [
            pt.switch(x > 0, q0 + a * (x - q0), q0), pt.switch(x > 0, q1, q1 + a * (x - q1)),
        ],
        2, (0.4,),
    ),
    "smoothing": (exponential_smoothing, 2, (0.4, 0.3)),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("channels", [False, True], ids=["scalar", "vector"])
@pytest.mark.parametrize("name", MODELS)
def test_gradient_loops_are_lowered(name, channels):
    step, n_states, weights = MODELS[name]
    if channels and name not in ("garch", "q-learning"):
        pytest.skip("two models show it for channels")
    x = pt.matrix("x") if channels else pt.vector("x")
    parameters = [pt.scalar(f"w{i}") for i in range(len(weights))]
    start = pt.full(x.shape[1], 0.5) if channels else np.float64(0.5)
    traces, _ = scanlib.scan(step, x, [start] * n_states, parameters, return_list=True)
    cost = sum((trace**2).sum() for trace in traces)
    value = np.random.default_rng(4).uniform(0.1, 0.9, (7, 2) if channels else 7)
    value[1::3] *= -1
    inputs = dict(zip([x, *parameters], [value, *weights], strict=True))
    gradient = pytensor.grad(cost, list(inputs))
    function, plain = both(list(inputs), [cost, *gradient], MODES["c"])
    assert_lowered(function)
    for actual, expected in zip(
        function(*inputs.values()), plain(*inputs.values()), strict=True
    ):  # fmt: skip
        np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)

    def reference(rows, *weights):
        states, total = [np.float64(0.5)] * n_states, 0.0
        for row in rows:
            states = NUMPY_MODELS[name](row, *states, *weights)
            total += sum(float(state) ** 2 for state in states)
        return total

    if not channels:
        assert_derivatives(cost, inputs, reference, MODES["c"])


def _smoothing(x, level, trend, alpha, beta):
    new = alpha * x + (1 - alpha) * (level + trend)
    return [new, beta * (new - level) + (1 - beta) * trend]


NUMPY_MODELS = {
    "affine": lambda x, h, a, b: [a * h + b * x],
    "garch": lambda x, v, w, a, b: [w + a * x**2 + b * v],
    "deviation": lambda x, s, w, a: [np.sqrt(w + a * x**2 + 0.5 * s**2)],
    "tanh": lambda x, h, w, u: [np.tanh(w * h + u * x)],
    "epidemic": lambda x, s, i, b, g: [s - b * s * i, i + b * s * i - g * i + 0.01 * x**2],
    "q-learning": lambda x, p, q, a: [
        np.where(x > 0, p + a * (x - p), p), np.where(x > 0, q, q + a * (x - q)),
    ],
    "smoothing": _smoothing,
}  # fmt: skip
