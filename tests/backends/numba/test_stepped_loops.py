"""Loops under the C linker whose steps hold Ops without kernels: Python walks, around kernels."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.ifelse import ifelse
from pytensor.tensor.sort import sort

import scanlib
from scanlib.backends.numba.stepped_loop import SteppedLoop
from scanlib.ops.errors import StepShapeError
from scanlib.ops.scan import Scan
from tests.checks import assert_derivatives, assert_same
from tests.modes import MODES

rng = np.random.default_rng(5)


class Turned(Op):
    """An array whose items have moved on; it has no kernel, and what it returns is of a shape that
    nobody knows before."""

    __props__ = ("by",)

    def __init__(self, by=1):
        self.by = by

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def perform(self, node, inputs, outputs):
        outputs[0][0] = np.roll(inputs[0], self.by)

    def pullback(self, inputs, outputs, cotangents):
        return [Turned(-self.by)(cotangents[0])]


def turned(x):
    return np.roll(x, 1)


NUMPY = SimpleNamespace(turned=turned, tanh=np.tanh)
SYMBOLIC = SimpleNamespace(turned=Turned(), tanh=pt.tanh)


def walked(function):
    """Return the only loop of a function, which Python walks."""
    (node,) = [n for n in function.maker.fgraph.apply_nodes if isinstance(n.op, Scan)]
    found = node.op.runner(node).run
    assert isinstance(found, SteppedLoop)
    return found


def turned_step(np, x, h):
    return np.turned(0.9 * h + x)


def middle_step(np, x, h):
    return np.turned(h + x)[::-1] * 0.5 + np.tanh(x)


def matrix_step(np, x, h):
    return np.tanh(np.turned(0.1 * h @ x + x).T)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "step, shape", [(turned_step, (4,)), (middle_step, (4,)), (matrix_step, (3, 3))]
)
def test_values(step, shape, reverse):
    x, start = (
        pt.tensor(name, shape=(None,) * n) for name, n in (("x", 1 + len(shape)), ("s", len(shape)))
    )
    trace = scanlib.scan(
        partial(step, SYMBOLIC), x, start, go_backwards=reverse, return_updates=False
    )
    function = pytensor.function([x, start], trace, mode=MODES["c"])
    walked(function)
    for steps in (0, 1, 6):
        rows, first = rng.normal(size=(steps, *shape)), rng.normal(size=shape)
        expected, h = np.zeros((steps, *shape)), first
        for t, row in enumerate(rows[::-1] if reverse else rows):
            expected[t] = h = step(NUMPY, row, h)
        assert_same([function(rows, first)], [expected], rtol=1e-12)


@pytest.mark.parametrize("step", [turned_step, middle_step])
def test_gradients(step):
    x = pt.dmatrix("x")
    trace = scanlib.scan(partial(step, SYMBOLIC), x, pt.zeros(3), return_updates=False)

    def reference(rows):
        total, h = 0.0, np.zeros(3)
        for row in rows:
            h = step(NUMPY, row, h)
            total += (h**3).sum()
        return total

    cost = (trace**3).sum()
    assert_derivatives(cost, {x: rng.normal(size=(4, 3))}, reference, MODES["c"])


def test_until_and_past_values():
    """More steps than there is memory for at first; a state without a trace, an output."""
    n, start = pt.lscalar("n"), pt.dmatrix("start")

    def step(before, last, count):
        h = Turned()(0.5 * before + 0.49 * last)
        return [h, count + h.sum(), h[1:]], scanlib.until(h[-1] < 0.1)

    h, count, tails = scanlib.scan(
        step,
        outputs_info=[{"initial": start, "taps": [-2, -1]}, pt.zeros(()), None],
        n_steps=n,
        return_updates=False,
    )
    function = pytensor.function([n, start], [h, count[-1], tails], mode=MODES["c"])
    first = np.array([[5.0, 9, 1], [4, 8, 2]])
    rows, total = [*first], 0.0
    while len(rows) == 2 or rows[-1][-1] >= 0.1:
        rows.append(turned(0.5 * rows[-2] + 0.49 * rows[-1]))
        total += rows[-1].sum()
    expected = np.array(rows[2:])
    assert len(expected) > 64
    walked(function)
    assert_same(function(10**12, first), [expected, np.array(total), expected[:, 1:]], rtol=1e-12)
    assert_same(function(3, first)[:1], [expected[:3]], rtol=1e-12)


def test_states_that_change_places():
    """Neither has a trace, so that each row is written over before the other is."""
    a, b = pt.dvectors("a", "b")
    x, y, z = scanlib.scan(
        lambda a, b, c: [b, a, Turned()(c + a)],
        outputs_info=[a, b, a],
        n_steps=3,
        return_updates=False,
    )
    function = pytensor.function([a, b], [x[-1], y[-1], z[-1]], mode=MODES["c"])
    first, second = rng.normal(size=(2, 3))
    c = first
    for own in (first, second, first):
        c = turned(c + own)
    assert_same(function(first, second), [second, first, c], rtol=1e-12)


def test_errors_name_the_loop_and_the_step():
    x = pt.dmatrix("x")
    trace = scanlib.scan(lambda row: Turned()(row[row > 0]), x, name="kept", return_updates=False)
    function = pytensor.function([x], trace, mode=MODES["c"])
    rows = np.array([[1.0, 2, -1], [3, -1, 1], [1, 1, 1]])
    with pytest.raises(StepShapeError, match=r"`kept`.*changed its shape at step 2"):
        function(rows)


@pytest.mark.parametrize("way", ["graph", "branches"])
def test_graphs_and_branches_inside(way):
    x, row = pt.dmatrix("x"), pt.dvector()
    inside = OpFromGraph([row], [Turned()(row) * 2])

    def step(x, h):
        if way == "graph":
            return inside(x + h)
        return ifelse(x[0] > 0, Turned()(x + h), x - h)

    trace = scanlib.scan(step, x, pt.zeros(3), return_updates=False)
    function = pytensor.function([x], trace, mode=MODES["c"])
    rows, h, expected = rng.normal(size=(6, 3)), np.zeros(3), []
    for row in rows:
        h = turned(row + h) * 2 if way == "graph" else turned(row + h) if row[0] > 0 else row - h
        expected.append(h)
    assert_same([function(rows)], [np.array(expected)], rtol=1e-12)


def test_a_loop_inside():
    x = pt.dmatrix("x")

    def step(row, h):
        inner = scanlib.scan(lambda g: Turned()(g + row), None, h, n_steps=3, return_updates=False)
        return inner[-1] * 0.1

    trace = scanlib.scan(step, x, pt.zeros(3), return_updates=False)
    function = pytensor.function([x], trace, mode=MODES["c"])
    rows, h, expected = rng.normal(size=(4, 3)), np.zeros(3), []
    for row in rows:
        for _ in range(3):
            h = turned(h + row)
        expected.append(h := h * 0.1)
    assert_same([function(rows)], [np.array(expected)], rtol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_random_draws(alone):
    """Loops with draws are compiled by numba; the numbers are NumPy's either way."""
    x, generator = pt.dmatrix("x"), pytensor.shared(np.random.default_rng(3))

    def step(x, h, generator):
        following, drawn = pt.random.normal(0, 1, size=3, rng=generator).owner.outputs
        h = 0.5 * h + drawn * x
        return [h if alone else sort(h), following]

    trace, last = scanlib.scan(step, x, [pt.zeros(3), generator], return_updates=False)
    function = pytensor.function([x], trace, updates={generator: last}, mode=MODES["c"])
    plain, rows = np.random.default_rng(3), rng.normal(size=(5, 3))
    for _ in range(2):
        assert_same([function(rows)], [drawn_rows(rows, alone, plain)], rtol=1e-12)
    (node,) = [n for n in function.maker.fgraph.apply_nodes if isinstance(n.op, Scan)]
    assert not isinstance(node.op.runner(node).run, SteppedLoop)
    walking = SteppedLoop(node.op)
    assert walking.pays_compiled
    start = np.zeros((1, 3))
    history, _ = walking(rows, start, np.random.default_rng(3))
    expected = drawn_rows(rows, alone, np.random.default_rng(3))
    assert_same([history[1:]], [expected], rtol=1e-12)


def drawn_rows(rows, alone, plain):
    found, h = [], np.zeros(3)
    for row in rows:
        h = 0.5 * h + plain.normal(0, 1, size=3) * row
        found.append(h := h if alone else np.sort(h))
    return np.array(found)


def test_half_precision():
    """No kernel has it: all of the step is computed in Python."""
    x = pt.TensorType("float16", shape=(None,))("x")
    start = pt.constant(np.float16(1))
    trace = scanlib.scan(lambda x, h: pt.exp(h) + x, x, start, return_updates=False)
    function = pytensor.function([x], trace, mode=MODES["c"])
    (result,) = function(np.array([0.5], "float16"))
    assert result == np.exp(np.float16(1)) + np.float16(0.5)
