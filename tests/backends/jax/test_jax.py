"""Loops under PyTensor's JAX linker, on the CPU: against plain Python loops."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.lowered.associative_scan import AssociativeScan
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from tests.checks import assert_derivatives
from tests.families import FAMILIES
from tests.jax_loops import compiled, loop_ops, run_python
from tests.reference import reference_scan

jax = pytest.importorskip("jax", reason="jax is not installed")

from pytensor.compile.mode import get_mode  # noqa: E402

from scanlib.backends.jax.kernels import TARGET, is_compiled  # noqa: E402
from tests.linear import Recurrence  # noqa: E402

JAX = get_mode("JAX")
rng = np.random.default_rng(11)


def has_compiler():
    return bool(pytensor.config.cxx)


# Loading


@pytest.mark.slow
def test_loading():
    """Importing scanlib and making loops imports no jax. The rules are there for whoever rewrites
    a graph with the mode's rewrites and converts it without the linker, as PyMC does."""
    run_python(
        "import sys\n"
        "import numpy as np, scanlib, pytensor, pytensor.tensor as pt\n"
        "from pytensor.compile.aliasing import add_supervisor_to_fgraph\n"
        "from pytensor.compile.io import In\n"
        "from pytensor.compile.mode import get_mode\n"
        "from pytensor.graph.fg import FunctionGraph\n"
        "x = pt.dvector()\n"
        "y = scanlib.scan(lambda x, y: x + y, x, pt.zeros(()), return_updates=False)\n"
        "assert 'jax' not in sys.modules and 'torch' not in sys.modules\n"
        "fgraph = FunctionGraph([x], [y[-1]], clone=True)\n"
        "add_supervisor_to_fgraph(fgraph, [In(v) for v in fgraph.inputs])\n"
        "get_mode('JAX').optimizer.rewrite(fgraph)\n"
        "from pytensor.link.jax.dispatch import jax_funcify\n"
        "assert float(jax_funcify(fgraph)(np.ones(3))[0]) == 3.0"
    )


# Values and gradients of many loops


COMPILED_FAMILIES = ["affine", "affine-f32", "ar2", "maximum", "log-affine", "clamp", "moebius"]


@pytest.mark.parametrize("name", [name for name in COMPILED_FAMILIES if name in FAMILIES])
def test_families(name):
    """One channel: blocks of steps, compiled, called by XLA."""
    case = FAMILIES[name]
    inputs, traces = case.render()
    function = compiled(inputs, traces)
    assert any(isinstance(op, ElemwiseScan) for op in loop_ops(function))
    for steps in (0, 1, 3, 1025):
        values = case.values(steps)
        tolerance = 1e-3 if case.dtype == "float32" else 1e-9
        for actual, expected in zip(function(*values), case.reference(values), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)


def channels_loop():
    x, a, h0 = pt.dmatrix("x"), pt.dvector("a"), pt.dvector("h0")
    h = scanlib.scan(
        lambda x, h, a: pt.tanh(a * h) + x, x, h0, non_sequences=a, return_updates=False
    )

    def reference(x, a, h):
        rows = []
        for row in x:
            h = np.tanh(a * h) + row
            rows.append(h)
        return np.array(rows).reshape(x.shape)

    return [x, a, h0], h, reference


def channels_values(steps=6):
    return [rng.normal(size=(steps, 3)), rng.uniform(-0.9, 0.9, 3), rng.normal(size=3)]


class TestElementwise:
    @pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
    def test_has_a_kernel(self):
        inputs, h, _ = channels_loop()
        function = compiled(inputs, h)
        (node,) = [n for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]
        assert is_compiled(node.op, node)
        text = jax.jit(function.vm.jit_fn).lower(*channels_values()).as_text()
        assert TARGET in text
        assert "stablehlo.while" not in text

    @pytest.mark.parametrize("perform", ["auto", "python"])
    @pytest.mark.parametrize("steps", [0, 1, 6])
    def test_values(self, perform, steps):
        """With `python`, no compiled loop is called: the fall-back is `lax.scan`."""
        inputs, h, reference = channels_loop()
        with pytensor.config.change_flags(scanlib__perform=perform):
            function = compiled(inputs, h)
            values = channels_values(steps)
            result = function(*values)
        np.testing.assert_allclose(result, reference(*values), rtol=1e-12)
        assert isinstance(result, jax.Array)

    @pytest.mark.slow
    def test_derivatives(self):
        inputs, h, reference = channels_loop()
        values = dict(zip(inputs, channels_values(), strict=True))
        cost = (h**2).sum() + h[-1].sum()

        def plain(*values):
            rows = reference(*values)
            return (rows**2).sum() + rows[-1].sum()

        assert_derivatives(cost, values, plain, JAX)

    def test_traces_are_not_slices(self):
        inputs, h, _ = channels_loop()
        function = compiled(inputs, [h, h[-1]])
        (op,) = loop_ops(function)
        assert isinstance(op, ElemwiseScan)
        assert op.signature.untraced == (True,)
        assert op.signature.n_outputs == 1

    def test_a_trace_whose_channels_the_initial_rows_tell(self):
        x, h0 = pt.dvector("x"), pt.dvector("h0")
        step = lambda x, h: x + pt.zeros_like(h)  # noqa: E731
        h = scanlib.scan(step, x, h0, return_updates=False)
        with pytensor.config.change_flags(on_opt_error="raise"):
            function = compiled([x, h0], h)
        np.testing.assert_array_equal(function([1.0, 2.0], np.zeros(3)), [[1.0] * 3, [2.0] * 3])

    @pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
    def test_gradient_loops_read_slices_in_place(self):
        """With three rows in time, and with none."""
        inputs, h, reference = channels_loop()
        function = compiled(inputs, pytensor.grad((h**2).sum(), inputs))
        x, a, h0 = channels_values(3)
        text = jax.jit(function.vm.jit_fn).lower(x, a, h0).as_text()
        assert "stablehlo.while" not in text
        assert "stablehlo.slice" not in text
        for grads in (function(x, a, h0), jax.vmap(function.vm.jit_fn)(x[None], a[None], h0[None])):
            d = 1e-6 * rng.normal(size=3)
            sides = [(reference(x, a + sign * d, h0) ** 2).sum() for sign in (1, -1)]
            np.testing.assert_allclose(
                (np.asarray(grads[1]) * d).sum(), (sides[0] - sides[1]) / 2, rtol=1e-6
            )
        assert [g.shape for g in function(x[:0], a, h0)] == [(0, 3), (3,), (3,)]

    def test_inputs_are_not_changed(self):
        inputs, h, _ = channels_loop()
        values = channels_values()
        before = [value.copy() for value in values]
        compiled(inputs, pytensor.grad(h.sum(), inputs))(*values)
        for value, old in zip(values, before, strict=True):
            np.testing.assert_array_equal(value, old)

    def test_transformations_of_jax(self):
        """`jit`, `vmap`, `grad` and `hessian` around the function that PyTensor compiled."""
        inputs, h, reference = channels_loop()
        function = compiled(inputs, h).vm.jit_fn

        def run(*values):
            return function(*values)[0]

        x, a, h0 = channels_values()
        xs = rng.normal(size=(4, 6, 3))
        many = jax.vmap(run, in_axes=(0, None, None))(xs, a, h0)
        for x_one, rows in zip(xs, many, strict=True):
            np.testing.assert_allclose(rows, reference(x_one, a, h0), rtol=1e-12)
        doubled = jax.jit(lambda x: 2 * run(x, a, h0))(x)
        np.testing.assert_allclose(doubled, 2 * reference(x, a, h0), rtol=1e-12)
        gradient = jax.grad(lambda a: (run(x, a, h0) ** 2).sum())(a)
        step = 1e-6 * np.eye(3)
        wanted = [
            ((reference(x, a + d, h0) ** 2).sum() - (reference(x, a - d, h0) ** 2).sum()) / 2e-6
            for d in step
        ]
        np.testing.assert_allclose(gradient, wanted, rtol=1e-7)
        assert jax.hessian(lambda h0: run(x, a, h0).sum())(h0).shape == (3, 3)


class TestComplex:
    """Complex numbers run as compiled code, too: a state-space layer has complex poles."""

    def numbers(self, dtype, *shape):
        return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)

    @pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
    @pytest.mark.parametrize("dtype", ["complex64", "complex128"])
    @pytest.mark.parametrize("channels", [(), (1,), (5,)])
    def test_elementwise(self, dtype, channels):
        ndim = len(channels)
        x = pt.tensor("x", dtype=dtype, shape=(None,) * (ndim + 1))
        a, h0 = (pt.tensor(name, dtype=dtype, shape=(None,) * ndim) for name in "ah")

        def step(x, h, a):
            return a * h / (x * x + 2) - pt.conj(x) * pt.imag(h), pt.real(h) + pt.real(a)

        h, y = scanlib.scan(step, x, [h0, None], a, return_updates=False)
        function = compiled([x, a, h0], [h, y])
        (node,) = [n for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]
        assert is_compiled(node.op, node)
        for steps in (0, 1, 7):
            values = (
                self.numbers(dtype, steps, *channels),
                self.numbers(dtype, *channels),
                self.numbers(dtype, *channels),
            )
            rows, sums, state = [], [], values[2]
            for row in values[0]:
                sums.append(np.real(state) + np.real(values[1]))
                state = values[1] * state / (row * row + 2) - np.conj(row) * np.imag(state)
                rows.append(state)
            tolerance = 1e-3 if dtype == "complex64" else 1e-10
            for found, expected in zip(function(*values), (rows, sums), strict=True):
                shape = (steps, *channels)
                np.testing.assert_allclose(
                    found, np.reshape(expected, shape), rtol=tolerance, atol=tolerance
                )

    @pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
    @pytest.mark.parametrize("dtype", ["complex64", "complex128"])
    def test_matrices(self, dtype):
        A, x, h0 = (pt.tensor(dtype=dtype, shape=(None,) * ndim) for ndim in (3, 2, 1))
        h = scanlib.linear_scan(A, x, h0, matrix=True)
        function = compiled([A, x, h0], h)
        (node,) = [n for n in function.maker.fgraph.toposort() if isinstance(n.op, LinearScan)]
        assert is_compiled(node.op, node)
        values = [self.numbers(dtype, *shape) * 0.4 for shape in [(6, 3, 3), (6, 3), (3,)]]
        rows, state = [], values[2]
        for matrix, row in zip(*values[:2], strict=True):
            state = matrix @ state + row
            rows.append(state)
        tolerance = 1e-4 if dtype == "complex64" else 1e-12
        np.testing.assert_allclose(function(*values), rows, rtol=tolerance, atol=tolerance)


class TestMatrices:
    @pytest.mark.parametrize("perform", ["auto", "python"])
    @pytest.mark.parametrize("semiring", ["real", "log", "max", "min"])
    @pytest.mark.parametrize("reverse", [False, True])
    def test_semirings(self, perform, semiring, reverse):

        op = Recurrence(semiring=semiring, reverse=reverse, side="right")
        A, b, h = pt.dtensor3("A"), pt.dmatrix("b"), pt.dmatrix("h")
        with pytensor.config.change_flags(scanlib__perform=perform):
            function = compiled([A, b, h], op(A, b, h))
            for steps in (0, 1, 5):
                values = (
                    0.5 * rng.normal(size=(steps, 3, 3)),
                    rng.normal(size=(steps, 3)),
                    rng.normal(size=(1, 3)),
                )
                expected = op.walked(values)
                np.testing.assert_allclose(function(*values), expected, rtol=1e-10)

    @pytest.mark.slow
    def test_derivatives(self):
        A, x, h0 = pt.dmatrix("A"), pt.dmatrix("x"), pt.dvector("h0")
        h = scanlib.scan(lambda x, h, A: A @ h + x, x, h0, non_sequences=A, return_updates=False)

        def reference(A, x, h):
            total = 0.0
            for row in x:
                h = A @ h + row
                total += (h**2).sum()
            return total

        values = {A: 0.4 * rng.normal(size=(2, 2)), x: rng.normal(size=(4, 2)), h0: np.ones(2)}
        assert any(isinstance(op, LinearScan) for op in loop_ops(compiled([A, x, h0], h)))
        assert_derivatives((h**2).sum(), values, reference, JAX)

    @pytest.mark.parametrize("perform", ["auto", "python"])
    def test_both_sides(self, perform):
        A, P0 = pt.dmatrix("A"), pt.dmatrix("P0")
        P = scanlib.scan(
            lambda P, A: A @ P @ A.T + P0, outputs_info=P0, non_sequences=A, n_steps=4,
            return_updates=False,
        )  # fmt: skip
        a, p = 0.4 * rng.normal(size=(3, 3)), np.eye(3)
        rows = []
        for _ in range(4):
            p = a @ p @ a.T + np.eye(3)
            rows.append(p)
        with pytensor.config.change_flags(scanlib__perform=perform):
            np.testing.assert_allclose(compiled([A, P0], P)(a, np.eye(3)), rows)


@pytest.mark.slow
def test_checkpoints():
    x, a = pt.dvector("x"), pt.dscalar("a")
    h = scanlib.scan(
        lambda x, h, a: pt.tanh(a * h + x), x, pt.constant(0.0), non_sequences=a, checkpoint=3,
        return_updates=False,
    )  # fmt: skip

    def reference(x, a):
        (rows,) = reference_scan(lambda x, h, a: [np.tanh(a * h + x)], [x], [0.0], [a])
        return (rows**2).sum()

    values = {x: rng.normal(size=7), a: np.array(0.5)}
    assert_derivatives((h**2).sum(), values, reference, JAX)


class TestAssociative:
    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("length", [0, 1, 2, 9])
    def test_tree(self, reverse, length, monkeypatch):
        """What other devices than the CPU run."""
        a, b = pt.dtensor3("a"), pt.dmatrix("b")

        def combine(earlier, later):
            return later[0] @ earlier[0], later[0] @ earlier[1] + later[1]

        outputs = scanlib.associative_scan(combine, [a, b], reverse=reverse)
        monkeypatch.setattr("scanlib.backends.jax.combines_in_trees", lambda: True)
        function = compiled([a, b], outputs)
        assert any(isinstance(op, AssociativeScan) for op in loop_ops(function))
        values = [0.5 * rng.normal(size=(length, 2, 2)), rng.normal(size=(length, 2))]
        order = range(length)[::-1] if reverse else range(length)
        expected = [np.zeros_like(value) for value in values]
        before = None
        for t in order:
            row = values[0][t], values[1][t]
            before = row if before is None else combine(before, row)
            expected[0][t], expected[1][t] = before
        for actual, wanted in zip(function(*values), expected, strict=True):
            np.testing.assert_allclose(actual, wanted, rtol=1e-10, atol=1e-12)

    def test_walk(self):
        x = pt.dvector("x")
        y = scanlib.associative_scan(pt.maximum, x)
        function = compiled([x], y)
        assert not any(isinstance(op, AssociativeScan) for op in loop_ops(function))
        values = rng.normal(size=12)
        np.testing.assert_array_equal(function(values), np.maximum.accumulate(values))


def test_explain():
    inputs, h, _ = channels_loop()
    (loop,) = scanlib.explain(compiled(inputs, h)).loops
    assert ("XLA" if has_compiler() else "lax.scan") in loop.runs
    with pytensor.config.change_flags(scanlib__perform="python"):
        (loop,) = scanlib.explain(compiled(inputs, h)).loops
    assert loop.schedule == "chosen by the JAX backend"
    assert "lax.scan" in loop.runs
