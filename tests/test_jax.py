"""Loops under PyTensor's JAX linker, on the CPU: against plain Python loops."""

import os
import subprocess
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.associative_scan import AssociativeScan
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.reductions import StepProducts
from scanlib.ops.scan import Scan
from tests.checks import assert_derivatives, assert_same
from tests.families import FAMILIES
from tests.reference import reference_scan

jax = pytest.importorskip("jax", reason="jax is not installed")

from pytensor.compile.mode import get_mode  # noqa: E402

from scanlib.backends.jax.bounded import UnknownLengthError  # noqa: E402
from scanlib.backends.jax.kernels import kernel_for  # noqa: E402

JAX = get_mode("JAX")
rng = np.random.default_rng(11)


def compiled(inputs, outputs, mode=JAX):
    return pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")


def loop_ops(function):
    return [
        node.op
        for node in function.maker.fgraph.toposort()
        if type(node.op).__module__.startswith("scanlib.ops")
    ]


def has_compiler():
    return bool(pytensor.config.cxx)


# Loading


def run_python(code, **flags):
    """Run code in a process of its own."""
    flags = {"base_compiledir": pytensor.config.base_compiledir} | flags
    text = ",".join(f"{name}={value}" for name, value in flags.items())
    subprocess.run(
        [sys.executable, "-c", code], check=True, env=os.environ | {"PYTENSOR_FLAGS": text}
    )


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
        target = kernel_for(node.op, node)
        assert target is not None
        text = jax.jit(function.vm.jit_fn).lower(*channels_values()).as_text()
        assert target in text
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

    @pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
    def test_gradient_loops_read_slices_in_place(self):
        """With three rows in time, and with none."""
        from scanlib.backends.jax.windows import Slice

        inputs, h, reference = channels_loop()
        function = compiled(inputs, pytensor.grad((h**2).sum(), inputs))
        nodes = function.maker.fgraph.toposort()
        assert any(isinstance(node.op, Slice) for node in nodes)
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
        assert kernel_for(node.op, node) is not None
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
        assert kernel_for(node.op, node) is not None
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
        from scanlib.ops.linear_loop import run_in_python
        from scanlib.ops.linear_scan import Parts

        op = LinearScan(semiring=semiring, reverse=reverse, side="right")
        A, b, h = pt.dtensor3("A"), pt.dmatrix("b"), pt.dmatrix("h")
        with pytensor.config.change_flags(scanlib__perform=perform):
            function = compiled([A, b, h], op(A, b, h))
            for steps in (0, 1, 5):
                values = (
                    0.5 * rng.normal(size=(steps, 3, 3)),
                    rng.normal(size=(steps, 3)),
                    rng.normal(size=(1, 3)),
                )
                expected = run_in_python(op, Parts(None, *values))
                np.testing.assert_allclose(function(*values), expected, rtol=1e-10)

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
    assert_derivatives((h**2).sum(), values, reference, JAX, order=1)


class TestAssociative:
    @pytest.mark.parametrize("reverse", [False, True])
    @pytest.mark.parametrize("length", [0, 1, 2, 9])
    def test_tree(self, reverse, length):
        """What other devices than the CPU run."""
        from scanlib.ops.associative_tree import CombinesInTrees
        from scanlib.rewrites.associative import AssociativeToLoop

        a, b = pt.dtensor3("a"), pt.dmatrix("b")

        def combine(earlier, later):
            return later[0] @ earlier[0], later[0] @ earlier[1] + later[1]

        outputs = scanlib.associative_scan(combine, [a, b], reverse=reverse)
        mode = JAX.excluding("scanlib_associative_to_loop")
        function = compiled([a, b], outputs, mode)
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
        # The mark keeps the walk away.
        fgraph = pytensor.graph.fg.FunctionGraph([a, b], outputs, clone=True)
        fgraph.attach_feature(CombinesInTrees())
        AssociativeToLoop().rewrite(fgraph)
        assert any(isinstance(node.op, AssociativeScan) for node in fgraph.apply_nodes)

    def test_walk(self):
        x = pt.dvector("x")
        y = scanlib.associative_scan(pt.maximum, x)
        function = compiled([x], y)
        assert not any(isinstance(op, AssociativeScan) for op in loop_ops(function))
        values = rng.normal(size=12)
        np.testing.assert_array_equal(function(values), np.maximum.accumulate(values))


# Numbers of steps


def decay(**options):
    """Return a loop ``h ← sin(a h) + 1`` of one matrix state; it is not elementwise."""
    a, h0 = pt.dmatrix("a"), pt.dvector("h0")
    h = scanlib.scan(
        lambda h, a: pt.sin(a @ h) + 1.0, outputs_info=h0, non_sequences=a, return_updates=False,
        **options,
    )  # fmt: skip
    return [a, h0], h


def decay_reference(a, h, steps):
    rows = []
    for _ in range(steps):
        h = np.sin(a @ h) + 1.0
        rows.append(h)
    return np.array(rows)


class TestNumberOfSteps:
    values = 0.3 * rng.normal(size=(2, 2)), rng.normal(size=2)

    def test_given_as_an_input(self):
        n = pt.lscalar("n")
        inputs, h = decay(n_steps=n)
        function = compiled([*inputs, n], [h, h.mean(), h.sum() / n])
        for steps in (1, 4):
            rows = decay_reference(*self.values, steps)
            results = function(*self.values, steps)
            assert_same([np.asarray(r) for r in results], [rows, rows.mean(), rows.sum() / steps])

    def test_the_shortest_sequence(self):
        x, y = pt.dvector("x"), pt.dvector("y")
        out = scanlib.scan(lambda x, y: x + 2 * y, [x, y], return_updates=False)
        function = compiled([x, y], [out, *pytensor.grad((out**2).sum(), [x, y])])
        for m, n in ((5, 3), (3, 5), (4, 4), (0, 2)):
            a, b = rng.normal(size=m), rng.normal(size=n)
            k = min(m, n)
            rows = a[:k] + 2 * b[:k]
            da, db = np.zeros(m), np.zeros(n)
            da[:k], db[:k] = 2 * rows, 4 * rows
            assert_same([np.asarray(r) for r in function(a, b)], [rows, da, db])

    def test_computed_last_row(self):
        """Nothing bounds the number of steps: last rows exist, others do not."""
        v = pt.dvector("v")
        n = pt.sum(v > 0)
        inputs, h = decay(n_steps=n)
        function = compiled([*inputs, v], h[-1])
        rows = decay_reference(*self.values, 3)
        np.testing.assert_allclose(function(*self.values, [1.0, -1.0, 2.0, 3.0]), rows[-1])
        assert np.isnan(function(*self.values, [-1.0])).all(), "no row to read: NaN"
        with pytest.raises(UnknownLengthError, match="number of steps is computed"):
            compiled([*inputs, v], h)(*self.values, [1.0])

    def test_computed_and_bounded_by_a_sequence(self):
        v, x = pt.dvector("v"), pt.dvector("x")
        n = pt.sum(v > 0)
        h = scanlib.scan(
            lambda x, h: pt.sin(h) + x, x, pt.constant(0.0), n_steps=n, return_updates=False
        )
        cost = (h**2).sum()
        function = compiled([x, v], [h, cost, pytensor.grad(cost, x)])
        plain = pytensor.function([x, v], [h, cost, pytensor.grad(cost, x)], mode="FAST_COMPILE")
        values = rng.normal(size=5)
        for flags in ([1.0, -1.0, 2.0, 3.0], [1.0], [1.0] * 5):
            expected = plain(values, flags)
            steps = sum(flag > 0 for flag in flags)
            (rows,) = reference_scan(lambda x, h: [np.sin(h) + x], [values], [0.0], n_steps=steps)
            np.testing.assert_allclose(expected[0], rows)
            assert_same([np.asarray(r) for r in function(values, flags)], expected)

    def test_gradient_of_shorter_sequences_backwards(self):
        """Rows in a larger array, reversed: not by a scatter, of which XLA's compiler dies."""
        x, y = pt.dvector("x"), pt.dvector("y")
        h = scanlib.scan(
            lambda x, y, h: x * y + 0.5 * h,
            [x, y], pt.constant(0.0), go_backwards=True, return_updates=False,
        )  # fmt: skip

        def reference(x, y):
            (rows,) = reference_scan(
                lambda x, y, h: [x * y + 0.5 * h], [x[-3:], y], [0.0], go_backwards=True
            )
            return (rows**2).sum()

        values = {x: rng.normal(size=5), y: rng.normal(size=3)}
        assert_derivatives((h**2).sum(), values, reference, JAX)

    def test_negative(self):
        n = pt.lscalar("n")
        inputs, h = decay(n_steps=n)
        with pytest.raises(scanlib.ops.errors.StepCountError, match="must not be negative"):
            compiled([*inputs, n], h)(*self.values, -1)

    def test_last_row_of_no_steps(self):
        n = pt.lscalar("n")
        inputs, h = decay(n_steps=n)
        with pytest.raises(IndexError):
            compiled([*inputs, n], h[-1])(*self.values, 0)


class TestUntil:
    @staticmethod
    def loop():
        x, a = pt.dvector("x"), pt.dscalar("a")
        h = scanlib.scan(
            lambda x, h, a: (pt.tanh(a * h + x), scanlib.until(h > 0.5)),
            x, pt.constant(0.0), non_sequences=a, return_updates=False,
        )  # fmt: skip
        return [x, a], h

    @staticmethod
    def reference(x, a):
        return reference_scan(
            lambda x, h, a: [np.tanh(a * h + x), h > 0.5], [x], [0.0], [a], until=True
        )[0]

    cases = (np.linspace(0.1, 0.9, 8), np.array([2.0, 0.1, 0.3, 0.2]), np.full(5, -1.0))

    def test_rows(self):
        """The whole trace comes back with its true length, and so do slices of it."""
        inputs, h = self.loop()
        function = compiled(inputs, [h, h[1:], h[::-1], h[-1], h.shape[0], 2 * h + 1])
        for x in self.cases:
            rows = self.reference(x, 0.7)
            expected = [rows, rows[1:], rows[::-1], rows[-1], np.int64(len(rows)), 2 * rows + 1]
            for actual, wanted in zip(function(x, 0.7), expected, strict=True):
                np.testing.assert_allclose(np.asarray(actual), wanted, rtol=1e-12)
                assert np.shape(actual) == wanted.shape

    def test_calls_again(self):
        """Arguments of the same shapes run the program that is there already."""
        inputs, h = self.loop()
        function = compiled(inputs, [h, h[1:]])
        for a in (0.7, 0.7, 0.2, 0.7):
            rows = self.reference(self.cases[0], a)
            for actual, wanted in zip(function(self.cases[0], a), (rows, rows[1:]), strict=True):
                np.testing.assert_allclose(np.asarray(actual), wanted, rtol=1e-12)

    def test_reductions(self):
        inputs, h = self.loop()
        function = compiled(
            inputs, [h.sum(), h.max(), h.min(), h.prod(), h.mean(), (h > 0).any(), (h > 0).all()]
        )
        for x in self.cases:
            rows = self.reference(x, 0.7)
            expected = [
                rows.sum(), rows.max(), rows.min(), rows.prod(), rows.mean(),
                (rows > 0).any(), (rows > 0).all(),
            ]  # fmt: skip
            for actual, wanted in zip(function(x, 0.7), expected, strict=True):
                np.testing.assert_allclose(actual, wanted, rtol=1e-12)

    def test_derivatives(self):
        inputs, h = self.loop()
        cost = (h**2).sum() * h[-1]

        def plain(x, a):
            rows = self.reference(x, a)
            return (rows**2).sum() * rows[-1]

        values = dict(zip(inputs, (self.cases[0], np.array(0.7)), strict=True))
        assert_derivatives(cost, values, plain, JAX)

    def test_what_cannot_be_compiled(self):
        inputs, h = self.loop()
        with pytest.raises(UnknownLengthError, match="as many rows as the loop takes steps"):
            compiled(inputs, pt.cumsum(h))(self.cases[0], 0.7)


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
        plain = pytensor.function(inputs, outputs, mode=get_mode("FAST_COMPILE"))
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


def test_explain():
    inputs, h, _ = channels_loop()
    (loop,) = scanlib.explain(compiled(inputs, h)).loops
    assert ("XLA" if has_compiler() else "lax.scan") in loop.runs
    with pytensor.config.change_flags(scanlib__perform="python"):
        (loop,) = scanlib.explain(compiled(inputs, h)).loops
    assert loop.schedule == "chosen by the JAX backend"
    assert "lax.scan" in loop.runs
    inputs, h = TestUntil.loop()
    (loop,) = scanlib.explain(compiled(inputs, h)).loops
    assert "by lax.while_loop on other devices" in loop.runs
    with pytensor.config.change_flags(scanlib__cuda=False):
        (loop,) = scanlib.explain(compiled(inputs, h)).loops
    assert loop.runs == "by lax.while_loop"
