"""Truth values that one loop stores for another: which of two numbers an extreme was."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import EQ

import scanlib
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.c_loops import trace
from tests.checks import keeping_inputs
from tests.modes import MODES

LENGTHS = (0, 1, 2, 3, 7, 31, 511, 513, 1031)
BOTH = pytest.mark.parametrize("mode", ["numba", "c"])
INF, NAN = np.inf, np.nan

# Steps of x and the state; which operand comes first decides who gets the derivative at a tie.
STEPS = {
    "maximum, state first": lambda x, h: pt.maximum(h, x),
    "maximum, row first": lambda x, h: pt.maximum(x, h),
    "minimum, state first": lambda x, h: pt.minimum(h, x),
    "minimum, row first": lambda x, h: pt.minimum(x, h),
}


def graph(step, dtype="float64", ndim=1, go_backwards=False):
    """Inputs, a trace and its gradients by the sequence and the start."""
    x, w = (pt.tensor(name, dtype=dtype, shape=(None,) * ndim) for name in "xw")
    start = pt.tensor("start", dtype=dtype, shape=(None,) * (ndim - 1))
    y = trace(step, sequences=x, outputs_info=start, go_backwards=go_backwards)
    return [x, w, start], [y, *pytensor.grad(None, [x, start], known_grads={y: w})]


def compiled(inputs, outputs, mode, *excluded):
    return pytensor.function(
        inputs, outputs, mode=MODES[mode].excluding(*excluded), on_unused_input="ignore"
    )


def loops(function):
    return [n for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]


def reads_truth_values(function):
    """Whether the last loop reads truth values, and no row of the first one's."""
    first, last = loops(function)
    rows = last.op.signature.split_inputs(last.inputs).sequences
    kinds = [row.type.dtype for row in rows]
    stored = [out.type.dtype for out in first.op.signature.split_outputs(first.outputs).outputs]
    return kinds.count("bool") == 1 and stored == ["bool"] and len(kinds) == 2


def values(steps, dtype="float64", ndim=1, seed=0):
    """Numbers with ties, zeros of both signs and infinities among them."""
    generator = np.random.default_rng([seed, steps])
    shape = (steps, 3)[:ndim]
    x = np.round(np.cumsum(generator.normal(size=shape), axis=0), 1)
    x[generator.random(shape) < 0.05] = -0.0
    x[generator.random(shape) < 0.05] = 0.0
    x[generator.random(shape) < 0.02] = -INF
    w = generator.normal(size=shape)
    start = np.full(shape[1:], -0.0)
    return [value.astype(dtype) for value in (x, w, start)]


def assert_equal(got, expected):
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def plain(x, w, start, pick):
    """The derivative of a running extreme of one channel: the first operand takes ties."""
    y, before = [], start
    for value in x:
        before = pick(before, value)
        y.append(before)
    owed, d_x, pasts = 0.0, np.zeros(len(x)), [start, *y]
    for t in range(len(x) - 1, -1, -1):
        owed += w[t]
        kept = y[t] == pasts[t]
        d_x[t], owed = (0.0, owed) if kept else (owed, 0.0)
    return [np.array(y), d_x, owed]


@BOTH
@pytest.mark.parametrize("name", STEPS)
def test_values(name, mode):
    inputs, outputs = graph(STEPS[name])
    stored = compiled(inputs, outputs, mode)
    compared = compiled(inputs, outputs, mode, "scanlib_choices")
    assert reads_truth_values(stored)
    assert not reads_truth_values(compared)
    call = keeping_inputs(stored)
    for steps in LENGTHS:
        given = values(steps)
        expected = compared(*given)
        assert_equal(call(*given), expected)
        for first, second in zip(call(*given), call(*given), strict=True):
            assert first.tobytes() == second.tobytes()
        if name.endswith("state first"):
            pick = np.maximum if name.startswith("maximum") else np.minimum
            for one, other in zip(expected, plain(*given, pick), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
    for value in (NAN, INF, -INF):
        for place in (0, 4, 600, 1030):
            given = values(1031)
            given[0][place] = value
            assert_equal(call(*given), compared(*given))
        given = values(1031)
        given[2][...] = value
        assert_equal(call(*given), compared(*given))


@BOTH
def test_ties(mode):
    """At a tie the operand that comes first gets all, as PyTensor says."""
    for name, expected in (("state first", [6.0, 0, 0, 0]), ("row first", [1.0, 2, 3, 0])):
        inputs, outputs = graph(STEPS[f"maximum, {name}"])
        given = np.array([2.0, 2, 2, 1]), np.array([1.0, 2, 3, 0]), np.float64(1.0)
        assert compiled(inputs, outputs, mode)(*given)[1].tolist() == expected


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("dtype, ndim, back", [("float32", 1, True), ("float64", 2, False)])
def test_kinds_of_loops(mode, dtype, ndim, back):
    inputs, outputs = graph(STEPS["maximum, row first"], dtype, ndim, back)
    stored = compiled(inputs, outputs, mode)
    compared = compiled(inputs, outputs, mode, "scanlib_choices")
    assert reads_truth_values(stored)
    for steps in LENGTHS:
        given = values(steps, dtype, ndim)
        assert_equal(stored(*given), compared(*given))


@BOTH
def test_history_that_nobody_reads_is_not_stored(mode):
    inputs, outputs = graph(STEPS["maximum, state first"])
    stored = compiled(inputs, outputs[1:], mode)
    compared = compiled(inputs, outputs[1:], mode, "scanlib_choices")
    (first, _) = loops(stored)
    assert first.op.signature.untraced == (True,)
    assert loops(compared)[0].op.signature.untraced == (False,)
    for steps in LENGTHS:
        given = values(steps)
        assert_equal(stored(*given), compared(*given))


@BOTH
def test_backwards_function(mode):
    x, w = pt.dvector("x"), pt.dvector("w")
    y = scanlib.cummin(x, reverse=True)
    outputs = [y, pytensor.grad(None, x, known_grads={y: w})]
    stored, compared = (
        compiled([x, w], outputs, mode, *excluded) for excluded in ((), ("scanlib_choices",))
    )
    assert reads_truth_values(stored)
    for steps in LENGTHS:
        given = values(steps)[:2]
        assert_equal(stored(*given), compared(*given))


def compares_the_extreme():
    """Whether PyTensor's derivative of an extreme compares it: newer ones compare the operands."""
    x, y = pt.dvectors("x", "y")
    derivative = pytensor.grad(pt.sum(pt.maximum(x, y)), x)
    nodes = [value.owner for value in ancestors([derivative]) if value.owner is not None]
    return any(isinstance(getattr(node.op, "scalar_op", None), EQ) for node in nodes)


@pytest.mark.slow
@BOTH
def test_computed_rows(mode):
    """The state may be compared with itself; what is computed anew may be rounded otherwise."""
    for name, moved in (("state first", True), ("row first", False)):
        step = STEPS[f"maximum, {name}"]
        inputs, outputs = graph(lambda x, h, step=step: step(pt.exp(x) * 0.3 + x, h))
        stored = compiled(inputs, outputs, mode)
        compared = compiled(inputs, outputs, mode, "scanlib_choices")
        found = any(out.type.dtype == "bool" for out in loops(stored)[0].outputs)
        assert found == (moved and compares_the_extreme())
        given = values(513)
        for one, other in zip(stored(*given), compared(*given), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@BOTH
def test_loops_that_round_are_left_alone(mode):
    """A kernel composes these steps: what it stores is not equal to either operand."""
    for step in (
        lambda x, h: pt.maximum(h + x, 0.3),
        lambda x, h: pt.clip(h + x, -0.3, 0.3),
        lambda x, h: pt.switch(h > x, h * 0.5, x),
    ):
        function = compiled(*graph(step), mode)
        for node in loops(function):
            assert all(out.type.dtype != "bool" for out in node.outputs)


@pytest.mark.slow
def test_second_derivatives():
    x = pt.dvector("x")
    cost = pt.sum(scanlib.cummax(x) ** 3)
    (first,) = pytensor.grad(cost, [x])
    second = pytensor.grad(pt.sum(pt.sin(first)), x)
    results = []
    for excluded in ((), ("scanlib_choices",)):
        results.append(compiled([x], [first, second], "numba", *excluded)(values(97)[0] / 9))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-11)
