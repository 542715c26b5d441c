"""What stands around loops in numba mode: products of all steps, sums, softmax, checks."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.numba import linker
from scanlib.ops.row_ops.step_products import StepProducts

RNG = np.random.default_rng(4)


def assert_programs_alone(function):
    """numba compiles nothing of a function."""

    def compiled(node):
        raise AssertionError(f"{node} has no kernel")

    linker.GraphWriter(function.maker.fgraph, compiled, linker.constant_value)


def layouts(array):
    """Return an array laid out in memory in several ways."""
    turned = np.ascontiguousarray(array.swapaxes(-1, -2)).swapaxes(-1, -2)
    spread = np.repeat(np.repeat(array, 2, axis=-1), 3, axis=-2)[..., ::3, ::2]
    flipped = np.ascontiguousarray(array[::-1])[::-1]
    return [array, turned, spread, flipped]


# Ranks of the arguments, and whether products are added up.
KINDS = {
    "both vary": (3, 3, False),
    "sum": (3, 3, True),
    "the right one is fixed": (3, 2, False),
    "the left one is fixed": (2, 3, False),
    "one product": (2, 2, False),
}
# Steps, rows, inner size, columns: tiny, empty, vectors, and what goes to the library.
SIZES = [(5, 3, 4, 2), (0, 3, 4, 2), (2, 3, 0, 2), (2, 0, 3, 4), (2, 1, 4, 9), (4, 3, 1, 5)]
SIZES += [(4, 3, 5, 1), (1, 3, 4, 5), (3, 20, 17, 30), (2, 70, 65, 66), (300, 4, 4, 4)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, dtype", [*((kind, "float64") for kind in KINDS), ("both vary", "float32")]
)
def test_products_step_by_step(kind, dtype, mode):
    left, right, total = KINDS[kind]
    x = pt.tensor("x", dtype=dtype, shape=(None,) * left)
    y = pt.tensor("y", dtype=dtype, shape=(None,) * right)
    f = pytensor.function([x, y], StepProducts(total)(x, y), mode=mode)
    for steps, m, d, n in SIZES:
        a = RNG.standard_normal((steps, m, d)[3 - left :]).astype(dtype)
        b = RNG.standard_normal((steps, d, n)[3 - right :]).astype(dtype)
        expected = a.astype("float64") @ b
        expected = expected.sum(axis=0) if total else expected
        pairs = [(a_, b) for a_ in layouts(a)] + [(a, b_) for b_ in layouts(b)]
        for a_, b_ in [*pairs, (layouts(a)[1], layouts(b)[1])]:
            value = f(a_, b_)
            assert value.dtype == dtype
            np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-3)
    steps = [1 if rank == 2 else 3 for rank in (left, right)]
    with pytest.raises(ValueError, match="the columns of one are not the rows of the other"):
        f(np.ones((3, 2, 2)[3 - left :], dtype), np.ones((3, 3, 2)[3 - right :], dtype))
    if steps == [3, 3]:
        with pytest.raises(ValueError, match="one array has more of them"):
            f(np.ones((3, 2, 2), dtype), np.ones((2, 2, 2), dtype))


def test_products_of_other_ranks_or_dtypes_are_refused():
    x, y = pt.dmatrix("x"), pt.dtensor3("y")
    for total, left, right in [(True, x, y), (False, x[0], y), (False, y.astype("float32"), y)]:
        with pytest.raises(TypeError, match="expected two arrays of matrices of one dtype"):
            StepProducts(total)(left, right)


def test_products_sums_and_checks_behind_loops():
    x, A = pt.dtensor3("x"), pt.dmatrix("A")
    h = scanlib.scan(
        lambda x_t, h_prev, A: pt.tanh(x_t + pt.dot(h_prev, A)),
        sequences=x,
        outputs_info=pt.zeros_like(x[0]),
        non_sequences=A,
        return_updates=False,
    )
    products = pt.matmul(h, x)
    outputs = [h.sum(axis=(0, 1)), products.sum(), pt.specify_shape(h, (None, 3, 3)).mean()]
    f = pytensor.function([x, A], outputs, mode="NUMBA")
    assert_programs_alone(f)
    data, matrix = 0.3 * RNG.standard_normal((6, 3, 3)), RNG.standard_normal((3, 3))
    rows, state = [], np.zeros((3, 3))
    for row in data:
        state = np.tanh(row + state @ matrix)
        rows.append(state)
    trace = np.array(rows)
    expected = [trace.sum(axis=(0, 1)), (trace @ data).sum(), trace.mean()]
    for value, wanted in zip(f(data, matrix), expected, strict=True):
        np.testing.assert_allclose(value, wanted)


def test_softmax_behind_loops():
    x, axis_of = pt.dmatrix("x"), {"all": None, "rows": -1, "columns": (0,)}
    h = scanlib.scan(
        lambda row, h: pt.tanh(row + h),
        sequences=x,
        outputs_info=pt.zeros_like(x[0]),
        return_updates=False,
    )
    outputs = [pt.special.softmax(h, axis=axis) for axis in axis_of.values()]
    f = pytensor.function([x], outputs, mode="NUMBA")
    data = RNG.standard_normal((4, 3))
    rows, state = [], np.zeros(3)
    for row in data:
        state = np.tanh(row + state)
        rows.append(state)
    e = np.exp(np.array(rows))
    for found, axis in zip(f(data), (None, 1, 0), strict=True):
        np.testing.assert_allclose(found, e / e.sum(axis=axis, keepdims=True))


def test_softmax_of_what_is_not_a_number():
    x = pt.dmatrix("x")
    h = scanlib.scan(lambda row, h: h + row, x, pt.zeros_like(x[0]), return_updates=False)
    f = pytensor.function([x], pt.special.softmax(h, axis=1), mode="NUMBA")
    far = 1e3 * RNG.standard_normal((3, 4))
    far[1, 2] = -np.inf
    with np.errstate(invalid="ignore"):
        rows = np.cumsum(far, axis=0)
        e = np.exp(rows - rows.max(axis=1, keepdims=True))
        np.testing.assert_allclose(f(far), e / e.sum(axis=1, keepdims=True), rtol=1e-12)
    far[0, 0] = np.nan
    assert np.isnan(f(far)[:, 0]).all()


@pytest.mark.parametrize("dtype", ["int8", "int64", "uint16"])
def test_products_of_integers_wrap_around(dtype):
    """Also where no loop is left; PyTensor's numba functions compute in floating point."""
    x = pt.tensor("x", dtype=dtype, shape=(None, None, None))
    squares = scanlib.map(lambda x_t: x_t @ x_t, x, return_updates=False)
    f = pytensor.function([x], squares, mode="NUMBA")
    assert_programs_alone(f)
    data = np.full((2, 2, 2), np.iinfo(dtype).max - 3, dtype)
    np.testing.assert_array_equal(f(data), data @ data)
