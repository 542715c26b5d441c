"""Loops around a matrix recurrence: what becomes of them, and that their values stay the same."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Variable
from scipy.special import softmax

import scanlib
from scanlib.ops.execution import LoopOp
from scanlib.ops.loop import Carry, Loop
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from scanlib.rewrites.lower.lower_linear import explain_linear
from tests.checks import assert_derivatives
from tests.modes import AT_ONCE
from tests.reference import reference_scan

pytestmark = pytest.mark.usefixtures("python_kernels")
rng = np.random.default_rng(5)
T, D, K = 9, 3, 2
SHAPES = {
    "x": (T, K),
    "e": (T, D),
    "batch": (T, 4, D),
    "A": (D, D),
    "W": (D, K),
    "A_t": (T, D, D),
    "h0": (D,),
    "H0": (4, D),
    "M0": (D, 2),
}


def logsumexp(values, axis):
    return np.logaddexp.reduce(values, axis=axis)


class Case(NamedTuple):
    """A loop in symbols and in NumPy: the same step for both, given their functions."""

    step: Callable
    sequences: tuple[str, ...]
    initial: str
    others: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012
    outputs: int = 1


class Numpy:
    """NumPy under the names of PyTensor."""

    exp, tanh, max, min = np.exp, np.tanh, np.max, np.min
    logsumexp = staticmethod(logsumexp)


CASES = {
    "fixed": Case(lambda p, x, h, A, W: A @ h + W @ x, ("x",), "h0", ("A", "W")),
    "from the right": Case(lambda p, x, h, A, W: h @ A + W @ x, ("x",), "h0", ("A", "W")),
    "per step": Case(lambda p, a, e, h: a @ h + e, ("A_t", "e"), "h0"),
    "transposed and scaled": Case(
        lambda p, a, e, h: 0.5 * (a.T @ h) - h / 3.0 + e, ("A_t", "e"), "h0"
    ),
    "several terms": Case(
        lambda p, x, h, A, W: A @ (h + W @ x) + A.T @ (A @ h) + p.exp(W @ x),
        ("x",),
        "h0",
        ("A", "W"),
    ),
    "sum of products": Case(
        lambda p, e, h, A: (A * h[None, :]).sum(axis=1) + e, ("e",), "h0", ("A",)
    ),
    "rows": Case(lambda p, b, h, A: h @ A + b, ("batch",), "H0", ("A",)),
    "columns": Case(lambda p, a, h: a @ h, ("A_t",), "M0"),
    "no sequence": Case(lambda p, h, A: A @ h, (), "h0", ("A",), {"n_steps": 7}),
    "backwards": Case(
        lambda p, x, h, A, W: A @ h + W @ x, ("x",), "h0", ("A", "W"), {"go_backwards": True}
    ),
    "hidden Markov model": Case(
        lambda p, e, h, A: p.logsumexp(h[:, None] + A, axis=0) + e, ("e",), "h0", ("A",)
    ),
    "hidden Markov models": Case(
        lambda p, b, h, A: p.logsumexp(h[:, :, None] + A, axis=1) + b, ("batch",), "H0", ("A",)
    ),
    "Viterbi": Case(lambda p, e, h, A: p.max(h[:, None] + A, axis=0) + e, ("e",), "h0", ("A",)),
    "shortest path": Case(lambda p, a, h: p.min(a + h, axis=1), ("A_t",), "h0"),
    "state space": Case(
        lambda p, x, h, A, W: [A @ h + W @ x, p.tanh((A @ h)[0] * h)],
        ("x",),
        "h0",
        ("A", "W"),
        {},
        2,
    ),
}


def values_of(names, seed=0):
    rng = np.random.default_rng(seed)
    return {name: 0.5 * rng.normal(size=SHAPES[name]) for name in names}


def build(case: Case, known: bool = False) -> tuple[dict[str, Variable], list[Variable]]:
    """The loop's inputs and traces; the inputs' sizes are known before a call, or not."""
    names = [*case.sequences, case.initial, *case.others]
    inputs = {
        name: pt.tensor(
            name,
            dtype="float64",
            shape=SHAPES[name] if known else (None,) * len(SHAPES[name]),
        )
        for name in names
    }
    info: Any = inputs[case.initial]
    if case.outputs > 1:
        info = [info, *[None] * (case.outputs - 1)]
    traces = scanlib.scan(
        lambda *parts: case.step(pt, *parts),
        sequences=[inputs[name] for name in case.sequences],
        outputs_info=info,
        non_sequences=[inputs[name] for name in case.others],
        return_updates=False,
        **case.options,
    )
    return inputs, traces if isinstance(traces, list) else [traces]


def by_hand(case: Case, values: dict[str, np.ndarray]) -> list[np.ndarray]:
    def step(*parts):
        result = case.step(Numpy, *parts)
        return result if isinstance(result, list) else [result]

    return reference_scan(
        step,
        [values[name] for name in case.sequences],
        [values[case.initial], *[None] * (case.outputs - 1)],
        [values[name] for name in case.others],
        rows=[None, *[((D,), np.dtype("float64"))] * (case.outputs - 1)],
        **case.options,
    )


def kinds(function):
    """How many plain loops and matrix recurrences a compiled function holds."""
    nodes = function.maker.fgraph.apply_nodes
    return [sum(isinstance(node.op, kind) for node in nodes) for kind in (Scan, LinearScan)]


def compiled(inputs, outputs, lowered=True, mode="c"):
    with pytensor.config.change_flags(scanlib__linear=lowered):
        return pytensor.function(list(inputs), outputs, mode=AT_ONCE[mode])


@pytest.mark.parametrize("name", CASES)
def test_values(name):
    case = CASES[name]
    inputs, traces = build(case)
    function = compiled(inputs.values(), traces)
    assert kinds(function) == [0, 1]
    for steps in (T, 1, 0):
        values = values_of(inputs)
        values |= {name: values[name][:steps] for name in case.sequences}
        actual = function(*values.values())
        for one, two in zip(actual, by_hand(case, values), strict=True):
            assert one.shape == two.shape
            np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_recurrences_too(name, last):
    case = CASES[name]
    inputs, traces = build(case)
    cost = sum(pt.sin(trace[-1] if last else trace).sum() for trace in traces)
    gradient = pytensor.grad(cost, list(inputs.values()))
    lowered = compiled(inputs.values(), [cost, *gradient])
    plain = compiled(inputs.values(), [cost, *gradient], lowered=False)
    # What Viterbi's gradient multiplies with is made from `A` and the states: a matrix a step.
    assert kinds(lowered) == ([1, 1] if name == "Viterbi" else [0, 2])
    assert kinds(plain)[1] == 0
    lengths = (T, 1) if last else (T, 1, 0)
    for steps in lengths:
        values = values_of(inputs)
        values |= {name: values[name][:steps] for name in case.sequences}
        for one, two in zip(lowered(*values.values()), plain(*values.values()), strict=True):
            assert one.shape == two.shape
            np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("fixed", [True, False])
@pytest.mark.parametrize("shape", [(1, D), (D, 1), (1, 1, D)])
def test_a_row_or_a_column_is_a_vector(shape, fixed, known):
    """Of which the types of the state say where it has one item, if not how many it has."""
    sizes = shape if known else tuple(1 if size == 1 else None for size in shape)
    A = pt.dmatrix("A") if fixed else pt.dtensor3("A")
    b, h = pt.tensor("b", dtype="float64", shape=(None, *sizes)), pt.tensor("h", shape=sizes)

    def step(b, *rest):
        h, A = rest if fixed else rest[::-1]
        return (A @ h if shape[-1] == 1 else h @ A) + b

    given = ([b], [A]) if fixed else ([b, A], [])
    trace = scanlib.scan(step, given[0], h, given[1], return_updates=False)
    outputs = [trace, *pytensor.grad(pt.sin(trace).sum(), [A, b, h])]
    inputs, values = [A, b, h], rng.normal(size=(T, *shape))
    lowered, plain = (compiled(inputs, outputs, lowered=flag) for flag in (True, False))
    loops = [n.op for n in lowered.maker.fgraph.apply_nodes if isinstance(n.op, LoopOp)]
    assert len(loops) == 2
    assert all(op.vector for op in loops)
    for steps in (T, 1, 0):
        matrix = 0.5 * rng.normal(size=(D, D) if fixed else (steps, D, D))
        arguments = matrix, values[:steps], values[0] * 2
        for one, two in zip(lowered(*arguments), plain(*arguments), strict=True):
            assert one.shape == two.shape
            np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-11)


NETWORK = Case(lambda p, x, h, A, W: p.tanh(A @ h + W @ x), ("x",), "h0", ("A", "W"))


def test_matrices_of_all_steps_are_made_if_they_are_small():
    results = []
    for known in (True, False):
        inputs, (trace,) = build(NETWORK, known)
        gradient = pytensor.grad(pt.sin(trace).sum(), list(inputs.values()))
        function = compiled(inputs.values(), gradient)
        assert kinds(function)[1] == known
        results.append(function(*values_of(inputs).values()))
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-11)


PRODUCTS = {
    "scaled": lambda x, h, A, w: (A @ h) * w + x,
    "scaled before": lambda x, h, A, w: A @ (h * w) + x,
    "divided": lambda x, h, A, w: (A @ h) / w + x,
    "two products": lambda x, h, A, w: A @ (A @ h) + x * w,
    "exponential smoothing": lambda x, h, A, w: A @ h + w * (x[0] - w @ h),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_factors_of_a_state_are_multiplied_once(name):
    x, A = pt.dmatrix("x"), pt.dmatrix("A")
    h, w = pt.dvector("h"), pt.dvector("w")
    trace = scanlib.scan(PRODUCTS[name], x, h, [A, w], return_updates=False)
    function = compiled([x, h, A, w], trace)
    assert kinds(function) == [0, 1]
    rng = np.random.default_rng(0)
    for steps in (0, 1, 6):
        values = rng.normal(size=(steps, 2)), rng.normal(size=2), rng.normal(size=(2, 2))
        given = [*values, rng.uniform(0.5, 1.0, 2)]
        (expected,) = reference_scan(
            lambda *v: [PRODUCTS[name](*v)], given[:1], given[1:2], given[2:]
        )
        np.testing.assert_allclose(function(*given), expected, rtol=1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed", "per step", "rows", "hidden Markov model"])
def test_second_derivatives(name):
    inputs, traces = build(CASES[name])
    variables = list(inputs.values())
    gradient = pytensor.grad(sum(pt.sin(trace).sum() for trace in traces), variables)
    along = sum((pt.cos(part) * part).sum() for part in gradient)
    second = pytensor.grad(along, variables)
    values = values_of(inputs).values()
    lowered, plain = (compiled(variables, second, lowered=flag) for flag in (True, False))
    assert kinds(lowered)[0] < kinds(plain)[0]
    for one, two in zip(lowered(*values), plain(*values), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fixed", "rows", "hidden Markov model", "Viterbi"])
def test_compiled_by_numba(name):
    case = CASES[name]
    inputs, traces = build(case)
    cost = pt.sin(traces[0]).sum()
    outputs = [*traces, *pytensor.grad(cost, list(inputs.values()))]
    plain = compiled(inputs.values(), outputs, lowered=False)
    with pytensor.config.change_flags(scanlib__perform="auto"):
        lowered = compiled(inputs.values(), outputs, mode="numba")
        for steps in (T, 1, 0):
            values = values_of(inputs)
            values |= {name: values[name][:steps] for name in case.sequences}
            for one, two in zip(lowered(*values.values()), plain(*values.values()), strict=True):
                np.testing.assert_allclose(one, two, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_far_below_zero():
    """Logarithms of probabilities of long series; exponentials of them are all zero."""
    inputs, traces = build(CASES["hidden Markov model"])
    cost = pt.logsumexp(traces[0][-1])
    gradient = pytensor.grad(cost, [inputs["e"], inputs["A"]])
    function = compiled(inputs.values(), [cost, *gradient])
    values = values_of(inputs)
    values["e"] = values["e"] - 500.0
    cost, by_emission, by_transition = function(*values.values())
    assert np.isfinite(cost)
    np.testing.assert_allclose(by_emission.sum(axis=1), 1.0)
    np.testing.assert_allclose(by_transition.sum(), T)


def test_last_row_alone_is_not_stored():
    inputs, traces = build(CASES["fixed"])
    function = compiled(inputs.values(), traces[0][-1])
    (node,) = [n for n in function.maker.fgraph.apply_nodes if isinstance(n.op, LinearScan)]
    assert node.op.untraced
    values = values_of(inputs)
    expected = by_hand(CASES["fixed"], values)[0][-1]
    np.testing.assert_allclose(function(*values.values()), expected)
    with pytest.raises(IndexError):
        function(*(values | {"x": values["x"][:0]}).values())


def test_sequences_of_different_lengths():
    """The check that the loop makes stays."""
    inputs, traces = build(CASES["per step"])
    loop = Loop.from_node(traces[0].owner.inputs[0].owner)
    for sequence, name in zip(loop.sequences, ("A_t", "e"), strict=True):
        sequence.outer = inputs[name]
    function = compiled(inputs.values(), loop.apply().histories[0])
    assert kinds(function) == [0, 1]
    values = values_of(inputs)
    function(*values.values())
    with pytest.raises(ValueError, match="sequence `e` gives 4 rows"):
        function(*(values | {"e": values["e"][:4]}).values())


@pytest.mark.parametrize("reverse", [False, True])
def test_sums_over_time(reverse):
    """Accumulators of every kind become sums and matrix products."""
    inputs = {name: pt.matrix(name, dtype="float64") for name in ("e", "A")}
    start = pt.dvector("start")

    def step(e, h, s, outer, product, count, A):
        new = A @ h + e
        return [
            new,
            s + 2.0 * e * h,
            outer + pt.outer(new, h),
            product + A @ pt.outer(e, e) + 1.0,
            count + pt.sum(h) - pt.exp(e[0]),
        ]

    zero = np.zeros((D, D))
    traces = scanlib.scan(
        step,
        sequences=inputs["e"],
        outputs_info=[start, start, zero, zero, np.float64(1.0)],
        non_sequences=inputs["A"],
        return_updates=False,
    )
    loop = Loop.from_node(traces[0].owner.inputs[0].owner)
    loop.carries = [
        Carry(state.initial[0], state.taps[-1], state.next) for state in loop.states[1:]
    ]
    loop.states = loop.states[:1]
    loop.reverse = reverse
    results = loop.apply()
    variables = [*inputs.values(), start]
    outputs = [*results.carries, results.histories[0]]
    lowered, plain = (compiled(variables, outputs, lowered=flag) for flag in (True, False))
    assert kinds(lowered) == [0, 1]
    values = [*values_of(inputs).values(), np.ones(D)]
    for steps in (T, 1, 0):
        given = [values[0][:steps], *values[1:]]
        for one, two in zip(lowered(*given), plain(*given), strict=True):
            np.testing.assert_allclose(one, two, rtol=1e-10, atol=1e-12)


def test_sum_of_next_values_alone():
    """A sum that reads no value but the one a step computes needs the history all the same."""
    inputs = {name: pt.matrix(name, dtype="float64") for name in ("e", "A")}
    start = pt.dvector("start")

    def step(e, h, s, A):
        new = A @ h + e
        return [new, s + e * new]

    traces = scanlib.scan(
        step,
        sequences=inputs["e"],
        outputs_info=[start, start],
        non_sequences=inputs["A"],
        return_updates=False,
    )
    loop = Loop.from_node(traces[0].owner.inputs[0].owner)
    loop.carries = [Carry(state.initial[0], state.taps[-1], state.next) for state in loop.states]
    loop.states = []
    with pytensor.config.change_flags(on_opt_error="raise"):
        function = compiled([*inputs.values(), start], loop.apply().carries)
    assert kinds(function) == [0, 1]
    e, A = values_of(inputs).values()
    h, total = np.ones(D), np.ones(D)
    for row in e:
        h = A @ h + row
        total = total + row * h
    for found, expected in zip(function(e, A, np.ones(D)), (h, total), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_sum_of_late_values():
    """What a sum adds to a state is no shift of it: it differs from step to step with the sum."""
    e, A, start = pt.dmatrix("e"), pt.dmatrix("A"), pt.dvector("start")
    traces = scanlib.scan(
        lambda e, h, late, s, A: [A @ h + e, h.sum(), s + late + e[0]],
        sequences=e,
        outputs_info=[start, start[0], start[0]],
        non_sequences=A,
        return_updates=False,
    )
    loop = Loop.from_node(traces[0].owner.inputs[0].owner)
    loop.carries = [Carry(state.initial[0], state.taps[-1], state.next) for state in loop.states]
    loop.states = []
    with pytensor.config.change_flags(on_opt_error="raise"):
        function = compiled([e, A, start], loop.apply().carries)
    assert kinds(function) == [0, 1]
    rows, matrix = values_of({"e": e, "A": A}).values()
    h, late, total = np.ones(D), 1.0, 1.0
    for row in rows:
        h, late, total = matrix @ h + row, h.sum(), total + late + row[0]
    for found, expected in zip(function(rows, matrix, np.ones(D)), (h, late, total), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-10)


def test_gradient_of_states_that_become_one_number():
    """The matrix of the recurrence has one row, which stands for all."""
    start = pt.vector("start", shape=(4,))

    def step(h):
        pair = pt.broadcast_to(h.sum(), (2,))
        return 0.5 * pt.broadcast_to(pair.sum(), (4,))

    out = scanlib.scan(step, None, [start], n_steps=3, return_updates=False)
    function = compiled([start], [pytensor.grad(out.sum(), start)])
    np.testing.assert_allclose(function(np.arange(4.0))[0], np.full(4, 84.0))


LEFT_ALONE = {
    "the matrix reads the state": (
        lambda e, h, A: (A * h.sum()) @ h + e,
        "nonlinear in the state",
    ),
    "a function of the product": (lambda e, h, A: pt.tanh(A @ h) + e, "nonlinear in the state"),
    "maximum of absolute values": (
        lambda e, h, A: pt.max(abs(h[:, None]) + A, axis=0) + e,
        "nonlinear in the state",
    ),
    "weighted logarithm": (
        lambda e, h, A: pt.log(pt.exp(2.0 * h[:, None] + A).sum(axis=0)) + e,
        "the state",  # PyTensor 3.3.8 has an Op for it
    ),
    "minus inside a maximum": (
        lambda e, h, A: pt.max(A - h[:, None], axis=0) + e,
        "nonlinear in the state",
    ),
    "both sides": (lambda e, h, A: (A @ (h[:, None] @ h[None, :]))[0] + e, "nonlinear"),
    "sorted": (lambda e, h, A: A @ pt.sort(h) + e, "reads the state"),
    "two states, one nonlinear": (None, "nonlinear in the state"),
}


@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_only_looks_linear_is_left_alone(name):
    step, reason = LEFT_ALONE[name]
    e, A, h0 = pt.dmatrix("e"), pt.dmatrix("A"), pt.dvector("h0")
    if step is None:

        def step(e, h, g, A):
            return [A @ h + g, A.T @ (g * h) + h + e]

    two = name == "two states, one nonlinear"
    traces = scanlib.scan(
        step,
        sequences=e,
        outputs_info=[h0, h0] if two else h0,
        non_sequences=A,
        return_updates=False,
    )
    trace = traces[0] if two else traces
    function = compiled([e, A, h0], trace)
    (left,) = [n for n in function.maker.fgraph.apply_nodes if isinstance(n.op, Scan)]
    assert reason in explain_linear(left)
    assert kinds(function)[1] == 0


def test_until_is_left_alone():
    e, A, h0 = pt.dmatrix("e"), pt.dmatrix("A"), pt.dvector("h0")
    trace = scanlib.scan(
        lambda e, h, A: (A @ h + e, scanlib.until(e[0] > 1.0)),
        sequences=e,
        outputs_info=h0,
        non_sequences=A,
        return_updates=False,
    )
    assert kinds(compiled([e, A, h0], trace)) == [1, 0]


def test_recurrence_is_explained_by_none():
    _, traces = build(CASES["fixed"])
    assert explain_linear(traces[0].owner.inputs[0].owner) is None


@pytest.mark.parametrize(
    "step, lowered",
    [
        (lambda k, h, F, H: (F @ h) * k, True),
        (lambda k, h, F, H: F @ (h - k * pt.dot(H, h)), False),
    ],
    ids=["elementwise", "corrected and moved"],
)
def test_small_matrices_that_products_make_are_left_to_the_loop(step, lowered):
    """A filter's gain, the state and fixed matrices: the step is cheaper than its matrix."""
    k = pt.matrix("k", dtype="float64", shape=(None, 2))
    F = pt.matrix("F", dtype="float64", shape=(2, 2))
    H, h0 = (pt.vector(name, dtype="float64", shape=(2,)) for name in ("H", "h0"))
    trace = scanlib.scan(
        step, sequences=k, outputs_info=h0, non_sequences=[F, H], return_updates=False
    )
    reason = explain_linear(trace.owner.inputs[0].owner)
    assert (reason is None) == lowered
    assert lowered or "making a matrix for each step" in reason


@pytest.mark.parametrize("size", [6, None])
def test_derivatives_that_are_matrices_are_left_to_the_loop(size, mode):
    """Those of a step of Sinkhorn's algorithm: a product of two, as many numbers as costs each."""
    cost = pt.tensor("cost", shape=(size, size))

    def step(f, g, cost):
        f = -pt.logsumexp(g[None, :] - cost, axis=1)
        return f, -pt.logsumexp(f[:, None] - cost, axis=0)

    starts = [pt.zeros(cost.shape[0]), pt.zeros(cost.shape[1])]
    f, _ = scanlib.scan(step, None, starts, [cost], n_steps=4, return_updates=False)
    function = pytensor.function([cost], pytensor.grad((f**2).sum(), cost), mode=mode)
    assert not any(isinstance(node.op, LinearScan) for node in function.maker.fgraph.apply_nodes)
    value = rng.normal(size=(6, 6))

    def plain(cost):
        g, total = np.zeros(6), 0
        for _ in range(4):
            f = -np.log(np.exp(g[None, :] - cost).sum(axis=1))
            g = -np.log(np.exp(f[:, None] - cost).sum(axis=0))
            total += (f**2).sum()
        return total

    found = function(value)
    for place in np.ndindex(6, 6):
        moved = value.astype(complex)
        moved[place] += 1e-30j
        np.testing.assert_allclose(found[place], plain(moved).imag / 1e-30, rtol=1e-9)


OF_ROWS = {
    "softmax": (lambda x, h: pt.special.softmax(x + h, axis=-1), lambda x, h: softmax(x + h, -1)),
    "centred": (
        lambda x, h: pt.tanh(x - h.mean(axis=-1, keepdims=True)),
        lambda x, h: np.tanh(x - h.mean(axis=-1, keepdims=True)),
    ),
}


@pytest.mark.parametrize("size", [6, None])
@pytest.mark.parametrize("name", OF_ROWS)
def test_derivatives_of_what_steps_do_to_rows_of_a_batch_are_left_to_the_loop(name, size, mode):
    """A sum over products within a row is no matrix: as one, it would be that of its derivative,
    for each row of each step."""
    step, plain = OF_ROWS[name]
    x, h0 = pt.tensor("x", shape=(None, 4, size)), pt.tensor("h0", shape=(4, size))
    cost = (scanlib.scan(step, x, h0, return_updates=False) ** 2).sum()
    function = pytensor.function([x, h0], pytensor.grad(cost, [x, h0]), mode=mode)
    assert not any(isinstance(node.op, LinearScan) for node in function.maker.fgraph.apply_nodes)
    values = {x: rng.normal(size=(3, 4, 6)), h0: rng.normal(size=(4, 6))}

    def reference(x, h):
        return sum(((h := plain(row, h)) ** 2).sum() for row in x)

    assert_derivatives(cost, values, reference, mode, order=1)


def test_sizes_that_a_step_computes_are_left_to_the_loop():
    B, k, h0 = pt.dmatrix("B"), pt.lvector("k"), pt.dvector("h0")
    trace = scanlib.scan(lambda k, h: (B @ h)[k : k + 3], k, h0, return_updates=False)
    assert explain_linear(trace.owner.inputs[0].owner) is not None
    matrix, places, h = np.arange(18.0).reshape(6, 3) / 20, [0, 2, 3], np.ones(3)
    expected = [h := (matrix @ h)[place : place + 3] for place in places]
    with pytensor.config.change_flags(on_opt_error="raise"):
        function = compiled([B, k, h0], trace)
    np.testing.assert_allclose(function(matrix, places, np.ones(3)), expected)


@pytest.mark.parametrize("open_sizes", [False, True])
def test_a_value_wider_than_what_it_fills(open_sizes):
    """``second(x, h)`` broadcasts both: neither of the two need have the shape of the result."""
    n = None if open_sizes else 4
    x, h0 = pt.tensor("x", shape=(None, 1, n)), pt.tensor("h0", shape=(n, 1))

    weights = np.array([[0.5], [-0.2], [0.1], [0.3]])

    def step(x, h):
        return pt.tanh((pt.second(x, h) @ weights) * pt.exp(x @ weights))

    states = scanlib.scan(step, x, h0, return_updates=False)

    def reference(x, h):
        cost = 0.0
        for row in x:
            h = np.tanh(weights.sum() * h * np.exp(row @ weights))
            cost += (h**2).sum()
        return cost

    generator = np.random.default_rng(5)
    values = {x: generator.normal(size=(3, 1, 4)), h0: generator.normal(size=(4, 1)) / 3}
    assert_derivatives((states**2).sum(), values, reference, AT_ONCE["c"])


OWN_PLACES = {
    "outer product": lambda p, x, M, H: (0.9 * M + x[:, None] * x[None, :], 0.5 * H),
    "an item": lambda p, x, M, H: (0.9 * M + x[0], 0.5 * H - M[0, 1]),
    "a mean": lambda p, x, M, H: (x[0] * M - x.mean(), H + x - x.max()),
    "two states": lambda p, x, M, H: (0.9 * M + 0.1 * x.sum(), x[1] * H + 0.5 * x),
}


@pytest.mark.parametrize("mode", ["numba", "c"])
@pytest.mark.parametrize("name", OWN_PLACES)
def test_states_multiplied_number_by_number_make_no_matrix(name, mode):
    """A matrix would have them on its diagonal, and zeros."""
    step = OWN_PLACES[name]
    x, M0 = pt.matrix("x"), pt.matrix("M0")
    values = [rng.normal(size=(T, D)), rng.normal(size=(D, D))]

    def plain(x, M0):
        info = [M0, np.zeros(D)]
        return reference_scan(lambda *a: list(step(np, *a)), [x], info)

    traces = scanlib.scan(lambda *a: step(pt, *a), x, [M0, pt.zeros(D)], return_updates=False)
    cost = sum((pt.tanh(trace) ** 2).sum() for trace in traces)
    outputs = [*traces, *pytensor.grad(cost, [x, M0])]
    function = pytensor.function([x, M0], outputs, mode=AT_ONCE[mode])
    nodes = function.maker.fgraph.toposort()
    if name != "an item":
        assert not any(isinstance(node.op, LinearScan) for node in nodes)
    for actual, expected in zip(function(*values)[:2], plain(*values), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
    assert_derivatives(
        cost,
        {x: values[0], M0: values[1]},
        lambda *v: sum((np.tanh(trace) ** 2).sum() for trace in plain(*v)),
        AT_ONCE[mode],
        order=1,
    )


def test_a_product_of_a_column_and_a_row_is_elementwise():
    x = pt.matrix("x")
    trace = scanlib.scan(
        lambda x, P: 0.9 * P + pt.outer(x, x), x, pt.zeros((D, D)), return_updates=False
    )
    function = pytensor.function([x], trace, mode=AT_ONCE["c"])
    assert any(isinstance(n.op, ElemwiseScan) for n in function.maker.fgraph.toposort())
    values = rng.normal(size=(T, D))
    (expected,) = reference_scan(
        lambda x, P: [0.9 * P + np.outer(x, x)], [values], [np.zeros((D, D))]
    )
    np.testing.assert_allclose(function(values), expected, rtol=1e-12)
