"""Ops that are written as graphs of others, against NumPy and SciPy."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import get_mode
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Switch
from pytensor.tensor.basic import Join
from pytensor.tensor.blas import BatchedDot
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.elemwise import Elemwise
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from pytensor.tensor.math import Dot, Sum
from pytensor.tensor.shape import Shape
from pytensor.tensor.subtensor import AdvancedSubtensor
from scipy.linalg import block_diag

import scanlib
from scanlib.ops.composites import COMPOSITES, composites
from scanlib.ops.graph import applies, substitute
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from tests.derivatives import central_gradient

rng = np.random.default_rng(4)
REPLACED = COMPOSITES.keys() - {Elemwise, Join, Shape, Sum}  # in some graphs alone


def written(value):
    """Return a value by the graphs of others, and hold that they are all there is."""
    made = composites([value])[value]
    assert not any(type(v.owner.op) in REPLACED for v in ancestors([made]) if v.owner)
    return made


@pytest.mark.parametrize("widths", [2, (0, 3), [(7, 1), (0, 2)]])
@pytest.mark.parametrize("mode", ["constant", "edge", "wrap", "symmetric", "reflect", "mean"])
def test_padding(mode, widths):
    x = pt.dmatrix("x")
    f = pytensor.function([x], written(pt.pad(x, widths, mode=mode)), mode="FAST_COMPILE")
    for shape in [(1, 1), (2, 3), (4, 2)]:
        value = rng.normal(size=shape)
        np.testing.assert_allclose(f(value), np.pad(value, widths, mode=mode))


@pytest.mark.parametrize("offset", [None, -1, 0, 2])
def test_diagonals(offset):
    x, v = pt.dmatrix("x"), pt.dscalar("v")
    made = pt.fill_diagonal(x, v) if offset is None else pt.fill_diagonal_offset(x, v, offset)
    f = pytensor.function([x, v], written(made), mode="FAST_COMPILE")
    for shape in [(3, 3), (4, 2), (3, 5)]:
        value = rng.normal(size=shape)
        rows, columns = np.indices(shape)
        expected = np.where(columns - rows == (offset or 0), 2.5, value)
        np.testing.assert_array_equal(f(value, 2.5), expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_rotations_by_a_number_that_data_decide(axis):
    x, k = pt.dmatrix("x"), pt.lscalar("k")
    whole = (slice(None),) * axis
    joined = pt.concatenate([x[(*whole, slice(k, None))], x[(*whole, slice(None, k))]], axis=axis)
    rotated = [written(pt.roll(x, k, axis=axis)), written(joined)]
    f = pytensor.function([x, k], rotated, mode="FAST_COMPILE")
    for shape in [(0, 0), (1, 1), (3, 2)]:
        value = rng.normal(size=shape)
        for shift in range(-5, 6):
            rolled, found = f(value, shift)
            parts = np.split(value, [slice(shift).indices(shape[axis])[1]], axis=axis)
            np.testing.assert_array_equal(rolled, np.roll(value, shift, axis=axis))
            np.testing.assert_array_equal(found, np.concatenate(parts[::-1], axis=axis))
    assert not composites([pt.roll(x, 1, axis=axis), pt.concatenate([x[k:], x[: k + 1]])])


@pytest.mark.parametrize("linker", ["NUMBA", "JAX"])
def test_batches_of_rotations(linker):
    if linker == "JAX":
        pytest.importorskip("jax")
    x, k, w = pt.dvector("x"), pt.lvector("k"), pt.dvector("w")
    h, _ = scanlib.loop(lambda h, k: (pt.sin(pt.roll(h, k)) + 0.1 * h, None), x, k)
    gradient = pytensor.grad((h * w).sum(), x)
    inputs = pt.dmatrix("x"), pt.lmatrix("k"), pt.dmatrix("w")
    batch = vectorize_graph([h, gradient], dict(zip([x, k, w], inputs, strict=True)))
    f = pytensor.function(inputs, batch, mode=linker)
    values = rng.normal(size=(2, 4)), rng.integers(-6, 6, size=(2, 3)), rng.normal(size=(2, 4))

    def last(h, shifts):
        for shift in shifts:
            h = np.sin(np.roll(h, shift)) + 0.1 * h
        return h

    for x, k, w, found, slopes in zip(*values, *f(*values), strict=True):
        np.testing.assert_allclose(found, last(x, k))
        (expected,) = central_gradient(lambda x: (last(x, k) * w).sum(), [x])  # noqa: B023
        np.testing.assert_allclose(slopes, expected, rtol=1e-6, atol=1e-8)


def test_blocks():
    matrices = [pt.dmatrix(), pt.imatrix(), pt.dmatrix()]
    made = written(pt.linalg.block_diag(*matrices))
    assert made.type.dtype == "float64"
    values = [rng.integers(9, size=shape) for shape in [(1, 2), (2, 2), (0, 1)]]
    f = pytensor.function(matrices, made, mode="FAST_COMPILE", allow_input_downcast=True)
    np.testing.assert_array_equal(f(*values), block_diag(*values))


def test_numbers_where_a_mask_says():
    x, v, rows = pt.dmatrix("x"), pt.dscalar("v"), pt.vector("rows", dtype="bool")
    made = [x[x > 0].set(v), x[x > 0].inc(v), x[rows].set(2), x[rows].inc(v)]
    f = pytensor.function([x, v, rows], [written(y) for y in made], mode="FAST_COMPILE")
    value, some = rng.normal(size=(3, 4)), np.array([True, False, True])
    expected = [value.copy() for _ in made]
    expected[0][value > 0] = 1.5
    expected[1][value > 0] += 1.5
    expected[2][some] = 2
    expected[3][some] += 1.5
    for one, other in zip(f(value, 1.5, some), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    # What only the run can count.
    assert not composites([x[rows].set(x[:2]), x[rows].set(x[x[:, 0] > 1])])
    assert not composites([x[rows].set(x[rows, 1:]), x[rows][::2].sum(), x[rows].max()])


@pytest.mark.parametrize("linker", ["NUMBA", "JAX"])
def test_what_a_mask_selects_where_it_says(linker):
    """Levels of which some are observed, as NumPy writes them: what is missing counts nowhere."""
    if linker == "JAX":
        pytest.importorskip("jax")
    y, gain, slope = pt.dmatrix("y"), pt.dscalar("gain"), pt.dscalar("slope")

    def step(level, y):
        seen = ~pt.isnan(y)
        moved = level[seen].set(slope * level[seen] + gain * (y[seen] - level[seen]))
        return written(moved), written(pt.zeros(3)[y > 0].inc((moved - y)[y > 0]))

    def total(gain, slope):
        level, total = np.zeros(3), 0.0
        for row in values:
            seen, level = ~np.isnan(row), level.copy()
            level[seen] = slope * level[seen] + gain * (row[seen] - level[seen])
            total += (level**2).sum() + (level - row)[row > 0].sum()
        return total

    _, levels = scanlib.loop(lambda level, y: (step(level, y)[0], step(level, y)), pt.zeros(3), y)
    cost = (levels[0] ** 2).sum() + levels[1].sum()
    gains = pt.dvector("gains")
    batch = vectorize_graph([cost, *pytensor.grad(cost, [gain, slope])], {gain: gains})
    f = pytensor.function([y, gains, slope], batch, mode=linker)
    values = np.where(rng.uniform(size=(5, 3)) < 0.4, np.nan, rng.normal(size=(5, 3)))
    values[2] = np.nan
    for some, *found in zip([0.3, 0.8], *f(values, [0.3, 0.8], 0.9), strict=True):
        np.testing.assert_allclose(found[0], total(some, 0.9))
        np.testing.assert_allclose(found[1:], central_gradient(total, [some, 0.9]), rtol=1e-6)


# Of a row, which of it is seen, a level and a parameter.
SELECTED = {
    "sum": lambda m, y, seen, h, a: a * y[seen].sum(),
    "squares": lambda m, y, seen, h, a: ((a * y[seen] - h) ** 2).sum(),
    "mean": lambda m, y, seen, h, a: (y[seen] * a + h).mean(),
    "number": lambda m, y, seen, h, a: a * m.exp(y[seen]).shape[0],
    # Neither is finite where nothing is seen, nor its slope.
    "logarithms": lambda m, y, seen, h, a: m.log(m.abs(a * y[seen])).sum() + (1 / y[seen]).sum(),
    "matrix": lambda m, y, seen, h, a: (a * m.sin(y.reshape((2, 2))[seen.reshape((2, 2))])).sum(),
    "rows": lambda m, y, seen, h, a: (y.reshape((2, 2))[seen[:2]] - a).sum(axis=0)[1],
}


@pytest.mark.parametrize("library", ["scanlib", "pytensor"])
@pytest.mark.parametrize("name", SELECTED)
def test_sums_of_what_a_mask_selects(name, library):
    """What is not seen counts nothing, in gradients and batches neither; all is kernels."""
    y, a = pt.dmatrix("y"), pt.dscalar("a")

    def step(m, y, h, a):
        return m.tanh(0.2 * h + SELECTED[name](m, y, ~m.isnan(y), h, a))

    def one(y, h, a):
        return step(pt, y, h, a)

    scan = {"scanlib": scanlib, "pytensor": pytensor}[library].scan
    zero = pt.constant(0.0, dtype="float64")
    trace = scan(one, [y], [zero], [a], return_updates=False)
    cost = (trace**2).sum()
    batches = pt.dtensor3("y"), pt.dvector("a")
    results = vectorize_graph(
        [cost, pytensor.grad(cost, a)], dict(zip([y, a], batches, strict=True))
    )
    f = pytensor.function(batches, results, mode=get_mode("NUMBA").including("scanlib_adopt"))
    assert len(scanlib.explain(f).loops) == 2
    bodies = (node.op.scan.body for node in f.maker.fgraph.apply_nodes if hasattr(node.op, "scan"))
    assert not any(
        isinstance(n.op, Blockwise | AdvancedSubtensor) for b in bodies for n in b.toposort()
    )

    def plain(y, a):
        h, total = 0.0, 0.0
        for row in y:
            h = step(np, row, h, a)
            total += h**2
        return total

    values = rng.normal(size=(2, 5, 4))
    values[rng.uniform(size=(2, 5, 4)) < 0.4] = np.nan
    values[:, :, 0] = 0.7  # a mean of something
    for y, a, found, slope in zip(values, [0.3, 0.8], *f(values, [0.3, 0.8]), strict=True):
        np.testing.assert_allclose(found, plain(y, a))
        (known,) = central_gradient(lambda a: plain(y, a), [a])  # noqa: B023
        np.testing.assert_allclose(slope, known, rtol=1e-6, atol=1e-9)


def test_functions_that_need_not_be_finite_where_nothing_is_selected():
    """Their slope there, times zero, would be no number."""
    y, seen = pt.dvector("y"), pt.vector("seen", dtype="bool")
    for function, is_finite in ((pt.log, True), (pt.arccosh, False), (pt.log1mexp, False)):
        total = function(2.0 * y[seen]).sum().owner
        assert (COMPOSITES[type(total.op)](total) is not None) is is_finite


def test_rows_that_a_mask_selects():
    A, B, rows = pt.dmatrix("A"), pt.fmatrix("B"), pt.vector("rows", dtype="bool")
    made = [A[rows].set(B[rows]), A[A > 0].inc(2 * B[A > 0] - 1), B[rows].set(B[rows] + B[rows])]
    made.append(A[rows].set(pt.fill(B[rows], 3.0)))  # as gradients have it
    f = pytensor.function([A, B, rows], [written(y) for y in made], mode="FAST_COMPILE")
    a, b, some = rng.normal(size=(2, 3)), rng.normal(size=(2, 3)).astype("float32"), [True, False]
    expected = [a.copy(), a.copy(), b.copy(), a.copy()]
    expected[0][some] = b[some]
    expected[1][a > 0] += 2 * b[a > 0] - 1
    expected[2][some] *= 2
    expected[3][some] = 3
    for one, other in zip(f(a, b, some), expected, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=r"(?i)shape|broadcast"):
        f(a, b[:1], some)


TYPES = [("float32", "float64"), ("float64", "float32"), ("int32", "float32"), ("bool", "float64")]


# Of an array, a number, a row and a place: the two arrays of which one is chosen.
CHOICES = {
    "set": lambda h, x, row, k: (h[k].set(row), h),
    "kept": lambda h, x, row, k: (h, h[k, 1].set(x)),
    "added": lambda h, x, row, k: (h[:, k].inc(x), h),
    "both": lambda h, x, row, k: (h[k].set(row), h[k - 1].inc(2 * row)),
    "several": lambda h, x, row, k: (h[k].set(row)[0].inc(x), h[0].set(row)[:, k].set(x)),
    "after_one": lambda h, x, row, k: (h[0].set(x)[k].set(row), h[0].set(x)),
    "read": lambda h, x, row, k: ((new := h[k].set(row))[0].set(new[k] + x), h),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_of_what_is_written(name):
    """Arrays of which a step chooses one stay where they are, where they differ in few items."""
    h, x, row, k = pt.dmatrix("h"), pt.dscalar("x"), pt.dvector("row"), pt.lscalar("k")

    def step(x, row, k, h):
        return pt.switch(x > 0, *CHOICES[name](h, x, row, k))

    values = [rng.normal(size=4), rng.normal(size=(4, 3)), rng.integers(-3, 3, 4)]
    start = rng.normal(size=(3, 3))
    inputs = [pt.dvector("x"), pt.dmatrix("rows"), pt.lvector("k")]
    given = dict(zip([*inputs, h], [*values, start], strict=True))
    trace = scanlib.scan(step, inputs, h, return_updates=False)
    choices = pytensor.function(
        [x, row, k, h],
        list(CHOICES[name](h, x, row, k)),
        mode="FAST_COMPILE",
        on_unused_input="ignore",
    )

    def reference(xs, rows, places, array):
        found = []
        for item, own, place in zip(xs, rows, places, strict=True):
            array = choices(item, own, place, array)[0 if item > 0 else 1]
            found.append(array)
        return np.array(found)

    f = pytensor.function(list(given), trace)
    np.testing.assert_allclose(f(*given.values()), reference(*given.values()))
    last = pytensor.function(list(given), trace[-1])
    (loop,) = (node for node in last.maker.fgraph.toposort() if isinstance(node.op, Scan))
    assert not any(
        applies(node, Switch) and node.outputs[0].ndim == 2 for node in loop.op.body.toposort()
    )
    np.testing.assert_allclose(last(*given.values()), reference(*given.values())[-1])
    cost = pt.sin(trace).sum()
    changed = [inputs[0], inputs[1], h]
    gradients = pytensor.grad(cost, changed, disconnected_inputs="ignore")
    gradient = pytensor.function(list(given), gradients)
    wanted = central_gradient(
        lambda *new: np.sin(
            reference(*(given | dict(zip(changed, new, strict=True))).values())
        ).sum(),
        [given[variable] for variable in changed],
    )
    for own, other in zip(gradient(*given.values()), wanted, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-6, atol=1e-8)


def test_choices_of_each_item_stay():
    h, c = pt.dmatrix("h"), pt.vector("c", dtype="bool")
    assert not composites([pt.switch(c, h[0].set(1.0), h)])
    assert not composites([pt.switch(c[0], h[0].set(1.0), 2 * h)])


@pytest.mark.parametrize("dtypes", [*TYPES, ("float64", "complex128")])
@pytest.mark.parametrize(
    "multiply",
    [
        pt.dot,
        lambda a, b: pt.matmul(a[None], b[None, :, None])[0, :, 0],
        lambda a, b: pt.einsum("ij,j->i", a, b),
        lambda a, b: pt.linalg.solve(a + 3 * pt.eye(3, dtype=a.dtype), b, b_ndim=1),
        lambda a, b: pt.linalg.solve_triangular(a + pt.eye(3, dtype=a.dtype), b, b_ndim=1),
    ],
)
def test_products_and_solves_are_of_one_dtype(multiply, dtypes):
    a, b = pt.matrix("a", dtype=dtypes[0]), pt.vector("b", dtype=dtypes[1])
    if dtypes[1] == "complex128" and "solve" in str(multiply(a, pt.dvector()).owner):
        pytest.skip("PyTensor solves no complex systems")
    product = multiply(a, b)
    (made,) = substitute([product], composites([product]))
    kinds = (Dot, BatchedDot, Solve, SolveTriangular)
    nodes = [v.owner for v in ancestors([made]) if v.owner]
    found = [node for node in nodes if isinstance(getattr(node.op, "core_op", node.op), kinds)]
    assert found
    for node in found:
        assert len({v.type.dtype for v in (*node.inputs, *node.outputs)}) == 1
    values = (
        rng.integers(0, 2, size=(3, 3)).astype(dtypes[0]),
        rng.normal(size=3).astype(dtypes[1]),
    )
    f, g = (pytensor.function([a, b], out, mode="FAST_COMPILE") for out in (product, made))
    assert made.type.dtype == product.type.dtype
    np.testing.assert_allclose(g(*values), f(*values), rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_of_products_by_indices_are_matrix_recurrences(dtype):
    """So are their derivatives, and products of a matrix in single precision."""
    A, x, h = pt.matrix("A", dtype=dtype), pt.dmatrix("x"), pt.dvector("h")
    trace = scanlib.scan(
        lambda x, h, A: pt.einsum("ij,j->i", A, h) + x,
        sequences=[x],
        outputs_info=[h],
        non_sequences=[A],
        return_updates=False,
    )
    f = pytensor.function([A, x, h], [trace, pytensor.grad(trace.sum(), h)])
    ops = [node.op for node in f.maker.fgraph.apply_nodes]
    assert sum(isinstance(op, LinearScan) for op in ops) == 2
    assert not any(isinstance(op, Scan) for op in ops)
    matrix, rows = (rng.normal(size=(3, 3)) / 2).astype(dtype), rng.normal(size=(4, 3))
    state, expected = np.ones(3), []
    for row in rows:
        state = matrix.astype("float64") @ state + row
        expected.append(state)
    found, derivative = f(matrix, rows, np.ones(3))
    np.testing.assert_allclose(found, expected)
    powers = [np.linalg.matrix_power(matrix.astype("float64"), k) for k in range(1, 5)]
    np.testing.assert_allclose(derivative, sum(powers).sum(axis=0))


def test_what_no_step_changes_of_a_sum_of_products_is_computed_once():
    """Its array of three axes is a matrix for all steps, whose gradient is one product."""
    x, h, T = pt.dmatrix("x"), pt.dvector("h"), pt.dtensor3("T")
    trace = scanlib.scan(
        lambda x, h: pt.tanh(pt.einsum("i,j,ijk->k", x, h, T)),
        sequences=[x],
        outputs_info=[h],
        return_updates=False,
    )
    f = pytensor.function([x, h, T], [trace, pytensor.grad(trace.sum(), T)])
    for node in f.maker.fgraph.apply_nodes:
        if isinstance(node.op, Scan):
            assert all(v.type.ndim < 3 for v in node.inputs)
    values = rng.normal(size=(4, 2)), rng.normal(size=3), rng.normal(size=(2, 3, 3))

    def in_numpy(array):
        state, rows = values[1], []
        for row in values[0]:
            state = np.tanh(np.einsum("i,j,ijk->k", row, state, array))
            rows.append(state)
        return np.array(rows)

    found, derivative = f(*values)
    np.testing.assert_allclose(found, in_numpy(values[2]))
    (wanted,) = central_gradient(lambda array: in_numpy(array).sum(), [values[2]])
    np.testing.assert_allclose(derivative, wanted, atol=1e-6)


def test_graphs_of_a_user_are_seen_through():
    u, v = pt.dscalars("u", "v")
    mine = OpFromGraph([u, v], [u * v + 1])
    x, h = pt.dvector("x"), pt.dscalar("h")
    trace = scanlib.scan(mine, sequences=[x], outputs_info=[h], return_updates=False)
    f = pytensor.function([x, h], [trace, *pytensor.grad(trace.sum(), [x, h])])
    assert not any(isinstance(node.op, Scan) for node in f.maker.fgraph.apply_nodes)
    value, start = rng.normal(size=3), 0.5
    first, second = value[0] * start + 1, value[1] * (value[0] * start + 1) + 1
    found, by_x, by_h = f(value, start)
    np.testing.assert_allclose(found, [first, second, value[2] * second + 1])
    tail = 1 + value[2]
    np.testing.assert_allclose(by_x, [start * (1 + value[1] * tail), first * tail, second])
    np.testing.assert_allclose(by_h, value[0] * (1 + value[1] * tail))


def test_a_derivative_that_a_user_wrote_is_kept():
    u, v = pt.dscalars("u", "v")
    mine = OpFromGraph(
        [u, v], [u * v], lop_overrides=lambda inputs, outputs, given: [given[0] * 7, given[0] * 0]
    )
    x, h = pt.dvector("x"), pt.dscalar("h")
    trace = scanlib.scan(mine, sequences=[x], outputs_info=[h], return_updates=False)
    f = pytensor.function([x, h], pytensor.grad(trace.sum(), x))
    np.testing.assert_allclose(f(rng.normal(size=3), 1.0), [7, 7, 7])


def test_loops_hold_the_graphs():
    """So do their derivatives, which would hold loops of `pytensor.scan` otherwise."""
    x = pt.dmatrix("x")
    y = scanlib.scan(
        lambda x, h: pt.pad(pt.pad(h, 1, mode="wrap"), 1, mode="reflect")[2:-2] * x,
        x,
        pt.ones(4),
        return_updates=False,
    )
    (scan,) = [v.owner.op for v in ancestors([y]) if v.owner and isinstance(v.owner.op, Scan)]
    assert not any(type(node.op) in REPLACED for node in scan.fgraph.apply_nodes)


def test_adopted_loops_are_kernels():
    x, h = pt.dtensor3("x"), pt.dmatrix("h")

    def step(x, h):
        edges = pt.pad(h, 1, mode="edge")[2:, 2:]
        return pt.fill_diagonal(edges * x, 0.5) + pt.linalg.block_diag(h[:2, :2], x[2:, 2:])

    values = rng.normal(size=(5, 4, 4)), np.ones((4, 4))
    with scanlib.enabled():
        adopted = pytensor.scan(step, x, h, return_updates=False)
        f = pytensor.function([x, h], adopted, mode="NUMBA")
    assert "kernel" in scanlib.explain(f).loops[0].runs
    plain = scanlib.scan(step, x, h, return_updates=False)
    with pytensor.config.change_flags(scanlib__perform="python"):
        expected = pytensor.function([x, h], plain, mode="FAST_COMPILE")(*values)
    np.testing.assert_allclose(f(*values), expected)
