"""Loops that numba and Python call: what is kept on disk is not mistaken for something else."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.configdefaults import config

import scanlib
from tests.checks import assert_same
from tests.linear import Recurrence
from tests.modes import MODES


@pytest.mark.slow
def test_a_second_derivative_over_several_blocks():
    """The buffers of states and of elements that never change must not share a name."""
    x, rates = pt.dvector("x"), pt.dvector("rates")
    v = scanlib.scan(
        lambda x, v, rates: rates[0] * x + rates[1] * v,
        x,
        np.float64(1.0),
        rates,
        return_updates=False,
    )
    hessian_row = pytensor.grad(pytensor.grad(pt.log(v).sum(), rates)[0], rates)
    values = np.random.default_rng(0).normal(size=1500) ** 2, np.array([0.1, 0.88])
    results = [
        pytensor.function([x, rates], hessian_row, mode=MODES[linker])(*values)
        for linker in ("numba", "py")
    ]
    assert_same(*([result] for result in results), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("linker", ["numba", "py"])
def test_without_numbas_cache(linker):
    """Functions of which PyTensor wrote no file cannot be kept by numba."""
    a, x = pt.dmatrix("a"), pt.dvector("x")
    decay = scanlib.scan(lambda x, h: pt.tanh(x - h), x, np.float64(0.5), return_updates=False)
    turned = scanlib.scan(lambda h: a @ h, None, x, n_steps=3, return_updates=False)
    matrix, start = np.array([[0.5, 0.1], [-0.2, 0.3]]), np.array([1.0, 2.0])
    with config.change_flags(numba__cache=False):
        graph = [decay, turned, pytensor.grad(turned.sum(), a)]
        f = pytensor.function([a, x], graph, mode=MODES[linker])
        results = f(matrix, start)
    first = np.tanh(1 - 0.5)
    steps = [np.linalg.matrix_power(matrix, k) @ start for k in (1, 2, 3)]
    assert_same(results[:2], [[first, np.tanh(2 - first)], steps], rtol=1e-12)
    nudge = np.zeros((2, 2))
    nudge[0, 1] = 1e-6
    ahead, behind = (f(matrix + sign * nudge, start)[1].sum() for sign in (1, -1))
    assert results[2][0, 1] == pytest.approx((ahead - behind) / 2e-6, rel=1e-6)


@pytest.mark.slow
def test_one_recurrence_called_by_compiled_code_and_by_python():
    """On disk, the one must not be found for the other."""
    A, x = pt.dtensor3("A"), pt.dmatrix("x")
    h = Recurrence("real", reverse=True)(A, x, pt.ones((1, 3)))
    outputs = [h, Recurrence("real", side="right")(A, h[1:], h[:1])]
    rng = np.random.default_rng(0)
    values = rng.normal(size=(4, 3, 3)), rng.normal(size=(4, 3))
    results = []
    for linker in ("numba", "py", "numba"):
        results.append(pytensor.function([A, x], outputs, mode=MODES[linker])(*values))
    assert_same(results[1], results[0], rtol=1e-12)
    assert_same(results[2], results[0], rtol=0)
