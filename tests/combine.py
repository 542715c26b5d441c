"""Associative functions, and the plain loop over elements that scans are held against.

The reference combines NumPy arrays one by one from the left (from the right with ``reverse``), as
the definition says. The functions are written once, for NumPy and PyTensor alike, with a
namespace `xp` where they call functions.
"""

from itertools import accumulate

import numpy as np
import pytensor
import pytensor.tensor as pt

import scanlib
from tests.checks import assert_same

LENGTHS = [0, 1, 2, 3, 7, 8, 9]


def affine(earlier, later, xp=None):
    """Compose ``h -> a h + b``."""
    (a, b), (c, d) = earlier, later
    return a * c, b * c + d


def matrix_affine(earlier, later, xp=None):
    """Compose ``h -> A h + b`` with matrices."""
    (a, b), (c, d) = earlier, later
    return c @ a, c @ b + d


def argmax(earlier, later, xp=np):
    """Keep the larger value and its index, the earlier one of two equal ones."""
    (value, index), (other, place) = earlier, later
    better = other > value
    return xp.where(better, other, value), xp.where(better, place, index)


def normalized_product(earlier, later, xp=None):
    """Compose Möbius maps ``h -> (a h + b) / (c h + d)``, as matrices up to a factor."""
    product = later @ earlier
    return product / abs(product).sum()


def running(fn, elems, reverse=False):
    """Return all running combinations of the rows of a tuple of arrays, one after the other."""
    rows = list(zip(*elems, strict=True))
    walk = rows[::-1] if reverse else rows
    combined = [tuple(map(np.asarray, row)) for row in accumulate(walk, fn)]
    combined = combined[::-1] if reverse else combined
    return [
        np.stack([row[k] for row in combined]) if combined else elem.copy()
        for k, elem in enumerate(elems)
    ]


def running_one(fn, elem, reverse=False):
    return running(lambda a, b: (fn(a[0], b[0]),), [elem], reverse)[0]


def variables(arrays, static=False):
    return [
        pt.tensor(f"v{i}", dtype=x.dtype, shape=x.shape if static else (None,) * x.ndim)
        for i, x in enumerate(arrays)
    ]


def check(fn, arrays, mode, reverse=False, static=False, **options):
    """Hold scan and reduction of a tuple of arrays against the plain loop."""
    inputs = variables(arrays, static)
    if len(arrays) == 1:
        outputs = [scanlib.associative_scan(fn, inputs[0], reverse=reverse)]
        expected = [running_one(fn, arrays[0], reverse)]
    else:
        outputs = [*scanlib.associative_scan(lambda a, b: fn(a, b, pt), tuple(inputs), 0, reverse)]
        expected = running(fn, arrays, reverse)
    copies = [x.copy() for x in arrays]
    f = pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")
    results = f(*arrays)
    assert_same(results, expected, **options)
    for x, copy in zip(arrays, copies, strict=True):
        np.testing.assert_array_equal(x, copy)
        assert not any(np.shares_memory(x, result) for result in results)
    return f


def data(length, *shape, seed=0, dtype="float64"):
    values = np.random.default_rng(seed).normal(size=(length, *shape))
    return (3 * values).astype(dtype) if np.dtype(dtype).kind in "iu" else values.astype(dtype)
