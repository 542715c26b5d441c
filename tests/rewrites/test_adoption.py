"""Loops of `pytensor.scan` compiled as scanlib's loops, against the plain Python loop.

PyTensor's own results are never the measure. `tests.legacy_loops` holds the loops.
"""

import os
import subprocess
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.tensor.basic import Alloc, AllocEmpty, Join
from pytensor.tensor.subtensor import IncSubtensor

import scanlib
from scanlib._compat import LegacyScan
from scanlib.ops.loop_rewrite import record_of
from scanlib.rewrites.adopt.adopt import AdoptLoops
from tests.checks import assert_derivatives, assert_same
from tests.derivatives import central_gradient
from tests.legacy_loops import LOOPS, scan
from tests.modes import MODES
from tests.reference import reference_scan

ADOPTING = {name: mode.including("scanlib_adopt") for name, mode in MODES.items()}
IN_NUMBA = [
    *("nonlinear", "two_taps", "two_states_and_an_output", "states_that_change_places"),
    *("backwards_and_turned_round", "vector_state", "garch", "outputs_until", "map_of_loops"),
]


@pytest.fixture(autouse=True)
def strict():
    """A rewrite that fails must fail the test; PyTensor would print a warning and go on."""
    with pytensor.config.change_flags(on_opt_error="raise"):
        yield


def variables(case):
    return [
        pt.tensor(f"v{i}", dtype=value.dtype, shape=(None,) * value.ndim)
        for i, value in enumerate(case.values)
    ]


def assert_all_adopted(fgraph):
    assert not any(isinstance(node.op, LegacyScan) for node in fgraph.apply_nodes)
    assert all(loop.reason is None for loop in record_of(fgraph).adopted)


def is_wide(case):
    """Whether a loop reads more than scalars at a step."""
    return any(value.ndim > 1 for value in case.values)


def derivatives(cost, inputs, order):
    found = [cost]
    for _ in range(order):
        total = sum(pt.sum(value) for value in found)
        found += pytensor.grad(total, inputs, disconnected_inputs="ignore")
    return found


def adopted(outputs):
    """Return a copy of a graph after adoption alone."""
    fgraph = FunctionGraph(outputs=outputs, clone=True)
    AdoptLoops(when_enabled=False).rewrite(fgraph)
    return fgraph


@pytest.mark.parametrize("linker", ["c", "py"])
@pytest.mark.parametrize("name", LOOPS)
def test_values(name, linker):
    case = LOOPS[name]
    inputs = variables(case)
    outputs = case.build(*inputs)
    assert any(
        v.owner is not None and isinstance(v.owner.op, LegacyScan) for v in ancestors(outputs)
    )
    with pytensor.config.change_flags(scanlib__perform="python"):
        f = pytensor.function(inputs, outputs, mode=ADOPTING[linker], on_unused_input="ignore")
        assert_all_adopted(f.maker.fgraph)
        results = f(*case.values)
    expected = [np.asarray(value) for value in case.plain(*case.values)]
    rtol = 1e-5 if case.values[0].dtype == "float32" else 1e-9
    assert_same(results, expected, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in LOOPS.items() if case.order])
def test_derivatives(name):
    case = LOOPS[name]
    inputs = variables(case)
    weights = [np.cos(np.arange(np.size(v))).reshape(np.shape(v)) for v in case.plain(*case.values)]

    def total(outputs):
        return sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))

    cost = total(case.build(*inputs))
    with pytensor.config.change_flags(scanlib__perform="python"):
        assert_derivatives(
            cost,
            dict(zip(inputs, case.values, strict=True)),
            lambda *values: total([np.asarray(v) for v in case.plain(*values)]),
            ADOPTING["c"],
            order=case.order,
            disconnected_inputs="ignore",
        )
        assert_all_adopted(adopted(derivatives(cost, inputs, case.order)))


@pytest.mark.all_forms
@pytest.mark.parametrize("name", LOOPS)
def test_known_shapes_are_no_obstacle(name):
    """PyTensor knows the length of some buffers as a number, and of the loop as an expression."""
    case = LOOPS[name]
    inputs = [pt.tensor(dtype=value.dtype, shape=value.shape) for value in case.values]
    outputs = case.build(*inputs)
    if case.order:
        outputs = derivatives(sum(out.sum() for out in outputs), inputs, order=1)
    assert_all_adopted(adopted(outputs))


@pytest.mark.parametrize("name", [n for n in LOOPS if LOOPS[n].order and is_wide(LOOPS[n])])
def test_gradients_with_known_shapes(name):
    """Where sizes are known, other rewrites apply."""
    case = LOOPS[name]
    inputs = [pt.tensor(dtype=value.dtype, shape=value.shape) for value in case.values]
    cost = sum((k + 1) * out.sum() for k, out in enumerate(case.build(*inputs)))
    with pytensor.config.change_flags(scanlib__perform="python"):
        gradients = pytensor.grad(cost, inputs, disconnected_inputs="ignore")
        f = pytensor.function(inputs, gradients, mode=ADOPTING["py"], on_unused_input="ignore")
        assert_all_adopted(f.maker.fgraph)
        results = f(*case.values)

    def plain(*values):
        return sum((k + 1) * np.sum(value) for k, value in enumerate(case.plain(*values)))

    for result, wanted in zip(results, central_gradient(plain, case.values), strict=True):
        np.testing.assert_allclose(result, wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_NUMBA)
def test_numba(name):
    """Values and gradients in one function, compiled by numba."""
    case = LOOPS[name]
    inputs = variables(case)
    expected = [np.asarray(value) for value in case.plain(*case.values)]
    weights = [np.cos(np.arange(value.size)).reshape(value.shape) for value in expected]
    outputs = case.build(*inputs)
    cost = sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))
    gradients = pytensor.grad(cost, inputs, disconnected_inputs="ignore")
    f = pytensor.function(inputs, [*outputs, *gradients], mode=ADOPTING["numba"])
    assert_all_adopted(f.maker.fgraph)
    results = f(*case.values)
    assert_same(results[: len(outputs)], expected)

    def plain(*values):
        found = case.plain(*values)
        return sum((np.asarray(v) * w).sum() for v, w in zip(found, weights, strict=True))

    for result, wanted in zip(
        results[len(outputs) :], central_gradient(plain, case.values), strict=True
    ):
        np.testing.assert_allclose(result, wanted, rtol=1e-6, atol=1e-7)


# Special cases


def test_no_steps():
    x, y0 = pt.dvector("x"), pt.dscalar("y0")
    (y,) = scan(lambda x, y: 0.5 * y + x, x, [y0])
    f = pytensor.function([x, y0], [y, *pytensor.grad(y.sum(), [x, y0])], mode=ADOPTING["py"])
    assert_all_adopted(f.maker.fgraph)
    for result, shape in zip(f(np.empty(0), 1.0), [(0,), (0,), ()], strict=True):
        assert result.shape == shape
    assert f(np.empty(0), 1.0)[2] == 0.0


@pytest.mark.parametrize("steps", [1, 3, 6, 9])
def test_truncated_gradient(steps):
    """Every step owes to those before it, but the derivative walks back so many steps only."""
    x, a, y0 = pt.dvector("x"), pt.dscalar("a"), pt.dscalar("y0")
    (y,) = scan(lambda x, y, a: a * y + x, x, [y0], a, truncate_gradient=steps)
    f = pytensor.function([x, a, y0], pytensor.grad(y[-1], [x, a]), mode=ADOPTING["py"])
    assert_all_adopted(f.maker.fgraph)
    values = np.linspace(-1, 1, 6)
    rows = [0.3]
    for value in values:
        rows.append(0.7 * rows[-1] + value)
    gx, ga, owed = np.zeros(6), 0.0, 1.0
    for t in range(5, max(-1, 5 - steps), -1):
        gx[t] = owed
        ga += owed * rows[t]
        owed *= 0.7
    assert_same(f(values, 0.7, 0.3), [gx, np.asarray(ga)])


@pytest.mark.all_forms
@pytest.mark.parametrize("length", [2, 3, 5])
def test_slices_that_end_before_the_first_row(length):
    """``x[: rows - 3]`` counts from the end of an array of less than three rows."""
    x, y0 = pt.dvector("x"), pt.dscalar("y0")
    (y,) = scan(lambda x, y: 0.5 * y + x, x[: x.shape[0] - 3], [y0])
    rest = x[1:][: x.shape[0] - 4]
    f = pytensor.function([x, y0], [y, rest], mode=ADOPTING["py"])
    assert_all_adopted(f.maker.fgraph)
    value = np.arange(1.0, length + 1)
    wanted = reference_scan(lambda x, y: [0.5 * y + x], [value[: length - 3]], [2.0])
    assert_same(f(value, 2.0), [wanted[0], value[1:][: length - 4]])


def test_sequence_too_short():
    x, y0 = pt.dvector("x"), pt.dscalar("y0")
    (y,) = scan(lambda x, y: 0.5 * y + x, x, [y0], n_steps=5)
    f = pytensor.function([x, y0], y, mode=ADOPTING["py"])
    with pytest.raises(ValueError, match="3"):
        f(np.ones(3), 0.0)


def test_nothing_is_copied():
    """The last row and the gradient of a function of it need no buffer, no copy and no history
    but the one that the gradient reads."""
    x, a, y0 = pt.dvector("x"), pt.dscalar("a"), pt.dscalar("y0")
    (y,) = scan(lambda x, y, a: pt.tanh(a * y + x), x, [y0], a)
    cost = y[-1] ** 2
    forward = pytensor.function([x, a, y0], cost, mode=ADOPTING["c"])
    (loop,) = scanlib.explain(forward).loops
    assert loop.part("y0").stored == "last rows"
    both = pytensor.function(
        [x, a, y0], [cost, *pytensor.grad(cost, [x, a, y0])], mode=ADOPTING["c"]
    )
    copies = (Alloc, AllocEmpty, Join, IncSubtensor)
    for f in (forward, both):
        assert not [n for n in f.maker.fgraph.apply_nodes if isinstance(n.op, copies)]
    assert len(both.maker.fgraph.apply_nodes) < 12


def test_same_graph_as_with_scanlib():
    """A gradient that PyTensor took becomes the loop that scanlib would have made."""
    x, a, y0 = pt.dvector("x"), pt.dscalar("a"), pt.dscalar("y0")

    def loops(scan, mode):
        y = scan(
            lambda x, y, a: pt.tanh(a * y + x),
            sequences=x,
            outputs_info=y0,
            non_sequences=a,
            return_updates=False,
        )
        f = pytensor.function([x, a, y0], pytensor.grad((y**2).sum(), [x, a, y0]), mode=mode)
        return [
            (loop.op, loop.reverse, loop.schedule, [(p.role, p.recurrence) for p in loop.parts])
            for loop in scanlib.explain(f).loops
        ]

    assert loops(pytensor.scan, ADOPTING["c"]) == loops(scanlib.scan, MODES["c"])


# Random draws


def test_random_stream():
    """The draws are those of the generator, step by step, and go on with the next call."""
    stream = pt.random.RandomStream(seed=3)
    x = pt.dvector("x")
    y, updates = pytensor.scan(lambda x, y: 0.5 * y + stream.normal(x), x, [pt.zeros(())])
    (shared,) = updates
    rng = shared.get_value()
    f = pytensor.function([x], y, updates=updates, mode=ADOPTING["py"])
    assert_all_adopted(f.maker.fgraph)
    for _ in range(2):
        state, expected = 0.0, []
        for mean in (1.0, 2.0, 3.0):
            state = 0.5 * state + rng.normal(mean, 1.0)
            expected.append(state)
        np.testing.assert_array_equal(f([1.0, 2.0, 3.0]), expected)


def test_generator_as_a_state():
    rng = pt.random.type.random_generator_type("rng")
    x = pt.dvector("x")

    def step(x, rng):
        new, draw = pt.random.normal(x, rng=rng).owner.outputs
        return new, draw

    new, draws = pytensor.scan(step, x, [rng, None], return_updates=False)
    (after,) = [pt.random.uniform(rng=new)]
    f = pytensor.function([x, rng], [draws, after], mode=ADOPTING["py"])
    assert_all_adopted(f.maker.fgraph)
    expected = np.random.default_rng(5)
    drawn, last = f([1.0, 2.0], np.random.default_rng(5))
    np.testing.assert_array_equal(drawn, [expected.normal(1.0), expected.normal(2.0)])
    assert last == expected.uniform()


@pytest.mark.parametrize("differentiated", [False, True])
def test_shared_variable_with_update(differentiated):
    """A loop of no steps leaves it what it was; a gradient reads all that it was meanwhile."""
    total = pytensor.shared(np.array(1.0), name="total")
    x = pt.dvector("x")
    y, updates = pytensor.scan(lambda x: (x * total, {total: total + x}), x)
    results = [y, updates[total] * 2]
    if differentiated:
        results.append(pytensor.grad((y**2).sum(), x))
    f = pytensor.function([x], results, updates=updates, mode=ADOPTING["py"])
    assert_all_adopted(f.maker.fgraph)
    held = 1.0
    for row in ([1.0, 2.0], [], [3.0]):
        before = held + np.cumsum([0.0, *row])
        y = row * before[:-1]
        found = f(row)
        np.testing.assert_array_equal(found[0], y)
        assert found[1] == 2 * before[-1] == 2 * total.get_value()
        if differentiated:
            later = np.cumsum((2 * y * row)[::-1])[::-1]
            wanted = 2 * y * before[:-1] + [*later[1:], 0.0][: len(row)]
            np.testing.assert_allclose(found[2], wanted)
        held = before[-1]


@pytest.mark.parametrize("taps", [1, 2])
@pytest.mark.parametrize("backwards", [False, True])
def test_derivatives_of_initial_rows_are_no_slice_of_all(taps, backwards):
    """`y[:-1]` of no rows has none, so that a length computed from it might be negative."""
    y, start = pt.dvector("y"), pt.tensor("start", dtype="float64", shape=(taps,))
    given = y[:-1]
    state = {"initial": start, "taps": list(range(-taps, 0))}
    initial = start[0] if taps == 1 else state
    (level,) = scan(
        lambda y, *levels: y + 0.5 * levels[0], given, [initial], go_backwards=backwards
    )
    fgraph = adopted([pytensor.grad((level**2).sum(), start)])
    assert_all_adopted(fgraph)
    for node in fgraph.toposort():
        if isinstance(node.op, Join):
            assert node.outputs[0].type.shape == (taps,)
    assert_derivatives(
        (level**2).sum(),
        {start: np.array([0.5, -0.3][:taps]), y: np.array([1.0, 2.0, -1.0, 0.5])},
        lambda start, y: (np.asarray(plain_levels(start, y[:-1], backwards)) ** 2).sum(),
        ADOPTING["py"],
        order=1,
    )


def plain_levels(start, y, backwards):
    levels = list(start)
    for value in y[::-1] if backwards else y:
        levels.append(value + 0.5 * levels[-len(start)])
    return levels[len(start) :]


def test_slices_of_parts_that_are_joined():
    """Parts that are converted on the way are no substitute for what is read of them."""
    x, many = pt.dvector("x"), pt.lvector("many")
    three = pt.tensor("three", shape=(3,), dtype="int32")
    (y,) = scan(lambda x, y: 0.5 * y + x, x, [pt.zeros(())])
    floats, integers = pt.join(0, three, x), pt.join(0, three, many)
    same, turned = pt.join(0, three, three + 3, x.astype("int32")), pt.join(0, x, 1.5 * x[:2])
    slices = [floats[:2], floats[:3], integers[:3], same[:4], same[:6], same[3:5], turned[-2:]]
    inputs = [x, many, three]
    values = [np.arange(4.0) + 0.5, np.arange(2) + 20, np.arange(3, dtype="int32") + 7]
    f = pytensor.function(inputs, [y, *slices], mode=ADOPTING["py"])
    plain = pytensor.function(inputs, slices, mode=MODES["py"])
    assert_all_adopted(f.maker.fgraph)
    assert_same(f(*values)[1:], plain(*values))


# Switches


def ops(y, mode=None):
    return [loop.op for loop in scanlib.explain(y, mode=mode).loops]


@pytest.fixture
def affine():
    x = pt.dvector("x")
    return scan(lambda x, y: 0.5 * y + x, x, [pt.zeros(())])[0]


@pytest.mark.parametrize("linker", list(MODES))
def test_switches(affine, linker):
    mode = MODES[linker]
    lowered = ["Scan"] if linker == "py" else ["ElemwiseScan"]
    assert ops(affine, mode) == ["pytensor.scan"]
    scanlib.enable()
    try:
        assert ops(affine, mode) == lowered
        with scanlib.enabled(False):
            assert ops(affine, mode) == ["pytensor.scan"]
        assert ops(affine, mode) == lowered
    finally:
        scanlib.disable()
    assert ops(affine, mode) == ["pytensor.scan"]
    with scanlib.enabled():
        assert ops(affine, mode) == lowered
    assert ops(affine, mode) == ["pytensor.scan"]
    assert ops(affine, mode.including("scanlib_adopt")) == lowered


def test_flag_in_the_environment():
    script = "import scanlib, pytensor; print(pytensor.config.scanlib__adopt)"
    flags = f"{os.environ.get('PYTENSOR_FLAGS', '')},scanlib__adopt=True".lstrip(",")
    found = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTENSOR_FLAGS": flags},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "True"


def test_the_first_loop_of_a_program():
    """Under the C linker it may be an adopted one: what stands around it is a program, too."""
    script = """
import pytensor, pytensor.tensor as pt, scanlib
x = pt.dvector("x")
y = pytensor.scan(lambda x, y: 0.5 * y + x, x, pt.zeros(()), return_updates=False)
with scanlib.enabled():
    f = pytensor.function([x], pt.exp(y * x).sum() / x.sum(), mode="CVM")
print(*(type(node.op).__name__ for node in f.maker.fgraph.toposort()))
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    names = set(found.stdout.split())
    assert names >= {"ElemwiseScan", "KernelGraph"}
    assert not names & {"Elemwise", "Sum"}


def test_loops_that_stay():
    """What is not adopted stays PyTensor's, works, and is explained."""
    x = pt.dvector("x")
    kept = scan(lambda x, y: 0.5 * y + x, x, [pt.zeros(())], profile=True, name="kept")[0]
    taken = scan(lambda x, y: 0.2 * y + x, x, [pt.zeros(())], name="taken")[0]
    explanation = scanlib.explain([kept, taken], mode=ADOPTING["c"])
    by_name = {loop.name: loop for loop in explanation.loops}
    assert by_name["kept"].op == "pytensor.scan"
    assert by_name["taken"].op == "ElemwiseScan"
    (obstacle,) = by_name["kept"].obstacles
    assert "it was not adopted: it was built with profile=True" in str(obstacle)
    assert [(loop.name, loop.reason is None) for loop in explanation.adoption] in (
        [("kept", False), ("taken", True)],
        [("taken", True), ("kept", False)],
    )
    text = str(explanation)
    assert "adopted from pytensor.scan: taken" in text
    assert "left to PyTensor: kept, because it was built with profile=True" in text
    assert "adopted from pytensor.scan: taken" in explanation._repr_html_()
    assert {"name": "taken", "reason": None} in explanation.to_dict()["adoption"]


def test_loops_that_pytensor_rewrote():
    """After PyTensor's own rewrites buffers are shorter than the loop; they are left alone."""
    x = pt.dvector("x")
    (y,) = scan(lambda x, y: 0.5 * y + x, x, [pt.zeros(())])
    fgraph = FunctionGraph(outputs=[y[-1]], clone=True)
    MODES["c"].optimizer.rewrite(fgraph)
    AdoptLoops(when_enabled=False).rewrite(fgraph)
    (loop,) = record_of(fgraph).adopted
    assert loop.reason is not None
    assert any(isinstance(node.op, LegacyScan) for node in fgraph.apply_nodes)


def test_loop_of_pytensor_inside_a_loop_of_scanlib():
    x = pt.dmatrix("x")
    y = scanlib.map(
        lambda row: scan(lambda x, y: 0.5 * y + x, row, [pt.zeros(())])[0][-1],
        x,
        return_updates=False,
    )
    fgraph = adopted([y])
    assert_all_adopted(fgraph)
    f = pytensor.function([x], y, mode=ADOPTING["py"])
    np.testing.assert_allclose(f([[1.0, 2.0], [3.0, 4.0]]), [2.5, 5.5])


class TestJacobians:
    """PyTensor makes loops of its own of them: in steps and around loops of scanlib's these are
    adopted without being asked for."""

    def compiled(self, inputs, outputs, mode):
        f = pytensor.function(inputs, outputs, mode=mode)
        assert_all_adopted(f.maker.fgraph)
        return f

    def test_inside_of_a_step(self, mode):
        A, x = pt.dmatrix("A"), pt.dvector("x")

        def step(x, A):
            image = pt.tanh(A @ x)
            return pytensor.gradient.jacobian(image, x) @ x + image

        y = scanlib.scan(step, outputs_info=x, non_sequences=A, n_steps=3, return_updates=False)
        cost = (y[-1] ** 2).sum()
        f = self.compiled([A, x], [y, *pytensor.grad(cost, [A, x])], mode)

        def rows(A, x):
            found = []
            for _ in range(3):
                image = np.tanh(A @ x)
                x = (1 - image**2) * (A @ x) + image
                found.append(x)
            return np.array(found)

        rng = np.random.default_rng(1)
        values = [0.5 * rng.normal(size=(3, 3)), rng.normal(size=3)]
        expected = central_gradient(lambda A, x: (rows(A, x)[-1] ** 2).sum(), values)
        history, *gradients = f(*values)
        np.testing.assert_allclose(history, rows(*values))
        for found, wanted in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-8)

    def test_of_a_loop(self, mode):
        x, rate = pt.dvector("x"), pt.dscalar("rate")
        other = scan(lambda x, y: 0.5 * y + x, x, [pt.zeros(())])[0]
        y = scanlib.scan(lambda x, y, rate: rate * y + x, x, [0.0], [rate], return_updates=False)
        jacobian = pytensor.gradient.jacobian(y, x)
        hessian = pytensor.gradient.hessian((y**2).sum() / 2, x)
        f = self.compiled([x, rate], [jacobian, hessian], mode)
        powers = np.tril(0.5 ** np.subtract.outer(np.arange(4.0), np.arange(4.0)).clip(0))
        for found, wanted in zip(f(np.ones(4), 0.5), [powers, powers.T @ powers], strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-12)
        assert ops([jacobian, other], mode).count("pytensor.scan") == 1

    def test_of_a_batch_of_loops(self, fast_mode):
        x, rows = pt.dvector("x"), pt.dmatrix("rows")
        y = scanlib.scan(lambda x, y: y**2 + x, x, [0.1], return_updates=False)
        hessian = pytensor.gradient.hessian(y[-1], x)
        single = pytensor.function([x], hessian, mode=fast_mode)
        batch = self.compiled([rows], vectorize_graph(hessian, {x: rows}), fast_mode)
        values = np.random.default_rng(2).normal(size=(2, 4))
        np.testing.assert_allclose(batch(values), [single(row) for row in values])
