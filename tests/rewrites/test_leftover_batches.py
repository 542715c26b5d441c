"""What leaves loops, or is left of them, is computed by programs of kernels, against NumPy."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.kernel_graph import KernelGraph
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.rewrites.simplify.last_rows import is_loop
from tests.modes import MODES

rng = np.random.default_rng(4)


def test_a_map_of_functions_is_a_program_under_c():
    x, V = pt.dmatrices("xV")
    y = scanlib.map(lambda x, V: pt.tanh(V @ x), x, [V], return_updates=False)
    f = pytensor.function([x, V], y, mode=MODES["c"])
    nodes = f.maker.fgraph.apply_nodes
    assert not any(is_loop(node) for node in nodes)
    assert any(isinstance(node.op, KernelGraph) for node in nodes)
    rows, weights = rng.normal(size=(7, 3)), rng.normal(size=(3, 3))
    np.testing.assert_allclose(f(rows, weights), np.tanh(rows @ weights.T), rtol=1e-12)


@pytest.mark.parametrize("linker", ["numba", "c"])
def test_functions_of_outputs_are_no_loops(linker):
    x, V, W = pt.dmatrices("xVW")

    def step(x, h, V, W):
        h = pt.tanh(W @ h + x)
        return h, pt.exp(-pt.tanh(V @ h))

    _, y = scanlib.scan(step, x, [pt.zeros(3), None], [V, W], return_updates=False)
    f = pytensor.function([x, V, W], y, mode=MODES[linker])
    assert not any(isinstance(node.op, ElemwiseScan) for node in f.maker.fgraph.apply_nodes)
    rows, out, inner = rng.normal(size=(7, 3)), rng.normal(size=(3, 3)), rng.normal(size=(3, 3))
    h, expected = np.zeros(3), []
    for row in rows:
        h = np.tanh(inner @ h + row)
        expected.append(np.exp(-np.tanh(out @ h)))
    np.testing.assert_allclose(f(rows, out, inner), expected, rtol=1e-12)
