"""Items of arrays at constant places, ``row[0]`` or ``theta[2]``, against the plain loop."""

from itertools import product

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.subtensor import IncSubtensor, Subtensor

import scanlib
from scanlib.ops.execution import LoopOp
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.scan import Scan
from tests.checks import assert_derivatives, assert_same, evaluate
from tests.modes import MODES
from tests.reference import reference_scan

MATRIX, VECTOR = pt.dmatrix("rows"), pt.dvector("theta")


def scan(*args, **options):
    return scanlib.scan(*args, return_updates=False, **options)


def loops(function):
    return [n.op for n in function.maker.fgraph.toposort() if isinstance(n.op, LoopOp)]


def affine(row, h):
    return (h + row[0]) * row[1]


@st.composite
def cases(draw):
    """Items that a step reads, of rows with so many, and how the loop walks."""
    width = draw(st.integers(1, 4))
    place = st.integers(-width, width - 1)
    return {
        "places": draw(st.lists(place, min_size=2, max_size=5)),
        "shape": (draw(st.sampled_from([0, 1, 2, 3, 6])), width),
        "known": draw(st.booleans()),
        "taps": draw(st.sampled_from([[0], [-1, 0], [-1, 2]])),
        "depth": draw(st.integers(1, 2)),
        "backwards": draw(st.booleans()),
        "cut": draw(st.integers(0, 1)),
    }


@settings(deadline=None)
@given(case=cases())
@pytest.mark.parametrize("mode", ["numba", "c"])
def test_loops_over_rows(mode, case):
    first, *rest = case["places"]
    steps, width = case["shape"]
    rows = pt.tensor("rows", shape=(None, width if case["known"] else None), dtype="float64")
    taps, depth = case["taps"], case["depth"]

    def step(lib, *args):
        own, past = args[: len(taps)], args[len(taps) :]
        h = lib.sin(own[0][first]) * past[0] + sum(lib.cos(row[k]) for row in own for k in rest)
        return [h, h * own[-1][first]]

    initial = np.array([0.5, -0.25])[:depth]
    n_steps = max(steps - max(taps) + min(taps) - case["cut"], 0)
    values = np.random.default_rng(0).normal(size=case["shape"])
    options = {"n_steps": n_steps, "go_backwards": case["backwards"]}
    past = {"initial": initial, "taps": list(range(-depth, 0))}

    def reference(values):
        found = reference_scan(
            *(lambda *args: step(np, *args), [{"input": values, "taps": taps}], [past, None]),
            rows=[None, ((), "float64")],
            **options,
        )
        return sum(np.sum(each) for each in found)

    traces = scan(
        lambda *args: step(pt, *args), [{"input": rows, "taps": taps}], [past, None], **options
    )
    cost = sum(trace.sum() for trace in traces)
    (gradient,) = assert_derivatives(cost, {rows: values}, reference, MODES[mode], order=1)
    assert gradient.shape == values.shape


STEPS = {
    "a vector of items": lambda lib, r, h: [h * r[0] + r[1:3], r[1:3] * 2],
    "vectors": lambda lib, r, h: [h * r[0, 1:] + r[1][1:], r[0, 0]],
    "items of matrices": lambda lib, r, h: [h * r[0, 1] + lib.exp(r[-1, -1]), r[1, 0] + h],
    "one item twice": lambda lib, r, h: [h * r[0, 0] + r[0][0], h * r[0, 0]],
    "no state": lambda lib, r, h: [h, r[0, 0] * r[1, 1]],
}


@pytest.mark.parametrize("name", STEPS)
def test_parts_of_rows(name, mode):
    step = STEPS[name]
    rng = np.random.default_rng(0)
    shape, start = ((5, 4), np.ones(2)) if name == "a vector of items" else ((5, 2, 3), np.ones(()))
    start = np.ones(2) if name == "vectors" else start
    rows, values = pt.tensor("rows", shape=(None,) * len(shape)), rng.normal(size=shape)

    def reference(values):
        found = reference_scan(lambda *args: step(np, *args), [values], [start, None])
        return sum(np.sum(np.square(each)) for each in found)

    traces = scan(lambda *args: step(pt, *args), rows, [start, None])
    cost = sum(pt.sqr(trace).sum() for trace in traces)
    assert_derivatives(cost, {rows: values}, reference, mode)


def test_what_becomes_of_a_loop(fast_mode):
    trace = scan(affine, MATRIX, 0.0)
    function = pytensor.function(
        [MATRIX], [trace, *pytensor.grad(trace.sum(), [MATRIX])], fast_mode
    )
    forward, backward = loops(function)
    for op in (forward, backward):
        assert isinstance(op, ElemwiseScan)
        assert [recurrence.family for recurrence in op.recurrences] == ["affine"]
    explained = str(scanlib.explain(function))
    assert "fully parallel" in explained
    assert "indexing" not in explained


@pytest.mark.parametrize("name", ["tanh", "until", "many"])
def test_what_stays(name):
    """Where nothing is gained, rows are read row by row."""
    steps = {
        "tanh": lambda row, h: pt.tanh(affine(row, h)),
        "until": lambda row, h: (h := affine(row, h), scanlib.until(h > 1)),
        "many": lambda row, h: h * row[0] + sum(row[k] for k in range(9)),
    }
    function = pytensor.function([MATRIX], scan(steps[name], MATRIX, 0.0), MODES["numba"])
    assert not any(isinstance(op, ElemwiseScan) for op in loops(function))
    plain = {
        "tanh": lambda row, h: [np.tanh(affine(row, h))],
        "until": lambda row, h: [h := affine(row, h), h > 1],
        "many": lambda row, h: [h * row[0] + row[:9].sum()],
    }
    values = np.random.default_rng(0).uniform(0.5, 1.5, size=(6, 9))
    expected = reference_scan(plain[name], [values], [0.0], until=name == "until")
    assert_same([function(values)], expected)


@pytest.mark.parametrize("columns", [[0], [-1], [0, 1], [2, 0, -2]], ids=str)
def test_all_columns_of_a_matrix(columns, mode):
    """What is written into all of them is stacked, in place of zeros and additions."""
    rows = pt.tensor("rows", shape=(None, len(columns)), dtype="float64")
    if len(columns) == 1:
        trace = scan(lambda x, h: x * h + x, rows[:, columns[0]], 0.5)
    else:
        own = [rows[:, k] for k in columns]
        trace = scan(lambda *args: sum(args[:-1]) * args[-1] + args[0], own, 0.5)

    def reference(rows):
        h, total = 0.5, 0.0
        for row in rows:
            h = sum(row[k] for k in columns) * h + row[columns[0]]
            total += h
        return total

    values = np.random.default_rng(0).normal(size=(5, len(columns)))
    assert_derivatives(trace.sum(), {rows: values}, reference, mode)
    function = pytensor.function([rows], pytensor.grad(trace.sum(), rows), MODES["numba"])
    assert not any(isinstance(n.op, IncSubtensor) for n in function.maker.fgraph.apply_nodes)


def test_gradients_are_not_copied():
    """They are cut to the width of their array, which is that of what was written."""
    trace = scan(affine, MATRIX, 0.0)
    gradient = pytensor.grad(trace.sum(), MATRIX)
    for mode in ("numba", "c"):
        function = pytensor.function([MATRIX], pytensor.Out(gradient, borrow=True), MODES[mode])
        (out,) = function.maker.fgraph.outputs
        assert isinstance(out.owner.op, Subtensor)
        assert function(np.ones((4, 3))).base is not None


MESSAGE = "scan `pay`: rows[{0}] at step 0: index {0} is out of bounds for axis 0 with size {1}"


@pytest.mark.parametrize("place", [1, -2])
@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("mode", ["numba", "c", "JAX", "PYTORCH"])
def test_a_row_without_the_item(place, backwards, mode):
    if mode not in MODES:
        pytest.importorskip({"JAX": "jax", "PYTORCH": "torch"}[mode])
    trace = scan(
        lambda row, h: h * row[0] + row[place], MATRIX, 0.0, go_backwards=backwards, name="pay"
    )
    outputs = [trace, pytensor.grad(trace.sum(), MATRIX)]
    function = pytensor.function([MATRIX], outputs, MODES.get(mode, mode))
    for steps in (1, 3):
        with pytest.raises(IndexError) as error:
            function(np.ones((steps, 1)))
        assert str(error.value).split("\n")[0] == MESSAGE.format(place, 1)
    for width in (0, 1, 2):
        found, gradient = function(np.ones((0, width)))
        assert (found.shape, gradient.shape) == ((0,), (0, width))


def test_a_gradient_that_reads_no_item(mode):
    """The error is that of the loop that writes it, also where the first loop is not needed."""
    trace = scan(lambda row, h: h + row[0] - row[1], MATRIX, 0.0)
    function = pytensor.function([MATRIX], pytensor.grad(trace.sum(), MATRIX), mode)
    with pytest.raises(IndexError, match="index 1 is out of bounds for axis 0 with size 1"):
        function(np.ones((3, 1)))
    for shape in ((0, 0), (0, 1), (2, 3)):
        assert function(np.ones(shape)).shape == shape


@pytest.mark.parametrize("what", ["rows", "parameters"])
@pytest.mark.parametrize("mode", MODES)
def test_adopted_loops(mode, what):
    """Parameters of a vector that is given whole are read, and their gradients added, step by
    step."""

    def step(row, h, theta):
        h = h * theta[1] + row * theta[0] if what == "parameters" else h * row[0] + row[1]
        return h + theta[0]

    row = MATRIX[:, 0] if what == "parameters" else MATRIX
    trace = pytensor.scan(step, row, np.float64(0.5), VECTOR, return_updates=False)
    inputs = [MATRIX, VECTOR]
    outputs = [trace, *pytensor.grad(pt.sqr(trace).sum(), inputs)]
    function = pytensor.function(inputs, outputs, MODES[mode].including("scanlib_adopt"))
    if mode != "py":
        assert all(isinstance(op, ElemwiseScan) for op in loops(function))
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(5, 2)), rng.normal(size=3)]

    def reference(rows, theta):
        h, total = 0.5, 0.0
        for row in rows:
            h = h * theta[1] + row[0] * theta[0] if what == "parameters" else h * row[0] + row[1]
            h += theta[0]
            total += h**2
        return total

    cost = pt.sqr(trace).sum()
    with scanlib.enabled():
        assert_derivatives(cost, dict(zip(inputs, values, strict=True)), reference, MODES[mode], 1)
    if what == "parameters":
        with pytest.raises(IndexError, match=r"theta\[.\] at step 0: index . is out of bounds"):
            function(values[0], np.ones(0))
        _, by_rows, by_theta = function(np.ones((0, 2)), np.ones(0))
        assert (by_rows.shape, by_theta.shape) == ((0, 2), (0,))


def test_adopted_draws(fast_mode):
    """A state that is a number, a generator beside it, and coefficients in a vector."""
    generator = pytensor.shared(np.random.default_rng(1))

    def step(before, last, theta):
        moved, noise = pt.random.normal(rng=generator).owner.outputs
        return theta[0] * last + theta[1] * before + noise, {generator: moved}

    first = {"initial": pt.zeros(2), "taps": [-2, -1]}
    trace, updates = pytensor.scan(step, outputs_info=first, non_sequences=VECTOR, n_steps=5)
    adopting = fast_mode.including("scanlib_adopt")
    with pytensor.config.change_flags(on_opt_error="raise"):
        function = pytensor.function([VECTOR], trace, adopting, updates=updates)
    noise = np.random.default_rng(1).normal(size=5)
    expected = [0.0, 0.0]
    for each in noise:
        expected.append(0.5 * expected[-1] + 0.1 * expected[-2] + each)
    assert_same(function([0.5, 0.1]), np.array(expected[2:]))


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_other_dtypes(dtype, mode):
    rows, rng = pt.matrix("rows", dtype=dtype), np.random.default_rng(0)
    values = rng.integers(-2, 3, size=(6, 3)).astype(dtype)
    start = np.zeros((), dtype)
    trace = scan(lambda row, h: h * row[2] + row[0], rows, start)
    expected = reference_scan(
        lambda row, h: [(h * row[2] + row[0]).astype(dtype)], [values], [start]
    )
    assert_same(evaluate([trace], {rows: values}, mode), expected)


def test_two_loops_check_an_array_once():
    trace = scan(affine, MATRIX, 0.0)
    gradient = pytensor.grad(trace.sum(), MATRIX)
    function = pytensor.function([MATRIX], [trace, gradient], MODES["numba"])
    checks = [n for n in function.maker.fgraph.apply_nodes if "CheckedItems" in str(n.op)]
    assert len(checks) == 1


@pytest.mark.parametrize("order", [*product([0, 1], repeat=2)], ids=str)
def test_batches(order, mode):
    """A batch of loops reads items of batches of rows."""
    batch = pt.dtensor3("batch")
    trace = scan(lambda row, h: h * row[order[0]] + row[order[1]], MATRIX, 0.0)
    function = pytensor.function([batch], vectorize_graph(trace, {MATRIX: batch}), mode)
    values = np.random.default_rng(0).normal(size=(2, 4, 2))
    expected = [
        reference_scan(lambda row, h: [h * row[order[0]] + row[order[1]]], [own], [0.0])[0]
        for own in values
    ]
    assert_same([function(values)], [np.array(expected)])


def test_parameters_of_few_numbers(mode):
    """Accumulators of parameters' items, in a loop that stays one over a small vector."""
    x, theta = pt.dvector("x"), pt.dvector("theta")

    def step(x, h, theta):
        return pt.stack([theta[0] + theta[1] * h[1] ** 2 + theta[2] * h[0], x])

    trace = pytensor.scan(step, x, pt.ones(2), theta, return_updates=False)
    with scanlib.enabled():
        derivative = pytensor.grad((trace**2).sum(), theta)
        f = pytensor.function([x, theta], derivative, mode=mode)
    if mode is not MODES["py"]:
        assert all(isinstance(op, Scan) for op in loops(f))
    values, parameters = np.array([0.5, -1.0, 2.0]), np.array([0.1, 0.2, 0.7])

    def plain(theta):
        h, total = np.ones(2), 0
        for item in values:
            h = np.array([theta[0] + theta[1] * h[1] ** 2 + theta[2] * h[0], item])
            total += (h**2).sum()
        return total

    found = f(values, parameters)
    for k in range(3):
        moved = parameters.astype(complex)
        moved[k] += 1e-30j
        np.testing.assert_allclose(found[k], plain(moved).imag / 1e-30, rtol=1e-10)
