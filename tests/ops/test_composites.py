"""Ops that are written as graphs of others, against NumPy and SciPy."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import ancestors
from scipy.linalg import block_diag

import scanlib
from scanlib.ops.composites import COMPOSITES, composites
from scanlib.ops.scan import Scan

rng = np.random.default_rng(4)


def written(value):
    """Return a value by the graphs of others, and hold that they are all there is."""
    made = composites([value])[value]
    assert not any(type(v.owner.op) in COMPOSITES for v in ancestors([made]) if v.owner)
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
    several = x[rows].set(x[:2])  # stays as it is
    assert not composites([several])


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
    assert not any(type(node.op) in COMPOSITES for node in scan.fgraph.apply_nodes)


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
