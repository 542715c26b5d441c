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
    "numbers that NumPy made": (
        lambda: over(lambda t, h: 0.5 * h + x[t - 1] * X[1, t], np.arange(1, 4), n_steps=3),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[t - 1] * X[1, t], range(1, 4)),
        1,
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
    "beside rows that were cut": (
        lambda: over(lambda t, y, h: 0.5 * h + y * x[t - 2], [pt.arange(2, n), x[2:]]),
        lambda x, X: plain(lambda t, h: 0.5 * h + x[t] * x[t - 2], range(2, len(x))),
        3,
    ),
    "beside rows of another number": (
        lambda: over(lambda t, y, h: 0.5 * h + y * x[t - 2], [pt.arange(2, n), X[:, 0]]),
        lambda x, X: plain(lambda t, h: 0.5 * h + X[t - 2, 0] * x[t - 2], range(2, len(x))),
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


# Slices of as many items at each step: what a step does, the same in NumPy (which changes `h`).
def window(step, first, start):
    """An array into which the steps of a loop from `first` on have written."""
    return scanlib.scan(step, pt.arange(first, n), [start], return_updates=False)[-1]


def plain_window(step, first, h, x):
    for t in range(first, len(x)):
        step(t, h, x)
    return h


def write(t, h, width, value):
    h[t : t + width] = value


def add(t, h, width, value):
    h[t : t + width] += value


def write_rows(t, h, x):
    h[t] = np.tanh(h[t - 3 : t].sum(0) * x[t] + h[t - 3 : t, 1])


def write_window(t, h, x):
    h[t : t + 2] = np.sin(h[t - 2 : t] * x[t])


WIDE = np.linspace(-1, 1, 6)
WINDOWS = {
    "three items": (
        lambda: window(
            lambda t, h: h[t].set(pt.tanh(h[t - 3 : t] @ x[t - 3 : t] + x[t])), 3, pt.ones(n)
        ),
        lambda x: plain_window(
            lambda t, h, x: write(t, h, 1, np.tanh(h[t - 3 : t] @ x[t - 3 : t] + x[t])),
            3,
            np.ones(len(x)),
            x,
        ),
    ),
    "backwards": (
        lambda: window(
            lambda t, h: h[t].set(pt.sin(h[t - 1 : t - 7 : -1] @ WIDE + x[t])), 7, pt.ones(n)
        ),
        lambda x: plain_window(
            lambda t, h, x: write(t, h, 1, np.sin(h[t - 1 : t - 7 : -1] @ WIDE + x[t])),
            7,
            np.ones(len(x)),
            x,
        ),
    ),
    "every other of many": (
        lambda: window(
            lambda t, h: h[t].set(pt.sin((h[t - 11 : t : 2] * WIDE).sum() + x[t])), 11, pt.ones(n)
        ),
        lambda x: plain_window(
            lambda t, h, x: write(t, h, 1, np.sin((h[t - 11 : t : 2] * WIDE).sum() + x[t])),
            11,
            np.ones(len(x)),
            x,
        ),
    ),
    "many": (
        lambda: window(
            lambda t, h: h[t : t + 1].set(pt.sin(h[t - 6 : t] @ WIDE + x[t])[None]), 6, pt.ones(n)
        ),
        lambda x: plain_window(
            lambda t, h, x: write(t, h, 1, np.sin(h[t - 6 : t] @ WIDE + x[t])),
            6,
            np.ones(len(x)),
            x,
        ),
    ),
    "of a constant length": (
        lambda: scanlib.scan(
            lambda t, h: h[t].set(pt.tanh(h[t - 6 : t] @ WIDE + x[0])),
            np.arange(6, 14),
            [np.ones(14)],
            return_updates=False,
        )[-1],
        lambda x: plain_window(
            lambda t, h, x: write(t, h, 1, np.tanh(h[t - 6 : t] @ WIDE + x[0])), 6, np.ones(14), x
        ),
    ),
    "rows": (
        lambda: window(
            lambda t, h: h[t].set(pt.tanh(h[t - 3 : t].sum(0) * x[t] + h[t - 3 : t, 1])),
            3,
            pt.ones((n, 3)),
        ),
        lambda x: plain_window(write_rows, 3, np.ones((len(x), 3)), x),
    ),
    "written": (
        lambda: window(
            lambda t, h: h[t : t + 2].set(pt.sin(h[t - 2 : t] * x[t])), 2, pt.ones(n + 1)
        ),
        lambda x: plain_window(write_window, 2, np.ones(len(x) + 1), x),
    ),
    "many are added to": (
        lambda: window(
            lambda t, h: h[t : t + 6].inc(pt.sin(h[t] * x[t]) * WIDE), 0, pt.ones(n + 5)
        ),
        lambda x: plain_window(
            lambda t, h, x: add(t, h, 6, np.sin(h[t] * x[t]) * WIDE), 0, np.ones(len(x) + 5), x
        ),
    ),
    "one number for all": (
        lambda: window(lambda t, h: h[t : t + 3].inc(h[t] * x[t]), 0, pt.ones(n + 2)),
        lambda x: plain_window(
            lambda t, h, x: add(t, h, 3, h[t] * x[t]), 0, np.ones(len(x) + 2), x
        ),
    ),
    "of a sequence": (
        lambda: over(lambda t, h: pt.tanh(h + (x[t - 6 : t] * WIDE).max()), pt.arange(6, n)),
        lambda x: plain(lambda t, h: np.tanh(h + (x[t - 6 : t] * WIDE).max()), range(6, len(x))),
    ),
    # It may end before, and has other items then.
    "cut off": (
        lambda: over(lambda t, h: 0.5 * h + x[t - 2 : t + 1].sum(), pt.arange(n)),
        lambda x: plain(lambda t, h: 0.5 * h + x[t - 2 : t + 1].sum(), range(len(x))),
    ),
    "cut off at the end": (
        lambda: window(lambda t, h: h[t : t + 2].inc(x[t]), 0, pt.ones(n)),
        lambda x: plain_window(lambda t, h, x: add(t, h, 2, x[t]), 0, np.ones(len(x)), x),
    ),
}


@pytest.mark.parametrize("loop", WINDOWS)
def test_windows(loop, mode):
    build, expected = WINDOWS[loop]
    result, data = build(), rng.uniform(0.1, 0.9, 14)
    function = keeping_inputs(pytensor.function([x], [result], mode=mode))
    assert_same(function(data), [expected(data)])
    cost = pt.tanh(result).sum()
    assert_derivatives(cost, {x: data}, lambda x: np.tanh(expected(x)).sum(), mode)


@pytest.mark.parametrize("loop", WINDOWS)
def test_windows_have_kernels(loop):
    """Slices whose length is known are read and written by kernels."""
    result = WINDOWS[loop][0]()
    outputs = [result, pytensor.grad(result.sum(), x)]
    function = pytensor.function([x], outputs, mode=MODES["numba"])
    runs = [found.runs for found in scanlib.explain(function).loops]
    kernels = {"as a kernel, compiled by LLVM"}
    assert set(runs) <= kernels or "cut off" in loop
