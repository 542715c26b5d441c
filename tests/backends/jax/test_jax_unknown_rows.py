"""What is computed under JAX from arrays whose length only the loop knows."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.ifelse import ifelse

import scanlib
from tests.checks import assert_same, in_python
from tests.jax_loops import compiled

pytest.importorskip("jax", reason="jax is not installed")

from scanlib.backends.jax.bounded import UnknownLengthError

X, W, K = np.array([5.0, 1.0, 9.0]), np.array([[1.0, -2.0], [0.5, 3.0], [2.0, 0.0]]), [3, 1, 0, 5]


def scan(*arguments, **options):
    return scanlib.scan(*arguments, return_updates=False, **options)


def roots(x):
    """Return Newton's iterates for the square root of two, from several starts at once."""

    def step(x):
        return 0.5 * (x + 2 / x), scanlib.until(pt.abs(x * x - 2).max() < 1e-3)

    return scan(step, outputs_info=x, n_steps=60)


def counts_in(y):
    return pt.clip(y[:, 0].astype("int64"), 0, 4)


ROWS = {
    "joined": lambda y, w: pt.concatenate([y[:1], y, 2 * y]),
    "readout": lambda y, w: y @ w,
    "product": lambda y, w: y.prod(axis=0),
    "all": lambda y, w: (y > 1.5).all(axis=0),
    "any": lambda y, w: (y < 1.5).any(),
    "deviation": lambda y, w: y.std(axis=0),
    "norm": lambda y, w: pt.sqrt((y[:, 0] ** 2).sum()),
    "positions": lambda y, w: pt.arange(y.shape[0]) * y[:, 0],
    "a row in the middle": lambda y, w: y[y.shape[0] // 2],
    "a column replaced": lambda y, w: pt.set_subtensor(y[:, 1], y[:, 0] + 1),
    "a column set": lambda y, w: pt.set_subtensor(y[:, 1], 0.5),
    "a part of a column": lambda y, w: pt.inc_subtensor(y[1:, 1], y[:-1, 0]),
    "running sum": lambda y, w: pt.cumsum(y, axis=0),
    "running product of columns": lambda y, w: pt.cumprod(y, axis=1),
    "rows backwards": lambda y, w: y[::-1],
    "some rows backwards": lambda y, w: pt.concatenate([y[-2::-1], y[:1:-1], y[-2:0:-1], y[1::-1]]),
    "an axis between": lambda y, w: y.dimshuffle(0, "x", 1).sum(axis=1),
}
# What only the interface of arrays of known length has.
REFUSED = {
    "argmax": lambda y, w: y.argmax(),
    "softmax": lambda y, w: pt.special.softmax(y, axis=0),
    "covariance": lambda y, w: (y - y.mean(axis=0)).T @ y,
    "norm of a column": lambda y, w: pt.linalg.norm(y[:, 1]),
    "transposed": lambda y, w: y.T,
    "gradient of a product": lambda y, w: pytensor.grad((y @ w).sum(), w),
    "joined columns": lambda y, w: pt.concatenate([y, 2 * y], axis=1),
    "every second row": lambda y, w: y[::2],
    "gradient of a join": lambda y, w: pytensor.grad(
        (pt.concatenate([y[:1] * w.sum(), y]) ** 2).sum(), w
    ),
    "sorted": lambda y, w: pt.sort(y, axis=0),
    "beside a known length": lambda y, w: y[:, 0] * w[:, 0],
    "rows at places": lambda y, w: y[[0, -1, 1]],
    "table": lambda y, w: w[(y[:, 0] * 0).astype("int64") + 1],
    "counts": lambda y, w: pt.inc_subtensor(pt.zeros(10)[y[:, 0].astype("int64")], 1.0),
    "columns at places": lambda y, w: pt.inc_subtensor(y[:, [0, 2]], y[:, [1, 0]]),
    "running sum of all": lambda y, w: pt.cumsum(y),
    "flat": lambda y, w: y.flatten(),
    "reshaped": lambda y, w: y.reshape((-1, 1, 3)),
    "repeated": lambda y, w: pt.repeat(y, 2, axis=0),
    "searched": lambda y, w: pt.searchsorted(pt.sort(y[:, 0]), PLACES),
    "median": lambda y, w: pt.median(y),
    "one of two": lambda y, w: ifelse(y[-1, 0] > 5, y[1:], 2 * y),
}
PLACES = np.array([-1.0, 0, 1.5, 100, np.inf, np.nan])
COSTS = {
    "a column": lambda y, w: (y[:, 0] ** 2).sum() + y[:, 1].max() + w.sum(),
    "differences": lambda y, w: (pt.diff(y, axis=0) ** 2).sum() + w.sum(),
}


def check(inputs, outputs, values):
    found = [np.asarray(value) for value in compiled(inputs, outputs)(*values)]
    expected = in_python(inputs, outputs)(*values)
    assert [value.dtype for value in found] == [value.dtype for value in expected]
    assert_same(found, expected)


class TestTracesOfUntil:
    @pytest.mark.slow
    @pytest.mark.parametrize("part", range(4))
    def test_rows(self, part):
        x, w = pt.dvector("x"), pt.dmatrix("w")
        y = roots(x)
        check([x, w], [function(y, w) for function in list(ROWS.values())[part::4]], (X, W))

    @pytest.mark.parametrize("name", COSTS)
    def test_gradients(self, name):
        x, w = pt.dvector("x"), pt.dmatrix("w")
        cost = COSTS[name](roots(x), w)
        check([x, w], [cost, *pytensor.grad(cost, [x, w])], (X, W))

    def test_truth_values(self):
        x = pt.dvector("x")
        y = scan(lambda x: (x > 1, scanlib.until(x > 3)), x)
        results = [y.all(), y.any(), y.sum()]
        for values in ([2.0, 2, 4, 0], [0.0, 5, 0]):
            check([x], results, (np.array(values),))

    def test_rows_that_another_loop_starts_from(self):
        x, w = pt.dvector("x"), pt.dmatrix("w")
        y = roots(x)
        lags = {"initial": y[-2:], "taps": [-2, -1]}
        z = scan(lambda a, b: 0.5 * a + pt.sin(b), outputs_info=lags, n_steps=3)
        turned = scan(lambda h, w: w @ h, None, y[-1], w, n_steps=3)
        check([x, w], [y.sum(), z, turned], (X, W @ W.T))

    def test_no_rows(self):
        x = pt.dvector("x")
        y = scan(lambda x, h: (0.5 * h + x, scanlib.until(h > 3)), x, pt.constant(0.0))
        results = [y.sum(), y.prod(), 2 * y]
        check([x], results, (np.zeros(0),))

    @pytest.mark.parametrize("name", REFUSED)
    def test_what_cannot_be_compiled(self, name):
        x, w = pt.dvector("x"), pt.dmatrix("w")
        with pytest.raises(UnknownLengthError, match="NUMBA"):
            compiled([x, w], REFUSED[name](roots(x), w))(X, W)


LENGTHS = {
    "slices": lambda x, k: scan(lambda x, h: pt.tanh(h) + x, x[:k], pt.constant(0.0)).sum(),
    "last rows": lambda x, k: scan(lambda x, h: pt.tanh(h) + x, x[: k + 1], pt.constant(0.0))[-1],
    "steps": lambda x, k: scan(lambda x, h: pt.sin(h) + x, x, pt.constant(0.0), n_steps=k).sum(),
    "chosen steps": lambda x, k: scan(
        lambda h: pt.sin(h) + 1, None, x[0], n_steps=pt.switch(k > 2, np.int16(6), np.int16(0))
    ).sum(),
    "greatest": lambda x, k: scan(lambda x: x**2, x[: k + 1]).max(),
    "no loop": lambda x, k: x[k : k + 1].sum(),
}


class TestLengthsFromData:
    @pytest.mark.parametrize("name", LENGTHS)
    def test_of_a_row(self, name):
        """The number of steps of an inner loop is a row of the outer one."""
        x, k = pt.dvector("x"), pt.lvector("k")
        out = scanlib.map(lambda k: LENGTHS[name](x, k), k, return_updates=False)
        results = [out]
        if out.type.dtype == "float64":
            results.append(pytensor.grad(out.sum(), x))
        check([x, k], results, (np.arange(1.0, 7.0), np.array(K)))

    def test_gradient_of_an_affine_loop(self):
        """It has no sequence that bounds the number of steps."""
        x, k = pt.dvector("x"), pt.lvector("k")
        counted = scan(lambda x, h: 0.5 * h + x, x, pt.constant(0.0), n_steps=k[0])
        with pytest.raises(UnknownLengthError, match="NUMBA"):
            compiled([x, k], pytensor.grad(counted.sum(), x))(np.arange(8.0), np.array(K))

    def test_ranges_that_get_shorter(self):
        """The inner loop counts; its last values are what they are elsewhere."""
        table = pt.dmatrix("table")

        def row(i, table):
            later = pt.arange(i, table.shape[1])
            return scan(lambda j, t: t[i, j].set(pt.tanh(t[i - 1, j] + t[i, j - 1])), later, table)[
                -1
            ]

        last = scan(row, pt.arange(1, table.shape[0]), table)[-1]
        value = np.random.default_rng(3).normal(size=(4, 4))
        expected = in_python([table], [last])(value)
        assert_same([compiled([table], last)(value)], expected)

    def test_size_of_an_array(self):
        k = pt.lvector("k")
        y = scan(lambda h: h + 1, outputs_info=pt.constant(0.0), n_steps=3)[-1]
        with pytest.raises(UnknownLengthError, match="computes its size from data") as caught:
            compiled([k], [y, pt.full((k[1],), y)])(np.array(K))
        assert "The operation is Alloc" in caught.value.__notes__[0]

    def test_explain(self):
        x, k, n = pt.dvector("x"), pt.lvector("k"), pt.lscalar("n")
        why = "because JAX does not know the number of steps when it compiles"

        def runs(result, *inputs):
            (loop,) = scanlib.explain(compiled(inputs, result)).loops
            return [inner.runs for inner in loop.inner] or [loop.runs]

        def walk(x, n=None):
            return scan(lambda x, h: pt.tanh(h) + x, x, pt.constant(0.0), n_steps=n)

        assert runs(walk(x, k[0]), x, k) == [f"by lax.while_loop, {why}"]
        assert runs(walk(x[: k[0]]), x, k) == [f"by lax.while_loop, {why}"]
        (known,) = runs(walk(x, n), x, n)
        assert why not in known
        A = pt.dmatrix("A")
        power = scan(lambda x, h, A: A @ h + x, x, pt.zeros(2), n_steps=k[0], non_sequences=A)
        (linear,) = runs(power, x, k, A)
        assert linear == f"by lax.while_loop, {why}"
        rows = scanlib.map(lambda k: walk(x, k).sum(), k, return_updates=False)
        assert runs(rows, x, k) == [f"by lax.while_loop, {why}"]


def test_gradients_of_matrix_recurrences_that_stop():
    """Products of all steps are made of rows, as many as the loop took steps."""
    A, x, h = pt.dmatrix("A"), pt.dmatrix("x"), pt.dvector("h")
    _, y, _ = scanlib.loop(
        lambda h, x: (A @ h + x, A @ h), h, x, until=lambda h: h.sum() > 2, name="stops"
    )
    inputs = [A, x, h]
    outputs = pytensor.grad((y**2).sum(), inputs)
    values = [0.9 * np.eye(2), np.ones((6, 2)), np.array([0.1, -0.3])]
    assert_same(compiled(inputs, outputs)(*values), in_python(inputs, outputs)(*values), rtol=1e-12)


@pytest.mark.parametrize("lag", [None, 1, 3])
@pytest.mark.parametrize("reverse", [False, True])
def test_gradients_where_the_values_before_each_step_are_kept(lag, reverse):
    """The first rows of a history are there whatever the number of steps: their gradient is added
    to that of the initial rows."""
    x, h = pt.dvector("x"), pt.dvector("h")
    init = h[0] if lag is None else scanlib.lags(h, 3)

    def step(h, x):
        old, kept = (h, h) if lag is None else (h[1] - 0.3 * h[3], h[lag])
        return 0.5 * old + x, kept

    ended = lambda h: pt.abs(h if lag is None else h[1]) > 2  # noqa: E731
    _, y, _ = scanlib.loop(step, init, x, until=ended, reverse=reverse)
    outputs = [y, *pytensor.grad((y**2).sum(), [x, h])]
    for values in (np.linspace(-0.5, 1.5, 9), np.full(9, 5.0), np.zeros(0)):
        given = [values, np.array([0.1, 0.3, -0.4])]
        got = compiled([x, h], outputs)(*given)
        assert_same(got, in_python([x, h], outputs)(*given), rtol=1e-12)


@pytest.mark.parametrize("read", [lambda y: y[::-1], pt.cumsum, lambda y: pt.cumprod(y)[::-1]])
def test_rows_that_are_turned_around_or_collected(read):
    x = pt.dvector("x")
    y = scan(lambda x, h: (0.5 * h + x, scanlib.until(h > 2)), x, pt.constant(0.5))
    kept = read(y)
    outputs = [kept, pytensor.grad((kept * y).sum(), x), kept[1:].sum()]
    for values in ([1.0, 2.0, 1.5, 0.5, 3.0, 1.0], [0.1, 0.2], [9.0, 1.0, 1.0]):
        got = compiled([x], outputs)(values)
        assert_same(got, in_python([x], outputs)(values), rtol=1e-12)


def test_rows_at_the_ends_that_are_sure_to_exist():
    x = pt.dvector("x")
    walk = scan(lambda x, h: pt.tanh(h) + x, x, pt.constant(0.0))
    y = pt.concatenate([pt.zeros(3), walk[x > 0]])
    outputs = [y[:2] + pt.ones(2), y[-3:] + pt.ones(3), y[1:3] * [1.0, 2.0], y[2:], y[:-1], y[1:-2]]
    assert_same(compiled([x], outputs)([1.0, -1.0, 2.0]), in_python([x], outputs)([1.0, -1.0, 2.0]))
    assert_same(compiled([x], outputs)([-1.0]), in_python([x], outputs)([-1.0]))
