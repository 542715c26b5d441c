"""Loops under PyTensor's PyTorch linker.

Most tests run the translated functions without `torch.compile`, which costs seconds per function;
`TestCompiled` runs them as users do. ``portable`` is what runs where there is no compiled kernel,
on a GPU: functions of tensors, here on the CPU.
"""

import subprocess
import sys
import warnings

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import get_mode

import scanlib
from tests.checks import assert_same
from tests.linear import Recurrence
from tests.modes import MODES
from tests.ops import test_generated as generated
from tests.strategies import loops

torch = pytest.importorskip("torch", reason="the PyTorch linker needs PyTorch")

MODES["torch"] = get_mode("PYTORCH")
rng = np.random.default_rng(17)


@pytest.fixture(params=["kernel", "portable"])
def way(request):
    """The two ways to run a loop."""
    perform = "auto" if request.param == "kernel" else "python"
    with pytensor.config.change_flags(scanlib__perform=perform):
        yield request.param


@pytest.fixture
def eager():
    """PyTensor's functions without `torch.compile`."""
    with torch.compiler.set_stance("force_eager"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def both(inputs, outputs, values):
    """Return what the PyTorch linker and the Python linker compute."""
    torch_function = pytensor.function(inputs, outputs, mode="PYTORCH")
    copies = [np.array(value) for value in values]
    actual = torch_function(*copies)
    for copy, value in zip(copies, values, strict=True):
        np.testing.assert_array_equal(copy, value)
    with pytensor.config.change_flags(scanlib__perform="python"):
        expected = pytensor.function(inputs, outputs, mode=MODES["py"])(*values)
    assert_same(actual, expected)
    return actual


def cases():
    """Return loops of all kinds: name, inputs, outputs, values."""
    x, a, rows, weights = pt.vector("x"), pt.vector("a"), pt.matrix("rows"), pt.matrix("W")
    series, few = rng.normal(size=7), rng.normal(size=(7, 3))
    matrix = 0.5 * rng.normal(size=(3, 3))

    def scan(step, *args, **kwargs):
        return scanlib.scan(step, *args, return_updates=False, **kwargs)

    affine = scan(lambda x, a, h: a * h + x, [x, a], pt.constant(0.5))
    tanh = scan(lambda x, h, w: pt.tanh(x + h @ w), rows, pt.zeros(3), non_sequences=weights)
    linear = scan(lambda x, h, w: x + h @ w, rows, pt.zeros(3), non_sequences=weights)
    back = scan(lambda x, h: pt.sin(h) + x, x, pt.constant(0.0), go_backwards=True)
    shown = [
        ("affine", [x, a], affine, [series, rng.normal(size=7)]),
        ("tanh", [rows, weights], tanh, [few, matrix]),
        ("linear", [rows, weights], linear, [few, matrix]),
        ("backwards", [x], back, [series]),
        ("running maximum", [x], scanlib.cummax(x), [series]),
        ("log-sum-exp", [x], scanlib.cumlogsumexp(x, reverse=True), [series]),
        ("associative", [x], scanlib.associative_scan(pt.logaddexp, x), [series]),
        ("discounted", [rows], scanlib.discounted_cumsum(rows, 0.9, reverse=True), [few]),
    ]
    return [pytest.param(*case[1:], id=case[0]) for case in shown]


class TestValuesAndGradients:
    @pytest.mark.slow
    @pytest.mark.parametrize("inputs, result, values", cases())
    def test_loops(self, inputs, result, values, way, eager):
        weights = np.cos(np.arange(7))
        cost = (result.T * weights[: values[0].shape[0]]).sum()
        both(inputs, [result, *pt.grad(cost, inputs)], values)

    @pytest.mark.slow
    def test_generated_values(self, eager):
        with pytensor.config.change_flags(on_opt_error="ignore"):
            generated.explore(
                loops(), lambda case: generated.assert_values(case, ("torch", "python")), 500, 60
            )

    @pytest.mark.slow
    def test_generated_values_of_the_kernel(self, eager):
        with pytensor.config.change_flags(on_opt_error="ignore"):
            generated.explore(
                loops(), lambda case: generated.assert_values(case, ("torch", "auto")), 501, 6
            )

    @pytest.mark.slow
    def test_generated_gradients(self, eager):
        with pytensor.config.change_flags(on_opt_error="ignore"):
            generated.explore(
                generated.FLOAT_LOOPS,
                lambda case: generated.assert_gradients(case, ("torch", "python")),
                502,
                25,
            )

    @pytest.mark.parametrize("steps", [0, 1, 5])
    def test_until_and_computed_steps(self, steps, way, eager):
        n = pt.iscalar("n")
        grown = scanlib.scan(
            lambda h: (1.5 * h, scanlib.until(h > 3)),
            outputs_info=pt.constant(1.0),
            n_steps=n,
            return_updates=False,
        )
        both([n], [grown, grown.shape[0]], [np.int32(steps)])

    @pytest.mark.parametrize("semiring", ["real", "log", "max", "min"])
    @pytest.mark.parametrize("reverse", [False, True])
    def test_matrix_recurrences(self, semiring, reverse, way, eager):
        matrices, x = pt.tensor3("A"), pt.matrix("x")
        op = Recurrence(semiring, reverse=reverse)
        history = op(matrices, x, pt.ones((1, 3)))
        values = [rng.normal(size=(4, 3, 3)), rng.normal(size=(4, 3))]
        both([matrices, x], [history], values)

    def test_choices_by_numbers(self, way, eager):
        x = pt.dvector("x")
        trace = scanlib.scan(
            lambda x, h: pt.switch(pt.maximum(x, 0.0), h + x, pt.cast(0, "int8")),
            x,
            pt.constant(np.float64(1.0)),
            return_updates=False,
        )
        both([x], [trace, pt.switch(x, x, 1)], [np.array([0.5, -1.0, 0.0, 2.0, np.nan, 1.0])])

    @pytest.mark.slow
    def test_divided_matrices(self, eager):
        """Choices in the matrices that a loop is given ask whether, not how much."""

        def step(x, w, p):
            gain = p @ x / (0.9 + x @ p @ x)
            return w - gain * (w @ x), (p - pt.outer(gain, x) @ p) / 0.9

        x = pt.dmatrix("x")
        start = [pt.ones(3), 2 * pt.eye(3)]
        w, p = scanlib.scan(step, x, start, return_updates=False)
        both([x], [w, p, pt.grad(w[-1].sum() + p[-1].sum(), x)], [rng.normal(size=(5, 3))])

    def test_backward_slices(self, eager):
        x = pt.vector("x")
        outputs = [x[::-1], x[4:1:-2], x[1::-1], x[1:4:-1], pt.set_subtensor(x[::-2], 0.0)]
        outputs.append(pt.inc_subtensor(x[3:0:-1], np.arange(3.0)))
        both([x], [*outputs, x[::-1] - (x[::-1] > 0)], [rng.normal(size=6)])

    def test_arrays_with_negative_strides(self, eager):
        x = pt.vector("x")
        total = scanlib.discounted_cumsum(x, 1.0, reverse=True)
        total = pytensor.function([x], total, mode="PYTORCH")
        np.testing.assert_allclose(total(np.arange(4.0)[::-1]), [6, 3, 1, 0])


class TestErrors:
    def test_sequences_of_different_lengths(self, way, eager):
        matrices, x = pt.tensor3("A"), pt.matrix("x")
        h = Recurrence()(matrices, x, pt.ones((1, 2)))
        function = pytensor.function([matrices, x], h, mode="PYTORCH")
        with pytest.raises(
            ValueError,
            match="`offset` gives 4 rows, but another",
        ):
            function(np.ones((3, 2, 2)), np.ones((4, 2)))

    def test_changing_shapes(self, way, eager):
        h = scanlib.scan(
            lambda h: pt.concatenate([h, h]),
            outputs_info=pt.ones(pt.iscalar("n")),
            n_steps=2,
            return_updates=False,
        )
        n = h.owner.inputs[0] if h.owner is None else None
        assert n is None
        size = next(v for v in pytensor.graph.traversal.ancestors([h]) if v.name == "n")
        function = pytensor.function([size], h, mode="PYTORCH")
        with pytest.raises(ValueError, match="shape"):
            function(2)


class TestCompiled:
    """With `torch.compile`."""

    @pytest.mark.slow
    def test_operators_stay_in_the_graph(self):
        x, a = pt.vector("x"), pt.vector("a")
        h = scanlib.scan(lambda x, a, h: a * h + x, [x, a], pt.constant(0.5), return_updates=False)
        cost = pt.tanh(h).sum()
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        values = [rng.normal(size=9), rng.normal(size=9)]
        function = pytensor.function([x, a], [cost, *pt.grad(cost, [x, a])], mode="PYTORCH")
        actual = function(*values)
        captured = torch._dynamo.utils.counters["stats"]["calls_captured"]
        assert captured > 0
        for length in (9, 4):
            part = [value[:length] for value in values]
            expected = pytensor.function([x, a], [cost, *pt.grad(cost, [x, a])], mode=MODES["c"])
            assert_same(function(*part), expected(*part))
        assert_same(actual, expected(*values))

    @pytest.mark.slow
    def test_recurrent_network(self):
        x, w = pt.matrix("x"), pt.matrix("W")
        h = scanlib.scan(
            lambda x, h, w: pt.tanh(x + h @ w), x, pt.zeros(3), non_sequences=w,
            return_updates=False,
        )  # fmt: skip
        cost = (h**2).sum()
        both(
            [x, w], [h, *pt.grad(cost, [x, w])], [rng.normal(size=(5, 3)), rng.normal(size=(3, 3))]
        )

    @pytest.mark.slow
    def test_the_operator_in_a_graph_and_in_batches(self):
        """`torch.compile` with one graph, and `torch.vmap`, around an operator."""
        from scanlib.backends.torch.operator import _table, run_operator

        x = pt.vector("x")
        h = scanlib.scan(lambda x, h: 0.51 * h + x, x, pt.constant(0.0), return_updates=False)
        before = set(_table)
        function = pytensor.function([x], h, mode="PYTORCH")
        with torch.compiler.set_stance("force_eager"):
            wanted = function(np.arange(5.0))
        (name,) = set(_table) - before
        entry = _table[name]
        assert len(wanted) == 5
        fake = entry.shapes([torch.empty(5), torch.empty(1)])
        assert fake == [(6,)]
        batch = torch.arange(10.0, dtype=torch.float64).reshape(2, 5)
        initial = torch.zeros(1, dtype=torch.float64)
        run = torch.compile(lambda x: run_operator([x, initial], entry.name)[0] * 2, fullgraph=True)
        np.testing.assert_allclose(run(torch.arange(5.0, dtype=torch.float64))[1:], 2 * wanted)
        rows = torch.vmap(lambda x: run_operator([x, initial], entry.name)[0])(batch)
        np.testing.assert_allclose(rows[0][1:], wanted)
        nothing = torch.vmap(lambda x: run_operator([x, initial], entry.name)[0])(batch[:0])
        assert nothing.shape == (0, 6)


def test_loops_that_print_alike(eager):
    """Two loops at a time whose inner loops differ in a constant too long to be printed."""

    def loop(item):
        x, weights = pt.dmatrix("x"), np.zeros((3, 1000))
        weights[0, 500] = item

        def inner(v):
            return pt.tanh(v.cumsum() + (weights * v[:, None]).sum(axis=1))

        def step(x, h):
            trace = scanlib.scan(inner, None, h, n_steps=3, return_updates=False)
            return trace[-1] + x

        return [x], scanlib.scan(step, x, pt.zeros(3), return_updates=False)

    values = [rng.normal(size=(4, 3))]
    kept = []
    for item in (1.0, 2.0):
        inputs, trace = loop(item)
        kept.append(pytensor.function(inputs, trace, mode="PYTORCH"))
        with pytensor.config.change_flags(scanlib__perform="python"):
            expected = pytensor.function(inputs, trace, mode=MODES["py"])(*values)
        np.testing.assert_allclose(kept[-1](*values), expected)


def test_the_device_of_results_without_values():
    """As of those with values: the first device that is not the CPU."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from scanlib.backends.torch.operator import _table, run_operator

    h = pt.dvector("h")
    trace = scanlib.scan(lambda h: pt.cos(0.17 * h), None, h, n_steps=7, return_updates=False)
    before = set(_table)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function = pytensor.function([h], trace, mode="PYTORCH")
    (name,) = set(_table) - before
    with FakeTensorMode():
        steps = torch.empty((), dtype=torch.int64)
        initial = torch.empty((1, 3), dtype=torch.float64, device="cuda:0")
        (found,) = run_operator([steps, initial], name)
    assert (found.device.type, found.shape) == ("cuda", (8, 3))
    del function


def test_explain():
    x = pt.dvector("x")
    h = scanlib.scan(lambda x, h: 0.5 * h + x, x, pt.zeros(()), return_updates=False)
    function = pytensor.function([x], h, mode="PYTORCH")
    (loop,) = scanlib.explain(function).loops
    assert loop.schedule == "blocks of steps"
    assert "compiled by numba" in loop.runs
    assert "tensors on other devices" in loop.runs
    with pytensor.config.change_flags(scanlib__perform="python"):
        (loop,) = scanlib.explain(function).loops
    assert loop.schedule == "chosen by the PyTorch backend"
    assert "functions of tensors" in loop.runs


def test_importing_scanlib_does_not_import_torch():
    code = "import sys, scanlib; assert 'torch' not in sys.modules and 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
