"""Loops of several linear states, with taps and joins, become one matrix recurrence."""

from functools import cache

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scanlib
from scanlib.ops.loop import Loop
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from scanlib.rewrites.lower.lower_linear import explain_linear
from tests.checks import assert_derivatives
from tests.matrix_cases import CASES, T, build, by_hand, values_of
from tests.modes import AT_ONCE
from tests.reference import reference_scan


def kinds(function):
    nodes = function.maker.fgraph.apply_nodes
    return [sum(isinstance(node.op, kind) for node in nodes) for kind in (Scan, LinearScan)]


def compiled(inputs, outputs, lowered=True, mode="c"):
    with pytensor.config.change_flags(scanlib__linear=lowered):
        return pytensor.function(
            list(inputs), outputs, mode=AT_ONCE[mode], on_unused_input="ignore"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_values(name, python_kernels):
    case = CASES[name]
    inputs, traces = build(case)
    function = compiled(inputs.values(), traces)
    assert kinds(function) == ([1, 0] if case.stays else [0, 1])
    for steps in (T, 1, 0) if case.sequences else (T,):
        values = values_of(case, steps)
        before = {key: value.copy() for key, value in values.items()}
        actual = function(*values.values())
        for one, two in zip(actual, by_hand(case, values), strict=True):
            assert one.shape == two.shape
            np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)
        for key, value in values.items():
            np.testing.assert_array_equal(value, before[key])


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_recurrences_too(name, last, python_kernels):
    case = CASES[name]
    inputs, traces = build(case)
    cost = sum(pt.sin(trace[-1] if last else trace).sum() for trace in traces)
    gradient = pytensor.grad(cost, list(inputs.values()))
    lowered = compiled(inputs.values(), [cost, *gradient])
    plain = compiled(inputs.values(), [cost, *gradient], lowered=False)
    assert kinds(lowered) == ([2, 0] if case.stays else [0, 2])
    assert kinds(plain)[1] == 0
    for steps in ((T, 1) if last else (T, 1, 0)) if case.sequences else (T,):
        values = values_of(case, steps)
        for one, two in zip(lowered(*values.values()), plain(*values.values()), strict=True):
            assert one.shape == two.shape
            np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-11)


SPOILED = ["two vectors", "triangular", "per step", "two taps", "structural", "batched"]


@pytest.mark.slow
@pytest.mark.parametrize("linker", ["c", "numba", "python"])
@pytest.mark.parametrize("name", SPOILED)
def test_what_is_not_finite_reaches_what_reads_it_and_nothing_else(name, linker):
    """Joined matrices have zeros that nobody multiplied by: 0 · ∞ must not arise there."""
    case = CASES[name]
    inputs, traces = build(case)
    perform = "python" if linker == "python" else "auto"
    with pytensor.config.change_flags(scanlib__perform=perform):
        function = compiled(inputs.values(), traces, mode="c" if linker == "python" else linker)
        assert kinds(function) == [0, 1]
        for steps, kind in ((T, np.nan), (150, np.inf), (150, -np.inf), (150, 1e308)):
            values = values_of(case, steps)
            spoiled = list(case.sequences)[-1]
            values[spoiled][steps // 2].flat[-1] = kind
            with np.errstate(all="ignore"):
                expected = by_hand(case, values)
            assert kind == 1e308 or not all(np.isfinite(part).all() for part in expected)
            for one, two in zip(function(*values.values()), expected, strict=True):
                np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-11)


def choose(z, h, A, b):
    return A[z] @ h + b[z]


A_DIAGONAL = {
    "one state": lambda x, h, A, w: [A @ h + w * h + x],
    "quotient": lambda x, h, A, w: [A @ h + h / (1 / w) + x],
    "two states": lambda x, h, g, A, w: [A @ h + w * h + x + 0.5 * g, 0.3 * g + A @ h],
}


@pytest.mark.parametrize("name", A_DIAGONAL)
def test_factors_of_a_state_that_are_not_finite(name, python_kernels):
    """A matrix plus a factor for each item: the factor counts for that item alone."""
    step, count = A_DIAGONAL[name], 2 if name == "two states" else 1
    A, w, x = pt.matrix("A"), pt.vector("w"), pt.matrix("x")
    starts = [pt.vector("h"), pt.vector("g")][:count]
    traces = scanlib.scan(step, x, starts, [A, w], return_updates=False, return_list=True)
    function = compiled([x, *starts, A, w], traces)
    assert kinds(function) == [0, 1]
    matrix, rows = np.array([[0.1, 0.2], [0.3, 0.4]]), np.ones((3, 2))
    first = [np.array([1.0, 2.0]), np.array([0.1, 0.2])][:count]
    for factor in ([np.inf, 0.5], [0.5, np.inf], [np.nan, 0.5]):
        others = [matrix, np.array(factor)]
        with np.errstate(all="ignore"):
            expected = reference_scan(step, [rows], first, others)
        for actual, wanted in zip(function(rows, *first, *others), expected, strict=True):
            np.testing.assert_allclose(actual, wanted)


@pytest.mark.slow
def test_matrices_chosen_by_a_sequence():
    """Matrices are gathered, and the derivative by the stack of them is scattered."""
    A, b = pt.dtensor3("A"), pt.dmatrix("b")
    z, h0 = pt.lvector("z"), pt.dvector("h0")
    trace = scanlib.scan(
        choose, sequences=z, outputs_info=h0, non_sequences=[A, b], return_updates=False
    )
    gradient = pytensor.grad(pt.sin(trace).sum(), [A, b, h0])
    lowered, plain = (compiled([A, b, z, h0], [trace, *gradient], flag) for flag in (True, False))
    assert kinds(lowered) == [0, 2]
    rng = np.random.default_rng(0)
    for steps in (0, 1, 20):
        values = [0.3 * rng.normal(size=shape) for shape in ((4, 3, 3), (4, 3))]
        values += [rng.integers(-4, 3, size=steps), rng.normal(size=3)]
        actual = lowered(*values)
        (expected,) = reference_scan(
            lambda *parts: [choose(*parts)], [values[2]], [values[3]], values[:2]
        )
        np.testing.assert_allclose(actual[0], expected, rtol=1e-10)
        for one, two in zip(actual, plain(*values), strict=True):
            assert one.shape == two.shape
            np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-11)
    with pytest.raises(IndexError):
        lowered(*values[:2], np.array([0, 4]), values[3])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["two vectors", "two taps", "structural", "congruence", "small congruence"]
)
def test_derivatives_to_second_order(name, python_kernels):
    case = CASES[name]
    inputs, traces = build(case)
    cost = sum(pt.sin(trace).sum() for trace in traces)

    def reference(*values):
        given = dict(zip(inputs, values, strict=True))
        return sum(np.sin(trace).sum() for trace in by_hand(case, given))

    values = values_of(case, steps=4)
    assert_derivatives(
        cost, dict(zip(inputs.values(), values.values(), strict=True)), reference, AT_ONCE["c"]
    )


@st.composite
def systems(draw):
    """Sizes of two coupled states, with a linker-independent description of the loop."""
    sizes = st.sampled_from([0, 1, 2, 3, 17])
    return draw(sizes), draw(sizes), draw(st.integers(0, 4)), draw(st.integers(0, 2**32 - 1))


@cache
def system_function(dtype, flip):
    """Two coupled vectors, the second with two taps."""
    names = "ABCDE"
    matrices = [pt.matrix(name, dtype=dtype) for name in names]
    u, x0 = pt.matrix("u", dtype=dtype), pt.vector("x0", dtype=dtype)
    v0 = pt.matrix("v0", dtype=dtype)
    traces = scanlib.scan(
        system_step,
        sequences=u,
        outputs_info=[x0, {"initial": v0, "taps": [-2, -1]}],
        non_sequences=matrices,
        go_backwards=flip,
        return_updates=False,
    )
    inputs = [u, x0, v0, *matrices]
    return compiled(inputs, traces)


def system_step(u, x, v2, v1, A, B, C, D, E):
    return [A @ x + B @ v1 + u, C @ x + D @ v1 + E @ v2]


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "complex128"])
@settings(max_examples=25)
@given(system=systems())
def test_coupled_states_of_any_size(system, dtype, flip):
    n, m, steps, seed = system
    rng = np.random.default_rng(seed)

    def draw(*shape):
        values = rng.normal(size=shape) / max(1, shape[-1]) ** 0.5
        if dtype == "complex128":
            values = values + 1j * rng.normal(size=shape)
        return values.astype(dtype)

    with pytensor.config.change_flags(scanlib__perform="python"):
        function = system_function(dtype, flip)
        assert kinds(function) == [0, 1]
        matrices = [draw(n, n), draw(n, m), draw(m, n), draw(m, m), draw(m, m)]
        u, x0, v0 = draw(steps, n), draw(n), draw(2, m)
        actual = function(u, x0, v0, *matrices)
    expected = reference_scan(
        system_step, [u], [x0, {"initial": v0, "taps": [-2, -1]}], matrices, go_backwards=flip
    )
    tolerance = 1e-4 if dtype == "float32" else 1e-10
    for one, two in zip(actual, expected, strict=True):
        assert one.shape == two.shape
        assert one.dtype == two.dtype
        np.testing.assert_allclose(one, two, rtol=tolerance, atol=tolerance)


LEFT_ALONE = {
    "a product of states": lambda u, x, v, A: [A @ (x * v) + u, A @ v],
    "a maximum": lambda u, x, v, A: [A @ pt.maximum(x, v) + u, A @ v],
    "a matrix made of a state": lambda u, x, v, A: [pt.outer(v, v) @ x + u, A @ v],
    "an item at a place that a state chooses": (
        lambda u, x, v, A: [A @ x + v[pt.argmax(x)] + u, A @ v]
    ),
    "a mean of magnitudes": lambda u, x, v, A: [A @ x / (1 + abs(v).mean()) + u, A @ v + x],
    "rounded": lambda u, x, v, A: [A @ x + pt.floor(v) + u, A @ v + x],
    "elementwise": lambda u, x, v, A: [x + v + u, 0.5 * v - x],
    "a branch on a state": lambda u, x, v, A: [pt.switch(x[0] > 0, A @ x, v) + u, A @ v + x],
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_only_looks_linear_is_left_alone(name, python_kernels):
    u, A = pt.dmatrix("u"), pt.dmatrix("A")
    start = [pt.dvector("x"), pt.dvector("v")]
    traces = scanlib.scan(
        LEFT_ALONE[name],
        sequences=u,
        outputs_info=start,
        non_sequences=A,
        return_updates=False,
    )
    function = compiled([u, A, *start], traces[0] + traces[1])
    assert kinds(function)[1] == 0


def test_an_axis_of_one_item_that_a_step_drops(python_kernels):
    """Its gradient, which adds to the state without that axis, is a recurrence as well."""
    x, h0, A = (pt.matrix(shape=shape) for shape in [(None, 3), (1, 3), (3, 3)])
    h = scanlib.scan(
        lambda x, h, A: ((h[0] + x) @ A)[None], x, h0, A, return_updates=False, name="row"
    )
    outputs = [h, *pytensor.grad((h**2).sum(), [x, h0, A])]
    lowered = compiled([x, h0, A], outputs)
    assert kinds(lowered) == [0, 2]
    plain = compiled([x, h0, A], outputs, lowered=False)
    rng = np.random.default_rng(0)
    values = [rng.normal(size=shape) for shape in [(5, 3), (1, 3), (3, 3)]]
    for one, two in zip(lowered(*values), plain(*values), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-10)


def test_integers_stay_exact():
    """Integers are not rounded; they are no matrix recurrence."""
    A, u = pt.lmatrix("A"), pt.lmatrix("u")
    start = [pt.lvector("x"), pt.lvector("v")]
    traces = scanlib.scan(
        lambda u, x, v, A: [A @ x + v + u, A @ v - x],
        sequences=u,
        outputs_info=start,
        non_sequences=A,
        return_updates=False,
    )
    function = compiled([u, A, *start], traces)
    assert kinds(function) == [1, 0]
    values = [np.full((15, 2), 3), np.array([[3, 1], [7, 5]]), np.array([1, 2]), np.array([3, 4])]
    expected = reference_scan(
        lambda u, x, v, A: [A @ x + v + u, A @ v - x], values[:1], values[2:], values[1:2]
    )
    for one, two in zip(function(*values), expected, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_state_of_wrong_initial_rows_is_refused():
    """The check that the loop makes stays."""
    inputs, traces = build(CASES["two taps"])
    loop = Loop.from_node(traces[0].owner.inputs[0].owner)
    loop.states[0].initial = inputs["h"]
    function = compiled(inputs.values(), loop.apply().histories[0])
    assert kinds(function) == [0, 1]
    values = values_of(CASES["two taps"])
    function(*values.values())
    with pytest.raises(ValueError, match="2 initial rows"):
        function(*(values | {"h": np.zeros((3, 2))}).values())


def test_last_rows_alone_are_not_stored():
    inputs, traces = build(CASES["two taps"])
    function = compiled(inputs.values(), traces[0][-1])
    (node,) = [n for n in function.maker.fgraph.apply_nodes if isinstance(n.op, LinearScan)]
    assert node.op.untraced
    values = values_of(CASES["two taps"])
    expected = by_hand(CASES["two taps"], values)[0][-1]
    np.testing.assert_allclose(function(*values.values()), expected)
    with pytest.raises(IndexError):
        function(*(values | {"c": values["c"][:0]}).values())


def test_large_systems_with_much_missing_are_not_joined():
    """Joined, they would be mostly zeros."""
    n = 40
    u, A = pt.dmatrix("u"), pt.dmatrix("A")
    start = [pt.tensor(name, dtype="float64", shape=(n,)) for name in "xv"]
    traces = scanlib.scan(
        lambda u, x, v, A: [A @ x + 0.5 * v + u, v + x],
        sequences=u,
        outputs_info=start,
        non_sequences=A,
        return_updates=False,
    )
    loop = traces[0].owner.inputs[0].owner
    assert "most of the matrix would be zeros" in str(explain_linear(loop))
    assert kinds(compiled([u, A, *start], traces))[1] == 0
