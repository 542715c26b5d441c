"""Loops of several linear states, with taps, joins and products from both sides."""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scanlib
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.loop import Loop
from scanlib.ops.scan import Scan
from scanlib.rewrites.linear import explain_linear
from tests.checks import assert_derivatives
from tests.modes import MODES
from tests.reference import reference_scan

T = 7


class Case(NamedTuple):
    """A loop in symbols and in NumPy: the same step for both, given their functions."""

    step: Callable
    sequences: dict[str, tuple[int, ...]]
    initial: dict[str, tuple[int, ...]]
    others: dict[str, tuple[int, ...]] = {}  # noqa: RUF012
    taps: dict[str, list[int]] = {}  # noqa: RUF012
    outputs: int = 0
    options: dict[str, Any] = {}  # noqa: RUF012
    static: bool = False


class Symbols:
    """PyTensor under the names of NumPy, where they differ."""

    concatenate = staticmethod(pt.concatenate)
    stack = staticmethod(pt.stack)
    tanh = staticmethod(pt.tanh)

    @staticmethod
    def put(array, index, value):
        return pt.set_subtensor(array[index], value)


class Numbers:
    concatenate = staticmethod(np.concatenate)
    stack = staticmethod(np.stack)
    tanh = staticmethod(np.tanh)

    @staticmethod
    def put(array, index, value):
        array = array.copy()
        array[index] = value
        return array


def joined_step(p, u, x, v, A):
    h = A @ p.concatenate([x, v]) + u
    return [h[: x.shape[0]], h[x.shape[0] :]]


def trend(p, u, level, slope, M):
    new = M @ p.stack([level, slope]) + u
    return [new[0], new[1]]


def structural(p, e, level, slope, season, A):
    return [
        level + slope + e[:3],
        0.9 * slope + 0.1 * e[:3],
        A @ season + level[:2] - 0.5 * e[0],
    ]


def reshaped(p, u, H, A):
    h = A @ H.reshape((6,)) + u
    return [h.reshape((3, 2))]


CASES = {
    "two vectors": Case(
        lambda p, u, x, v, A, B, C, D: [A @ x + B @ v + u, C @ x + D @ v],
        {"u": (3,)},
        {"x": (3,), "v": (2,)},
        {"A": (3, 3), "B": (3, 2), "C": (2, 3), "D": (2, 2)},
    ),
    "triangular": Case(
        lambda p, u, x, v, A, B, D: [A @ x + B @ v, D @ v + u],
        {"u": (2,)},
        {"x": (3,), "v": (2,)},
        {"A": (3, 3), "B": (3, 2), "D": (2, 2)},
        static=True,
    ),
    "per step": Case(
        lambda p, a, u, x, v, B: [a @ x + B @ v, v * u[0] + B.T @ x + u],
        {"a": (2, 2), "u": (2,)},
        {"x": (2,), "v": (2,)},
        {"B": (2, 2)},
        static=True,
    ),
    "two taps": Case(
        lambda p, c, h2, h1, A, B: [A @ h1 + B @ h2 + c],
        {"c": (2,)},
        {"h": (2, 2)},
        {"A": (2, 2), "B": (2, 2)},
        {"h": [-2, -1]},
    ),
    "taps apart": Case(
        lambda p, c, h3, h1, A, B: [A @ h1 + B @ h3 + c],
        {"c": (2,)},
        {"h": (3, 2)},
        {"A": (2, 2), "B": (2, 2)},
        {"h": [-3, -1]},
        static=True,
    ),
    "concatenated": Case(joined_step, {"u": (5,)}, {"x": (3,), "v": (2,)}, {"A": (5, 5)}),
    "stacked": Case(trend, {"u": (2,)}, {"level": (), "slope": ()}, {"M": (2, 2)}),
    "structural": Case(
        structural,
        {"e": (3,)},
        {"level": (3,), "slope": (3,), "season": (2,)},
        {"A": (2, 2)},
        static=True,
    ),
    "shift register": Case(
        lambda p, e, h, phi: [p.concatenate([(phi * h).sum(axis=0, keepdims=True) + e, h[:-1]])],
        {"e": (1,)},
        {"h": (4,)},
        {"phi": (4,)},
        static=True,
    ),
    "an item set": Case(
        lambda p, u, h, A: [p.put(A @ h, 1, h[0]) + u],
        {"u": (3,)},
        {"h": (3,)},
        {"A": (3, 3)},
        static=True,
    ),
    "reshaped": Case(reshaped, {"u": (6,)}, {"H": (3, 2)}, {"A": (6, 6)}, static=True),
    "transposed": Case(
        lambda p, u, H, A: [A @ H.T + u], {"u": (2, 2)}, {"H": (2, 2)}, {"A": (2, 2)}, static=True
    ),
    "congruence": Case(
        lambda p, c, P, G: [G @ P @ G.T + c],
        {"c": (3, 3)},
        {"P": (3, 3)},
        {"G": (3, 3)},
        static=True,
    ),
    "congruence of any size": Case(
        lambda p, c, P, G: [G @ P @ G.T + c], {"c": (3, 3)}, {"P": (3, 3)}, {"G": (3, 3)}
    ),
    "congruence per step": Case(
        lambda p, g, P, C: [-0.5 * (g @ (P + C) @ g.T) + C],
        {"g": (4, 4)},
        {"P": (4, 4)},
        {"C": (4, 4)},
    ),
    "from both sides": Case(
        lambda p, c, b, P, A: [A @ (A @ P) @ b + c],
        {"c": (3, 2), "b": (2, 2)},
        {"P": (3, 2)},
        {"A": (3, 3)},
        static=True,
    ),
    "large from both sides": Case(
        lambda p, c, P, A, B: [A @ P @ B + c],
        {"c": (5, 6)},
        {"P": (5, 6)},
        {"A": (5, 5), "B": (6, 6)},
    ),
    "small congruence": Case(
        lambda p, c, P, G: [G @ P @ G.T + c],
        {"c": (2, 2)},
        {"P": (2, 2)},
        {"G": (2, 2)},
        static=True,
    ),
    "sums of both sides": Case(
        lambda p, c, P, A: [0.9 * P + 0.1 * (A @ P + P @ A.T) + c],
        {"c": (3, 3)},
        {"P": (3, 3)},
        {"A": (3, 3)},
        static=True,
    ),
    "backwards in two orders": Case(
        lambda p, u, h, A: [A @ h[::-1] + u], {"u": (3,)}, {"h": (3,)}, {"A": (3, 3)}
    ),
    "batched": Case(
        lambda p, u, x, v, A, B, D: [x @ A + v @ B + u, v @ D - 0.5 * x[:, :2]],
        {"u": (4, 3)},
        {"x": (4, 3), "v": (4, 2)},
        {"A": (3, 3), "B": (2, 3), "D": (2, 2)},
        static=True,
    ),
    "outputs": Case(
        lambda p, u, x, v, A, B: [A @ x + B @ v + u, B @ x + A @ v, p.tanh(A @ x) * v],
        {"u": (2,)},
        {"x": (2,), "v": (2,)},
        {"A": (2, 2), "B": (2, 2)},
        outputs=1,
    ),
    "no sequence": Case(
        lambda p, x, v, A, B: [A @ x + B @ v, B @ x - v],
        {},
        {"x": (2,), "v": (2,)},
        {"A": (2, 2), "B": (2, 2)},
        options={"n_steps": 5},
    ),
    "flipped": Case(
        lambda p, u, x, v, A, B: [A @ x + B @ v + u, B @ x - A @ v],
        {"u": (2,)},
        {"x": (2,), "v": (2,)},
        {"A": (2, 2), "B": (2, 2)},
        options={"go_backwards": True},
    ),
}


def shapes_of(case, steps=T):
    return {
        **{name: (steps, *shape) for name, shape in case.sequences.items()},
        **case.initial,
        **case.others,
    }


def values_of(case, steps=T, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(0.4 * rng.normal(size=shape), dtype)
        for name, shape in shapes_of(case, steps).items()
    }


def build(case, dtype="float64"):
    inputs = {
        name: pt.tensor(
            name,
            dtype=dtype,
            shape=tuple(
                size if case.static and not (axis == 0 and name in case.sequences) else None
                for axis, size in enumerate(shape)
            ),
        )
        for name, shape in shapes_of(case).items()
    }
    info = outputs_info(case, inputs)
    traces = scanlib.scan(
        lambda *parts: case.step(Symbols, *parts),
        sequences=[inputs[name] for name in case.sequences],
        outputs_info=info,
        non_sequences=[inputs[name] for name in case.others],
        return_updates=False,
        **case.options,
    )
    return inputs, traces if isinstance(traces, list) else [traces]


def outputs_info(case, given):
    states = [
        {"initial": given[name], "taps": case.taps[name]} if name in case.taps else given[name]
        for name in case.initial
    ]
    return [*states, *[None] * case.outputs]


def by_hand(case, values):
    rows = [None] * len(case.initial)
    rows += [(tuple(case.initial["x"]), np.dtype("float64"))] * case.outputs if case.outputs else []
    return reference_scan(
        lambda *parts: case.step(Numbers, *parts),
        [values[name] for name in case.sequences],
        outputs_info(case, values),
        [values[name] for name in case.others],
        rows=rows,
        **case.options,
    )


def kinds(function):
    nodes = function.maker.fgraph.apply_nodes
    return [sum(isinstance(node.op, kind) for node in nodes) for kind in (Scan, LinearScan)]


def compiled(inputs, outputs, lowered=True, mode="c"):
    with pytensor.config.change_flags(scanlib__linear=lowered):
        return pytensor.function(list(inputs), outputs, mode=MODES[mode], on_unused_input="ignore")


@pytest.fixture
def python_kernels():
    with pytensor.config.change_flags(scanlib__perform="python"):
        yield


@pytest.mark.parametrize("name", CASES)
def test_values(name, python_kernels):
    case = CASES[name]
    inputs, traces = build(case)
    function = compiled(inputs.values(), traces)
    assert kinds(function) == [0, 1]
    for steps in (T, 1, 0) if case.sequences else (T,):
        values = values_of(case, steps)
        before = {key: value.copy() for key, value in values.items()}
        actual = function(*values.values())
        for one, two in zip(actual, by_hand(case, values), strict=True):
            assert one.shape == two.shape
            np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)
        for key, value in values.items():
            np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_recurrences_too(name, last, python_kernels):
    case = CASES[name]
    inputs, traces = build(case)
    cost = sum(pt.sin(trace[-1] if last else trace).sum() for trace in traces)
    gradient = pytensor.grad(cost, list(inputs.values()))
    lowered = compiled(inputs.values(), [cost, *gradient])
    plain = compiled(inputs.values(), [cost, *gradient], lowered=False)
    assert kinds(lowered) == [0, 2]
    assert kinds(plain)[1] == 0
    for steps in ((T, 1) if last else (T, 1, 0)) if case.sequences else (T,):
        values = values_of(case, steps)
        for one, two in zip(lowered(*values.values()), plain(*values.values()), strict=True):
            assert one.shape == two.shape
            np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-11)


SPOILED = ["two vectors", "triangular", "per step", "two taps", "structural", "batched"]


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
        cost, dict(zip(inputs.values(), values.values(), strict=True)), reference, MODES["c"]
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
    loop = Loop.from_node(traces[0].owner.inputs[0].owner)
    assert "most of the matrix would be zeros" in str(explain_linear(loop))
    assert kinds(compiled([u, A, *start], traces))[1] == 0


def both_sides(A, R, b, h, reverse):
    """The history of ``h' = A h R + b``, with matrices for all steps or for each."""
    rows = [h[0]]
    for t in range(len(b))[:: -1 if reverse else 1]:
        left, right = (m[t] if m.ndim == 3 else m for m in (A, R))
        rows.append(left @ rows[-1] @ right + b[t])
    return np.stack(rows[::-1] if reverse else rows)


@pytest.mark.parametrize("linker", ["numba", "c", "py"])
@pytest.mark.parametrize(
    "coefficient, reverse, untraced, dtype",
    [
        ("fixed", False, False, "float64"),
        ("steps", True, False, "float32"),
        ("fixed", False, True, "float64"),
        ("steps", False, False, "complex128"),
    ],
)
def test_kernels_of_both_sides(linker, coefficient, reverse, untraced, dtype):
    op = LinearScan("real", coefficient, "both", False, reverse, untraced=untraced)
    inputs = [
        pt.tensor(dtype=dtype, shape=(None,) * n)
        for n in ((3, 3) if coefficient == "steps" else (2, 2)) + (3, 3)
    ]
    perform = "python" if linker == "py" else "auto"
    with pytensor.config.change_flags(scanlib__perform=perform):
        function = pytensor.function(inputs, op(*inputs), mode=MODES[linker])
        rng = np.random.default_rng(0)
        sizes = ((0, 2, 2), (1, 1, 1), (9, 2, 2), (9, 3, 3), (5, 4, 4), (6, 3, 5), (4, 9, 7))
        for steps, d, m in sizes:
            time = (steps,) if coefficient == "steps" else ()
            values = [
                (0.4 * rng.normal(size=shape)).astype(dtype)
                for shape in ((*time, d, d), (*time, m, m), (steps, d, m), (1, d, m))
            ]
            expected = both_sides(*values, reverse)
            actual = function(*values)
            tolerance = 1e-4 if dtype == "float32" else 1e-11
            assert actual.dtype == dtype
            np.testing.assert_allclose(
                actual, expected[-1:] if untraced else expected, rtol=tolerance, atol=tolerance
            )
        with pytest.raises(ValueError, match="sizes of matrix"):
            function(*values[:1], values[1][..., :-1], *values[2:])


@pytest.mark.parametrize("coefficient", ["fixed", "steps"])
def test_derivatives_of_both_sides(coefficient, python_kernels):
    op = LinearScan("real", coefficient, "both", False, reverse=True)
    time = (3,) if coefficient == "steps" else ()
    rng = np.random.default_rng(0)
    shapes = ((*time, 2, 2), (*time, 3, 3), (3, 2, 3), (1, 2, 3))
    inputs = {
        pt.tensor(dtype="float64", shape=(None,) * len(shape)): 0.5 * rng.normal(size=shape)
        for shape in shapes
    }
    cost = pt.sin(op(*inputs)).sum()
    assert_derivatives(
        cost, inputs, lambda *values: np.sin(both_sides(*values, True)).sum(), MODES["c"]
    )


def test_errors_of_sides_and_masks():
    with pytest.raises(ValueError, match="side 'both' is for real products"):
        LinearScan("max", "fixed", "both", False)
    with pytest.raises(ValueError, match="a mask is for real products"):
        LinearScan("log", has_mask=True)
    with pytest.raises(TypeError, match="the mask must be a boolean matrix"):
        LinearScan("real", "fixed", has_mask=True)(*[pt.dmatrix() for _ in range(4)])
    with pytest.raises(TypeError, match="there is no batch"):
        LinearScan("real", "fixed", "both", False)(
            pt.dmatrix(), pt.dmatrix(), pt.dtensor4(), pt.dtensor4()
        )


@pytest.mark.parametrize("linker", ["numba", "c", "py"])
@pytest.mark.parametrize(
    "side, vector, untraced",
    [("left", True, False), ("right", True, True), ("right", False, False)],
)
@pytest.mark.parametrize("coefficient", ["fixed", "steps"])
def test_kernels_leave_masked_items_out(linker, side, vector, untraced, coefficient):
    op = LinearScan("real", coefficient, side, vector, True, untraced=untraced, has_mask=True)
    state = 2 if vector else 3
    ranks = [3 if coefficient == "steps" else 2, state, state]
    inputs = [pt.tensor(dtype="float64", shape=(None,) * rank) for rank in ranks]
    inputs.append(pt.tensor(dtype="bool", shape=(None, None)))
    perform = "python" if linker == "py" else "auto"
    with pytensor.config.change_flags(scanlib__perform=perform):
        function = pytensor.function(inputs, op(*inputs), mode=MODES[linker])
        rng = np.random.default_rng(0)
        for steps, d in ((0, 2), (3, 1), (70, 2), (70, 3), (5, 9)):
            time = (steps,) if coefficient == "steps" else ()
            row = (d,) if vector else (2, d)
            mask = rng.random((d, d)) < 0.6
            matrix = np.where(mask, 0.5 * rng.normal(size=(*time, d, d)), 0)
            offset, initial = rng.normal(size=(steps, *row)), rng.normal(size=(1, *row))
            if steps:
                offset[steps // 2].flat[0] = np.nan
            rows = [initial[0]]
            for t in range(steps)[::-1]:
                now = matrix[t] if time else matrix
                now, kept = (now, mask) if side == "left" else (now.T, mask.T)
                terms = np.where(kept, now * rows[-1][..., None, :], 0)
                rows.append(terms.sum(axis=-1) + offset[t])
            expected = np.stack(rows[::-1])
            expected = expected[:1] if untraced else expected
            np.testing.assert_allclose(
                function(matrix, offset, initial, mask), expected, rtol=1e-10, atol=1e-12
            )
