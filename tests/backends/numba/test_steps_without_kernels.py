"""Loops whose steps hold Ops without kernels: by numba, and step by step around kernels."""

import numba
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch.basic import numba_funcify

from scanlib.backends.handler.programs import program_of
from scanlib.backends.numba.dispatch import compiled_loop
from scanlib.backends.numba.stepped_loop import SteppedLoop
from scanlib.ops.errors import InitialRowsError, SequenceLengthError, StepCountError, StepShapeError
from scanlib.ops.loop import Carry, Loop, NonSequence, Output, Sequence, State
from tests.checks import assert_same


class Doubled(Op):
    """Twice an array, or the rows of a matrix that begin with positive numbers, twice."""

    __props__ = ("picks",)

    def __init__(self, picks=False):
        self.picks = picks

    def make_node(self, x):
        return Apply(self, [x], [x.type()])

    def infer_shape(self, *arguments):
        return [(pt.as_tensor(0), arguments[-1][0][1]) if self.picks else arguments[-1][0]]

    def perform(self, node, inputs, outputs):
        (x,) = inputs
        outputs[0][0] = 2 * x[x[:, 0] > 0] if self.picks else 2 * x


@numba_funcify.register(Doubled)
def _numba(op, node, **kwargs):
    if op.picks:
        return numba.njit(lambda x: 2 * x[x[:, 0] > 0])
    if node.inputs[0].type.ndim:
        return numba.njit(lambda x: 2 * x)
    return numba.njit(lambda x: np.asarray(2 * x.item()))  # of an array, as PyTensor's functions


doubled = Doubled()


@pytest.fixture(params=["steps", "numba"])
def runner(request):
    """Return what makes a function from values to values, without rewrites of the whole graph."""

    def made(loop):
        node = loop.apply().node
        assert program_of(node.op) is None
        return SteppedLoop(node.op) if request.param == "steps" else compiled_loop(node.op, node)

    return made


def taps_and_outputs(reverse, stops):
    """h_t = 2 (h_{t-3} + x_t) - h_{t-1} w, s the same of numbers without a trace, and outputs."""
    x, y, w = pt.dmatrix("x"), pt.dvector("y"), pt.dscalar("w")
    row, number, weight = pt.dvector(), pt.dscalar(), pt.dscalar()
    h = {-1: pt.dvector(), -3: pt.dvector()}
    s = {-1: pt.dscalar(), -3: pt.dscalar()}
    following = doubled(h[-3] + row) - h[-1] * weight
    scalar = doubled(s[-3] + number) - s[-1] * weight
    return Loop(
        sequences=[Sequence(x, row, "x"), Sequence(y, number, "y")],
        states=[
            State(pt.dmatrix(), h, following, name="h"),
            State(pt.dvector(), s, scalar, untraced=True, name="s"),
            State(pt.dmatrix(), {-2: pt.dvector()}, h[-1], untraced=True),
        ],
        carries=[Carry(pt.dscalar(), (total := pt.dscalar()), total + scalar)],
        non_sequences=[NonSequence(w, weight)],
        outputs=[Output(following[1:]), Output(scalar)],
        stop=pt.gt(total, 4) if stops else None,
        reverse=reverse,
        name="taps",
    )


def expected(x, y, h, s, copy, total, w, reverse, stops):
    steps = range(len(x))[::-1] if reverse else range(len(x))
    h, s, copy = ([*a][::-1] if reverse else [*a] for a in (h, s, copy))
    outs, numbers = [], []
    for t in steps:
        copy.append(h[-1])
        h.append(2 * (h[-3] + x[t]) - h[-1] * w)
        s.append(2 * (s[-3] + y[t]) - s[-1] * w)
        outs.append(h[-1][1:])
        numbers.append(s[-1])
        stopped, total = total > 4, total + s[-1]
        if stops and stopped:
            break
    empty = np.zeros((0, x.shape[1] - 1))
    found = [h, s[-3:], copy[-2:], outs, numbers]
    found = [np.array(rows[::-1] if reverse else rows) for rows in found]
    found[3] = found[3] if outs else empty
    return [*found[:3], total, *found[3:]]


@pytest.mark.slow
@pytest.mark.parametrize("stops", [True, False])
@pytest.mark.parametrize("reverse", [False, True])
def test_values(runner, reverse, stops):
    run, rng = runner(taps_and_outputs(reverse, stops)), np.random.default_rng(0)
    for steps in (0, 1, 7, 200):  # more than are allocated at first
        x, y = 1e-3 * rng.normal(size=(steps, 3)), 1e-3 * rng.normal(size=steps)
        start = [rng.normal(size=shape) * 1e-3 for shape in ((3, 3), (3,), (2, 3), ())]
        values = [x, y, *start, np.float64(0.7)]
        before = [np.array(value) for value in values]
        results = run(*map(np.asarray, values))
        assert_same(results, expected(*values, reverse, stops), rtol=1e-12)
        assert_same(values, before, rtol=0)


def test_rows_that_are_missing(runner):
    x, y, h = pt.dscalar(), pt.dscalar(), {-1: pt.dscalar(), -2: pt.dscalar()}
    sequences = [Sequence(pt.dvector(), x, "x"), Sequence(pt.dvector(), y, "y")]
    states = [State(pt.dvector(), h, doubled(x) + y * h[-2], name="h")]
    run = runner(Loop(sequences=sequences, states=states, name="rows"))
    assert_same(run(np.ones(2), np.ones(2), np.ones(2)), [[1.0, 1, 3, 3]], rtol=0)
    with pytest.raises(SequenceLengthError, match="scan `rows`: sequence `x` gives 5 rows"):
        run(np.ones(5), np.ones(4), np.ones(2))
    with pytest.raises(InitialRowsError, match="state `h` needs 2 initial rows"):
        run(np.ones(5), np.ones(5), np.ones(3))


def test_results_that_change_their_shape(runner):
    x, row = pt.dtensor3(), pt.dmatrix()
    run = runner(Loop(sequences=[Sequence(x, row)], outputs=[Output(Doubled(True)(row), "kept")]))
    values = np.ones((3, 2, 2))
    assert_same(run(values), [2 * values], rtol=0)
    values[1, 0] = -1
    with pytest.raises(StepShapeError, match=r"output `kept` changed its shape at step 1: axis 0"):
        run(values)


def test_number_of_steps(runner):
    n, h = pt.lscalar(), pt.dscalar()
    run = runner(Loop(n_steps=n, states=[State(pt.dvector(), {-1: h}, doubled(h))]))
    assert_same(run(np.asarray(3), np.ones(1)), [[1.0, 2, 4, 8]], rtol=0)
    with pytest.raises(StepCountError, match="got -1"):
        run(np.asarray(-1), np.ones(1))


def test_a_carry_that_is_a_row_of_a_state(runner):
    """The state's row is written over while the carry is still read."""
    h, late, later = pt.dvector(), pt.dvector(), pt.dvector()
    loop = Loop(
        n_steps=pt.constant(5),
        states=[State(pt.dmatrix(), {-1: h}, doubled(h), untraced=True)],
        carries=[Carry(pt.dvector(), late, h), Carry(pt.dvector(), later, late)],
        outputs=[Output(late), Output(later)],
    )
    start = np.ones((1, 2)), np.zeros(2), np.zeros(2)
    last, carry, other, first, second = runner(loop)(np.asarray(5), *start)
    powers = np.array([0, 1, 2, 4, 8, 16, 32.0])[:, None] * np.ones(2)
    assert_same([last, carry, other], [powers[6:], powers[5], powers[4]], rtol=0)
    assert_same([first, second], [powers[:5], np.vstack([np.zeros(2), powers[:4]])], rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_kernels_that_may_be_unfit_in_compiled_code(kept):
    """A carry gets another shape: then the plain loop runs, chosen by compiled code."""
    x, b, start = pt.dvector("x"), pt.dvector("b"), pt.dvector("start")
    row, total, weights = pt.dscalar(), pt.dvector(), pt.dvector()
    loop = Loop(
        sequences=[Sequence(x, row)],
        carries=[Carry(start, total, weights * total.sum() + row)],
        non_sequences=[NonSequence(b, weights)],
        outputs=[Output(row * total.sum())],
    )
    results = loop.apply()
    outputs = [results.carries[0], results.outputs[0]]
    with pytensor.config.change_flags(scanlib__simplify=False, scanlib__linear=False):
        function = pytensor.function([x, start, b], outputs, mode="NUMBA")
        raw = function.vm.jit_fn
    rng = np.random.default_rng(1)
    values = rng.normal(size=4), rng.normal(size=3 if kept else 5), rng.normal(size=3)
    assert_same(numba.njit(lambda *given: raw(*given))(*values), function(*values), rtol=1e-12)


def test_arrays_by_columns(runner):
    x, start = pt.dmatrix("x"), pt.dmatrix("start")
    row, before = pt.dvector(), pt.dvector()
    state = State(start, {-1: before}, doubled(row) + before[::-1])
    function = runner(Loop(sequences=[Sequence(x, row)], states=[state]))
    rng = np.random.default_rng(9)
    rows, first = rng.normal(size=(3, 4)), rng.normal(size=(1, 3))
    expected = [first[0]]
    for each in rows.T:
        expected.append(2 * each + expected[-1][::-1])
    for start_of in (first, np.asfortranarray(first)):
        assert_same(function(rows.T, start_of), [np.stack(expected)])
