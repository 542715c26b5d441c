"""Loops over numbers that are read from the last row walk in the order of memory."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.checks import assert_same, keeping_inputs
from tests.modes import MODES
from tests.reference import reference_scan

rng = np.random.default_rng(11)
BOTH = pytest.mark.parametrize("mode", ["numba", "c"])


def number(x):
    return np.asarray(x, "float64")


def affine(x, w, h):
    return [w * h + x]


def two_states(x, w, g2, g1, h):
    return [0.5 * g1 - 0.25 * g2 + x * w, 0.5 * h + x, g1 * x]


# Steps, initial values with their taps, and the rows that a loop without steps would have.
LOOPS = {
    "affine": (affine, [number(0.5)]),
    "two taps, a map": (
        two_states,
        [{"initial": np.array([0.3, -0.2]), "taps": [-2, -1]}, number(1.0), None],
    ),
}
ROWS = [((), "float64")] * 3


def walks(function):
    nodes = function.maker.fgraph.toposort()
    return [node.op.signature.reverse for node in nodes if isinstance(node.op, ElemwiseScan)]


def compiled(inputs, outputs, mode):
    return keeping_inputs(pytensor.function(inputs, outputs, mode=MODES[mode]))


@pytest.mark.parametrize("loop", LOOPS)
@BOTH
def test_go_backwards(loop, mode):
    step, info = LOOPS[loop]
    x, w = pt.vectors("xw")
    results = scanlib.scan(step, [x, w], info, go_backwards=True, return_updates=False)
    results = results if isinstance(results, list) else [results]
    function = pytensor.function([x, w], results, mode=MODES[mode])
    assert walks(function) == [True]
    for steps, more in [(0, 0), (1, 2), (2, 0), (9, 1), (513, 0), (1030, 7)]:
        data = [rng.uniform(-0.9, 0.9, steps + more), rng.uniform(-0.9, 0.9, steps)]
        rows = ROWS[: len(info)]
        expected = reference_scan(step, data, info, go_backwards=True, rows=rows)
        for values in (
            data,
            [np.repeat(v, 2)[::2] for v in data],
            [v[::-1].copy()[::-1] for v in data],
        ):
            assert_same(keeping_inputs(function)(*values), expected)


@BOTH
def test_gradients_walk_in_the_order_of_memory_too(mode):
    x, w, c = pt.vectors("xwc")
    y = scanlib.scan(affine, [x, w], pt.zeros(()), go_backwards=True, return_updates=False)
    same = scanlib.scan(affine, [x[::-1], w[::-1]], pt.zeros(()), return_updates=False)
    outputs = [[trace, *pytensor.grad((trace**3 * c).sum(), [x, w])] for trace in (y, same)]
    functions = [pytensor.function([x, w, c], several, mode=MODES[mode]) for several in outputs]
    assert [walks(function) for function in functions] == [[True, False]] * 2
    data = [rng.uniform(-0.9, 0.9, 40) for _ in range(3)]

    def plain(x, w, c):
        h, traces = 0.0, []
        for k in reversed(range(len(x))):
            h = w[k] * h + x[k]
            traces.append(h)
        s, dx, dw = 0.0, np.zeros(len(x)), np.zeros(len(x))
        for t in reversed(range(len(x))):
            k = len(x) - 1 - t
            s += 3 * traces[t] ** 2 * c[t]
            dx[k], dw[k] = s, s * (traces[t - 1] if t else 0.0)
            s *= w[k]
        return [np.array(traces), dx, dw]

    for function in functions:
        assert_same(keeping_inputs(function)(*data), plain(*data))


@BOTH
def test_what_is_not_a_trace(mode):
    """Sums and last values have no order."""
    x = pt.vector("x")
    y = scanlib.scan(lambda x, h: pt.tanh(h) + x, x, 0.0, go_backwards=True, return_updates=False)
    data = rng.normal(size=30)
    (expected,) = reference_scan(
        lambda x, h: [np.tanh(h) + x], [data], [number(0)], go_backwards=True
    )
    wanted = [expected[-1], expected.sum(), expected[::3], expected[7]]
    assert_same(compiled([x], [y[-1], y.sum(), y[::3], y[7]], mode)(data), wanted)
    assert_same(compiled([x], [y[-1]], mode)(data), wanted[:1])


@BOTH
def test_until(mode):
    x = pt.vector("x")

    def step(x, h):
        total = h + x
        return total, scanlib.until(total > 3)

    y = scanlib.scan(step, x, 0.0, go_backwards=True, return_updates=False)
    function = compiled([x], y, mode)
    for size in (0, 1, 3, 50):
        data = rng.uniform(0, 1, size)
        (expected,) = reference_scan(
            lambda x, h: [h + x, h + x > 3], [data], [number(0)], go_backwards=True, until=True
        )
        assert_same([function(data)], [expected])


@BOTH
def test_only_where_fewer_sequences_are_turned(mode):
    """One of two is read forward in either direction; rows of several numbers lie in order."""
    x, w, m = pt.vector("x"), pt.vector("w"), pt.matrix("m")
    one = scanlib.scan(affine, [x[::-1], w], 0.0, return_updates=False)
    wide = scanlib.scan(affine, [m[::-1], m[::-1]], pt.zeros(3), return_updates=False)
    function = pytensor.function([x, w, m], [one, wide], mode=MODES[mode])
    assert walks(function) == [False, False]
    data = [rng.uniform(-1, 1, 20), rng.uniform(-1, 1, 20), rng.uniform(-1, 1, (5, 3))]
    a, b, c = data
    expected = [
        *reference_scan(affine, [a[::-1], b], [number(0)]),
        *reference_scan(affine, [c, c], [np.zeros(3)], go_backwards=True),
    ]
    assert_same(keeping_inputs(function)(*data), expected)


@BOTH
def test_slices_of_reversed_rows(mode):
    """More rows asked for than there are is what the slice has; `n_steps` is checked."""
    x, k = pt.vector("x"), pt.lscalar("k")
    function = compiled(
        [x, k], scanlib.scan(lambda x, h: 0.5 * h + x, x[::-1][:k], 0.0, return_updates=False), mode
    )
    data = rng.normal(size=6)
    for rows in (0, 1, 4, 6, 9, -2):
        (expected,) = reference_scan(
            lambda x, h: [0.5 * h + x],
            [data[::-1][:rows]],
            [number(0)],
            rows=ROWS[:1],
        )
        assert_same([function(data, rows)], [expected])
    steps = scanlib.scan(
        lambda x, h: 0.5 * h + x, x, 0.0, n_steps=k, go_backwards=True, return_updates=False
    )
    function = compiled([x, k], steps, mode)
    (expected,) = reference_scan(
        lambda x, h: [0.5 * h + x], [data], [number(0)], n_steps=4, go_backwards=True
    )
    assert_same([function(data, 4)], [expected])
    with pytest.raises(ValueError, match="6"):
        function(data, 9)


@pytest.mark.parametrize("package, mode", [("jax", "JAX"), ("torch", "PYTORCH")])
def test_other_linkers(package, mode):
    pytest.importorskip(package)
    x, w = pt.vectors("xw")
    y = scanlib.scan(affine, [x, w], 0.0, go_backwards=True, return_updates=False)
    outputs = [y, y[-1], y[::-1], *pytensor.grad((y**2).sum(), [x, w])]
    functions = [pytensor.function([x, w], outputs, mode=m) for m in (mode, MODES["py"])]
    for steps in (1, 7, 600):
        data = [rng.uniform(-0.9, 0.9, steps) for _ in range(2)]
        actual, expected = ([np.asarray(v) for v in f(*data)] for f in functions)
        assert_same(actual, expected)
