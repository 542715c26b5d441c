"""Matrix recurrences by CUDA kernels, run on the CPU: every form, size and schedule."""

import itertools

import numpy as np
import pytensor
import pytest

from scanlib.backends.cuda import launch as launching
from scanlib.backends.cuda import linear
from scanlib.backends.cuda.linear import LinearKernels, check_linear
from scanlib.backends.cuda.schedule import LinearSchedule, choose_linear
from scanlib.ops.c_linker import NoCCodeError
from scanlib.ops.errors import LoopError, SequenceLengthError
from tests.cuda_device import compile_for_host, launches
from tests.cuda_linear import cut, kernels_of, run, run_in_chunks
from tests.linear import Recurrence
from tests.ops.test_linear_scan import OPTIONS, arguments, make_values, reference

pytestmark = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")

TOLERANCE = {"float64": 1e-11, "float32": 1e-4, "complex128": 1e-11, "complex64": 1e-4}


def check(op, steps, size, dtype="float64", **options):
    values = make_values(op, steps, size, dtype=dtype, **options)
    given = arguments(op, values, steps)
    before = [np.array(value) for value in given]
    expected, tolerance = reference(op, *values, steps), TOLERANCE[dtype]
    for actual in run_in_chunks(op, given):
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(actual, expected, rtol=tolerance, atol=tolerance)
    for value, copy in zip(given, before, strict=True):
        np.testing.assert_array_equal(value, copy)


def check_form(op, size):
    for batch, shared in (((), False), ((2,), False), ((2, 3), True)):
        check(op, 23, size, batch=batch, shared=shared)


# Strides that have no factor in common with the options' numbers of choices.
@pytest.mark.parametrize("op", OPTIONS[::11], ids=str)
def test_forms(op, cuda_on_host):
    check_form(op, 3)


@pytest.mark.parametrize("op", OPTIONS[5::23], ids=str)
def test_forms_by_groups_of_threads(op, cuda_on_host):
    check_form(op, 10)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPTIONS[3::13], ids=str)
def test_more_forms(op, cuda_on_host):
    check_form(op, 2)


SOME = [
    Recurrence("real", "steps", "right", vector=False, reverse=True),
    Recurrence("real", "fixed", untraced=True),
    Recurrence("log", "fixed"),
]


@pytest.mark.parametrize("op", SOME, ids=str)
@pytest.mark.parametrize("size", [1, 4, 7, 8, 16, 17, 33, 64])
def test_sizes(op, size, cuda_on_host):
    check(op, 12, size, batch=(2,))


@pytest.mark.parametrize("op", SOME, ids=str)
@pytest.mark.parametrize("size", [2, 11])
def test_lengths(op, size, cuda_on_host):
    for steps in (0, 1, 2, 3, 5, 6, 7, 8, 9, 15, 16, 17, 100, 129):
        check(op, steps, size, columns=2)


@pytest.mark.parametrize("size", [0, 2, 11])
def test_nothing_to_do(size, cuda_on_host):
    """No items, no batch, no columns, no initial row."""
    op = Recurrence("real", "steps", vector=False)
    check(op, 5, 0)
    check(op, 5, size, batch=(0,))
    check(op, 5, size, columns=0)
    empty = [np.zeros((0, size, size)), np.zeros((0, size, 2)), np.zeros((0, size, 2))]
    assert run(op, empty).shape == (0, size, 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [3, 6, 11])
def test_dtypes(dtype, size, cuda_on_host):
    for op in (Recurrence("real", "steps", "right"), Recurrence("real", "fixed")):
        check(op, 40, size, dtype=dtype, batch=(2,))
    if not dtype.startswith("complex"):
        check(Recurrence("log", "steps"), 40, size, dtype=dtype)


@pytest.mark.parametrize("size", [3, 11])
def test_half_precision_is_kept_in_memory_only(size, cuda_on_host):
    op = Recurrence("real", "fixed")
    values = make_values(op, 200, size, dtype="float16")
    expected = reference(op, *(value.astype("float32") for value in values), 200)
    for actual in run_in_chunks(op, list(values)):
        assert actual.dtype == "float16"
        np.testing.assert_allclose(actual.astype("f8"), expected, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("size", [3, 11])
def test_strides(size, cuda_on_host):
    """Arrays that are not contiguous, read backwards, or broadcast."""
    op = Recurrence("real", "steps", "right", vector=False)
    matrix, offset, initial = make_values(op, 30, size, batch=(2,))
    matrix = np.asfortranarray(matrix)
    wide = np.repeat(offset, 2, axis=2)[::-1, :, ::2]
    initial = np.broadcast_to(initial[:, :1], initial.shape)
    expected = reference(op, matrix, wide, initial, 30)
    for actual in run_in_chunks(op, [matrix, wide, initial]):
        np.testing.assert_allclose(actual, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [4, 11])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("coefficient", ["fixed", "steps"])
def test_missing_items_make_no_nan(size, side, coefficient, cuda_on_host):
    """Where the mask is false, 0 times infinity is nothing."""
    op = Recurrence("real", coefficient, side, has_mask=True)
    mask = np.random.default_rng(1).random((size, size)) < 0.6
    np.fill_diagonal(mask, True)
    mask[0, 1:] = mask[1:, 0] = False
    plain = Recurrence("real", coefficient, side)
    matrix, offset, initial = make_values(plain, 40, size)
    matrix = np.where(mask, matrix, 0.0)
    for special in (0.0, np.inf, np.nan):
        offset[7, 0] = special
        inputs = [matrix, offset, initial, mask]
        expected = op.walked(inputs)
        assert np.isfinite(expected[:, 1:]).all()
        for actual in run_in_chunks(op, inputs):
            np.testing.assert_allclose(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("size", [11, 33])
def test_order_of_threads_does_not_matter(size, monkeypatch):
    monkeypatch.setattr(linear, "choose_linear", cut(4))
    op = Recurrence("real", "steps")
    values = list(make_values(op, 60, size, batch=(3,)))
    values[1][30, 1, 2] = np.inf
    found = []
    for flags in ((), ("-DSCANLIB_LAST_THREAD_FIRST",)):
        monkeypatch.setattr(launching, "compile_kernels", compile_for_host(*flags))
        linear._kernels.cache_clear()
        found.append(run(op, values))
    linear._kernels.cache_clear()
    assert found[0].tobytes() == found[1].tobytes()


def test_wrong_arguments():
    op = Recurrence("real", "steps")
    matrix, offset, initial = make_values(op, 5, 3)
    with pytest.raises(
        SequenceLengthError,
        match="`offset` gives 5 rows, but another",
    ):
        run(op, [matrix[:4], offset, initial])
    with pytest.raises(LoopError, match="the matrix has 2 rows, but the state has 3 items"):
        run(op, [matrix[:, :2], offset, initial])


class TestSupport:
    @pytest.mark.all_forms
    @pytest.mark.parametrize(
        "dtype, size",
        [("float16", 64), ("float32", 64), ("float64", 64), ("complex64", 64), ("complex128", 32)],
    )
    def test_largest_matrices(self, dtype, size):
        check_linear(dtype, size)
        with pytest.raises(NoCCodeError, match=f"more than {size} rows has no CUDA kernel"):
            check_linear(dtype, size + 1)


class TestSchedule:
    """132 multiprocessors."""

    @staticmethod
    def choose(steps, vectors, group=1, columns=4):
        return choose_linear(steps, vectors, 132, group, columns)

    def test_many_vectors_are_walked_whole(self):
        assert self.choose(10_000, 100_000) == LinearSchedule(10_000, 1)

    def test_short_ones_are(self):
        assert self.choose(500, 1) == LinearSchedule(500, 1)

    def test_few_long_ones_are_cut(self):
        assert 600 < self.choose(10**6, 1).chunks <= 707
        assert 100 < self.choose(10**6, 1, 16, 17).chunks <= 132 * 1024 // (16 * 17)

    def test_chunks_that_are_not_known(self):
        assert self.choose(10**6, 1, 0, 0).chunks == 1

    @pytest.mark.all_forms
    @pytest.mark.parametrize("steps", [0, 1, 511, 512, 513, 99_991, 10**7])
    def test_chunks_cover_all_steps(self, steps):
        for vectors, group, columns in itertools.product((0, 1, 7, 1000), (1, 64), (2, 65)):
            plan = self.choose(steps, vectors, group, columns)
            assert (plan.chunks - 1) * plan.chunk < max(steps, 1) <= plan.chunks * plan.chunk


def test_launches(monkeypatch):
    """One launch if vectors are walked whole, four if they are cut."""
    monkeypatch.setattr(launching, "compile_kernels", compile_for_host())
    op = Recurrence("real", "fixed")
    for steps, wanted in ((20, 1), (3000, 4)):
        before = launches()
        run(op, list(make_values(op, steps, 3)))
        assert launches() == before + wanted


def test_kernels_are_written_once():
    op = Recurrence("real", "fixed")
    first = kernels_of(op, list(make_values(op, 5, 3)))
    assert kernels_of(op, list(make_values(op, 9, 3))) is first
    assert kernels_of(op, list(make_values(op, 9, 4))) is not first
    other = kernels_of(Recurrence("real", "fixed", reverse=True), list(make_values(op, 9, 3)))
    assert isinstance(other, LinearKernels)
    assert other.source == first.source  # only strides differ
