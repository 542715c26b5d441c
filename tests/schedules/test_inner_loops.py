"""Loops inside steps, called by the kernel of the loop around, against the plain loop."""

from itertools import product

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.basic import Alloc

import scanlib
from scanlib.backends.handler.programs import program_of
from scanlib.ops.errors import SequenceLengthError, StepCountError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from scanlib.schedules.array_loops import ArrayLoop
from tests.checks import assert_derivatives, assert_same
from tests.exploration import explore, half
from tests.modes import MODES
from tests.nested_loops import (
    assert_gradients,
    assert_values,
    of_fixed_length,
    outer_loops,
    scan,
)
from tests.strategies import DIFFERENTIABLE, loops

rng = np.random.default_rng(11)


def assert_kernels(function, linker="numba"):
    if linker != "py":
        assert all(program_of(node.op, node) is not None for node in outer_loops(function))


@pytest.mark.parametrize("shard", half(0, 4))
def test_random_values(shard):
    def check(case):
        assert_values(
            of_fixed_length(case, static=False), (("c", "numba")[shard // 2],), assert_kernels
        )

    explore(loops(), check, shard, 40)


@pytest.mark.parametrize("shard", half(0, 4))
def test_random_gradients(shard):
    def check(case):
        linkers = (("c", "numba")[shard // 2],)
        assert_gradients(of_fixed_length(case, static=False), linkers, assert_kernels)

    explore(loops(dtypes=DIFFERENTIABLE), check, shard, 25)


x, theta, n = pt.dvector("x"), pt.dscalar("theta"), pt.lscalar("n")
DATA = np.array([0.3, -0.5, 0.8, 1.1])
COUNTS = np.array([3, 0, 25, 70])


def compiled(inputs, outputs, mode):
    function = pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")
    assert outer_loops(function)
    assert_kernels(function)
    return function


def test_loops_in_loops_in_loops(fast_mode):
    def repeated(step, h, v):
        trace = scan(step, None, [h], [v], n_steps=n)
        return pt.concatenate([h[None], trace])[-1]

    def middle(h, v):
        return repeated(lambda g, v: pt.tanh(g) + v, h, v) + 0.1 * h

    trace = scan(lambda v, h: repeated(middle, h, v), x, [0.0])
    h, expected = 0.0, []
    for value in DATA:
        for _ in range(4):
            g = h
            for _ in range(4):
                g = np.tanh(g) + value
            h = g + 0.1 * h
        expected.append(h)
    np.testing.assert_allclose(compiled([x, n], trace, fast_mode)(DATA, 4), expected)
    assert_same([compiled([x, n], trace, fast_mode)(DATA, 0)], [np.zeros(4)])
    assert compiled([x, n], trace, fast_mode)(DATA[:0], 4).shape == (0,)


def plain_counted(data, counts=COUNTS):
    h, expected = 0.2, []
    for value, count in zip(data, counts, strict=True):
        for _ in range(count):
            h = np.tanh(h) + value
        expected.append(h)
    return np.array(expected)


def counted():
    """Return the trace of a loop each of whose steps says how many inner steps it takes."""
    counts = pt.lvector("counts")

    def step(count, value, h):
        final, _ = scanlib.loop(
            lambda h, _: (pt.tanh(h) + value, None), h, length=count, name="inner"
        )
        return final  # `h` where there are no steps

    return counts, scan(step, [counts, x], [np.float64(0.2)], name="outer")


def test_a_step_decides_how_many_steps_a_loop_takes(fast_mode):
    counts, trace = counted()
    function = compiled([counts, x], trace, fast_mode)
    np.testing.assert_allclose(function(COUNTS, DATA), plain_counted(DATA))
    with pytest.raises(StepCountError, match=r"loop `inner`: length must not be negative, got -2"):
        function(np.array([1, -2, 3, 1]), DATA)
    np.testing.assert_allclose(function(COUNTS, DATA), plain_counted(DATA))
    fixed = pytensor.graph.replace.graph_replace(trace, {counts: pt.constant(COUNTS)})
    assert_derivatives(fixed.sum(), {x: DATA}, lambda data: plain_counted(data).sum(), fast_mode)


def test_steps_by_way_of_floats(fast_mode):
    """The number of steps, and with it that of the rows that are read, is known before the first
    step, though it is computed with numbers that are no integers."""
    rows = pt.dmatrix("rows")

    def step(row, h):
        half = pt.cast(pt.ceil(row.shape[0] * 0.5), "int64")
        trace = scan(lambda g, v: pt.tanh(g) + v, None, [h], [row[0]], n_steps=half)
        return (trace[::-1] * pt.arange(trace.shape[0])).sum() + pt.max(trace)

    function = compiled([rows], scan(step, rows, [0.2]), fast_mode)
    for width in (1, 2, 5):
        values, h, expected = rng.normal(size=(4, width)), 0.2, []
        for row in values:
            g, trace = h, []
            for _ in range(-(-width // 2)):
                g = np.tanh(g) + row[0]
                trace.append(g)
            h = (np.array(trace[::-1]) * np.arange(len(trace))).sum() + max(trace)
            expected.append(h)
        np.testing.assert_allclose(function(values), expected)


def test_until(fast_mode):
    def iterate(z, target):
        new = z - (z**3 + z - target) / (3 * z**2 + 1)
        return new, scanlib.until(abs(new - z) < 1e-12)

    def step(target, z):
        return scan(iterate, None, [z], [target], n_steps=100)[-1]

    trace = scan(step, x, [0.0])
    roots = compiled([x], trace, fast_mode)(DATA)
    np.testing.assert_allclose(roots**3 + roots, DATA)


def test_matrix_recurrences_and_channels(fast_mode):
    """Inner loops of all kinds, and what the step makes of their histories."""
    A, rows = pt.dmatrix("A"), pt.dmatrix("rows")

    def step(row, h):
        linear = scan(lambda v, h, A: A @ h + v, row[:, None], [h], [A])
        wide = scan(lambda v, h: 0.5 * h + v, row, [pt.zeros(6)])
        products = scan(lambda g, A: pt.tanh(g @ A), None, [pt.eye(3)], [A], n_steps=n)
        last = scan(lambda v, h: {"h": 0.9 * h + v}["h"], row, [0.0], go_backwards=True)
        return pt.tanh(linear[-1] + products[-1].sum(0)), linear[::-1].sum(0) + last[-1], wide

    traces = scan(step, rows, [pt.ones(3), None, None])
    values, a = rng.normal(size=(5, 4)), 0.3 * rng.normal(size=(3, 3))
    function = compiled([rows, A, n], traces, fast_mode)
    kinds = {type(i.op) for node in outer_loops(function) for i in node.op.scan.body.apply_nodes}
    assert {ElemwiseScan, LinearScan} & kinds
    h, expected = np.ones(3), [[], [], []]
    for row in values:
        linear, wide, g, last = [h], [np.zeros(6)], np.eye(3), 0.0
        for v in row:
            linear.append(a @ linear[-1] + v)
            wide.append(0.5 * wide[-1] + v)
        for v in row[::-1]:
            last = 0.9 * last + v
        for _ in range(2):
            g = np.tanh(g @ a)
        h = np.tanh(linear[-1] + g.sum(0))
        found = h, np.sum(linear[1:], axis=0) + last, np.array(wide[1:])
        for column, value in zip(expected, found, strict=True):
            column.append(value)
    assert_same(function(values, a, 2), [np.array(column) for column in expected])
    assert_same(function(values, a, 2), [np.array(column) for column in expected])


def test_a_wrong_length_says_which_loop(fast_mode):
    other = pt.dvector("other")

    def step(value, h):
        return scan(lambda a, b, g: pt.tanh(g) * a + b, [x, other], [h], n_steps=n, name="inner")[
            -1
        ]

    trace = scan(step, x, [0.0], name="outer")
    function = compiled([x, other, n], trace, fast_mode)
    function(DATA, DATA, 4)
    with pytest.raises(SequenceLengthError, match="scan `inner`: sequence"):
        function(DATA, DATA[:3], 4)
    assert function(DATA[:0], DATA[:0], 0).shape == (0,)


def test_a_wrong_index_in_an_inner_step(fast_mode):
    places = pt.lvector("places")

    def step(value, h):
        return scan(lambda k, g: pt.tanh(g + x[k]), places, [h], name="inner")[-1]

    trace = scan(step, x, [0.0], name="outer")
    function = compiled([x, places], trace, fast_mode)
    function(DATA, [0, 3])
    with pytest.raises(IndexError, match=r"inner.*at step 1: index 4 is out of bounds"):
        function(DATA, [0, 4, 1])


def test_threads_leave_inner_loops_alone(fast_mode):
    with pytensor.config.change_flags(scanlib__threads=2, scanlib__parallel_channels=1):
        start = pt.dvector("start")
        trace = scan(
            lambda v, h: scan(lambda h, v: pt.tanh(h) + v, None, [h], [v], n_steps=n)[-1],
            x,
            [start],
        )
        function = compiled([x, start, n], trace, fast_mode)
        h, expected = np.zeros(300), []
        for value in DATA:
            for _ in range(30):
                h = np.tanh(h) + value
            expected.append(h)
        np.testing.assert_allclose(function(DATA, np.zeros(300), 30), expected)


def test_loops_whose_steps_decide_how_long_their_rows_are_have_no_kernel(fast_mode):
    def step(value, h):
        trace = scan(
            lambda g, v: (0.5 * g + v, scanlib.until(g > v)), None, [h], [value], n_steps=20
        )
        return trace.sum()

    trace = scan(step, x, [0.0])
    function = pytensor.function([x], trace, mode=fast_mode)
    (outer,) = outer_loops(function)
    assert program_of(outer.op, outer) is None
    h, expected = 0.0, []
    for value in DATA:
        g, total = h, 0.0
        for _ in range(20):
            g, stops = 0.5 * g + value, g > value
            total += g
            if stops:
                break
        h = total
        expected.append(h)
    np.testing.assert_allclose(function(DATA), expected)


@pytest.mark.parametrize("linker", ["JAX", "PYTORCH"])
def test_other_linkers(linker):
    pytest.importorskip("torch" if linker == "PYTORCH" else "jax")
    counts, trace = counted()
    found = pytensor.function([counts, x], trace, mode=linker)(COUNTS, DATA)
    np.testing.assert_allclose(found, plain_counted(DATA))

    def step(value, h):
        return scan(lambda h, v: pt.tanh(h) + v, None, [h], [value], n_steps=20)[-1]

    trace = scan(step, x, [0.2])
    gradient = pytensor.function([x], pytensor.grad(trace.sum(), x), mode=linker)(DATA)
    sides = [plain_counted(DATA + 1e-6 * d, [20] * 4).sum() for d in (*np.eye(4), *-np.eye(4))]
    slopes = (np.array(sides[:4]) - sides[4:]) / 2e-6
    np.testing.assert_allclose(gradient, slopes, rtol=1e-6)


def inner(step, D):
    """The table after a loop over its columns."""
    columns = pt.arange(1, D.shape[1])
    return scanlib.scan(step, columns, D, return_updates=False)[-1]


def cell(D, i, j):
    return 0.5 * D[i - 1, j] + D[i, j - 1] * D[i - 1, j - 1]


def filled(D, i, j):
    return D[i, j].set(pt.tanh(cell(D, i, j)))


def plain_row(D, i, first=1, by=1):
    for j in range(first, D.shape[1])[::by]:
        D[i, j] = np.tanh(cell(D, i, j))


def plain_cleared(D, i):
    D[i - 1, 0] = 0.0
    plain_row(D, i)
    D[i] += D[0, 1]


def plain_whole(D, i):
    old = D.copy()
    plain_row(D, i)
    D += old


# What a step makes of a table, whether the table stays where it is, and the same in NumPy.
TABLES = {
    "row": (lambda D, i: inner(lambda j, D: filled(D, i, j), D), True, plain_row),
    "reads before and writes after": (
        lambda D, i: (new := inner(lambda j, D: filled(D, i, j), D[i - 1, 0].set(0.0)))[i].inc(
            new[0, 1]
        ),
        True,
        plain_cleared,
    ),
    "reads what it was": (
        lambda D, i: inner(lambda j, D: filled(D, i, j), D) + D,
        False,
        plain_whole,
    ),
    "to the end": (
        lambda D, i: scan(lambda j, D: filled(D, i, j), pt.arange(i, D.shape[1]), D)[-1],
        True,
        lambda D, i: plain_row(D, i, i),
    ),
    "from the end": (
        lambda D, i: scan(lambda j, D: filled(D, i, j), pt.arange(D.shape[1] - 1, i - 1, -1), D)[
            -1
        ],
        True,
        lambda D, i: plain_row(D, i, i, -1),
    ),
    "no steps": (
        lambda D, i: scanlib.loop(
            lambda D, j: (filled(D, i, j), None), D, pt.arange(D.shape[1], D.shape[1])
        )[0][i].set(D[i - 1]),
        True,
        lambda D, i: D.__setitem__(i, D[i - 1]),
    ),
}


@pytest.mark.parametrize("table", TABLES)
def test_tables_that_inner_loops_fill(table, mode):
    """The inner loop writes into the table of the loop around, which is not copied at each step."""
    step, stays, plain = TABLES[table]
    D = pt.dmatrix("D")
    last = scan(lambda i, D: step(D, i), pt.arange(1, D.shape[0]), D)[-1]

    def cost(values):
        values = values.copy()
        for i in range(1, len(values)):
            plain(values, i)
        return values

    function, data = pytensor.function([D], last, mode=mode), rng.normal(size=(4, 4))
    given = data.copy()
    np.testing.assert_allclose(function(data), cost(data))
    np.testing.assert_array_equal(data, given)
    (node,) = outer_loops(function)
    if mode is MODES["numba"]:
        assert (not ArrayLoop(node.op, False).rings) == stays
        gradient = pytensor.function([D], pytensor.grad((last**2).sum(), D), mode=mode)
        forward, _ = outer_loops(gradient)
        if not table.endswith("end"):  # no table for each step, unless steps read ever fewer items
            assert all(forward.op.signature.untraced)
    values = {D: data}
    assert_derivatives((last**2).sum(), values, lambda D: (cost(D) ** 2).sum(), mode, order=1)


def loops_in(graph):
    """The loops of a graph, and those in their steps."""
    for node in graph.apply_nodes:
        if isinstance(node.op, Scan):
            yield node
            yield from loops_in(node.op.body)


def relaxed(D, k, i, j):
    return D[i, j] + 0.1 * D[i, k] * D[k, j]


def test_tables_that_three_loops_fill(mode):
    """No loop copies the table; the gradient reads what the innermost one has read of it."""
    D = pt.dmatrix("D")
    every = pt.arange(3)

    def column(k, D):
        return scan(row, every, D, [k])[-1]

    def row(i, D, k):
        return scan(lambda j, D, k, i: D[i, j].set(relaxed(D, k, i, j)), every, D, [k, i])[-1]

    def plain(D):
        D, every = D.copy(), range(3)
        for k, i, j in product(every, every, every):
            D[i, j] = relaxed(D, k, i, j)
        return D

    last, data = scan(column, every, D)[-1], rng.normal(size=(4, 3))
    function = pytensor.function([D], last, mode=mode)
    np.testing.assert_allclose(function(data), plain(data))
    cost = (last**2).sum()
    assert_derivatives(cost, {D: data}, lambda D: (plain(D) ** 2).sum(), mode, order=1)
    if mode is MODES["numba"]:
        gradient = pytensor.function([D], pytensor.grad(cost, D), mode=mode)
        for graph in (function.maker.fgraph, gradient.maker.fgraph):
            assert {node.op.signature.n_states for node in loops_in(graph)} == {0}


def both(W, i, j, h, g):
    return h[j].set(W[i, j] * g[j] + 1.0), g[j].set(h[j] * 0.5 + h[i])


def test_gradients_by_what_inner_loops_read(mode):
    """Arrays that steps write go unstored where all is linear in them, though their history alone
    says how many steps there are; what inner loops add to goes from one to the next."""
    h, W = pt.dvector("h"), pt.dmatrix("W")

    def step(i, h, g):
        return [x[-1] for x in scan(lambda j, *x: both(W, i, j, *x), pt.arange(3), [h, g])]

    def plain(h, W):
        h, g = h.copy(), np.sin(h)
        for i, j in product(range(len(W)), range(3)):
            h[j], g[j] = W[i, j] * g[j] + 1.0, h[j] * 0.5 + h[i]
        return h * g

    ends = [x[-1] for x in scan(step, pt.arange(W.shape[0]), [h, pt.sin(h)])]
    values = {h: rng.normal(size=5), W: rng.normal(size=(4, 3))}
    cost = (ends[0] * ends[1]).sum()
    assert_derivatives(cost, values, lambda h, W: plain(h, W).sum(), mode, order=1)
    if mode is MODES["numba"]:
        gradient = pytensor.function([h, W], pytensor.grad(cost, [h, W]), mode=mode)
        forward, backward = outer_loops(gradient)
        assert forward.op.signature.n_states == 0
        assert not any(isinstance(node.op, Alloc) for node in backward.op.body.apply_nodes)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("by_place", [True, False])
def test_gradients_of_tables_with_a_margin(by_place, rank, fast_mode):
    """The range of the inner loop ends at a size that the loop around is given: no table is kept
    for each step, nor filled twice, nor where the loop is one of a batch."""
    W = pt.dmatrix("W")
    n, m = W.shape[0] + 1, W.shape[1] + 1

    def row(i, *costs_and_table):
        *costs, D = costs_and_table

        def one(j, *cost_and_table):
            *cost, D = cost_and_table
            return D[i, j].set(pt.tanh(cell(D, i, j) + (cost or [W[i - 1, j - 1]])[0]))

        return scan(one, [pt.arange(1, m), *costs], D)[-1]

    def plain(W):
        D = np.ones((W.shape[0] + 1, W.shape[1] + 1))
        for i, j in product(range(1, len(D)), range(1, D.shape[1])):
            D[i, j] = np.tanh(cell(D, i, j) + W[i - 1, j - 1])
        return D[-1, -1]

    over = [pt.arange(1, n), *([] if by_place else [W])]
    last = scan(row, over, pt.ones((n, m)))[-1]
    cost, data = last[-1, -1], rng.normal(size=(3, 4, 5))
    slope = pytensor.grad(cost, W)
    given = pt.dtensor3("given") if rank else W
    function = pytensor.function(
        [given], vectorize_graph(slope, {W: given}) if rank else slope, mode=fast_mode
    )
    assert_derivatives(cost, {W: data[0]}, plain, fast_mode, order=1)
    one = pytensor.function([W], slope, mode=fast_mode)
    found = function(data) if rank else [function(row) for row in data]
    np.testing.assert_allclose(found, [one(row) for row in data], rtol=1e-10)
    forward, _ = outer_loops(function)
    assert all(forward.op.signature.untraced)
    assert sum(isinstance(node.op, Scan) for node in forward.op.body.apply_nodes) == 1


def test_items_of_rows_that_inner_gradients_read(mode):
    """A cascade of filters; how many numbers each has is known when it is called."""
    b, a = pt.dmatrix("b"), pt.dmatrix("a")

    def section(b, a, s, v):
        y = b[0] * v + s[0]
        return y, pt.stack([b[1] * v - a[0] * y + s[1], b[2] * v - a[1] * y])

    def step(v, states):
        y, states = scan(section, [b, a, states], [v, None])
        return states, y[-1]

    def plain(x, b, a):
        total, s = 0.0, np.zeros((2, 2))
        for v in x:
            for k in range(2):
                y = b[k, 0] * v + s[k, 0]
                s[k] = b[k, 1] * v - a[k, 0] * y + s[k, 1], b[k, 2] * v - a[k, 1] * y
                v = y
            total += v**2
        return total

    _, y = scan(step, x, [pt.zeros((2, 2)), None])
    cost = (y**2).sum()
    values = {x: DATA, b: rng.normal(size=(2, 3)), a: 0.3 * rng.normal(size=(2, 2))}
    assert_derivatives(cost, values, plain, mode, order=1)
    if mode is MODES["numba"]:
        gradient = compiled([x, b, a], pytensor.grad(cost, [b, a]), mode)
        with pytest.raises(IndexError, match=r"b\[2\].*out of bounds for axis 0 with size 2"):
            gradient(DATA, values[b][:, :2], values[a])
        short = gradient(DATA[:0], values[b][:, :2], values[a])
        assert_same(short, [np.zeros((2, 2)), np.zeros((2, 2))])
