"""The hyperbolic tangent that compilers vectorize, against extended precision."""

import numba
import numpy as np
import pytest

from scanlib.codegen.vector_math import VECTOR_TANH

SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 5e-324, -5e-324, 1e300, -1e300, 19.0, 20.0, -9.0]


@pytest.fixture(params=["float64", "float32"])
def tanh(request):
    scalar = VECTOR_TANH[request.param]

    @numba.njit
    def loop(x, out):
        for i in range(x.shape[0]):
            out[i] = scalar(x[i])

    def run(values):
        with np.errstate(over="ignore"):
            x = np.asarray(values, dtype=request.param)
        out = np.empty_like(x)
        loop(x, out)
        return x, out

    return run


@pytest.mark.parametrize("scale", [1e-9, 1e-4, 1e-2, 0.1, 0.5, 1.0, 3.0, 10.0, 30.0])
def test_error_in_units_in_the_last_place(tanh, scale):
    rng = np.random.default_rng(0)
    x, out = tanh(scale * rng.normal(size=50_000))
    exact = np.tanh(x.astype(np.longdouble))
    unit = np.spacing(np.abs(exact).astype(x.dtype)).astype(np.longdouble)
    assert np.max(np.abs(out - exact) / unit) < 4


def test_special_values(tanh):
    x, out = tanh(SPECIAL)
    np.testing.assert_allclose(out, np.tanh(x), rtol=1e-6)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(np.tanh(x)))
    assert np.all(np.abs(out[~np.isnan(out)]) <= 1)
