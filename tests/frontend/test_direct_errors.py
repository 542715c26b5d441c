"""Bad input to the direct functions: errors that name the argument."""

from functools import partial

import numpy as np
import pytensor
import pytensor.sparse
import pytensor.tensor as pt
import pytest

import scanlib
from tests.checks import evaluate

REJECTED = (TypeError, ValueError)


class TestErrors:
    x = pt.matrix("x")

    @pytest.mark.all_forms
    @pytest.mark.parametrize(
        "function",
        [
            scanlib.cummax,
            scanlib.cummin,
            scanlib.cumlogsumexp,
            partial(scanlib.linear_scan, 0.5),
            lambda x, **options: scanlib.discounted_cumsum(x, 0.5, **options),
        ],
    )
    def test_axis_and_direction(self, function):
        for axis in (2, -3):
            with pytest.raises(np.exceptions.AxisError, match=f"axis={axis} is out of range"):
                function(self.x, axis=axis)
        for axis in (1.0, "time", None, True):
            with pytest.raises(TypeError, match="axis must be an integer, got"):
                function(self.x, axis=axis)
        with pytest.raises(TypeError, match="reverse must be True or False, got 1"):
            function(self.x, reverse=1)
        with pytest.raises(ValueError, match="is a scalar"):
            function(1.0)

    @pytest.mark.all_forms
    @pytest.mark.parametrize(
        "value",
        ["text", None, object(), [[1.0], [1.0, 2.0]]],
        ids=lambda value: type(value).__name__,
    )
    def test_no_numbers(self, value):
        with pytest.raises(TypeError, match=r"cummax: x must"):
            scanlib.cummax(value)
        with pytest.raises(TypeError, match=r"linear_scan: b must"):
            scanlib.linear_scan(self.x, value)

    def test_sparse(self):
        with pytest.raises(TypeError, match="x must be a PyTensor tensor"):
            scanlib.cummin(pytensor.sparse.csr_matrix("x"))

    def test_dtypes(self):
        mask = self.x > 0
        for function in (scanlib.linear_scan, scanlib.discounted_cumsum):
            with pytest.raises(TypeError, match=r"integer, float or complex .* got dtype bool"):
                function(mask, 0.5)
        with pytest.raises(TypeError, match=r"init .* got dtype bool; cast it"):
            scanlib.linear_scan(self.x, self.x, init=True)
        with pytest.raises(TypeError, match="got dtype bool"):
            scanlib.cumlogsumexp(mask)
        for function in (scanlib.cummax, scanlib.cummin, scanlib.cumlogsumexp):
            with pytest.raises(TypeError, match="got dtype complex128"):
                function(pt.zmatrix("x"))

    @pytest.mark.all_forms
    @pytest.mark.parametrize(
        "a, b, init, message",
        [
            ((5,), (6,), (), "a gives 5, b gives 6"),
            ((5, 2), (5, 3), (), r"a has \(2\), b has \(3\)"),
            ((2,), (5, 3), (), r"a has \(2\), b has \(3\)"),
            ((5, 3), (5, 3), (2,), r"init has \(2\)"),
            ((5, 3), (5, 3), (1, 3), "init must broadcast against one row"),
        ],
    )
    def test_shapes_that_do_not_fit(self, a, b, init, message):
        with pytest.raises(ValueError, match=message):
            scanlib.linear_scan(np.ones(a), np.ones(b), np.ones(init))

    def test_shapes_that_do_not_fit_at_run_time(self, mode):
        a, b, init = pt.matrix("a"), pt.matrix("b"), pt.vector("init")
        f = pytensor.function([a, b, init], scanlib.linear_scan(a, b, init), mode=mode)
        ones = np.ones
        assert f(ones((5, 3)), ones((5, 3)), ones(3)).shape == (5, 3)
        with pytest.raises(ValueError, match=r"`a`|`b`") as error:
            f(ones((5, 3)), ones((4, 3)), ones(3))
        assert "5" in str(error.value)
        for shapes in [((5, 2), (5, 3), 3), ((5, 3), (5, 2), 3), ((5, 3), (5, 3), 2)]:
            with pytest.raises(REJECTED):
                f(*(ones(shape) for shape in shapes))

    def test_pscan(self):
        with pytest.raises(ValueError, match="A must have at least the three dimensions"):
            scanlib.pscan(self.x, pt.tensor4("X"))
        with pytest.raises(ValueError, match="the same number of dimensions, got 3 and 4"):
            scanlib.pscan(pt.tensor3("A"), pt.tensor4("X"))
        with pytest.raises(ValueError, match="A gives 5, X gives 6"):
            scanlib.pscan(np.ones((2, 5, 3, 1)), np.ones((2, 6, 3, 1)))

    def test_discounts(self):
        with pytest.raises(ValueError, match=r"gamma must be a scalar, one .* got 3 dimensions"):
            scanlib.discounted_cumsum(self.x, pt.tensor3("gamma"))
        with pytest.raises(ValueError, match=r"gamma has \(3\), x has \(2\)"):
            scanlib.discounted_cumsum(np.ones((2, 3)), np.ones(3))

    def test_a_row_of_ones_is_not_broadcast_by_chance(self, fast_mode):
        """Only sizes that are known to be 1 broadcast, as everywhere in PyTensor."""
        a, b = pt.matrix("a"), pt.matrix("b")
        with pytest.raises(ValueError, match=r"^linear_scan: sequence `.` gives . rows"):
            evaluate(scanlib.linear_scan(a, b), {a: np.ones((1, 2)), b: np.ones((4, 2))}, fast_mode)
