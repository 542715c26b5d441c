"""Small integers and truth values beside floats: every operation converts its operands first.

What a rewrite takes out of a step and puts together, sums and products of rows above all, must not
be computed in the dtype of the rows: int8 wraps around, and truth values have no sign.
"""

from collections.abc import Callable, Sequence

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.logaddexp import logaddexp
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from tests.checks import assert_same
from tests.modes import MODES
from tests.reference import reference_scan
from tests.split_cases import count

SMALL = ("uint8", "int8", "bool", "uint64")
A = np.array([[0.5, 0.2], [-0.3, 0.4]])
START = np.array([1.0, -1.0])


def rows(dtype: str, *shape: int) -> np.ndarray:
    """Return rows of a dtype, the largest and the smallest numbers of small ones among them."""
    rng = np.random.default_rng(3)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "float32":
        return rng.choice(np.array([1e8, -1e8, 1.0], dtype), shape)
    low = 0 if dtype[0] == "u" else -128
    return rng.choice(np.array([low, 127, 100, 1, 2]), shape).astype(dtype)


def run(step: Callable, dtypes: Sequence[str], initials: Sequence, mode: str, **sizes: int):
    """Compile a loop over rows of some dtypes, compare its traces, and return the function.

    `step` takes the library's functions (`numpy` or `pytensor.tensor`), the rows in the dtype that
    they have or, for NumPy, in the one to which they are converted, and the states.
    """
    steps, width = sizes.get("steps", 40), sizes.get("width", 2)
    values = [rows(dtype, *([steps, width] if width else [steps])) for dtype in dtypes]
    inputs = [pt.TensorType(v.dtype, shape=(None,) * v.ndim)() for v in values]
    traces = scanlib.scan(
        lambda *args: step(pt, *args),
        inputs,
        list(initials),
        return_updates=False,
        return_list=True,
    )
    function = pytensor.function(inputs, traces, mode=MODES[mode])
    wide = [v.astype("float64") for v in values]
    assert_same(function(*values), reference_scan(lambda *a: step(np, *a), wide, initials))
    return function


RECURRENCES = {
    "a difference": lambda lib, n, h: [lib.dot(A, h) - n],
    "a sum of two": lambda lib, n, h: [lib.dot(A, h) + n + n * 1.0 - n],
    "a product": lambda lib, n, h: [lib.dot(A, h) * n * 1e-2],
    "the state itself": lambda lib, n, h: [lib.dot(A, h) - (h * 0.5 - n)],
    "the largest": lambda lib, n, h: [lib.max(A + h[None, :], axis=1) - n],
}


@pytest.mark.parametrize("dtype", SMALL)
@pytest.mark.parametrize("name", RECURRENCES)
def test_matrix_recurrences(name, dtype):
    function = run(RECURRENCES[name], [dtype], [START], "c")
    assert count(function, LinearScan) == 1


@pytest.mark.parametrize("dtype", SMALL)
def test_systems(dtype):
    def step(lib, n, h, g):
        return [lib.dot(A, h) + lib.dot(A.T, g) - n, lib.dot(A, g) * 0.5 + lib.dot(A.T, h) - n]

    function = run(step, [dtype], [START, START], "c")
    assert count(function, LinearScan) == 1


def test_two_factors_of_int8():
    function = run(lambda lib, a, b, h: [lib.dot(A, h) * a * b * 1e-4], ["int8"] * 2, [START], "c")
    assert count(function, LinearScan) == 1


SHIFTS = {
    "clamp": lambda lib, n, h: [lib.maximum(h - n, -3.5)],
    "clamp of two": lambda lib, n, m, h: [lib.maximum(h + n + m, -3.5)],
    "clip": lambda lib, n, h: [lib.clip(h - n, -3.5, 200.0)],
}


@pytest.mark.parametrize("dtype", [*SMALL, "float32"])
@pytest.mark.parametrize("name", SHIFTS)
def test_shifts(name, dtype):
    many = 2 if "two" in name else 1
    function = run(SHIFTS[name], [dtype] * many, [np.float64(-1e8)], "c", width=0, steps=700)
    (node,) = (n for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan))
    assert [r.family for r in node.op.recurrences] == ["clamp"]


@pytest.mark.parametrize("dtype", SMALL)
def test_shifted_logarithms(dtype):
    bound = np.float64(0.5)
    values = rows(dtype, 700)
    n, h, b = pt.vector("n", dtype=dtype), pt.dscalar("h"), pt.dscalar("b")
    trace = scanlib.scan(lambda n, h, b: logaddexp(h - n, b), n, h, b, return_updates=False)
    function = pytensor.function([n, h, b], trace, mode=MODES["c"])
    (node,) = (n for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan))
    assert [r.family for r in node.op.recurrences] == ["log-affine"]
    (expected,) = reference_scan(
        lambda n, h: [np.logaddexp(h - n, bound)], [values.astype("float64")], [np.float64(1)]
    )
    np.testing.assert_allclose(function(values, 1.0, bound), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", ["uint8", "uint64", "int8", "bool"])
def test_flipped_bits(dtype):
    x = pt.vector("x", dtype=dtype)
    start = np.zeros((), dtype)
    trace = scanlib.scan(lambda x, h: ~h ^ x, x, start, return_updates=False)
    function = pytensor.function([x], trace, mode=MODES["c"])
    assert count(function, ElemwiseScan) == 1
    values = rows(dtype, 9)
    assert_same([function(values)], reference_scan(lambda x, h: [~h ^ x], [values], [start]))


def test_bits_of_another_dtype():
    x = pt.vector("x", dtype="uint8")
    trace = scanlib.scan(lambda x, h: h | x, x, np.int64(1024), return_updates=False)
    function = pytensor.function([x], trace, mode=MODES["c"])
    np.testing.assert_array_equal(function(np.array([1, 2, 4], "uint8")), [1025, 1027, 1031])
    assert count(function, ElemwiseScan) == 1


SUMS = {
    "rows": lambda W, x, c: c - x[:2],
    "two rows": lambda W, x, c: c + x[:2] + x[1:],
    "a product": lambda W, x, c: c + W @ x,
    "a sum of a product": lambda W, x, c: c + (W @ x).sum(),
    "a sum": lambda W, x, c: c + x.sum() - W[0, 0],
}


@pytest.mark.parametrize("dtype", ["int8", "uint8", "bool", "float32"])
@pytest.mark.parametrize("name", SUMS)
def test_sums_over_time(name, dtype):
    step = SUMS[name]
    if name == "rows" and dtype == "bool":
        pytest.skip("truth values are not subtracted")
    weights = np.random.default_rng(0).normal(size=(2, 3))
    values = rows(dtype, 300, 3)
    W, x = pt.dmatrix("W"), pt.matrix("x", dtype=dtype)
    cost, other = scanlib.scan(
        lambda x, c, d: [step(W, x, c), d + W @ x],
        x,
        [np.zeros(2), np.zeros(2)],
        return_updates=False,
    )
    function = pytensor.function([W, x], [cost[-1], other[-1]], mode=MODES["c"])
    assert count(function, Scan) == 0
    wide = values.astype("float64")
    c = d = np.zeros(2)
    for row in wide:
        c, d = step(weights, row, c), d + weights @ row
    assert_same(function(weights, values), [c, d], rtol=1e-7)


def test_sums_of_integer_products():
    W, x = pt.lmatrix("W"), pt.bmatrix("x")
    trace = scanlib.scan(lambda x, c: c + W @ x, x, np.zeros(4, "int64"), return_updates=False)
    function = pytensor.function([W, x], trace[-1], mode=MODES["c"])
    weights, values = np.arange(12).reshape(4, 3), np.full((300, 3), 100, "int8")
    np.testing.assert_array_equal(function(weights, values), weights.sum(axis=1) * 30_000)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["c", "numba"])
@pytest.mark.parametrize("dtype", ["int8", "int64"])
def test_products_of_integers_that_differ(dtype, mode):
    x, y = pt.tensor3("x", dtype=dtype), pt.tensor3("y", dtype=dtype)
    values = np.random.default_rng(0).integers(-100, 100, (2, 5, 3, 3)).astype(dtype)
    for step in (lambda a, b: a @ b, lambda a, b: a @ b[:, :1], lambda a, b: a[:1] @ b):
        trace = scanlib.scan(step, [x, y], return_updates=False)
        function = pytensor.function([x, y], trace, mode=MODES[mode])
        assert_same(
            [function(*values)], [np.array([step(*pair) for pair in zip(*values, strict=True)])]
        )


@pytest.mark.parametrize("name", ["truth values", "int8"])
def test_sums_of_stacked_numbers(name):
    dtype, make = {
        "truth values": ("float64", lambda lib, x, y: lib.stack([x, y]) > 0),
        "int8": ("int8", lambda lib, x, y: lib.maximum(lib.stack([x, y]), np.int8(3))),
    }[name]
    values = [np.full(5, 100, dtype), np.full(5, 120, dtype)]
    x, y = pt.vector(dtype=dtype), pt.vector(dtype=dtype)
    trace = scanlib.scan(
        lambda x, y, h: 0.5 * h + make(pt, x, y).sum(), [x, y], np.float64(0), return_updates=False
    )
    function = pytensor.function([x, y], trace, mode=MODES["c"])
    expected = reference_scan(
        lambda x, y, h: [0.5 * h + make(np, x, y).sum()], values, [np.float64(0)]
    )
    assert_same([function(*values)], expected)


@pytest.mark.parametrize("mode", ["c", "numba"])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_sums_over_channels_that_wrap_around(dtype, mode):
    """What is summed in a small dtype, and wider only then, has wrapped around before."""
    x, values = pt.matrix("x", dtype=dtype), np.full((4, 3), 100, dtype)

    def step(lib, x, n):
        own = lib.where(n < 0, lib.zeros_like(x), x)  # a kernel, not a batch of sums
        total = lib.sum(own, dtype=dtype)
        return [n + 1, total.astype("int64"), total * n, total.astype("int64") + n]

    info = [np.int64(0), None, None, None]
    traces = scanlib.scan(lambda *a: step(pt, *a), x, info, return_updates=False)
    function = pytensor.function([x], traces, mode=MODES[mode])
    assert_same(function(values), reference_scan(lambda *a: step(np, *a), [values], info))


@pytest.mark.parametrize("mode", ["c", "numba"])
def test_reciprocals_of_integers(mode):
    """PyTensor's numba function divides 1.0 in float32, whatever the integer."""
    i = pt.lvector("i")
    values = np.arange(1, 8)
    trace = scanlib.scan(lambda i, h: 0.5 * h + 1 / i, i, np.float64(0.5), return_updates=False)
    inverse = scanlib.map(lambda i: pt.exp(1 / i), i, return_updates=False)
    found, other = pytensor.function([i], [trace, inverse], mode=MODES[mode])(values)
    expected = reference_scan(lambda i, h: [0.5 * h + 1 / i], [values], [np.float64(0.5)])
    np.testing.assert_allclose(found, expected[0], rtol=1e-14)
    np.testing.assert_allclose(other, np.exp(1 / values), rtol=1e-14)
