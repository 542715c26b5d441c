"""The source that the numba backend writes: names that stay apart."""

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib
from scanlib.backends.numba.source import Source
from tests.checks import assert_same
from tests.modes import MODES


def test_reserved_names_are_not_given():
    source = Source()
    source.reserve("wd", 3)
    given = [source.name("w"), source.name("d"), source.name("w"), source.name("a")]
    assert len(set(given)) == 4
    assert not {"w0", "w1", "w2", "d0", "d1", "d2"}.intersection(given)


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
