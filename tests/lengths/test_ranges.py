"""Which rows are integers that follow one another."""

import numpy as np
import pytensor
import pytensor.tensor as pt

from scanlib.lengths.numbers import is_range

n = pt.lscalar("n")
RANGES = {
    "range": (pt.arange(n), True),
    "range from a number": (pt.arange(2, n), True),
    "constant": (pt.constant([3, 4, 5]), True),
    "every other": (pt.arange(0, n, 2), False),
    "numbers that are no integers": (pt.arange(n, dtype="float64"), False),
    "matrix": (pt.arange(n)[:, None], False),
    "generator": (pytensor.shared(np.random.default_rng(0)), False),
}


def test_what_is_a_range():
    for name, (rows, expected) in RANGES.items():
        assert is_range(rows) is expected, name
