"""Sizes of a step's arrays, as expressions."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.handler.programs import program_of
from scanlib.kernels.arrays.sizes import Check, Given, Sizes, combined, product, total
from scanlib.ops.execution import LoopOp


def deep(first):
    """Return an expression whose text would have 3^190 words."""
    size = first
    for _ in range(190):
        size = combined("max", total(size, 1), product(size, size))
    return size


def test_expressions_that_share_their_parts():
    n, m = Given("dim", "n"), Given("dim", "m")
    large, other = deep(n), deep(m)
    assert total(large, other, 2) == total(2, other, large)
    assert hash(total(large, other)) == hash(total(other, large))
    sizes = Sizes()
    assert sizes.require(Check("ne", (large, m), "ValueError", "")) == m
    assert sizes.same(product(large, 3)) == product(m, 3)
    assert sizes.require(Check("ne", (other, m), "ValueError", "")) == m
    assert len(sizes.checks) == 2


def test_sizes_by_vectors_of_integers(fast_mode):
    start, widths = pt.dmatrix("start"), pt.lvector("widths")

    def step(h, widths):
        widths = pt.specify_shape(widths, (2,))
        rows = (widths // h.shape[0]).sum() + (h.shape < widths).any()
        return pt.tanh(pt.cumsum(pt.full((rows,), h.sum())).sum() + h)

    h = scanlib.scan(step, None, start, [widths], n_steps=3, return_updates=False)
    f = pytensor.function([start, widths], h, mode=fast_mode)
    (node,) = (node for node in f.maker.fgraph.toposort() if isinstance(node.op, LoopOp))
    program = program_of(node.op, node)
    assert program is not None
    assert not program.may_be_unfit
    state = np.random.default_rng(3).normal(size=(3, 4))
    for given in ([7, 2], [3, 3], [1, 5]):
        rows = sum(k // 3 for k in given) + any(np.array(state.shape) < given)
        found, expected = f(state, given), state
        for row in found:
            expected = np.tanh(expected.sum() * rows * (rows + 1) / 2 + expected)
            np.testing.assert_allclose(row, expected)


def test_reshapes_to_a_size_that_is_given_as_minus_one():
    start, size = pt.dmatrix("start"), pt.iscalar("size")

    def step(h, size):
        return pt.tanh(h + h.reshape((size, 3)).sum(axis=0).sum())

    h = scanlib.scan(step, None, start, [size], n_steps=1, return_updates=False)
    values = np.arange(24.0).reshape(4, 6) / 100
    for mode in ("NUMBA", "FAST_COMPILE"):
        f = pytensor.function([start, size], h, mode=mode)
        for given in (-1, 8):
            np.testing.assert_allclose(f(values, given)[0], np.tanh(values + values.sum()))
        with pytest.raises(ValueError, match=r"shape|size"):
            f(values, 7)
