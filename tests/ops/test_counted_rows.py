"""Arrays that steps read at their own number become sequences."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.traversal import toposort

import scanlib
from scanlib.ops.scan import Scan
from tests.checks import assert_derivatives, assert_same, keeping_inputs
from tests.modes import MODES

rng = np.random.default_rng(3)
x, X = pt.vector("x"), pt.matrix("X")
n = x.shape[0]


def over(step, numbers, start=0.0, **options):
    return scanlib.scan(step, numbers, start, return_updates=False, **options)


def counting(step, start, steps):
    """A loop that counts in a state."""
    info = [pt.constant(start), 0.0]
    return over(lambda t, h: [t + 1, step(t, h)], None, info, n_steps=steps)[1]


def plain(step, numbers, start=0.0):
    h, trace = start, []
    for t in numbers:
        h = step(t, h)
        trace.append(h)
    return np.array(trace)


# What is built, the same in NumPy from x and X, and how many sequences it has.
LOOPS = {
    "rows": (
        lambda: over(lambda t, h: 0.5 * h + x[t], pt.arange(n)),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[t], range(len(x))),
        2,
    ),
    "rows before and after": (
        lambda: over(lambda t, h: x[t - 1] * h + x[t] * x[t + 1], pt.arange(1, n - 1)),
        lambda x, X: plain(lambda t, h: x[t - 1] * h + x[t] * x[t + 1], range(1, len(x) - 1)),
        4,
    ),
    "the number itself": (
        lambda: over(lambda t, h: 0.5 * h + t * x[t], pt.arange(n)),
        lambda x, X: plain(lambda t, h: 0.5 * h + t * x[t], range(len(x))),
        2,
    ),
    "backwards": (
        lambda: over(lambda t, h: 0.5 * h + x[t], pt.arange(n), go_backwards=True),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[t], reversed(range(len(x)))),
        2,
    ),
    "columns": (
        lambda: over(lambda t, h: 0.5 * h + X[1, t] * X[:, t].sum(), pt.arange(X.shape[1])),
        lambda x, X: plain(lambda t, h: 0.5 * h + X[1, t] * X[:, t].sum(), range(X.shape[1])),
        2,
    ),
    "items of rows": (
        lambda: over(lambda t, h: 0.5 * h + X[t, 0] - X[t, 1:].sum(), pt.arange(X.shape[0])),
        lambda x, X: plain(lambda t, h: 0.5 * h + X[t, 0] - X[t, 1:].sum(), range(len(X))),
        2,
    ),
    "beside a sequence": (
        lambda: over(lambda y, t, h: 0.5 * h + y * x[t], [x, pt.arange(n)]),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[t] ** 2, range(len(x))),
        3,
    ),
    "counted in a state": (
        lambda: counting(lambda t, h: 0.5 * h + x[t], 0, n),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[t], range(len(x))),
        1,
    ),
    "counted from two": (
        lambda: counting(lambda t, h: 0.5 * h + x[t - 1], 2, n - 1),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[t - 1], range(2, len(x) + 1)),
        1,
    ),
    "until": (
        lambda: over(lambda t, h: (h + x[t] ** 2, scanlib.until(h > 1)), pt.arange(n)),
        lambda x, X: until(x),
        2,
    ),
    # What may be missing, or is another row at every step, stays an index.
    "perhaps too many": (
        lambda: over(lambda t, h: 0.5 * h + x[t], pt.arange(3)),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[t], range(3)),
        1,
    ),
    "from the end": (
        lambda: over(lambda t, h: 0.5 * h + x[t - 1], pt.arange(n)),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[t - 1], range(len(x))),
        1,
    ),
    "every other": (
        lambda: over(lambda t, h: 0.5 * h + x[t], pt.arange(0, n, 2)),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[t], range(0, len(x), 2)),
        1,
    ),
    "in circles": (
        lambda: over(lambda t, h: 0.5 * h + x[(t + 1) % n], pt.arange(n)),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[(t + 1) % len(x)], range(len(x))),
        1,
    ),
}


def until(x):
    h, trace = 0.0, []
    for value in x:
        trace.append(h + value**2)
        if h > 1:
            break
        h = trace[-1]
    return np.array(trace)


@pytest.mark.parametrize("loop", LOOPS)
def test_values_and_gradients(loop, mode):
    build, expected, sequences = LOOPS[loop]
    trace = build()
    node = next(node for node in toposort([trace]) if isinstance(node.op, Scan))
    assert node.op.signature.n_sequences == sequences
    values = {x: rng.uniform(0.1, 0.9, 6), X: rng.normal(size=(5, 4))}
    given = {v: value for v, value in values.items() if v in toposort_inputs(trace)}
    function = keeping_inputs(pytensor.function(list(given), [trace], mode=mode))
    assert_same(function(*given.values()), [expected(values[x], values[X])])

    def cost(*changed):
        all_values = {**values, **dict(zip(given, changed, strict=True))}
        return np.tanh(expected(all_values[x], all_values[X])).sum()

    assert_derivatives(pt.tanh(trace).sum(), given, cost, mode, order=1)


def toposort_inputs(variable):
    return {inp for node in toposort([variable]) for inp in node.inputs}


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_few_rows(steps, fast_mode):
    for loop in ("rows", "rows before and after", "backwards", "counted in a state"):
        build, expected, _ = LOOPS[loop]
        function = pytensor.function([x], [build()], mode=fast_mode)
        data = rng.normal(size=steps)
        assert_same(function(data), [expected(data, None)])


def test_too_few_rows_are_an_error_of_the_index(fast_mode):
    build, _, _ = LOOPS["perhaps too many"]
    function = pytensor.function([x], build(), mode=fast_mode)
    with pytest.raises(IndexError, match="at step 2"):
        function(np.ones(2))


def test_rows_of_a_constant(fast_mode):
    """Data that a model holds has a length that is known."""
    data = pt.constant(rng.normal(size=9))
    trace = over(lambda t, h: 0.5 * h + data[t] * x, pt.arange(2, 9), pt.zeros(2))
    node = next(node for node in toposort([trace]) if isinstance(node.op, Scan))
    assert node.op.signature.n_sequences == 2
    function = pytensor.function([x], trace, mode=fast_mode)
    expected = plain(
        lambda t, h: 0.5 * h + data.data[t] * np.array([1.0, 2.0]), range(2, 9), np.zeros(2)
    )
    np.testing.assert_allclose(function([1.0, 2.0]), expected)


def test_adopted_loops(fast_mode):
    trace, _ = pytensor.scan(lambda t, h, x: 0.5 * h + x[t], pt.arange(n), pt.zeros(()), [x])
    with pytensor.config.change_flags(scanlib__adopt=True):
        function = pytensor.function([x], trace, mode=fast_mode)
    (loop,) = [v.op for v in function.maker.fgraph.toposort() if hasattr(v.op, "recurrences")]
    assert loop.recurrences
    assert loop.signature.n_sequences == 1
    data = rng.normal(size=7)
    np.testing.assert_allclose(function(data), LOOPS["rows"][1](data, None))


def test_gradients_are_rows():
    """The gradient of an index read as a row is written row by row."""
    build, _, _ = LOOPS["rows"]
    gradient = pytensor.grad((build() ** 2).sum(), x)
    function = pytensor.function([x], gradient, mode=MODES["c"])
    loops = [v.op for v in function.maker.fgraph.toposort() if hasattr(v.op, "recurrences")]
    assert len(loops) == 2
    assert all(op.recurrences for op in loops)
