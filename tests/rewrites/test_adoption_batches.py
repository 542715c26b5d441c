"""Batches that `vectorize_graph` made of loops of `pytensor.scan`, adopted as a whole."""

from itertools import pairwise

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import get_mode
from pytensor.graph.replace import vectorize_graph
from pytensor.scan.utils import until

import scanlib
from scanlib.ops.loop_rewrite import record_of
from scanlib.rewrites.adopt.adopt_batches import Member, is_batch
from tests.checks import assert_same
from tests.derivatives import (
    central_gradient,
)
from tests.legacy_loops import LOOPS, scan
from tests.modes import MODES
from tests.rewrites.test_adoption import ADOPTING, assert_all_adopted, variables

rng = np.random.default_rng(31)
# PyTensor itself cannot compute the batch: it adds zeros of too few rows.
VALUES_ALONE = {"parts_of_a_trace"}
# These stay batches of PyTensor's: the loop over segments in the gradient of checkpoints, whose
# length is another expression than that of its rows, and loops whose numbers of steps may differ.
LEFT = {"checkpoints", "steps_known_at_run_time"}


def assert_adopted(function):
    fgraph = function.maker.fgraph
    assert_all_adopted(fgraph)
    assert not any(is_batch(node.op) for node in fgraph.apply_nodes)


def cost_of(outputs):
    return sum((value * value).sum() + value.sum() for value in outputs)


def batch_of(value):
    """Return two members, which differ where they are numbers to compute with."""
    other = value if value.dtype.kind in "iub" else value * value.dtype.type(1.03)
    return np.stack([value, other])


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_values_and_gradients(name):
    case = LOOPS[name]
    inputs = variables(case)
    outputs = case.build(*inputs)
    gradients = []
    if case.order and name not in VALUES_ALONE:
        gradients = pytensor.grad(cost_of(outputs), inputs, disconnected_inputs="ignore")
    arrays = [batch_of(value) for value in case.values]
    batches = [pt.tensor(dtype=a.dtype, shape=(None,) * a.ndim) for a in arrays]
    results = vectorize_graph([*outputs, *gradients], dict(zip(inputs, batches, strict=True)))
    with pytensor.config.change_flags(scanlib__perform="python"):
        f = pytensor.function(batches, results, mode=ADOPTING["c"], on_unused_input="ignore")
        if name not in LEFT:
            assert_adopted(f)
        found = f(*arrays)
    rtol = 1e-5 if case.values[0].dtype == "float32" else 1e-9

    def plain(*values):
        return cost_of([np.asarray(value) for value in case.plain(*values)])

    for member in range(2):
        values = [array[member] for array in arrays]
        expected = [np.asarray(value) for value in case.plain(*values)]
        own = [
            value[member] if value.ndim > known.ndim else value
            for value, known in zip(found, expected, strict=False)
        ]
        assert_same(own, expected, rtol=rtol)
        if gradients:
            for value, known in zip(
                found[len(outputs) :], central_gradient(plain, values), strict=True
            ):
                np.testing.assert_allclose(value[member], known, rtol=1e-5, atol=1e-6)


# Of b (3, 4, 2), a batch of three; v (2,), w (3, 2) and u (3, 3, 2), of which only the last is one.
EXPRESSIONS = {
    "elementwise": lambda b, v, w, u: pt.exp(b) + v,
    "rows": lambda b, v, w, u: b[:, 1:, 0],
    "a member": lambda b, v, w, u: b[1:] + b[0],
    "rows set": lambda b, v, w, u: pt.set_subtensor(b[:, 1:], u),
    "rows set to equal ones": lambda b, v, w, u: pt.set_subtensor(b[:, 1:], v),
    "rows set to the same": lambda b, v, w, u: pt.inc_subtensor(b[:, 1:], w),
    "members set": lambda b, v, w, u: pt.set_subtensor(b[1:], 0.0),
    "sum of rows": lambda b, v, w, u: b.sum(axis=1),
    "sum of members": lambda b, v, w, u: b.sum(axis=(0, 2)),
    "sum of all": lambda b, v, w, u: b.sum() + u.sum(axis=()),
    "axes": lambda b, v, w, u: b.dimshuffle(0, 2, "x", 1),
    "axes of the batch": lambda b, v, w, u: b.dimshuffle(2, 0, 1),
    "joined rows": lambda b, v, w, u: pt.concatenate([b, u, b[:, :1]], axis=1),
    "joined members": lambda b, v, w, u: pt.concatenate([b, b[:1]]),
    "sizes": lambda b, v, w, u: pt.alloc(b.shape[1:], b.shape[0], 2),
    "other sizes": lambda b, v, w, u: pt.alloc(b.shape[:2], b.shape[0], 2),
    "known sizes": lambda b, v, w, u: pt.specify_shape(b, (None, 4, 2)),
    "a known number of members": lambda b, v, w, u: pt.specify_shape(b, (3, None, None)),
    "products": lambda b, v, w, u: b @ u.dimshuffle(0, 2, 1),
    "the same for all": lambda b, v, w, u: pt.zeros((3, 2)) + pt.exp(v)[None],
}


@pytest.mark.all_forms
@pytest.mark.parametrize("name", EXPRESSIONS)
def test_one_member(name):
    """What one member computes, made a batch again, is what the batch computes."""
    variables = pt.dtensor3("b"), pt.dvector("v"), pt.dmatrix("w"), pt.dtensor3("u")
    values = [rng.normal(size=size) for size in [(3, 4, 2), (2,), (3, 2), (3, 3, 2)]]
    batch = EXPRESSIONS[name](*variables)
    member = Member(1)
    one = member.of(batch)
    assert one.type.ndim == batch.type.ndim - 1
    again = vectorize_graph(one, member.batches) if member.batches else one
    f = pytensor.function(variables, [batch, again], mode=MODES["py"], on_unused_input="ignore")
    expected, found = f(*values)
    np.testing.assert_array_equal(*np.broadcast_arrays(found, expected))


def volatility(x, theta):
    """The logarithm of a density, whose variances follow a recurrence."""
    (v,) = scan(lambda x, v, t: t[0] + t[1] * x**2 + t[2] * v, x[:-1], [pt.ones(())], theta)
    return -0.5 * (pt.log(v) + x[1:] ** 2 / v).sum()


def plain_volatility(x, theta):
    v, total = 1.0, 0.0
    for last, x_ in pairwise(x):
        v = theta[0] + theta[1] * last**2 + theta[2] * v
        total -= 0.5 * (np.log(v) + x_**2 / v)
    return total


class TestParametersAlone:
    """As samplers ask for many densities of the same data."""

    x, theta = pt.dvector("x"), pt.dvector("theta")
    values = rng.normal(size=9), rng.uniform(0.1, 0.4, size=(2, 3, 3))

    def check(self, function):
        found, gradient = function(*self.values)
        assert found.shape == (2, 3)
        for i in np.ndindex(2, 3):
            own = self.values[1][i]
            np.testing.assert_allclose(found[i], plain_volatility(self.values[0], own), rtol=1e-12)
            (known,) = central_gradient(lambda t: plain_volatility(self.values[0], t), [own])
            np.testing.assert_allclose(gradient[i], known, rtol=1e-6, atol=1e-9)

    def outputs(self, thetas):
        cost = volatility(self.x, self.theta)
        return vectorize_graph([cost, pytensor.grad(cost, self.theta)], {self.theta: thetas})

    @pytest.mark.parametrize("linker", ["NUMBA", "CVM"])
    def test_two_axes(self, linker):
        thetas = pt.dtensor3("thetas")
        mode = get_mode(linker).including("scanlib_adopt")
        function = pytensor.function([self.x, thetas], self.outputs(thetas), mode=mode)
        assert_adopted(function)
        names = [loop.op for loop in scanlib.explain(function).loops]
        assert names == ["ElemwiseScan", "Scan"]  # sums of gradients are written by index
        self.check(function)

    @pytest.mark.slow
    def test_compiled_without_adoption_before(self):
        """PyTensor lets the step of the loop that it compiles overwrite its inputs."""
        thetas = pt.dtensor3("thetas")
        outputs = self.outputs(thetas)
        pytensor.function([self.x, thetas], outputs, mode="CVM")(*self.values)
        with pytensor.config.change_flags(scanlib__perform="python"):
            function = pytensor.function([self.x, thetas], outputs, mode=ADOPTING["c"])
            assert_adopted(function)
            self.check(function)

    def test_shared_and_drawn_rows(self):
        """What is the same for all members stays what it is."""
        data, rng = pytensor.shared(self.values[0]), pytensor.shared(np.random.default_rng(3))
        noise = pt.random.normal(rng=rng, size=(9,), return_next_rng=False)
        cost = volatility(data + 0.1 * noise, self.theta)
        thetas = pt.dmatrix("thetas")
        outputs = vectorize_graph(
            [cost, pytensor.grad(cost, self.theta), noise], {self.theta: thetas}
        )
        with pytensor.config.change_flags(scanlib__perform="python"):
            function = pytensor.function([thetas], outputs, mode=ADOPTING["c"])
            assert_adopted(function)
            found, _, drawn = function(self.values[1][0])
        rows = self.values[0] + 0.1 * drawn
        expected = [plain_volatility(rows, theta) for theta in self.values[1][0]]
        np.testing.assert_allclose(found, expected, rtol=1e-12)

    def test_members_of_one_batch_in_another(self):
        """The result of a batch of one axis is a batch of two for the next loop."""
        x, h0 = pt.dmatrix("x"), pt.dscalar("h0")
        rows = pt.dvector("row")
        (one,) = scan(lambda x, h: 0.5 * h + x, rows, [pt.zeros(())])
        first = vectorize_graph(one, {rows: x})
        (two,) = scan(lambda h: pt.sin(h), None, [h0], n_steps=3)
        second = vectorize_graph(two[-1], {h0: first})
        with pytensor.config.change_flags(scanlib__perform="python"):
            function = pytensor.function([x], second, mode=ADOPTING["c"])
            assert_adopted(function)
            found = function([[1.0, 2.0], [3.0, -1.0]])
        expected = np.array([[1.0, 2.5], [3.0, 0.5]])
        np.testing.assert_allclose(found, np.sin(np.sin(np.sin(expected))))

    def test_what_cannot_be_adopted_stays_a_batch(self):
        x = pt.dvector("x")
        y = pytensor.scan(
            lambda x, y: 0.5 * y + x, x, [pt.zeros(())], return_updates=False, profile=True
        )
        batch = pt.dmatrix("batch")
        outputs = vectorize_graph(y, {x: batch})
        function = pytensor.function([batch], outputs, mode=ADOPTING["py"])
        (loop,) = record_of(function.maker.fgraph).adopted
        assert "profile" in loop.reason
        np.testing.assert_allclose(function([[1.0, 2.0]]), [[1.0, 2.5]])


@pytest.mark.parametrize("linker", ["numba", "c"])
def test_a_state_that_all_members_share(linker):
    x, rows, start = pt.vector("x"), pt.matrix("rows"), pt.vector("start")
    traces = scan(
        lambda x, h, fixed: [pt.tanh(h * x + fixed.sum()), 0.5 * fixed],
        x, [pt.as_tensor(0.3), start],
    )  # fmt: skip
    outputs = [*traces, pytensor.grad(cost_of(traces), start)]
    f = pytensor.function([rows, start], vectorize_graph(outputs, {x: rows}), mode=ADOPTING[linker])
    assert_adopted(f)
    one = pytensor.function([x, start], outputs, mode=MODES["py"])
    given, first = rng.normal(size=(2, 4)), rng.normal(size=3)
    members = [one(row, first) for row in given]
    assert_same(f(given, first), [np.stack(values) for values in zip(*members, strict=True)])


def test_initial_rows_of_one_number_that_all_members_share():
    start, w, ws = pt.tensor("start", shape=(None, 1)), pt.scalar("w"), pt.vector("ws")
    (trace,) = scan(
        lambda h, g, w: pt.tanh(h * w) + g, [], [{"initial": start, "taps": [-1, -2]}], w, n_steps=3
    )
    outputs = [trace, pytensor.grad(cost_of([trace]), start)]
    f = pytensor.function([start, ws], vectorize_graph(outputs, {w: ws}), mode=ADOPTING["c"])
    assert_adopted(f)
    one = pytensor.function([start, w], outputs, mode=MODES["py"])
    first, given = rng.normal(size=(2, 1)), rng.normal(size=2)
    members = [one(first, value) for value in given]
    assert_same(f(first, given), [np.stack(values) for values in zip(*members, strict=True)])


def test_a_sequence_that_gives_its_length_alone():
    x, u, start = pt.tensor("x", shape=(3, None)), pt.tensor("u", shape=(3, None)), pt.vector("h")
    (trace,) = scan(lambda x, u, h: 0.5 * h + 1, [x, u], [start])
    batches = {u: pt.tensor("us", shape=(None, 3, None)), start: pt.matrix("hs")}
    mode = ADOPTING["c"]
    f = pytensor.function(
        [x, *batches.values()], vectorize_graph(trace, batches), mode=mode, on_unused_input="ignore"
    )
    assert_adopted(f)
    starts = rng.normal(size=(2, 4))
    wanted = np.stack([0.5 * starts + 1, 0.25 * starts + 1.5, 0.125 * starts + 1.75], axis=1)
    assert_same([f(np.ones((3, 2)), np.ones((2, 3, 2)), starts)], [wanted])


# What follows from states and a parameter, or from a row, and whether that ends the loop. (The
# gradient of states with rows reads the wrong ones in PyTensor 3.0.)
ENDING = {
    "a state": lambda m, h, a: [h + a * a * m.cos(h), h > 1.1],
    "a state and its sum": lambda m, h, s, a: [h + a * a * m.cos(h), s + a * h, h > 1.1],
    "rows": lambda m, x, a: [m.sin(a * x), m.exp(x) * a, x > 0.7],
    "rows from behind": lambda m, x, a: [m.sin(a * x), m.exp(x) * a, x > 0.7],
}


@pytest.mark.parametrize("name", ENDING)
def test_gradients_of_members_that_end_by_themselves(name):
    """They are two kernels; the gradient passes over the steps that a member did not run."""
    step, states = ENDING[name], name.count("state") + name.count("sum")
    x, a = pt.dvector("x"), pt.dscalar("a")

    def one(*values):
        *results, stop = step(pt, *values)
        return results, until(stop)

    given = {} if states else {"sequences": x, "go_backwards": "behind" in name}
    initial = [pt.constant(0.0, dtype="float64")] * states or [None] * 2
    results = scan(one, given.pop("sequences", None), initial, a, n_steps=9, **given)
    cost = sum((k + 1) * value[-1] ** 2 for k, value in enumerate(results))
    gradients = pytensor.grad(cost, [x, a], disconnected_inputs="ignore")
    inputs = pt.dmatrix("x"), pt.dvector("a")
    batch = vectorize_graph([cost, *gradients], dict(zip([x, a], inputs, strict=True)))
    f = pytensor.function(inputs, batch, mode=ADOPTING["numba"], on_unused_input="ignore")
    assert_adopted(f)
    assert len(scanlib.explain(f).loops) == 2

    def plain(x, a):
        found = [0.0] * states
        for row in x[::-1] if "behind" in name else x:
            *found, stop = step(np, *(found if states else [row]), a)
            if stop:
                break
        return sum((k + 1) * value**2 for k, value in enumerate(found))

    values = rng.uniform(size=(3, 9)), np.array([0.5, 0.7, 0.95])
    for x, a, found, *slopes in zip(*values, *f(*values), strict=True):
        np.testing.assert_allclose(found, plain(x, a), rtol=1e-12)
        for slope, known in zip(slopes, central_gradient(plain, [x, a]), strict=True):
            np.testing.assert_allclose(slope, known, rtol=1e-6, atol=1e-8)


def test_loops_over_members_that_end_by_themselves():
    """What walks as they do has rows that a member did not run: it stays PyTensor's."""
    x, batch = pt.dvector("x"), pt.dmatrix("x")
    (trace,) = scan(lambda x, h: (h + x, until(h > 1)), x, [pt.zeros(())])
    (total,) = scan(lambda h, s: 0.5 * s + h, trace, [pt.zeros(())])
    results = vectorize_graph(total[-1], {x: batch})
    f = pytensor.function([batch], results, mode=ADOPTING["py"])
    assert any(is_batch(node.op) for node in f.maker.fgraph.apply_nodes)
    np.testing.assert_allclose(f([[0.7, 0.7, 0.7]]), [0.25 * 0.7 + 0.5 * 1.4 + 2.1])


def test_gradients_of_steps_that_take_a_jacobian():
    """The batch repeats the sizes that a member's buffers are made of."""
    x, batch = pt.dvector("x"), pt.dmatrix("batch")

    def step(h, x):
        moved = pt.stack([h[0] + 0.1 * h[1], h[1] - 0.1 * pt.sin(h[0])])
        return pytensor.gradient.jacobian(moved, h) @ h + x, None

    final, _ = scanlib.loop(step, pt.constant([0.5, 0.0]), x)
    gradient = pytensor.grad((final**2).sum(), x)
    batched = vectorize_graph(gradient, {x: batch})
    values = rng.normal(size=(2, 4))
    f = pytensor.function([batch], batched, mode=ADOPTING["c"])
    assert_adopted(f)
    one = pytensor.function([x], gradient, mode=MODES["py"])
    assert_same([f(values)], [np.stack([one(row) for row in values])])
