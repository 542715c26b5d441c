"""Loops solved for all their steps at once: values, derivatives, batches, failures."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Constant
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import graph_inputs

import scanlib
from scanlib.ops.errors import ConvergenceError
from scanlib.ops.gradient.pushforward import step_tangents
from scanlib.ops.loop import Loop
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.lowered.newton_scan import NewtonScan
from scanlib.rewrites.newton.iterate import diagonal_of, linearize
from tests.checks import assert_derivatives, assert_same, evaluate
from tests.reference import reference_scan

rng = np.random.default_rng(1)
UNCOMPILED = Mode(linker="py", optimizer="fast_run")
D = 3
W = rng.normal(size=(D, D)) / 2
V = rng.normal(size=(D, D)) / 2


def library(*values):
    """Return what computes with arrays: symbols or numbers."""
    return pt if any(isinstance(v, pytensor.graph.basic.Variable) for v in values) else np


def number(x, h):
    xp = library(x, h)
    return [xp.tanh(0.9 * h + x)]


def recurrent(x, h, w):
    xp = library(x, h)
    return [xp.tanh(xp.dot(w, h) + x), (h * x).sum()]


def batch(x, h, w):
    xp = library(x, h)
    return [xp.tanh(xp.dot(h, w) + x)]


def columns(x, h, w):
    xp = library(x, h)
    return [xp.tanh(xp.dot(w, h) + x)]


def coupled(x, h, c):
    xp = library(x, h, c)
    new = c / (1 + xp.exp(-h)) + 0.5 * xp.tanh(h + x)
    return [xp.tanh(new) / (1 + xp.exp(-x - h)), new]


def dense_pair(x, h, c, w):
    xp = library(x, h, c)
    new = 0.5 * c + xp.tanh(xp.dot(w, h) + x)
    return [xp.tanh(new) * 0.5, new]


def lags(x, a, b, w):
    xp = library(x, a, b)
    return [xp.tanh(xp.dot(w, b) - 0.3 * a + x)]


def lags_of_numbers(x, a, b):
    xp = library(x, a, b)
    return [xp.sin(0.5 * b - 0.3 * a * b + x)]


def matrix(x, h, w):
    xp = library(x, h)
    return [xp.tanh(xp.dot(w, xp.dot(h, w)) + x)]


def mixed(x, h, s, w):
    """A vector and a number."""
    xp = library(x, h, s)
    return [xp.tanh(xp.dot(w, h) * s + x), 0.3 * xp.sin(s + h.sum())]


# name: step, rows of x, initial values, non-sequences; the Jacobian that is found.
CASES = {
    "number": (number, (), [0.3], [], "numbers"),
    "elementwise": (number, (2, D), [np.full((2, D), 0.2)], [], "numbers"),
    "recurrent": (recurrent, (D,), [np.full(D, 0.1), None], [W], "one matrix"),
    "batch": (batch, (2, D), [np.full((2, D), 0.2)], [W], "batch"),
    "columns": (columns, (D, 2), [np.full((D, 2), 0.2)], [W], "batch"),
    "coupled": (coupled, (D,), [np.zeros(D), np.ones(D)], [], "numbers"),
    "dense pair": (dense_pair, (2,), [np.zeros(2), np.ones(2)], [W[:2, :2]], "one matrix"),
    "lags": (
        lags,
        (D,),
        [{"initial": np.full((2, D), 0.3), "taps": [-2, -1]}],
        [W],
        "one matrix",
    ),
    "lags of numbers": (
        lags_of_numbers,
        (D,),
        [{"initial": np.full((3, D), 0.3), "taps": [-3, -1]}],
        [],
        "numbers",
    ),
    "matrix": (matrix, (D, D), [np.full((D, D), 0.1)], [W], "one matrix"),
    "mixed": (mixed, (D,), [np.zeros(D), np.asarray(0.1)], [W], "one matrix"),
}


def built(case, method, steps=9, dtype="float64", **options):
    """Return a case's loop with inputs, their values, and what the plain loop gives."""
    step, row, initial, rest, _ = CASES[case]
    values = [rng.normal(size=(steps, *row)), *rest]
    given = [np.asarray(v, dtype=dtype) for v in values]
    variables = [pt.TensorType(dtype, (None,) * v.ndim)() for v in given]

    def typed(spec):
        if isinstance(spec, dict):
            return spec | {"initial": np.asarray(spec["initial"], dtype=dtype)}
        return None if spec is None else np.asarray(spec, dtype=dtype)

    starts = [typed(spec) for spec in initial]
    results, _ = scanlib.scan(
        step, variables[0], starts, variables[1:], method=method, return_list=True, **options
    )
    rows = [(), dtype]
    types = [None if spec is not None else rows for spec in starts]
    expected = reference_scan(
        step, [given[0]], starts, given[1:], rows=types, go_backwards=options.get("go_backwards", 0)
    )
    return results, dict(zip(variables, given, strict=True)), expected


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loops(name, mode):
    results, inputs, expected = built(name, "newton")
    assert_same(evaluate(results, inputs, mode), expected)


def two_products(x, h, w):
    return [pt.tanh(w @ (h * pt.sigmoid(w @ h)) + x) + 0.3 * h * pt.exp(-h) + h * (w @ h)]


def three_products(x, h, w):
    return [pt.tanh(w @ pt.tanh(w @ pt.tanh(w @ h)) + x)]


def stated_sizes(x, h, w):
    return two_products(x, pt.specify_shape(h, (D,)), w)


@pytest.mark.all_forms
@pytest.mark.parametrize("step", [two_products, stated_sizes, three_products])
def test_diagonal_without_the_jacobian(step, python_kernels):
    """Up to two products in a row the step's structure tells the diagonal: no unit vectors."""
    x, h, w = pt.vector("x"), pt.vector("h"), pt.matrix("w")
    moved = h.type()
    (value,) = step(x, h, w)
    (tangent,) = step_tangents([value], [(h, moved)])
    found = diagonal_of(tangent, moved)
    if step is three_products:
        assert found is None
        return
    values = [rng.normal(size=D), rng.normal(size=D), W]
    own, moves = (
        pytensor.function(
            [x, h, w, moved], [found, tangent], mode="FAST_COMPILE", on_unused_input="ignore"
        ),
        np.eye(D),
    )
    expected = [own(*values, unit)[1][i] for i, unit in enumerate(moves)]
    np.testing.assert_allclose(own(*values, moves[0])[0], expected, rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recurrent", "coupled", "batch"])
def test_short_loops(name, fast_mode):
    for steps in (1, 0):
        results, inputs, expected = built(name, "newton", steps)
        assert_same(evaluate(results, inputs, fast_mode), expected)


@pytest.mark.all_forms
@pytest.mark.parametrize("name", CASES)
def test_structure_of_the_jacobian(name):
    results, _, _ = built(name, "newton")
    (node,) = {v.owner for v in pytensor.graph.traversal.ancestors(results) if is_newton(v.owner)}
    found = linearize(Loop.from_op(node.op.scan, node.inputs), "auto")
    guesses = [out.type() for out in results_of(node)]
    corrections, _ = found.correction(guesses, None)
    given = [v for v in graph_inputs(corrections) if not isinstance(v, Constant)]
    f = pytensor.function(given, corrections, mode=UNCOMPILED)
    ops = [n.op for n in f.maker.fgraph.apply_nodes]
    matrices = [op for op in ops if isinstance(op, LinearScan)]
    loops = [op for op in ops if isinstance(op, ElemwiseScan) and op.signature.n_states]
    kind = "batch" if found.axes else "one matrix"
    assert (kind if matrices and not loops else "numbers") == CASES[name][-1]


def results_of(node):
    return node.op.results(node.outputs).histories


def is_newton(node):
    return node is not None and isinstance(node.op, NewtonScan)


@pytest.mark.slow
@pytest.mark.parametrize("jacobian", ["full", "diagonal", "block"])
@pytest.mark.parametrize("name", CASES)
def test_approximations_of_the_jacobian(name, jacobian, fast_mode):
    method = scanlib.Newton(jacobian=jacobian, tolerance=1e-12, damping="adaptive")
    results, inputs, expected = built(name, method)
    assert_same(evaluate(results, inputs, fast_mode), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["number", "recurrent", "batch", "coupled", "lags"])
def test_derivatives(name, fast_mode):
    """One more loop in the other direction, affine, and no iterations in it."""
    steps = 4
    results, inputs, _ = built(name, scanlib.Newton(tolerance=1e-9), steps)
    step, _, initial, _, _ = CASES[name]

    def cost(rows):
        weights = (1.0 + np.arange(steps).reshape((-1, *(1,) * (r.ndim - 1))) for r in rows)
        return sum((r * w).sum() for r, w in zip(rows, weights, strict=True))

    def reference(x, *rest):
        types = [((), "float64")] * len(initial)
        return cost(reference_scan(step, [x], initial, rest, rows=types))

    assert_derivatives(cost(results), inputs, reference, fast_mode)
    gradients = pytensor.grad(cost(results), list(inputs))
    graph = pytensor.function(list(inputs), gradients, mode=fast_mode).maker.fgraph
    loops = [n.op.signature for n in graph.apply_nodes if hasattr(n.op, "signature")]
    assert sum(signature.has_stop for signature in loops) == 1
    matrices = [node for node in graph.apply_nodes if isinstance(node.op, LinearScan)]
    assert any(signature.reverse for signature in loops) or any(n.op.reverse for n in matrices)


@pytest.mark.slow
def test_tangents(fast_mode):
    for name in ("recurrent", "lags", "coupled"):
        found = []
        for method, direct in (("newton", False), ("newton", True), ("sequential", False)):
            rng.bit_generator.state = np.random.default_rng(3).bit_generator.state
            results, inputs, _ = built(name, method, 5)
            tangents = [variable.type() for variable in inputs]
            given = {t: 0.5 * v + 1 for t, v in zip(tangents, inputs.values(), strict=True)}
            moved = pytensor.gradient.pushforward(
                results, list(inputs), tangents, use_op_pushforward=direct
            )
            found.append(evaluate(moved, inputs | given, fast_mode))
        for each in found[:-1]:
            assert_same(each, found[-1], rtol=1e-6)


@pytest.mark.slow
def test_single_precision_and_backwards(fast_mode):
    results, inputs, expected = built("recurrent", "newton", dtype="float32", go_backwards=True)
    assert_same(evaluate(results, inputs, fast_mode), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_batches_converge_member_by_member(fast_mode):
    x, rows = pt.vector("x"), pt.matrix("rows")
    h, _ = scanlib.scan(lambda x, h: pt.tanh(h + x), x, pt.constant(0.0), method="newton")
    batched = vectorize_graph([h, scanlib.newton_iterations(h)], {x: rows})
    given = rng.normal(size=(3, 6))
    found, counts = evaluate(batched, {rows: given}, fast_mode)
    expected = [reference_scan(lambda x, h: [np.tanh(h + x)], [row], [0.0])[0] for row in given]
    assert_same([found], [np.stack(expected)])
    assert counts.shape == (3,)
    assert 1 < counts[0] <= 7


def chaos(method):
    """Return a loop in which small differences double at every step, after `start`."""
    start = pt.scalar("start")
    h, _ = scanlib.scan(
        lambda h: 4 * h * (1 - h), outputs_info=start, n_steps=400, method=method, name="chaos"
    )
    return start, h


@pytest.mark.slow
def test_failure_is_an_error_or_the_plain_loop(mode):
    start, h = chaos("newton")
    with pytest.raises(ConvergenceError, match=r"`chaos`: .* largest at step \d+, .*\. Damp"):
        evaluate(h, {start: 0.3}, mode)
    start, h = chaos(scanlib.Newton(otherwise="sequential"))
    expected = reference_scan(lambda h: [4 * h * (1 - h)], [], [0.3], n_steps=400)
    assert_same([evaluate(h, {start: 0.3}, mode)], expected, rtol=1e-2, atol=1)
    plain, _ = scanlib.scan(lambda h: 4 * h * (1 - h), outputs_info=start, n_steps=400)
    assert_same(*([value] for value in evaluate([h, plain], {start: 0.3}, mode)), rtol=0, atol=0)


def test_nan_stays_nan(fast_mode):
    x = pt.vector("x")
    given = np.array([0.5, 1.0, np.nan, 0.5])

    def loop(otherwise):
        method = scanlib.Newton(otherwise=otherwise)
        return scanlib.scan(lambda x, h: pt.tanh(h + x), x, pt.constant(0.0), method=method)[0]

    with pytest.raises(ConvergenceError, match="at step 2, inf"):
        evaluate(loop("error"), {x: given}, fast_mode)
    expected = reference_scan(lambda x, h: [np.tanh(h + x)], [given], [0.0])
    assert_same([evaluate(loop("sequential"), {x: given}, fast_mode)], expected)


def gated(x, h, w, u):
    def sigmoid(value):
        return 1 / (1 + library(x).exp(-value))

    xp = library(x, h)
    z, r = sigmoid(xp.dot(w[0], x) + xp.dot(u[0], h)), sigmoid(xp.dot(w[1], x) + xp.dot(u[1], h))
    return [z * h + (1 - z) * xp.tanh(xp.dot(w[2], x) + xp.dot(u[2], r * h))]


@pytest.mark.slow
def test_gated_units_of_published_tables(fast_mode):
    """Few iterations for any length; damping where the weights are too large for none."""
    x, w, u = pt.matrix("x"), pt.tensor3("w"), pt.tensor3("u")
    functions = {}
    for name, options in (
        ("plain", {}),
        ("diagonal", {"jacobian": "diagonal"}),
        ("damped", {"damping": "adaptive"}),
    ):
        method = scanlib.Newton(max_iterations=60, **options)
        h, _ = scanlib.scan(gated, x, pt.zeros(8), [w, u], method=method)
        functions[name] = pytensor.function(
            [x, w, u], [h, scanlib.newton_iterations(h)], mode=fast_mode
        )

    def case(scale, seed, steps):
        draw = np.random.default_rng(seed).normal
        weights = [factor * draw(size=(3, 8, 8)) / np.sqrt(8) for factor in (1, scale)]
        rows = np.random.default_rng(1).normal(size=(steps, 8))
        return [rows, *weights], reference_scan(gated, [rows], [np.zeros(8)], weights)

    for steps in (1000, 10_000):
        arguments, expected = case(1, 0, steps)
        found, count = functions["plain"](*arguments)
        assert count <= 6
        assert abs(found - expected[0]).max() <= 3e-15
        found, count = functions["diagonal"](*arguments)
        assert count <= 20
        assert abs(found - expected[0]).max() <= 1e-7
    arguments, expected = case(3, 1, 1000)
    for name in ("plain", "diagonal"):
        with pytest.raises(ConvergenceError, match="has not converged after"):
            functions[name](*arguments)
    found, _ = functions["damped"](*arguments)
    assert_same([found], expected, rtol=1e-8)


def test_explain_says_that_newton_runs(fast_mode):
    results, inputs, _ = built("recurrent", "newton", name="cell")
    (loop, *_) = scanlib.explain(pytensor.function(list(inputs), results, mode=fast_mode)).loops
    assert loop.name == "cell_newton"
    assert "up to 100 iterations" in loop.because
    assert "sequential" in loop.action
