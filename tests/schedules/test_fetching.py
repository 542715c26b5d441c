"""Rows that are asked for ahead: long loops over rows of every length, in numba and C."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.kernels.language import INT64, Writer, write_function
from scanlib.kernels.spans import LINE
from scanlib.schedules import channels
from scanlib.schedules.channels import LEAST_BYTES, rows_ahead
from tests.kernel_interpreter import call

MODES = ("NUMBA", "CVM")


def compiled(mode, reverse=False, ndim=2):
    a, b = (pt.tensor(dtype="float64", shape=(None,) * ndim) for _ in "ab")
    h0 = pt.tensor(dtype="float64", shape=(None,) * (ndim - 1))
    h, z = scanlib.scan(
        lambda a, b, h: (a * h + b, pt.sqr(h)),
        [a, b],
        [h0, None],
        go_backwards=reverse,
        return_updates=False,
    )
    return pytensor.function([a, b, h0], [h, z], mode=mode)


def expected(a, b, h0, reverse=False):
    rows = reversed(range(len(a))) if reverse else range(len(a))
    states, squares = [], []
    for t in rows:
        squares.append(np.square(h0))
        h0 = a[t] * h0 + b[t]
        states.append(h0)
    return np.array(states), np.array(squares)


@pytest.fixture(scope="module", params=MODES)
def functions(request):
    """Loops as on processors that do not guess rows of later steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(channels, "foresees_rows", lambda: False)
        yield {reverse: compiled(request.param, reverse) for reverse in (False, True)}


def test_rows_that_the_processor_guesses(monkeypatch):
    """Kernels for such a processor ask for no rows; for others they do."""
    asked = []
    monkeypatch.setattr(Writer, "prefetch", lambda *arguments: asked.append(arguments))
    for foresees in (True, False):
        monkeypatch.setattr(channels, "foresees_rows", lambda foresees=foresees: foresees)
        f, data = compiled("CVM"), (np.ones((4, 3)), np.ones((4, 3)), np.ones(3))
        for result, value in zip(f(*data), expected(*data), strict=True):
            np.testing.assert_array_equal(result, value)
        assert bool(asked) is not foresees


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "steps,width", [(9_000, 8), (5_003, 17), (700, 257), (130, 1_024), (99, 1_025)]
)
def test_long_loops_over_rows(functions, steps, width, reverse):
    rng = np.random.default_rng(steps)
    a, b = rng.uniform(-0.9, 0.9, (2, steps, width))
    h0 = rng.normal(size=width)
    assert 4 * a.nbytes > LEAST_BYTES
    results = functions[reverse](a, b, h0)
    for result, value in zip(results, expected(a, b, h0, reverse), strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["gaps", "backwards", "columns", "repeated"])
def test_rows_that_do_not_lie_side_by_side(functions, layout):
    rng = np.random.default_rng(1)
    a, b = rng.uniform(-0.9, 0.9, (2, 3_000, 40))
    views = {
        "gaps": lambda x: np.repeat(np.repeat(x, 2, axis=1), 2, axis=0)[::2, :40],
        "backwards": lambda x: x[::-1],
        "columns": np.asfortranarray,
        "repeated": lambda x: np.broadcast_to(x[0], x.shape),
    }
    a, b = (views[layout](x) for x in (a, b))
    h0 = rng.normal(size=40)
    for result, value in zip(functions[False](a, b, h0), expected(a, b, h0), strict=True):
        np.testing.assert_allclose(result, value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_in_threads_and_with_two_axes(mode):
    rng = np.random.default_rng(2)
    a, b = rng.uniform(-0.9, 0.9, (2, 1_500, 9, 20))
    h0 = rng.normal(size=(9, 20))
    results = []
    for threads in (1, 2):
        flags = {"scanlib__threads": threads, "scanlib__parallel_channels": 1_000}
        with pytensor.config.change_flags(**flags):
            results.append(compiled(mode, ndim=3)(a, b, h0))
    for one, two, value in zip(*results, expected(a, b, h0), strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, value, rtol=1e-12, atol=1e-12)


def test_how_many_rows_ahead():
    function = write_function("ahead", [INT64] * 3, lambda w, n, x, y: rows_ahead(w, n, [x, y]))

    def ahead(steps, items):
        (rows,) = call(function, steps, 8 * items, 8 * items)
        return rows

    assert ahead(100_000, 16) == 32
    assert ahead(100_000, 1_024) == 1
    assert ahead(100_000, 7) == 0  # shorter than what is fetched together
    assert ahead(100_000, 1_025) == 0  # of several pages
    assert ahead(100, 16) == 0  # fits in a cache


def at_offset(array, offset):
    """Return a copy of an array that begins so many bytes behind a line of the cache."""
    memory = np.empty(array.nbytes + 2 * LINE, np.uint8)
    first = -memory.ctypes.data % LINE + offset
    copy = memory[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("is_inner", [False, True])
def test_matrices_are_multiplied_wherever_they_begin(is_inner, dtype, mode):
    """Large ones are copied to where lines of the cache begin, unless steps are few; results are
    the same, bit by bit."""
    W, x = pt.matrix("W", dtype=dtype), pt.matrix("x", dtype=dtype)
    h = pt.vector("h", dtype=dtype)

    def network(x, h, W):
        return pt.tanh(W @ h + x)

    def whole(x, h, W):
        trace = scanlib.scan(
            network, sequences=[x], outputs_info=[h], non_sequences=[W], return_updates=False
        )
        return trace[-1]

    if is_inner:
        last = scanlib.scan(
            lambda h, x, W: whole(x, h, W),
            outputs_info=[h],
            non_sequences=[x, W],
            n_steps=2,
            return_updates=False,
        )[-1]
    else:
        last = whole(x, h, W)
    f = pytensor.function([x, h, W], [last, pytensor.grad(last.sum(), W)], mode=mode)
    for n, steps in ((32, 64), (40, 70), (33, 70), (64, 3)):
        rng = np.random.default_rng(n)
        matrix = (rng.normal(size=(n, n)) / n**0.5).astype(dtype)
        rows, start = rng.normal(size=(steps, n)).astype(dtype), np.zeros(n, dtype)
        expected = f(rows, start, at_offset(matrix, 0))
        state = start
        for row in [*rows, *rows] if is_inner else rows:
            state = np.tanh(matrix @ state + row)
        np.testing.assert_allclose(expected[0], state, rtol=1e-3 if dtype == "float32" else 1e-9)
        for offset in (matrix.itemsize, 16, 32):
            moved = at_offset(matrix, offset)
            for found, wanted in zip(f(rows, start, moved), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)
            np.testing.assert_array_equal(moved, matrix)
