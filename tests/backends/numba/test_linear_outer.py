"""Products of the states of a matrix recurrence with other rows, computed with its steps."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.handler.clusters import Cluster, Plan
from scanlib.backends.numba import graph_function
from scanlib.ops.row_ops.checked_rows import CheckedRows
from tests.modes import MODES

rng = np.random.default_rng(8)


@pytest.fixture
def fused(monkeypatch):
    """The places of the states in the products that were computed with the steps."""
    found = []

    def write(op, node, outer=""):
        found.append(outer)
        return linear_program(op, node, outer)

    linear_program = graph_function.linear_program
    monkeypatch.setattr(graph_function, "linear_program", write)
    return found


def recurrence(A, b, start, reverse=False):
    return scanlib.linear_scan(A, b, init=start, matrix=True, reverse=reverse)


def values(steps, size, dtype="float64"):
    A = rng.normal(size=(steps, size, size)) / np.sqrt(size)
    arrays = A, rng.normal(size=(steps, size)), rng.normal(size=size)
    return [array.astype(dtype) for array in arrays]


def reference(A, b, start, reverse=False):
    states, state = np.zeros(b.shape), start
    for t in reversed(range(len(b))) if reverse else range(len(b)):
        state = states[t] = A[t] @ state + b[t]
    return states


def expected_gradients(A, b, start, g, reverse=False):
    """The derivatives by `A` and `b`, step by step."""
    steps = len(b)
    states = reference(A, b, start, reverse)
    d_A, d_b, owed = np.zeros(A.shape), np.zeros(b.shape), np.zeros(start.shape)
    order = range(steps) if reverse else reversed(range(steps))
    for t in order:
        before = t + 1 if reverse else t - 1
        owed = d_b[t] = owed + g[t]
        d_A[t] = np.outer(owed, states[before] if 0 <= before < steps else start)
        owed = A[t].T @ owed
    return d_A, d_b


def gradient_function(size=None, reverse=False, dtype="float64"):
    A = pt.tensor("A", dtype=dtype, shape=(None, size, size))
    b = pt.tensor("b", dtype=dtype, shape=(None, size))
    g = pt.tensor("g", dtype=dtype, shape=(None, size))
    start = pt.tensor("start", dtype=dtype, shape=(size,))
    h = recurrence(A, b, start, reverse)
    derivatives = pytensor.grad(None, [A, b], known_grads={h: g})
    return pytensor.function([A, b, start, g], [h, *derivatives], mode=MODES["numba"])


@pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
def test_gradient_of_any_size(fused, reverse):
    """Code is there for sizes two to four; what remains is computed one after the other."""
    function = gradient_function(reverse=reverse)
    assert any(fused)
    for size in (1, 2, 3, 4, 5, 9):
        for steps in (0, 1, 2, 3, 17, 64, 65):
            A, b, start = values(steps, size)
            g = rng.normal(size=b.shape)
            h, d_A, d_b = function(A, b, start, g)
            np.testing.assert_allclose(h, reference(A, b, start, reverse), atol=1e-11)
            for mine, other in zip(
                (d_A, d_b), expected_gradients(A, b, start, g, reverse), strict=True
            ):
                np.testing.assert_allclose(mine, other, atol=1e-11)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("size", [2, 6, 8])
def test_gradient_of_a_known_size(fused, size, dtype):
    function = gradient_function(size, dtype=dtype)
    assert any(fused)
    A, b, start = values(31, size, dtype)
    g = rng.normal(size=b.shape).astype(dtype)
    results = function(A, b, start, g)
    assert all(result.dtype == dtype for result in results)
    tolerance = 1e-11 if dtype == "float64" else 1e-4
    for mine, other in zip(results[1:], expected_gradients(A, b, start, g), strict=True):
        np.testing.assert_allclose(mine, other, atol=tolerance * np.abs(other).max())
    again = function(A, b, start, g)
    for mine, other in zip(results, again, strict=True):
        assert mine.tobytes() == other.tobytes()


def test_gradient_of_rows_that_are_checked(fused):
    """The lengths of all sequences, and of what is owed to the states, may differ; rows that are
    checked are views, which a cluster would copy."""
    A, b, start, g = pt.dtensor3("A"), pt.dmatrix("b"), pt.dvector("start"), pt.dmatrix("g")
    h, _ = scanlib.scan(lambda A, b, h: A @ h + b, [A, b], [start])
    outputs = [h, *pytensor.grad(None, [A, b], known_grads={h: g})]
    function = pytensor.function([A, b, start, g], outputs, mode=MODES["numba"])
    assert any(fused)
    kinds = [type(node.op) for node in function.maker.fgraph.apply_nodes]
    assert CheckedRows in kinds
    clusters = [own for own in Plan(function.maker.fgraph).order() if isinstance(own, Cluster)]
    inside = [type(node.op) for own in clusters for node in own.body.apply_nodes]
    assert CheckedRows not in inside
    arrays = values(12, 5)
    owed = rng.normal(size=(12, 5))
    wanted = reference(*arrays), *expected_gradients(*arrays, owed)
    for mine, other in zip(function(*arrays, owed), wanted, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-11)


@pytest.mark.parametrize("states_first", [True, False])
def test_products_with_rows_of_another_width(fused, states_first):
    A, b, start, x = pt.dtensor3("A"), pt.dmatrix("b"), pt.dvector("start"), pt.dmatrix("x")
    history = recurrence(A, b, start).owner.inputs[0]
    if states_first:
        products = history[:, :, None] * x[:, None, :]
    else:
        products = x[:, :, None] * history[:, None, :]
    function = pytensor.function([A, b, start, x], products, mode=MODES["numba"])
    assert fused == ["after" if states_first else "before"]
    for size, width in ((2, 2), (4, 4), (4, 3), (3, 0), (5, 5), (5, 2)):
        for steps in (0, 1, 12):
            arrays = values(steps, size)
            rows = np.vstack([arrays[2], reference(*arrays)])
            factors = rng.normal(size=(steps + 1, width))
            spec = "ti,tj->tij" if states_first else "tj,ti->tij"
            expected = np.einsum(spec, rows, factors)
            result = function(*arrays, factors)
            np.testing.assert_allclose(result, expected, atol=1e-11)
            strided = np.repeat(factors, 2, axis=1)[:, ::2]
            np.testing.assert_array_equal(function(*arrays, strided), result)


def test_rows_that_differ_in_number_are_an_error(fused):
    A, b, start, x = pt.dtensor3("A"), pt.dmatrix("b"), pt.dvector("start"), pt.dmatrix("x")
    history = recurrence(A, b, start).owner.inputs[0]
    products = history[:, :, None] * x[:, None, :]
    function = pytensor.function([A, b, start, x], products, mode=MODES["numba"])
    assert any(fused)
    arrays = values(5, 4)
    for rows in (0, 1, 5, 7):
        with pytest.raises(ValueError, match="incompatible shape in axis 0"):
            function(*arrays, np.ones((rows, 4)))


def test_two_recurrences_of_one_product(fused):
    """The product belongs to one of them, and the other is computed before."""
    A, b, start = pt.dtensor3("A"), pt.dmatrix("b"), pt.dvector("start")
    first = recurrence(A, b, start).owner.inputs[0]
    second = recurrence(A.mT, b + 1, start).owner.inputs[0]
    products = first[:, :, None] * second[:, None, :]
    function = pytensor.function([A, b, start], [products, first], mode=MODES["numba"])
    assert len(fused) == 1
    A, b, start = values(9, 3)
    one = np.vstack([start, reference(A, b, start)])
    other = np.vstack([start, reference(A.transpose(0, 2, 1), b + 1, start)])
    result, history = function(A, b, start)
    np.testing.assert_allclose(history, one, atol=1e-12)
    np.testing.assert_allclose(result, one[:, :, None] * other[:, None, :], atol=1e-12)


def test_recurrences_whose_products_read_one_another(fused):
    """Only one of them can come first."""
    A, b, start = pt.dtensor3("A"), pt.dmatrix("b"), pt.dvector("start")
    first = recurrence(A, b, start).owner.inputs[0]
    second = recurrence(A.mT, b + 1, start).owner.inputs[0]
    third = recurrence(A * 0.5, b - 1, start).owner.inputs[0]
    rows = (first, second, third)
    factors = (second[::-1], first[::-1], second[::-1])
    products = [h[:, :, None] * x[:, None, :] for h, x in zip(rows, factors, strict=True)]
    function = pytensor.function([A, b, start], products, mode=MODES["numba"])
    assert any(fused)
    A, b, start = values(9, 3)
    one = np.vstack([start, reference(A, b, start)])
    two = np.vstack([start, reference(A.transpose(0, 2, 1), b + 1, start)])
    three = np.vstack([start, reference(A * 0.5, b - 1, start)])
    factors = (two[::-1], one[::-1], two[::-1])
    for result, h, x in zip(function(A, b, start), (one, two, three), factors, strict=True):
        np.testing.assert_allclose(result, h[:, :, None] * x[:, None, :], atol=1e-12)


def test_sums_of_products_are_not_stored(fused):
    A, b, start, x = pt.dtensor3("A"), pt.dmatrix("b"), pt.dvector("start"), pt.dmatrix("x")
    history = recurrence(A, b, start).owner.inputs[0]
    total = (history[:, :, None] * x[:, None, :]).max(axis=0)
    function = pytensor.function([A, b, start, x], total, mode=MODES["numba"])
    assert not fused
    arrays, factors = values(6, 2), rng.normal(size=(7, 2))
    rows = np.vstack([arrays[2], reference(*arrays)])
    expected = (rows[:, :, None] * factors[:, None, :]).max(axis=0)
    np.testing.assert_allclose(function(*arrays, factors), expected, atol=1e-12)


def test_rows_that_depend_on_the_states(fused):
    """These cannot be there before the steps."""
    A, b, start = pt.dtensor3("A"), pt.dmatrix("b"), pt.dvector("start")
    history = recurrence(A, b, start).owner.inputs[0]
    products = history[:, :, None] * pt.exp(-history)[:, None, :]
    function = pytensor.function([A, b, start], products, mode=MODES["numba"])
    assert not fused
    arrays = values(6, 2)
    rows = np.vstack([arrays[2], reference(*arrays)])
    expected = rows[:, :, None] * np.exp(-rows)[:, None, :]
    np.testing.assert_allclose(function(*arrays), expected, atol=1e-12)


def test_second_derivatives():
    A, b, start = pt.dtensor3("A"), pt.dmatrix("b"), pt.dvector("start")
    v = pt.dtensor3("v")
    cost = (recurrence(A, b, start) ** 3).sum()
    along = (pytensor.grad(cost, A) * v).sum()
    inputs = [A, b, start, v]
    second = pytensor.function(inputs, pytensor.grad(along, A), mode=MODES["numba"])
    first = pytensor.function([A, b, start], pytensor.grad(cost, A), mode=MODES["numba"])
    A, b, start = values(7, 3)
    v, e = rng.normal(size=A.shape), 1e-6
    expected = (first(A + e * v, b, start) - first(A - e * v, b, start)) / (2 * e)
    np.testing.assert_allclose(second(A, b, start, v), expected, rtol=1e-5, atol=1e-5)
