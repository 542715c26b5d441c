"""Loops that stay loops: bodies of products, elementwise work, slices and small solves."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scanlib
from tests.checks import assert_derivatives, assert_same
from tests.modes import MODES
from tests.reference import reference_scan

rng = np.random.default_rng(11)


@pytest.fixture(autouse=True)
def loops_stay():
    """Nothing is lowered or taken apart: what is tested is the loop as it was written."""
    names = ("scanlib__linear", "scanlib__simplify")
    with pytensor.config.change_flags(**dict.fromkeys(names, False)):
        yield


def run(step, sequences, states, others, mode, n_steps=None):
    """Compile and run a loop on copies; inputs must come back as they were."""
    values = [*sequences, *[state for state in states if state is not None], *others]
    variables = [
        pt.tensor(dtype=value.dtype, shape=(None,) * value.ndim).type() for value in values
    ]
    parts = iter(variables)
    outs = scanlib.scan(
        step,
        sequences=[next(parts) for _ in sequences],
        outputs_info=[None if state is None else next(parts) for state in states],
        non_sequences=[next(parts) for _ in others],
        n_steps=n_steps,
        return_list=True,
        return_updates=False,
    )
    function = pytensor.function(variables, outs, mode=mode, accept_inplace=True)
    given_values = [value.copy() for value in values]
    results = function(*given_values)
    for value, before in zip(given_values, values, strict=True):
        np.testing.assert_array_equal(value, before)
    return results


def gru(np_or_pt, sigmoid):
    def step(x, h, W, U, V, b):
        gates = sigmoid(x @ W + h @ U + b)
        n = 3
        z, r = gates[:, :n], gates[:, n:]
        return [z * h + (1 - z) * np_or_pt.tanh((r * h) @ V)]

    return step


def logistic(x):
    return 1 / (1 + np.exp(-x))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("batch", [0, 1, 5])
def test_gated_network(mode, dtype, batch):
    n, f = 3, 2
    arrays = [
        rng.standard_normal((6, batch, f)),
        rng.standard_normal((batch, n)),
        rng.standard_normal((f, 2 * n)),
        rng.standard_normal((n, 2 * n)),
        rng.standard_normal((n, n)),
        rng.standard_normal(2 * n),
    ]
    x, h, *weights = [array.astype(dtype) for array in arrays]
    results = run(gru(pt, pt.sigmoid), [x], [h], weights, mode)
    expected = reference_scan(gru(np, logistic), [x], [h], weights)
    rtol = 1e-4 if dtype == "float32" else 1e-9
    assert_same(results, [value.astype(dtype) for value in expected], rtol=rtol, atol=rtol / 10)


@pytest.mark.slow
def test_wide_products_leave_no_edge_out(fast_mode):
    # Tiles of 4 rows and 1 or 4 vectors: sizes around them.
    def step(x, h, W):
        return [x + h @ W]

    for rows, size in [(1, 17), (3, 33), (4, 64), (5, 65), (9, 100)]:
        x = rng.standard_normal((3, rows, size))
        h, W = rng.standard_normal((rows, size)), 0.1 * rng.standard_normal((size, size))
        results = run(step, [x], [h], [W], MODES["numba"] if size == 65 else fast_mode)
        assert_same(results, reference_scan(step, [x], [h], [W]))


def kalman(xp, solve, inverse):
    def step(y, m, P, T, Z, H):
        S = Z @ P @ Z.T + H
        K = solve(S, Z @ P).T
        m = T @ (m + K @ (y - Z @ m))
        P = T @ (P - K @ Z @ P) @ T.T + 0.1 * inverse(P + H.sum())
        return [m, 0.5 * (P + P.T), xp.log((S**2).sum())]

    return step


def kalman_values():
    return (
        rng.standard_normal((5, 2)),
        [np.zeros(3), np.eye(3), None],
        [0.4 * rng.standard_normal((3, 3)), rng.standard_normal((2, 3)), np.eye(2)],
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gen", "pos"])
def test_filter(mode, kind):
    y, states, matrices = kalman_values()

    def solve(a, b):
        return pt.linalg.solve(a, b, assume_a=kind)

    results = run(kalman(pt, solve, pt.linalg.inv), [y], states, matrices, mode)
    reference = kalman(np, np.linalg.solve, np.linalg.inv)
    assert_same(results, reference_scan(reference, [y], states, matrices))


@pytest.mark.slow
def test_derivatives_of_a_filter(fast_mode):
    y, (m, P, _), matrices = kalman_values()

    def reference(*parameters):
        step = kalman(np, np.linalg.solve, np.linalg.inv)
        return np.sum(reference_scan(step, [y], [m, P, None], parameters)[2])

    variables = [pt.dmatrix() for _ in matrices]
    step = kalman(pt, pt.linalg.solve, pt.linalg.inv)
    outs = scanlib.scan(step, [y], [m, P, None], variables, return_updates=False)
    inputs = dict(zip(variables, matrices, strict=True))
    assert_derivatives(outs[2].sum(), inputs, reference, fast_mode, rtol=1e-5)


@pytest.mark.parametrize("mode_name", ["c", "numba"])
def test_failing_factor_gives_nan(mode_name):
    def step(h):
        return [h - pt.eye(2), pt.linalg.cholesky(h)]

    _, factors = run(step, [], [1.5 * np.eye(2), None], [], MODES[mode_name], n_steps=3)
    assert np.isfinite(factors[:2]).all()
    assert np.isnan(factors[2]).all()


@pytest.mark.slow
def test_states_that_are_one_another(mode):
    def step(x, a, b, c):
        return [b, a, c[::-1] + x, a, c.T]

    def same(x, a, b, c):
        return [b, a, c[::-1] + x, a, c.T]

    x, (a, b, c) = rng.standard_normal((4, 3, 3)), rng.standard_normal((3, 3, 3))
    states = [a, b, c, None, None]
    results = run(step, [x], states, [], mode)
    assert_same(results, reference_scan(same, [x], states))


def test_parts_of_zeros(mode):
    def step(x, h):
        parts = pt.zeros((x.shape[0], 6))
        parts = parts[:, :2].inc(pt.exp(x[:, :2]))
        parts = parts[:, 3:5].inc(h[:, 1:3] * 2)
        return [parts @ pt.ones((6, 3)) * 0.1 + h, parts]

    def same(x, h):
        parts = np.zeros((len(x), 6))
        parts[:, :2] += np.exp(x[:, :2])
        parts[:, 3:5] += h[:, 1:3] * 2
        return [parts @ np.ones((6, 3)) * 0.1 + h, parts]

    x, h = rng.standard_normal((4, 2, 3)), rng.standard_normal((2, 3))
    results = run(step, [x], [h, None], [], mode)
    assert_same(results, reference_scan(same, [x], [h, None]))


def test_shared_updates_may_change_their_shape(mode):
    total = pytensor.shared(np.ones(2), shape=(None,))
    last = pytensor.shared(np.zeros((2, 2)))

    def step(x):
        return {total: pt.concatenate([total, x[None]]), last: last * 2 + x}

    x = pt.dvector("x")
    _, updates = scanlib.scan(step, [x])
    function = pytensor.function([x], [], updates=updates, mode=mode)
    function([3.0, 4.0, 5.0])
    np.testing.assert_array_equal(total.get_value(), [1, 1, 3, 4, 5])
    np.testing.assert_array_equal(last.get_value(), np.full((2, 2), 4 * 3.0 + 2 * 4 + 5))


@pytest.mark.parametrize("kept", [True, False])
def test_a_carry_that_gets_another_shape_at_the_first_step(kept, mode):
    """Compiled code assumes that it keeps its shape, and has other code if it does not."""
    b, start = rng.standard_normal(3), rng.standard_normal(3 if kept else 5)
    total = pytensor.shared(start, shape=(None,))
    x, weights = pt.dvector("x"), pt.dvector("b")
    outs, updates = scanlib.scan(
        lambda x, b: (x * total.sum(), {total: b * total.sum() + x}), x, non_sequences=weights
    )
    function = pytensor.function([x, weights], outs, updates=updates, mode=mode)
    xs = rng.standard_normal(4)
    expected = []
    for value in xs:
        expected.append(value * start.sum())
        start = b * start.sum() + value
    np.testing.assert_allclose(function(xs, b), expected)
    np.testing.assert_allclose(total.get_value(), start)
    np.testing.assert_allclose(function(xs[:0], b), [])
    np.testing.assert_allclose(total.get_value(), start)


def test_sequences_that_are_not_contiguous(mode):
    def step(x, h, W):
        return [h @ W + x]

    x = np.asfortranarray(rng.standard_normal((3, 4, 10)))[:, :, ::2]
    h, W = rng.standard_normal((4, 5)), rng.standard_normal((5, 5)).T
    results = run(step, [x[::-1]], [h], [W], mode)
    assert_same(results, reference_scan(step, [x[::-1]], [h], [W]))


def test_sizes_that_differ(mode):
    def step(x, h, W):
        return [pt.tanh(x + h @ W)]

    x, h, W = np.ones((3, 2, 4)), np.ones((2, 4)), np.ones((4, 3))
    with pytest.raises(ValueError, match=r"sizes|shape"):
        run(step, [x], [h], [W], mode)
    # A loop without steps compares nothing.
    (empty,) = run(step, [x[:0]], [h], [W], mode)
    assert empty.shape == (0, 2, 4)


@pytest.mark.parametrize("mode_name", ["numba", "c"])
def test_negative_sizes(mode_name):
    """An array of fewer than no items would have less memory than what is written into it."""
    x, h, A, n = pt.vector("x"), pt.vector("h"), pt.matrix("A"), pt.lscalar("n")
    trace = scanlib.scan(
        lambda x, h, A, n: pt.concatenate([pt.tanh(A @ h) + x, pt.ones(n)])[:2],
        x, h, [A, n], return_updates=False,
    )  # fmt: skip
    function = pytensor.function([x, h, A, n], trace, mode=MODES[mode_name])
    assert function(np.ones(3), np.ones(2), np.eye(2), 1).shape == (3, 2)
    for size in (-1, -40):
        with pytest.raises((ValueError, MemoryError), match=r"negative|alloc"):
            function(np.ones(3), np.ones(2), np.eye(2), size)


@pytest.mark.parametrize("steps", [2**61, 2**62])
def test_more_steps_than_memory_can_hold(steps):
    n = pt.lscalar("n")
    trace = scanlib.scan(
        lambda h: 0.5 * h, outputs_info=np.float64(1), n_steps=n, return_updates=False
    )
    function = pytensor.function([n], trace, mode="NUMBA")
    with pytest.raises(MemoryError, match="too large"):
        function(steps)


@pytest.mark.parametrize("mode_name", ["numba", "c"])
def test_rounded_to_even(mode_name):
    """NumPy's function has arguments that PyTensor's code leaves out."""
    x, n = np.array([-2.5, -1.5, -0.5, 0.5, 1.5, 2.6]), np.int64(0)
    step = lambda x, n: [n + 1, pt.round(pt.switch(n < 0, 0.0, x))]  # noqa: E731
    results = run(step, [x], [n, None], [], MODES[mode_name])
    assert_same(results, [np.arange(1, 7), np.round(x)])


OPERATIONS = {
    "add": lambda xp, a, b: a + b,
    "product": lambda xp, a, b: a @ b,
    "turned": lambda xp, a, b: a.T @ b,
    "tanh": lambda xp, a, b: xp.tanh(a * b),
    "rows": lambda xp, a, b: a[::-1] - b[0],
    "columns": lambda xp, a, b: a.sum(axis=0) + b,
    "corner": lambda xp, a, b: a * b[1, 0],
    "left": lambda xp, a, b: a,
    "diagonal": lambda xp, a, b: xp.diag(a) + b,
}


@pytest.mark.slow
@settings(max_examples=8)
@given(
    picks=st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 9), st.integers(0, 9)),
        min_size=3,
        max_size=7,
    ),
    chosen=st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)),
    size=st.integers(2, 3),
    steps=st.integers(0, 3),
    taps=st.booleans(),
)
def test_generated_bodies(picks, chosen, size, steps, taps):
    def make(xp):
        def step(x, *arguments):
            values = [x, *arguments]
            for name, i, j in picks:
                a, b = values[i % len(values)], values[j % len(values)]
                values.append(OPERATIONS[name](xp, a, b))
            results = [xp.tanh(values[-1]), *(values[-1 - k % len(values)] for k in chosen[1:])]
            first = values[-1 - chosen[0] % len(values)]
            return [results[0], xp.tanh(results[1]) if chosen[1] % 2 else first, results[2]]

        return step

    generator = np.random.default_rng(size + steps)
    draw = lambda *shape: np.round(generator.standard_normal(shape), 2)  # noqa: E731
    x, w = draw(steps, size, size), draw(size, size)
    a = {"initial": draw(2, size, size), "taps": [-2, -1]} if taps else draw(size, size)
    states, b = [a, None, None], draw(size, size)
    states[1] = b
    expected = reference_scan(make(np), [x], states, [w], rows=[((size, size), "float64")] * 3)
    variables = [pt.tensor3(), pt.tensor3() if taps else pt.matrix(), pt.matrix(), pt.matrix()]
    variables = [pt.tensor(dtype="float64", shape=(None,) * v.type.ndim) for v in variables]
    first = {"initial": variables[1], "taps": [-2, -1]} if taps else variables[1]
    outs = scanlib.scan(
        make(pt), [variables[0]], [first, variables[2], None], [variables[3]],
        return_updates=False,
    )  # fmt: skip
    function = pytensor.function(variables, outs, mode=MODES["c"], on_unused_input="ignore")
    values = [x, a["initial"] if taps else a, b, w]
    results = function(*(value.copy() for value in values))
    assert_same(results, expected, rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, 4])
def test_steps_read_what_others_wrote(size):
    """Compilers write few items out one by one, and may then move reads past other steps' writes.

    What memory held before must not look like the right rows: each call has other values.
    """
    h0 = pt.tensor("h0", shape=(size,), dtype="float64")
    lags = {"initial": pt.stack([h0, h0 + 1]), "taps": [-2, -1]}
    steps = [
        (lambda h: 0.5 * h + 1, [h0]),
        (lambda h: 0.5 * h[::-1] + 1, [h0]),
        (lambda h: pt.set_subtensor(h[1:], 0.5 * h[:-1]), [h0]),
        (lambda a, b: (b, 0.5 * a + 1), [h0, 2 * h0]),
        (lambda a, b: 0.5 * a + b, [lags]),
    ]
    traces = []
    for step, states in steps:
        traces += scanlib.scan(
            step, outputs_info=states, n_steps=6, return_list=True, return_updates=False
        )
    gradient = pytensor.grad((traces[0] ** 2).sum() + (traces[-1] ** 3).sum(), h0)
    function = pytensor.function([h0], [*traces, gradient], mode="FAST_COMPILE")
    with pytensor.config.change_flags(scanlib__perform="python"):
        expected = pytensor.function([h0], [*traces, gradient], mode="FAST_COMPILE")
    for _ in range(5):
        values = rng.normal(size=size)
        assert_same(function(values), expected(values))
