"""What surrounds loops under the JAX linker: known inputs, errors, batches, devices."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.replace import vectorize_graph

import scanlib
from scanlib.ops.execution import LoopOp
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from tests.checks import assert_same, in_python
from tests.derivatives import central_gradient
from tests.jax_loops import compiled, run_python

jax = pytest.importorskip("jax", reason="jax is not installed")

rng = np.random.default_rng(23)
needs_compiler = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")


def scan(step, *arguments, **options):
    return scanlib.scan(step, *arguments, return_updates=False, **options)


class TestIntegerInputs:
    """JAX compiles anew for every value of an input that it must know: sizes alone are."""

    x, k = pt.dvector("x"), pt.lscalar("k")

    def known(self, outputs):
        """Return whether JAX must know `k`; the function must give what the plain one does."""
        function = compiled([self.x, self.k], outputs)
        expected = in_python([self.x, self.k], outputs)
        for k in (1, 2):
            values = np.arange(1.0, 5.0), k
            assert_same([np.asarray(v) for v in function(*values)], expected(*values), 1e-12)
        return bool(function.maker.linker.scalar_shape_inputs)

    def trace(self, step=lambda x, h: pt.tanh(0.5 * h) + x, **options):
        return scan(step, self.x, pt.constant(0.0, dtype="float64"), **options)

    def test_index_of_a_row(self):
        assert not self.known([self.trace()[self.k], self.trace()[-self.k]])

    def test_data_of_a_kernel(self):
        h = self.trace(lambda x, h, k: pt.tanh(0.5 * h) + x * k, non_sequences=self.k)
        assert not self.known([h])

    def test_data_of_any_loop(self):
        h = scan(
            lambda x, h, k: pt.tanh(h[::-1].cumsum() * k) + x,
            self.x, pt.ones(2), non_sequences=self.k,
        )  # fmt: skip
        assert not self.known([h])

    def test_input_that_is_returned(self):
        assert not self.known([self.x, self.trace(), pt.zeros(self.x.shape)])

    def test_data_of_an_array(self):
        assert not self.known([self.trace() + pt.alloc(self.k, self.x.shape[0])])

    def test_number_of_steps(self):
        h = scan(lambda h: 0.5 * h + 1, None, pt.ones(2), n_steps=2 * self.k)
        assert self.known([h, pt.cast(self.k, "int8"), self.k * h])

    def test_bound_of_a_slice(self):
        assert self.known([self.trace()[self.k :]])

    def test_bound_in_a_step(self):
        h = scan(
            lambda x, h, k, all_x: pt.tanh(h[::-1].cumsum() * x) + all_x[:k].sum(),
            self.x, pt.ones(2), non_sequences=[self.k, self.x],
        )  # fmt: skip
        assert self.known([h])

    def test_steps_in_a_step(self):
        def step(x, h, k):
            inner = scan(lambda h: h[::-1].cumsum() * 0.1, None, h, n_steps=k)
            return inner[-1] + x

        assert self.known([scan(step, self.x, pt.ones(2), non_sequences=self.k)])

    def test_steps_in_a_graph_of_its_own(self):
        n = pt.lscalar("n")
        h = scan(lambda h: 0.5 * h + 1, None, pt.ones(2), n_steps=n)
        assert self.known([OpFromGraph([n], [h])(self.k)])


def test_batch_of_two_sequences_of_unknown_length():
    x, y, rows = pt.dvector("x"), pt.dvector("y"), pt.dmatrix("rows")
    h = scan(lambda x, y, h: 0.5 * h + x * y, [x, y], pt.constant(0.0))
    outputs = [h, *pytensor.grad((h**2).sum(), [x, y])]
    function = compiled([rows, y], vectorize_graph(outputs, {x: rows}))
    one = in_python([x, y], outputs)
    for m, n in ((5, 4), (3, 6), (2, 0)):
        data = rng.normal(size=(3, m)), rng.normal(size=n)
        found = function(*data)
        for i, row in enumerate(data[0]):
            assert_same([np.asarray(f[i]) for f in found], one(row, data[1]), 1e-12, 1e-14)


def test_sums_of_traces_of_different_unknown_lengths():
    """An error elsewhere. Compiled code raises none, and the result is NaN."""
    x, y = pt.dvector("x"), pt.dvector("y")
    first, second = (
        scan(lambda v, h: (h + v, scanlib.until(h > 2)), v, pt.constant(0.0)) for v in (x, y)
    )
    function = compiled([x, y], [first + second, (first * 2 + first)[-1]])
    total, last = function(np.ones(6), np.full(6, 0.9))
    np.testing.assert_allclose(np.asarray(total), 1.9 * np.arange(1, 5))
    total, last = function(np.ones(6), np.full(6, 0.5))
    assert np.isnan(np.asarray(total)).all()
    assert float(last) == 12


def test_known_places_outside_of_an_array():
    """An index that JAX knows when it compiles is checked as under other linkers."""
    table = pt.dmatrix("table")

    def rows(places):
        step = lambda place, table: pt.tanh(table[place]) @ table.T  # noqa: E731
        return compiled([table], [scan(step, places, None, table)])

    values = rng.random((3, 3))
    (found,) = rows(np.array([0, -1]))(values)
    np.testing.assert_allclose(found, np.tanh(values[[0, -1]]) @ values.T)
    with pytest.raises(IndexError, match="outside of `table`"):
        rows(np.array([0, 3]))(values)


def test_hessian_of_a_sum():
    """PyTensor takes it row by row, in a loop of its own around the loop's second derivative."""
    x = pt.dvector("x")
    h = scanlib.scan(lambda x, h: pt.tanh(0.5 * h + x), x, np.float64(0.3), return_updates=False)
    hessian = pytensor.gradient.hessian(h.sum(), x)
    value = np.array([0.1, -0.4, 0.7])

    def gradient(x):
        def cost(x):
            h, total = 0.3, 0.0
            for row in x:
                h = np.tanh(0.5 * h + row)
                total += h
            return total

        return central_gradient(cost, [x])[0]

    expected = [
        (gradient(value + step) - gradient(value - step)) / 2e-4 for step in 1e-4 * np.eye(3)
    ]
    actual = pytensor.function([x], hessian, mode="JAX")(value)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


class TestErrors:
    @needs_compiler
    def test_numbers_of_an_index_outside_its_array(self):
        table, z = pt.dvector("table"), pt.lvector("z")
        h = scan(lambda z, h, table: 0.5 * h + table[z], z, pt.constant(0.0), non_sequences=table)
        function = compiled([z, table], h)
        assert function(np.array([0, 2]), np.ones(3)).shape == (2,)
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError), match="step 1: index 7 is out of bounds"
        ):
            np.asarray(function(np.array([0, 7]), np.ones(3)))

    def test_divisions_by_zero(self):
        """They give zero, as in NumPy, where a choice does not guard them; it is compiled code."""
        z = pt.lvector("z")
        h = scan(lambda z, h: pt.switch(pt.eq(z, 0), h, (h + 7) // z), z, pt.constant(5))
        function = compiled([z], h)
        np.testing.assert_array_equal(function(np.array([0, 2, 0, -1])), [5, 6, 6, -13])
        (loop,) = scanlib.explain(function).loops
        assert not pytensor.config.cxx or "compiled code that XLA calls" in loop.runs

    def test_explain_of_half_precision(self):
        x = pt.tensor("x", dtype="float16", shape=(None,))
        h = scan(lambda x, h: h * np.float16(0.5) + x, x, pt.constant(np.float16(0)))
        (loop,) = scanlib.explain(compiled([x], h)).loops
        assert "lax.scan" in loop.runs
        assert "on the CPU" not in loop.runs


@pytest.mark.slow
def test_numbers_of_steps_without_numbers_of_64_bits():
    """Loops of a given number of steps are kernels with ``floatX=float32``, too."""
    code = (
        "import numpy as np, pytensor, pytensor.tensor as pt, scanlib\n"
        "from tests.backends.jax.test_jax_functions import check_single_precision\n"
        "check_single_precision()"
    )
    run_python(code, floatX="float32")


def check_single_precision():
    from scanlib.backends.jax.kernels import is_compiled

    assert not jax.config.jax_enable_x64
    x, h0, A, n = pt.fmatrix("x"), pt.fvector("h0"), pt.fmatrix("A"), pt.lscalar("n")
    nonlinear = scan(lambda x, h: pt.tanh(h) + x, x, h0, n_steps=n)
    linear = scan(lambda h, A: A @ h, None, h0, non_sequences=A, n_steps=n)
    outputs = [nonlinear, linear, *pytensor.grad((nonlinear**2).sum() + linear.sum(), [x, h0, A])]
    function, expected = compiled([x, h0, A, n], outputs), in_python([x, h0, A, n], outputs)
    values = [rng.normal(size=s).astype("float32") for s in ((6, 3), (3,), (3, 3))]
    for steps in (0, 1, 4):
        found = [np.asarray(value) for value in function(*values, steps)]
        assert_same(found, expected(*values, steps), 1e-4, 1e-5)
    nodes = function.maker.fgraph.toposort()
    loops = [n for n in nodes if isinstance(n.op, ElemwiseScan | LinearScan | Scan)]
    kernels = [is_compiled(node.op, node) for node in loops]
    assert not pytensor.config.cxx or (len(kernels) >= 3 and all(kernels))


@pytest.mark.slow
def test_integers_without_numbers_of_64_bits():
    """Tables, counters and sequences of ``int64`` have kernels with ``floatX=float32``, too."""
    code = (
        "import numpy as np, pytensor, pytensor.tensor as pt, scanlib\n"
        "from tests.backends.jax.test_jax_functions import check_integers_of_32_bits\n"
        "check_integers_of_32_bits()"
    )
    run_python(code, floatX="float32")


def check_integers_of_32_bits():
    from scanlib.backends.jax.cuda import TARGET
    from scanlib.backends.jax.kernels import is_compiled

    table, symbols, x = pt.lmatrix("table"), pt.lvector("symbols"), pt.fvector("x")
    zero = pt.constant(np.int64(0))
    path = scan(lambda c, s: table[s, c], symbols, zero)
    half, wide = scan(
        lambda x, c, h, w: (0.5 * h + x * c, w * np.float64(0.25) + (x > 0) * c),
        [x, symbols], [pt.constant(np.float32(0)), pt.constant(np.float64(1))],
    )  # fmt: skip
    capped = scan(lambda c, h: pt.minimum(h * 5 + c, 1009), symbols, zero)
    counts = scan(lambda x, n: n + (x > 0), x, pt.constant(np.uint64(7)))
    inputs = [table, symbols, x]
    outputs = [path, half, wide, capped, counts, pytensor.grad(half.sum() + wide[-1], x)]
    function, expected = compiled(inputs, outputs), in_python(inputs, outputs)
    values = rng.integers(0, 5, (5, 3)), rng.integers(0, 3, 40), rng.normal(size=40).astype("f4")
    for steps in (1, 40):
        given = values[0], values[1][:steps], values[2][:steps]
        found = [np.asarray(value) for value in function(*given)]
        kinds = ["int32", "float32", "float32", "int32", "uint32", "float32"]
        assert [value.dtype.name for value in found] == kinds
        for value, wanted in zip(found, expected(*given), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)
    nodes = function.maker.fgraph.toposort()
    loops = [node for node in nodes if isinstance(node.op, ElemwiseScan)]
    kernels = [is_compiled(node.op, node) for node in loops]
    assert not pytensor.config.cxx or (len(kernels) >= 3 and all(kernels))
    program = jax.jit(function.vm.jit_fn).trace(*given).lower(lowering_platforms=("cuda",))
    assert program.as_text().count(f"@{TARGET}") >= 3  # on CUDA devices as well


@pytest.mark.slow
def test_wide_matrices_without_numbers_of_64_bits():
    """Matrix recurrences of 64-bit numbers have kernels with ``floatX=float32``, too."""
    code = (
        "import numpy as np, pytensor, pytensor.tensor as pt, scanlib\n"
        "from tests.backends.jax.test_jax_functions import check_wide_matrices\n"
        "check_wide_matrices()"
    )
    run_python(code, floatX="float32")


def check_wide_matrices():
    from scanlib.backends.jax.kernels import is_compiled

    A, x, h0, n = pt.dmatrix("A"), pt.dmatrix("x"), pt.dvector("h0"), pt.lscalar("n")
    w, P, z = pt.dmatrix("w"), pt.dtensor3("P"), pt.zvector("z")
    fixed = scan(lambda x, h, A: A @ h + x, x, h0, non_sequences=A)
    turned = scan(lambda h, A: A @ h, None, h0, non_sequences=A, n_steps=n)
    products = scan(lambda P, H: P @ H, P, pt.eye(3, dtype="float64"))
    checked = scan(lambda x, w, h, A: (A @ h) * w + x, [x, w], h0, non_sequences=A)
    best = scan(lambda x, h, A: (A + h).max(axis=1) + x, x, h0, non_sequences=A)
    waves = scan(lambda z, A: A.astype("complex128") @ z, None, z, non_sequences=A, n_steps=n)
    traces = [fixed, turned, products, checked, best, waves]
    inputs = [A, x, w, h0, P, z, n]
    cost = (fixed**2).sum() + turned.sum() + (products**2).sum() + checked.sum() + best.sum()
    function = compiled(inputs, [*traces, *pytensor.grad(cost, [A, x, h0, P])])
    expected = in_python(inputs, [*traces, *pytensor.grad(cost, [A, x, h0, P])])
    nodes = [n for n in function.maker.fgraph.toposort() if isinstance(n.op, LoopOp)]
    kernels = [is_compiled(getattr(n.op, "plain", lambda n: n)(n).op, n) for n in nodes]
    assert not pytensor.config.cxx or all(kernels), nodes
    assert sum(isinstance(n.op, LinearScan) for n in nodes) >= 4, nodes
    rows = rng.normal(size=(2, 9, 3))
    for steps in (9, 1, 0):
        values = [0.5 * rng.normal(size=(3, 3)), *rows[:, :steps], rng.normal(size=3)]
        values += [rng.normal(size=(steps, 3, 3)), 1j * rng.normal(size=3), steps]
        found = [np.asarray(value) for value in function(*values)]
        assert {value.dtype.name for value in found} == {"float32", "complex64"}
        _check_against_loops(found[:6], *values)
        for value, wanted in zip(found, expected(*values), strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-4)


def _check_against_loops(found, A, x, w, h0, P, z, steps):
    """Compare traces with loops of NumPy's in single precision."""
    A, x, w, h0, P = (np.float32(value) for value in (A, x, w, h0, P))
    z = np.complex64(z)
    fixed, turned, products, checked, best, waves = found
    runs = [
        (fixed, h0, lambda t, h: A @ h + x[t]),
        (turned, h0, lambda t, h: A @ h),
        (products, np.eye(3, dtype="f4"), lambda t, H: P[t] @ H),
        (checked, h0, lambda t, h: (A @ h) * w[t] + x[t]),
        (best, h0, lambda t, h: (A + h).max(axis=1) + x[t]),
        (waves, z, lambda t, z: A @ z),
    ]
    for trace, h, step in runs:
        assert len(trace) == steps
        for t, row in enumerate(trace):
            h = step(t, h)
            np.testing.assert_allclose(row, h, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_devices_that_share_a_loop():
    """In `jax.shard_map`, where JAX keeps track of what differs between devices."""
    code = (
        "import os\n"
        "os.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
        "from tests.backends.jax.test_jax_functions import check_devices\n"
        "check_devices()"
    )
    run_python(code)


def check_devices():
    """Channels on two devices: kernels, `lax.scan`, `lax.while_loop`, matrices, gradients."""
    from jax.sharding import Mesh, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("d",))
    assert mesh.size == 2
    columns, row = PartitionSpec(None, "d"), PartitionSpec("d")
    x, a, h0, A = pt.dmatrix("x"), pt.dvector("a"), pt.dvector("h0"), pt.dmatrix("A")
    kernel = scan(lambda x, h, a: pt.tanh(a * h) + x, x, h0, non_sequences=a)
    general = scan(lambda x, h, A: pt.tanh(A @ h) + x, x, pt.zeros(2), non_sequences=A)
    matrices = scan(lambda x, h, A: A @ h + x, x, pt.zeros(2), non_sequences=A)
    ends = scan(lambda x, h: (h + x, scanlib.until(h.sum() > 2)), x, pt.zeros(2))[-1]
    outputs = [kernel, general, matrices, ends, *pytensor.grad((kernel**2).sum(), [x, a, h0])]
    function = compiled([x, a, h0, A], outputs).vm.jit_fn
    shared = jax.jit(
        jax.shard_map(
            lambda *values: tuple(function(*values)),
            mesh=mesh,
            in_specs=(columns, row, row, PartitionSpec()),
            out_specs=(columns, columns, columns, row, columns, row, row),
        )
    )
    data = rng.random((5, 4)), rng.random(4), rng.random(4), 0.3 * rng.random((2, 2))
    parts = [function(data[0][:, k], data[1][k], data[2][k], data[3])
             for k in (slice(0, 2), slice(2, 4))]  # fmt: skip
    for found, *wanted in zip(shared(*data), *parts, strict=True):
        np.testing.assert_allclose(found, np.concatenate(wanted, axis=-1), rtol=1e-12)


def test_sorted_rows_of_all_steps():
    """PyTensor's batch of a sort takes an axis that JAX must know for an array."""
    x, start, W = pt.dmatrix("x"), pt.dvector("start"), pt.dmatrix("W")

    def step(row, h, W):
        return row + 0.1 * pt.tanh(pt.dot(W, h)), pt.dot(W, h) * pt.sort(h)[0]

    def plain(rows, h, matrix):
        total = 0.0
        for row in rows:
            total += (matrix @ h * h.min()).sum()
            h = row + 0.1 * np.tanh(matrix @ h)
        return total

    values = rng.normal(size=(4, 3)), np.array([3.0, 1.0, 2.0]), rng.normal(size=(3, 3))
    cost = scan(step, x, [start, None], W)[1].sum()
    found = compiled([x, start, W], [cost, *pytensor.grad(cost, [x, start, W])])(*values)
    expected = plain(*values), *central_gradient(plain, values)
    assert_same([np.asarray(value) for value in found], expected, 1e-6)
