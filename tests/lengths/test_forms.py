"""The algebra of lengths: what forms become in a graph."""

import random

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.basic import equal_computations

from scanlib.lengths.arrays import Lengths
from scanlib.lengths.forms import LengthForm, minimum


def test_equal_forms_are_written_in_one_way():
    """Else the same loop is compiled again in the next process: sets of variables have no order."""
    vectors = [pt.vector() for _ in range(12)]
    axes = [LengthForm.of_axis(vector) for vector in vectors]
    whole = axes[0]
    for axis in axes[1:]:
        whole = whole + axis
    least = minimum(axes)
    expected = sum((vector.shape[0] for vector in vectors[1:]), vectors[0].shape[0])
    first = vectors[0].shape[0]
    for vector in vectors[1:]:
        first = pt.minimum(first, vector.shape[0])
    for seed in range(20):
        order = random.Random(seed).sample(axes, len(axes))
        total = order[0]
        for axis in order[1:]:
            total = total + axis
        assert total == whole
        assert minimum(order) == least
        assert equal_computations([total.variable()], [expected])
        assert equal_computations([minimum(order).variable()], [first])
        nested = minimum([minimum(order[:5]) + 1, minimum(order[5:]) + 2])
        again = minimum([minimum(order[:5][::-1]) + 1, minimum(order[5:]) + 2])
        assert equal_computations([nested.variable()], [again.variable()])


@pytest.mark.parametrize("cut", [0, 1, 2, 4])
def test_slices_and_ranges_that_cut_rows_off(cut):
    """They are as long as each other, whether there are so many rows or not."""
    x = pt.vector("x")
    n = x.shape[0]
    cuts = [x[cut:], x[: -cut or None], pt.arange(cut, n), pt.zeros(n)[cut:]]
    lengths = Lengths(sure=True)
    forms = [lengths.of(rows) for rows in cuts]
    assert len(set(forms)) == 1
    assert forms[0].at_most(lengths.of(x))
    if cut > 1:  # of one row it is taken to be there
        found = pytensor.function([x], [forms[0].variable(), *(rows.shape[0] for rows in cuts)])
        for rows in range(6):
            assert {int(each) for each in found(np.ones(rows))} == {max(rows - cut, 0)}
        assert forms[0].is_length()
