"""Loops over complex numbers whose steps take them apart: parts, conjugates, sizes, quotients."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import optdb
from pytensor.graph.fg import FunctionGraph

import scanlib
from scanlib.backends.handler.programs import program_of
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan


def numbers(rng, dtype, *shape):
    return (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(dtype)


def loop(dtype, ndim):
    """Return the inputs and the results of a loop with `ndim` axes of channels."""
    x = pt.tensor("x", dtype=dtype, shape=(None,) * (ndim + 1))
    a, h0 = (pt.tensor(name, dtype=dtype, shape=(None,) * ndim) for name in "ah")

    def step(x, h, a):
        new = a * h / (x * x + 2) - pt.conj(x) * pt.imag(h)
        return new, pt.real(h) + pt.real(a), abs(new)

    return [x, a, h0], scanlib.scan(step, x, [h0, None, None], a, return_updates=False)


def plain(x, a, h):
    """The same loop in Python."""
    results = [], [], []
    for row in x:
        results[1].append(np.real(h) + np.real(a))
        h = a * h / (row * row + 2) - np.conj(row) * np.imag(h)
        results[0].append(h)
        results[2].append(abs(h))
    shape = x.shape
    return [np.reshape(result, shape) for result in results]


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
@pytest.mark.parametrize("channels", [(), (5,)])
def test_values(dtype, channels, mode):
    rng = np.random.default_rng(3)
    inputs, results = loop(dtype, len(channels))
    function = pytensor.function(inputs, results, mode=mode)
    tolerance = 1e-3 if dtype == "complex64" else 1e-10
    for steps in (0, 1, 7):
        values = [numbers(rng, dtype, *shape) for shape in [(steps, *channels), channels, channels]]
        copies = [np.array(value) for value in values]
        for found, expected in zip(function(*copies), plain(*values), strict=True):
            np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance)
        for copy, value in zip(copies, values, strict=True):
            np.testing.assert_array_equal(copy, value)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_parts_of_a_number_beside_a_loop(dtype):
    """They are computed outside of kernels, once for all steps."""
    x, a = pt.vector("x", dtype=dtype), pt.scalar("a", dtype=dtype)
    h = scanlib.scan(
        lambda x, a: pt.real(x) + pt.real(a) * pt.imag(a) + abs(pt.conj(a)),
        x,
        non_sequences=a,
        return_updates=False,
    )
    function = pytensor.function([x, a], [h, pt.imag(a) * h.sum()], mode="NUMBA")
    rng = np.random.default_rng(4)
    values = numbers(rng, dtype, 3), numbers(rng, dtype)
    row = values[0].real + values[1].real * values[1].imag + abs(values[1])
    for found, expected in zip(function(*values), [row, values[1].imag * row.sum()], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_has_c_code():
    inputs, results = loop("complex128", 1)
    graph = FunctionGraph(inputs, results, clone=True)
    optdb.query("+fast_run").rewrite(graph)
    (op,) = [node.op for node in graph.apply_nodes if isinstance(node.op, ElemwiseScan)]
    assert program_of(op) is not None


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_quotients_of_extreme_numbers(size, fast_mode):
    """The square of the divisor would overflow, or vanish."""
    x, h0 = pt.zvector("x"), pt.zscalar("h0")
    h = scanlib.scan(lambda x, h: h / x, x, h0, return_updates=False)
    values = np.array([size * (3 - 4j), (1 + 2j) / size, 0.5j])
    expected = 2j / np.array([values[0], values[0] * values[1], values[0] * values[1] * 0.5j])
    function = pytensor.function([x, h0], h, mode=fast_mode)
    np.testing.assert_allclose(function(values, 2j), expected, rtol=1e-12)


def test_real_parts_of_a_diagonal_layer(mode):
    """A state-space layer: complex poles, real results."""
    rng = np.random.default_rng(4)
    a, x, c = pt.zvector("a"), pt.zmatrix("x"), pt.zvector("c")
    y = scanlib.scan(
        lambda x, h, a, c: (a * h + x, 2 * pt.real(c * h)), x, [pt.zeros_like(a), None], [a, c],
        return_updates=False,
    )[1]  # fmt: skip
    values = (
        numbers(rng, "complex128", 4),
        numbers(rng, "complex128", 6, 4),
        numbers(rng, "complex128", 4),
    )
    expected, h = [], np.zeros(4, complex)
    for row in values[1]:
        expected.append(2 * np.real(values[2] * h))
        h = values[0] * h + row
    function = pytensor.function([a, x, c], y, mode=mode)
    np.testing.assert_allclose(function(*values), expected, rtol=1e-12)
