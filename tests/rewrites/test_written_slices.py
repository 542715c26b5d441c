"""Slices of a step's product, as the gates of a network: what a gradient writes into zeros."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.tensor.basic import Join
from pytensor.tensor.subtensor import IncSubtensor

import scanlib
from scanlib.ops.scan import Scan
from tests.checks import assert_derivatives

rng = np.random.default_rng(5)
rows, start, W = pt.dmatrix("rows"), pt.dmatrix("start"), pt.dmatrix("W")


def gates(ends):
    """Return the trace of a loop whose step reads slices of a product, up to some places."""

    def step(row, h, W):
        joined = h @ W
        own = [joined[:, a:b] for a, b in zip([None, *ends[:-1]], ends, strict=True)]
        return pt.tanh(sum((k + 1) * part * row for k, part in enumerate(own)) + 0.5 * h)

    return scanlib.scan(step, rows, [start], [W], return_updates=False)


def plain(values, h, w, ends):
    trace = []
    for row in values:
        joined = h @ w
        own = [joined[:, a:b] for a, b in zip([0, *ends[:-1]], ends, strict=True)]
        h = np.tanh(sum((k + 1) * part * row for k, part in enumerate(own)) + 0.5 * h)
        trace.append(h)
    return np.array(trace)


@pytest.mark.parametrize("width", [9, 11, 14])
@pytest.mark.parametrize("ends", [(3, 6, 9), (3, 6, None)], ids=str)
def test_gates_of_a_product(fast_mode, ends, width):
    if ends[-1] is None and width > 9:
        pytest.skip("the last slice has another size then")
    values, h, w = (
        rng.normal(size=(4, 3)),
        rng.normal(size=(2, 3)),
        0.3 * rng.normal(size=(3, width)),
    )
    cost = (gates(ends) ** 2).sum()
    assert_derivatives(
        cost,
        {start: h, W: w, rows: values},
        lambda h, w, values: (plain(values, h, w, ends) ** 2).sum(),
        fast_mode,
    )
    function = pytensor.function([start, W, rows], pytensor.grad(cost, [start, W]), mode=fast_mode)
    bodies = [n.op.body for n in function.maker.fgraph.toposort() if isinstance(n.op, Scan)]
    kinds = {type(node.op) for body in bodies for node in body.apply_nodes}
    assert Join in kinds
    assert IncSubtensor not in kinds


def test_slices_with_a_gap_stay(fast_mode):
    def step(row, h, W):
        joined = h @ W
        return pt.tanh(joined[:, :3] + joined[:, 4:7] * row)

    trace = scanlib.scan(step, rows, [start], [W], return_updates=False)

    def plain(h, w, values):
        total = 0.0
        for row in values:
            joined = h @ w
            h = np.tanh(joined[:, :3] + joined[:, 4:7] * row)
            total += h.sum()
        return total

    values, h, w = rng.normal(size=(4, 3)), rng.normal(size=(2, 3)), 0.3 * rng.normal(size=(3, 8))
    assert_derivatives(trace.sum(), {start: h, W: w, rows: values}, plain, fast_mode)


@pytest.mark.parametrize("shape", [(4, 2, 3), (4, 1, 3), (4, 2, 1)], ids=str)
def test_a_row_that_only_the_run_tells_to_be_single_is_repeated(fast_mode, shape):
    """As NumPy does, in what a user writes."""
    parts = pt.dtensor3("parts")

    def step(part, h, W):
        whole = pt.zeros((h.shape[0], 3))[:2].inc(part)[2:].inc(W)
        return pt.tanh(h @ whole.T @ whole)

    trace = scanlib.scan(step, parts, [start], [W], return_updates=False)
    values, h, w = rng.normal(size=shape), rng.normal(size=(5, 3)), rng.normal(size=(3, 3))
    function = pytensor.function([parts, start, W], trace, mode=fast_mode)
    found, expected = function(values, h, w), []
    for part in values:
        whole = np.concatenate([np.broadcast_to(part, (2, 3)), w])
        h = np.tanh(h @ whole.T @ whole)
        expected.append(h)
    np.testing.assert_allclose(found, expected)
