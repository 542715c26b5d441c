"""Generated steps that read and write slices and items of arrays, against plain steps."""

import random

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.checks import assert_same, in_python
from tests.exploration import half

FIRST = 5  # the number of the first step: so many items are there before
x, parameter = pt.dvector("x"), pt.dscalar("parameter")

READS = (
    lambda h, t, k, n: h[t - k],
    lambda h, t, k, n: h[t - FIRST : t - FIRST + n].sum(0),
    lambda h, t, k, n: h[t - 1 : t - 1 - min(n, FIRST - 1) : -1].mean(0),
    lambda h, t, k, n: h[0],
    lambda h, t, k, n: pt.tanh(h[t - FIRST : t]).sum(0),
    lambda h, t, k, n: h[t - FIRST : t : 2].max(0),
    lambda h, t, k, n: h[k] * h[t - 1],
    lambda h, t, k, n: h[t : t + n].sum(0),
    lambda h, t, k, n: h[:t].sum(0),
)
WRITES = (
    lambda h, t, v, n: h[t].set(v),
    lambda h, t, v, n: h[t].inc(v),
    lambda h, t, v, n: h[t : t + n].inc(v),
    lambda h, t, v, n: h[t : t + 1].set(v[None]),
    lambda h, t, v, n: h[t - 2 : t].set(pt.stack([v, 0.5 * v])),
    lambda h, t, v, n: h[t].set(h[t - 1])[t - 1].set(v),
    lambda h, t, v, n: h[t].set(v)[t - 3 : t - 1].inc(0.1 * h[t - 2]),
)


def generated(seed):
    """Return the last or all values of the arrays, and how many rows there are."""
    choose = random.Random(seed)
    length, room = choose.randint(8, 14), choose.choice([0, 4, 6])
    has_rows, stops, has_inner = (choose.random() < 0.3 for _ in range(3))
    plans = [
        [choose.choice(READS), choose.choice(READS), choose.choice(WRITES), choose.randrange(2)]
        + [choose.randint(1, 5) for _ in range(4)]
        for _ in range(1 + (choose.random() < 0.4))
    ]

    def step(t, row, *arrays):
        found = []
        for array, (first, second, write, other, *numbers) in zip(arrays, plans, strict=False):
            a, b, c, d = numbers
            beside = arrays[other % len(plans)]
            value = first(array, t, a % 4, b) * row + 0.3 * second(beside, t, c % 4, d)
            if has_inner and not has_rows:
                array = filled(array, t, row)
            found.append(write(array, t, pt.tanh(value + parameter), a))
        return (found, scanlib.until(t > 9)) if stops else found

    def filled(array, t, row):
        columns = pt.arange(3)
        fill = lambda j, h: h[j].set(0.5 * h[j] + h[t - 1] * row)  # noqa: E731
        return scanlib.scan(fill, columns, array, return_updates=False)[-1]

    n = x.shape[0]
    start = pt.ones((n + room, 2) if has_rows else n + room) * x[0]
    arrays = scanlib.scan(
        step,
        [pt.arange(FIRST, n), x[FIRST:]],
        [start, 0.5 * start][: len(plans)],
        return_updates=False,
    )
    arrays = arrays if isinstance(arrays, list) else [arrays]
    return [array if choose.random() < 0.3 else array[-1] for array in arrays], length


# Loops in which a cluster of nodes would read an array before and after it is written over.
AROUND_WRITES = (66, 93, 101, 114, 115, 117, 133, 155)


@pytest.mark.parametrize("shard", half(0, 8))
def test_generated_reads_and_writes(shard, fast_mode):
    for seed in (*range(5 * shard, 5 * shard + 5), AROUND_WRITES[shard]):
        arrays, length = generated(seed)
        cost = sum(pt.tanh(array).sum() for array in arrays)
        outputs = [*arrays, *pytensor.grad(cost, [x, parameter])]
        values = [np.random.default_rng(seed).uniform(0.1, 0.9, length), np.array(0.2)]
        expected = in_python([x, parameter], outputs)(*values)
        found = pytensor.function([x, parameter], outputs, mode=fast_mode)(*values)
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


D, W = pt.dmatrix("D"), pt.dmatrix("W")

CELLS = (
    lambda D, h, i, j: D[i - 1, j],
    lambda D, h, i, j: D[i, j - 1] * W[i, j],
    lambda D, h, i, j: D[j % 3, i],
    lambda D, h, i, j: h[j] + h[i],
    lambda D, h, i, j: D[i, :2].sum(),
    lambda D, h, i, j: pt.tanh(D[i, j]) * D[i - 1, j - 1],
    lambda D, h, i, j: h[:3].mean() * D[i, j],
)
TABLE_WRITES = (
    lambda D, i, j, v: D[i, j].set(v),
    lambda D, i, j, v: D[i, j].inc(v),
    lambda D, i, j, v: D[i].set(D[i - 1] * v),
    lambda D, i, j, v: D[i, j].set(v)[i - 1, j].inc(0.3 * v),
)


def lasts(step, over, firsts, more=()):
    """The last value of each state of a loop."""
    return [last[-1] for last in scanlib.scan(step, over, firsts, more, return_updates=False)]


def generated_table(seed):
    """Return a table and a row that two or three loops have written, and what they added up."""
    choose = random.Random(seed)
    cells, write = [choose.choice(CELLS) for _ in range(3)], choose.choice(TABLE_WRITES)
    writes_row, before, after, three, to_the_end = (choose.random() < 0.4 for _ in range(5))
    columns = choose.choice([pt.arange(1, D.shape[1]), pt.arange(3), pt.arange(2, 0, -1)])

    def cell(j, D, h, total, i):
        found = [own(D, h, i, j) for own in cells]
        value = 0.5 * pt.sin(found[0] + 0.1 * total) * found[1] + 0.3 * found[2]
        D = write(D, i, j, value)
        later = [own(D, h, i, j) for own in cells]
        h = h[j].set(0.5 * pt.sin(later[1]) * later[2]) if writes_row else h
        return D, h, 0.7 * total + D[i, j]

    def row(i, D, h, total):
        D = D[i, 0].set(0.5 * h[0]) if before else D
        own = pt.arange(i, D.shape[1]) if to_the_end else columns
        D, h, total = lasts(cell, own, [D, h, total], [i])
        return D[i].inc(total) if after else D, h, total

    def rows(_, D, h, total):
        return lasts(row, pt.arange(1, 3), [D, h, total])

    step, count = (rows, 2) if three else (row, 3)
    return lasts(step, pt.arange(count), [D, 0.5 * x, pt.as_tensor(0.0)])


@pytest.mark.parametrize("shard", half(0, 8))
def test_generated_tables(shard, fast_mode):
    for seed in range(4 * shard, 4 * shard + 4):
        ends, rng = generated_table(seed), np.random.default_rng(seed)
        cost = sum(pt.tanh(end).sum() for end in ends)
        outputs = [*ends, *pytensor.grad(cost, [D, W, x], disconnected_inputs="ignore")]
        values = [0.5 * rng.normal(size=shape) for shape in ((4, 5), (4, 5), 6)]
        expected = in_python([D, W, x], outputs)(*values)
        found = pytensor.function([D, W, x], outputs, mode=fast_mode)(*values)
        assert_same(found, expected, rtol=1e-8, atol=1e-10)


def test_rows_read_at_places_that_the_gradient_computes(fast_mode):
    """The loop that stores a table knows no place that only its gradient's loop has as an input."""

    def cell(j, D, h, total, i):
        D = D[i, j].set(0.5 * (D[j % 3, i] + W[i, j]) + 0.1 * total)
        return D, h[j].set(0.5 * pt.sin(D[i - 1, j]) * D[i - 1, j]), 0.7 * total + D[i, j]

    def row(i, D, h, total):
        return lasts(cell, pt.arange(1, D.shape[1]), [D[i, 0].set(0.5 * h[0]), h, total], [i])

    def rows(_, D, h, total):
        return lasts(row, pt.arange(1, 3), [D, h, total])

    ends = lasts(rows, pt.arange(2), [D, x, pt.as_tensor(0.0)])
    outputs = [*ends, *pytensor.grad(sum((end**2).sum() for end in ends), [D, W, x])]
    rng = np.random.default_rng(103)
    values = [0.5 * rng.normal(size=shape) for shape in ((4, 5), (4, 5), 6)]
    expected = in_python([D, W, x], outputs)(*values)
    found = pytensor.function([D, W, x], outputs, mode=fast_mode)(*values)
    assert_same(found, expected, rtol=1e-8, atol=1e-10)
