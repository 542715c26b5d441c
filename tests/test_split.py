"""Loops taken apart: what leaves them, what stays, and that values and gradients stay the same."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.replace import vectorize_graph
from pytensor.raise_op import Assert
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Reshape

import scanlib
from scanlib.ops import ElemwiseScan, Scan
from scanlib.ops.errors import SequenceLengthError
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.reductions import StepProducts
from tests.checks import assert_derivatives, assert_same
from tests.modes import MODES
from tests.reference import reference_scan

T, N, K = 6, 3, 2


class Numpy:
    """NumPy under the names that the steps below use."""

    tanh, exp, where, outer, sum = np.tanh, np.exp, np.where, np.outer, np.sum
    sigmoid = staticmethod(lambda x: 1 / (1 + np.exp(-x)))
    solve = staticmethod(np.linalg.solve)
    cholesky = staticmethod(np.linalg.cholesky)
    logdet = staticmethod(lambda a: np.linalg.slogdet(a)[1])
    checked = staticmethod(lambda x, condition: x)
    set_first = staticmethod(lambda x, v: np.concatenate([[v], x[1:]]))


class Symbols:
    """PyTensor under the same names."""

    tanh, exp, where, outer, sum = pt.tanh, pt.exp, pt.where, pt.outer, pt.sum
    sigmoid = staticmethod(pt.sigmoid)
    solve = staticmethod(pt.linalg.solve)
    cholesky = staticmethod(pt.linalg.cholesky)
    logdet = staticmethod(lambda a: pt.linalg.slogdet(a)[1])
    checked = staticmethod(lambda x, condition: Assert("must hold")(x, pt.all(condition)))
    set_first = staticmethod(lambda x, v: pt.set_subtensor(x[0], v))


SHAPES = {
    "x": (T, N),
    "z": (T, N),
    "s": (T,),
    "k": (T,),
    "a": (T, N, N),
    "batch": (T, 4, N),
    "W": (N, K),
    "U": (N, N),
    "V": (N, N),
    "b": (N,),
    "h": (N,),
    "g": (N,),
    "H": (4, N),
    "M": (N, N),
    "c": (),
    "c2": (N, K),
    "v": (),
}


def values_of(names: list[str], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    found = {}
    for name in names:
        value = 0.5 * rng.standard_normal(SHAPES[name])
        if name == "a":
            value = value @ value.mT + np.eye(N)
        if name == "k":
            value = rng.integers(0, N, T)
        if name == "U":
            value = value + 2 * np.eye(N)
        found[name] = value
    return found


class Case(NamedTuple):
    """A loop in symbols and in NumPy, and how many loops its graph may keep."""

    step: Callable
    sequences: tuple[str, ...]
    initials: tuple[str | None, ...] = (None,)
    others: tuple[str, ...] = ()
    scans: int = 0  # general loops that remain
    kernels: int = 0  # elementwise and matrix kernels
    products: int = 0  # matrix products outside
    options: dict[str, Any] = {}  # noqa: RUF012

    @property
    def names(self) -> list[str]:
        used = [*self.sequences, *(name for name in self.initials if name), *self.others]
        return list(dict.fromkeys(used))


class Built(NamedTuple):
    inputs: list
    traces: list
    values: dict[str, np.ndarray]
    walk: Callable


def build(case: Case, steps: int = T) -> Built:
    """Return the loop's inputs, traces and values, and the plain loop as a function of values."""
    values = values_of(case.names)
    values |= {name: values[name][:steps] for name in case.sequences}
    variables = {
        name: pt.TensorType(value.dtype, shape=(None,) * value.ndim)(name)
        for name, value in values.items()
    }

    def run(library, scan, given, **options):
        return scan(
            lambda *args: case.step(library, *args),
            sequences=[given[name] for name in case.sequences],
            outputs_info=[None if name is None else given[name] for name in case.initials],
            non_sequences=[given[name] for name in case.others],
            **case.options,
            **options,
        )

    traces = run(Symbols, scanlib.scan, variables, return_updates=False)
    traces = traces if isinstance(traces, list) else [traces]

    def walk(*arrays):
        given = dict(zip(values, arrays, strict=True))
        return reference_scan(
            lambda *args: _listed(case.step(Numpy, *args)),
            sequences=[given[name] for name in case.sequences],
            outputs_info=[None if name is None else given[name] for name in case.initials],
            non_sequences=[given[name] for name in case.others],
            rows=row_types(case),
            **case.options,
        )

    return Built(list(variables.values()), traces, values, walk)


def _listed(value: Any) -> list:
    return list(value) if isinstance(value, list | tuple) else [value]


def row_types(case: Case) -> list:
    """Return the row types of a loop's outputs, found by one step of the plain loop."""
    values = values_of(case.names)
    first = case._replace(sequences=case.sequences)
    arguments = [values[name][0] for name in first.sequences]
    arguments += [values[name] for name in first.initials if name]
    arguments += [values[name] for name in first.others]
    return [(np.shape(row), np.asarray(row).dtype) for row in _listed(case.step(Numpy, *arguments))]


def count(function, kind) -> int:
    return sum(isinstance(node.op, kind) for node in function.maker.fgraph.toposort())


def loops_of(function) -> list:
    return [node for node in function.maker.fgraph.toposort() if isinstance(node.op, Scan)]


def core(node):
    """Return the Op of a node without the batch around it."""
    return getattr(node.op, "core_op", node.op)


def unfused(linker: str):
    """Return a mode that leaves products as they are, so that they can be counted."""
    return MODES[linker].excluding("BlasOpt", "fusion", "inplace")


MAPS = {
    "arithmetic": Case(lambda p, x, z: 2 * x + z**2, ("x", "z")),
    "a function": Case(lambda p, x: p.tanh(x), ("x",), kernels=1),
    "a product": Case(lambda p, x, W: x @ W, ("x",), others=("W",), products=1),
    "a function of a product": Case(
        lambda p, x, W: p.tanh(x @ W + 1) ** 2, ("x",), others=("W",), kernels=1, products=1
    ),
    "two outputs": Case(lambda p, x, W: [x @ W, x + 1.0], ("x",), (None, None), ("W",), products=1),
    "a check": Case(lambda p, x: p.checked(x, x > -100) * 2, ("x",)),
    "a lookup": Case(lambda p, k, W: W[k] ** 2, ("k",), others=("W",)),
    "a matrix and a vector": Case(lambda p, a, x: a @ x, ("a", "x")),
    "a quadratic form": Case(lambda p, a, x: x @ a @ x, ("a", "x")),
    "matrices": Case(lambda p, x, W: (W * x[:, None]).T @ W, ("x",), others=("W",)),
    "one matrix to solve with": Case(lambda p, x, U: p.solve(U, x), ("x",), others=("U",)),
    "matrices to solve for": Case(lambda p, a, U: p.solve(U, a), ("a",), others=("U",)),
    "a slice that is set": Case(lambda p, x: p.set_first(x, 1.0) * 2, ("x",)),
    "a reduction": Case(lambda p, x, z: (x * z).sum(), ("x", "z")),
    "what is the same at every step": Case(
        lambda p, x, W: [x * 1.0, W.sum(axis=0)], ("x",), (None, None), ("W",)
    ),
    "backwards": Case(
        lambda p, x, W: x @ W, ("x",), others=("W",), products=1, options={"go_backwards": True}
    ),
}


class TestMaps:
    @pytest.mark.parametrize("name", MAPS)
    def test_no_loop_remains(self, name):
        case = MAPS[name]
        built = build(case)
        function = pytensor.function(built.inputs, built.traces, mode=unfused("c"))
        assert count(function, Scan) == 0
        assert count(function, ElemwiseScan) == case.kernels
        assert count(function, Dot) >= case.products

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


RECURRENT = {
    "a product before": Case(
        lambda p, x, h, V, U: p.tanh(x @ V + h @ U), ("x",), ("h",), ("V", "U"), scans=1, products=1
    ),
    "a product after": Case(
        lambda p, x, h, V, U: [p.tanh(x + h @ U), p.tanh(h @ V)],
        ("x",),
        ("h", None),
        ("V", "U"),
        scans=1,
        kernels=1,
        products=1,
    ),
    "light work before and after": Case(
        lambda p, x, h, U: [p.tanh(p.exp(x) + h @ U), 2 * h], ("x",), ("h", None), ("U",), scans=1
    ),
    "a recurrence that leads": Case(
        lambda p, x, g, h, U: [0.5 * g + x, p.tanh(g + h @ U)],
        ("x",),
        ("g", "h"),
        ("U",),
        scans=1,
        kernels=1,
    ),
    "a recurrence that follows": Case(
        lambda p, x, h, g, U: [p.tanh(x + h @ U), 0.5 * g + h],
        ("x",),
        ("h", "g"),
        ("U",),
        scans=1,
        kernels=1,
    ),
    "two matrix recurrences, joined": Case(
        lambda p, x, h, g, U, V: [x + 0.1 * (h @ U), x + h - 0.1 * (g @ V)],
        ("x",),
        ("h", "g"),
        ("U", "V"),
        kernels=1,
    ),
    "two matrix recurrences of two shapes": Case(
        lambda p, x, h, H, U, V: [x + 0.1 * (h @ U), x + h - 0.1 * (H @ V)],
        ("x",),
        ("h", "H"),
        ("U", "V"),
        kernels=2,
    ),
    "a scalar recurrence": Case(
        lambda p, x, s, v, h, U: [0.5 * v + s, p.tanh(x * v + h @ U)],
        ("x", "s"),
        ("v", "h"),
        ("U",),
        scans=1,
        kernels=1,
    ),
}


class TestRecurrences:
    @pytest.mark.parametrize("name", RECURRENT)
    def test_what_remains(self, name):
        case = RECURRENT[name]
        built = build(case)
        function = pytensor.function(built.inputs, built.traces, mode=unfused("c"))
        assert count(function, Scan) == case.scans
        assert count(function, (ElemwiseScan, LinearScan)) == case.kernels
        assert count(function, Dot) == case.products

    @pytest.mark.parametrize("steps", [T, 1, 0])
    @pytest.mark.parametrize("name", RECURRENT)
    def test_values(self, name, steps):
        built = build(RECURRENT[name], steps)
        function = pytensor.function(built.inputs, built.traces, mode=MODES["c"])
        assert_same(function(*built.values.values()), built.walk(*built.values.values()))

    @pytest.mark.parametrize("name", ["a product after", "a recurrence that leads"])
    def test_values_in_numba_mode(self, name):
        built = build(RECURRENT[name])
        function = pytensor.function(built.inputs, built.traces, mode=MODES["numba"])
        assert_same(function(*built.values.values()), built.walk(*built.values.values()))

    @pytest.mark.parametrize("name", ["a product before", "a scalar recurrence"])
    def test_derivatives(self, name, fast_mode):
        built = build(RECURRENT[name], 3)
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

    def test_an_untraced_recurrence_that_others_read_stays(self):
        case = RECURRENT["a recurrence that leads"]
        built = build(case)
        function = pytensor.function(built.inputs, built.traces[1], mode=MODES["c"])
        (loop,) = loops_of(function)
        assert loop.op.signature.n_states == 2
        assert count(function, ElemwiseScan) == 0
        expected = built.walk(*built.values.values())[1:]
        assert_same([function(*built.values.values())], expected)


class TestUntil:
    """What comes after a loop sees the steps that ran; nothing comes before it."""

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
        assert count(function, Dot) == 1  # the one after the loop
        rng = np.random.default_rng(1)
        values = [0.3 * rng.standard_normal(s) for s in ((steps, N), (N, N), (N, N))]
        if steps > 5:
            values[0][5] = 3 * np.linalg.pinv(values[1])[:, 0]
        expected = self.walk(*values)
        assert steps < 5 or 0 < len(expected[0]) < steps
        assert_same(function(*values), expected)

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


def network(kind: str, batch: bool = True):
    """Return the inputs, states and weights of a recurrent network, in float64."""
    x, h0 = (pt.dtensor3("x"), pt.dmatrix("h0")) if batch else (pt.dmatrix("x"), pt.dvector("h0"))

    def rnn(x, h, W, U):
        return pt.tanh(x @ W + h @ U)

    def gru(x, h, W, U, V):
        n = h.shape[-1]
        a = x @ W
        gates = pt.sigmoid(a[..., : 2 * n] + h @ U)
        new = pt.tanh(a[..., 2 * n :] + (gates[..., :n] * h) @ V)
        return (1 - gates[..., n:]) * h + gates[..., n:] * new

    def lstm(x, h, c, W, U):
        n = h.shape[-1]
        a = x @ W + h @ U
        i, f, o = (pt.sigmoid(a[..., k * n : (k + 1) * n]) for k in range(3))
        c = f * c + i * pt.tanh(a[..., 3 * n :])
        return [o * pt.tanh(c), c]

    step, columns = {"rnn": (rnn, (1, 1)), "gru": (gru, (3, 2, 1)), "lstm": (lstm, (4, 4))}[kind]
    weights = [pt.dmatrix(name) for name in ("W", "U", "V")[: len(columns)]]
    initial = [h0, pt.zeros_like(h0)] if kind == "lstm" else [h0]
    traces = scanlib.scan(step, x, initial, weights, name=kind, return_updates=False)
    states = traces[0] if kind == "lstm" else traces
    rng = np.random.default_rng(0)
    rows = (2,) if batch else ()
    values = [rng.standard_normal((T, *rows, K)), rng.standard_normal((*rows, N))]
    values += [
        0.5 * rng.standard_normal((K if k == 0 else N, c * N)) for k, c in enumerate(columns)
    ]
    return [x, h0, *weights], states, weights, values


class TestNetworks:
    @pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
    @pytest.mark.parametrize("batch", [True, False])
    def test_weight_gradients_are_single_products(self, kind, batch):
        inputs, states, weights, _ = network(kind, batch)
        gradients = pytensor.grad(pt.sum(states**2), weights)
        function = pytensor.function(inputs, gradients, mode=unfused("c"))
        forward, backward = loops_of(function)
        # One product for each weight, and of one series x W before the loop.
        assert count(function, Dot) == len(weights) + (not batch)
        products = [n for n in forward.op.body.toposort() if isinstance(n.op, Dot)]
        assert len(products) == len(weights) - (not batch)
        for output in function.maker.fgraph.outputs:
            product = output if isinstance(output.owner.op, Dot) else output.owner.inputs[0]
            assert isinstance(product.owner.op, Dot)
        # The backward loop multiplies with the transposed weights alone, and sums nothing.
        products = [n for n in backward.op.body.toposort() if isinstance(n.op, Dot)]
        assert len(products) == len(weights) - 1
        assert forward.op.signature.n_carries == 0
        assert backward.op.signature.n_carries == (2 if kind == "lstm" else 1)

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
    def test_the_backward_loop_computes_no_gate_again(self, kind):
        inputs, states, weights, _ = network(kind)
        gradients = pytensor.grad(pt.sum(states**2), weights)
        function = pytensor.function(inputs, gradients, mode=unfused("c"))
        forward, backward = loops_of(function)
        assert not any("sigmoid" in str(n.op).lower() for n in backward.op.body.toposort())
        assert forward.op.signature.n_outputs > 0

    @pytest.mark.parametrize("kind", ["rnn", "gru", "lstm"])
    @pytest.mark.parametrize("steps", [T, 1, 0])
    @pytest.mark.parametrize("batch", [True, False])
    def test_gradients(self, kind, steps, batch):
        inputs, states, _, values = network(kind, batch)
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
        assert count(function, Dot) == 1
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
        assert count(function, Dot) == 1
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((T, N)), rng.standard_normal((T, K))
        step = pytensor.function([p := pt.dvector(), q := pt.dvector()], outer(p, q))
        expected = sum(step(p, q) for p, q in zip(a, b, strict=True))
        np.testing.assert_allclose(function(a, b), expected, rtol=1e-10, atol=1e-12)
        with pytest.raises(IndexError, match="fewer than 1 step"):
            function(a[:0], b[:0])

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
        assert count(function, Dot) == 1
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((T, N)), rng.standard_normal((T, K))
        h, rows = np.zeros(N), []
        for row in a:
            h = np.tanh(h + row)
            rows.append(h)
        np.testing.assert_allclose(function(a, b), np.array(rows).T @ b, rtol=1e-12)

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


class TestFlags:
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
        assert count(function, Dot) == products
        assert_same(function(*values), expected)

    @pytest.mark.parametrize("flag", ["scanlib__split", "scanlib__split_affine"])
    def test_recurrences(self, flag):
        built = build(RECURRENT["a recurrence that leads"])
        with pytensor.config.change_flags(**{flag: False}):
            function = pytensor.function(built.inputs, built.traces, mode=MODES["c"])
        assert count(function, Scan) == 1
        assert count(function, ElemwiseScan) == 0
        assert_same(function(*built.values.values()), built.walk(*built.values.values()))

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


class TestExplain:
    def test_it_says_what_left_a_loop(self):
        inputs, states, weights, _ = network("lstm", batch=False)
        gradient = pytensor.grad(states.sum(), weights)
        said = scanlib.explain(pytensor.function(inputs, gradient, mode=MODES["c"]))
        assert ("lstm", "1 value computed for all steps before the loop") in said.splits
        (backward,) = (what for name, what in said.splits if name == "lstm_gradient")
        assert "2 sums taken over all steps at once" in backward
        assert "lstm was taken apart: 1 value" in str(said)
        assert "lstm was taken apart: 1 value" in said._repr_html_()
        data = [{"loop": name, "what": what} for name, what in said.splits]
        assert said.to_dict()["splits"] == data

    def test_it_says_that_no_loop_remains(self):
        x, V = pt.dmatrix("x"), pt.dmatrix("V")
        y = scanlib.map(lambda x: x @ V, x, name="map of rows", return_updates=False)
        said = scanlib.explain(y, MODES["c"])
        assert said.loops == []
        assert said.splits == [("map of rows", "1 output computed for all steps; no loop remains")]
        assert "no loop remains" in str(said)
