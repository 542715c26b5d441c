"""Functions that hold loops call programs, line by line: the same values and errors."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from numba.core import event
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.replace import vectorize_graph
from pytensor.raise_op import Assert
from pytensor.tensor.elemwise import Elemwise
from scipy.special import logsumexp, polygamma

import scanlib
from benchmarks.loops import LOOPS
from scanlib.backends.handler import thunks
from scanlib.backends.numba import linker
from tests.checks import assert_derivatives

X = np.array([0.3, -1.2, 0.7, 2.0, -0.4])


def accumulated(x, start=0.5):
    """A loop of scalars."""
    return scanlib.scan(
        lambda x, h: 0.9 * h + x,
        sequences=x,
        outputs_info=np.float64(start),
        return_updates=False,
    )


def around(x, w, k, ints, flags, z):
    """Return what may stand around a loop: scalars, vectors, slices, joins, sums, copies."""
    h = accumulated(pt.concatenate([w[None], x[:-1], x[::-2]]))
    history = h.owner.inputs[0]
    return [
        h,
        history[:k],
        h[k:][::-1],
        h[-1] + w,
        pt.log1p(h**2),
        pt.sum(pt.exp(-h)),
        pt.mean(h),
        h.shape[0] * 2 - k,
        pt.switch(k > 2, w, 1 / w),
        pt.stack([w, w * 2, 3.0]),
        ints[:-1] + ints[1:],
        ints.sum(),
        (x > 0).sum(),
        flags & (x > w),
        pt.sum(z * z[0]),
        pt.real(z) + x,
        pt.cast(x, "float32") / pt.cast(w, "float32"),
        pt.cast(ints, "int8").sum(),
        x,
        k,
        Assert("k is positive")(pt.sqr(w), k > 0),
        pt.full((k,), w) + 1,
        pt.outer(x, x) @ x,
        accumulated(pt.ones(k) * w),
    ]


def around_values():
    ints = np.array([3, -1, 120, 100, 7])
    flags = np.array([True, False, True, True, False])
    return [X, np.array(0.7), np.array(3), ints, flags, X * (1 + 2j)]


@pytest.fixture(scope="module")
def functions():
    x, w, k, ints = pt.dvector("x"), pt.dscalar("w"), pt.lscalar("k"), pt.lvector("ints")
    inputs = [x, w, k, ints, pt.vector("flags", dtype="bool"), pt.zvector("z")]
    outputs = around(*inputs)
    return [pytensor.function(inputs, outputs, mode=mode) for mode in ("NUMBA", "FAST_COMPILE")]


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 3, 5])
def test_values_are_those_of_the_nodes_one_by_one(functions, k):
    values = around_values()
    values[2] = np.array(k)
    kept = [value.copy() for value in values]
    one, many = (function(*values) for function in functions)
    for mine, expected in zip(one, many, strict=True):
        expected = np.asarray(expected)
        assert mine.dtype == expected.dtype
        assert mine.shape == expected.shape
        np.testing.assert_allclose(mine, expected, rtol=1e-6 if mine.dtype == "f4" else 1e-12)
    for value, before in zip(values, kept, strict=True):
        np.testing.assert_array_equal(value, before)
    assert not any(np.shares_memory(mine, value) for mine in one for value in values)


def test_batches_of_functions_of_one_array():
    """Whose kind of node is that of a batch of index reads, which have two inputs."""
    matrices = pt.dtensor3("matrices")
    lower = pt.linalg.cholesky(matrices)
    last = accumulated(lower[:, 1, 1])[-1]
    f = pytensor.function([matrices], [lower, pt.linalg.inv(matrices), last], mode="NUMBA")
    values = np.stack([[[k, 0.2], [0.2, k + 1]] for k in (1.0, 4.0, 9.0)])
    wanted = np.linalg.cholesky(values)
    h = 0.5
    for x in wanted[:, 1, 1]:
        h = 0.9 * h + x
    for mine, expected in zip(f(values), [wanted, np.linalg.inv(values), h], strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-12)


@pytest.mark.slow
def test_failed_assertion_is_raised(functions):
    values = around_values()
    values[2] = np.array(0)
    with pytest.raises(AssertionError, match="k is positive"):
        functions[0](*values)


def test_lengths_that_differ_are_an_error(functions):
    values = around_values()
    values[4] = values[4][:-1]
    with pytest.raises(ValueError, match="sizes 4 and 5 along axis 0"):
        functions[0](*values)


def test_strided_inputs(functions):
    values = around_values()
    expected = functions[0](*values)
    strided = [np.repeat(value, 2)[::2] if value.ndim else value for value in values]
    for mine, other in zip(functions[0](*strided), expected, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6 if mine.dtype == "f4" else 1e-12)


@pytest.mark.slow
def test_loops_in_graphs_that_numba_compiles():
    """In the graph of an Op, and in a loop of PyTensor's."""
    x = pt.dvector("x")
    op = OpFromGraph([x], [accumulated(x), (accumulated(x) ** 2).sum()])
    trace, total = op(x)
    totals = pytensor.scan(
        lambda k: accumulated(x * k).sum(),
        sequences=[pt.constant([0.5, 2.0])],
        return_updates=False,
    )
    found = pytensor.function([x], [trace, total, totals], mode="NUMBA")(X)
    wanted = pytensor.function([x], [accumulated(x), accumulated(2 * x), accumulated(x / 2)])(X)
    np.testing.assert_allclose(found[0], wanted[0])
    np.testing.assert_allclose(found[1], (wanted[0] ** 2).sum())
    np.testing.assert_allclose(found[2], [wanted[2].sum(), wanted[1].sum()])


def test_threads_without_pythons_lock():
    """As samplers call a density from threads of their own; a first call finds the program."""
    x = pt.vector("x")
    function = pytensor.function([x], accumulated(x).sum(), mode="NUMBA")
    compiled = function.vm.jit_fn

    @numba.njit(nogil=True)
    def total(x, n):
        found = 0.0
        for _ in range(n):
            found += compiled(x)[0].item()
        return found

    long = np.linspace(-1, 1, 200_000)  # so many steps that it is polled
    expected = 3 * function(long)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(total, [long, long], [3, 3]):
            np.testing.assert_allclose(found, expected)


def test_graph_without_inputs():
    function = pytensor.function([], accumulated(pt.constant(X)).sum(), mode="NUMBA")
    h, total = 0.5, 0.0
    for x in X:
        h = 0.9 * h + x
        total += h
    np.testing.assert_allclose(function(), total)


def test_shared_variables_are_updated():
    x, state = pt.dvector("x"), pytensor.shared(np.float64(0.5), "state")
    h = scanlib.scan(
        lambda x, h: 0.9 * h + x, sequences=x, outputs_info=state, return_updates=False
    )
    counts = pytensor.shared(np.zeros(5), "counts")
    updates = [(state, h[-1]), (counts, counts + h)]
    function = pytensor.function([x], h.sum(), updates=updates, mode="NUMBA")
    first = function(X)
    before = state.get_value()
    function(X)
    expected, level = [], 0.5
    for _ in range(2):
        for item in X:
            level = 0.9 * level + item
            expected.append(level)
    np.testing.assert_allclose(before, expected[4])
    np.testing.assert_allclose(first, sum(expected[:5]))
    np.testing.assert_allclose(state.get_value(), expected[-1])
    np.testing.assert_allclose(counts.get_value(), np.reshape(expected, (2, 5)).sum(0))


@pytest.mark.filterwarnings("ignore:Numba will use object mode")
def test_elementwise_nodes_around_loops_are_not_tried_in_place():
    """Programs overwrite nothing, and trying takes the square of the number of nodes; functions
    without loops are PyTensor's."""
    x = pt.dvector("x")

    def overwriting(values):
        f = pytensor.function([x], pt.exp(pt.sort(pt.tanh(values))), mode="NUMBA")
        return [node for node in f.maker.fgraph.apply_nodes if node.op.destroy_map]

    assert overwriting(x)
    assert not any(isinstance(node.op, Elemwise) for node in overwriting(accumulated(x)))


def test_functions_that_numba_does_not_keep_stand_beside_loops():
    """Special functions of SciPy's, whose code PyTensor gives numba in another function's place."""
    x = pt.dvector("x")
    function = pytensor.function([x], pt.polygamma(1, 1 + accumulated(x) ** 2), mode="NUMBA")
    level, expected = 0.5, []
    for item in X:
        level = 0.9 * level + item
        expected.append(polygamma(1, 1 + level**2))
    np.testing.assert_allclose(function(X), expected)


def test_graph_without_loops_is_pytensors_business(monkeypatch):
    def never(*arguments):
        raise AssertionError("a graph without loops was run here")

    monkeypatch.setattr(linker.GraphWriter, "__init__", never)
    x = pt.dvector("x")
    assert pytensor.function([x], x.sum() + 1, mode="NUMBA")(X) == pytest.approx(X.sum() + 1)


class Compiled(event.Listener):
    """Counts the functions that numba compiles."""

    def __init__(self):
        self.names = []

    def on_start(self, started):
        self.names.append(started.data["dispatcher"].__name__)

    def on_end(self, ended):
        pass


@pytest.mark.parametrize("name", ["garch", "ar2", "discounted"])
def test_numba_compiles_nothing_for_loops_with_kernels(name):
    compiled = Compiled()
    with event.install_listener("numba:compile", compiled):
        function = LOOPS[name].build(scanlib).compile(True)
        function(*LOOPS[name].pass_data(True))
    assert not compiled.names


def test_numba_compiles_nothing_for_batches_of_logarithms_of_sums():
    first, moves, emissions = pt.dvector("first"), pt.dmatrix("moves"), pt.dmatrix("emissions")
    steps = scanlib.scan(
        lambda e, a, moves: pt.logsumexp(a[:, None] + moves, axis=0) + e,
        sequences=emissions,
        outputs_info=first,
        non_sequences=moves,
        return_updates=False,
    )
    many = pt.dtensor3("many")
    cost = vectorize_graph(pt.logsumexp(steps[-1]), {emissions: many}).sum()
    rng = np.random.default_rng(4)
    start, table, rows = rng.normal(size=3), rng.normal(size=(3, 3)), rng.normal(size=(2, 5, 3))

    def reference(start, table, rows):
        total = 0.0
        for emitted in rows:
            a = start
            for e in emitted:
                a = logsumexp(a[:, None] + table, axis=0) + e
            total += logsumexp(a)
        return total

    given = {first: start, moves: table, many: rows}
    with event.install_recorder("numba:compile") as recorder:
        assert_derivatives(cost, given, reference, "NUMBA", order=1)
    assert not recorder.buffer


def test_functions_are_copied_and_pickled():
    x, w = pt.dvector("x"), pytensor.shared(np.float64(2.0), "w")
    function = pytensor.function([x], accumulated(x) * w, updates={w: w + 1}, mode="NUMBA")
    expected = function(X)
    for other in (function.copy(), pickle.loads(pickle.dumps(function))):
        w.set_value(2.0)
        for container in other.input_storage[1:]:
            container.value = np.array(2.0)
        np.testing.assert_array_equal(other(X), expected)


def test_a_profile_counts_calls():
    x = pt.dvector("x")
    function = pytensor.function([x], accumulated(x), mode="NUMBA", profile=True)
    function(X)
    function(X)
    assert function.profile.fct_callcount == 2


def test_errors_name_the_node_that_raised():
    x, k = pt.dvector("x"), pt.lscalar("k")
    with pytensor.config.change_flags(exception_verbosity="medium"):
        function = pytensor.function([x, k], accumulated(x)[k], mode="NUMBA")
        with pytest.raises(
            IndexError, match=r"index 8 is out of bounds[^$]*Subtensor\{i\}"
        ) as caught:
            function(X, 7)
    assert f"Inputs shapes: [({len(X) + 1},), ()]" in str(caught.value)
    assert "array(8)]" in str(caught.value)  # not the inputs of the function


def test_errors_name_the_lines_that_made_a_loop():
    """Though another loop takes its place in the compiled function."""
    X, x = pt.dmatrix("X"), pt.dvector("x")
    y = scanlib.scan(lambda row, h: h + row, X, outputs_info=x, return_updates=False)
    with pytensor.config.change_flags(exception_verbosity="medium"):
        function = pytensor.function([x, X], y, mode="NUMBA")
        with pytest.raises(ValueError, match="Incompatible") as caught:
            function(np.ones(3), np.ones((4, 2)))
    assert "ElemwiseScan{loop: affine}(X" in str(caught.value)
    assert "Inputs shapes: [(4, 2), (1, 3)]" in str(caught.value)
    assert "y = scanlib.scan(lambda row, h: h + row, X" in str(caught.value)


def test_without_a_compiler_python_runs_the_programs(functions, monkeypatch):
    """As C++ does, with the same results and errors."""
    values = around_values()
    fgraph = functions[0].maker.fgraph
    cells = [[None] for _ in fgraph.inputs], [[None] for _ in fgraph.outputs]
    monkeypatch.setattr(thunks, "library", lambda: None)
    whole = linker.GraphWriter(fgraph, linker.node_function, linker.constant_value)
    run, stored = whole.functions(*cells, fail=lambda node, values: None)
    monkeypatch.undo()
    for mine, expected in zip(run(*values), functions[0](*values), strict=False):
        np.testing.assert_array_equal(mine, expected)
    for cell, value in zip(cells[0], values, strict=False):
        cell[0] = value
    for mine, expected in zip(stored(), functions[0](*values), strict=False):
        np.testing.assert_array_equal(mine, expected)
    values[2] = np.array(0)
    with pytest.raises(AssertionError, match="k is positive"):
        run(*values)


def test_gradient_of_a_step_that_rolls_an_array():
    """Its gradient holds nodes that are graphs, which newer PyTensor keeps frozen."""
    w, start = pt.dmatrix("w"), pt.dvector("start")

    def step(h, w):
        u = pt.tanh(w @ h)
        u = u - u.mean()
        return pt.concatenate([u[-1:], u[:-1]])

    out = scanlib.scan(step, None, [start], [w], n_steps=4, return_updates=False)
    cost = (out**2).sum()
    function = pytensor.function([w, start], [cost, pytensor.grad(cost, w)], mode="NUMBA")
    rng = np.random.default_rng(3)
    value, first, direction = rng.normal(size=(3, 3)), rng.normal(size=3), rng.normal(size=(3, 3))

    def by_hand(w):
        h, total = first, 0.0
        for _ in range(4):
            u = np.tanh(w @ h)
            h = np.roll(u - u.mean(), 1)
            total += (h**2).sum()
        return total

    found, gradient = function(value, first)
    np.testing.assert_allclose(found, by_hand(value))
    slope = (by_hand(value + 1e-6 * direction) - by_hand(value - 1e-6 * direction)) / 2e-6
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-6)


def test_writes_into_copies_of_constants_are_parts_of_programs():
    """As those in the adjoint of a lattice filter."""
    x, k = pt.tensor("x", shape=(20,)), pt.tensor("k", shape=(8,))

    def step(x, b, k):
        new = []
        for i in range(8):
            x = x - k[i] * b[i]
            new.append(b[i] + k[i] * x)
        return pt.stack([x, *new[:-1]]), x

    _, y = scanlib.scan(step, x, [pt.zeros(8), None], [k], return_updates=False)
    f = pytensor.function([x, k], pytensor.grad((y**2).sum(), k))
    rows, factors = 0.1 * np.arange(20), np.linspace(-0.3, 0.2, 8)

    def cost(k):
        b, total = np.zeros(8, complex), 0
        for x in rows:
            new = []
            for i in range(8):
                x = x - k[i] * b[i]
                new.append(b[i] + k[i] * x)
            b, total = np.array([x, *new[:-1]]), total + x**2
        return total

    with event.install_recorder("numba:compile") as recorder:
        found = f(rows, factors)
    assert not recorder.buffer
    for i in range(8):
        moved = factors + 1e-30j * (np.arange(8) == i)
        np.testing.assert_allclose(found[i], cost(moved).imag / 1e-30, rtol=1e-10)
