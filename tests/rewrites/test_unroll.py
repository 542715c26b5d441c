"""Inner loops of few steps, written out in the step around them."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.errors import SequenceLengthError, StepShapeError
from scanlib.ops.execution import LoopOp
from scanlib.ops.loop_rewrite import record_of
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.checks import assert_derivatives, assert_same
from tests.exploration import explore, half
from tests.nested_loops import (
    assert_gradients,
    assert_values,
    of_fixed_length,
    outer_loops,
    scan,
)
from tests.reference import reference_scan
from tests.strategies import DIFFERENTIABLE, loops

rng = np.random.default_rng(7)


@pytest.mark.slow
@pytest.mark.parametrize("shard", half(0, 4))
def test_random_values(shard):
    def check(case):
        assert_values(
            of_fixed_length(case, static=True), ("c", "numba")[shard // 2 :], is_written_out
        )

    def is_written_out(function, linker):
        assert not outer_loops(function)

    few = loops(steps=(1, 2, 3, 4, 5, 6, 7))
    explore(few, check, shard, 25)


@pytest.mark.slow
@pytest.mark.parametrize("shard", half(0, 4))
def test_random_gradients(shard):
    def check(case):
        linkers = ("c", "numba")[shard // 2 :]
        assert_gradients(of_fixed_length(case, static=True), linkers, lambda *_: None)

    explore(loops(dtypes=DIFFERENTIABLE, steps=(1, 2, 3, 4)), check, shard, 15)


# What is written out, and what is left.

x, theta = pt.dvector("x"), pt.dscalar("theta")
DATA = np.array([0.3, -0.5, 0.8])


def newton(value, start, slope, steps=5):
    """Return the iterates of a root of ``z + slope z**3 = start + value``."""

    def iterate(z, value, start, slope):
        return z - (z + slope * z**3 - start - value) / (1 + 3 * slope * z**2)

    return scan(iterate, None, [start], [value, start, slope], n_steps=steps, name="newton")


def plain_newton(values, slope, steps=5):
    level, found = 0.0, []
    for value in values:
        z = level
        for _ in range(steps):
            z = z - (z + slope * z**3 - level - value) / (1 + 3 * slope * z**2)
        level = z
        found.append(z)
    return np.array(found)


def implicit_steps():
    return scan(lambda v, h, s: newton(v, h, s)[-1], x, [0.0], [theta], name="time")


def test_newton_iterations_are_one_step(mode):
    trace = implicit_steps()
    function = pytensor.function([x, theta], trace, mode=mode)
    np.testing.assert_allclose(function(DATA, 0.7), plain_newton(DATA, 0.7), rtol=1e-12)
    assert_derivatives(
        (trace**2).sum(),
        {x: DATA, theta: np.array(0.7)},
        lambda values, slope: (plain_newton(values, slope) ** 2).sum(),
        mode,
    )


def test_such_loops_are_elementwise(fast_mode):
    trace = implicit_steps()
    outputs = [trace, *pytensor.grad(trace.sum(), [x, theta])]
    function = pytensor.function([x, theta], outputs, mode=fast_mode)
    found = [node.op for node in function.maker.fgraph.apply_nodes if isinstance(node.op, LoopOp)]
    assert len(found) == 2
    assert all(isinstance(op, ElemwiseScan) for op in found)
    assert ("time", "newton", 5) in record_of(function.maker.fgraph).unrolled


def test_explain_says_so():
    explanation = scanlib.explain(implicit_steps())
    assert explanation.unrolled == [("time", "newton", 5)]
    assert "the 5 steps of 'newton' are part of each step of 'time'" in str(explanation)


def test_small_arrays_and_all_that_is_returned(mode):
    start = pt.tensor("start", shape=(2,))
    turn = np.array([[0.9, -0.2], [0.2, 0.9]])

    def step(row, z):
        trace, norms = scan(
            lambda v, z: (pt.dot(turn, z) + v, (z**2).sum()), row, [z, None], name="inner"
        )
        return trace[-1], trace[::-1], norms, (trace * row[:, None]).sum(axis=0)

    rows = pt.tensor("rows", shape=(None, 3))
    traces = scan(step, rows, [start, None, None, None])
    values, z, expected = rng.normal(size=(4, 3)), np.array([1.0, -1.0]), [[], [], [], []]
    function = pytensor.function([rows, start], traces, mode=mode)
    found = function(values, z)
    for row in values:
        trace, norms = reference_scan(lambda v, z: [turn @ z + v, (z**2).sum()], [row], [z, None])
        z = trace[-1]
        own = z, trace[::-1], norms, (trace * row[:, None]).sum(axis=0)
        for column, value in zip(expected, own, strict=True):
            column.append(value)
    assert_same(found, [np.array(column) for column in expected])


def test_a_loop_in_a_loop_in_a_loop(fast_mode):
    def middle(h, v):
        return scan(lambda g, v: 0.5 * g + v, None, [h], [v], n_steps=3)[-1] + 0.1 * h

    trace = scan(lambda v, h: scan(middle, None, [h], [v], n_steps=2)[-1], x, [0.0])
    function = pytensor.function([x], trace, mode=fast_mode)
    h, expected = 0.0, []
    for value in DATA:
        for _ in range(2):
            g = h
            for _ in range(3):
                g = 0.5 * g + value
            h = g + 0.1 * h
        expected.append(h)
    np.testing.assert_allclose(function(DATA), expected)
    assert not outer_loops(function)


def test_carries(fast_mode):
    def step(v, h):
        (last, count), ys = scanlib.loop(
            lambda c, w: ((0.5 * c[0] + w, c[1] + 1), c[0] * w), (h, 0), pt.stack([v, 2 * v])
        )
        return last, count, ys.sum()

    last, counts, sums = scan(step, x, [0.0, None, None])
    function = pytensor.function([x], [last, counts, sums], mode=fast_mode)
    h, expected = 0.0, []
    for value in DATA:
        total = 0.0
        for w in (value, 2 * value):
            total, h = total + h * w, 0.5 * h + w
        expected.append((h, 2, total))
    for found, wanted in zip(function(DATA), zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(found, wanted)
    assert not outer_loops(function)


wide = pt.dmatrix("wide")


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "step, given",
    [
        pytest.param(lambda v, h: newton(v, h, 0.7, steps=17)[-1], x, id="many steps"),
        pytest.param(lambda v, h: newton(v, h, 0.7, steps=0).sum() + v, x, id="no steps"),
        pytest.param(
            lambda v, h: newton(v, h, 0.7, steps=pt.cast(v**2, "int64") + 1)[-1],
            x,
            id="steps that a value decides",
        ),
        pytest.param(
            lambda v, h: scan(
                lambda g, v: (0.5 * g + v, scanlib.until(g > 1)), None, [h], [v], n_steps=3
            )[-1],
            x,
            id="until",
        ),
        pytest.param(lambda row, h: scan(lambda v, g: 0.5 * g + v, row, [h])[-1], wide, id="rows"),
        pytest.param(
            lambda row, h: scan(lambda v, g: 0.5 * g + v, row, [h], n_steps=2)[-1],
            wide,
            id="rows that may be too few",
        ),
        pytest.param(
            lambda row, h: scan(
                lambda g, r: pt.tanh(g + r), None, [row], [row], n_steps=4
            )[-1].sum(),
            wide,
            id="functions of any number of items",
        ),
    ],
)  # fmt: skip
def test_what_stays_a_loop(step, given, fast_mode):
    trace = scan(step, given, [0.0])
    function = pytensor.function([given], trace, mode=fast_mode)
    assert outer_loops(function)
    with pytensor.config.change_flags(scanlib__simplify=False):
        plain = pytensor.function([given], trace, mode=fast_mode)
    values = DATA if given is x else rng.normal(size=(3, 4))
    np.testing.assert_allclose(function(values), plain(values), rtol=1e-12)


def test_segments_of_checkpointed_loops_stay(fast_mode):
    trace = scan(
        lambda v, h: pt.tanh(h + v), pt.stack([*([x[0]] * 16)]), [0.0], checkpoint=4
    )  # fmt: skip
    function = pytensor.function([x], pytensor.grad(trace.sum(), x), mode=fast_mode)
    assert outer_loops(function)


def test_states_that_may_change_their_shape_are_checked(fast_mode):
    """Written out, the second step would be given the longer row."""
    row, other = pt.dvector("row"), pt.dvector("other")
    trace = scan(
        lambda v, r, o: scan(lambda g, o: 2 * o, None, [r], [o], n_steps=2)[-1].sum() + v,
        x,
        [None],
        [row, other],
    )
    function = pytensor.function([x, row, other], trace, mode=fast_mode)
    with pytest.raises(StepShapeError):
        function(DATA, np.ones(2), np.ones(3))


def test_what_is_not_known_to_have_enough_rows_is_checked(fast_mode):
    trace = scan(
        lambda row, h: scan(lambda v, g: g + v, row, [h], n_steps=2, name="inner")[-1], wide, [0.0]
    )
    function = pytensor.function([wide], trace, mode=fast_mode)
    with pytest.raises(SequenceLengthError, match="inner"):
        function(np.ones((3, 1)))


def test_a_loop_that_every_step_repeats_is_computed_once(fast_mode):
    trace = scan(lambda v, h, s: h + v * newton(s, s, s)[-1], x, [0.0], [theta])
    function = pytensor.function([x, theta], trace, mode=fast_mode)
    kinds = [node.op for node in function.maker.fgraph.apply_nodes if isinstance(node.op, LoopOp)]
    assert len(kinds) == 2
