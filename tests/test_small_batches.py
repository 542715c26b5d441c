"""Batches of factorizations and solves around loops, and in their steps, against NumPy."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.builders import OpFromGraph
from pytensor.compile.mode import get_mode
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.blockwise import Blockwise, BlockwiseWithCoreShape
from pytensor.tensor.linalg.decomposition.lu import lu_factor, pivot_to_permutation
from pytensor.tensor.linalg.solvers.general import Solve
from pytensor.tensor.linalg.solvers.psd import CholeskySolve
from pytensor.tensor.linalg.solvers.triangular import SolveTriangular
from scipy import linalg

import scanlib
from scanlib.backends.numba.small_batches import batch_function
from scanlib.backends.numba.small_linalg import LARGE
from scanlib.ops.scan import Scan

SIZE = 4


def _with_loop(inputs, outputs):
    """Compile a graph beside a loop, which makes it a graph that scanlib compiles."""
    loop = scanlib.scan(
        lambda x, h: pt.tanh(h) + x,
        sequences=inputs[0].flatten(),
        outputs_info=np.float64(0.0),
        return_updates=False,
    )
    return pytensor.function(inputs, [*outputs, loop], mode="NUMBA")


def _batches(function):
    nodes = function.maker.fgraph.apply_nodes
    return [node for node in nodes if isinstance(node.op, BlockwiseWithCoreShape)]


def _permuted(a):
    factors, pivots = lu_factor(a)
    return factors, *(pivot_to_permutation(pivots, inverse=flag) for flag in (True, False))


OPERATIONS = {
    "lower": (lambda a, b, v: pt.linalg.cholesky(a), lambda a, b, v: np.linalg.cholesky(a)),
    "upper": (
        lambda a, b, v: pt.linalg.cholesky(a, lower=False),
        lambda a, b, v: np.linalg.cholesky(a).T,
    ),
    "inverse": (lambda a, b, v: pt.linalg.inv(a + b), lambda a, b, v: np.linalg.inv(a + b)),
    "general": (
        lambda a, b, v: Solve(b_ndim=2)(a + 5 * b, b),
        lambda a, b, v: np.linalg.solve(a + 5 * b, b),
    ),
    "one right-hand side": (
        lambda a, b, v: Solve(b_ndim=1)(a + 5 * b, v),
        lambda a, b, v: np.linalg.solve(a + 5 * b, v),
    ),
    "positive": (
        lambda a, b, v: Solve(b_ndim=2, assume_a="pos")(a, b),
        lambda a, b, v: np.linalg.solve(a, b),
    ),
    "by a factor": (
        lambda a, b, v: CholeskySolve(b_ndim=1, lower=True)(pt.linalg.cholesky(a), v),
        lambda a, b, v: np.linalg.solve(a, v),
    ),
    "triangular": (
        lambda a, b, v: SolveTriangular(b_ndim=2, lower=False)(a, b),
        lambda a, b, v: linalg.solve_triangular(a, b),
    ),
    "unit diagonal": (
        lambda a, b, v: SolveTriangular(b_ndim=1, lower=True, unit_diagonal=True)(a, v),
        lambda a, b, v: linalg.solve_triangular(a, v, lower=True, unit_diagonal=True),
    ),
}


@pytest.fixture(scope="module")
def several():
    """One function of all operations: a batch of 3 with one of (2, 3) and with single vectors."""
    core = [pt.dmatrix("a"), pt.dmatrix("b"), pt.dvector("v")]
    given = [
        pt.tensor("A", shape=(None, None, None)),
        pt.tensor("B", shape=(None, None, None, None)),
        pt.tensor("V", shape=(None, 1, None)),
    ]
    outputs = [make(*core) for make, _ in OPERATIONS.values()]
    outputs += _permuted(core[0] + 5 * core[1])
    function = _with_loop(given, vectorize_graph(outputs, dict(zip(core, given, strict=True))))
    rng = np.random.default_rng(4)
    a = rng.normal(size=(3, SIZE, SIZE))
    a = a @ a.transpose(0, 2, 1) + np.eye(SIZE)
    data = [a, rng.normal(size=(2, 3, SIZE, SIZE)), rng.normal(size=(2, 1, SIZE))]
    return function, data


def _at(data, i, j):
    a, b, v = data
    return a[j], b[i, j], v[i, 0]


@pytest.mark.slow
def test_each_place_of_a_batch_is_what_numpy_says(several):
    function, data = several
    results = function(*data)
    for name, result in zip(OPERATIONS, results, strict=False):
        expected = OPERATIONS[name][1]
        for i, j in np.ndindex(2, 3):
            value = np.asarray(expected(*_at(data, i, j)))
            whole = np.broadcast_to(result, (2, 3, *result.shape[result.ndim - value.ndim :]))
            np.testing.assert_allclose(whole[i, j], value, rtol=1e-9, atol=1e-11, err_msg=name)


@pytest.mark.slow
def test_factors_and_permutations_of_a_batch(several):
    function, data = several
    factors, inverse, order = function(*data)[len(OPERATIONS) : len(OPERATIONS) + 3]
    for place in np.ndindex(2, 3):
        a, b, _ = _at(data, *place)
        expected, pivots = linalg.lu_factor(a + 5 * b)
        np.testing.assert_allclose(factors[place], expected, rtol=1e-10, atol=1e-12)
        rows = np.arange(SIZE)
        for i, other in enumerate(pivots):
            rows[[i, other]] = rows[[other, i]]
        np.testing.assert_array_equal(inverse[place], rows)
        np.testing.assert_array_equal(order[place], np.argsort(rows))


def test_no_batch_is_left_to_pytensor(several):
    function, _ = several
    nodes = _batches(function)
    assert len(nodes) >= len(OPERATIONS)
    assert [str(node) for node in nodes if batch_function(node.op, node) is None] == []


def test_failures_are_those_of_single_matrices(several):
    """A matrix that has no factor gives NaN where it stands, and an inverse raises."""
    function, data = several
    a, b, v = (value.copy() for value in data)
    a[1] = -np.eye(SIZE)
    results = dict(zip(OPERATIONS, function(a, b, v), strict=False))
    for name in ("lower", "upper", "positive", "by a factor"):
        result = results[name]
        assert np.isnan(result[..., 1, :] if name == "by a factor" else result[..., 1, :, :]).all()
        assert np.isfinite(np.delete(result, 1, axis=-2 if name == "by a factor" else -3)).all()
    a[1] = -b[0, 1]
    with pytest.raises(np.linalg.LinAlgError):
        function(a, b, v)


@pytest.mark.slow
def test_two_solves_with_one_matrix_in_the_steps_of_a_batch():
    """PyTensor factors the matrix once, and permutes the rows of both right-hand sides."""
    b, m = pt.dvector("b"), pt.dmatrix("m")
    start = pt.zeros(3)

    def step(z, b, m):
        slope = pt.eye(3) + m * (1 - pt.tanh(z) ** 2)
        return z - pt.linalg.solve(slope, m @ pt.tanh(z) + z - b)

    z = scanlib.scan(
        step, outputs_info=start, non_sequences=[b, m], n_steps=3, return_updates=False
    )
    cost = pt.sum(z[-1] ** 2)
    batch = pt.dmatrix("batch")
    found = vectorize_graph([cost, pytensor.grad(cost, b)], {b: batch})
    rng = np.random.default_rng(8)
    data, matrix = rng.normal(size=(4, 3)), 0.3 * rng.normal(size=(3, 3))
    values, slopes = pytensor.function([batch, m], found, mode="NUMBA")(data, matrix)

    def plain(b):
        z = np.zeros(3)
        for _ in range(3):
            slope = np.eye(3) + matrix * (1 - np.tanh(z) ** 2)
            z = z - np.linalg.solve(slope, matrix @ np.tanh(z) + z - b)
        return np.sum(z**2)

    np.testing.assert_allclose(values, [plain(row) for row in data], rtol=1e-12)
    moves = 1e-6 * np.eye(3)
    steep = [[(plain(row + d) - plain(row - d)) / 2e-6 for d in moves] for row in data]
    np.testing.assert_allclose(slopes, steep, rtol=1e-6, atol=1e-8)


@pytest.fixture(scope="module")
def solves():
    """A batch of systems, and a batch of right-hand sides."""
    a, b = pt.dmatrix("a"), pt.dvector("b")
    batch = pt.tensor("batch", shape=(None, None, None))
    rows = pt.dmatrix("rows")
    found = vectorize_graph([Solve(b_ndim=1)(a, b)], {a: batch, b: rows})
    return _with_loop([rows, batch], found)


def test_batches_of_different_sizes_raise(solves):
    rng = np.random.default_rng(3)
    with pytest.raises(ValueError, match="sizes of the batches"):
        solves(rng.normal(size=(2, 3)), rng.normal(size=(4, 3, 3)))
    with pytest.raises(np.linalg.LinAlgError, match="do not conform"):
        solves(rng.normal(size=(4, 2)), rng.normal(size=(4, 3, 3)))
    assert solves(np.ones((0, 3)), np.ones((0, 3, 3)))[0].shape == (0, 3)


@pytest.mark.slow
def test_large_matrices_go_to_pytensors_function(solves):
    rng = np.random.default_rng(2)
    for size in (3, LARGE + 1):
        data, right = rng.normal(size=(2, size, size)), rng.normal(size=(2, size))
        expected = [np.linalg.solve(one, row) for one, row in zip(data, right, strict=True)]
        np.testing.assert_allclose(solves(right, data)[0], expected, rtol=1e-7, atol=1e-9)


@pytest.mark.slow
def test_gradients_of_diagonal_matrices_hold_no_graphs():
    """Around a loop, and in its step; both are read and written at places of one vector."""
    q, x, m = pt.dvector("q"), pt.dmatrix("x"), pt.dmatrix("m")

    def step(row, h, q, whole):
        spread = whole + pt.diag(pt.exp(q) * row)
        return pt.tanh(spread @ spread.T @ h + row)

    start = pt.ones(3)
    whole = m @ pt.diag(pt.exp(q)) @ m.T
    h = scanlib.scan(
        step, sequences=x, outputs_info=start, non_sequences=[q, whole], return_updates=False
    )
    cost = pt.sum(h**2)
    function = pytensor.function([q, x, m], [cost, pytensor.grad(cost, q)], mode="NUMBA")
    graphs = [function.maker.fgraph]
    for graph in graphs:
        for node in graph.apply_nodes:
            assert type(node.op) is not OpFromGraph
            graphs += [node.op.body] if isinstance(node.op, Scan) else []

    def plain(q, x):
        h, total = np.ones(3), 0.0
        for row in x:
            spread = factor @ np.diag(np.exp(q)) @ factor.T + np.diag(np.exp(q) * row)
            h = np.tanh(spread @ spread.T @ h + row)
            total += np.sum(h**2)
        return total

    rng = np.random.default_rng(6)
    q_value, x_value = rng.normal(size=3), rng.normal(size=(5, 3))
    factor = 0.3 * rng.normal(size=(3, 3))
    value, slope = function(q_value, x_value, factor)
    np.testing.assert_allclose(value, plain(q_value, x_value), rtol=1e-12)
    steep = [
        (plain(q_value + d, x_value) - plain(q_value - d, x_value)) / 2e-6 for d in 1e-6 * np.eye(3)
    ]
    np.testing.assert_allclose(slope, steep, rtol=1e-6, atol=1e-8)


def test_batches_whose_shapes_pytensor_does_not_infer():
    a, b = pt.tensor3("a"), pt.tensor3("b")
    x = pt.dvector("x")
    loop = scanlib.scan(
        lambda x, h: pt.tanh(h) + x,
        sequences=x,
        outputs_info=np.float64(0.0),
        return_updates=False,
    )
    solved = Blockwise(SolveTriangular(b_ndim=2, lower=True))(a, b)
    mode = get_mode("NUMBA").excluding("introduce_explicit_core_shape_blockwise")
    function = pytensor.function([a, b, x], [solved, loop], mode=mode)
    nodes = [n for n in function.maker.fgraph.apply_nodes if isinstance(n.op, Blockwise)]
    assert nodes
    assert all(batch_function(node.op, node) is not None for node in nodes)
    rng = np.random.default_rng(5)
    matrices, right = (
        np.tril(rng.normal(size=(2, 3, 3))) + 3 * np.eye(3),
        rng.normal(size=(2, 3, 2)),
    )
    result, _ = function(matrices, right, np.ones(4))
    np.testing.assert_allclose(result, np.linalg.solve(matrices, right), rtol=1e-12)
