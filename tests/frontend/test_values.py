"""What other packages call arrays: sequences, initial values, non-sequences, direct functions."""

import numpy as np
import pytensor.sparse
import pytensor.tensor as pt
import pytest

import scanlib
from tests.checks import in_python

pytestmark = pytest.mark.all_forms
VALUES = [0.5, -1.0, 2.0]


def _series():
    return pytest.importorskip("pandas").Series(VALUES, name="rates", index=[7, 8, 9])


def _nullable():
    return pytest.importorskip("pandas").Series(VALUES, dtype="Float64")


def _index():
    return pytest.importorskip("pandas").Index(VALUES)


def _xarray():
    return pytest.importorskip("xarray").DataArray(VALUES, dims="time", name="rates")


def _torch():
    return pytest.importorskip("torch").tensor(VALUES)


def _jax():
    return pytest.importorskip("jax").numpy.asarray(VALUES)


class OnlyDlpack:
    """An array that NumPy reads by the exchange protocol alone."""

    def __dlpack__(self, **options):
        return np.array(VALUES).__dlpack__(**options)

    def __dlpack_device__(self):
        return np.array(VALUES).__dlpack_device__()


class OnlyToNumpy:
    def to_numpy(self):
        return np.array(VALUES)


MAKERS = [
    _series, _nullable, _index, _xarray, _torch, _jax, OnlyDlpack, OnlyToNumpy,
    lambda: VALUES, lambda: tuple(VALUES), lambda: np.array(VALUES, dtype=object),
    lambda: [np.float32(value) for value in VALUES],
]  # fmt: skip


@pytest.mark.parametrize("make", MAKERS)
def test_vectors(make):
    """As a sequence, an initial state, a non-sequence, and for functions of one array."""
    value, start, h0 = make(), make(), pt.dvector("h0")
    walked = scanlib.scan(lambda v: 2 * v, sequences=value, return_updates=False)
    # A list would be a list of states or of non-sequences.
    state = scanlib.scan(
        lambda h, k: h + k,
        outputs_info={"initial": start, "taps": [-1]},
        non_sequences=[make()],
        n_steps=2,
        return_updates=False,
    )
    kept = scanlib.filter(lambda v: v > 0, make())
    direct = [
        scanlib.cummax(make()),
        scanlib.linear_scan(make(), h0),
        scanlib.associative_scan(lambda a, b: (a[0] + b[0],), (make(),))[0],
        scanlib.lfilter(make(), [1.0], h0),
    ]
    got = in_python([h0], [walked, state, kept, *direct])(np.ones(3))
    x = np.array(VALUES)
    expected = [2 * x, [2 * x, 3 * x], [0.5, 2.0], [0.5, 0.5, 2.0], [1.0, 0.0, 1.0], x.cumsum()]
    for a, e in zip(got, [*expected, [0.5, -0.5, 1.5]], strict=True):
        np.testing.assert_allclose(a, e)


def test_tables():
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": VALUES, "b": pandas.Series([1, 2, 3], dtype="Int64")})
    y = scanlib.scan(lambda row: row[0] * row[1], sequences=frame, return_updates=False)
    np.testing.assert_allclose(in_python([], y)(), [0.5, -2.0, 6.0])


def test_names_of_series_are_names_of_sequences():
    """So errors and printed graphs show them."""
    seen = []
    scanlib.map(lambda v: seen.append(v) or v, _series())
    assert seen[0].name == "rates[t]"


def test_ranges_and_lists_of_variables():
    a, b = pt.dscalars("a", "b")
    steps, mixed = (
        scanlib.scan(lambda v: v + 1, sequences=given, return_updates=False)
        for given in (range(2, 5), pt.stack([a, b, 1.0]))
    )
    y = scanlib.scan(lambda v: v, [[a, 2.0, b], np.arange(3)][:1], return_updates=False)
    got = in_python([a, b], [steps, mixed, y])(3.0, 4.0)
    for values, expected in zip(got, ([3, 4, 5], [4, 5, 2], [3, 2, 4]), strict=True):
        np.testing.assert_array_equal(values, expected)
    assert got[0].dtype == np.int64


def test_changing_an_array_of_another_package_afterwards():
    tensor = _torch()
    y = scanlib.cummax(tensor)
    tensor += 100
    np.testing.assert_allclose(in_python([], y)(), [0.5, 0.5, 2.0])


def _gradient():
    return pytest.importorskip("torch").ones(3, requires_grad=True)


def _frame_with_text():
    return pytest.importorskip("pandas").DataFrame({"a": [1.0], "b": ["x"]})


def _dates():
    return pytest.importorskip("pandas").date_range("2020-01-01", periods=3)


def _bfloat16():
    return _jax().astype("bfloat16")


REFUSED = [
    (_gradient, r"got tensor\(.*\) of type Tensor, which requires a gradient: .* x\.detach\(\)"),
    (
        lambda: [_gradient()],
        r"of type (?:list|Tensor), which requires a gradient: .* x\.detach\(\)",
    ),
    (_frame_with_text, "of type DataFrame: it holds text"),
    (_dates, "of type DatetimeIndex: it holds dates; give numbers"),
    (_bfloat16, "its dtype is bfloat16, which PyTensor has not"),
    (lambda: np.ma.array([1.0, 2.0], mask=[False, True]), r"its mask would be lost; .*getmaskarr"),
    (lambda: [np.ma.array([1.0, 2.0], mask=[False, True])], "its mask would be lost"),
    (lambda: (i for i in range(3)), r"of type generator; give list\(\.\.\.\) of it"),
    (lambda: {3, 4}, r"got \{3, 4\} of type set; give list"),
    (lambda: np.random.default_rng(1), r"of type Generator; give pytensor\.shared\(generator\)"),
    (lambda: np.array([1, 2], dtype="M8[D]"), "it holds dates"),
    (lambda: np.array([1, 2], dtype="m8[D]"), "it holds differences of time; divide them"),
    (lambda: np.longdouble([1.0]), "Unsupported dtype for TensorType"),
    (lambda: pytest.importorskip("scipy.sparse").eye_array(2), r"give x\.toarray\(\), or, for"),
    (lambda: [["text"] * 50], r"got (?:\[\['text', .*\.\.\. of type list: it holds text|'text')"),
]


@pytest.mark.parametrize("make, message", REFUSED)
def test_refused(make, message):
    """Messages name the argument and the true reason."""
    for where, build in [
        (r"sequences\[0\]", lambda: scanlib.map(lambda v: v, {"input": make()})),
        (
            r"the initial value of outputs_info\[1\]",
            lambda: scanlib.scan(lambda a, b: (a, b), None, [1.0, {"initial": make()}], n_steps=2),
        ),
        (
            r"non_sequences\[1\]",
            lambda: scanlib.scan(lambda a, b: a, None, None, [1.0, make()], n_steps=2),
        ),
        ("cummin: x", lambda: scanlib.cummin(make())),
        (
            r"associative_scan: elems\[1\](?:\[0\])*",  # a list is a part of the tree
            lambda: scanlib.associative_scan(max, [pt.ones(1), make()]),
        ),
    ]:
        with pytest.raises(TypeError, match=rf"{where} must be a PyTensor variable or .*{message}"):
            build()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_variables_that_are_no_tensors():
    xtensor = pytest.importorskip("pytensor.xtensor").xtensor("x", dims=("time",), shape=(3,))
    for variable, advice in [
        (pytensor.sparse.csr_matrix("m"), r"; give x\.toarray\(\)"),
        (xtensor, r"; give x\.values, a tensor"),
        (pt.random.rng("rng"), "$"),
    ]:
        for build in (lambda v: scanlib.map(lambda x: x, v), scanlib.cummin):
            with pytest.raises(TypeError, match=f"must be a PyTensor tensor, got .*{advice}"):
                build(variable)
