"""`lfilter` against SciPy's."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import scipy.signal
from hypothesis import given
from hypothesis import strategies as st

import scanlib
from scanlib.frontend.filtering import MAX_DELAYS
from tests.checks import assert_derivatives, evaluate
from tests.direct import LENGTHS, call, python_loops, unknown
from tests.modes import MODES

B = np.array([0.5, 0.3, -0.2, 0.1])
A = np.array([1.5, -0.4, 0.2, 0.1])


def assert_close(actual, expected):
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        rtol = 1e-4 if ours.dtype in ("float32", "complex64") else 1e-10
        np.testing.assert_allclose(ours, theirs, rtol=rtol, atol=rtol)


def stable(rng, count, dtype="float64"):
    """Draw a denominator with its roots inside the unit circle, its first item not one."""
    a = rng.normal(size=count)
    a[1:] *= 0.8 / max(1.0, np.abs(a[1:]).sum())
    a[0] = 1.0
    return (a * 1.5).astype(dtype)


@st.composite
def cases(draw):
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    counts = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dtypes = [draw(st.sampled_from(["float64", "float32", "complex128"])) for _ in range(3)]
    b = rng.normal(size=counts[0]).astype(dtypes[0])
    a = stable(rng, counts[1], dtypes[1])
    row = draw(st.lists(st.sampled_from([1, 2, 3]), max_size=2))
    axis = draw(st.integers(-len(row) - 1, len(row)))
    at = axis % (len(row) + 1)
    length = draw(st.sampled_from(LENGTHS[:9]))
    x = rng.normal(size=(*row[:at], length, *row[at:])).astype(dtypes[2])
    zi = None
    if draw(st.booleans()):
        sizes = [draw(st.sampled_from([1, size])) for size in row]
        zi = rng.normal(size=(*sizes[:at], max(counts) - 1, *sizes[at:]))
    return b, a, x, axis, zi


def filtered(b, a, x, axis, zi):
    """Call SciPy, and give its answer as a list."""
    dtype = np.result_type(b, a, x, *([] if zi is None else [zi]))
    if zi is not None:
        sizes = list(x.shape)
        sizes[axis] = zi.shape[axis]
        zi = np.broadcast_to(zi, sizes).astype(dtype)
    if x.size == 0:
        # SciPy raises, or returns delays that were never written.
        return [x.astype(dtype), *([] if zi is None else [zi])]
    if zi is None:
        return [scipy.signal.lfilter(b, a, x, axis)]
    return list(scipy.signal.lfilter(b.astype(dtype), a, x, axis, zi))


class TestLfilter:
    @pytest.mark.slow
    @given(cases(), st.booleans())
    def test_agrees_with_scipy(self, case, known_order):
        b, a, x, axis, zi = case
        values = [b, a, x, *([] if zi is None else [zi])]
        variables = [unknown(value, static=known_order and k < 2) for k, value in enumerate(values)]
        given_b, given_a, given_x, *given_zi = variables
        result = scanlib.lfilter(given_b, given_a, given_x, axis, *given_zi)
        outputs = list(result) if given_zi else [result]
        with python_loops() as mode:
            actual = evaluate(outputs, dict(zip(variables, values, strict=True)), mode)
        assert_close(actual, filtered(b, a, x, axis, zi))

    @pytest.mark.slow
    @pytest.mark.parametrize("order", [0, 1, 3, MAX_DELAYS + 3])
    def test_lengths(self, mode, order):
        rng = np.random.default_rng(order)
        b, a = rng.normal(size=order + 1), stable(rng, order + 1)
        x, zi = pt.matrix("x"), pt.matrix("zi")
        f = pytensor.function([x, zi], scanlib.lfilter(b, a, x, zi=zi), mode=mode)
        for length in LENGTHS:
            values = rng.normal(size=(2, length)), rng.normal(size=(2, order))
            assert_close(f(*values), filtered(b, a, values[0], -1, values[1]))

    def test_symbolic_order(self, mode):
        rng = np.random.default_rng(1)
        b, a, x = pt.vector("b"), pt.vector("a"), pt.vector("x")
        f = pytensor.function([b, a, x], scanlib.lfilter(b, a, x), mode=mode)
        for counts in [(1, 1), (1, 3), (4, 2), (12, 20)]:
            values = rng.normal(size=counts[0]), stable(rng, counts[1]), rng.normal(size=50)
            assert_close([f(*values)], [scipy.signal.lfilter(*values)])

    @pytest.mark.parametrize("dtype", ["float32", "complex128"])
    def test_dtypes(self, mode, dtype):
        x = np.random.default_rng(2).normal(size=(30, 2)).astype(dtype)
        b, a = B.astype(dtype), A.astype(dtype)
        actual = call(lambda x: scanlib.lfilter(b, a, x, axis=0), x, mode=mode)
        assert_close([actual], [scipy.signal.lfilter(b, a, x, axis=0)])

    def test_integers_become_floats(self, fast_mode):
        x = np.array([1, 2, 3, 4])
        actual = call(lambda x: scanlib.lfilter([1, 1], [2, 1], x), x, mode=fast_mode)
        assert_close([actual], [scipy.signal.lfilter([1.0, 1], [2, 1], x)])

    def test_scalar_coefficients(self, fast_mode):
        x = np.array([1.0, 2.0])
        assert call(lambda x: scanlib.lfilter(3.0, 2.0, x), x, mode=fast_mode).tolist() == [1.5, 3]

    def test_a_filter_of_practice(self, mode):
        b, a = scipy.signal.butter(4, 0.1)
        x = np.random.default_rng(3).normal(size=(3, 500))
        start = scipy.signal.lfilter_zi(b, a) * x[:, :1]
        actual = call(lambda x, zi: scanlib.lfilter(b, a, x, zi=zi), x, start, mode=mode)
        assert_close(actual, scipy.signal.lfilter(b, a, x, zi=start))

    def test_pieces_make_the_whole(self, fast_mode):
        """The last delays of one piece are the initial delays of the next."""
        x = np.random.default_rng(4).normal(size=(2, 40))
        signal, zi = pt.matrix("x"), pt.matrix("zi")
        f = pytensor.function([signal, zi], scanlib.lfilter(B, A, signal, zi=zi), mode=fast_mode)
        pieces, delays = [], np.zeros((2, 3))
        for start, end in [(0, 1), (1, 1), (1, 20), (20, 40)]:
            piece, delays = f(x[:, start:end], delays)
            pieces.append(piece)
        assert_close([np.concatenate(pieces, axis=1)], [scipy.signal.lfilter(B, A, x)])

    @pytest.mark.slow
    @pytest.mark.parametrize("known_order", [True, False])
    def test_derivatives(self, mode, known_order):
        rng = np.random.default_rng(5)
        values = [B, A, rng.normal(size=(2, 7)), rng.normal(size=(2, 3))]
        names = ["b", "a", "x", "zi"]
        variables = [
            unknown(value, name, static=known_order and value.ndim == 1)
            for name, value in zip(names, values, strict=True)
        ]
        b, a, x, zi = variables
        y, zf = scanlib.lfilter(b, a, x, zi=zi)

        def reference(b, a, x, zi):
            y, zf = scipy.signal.lfilter(b, a, x, zi=zi)
            return np.sin(y).sum() + (zf**2).sum()

        assert_derivatives(
            pt.sin(y).sum() + (zf**2).sum(),
            dict(zip(variables, values, strict=True)),
            reference,
            mode,
            # Under the C linker the loops are compiled by numba too, and much quicker.
            order=1 if mode is MODES["numba"] and not known_order else 2,
        )

    def test_static_shapes(self):
        x, zi = pt.tensor(shape=(None, 9, 2)), pt.tensor(shape=(None, 3, 1))
        assert scanlib.lfilter(B, A, x, axis=1).type.shape == (None, 9, 2)
        y, zf = scanlib.lfilter(B, A, x, axis=1, zi=zi)
        assert y.type.shape == (None, 9, 2)
        assert zf.type.shape == (None, 3, 2)


class TestErrors:
    x = pt.matrix("x")

    @pytest.mark.parametrize(
        "b, a, message",
        [
            (np.ones((2, 2)), [1.0], "b must be a vector"),
            ([1.0], np.ones((1, 1)), "a must be a vector"),
            ([], [1.0], "b must be a vector that is not empty"),
            ([1.0], [0.0, 1.0], r"a\[0\] must not be zero"),
        ],
    )
    def test_coefficients(self, b, a, message):
        with pytest.raises(ValueError, match=message):
            scanlib.lfilter(b, a, self.x)

    def test_forward_derivative_by_unknown_coefficients(self, fast_mode):
        a = pt.vector("a")
        tangent = pytensor.gradient.pushforward(
            scanlib.lfilter([1.0], a, self.x), self.x, self.x**2, use_op_pushforward=True
        )
        f = pytensor.function(
            [a, self.x], [tangent, scanlib.lfilter([1.0], a, self.x**2)], mode=fast_mode
        )
        np.testing.assert_allclose(*f([1.0, 0.5], np.arange(6.0).reshape(2, 3)))

    def test_leading_zero_at_run_time(self, mode):
        a = pt.vector("a")
        f = pytensor.function([a, self.x], scanlib.lfilter([1.0], a, self.x), mode=mode)
        with pytest.raises(AssertionError, match=r"a\[0\]"):
            f([0.0, 1.0], np.ones((2, 3)))

    @pytest.mark.parametrize(
        "shape, message",
        [
            ((3,), "zi must have as many dimensions as x, 2, got 1"),
            ((2, 2), "which is 3, got 2"),
            ((5, 3), r"expected \(2,\), got \(5,\)"),
        ],
    )
    def test_initial_delays(self, shape, message):
        with pytest.raises(ValueError, match=message):
            scanlib.lfilter(B, A, pt.tensor("x", shape=(2, None)), zi=np.zeros(shape))

    def test_initial_delays_at_run_time(self, mode):
        zi = pt.matrix("zi")
        y, _ = scanlib.lfilter(B, A, self.x, zi=zi)
        f = pytensor.function([self.x, zi], y, mode=mode)
        with pytest.raises(AssertionError, match="zi must have"):
            f(np.ones((2, 3)), np.ones((2, 2)))

    def test_axis_and_types(self):
        with pytest.raises(np.exceptions.AxisError, match="axis=2 is out of range for x"):
            scanlib.lfilter(B, A, self.x, axis=2)
        with pytest.raises(TypeError, match=r"lfilter: b must have .* got dtype bool"):
            scanlib.lfilter([True, False], A, self.x)
        with pytest.raises(ValueError, match="x is a scalar"):
            scanlib.lfilter(B, A, 1.0)
