"""Recurrence classes: scans of one block of steps, by themselves, against NumPy and plain loops."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.kernels.compiled import program_text
from scanlib.kernels.language import INT64, POINTER, Type
from scanlib.kernels.spans import Same, Span
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.recurrences import affine, block_scans, clamp, trust
from scanlib.recurrences.block_scans import Steps
from scanlib.schedules import quotients
from scanlib.schedules.inner_loops import elementwise_program
from tests.kernel_runs import by_llvm, interpreted, write_kernel
from tests.kernel_verifier import verify
from tests.modes import MODES

LENGTHS = (1, 2, 7, 8, 15, 16, 17, 31, 33, 100, 1024)
DIRECTIONS = pytest.mark.parametrize("reverse", [False, True], ids=["forward", "backward"])
# Which of them look at the length of registers.
SCANS = (block_scans, trust)


def numbers(dtype, n):
    """Numbers of a dtype, some of them equal."""
    rng = np.random.default_rng(n)
    if dtype == "bool":
        return rng.integers(0, 2, n).astype(dtype)
    if np.dtype(dtype).kind == "f":
        return rng.standard_normal(n).round(1).astype(dtype)
    info = np.iinfo(dtype)
    return rng.integers(info.min, info.max, n, dtype=dtype, endpoint=True)


def scanning(write, dtype, reverse):
    """Return a function of two arrays and a state: the new values, the state after, the trust.

    `write` takes the block, the two spans, where the new values go, and the state before; it
    returns the state after the block, or None, and the trust.
    """

    def body(w, a, b, h, last, fine, n):
        block = block_scans.StepBlock(w, n, reverse)
        spans = [Span(w, dtype, pointer) for pointer in (a, b, h)]
        state = w.load(Type(dtype), last)
        after, trusted = write(block, *spans, state)
        w.store(last, 0, state if after is None else after)
        w.store(fine, 0, trusted)

    names = dict.fromkeys(("a", "b", "h", "last", "fine"), POINTER) | {"n": INT64}
    kernel = write_kernel("scan", names, body)
    verify(kernel)

    def run(a, b, state, how=by_llvm):
        h, last, fine = np.zeros(b.size, dtype), np.array([state], dtype), np.zeros(1, bool)
        code, _ = how(kernel, [a.copy(), b.copy(), h, last, fine, np.int64(b.size)])
        assert code == 0
        return h, last[0], bool(fine[0])

    return run


def extreme(dtype, reverse, largest):
    write = clamp.scan_maximum if largest else clamp.scan_minimum
    return scanning(
        lambda block, a, b, h, state: (None, write(block, Steps((None, b), h, state))),
        dtype,
        reverse,
    )


def affine_scan(dtype, reverse, fixed=False, product=False, sum_first=False):
    def write(block, a, b, h, state):
        coefficient = Same(block.writer, a.real(0)) if fixed else a
        steps = Steps((coefficient, None if product else b), h, state)
        return affine.scan(block, steps, sum_first)

    return scanning(write, dtype, reverse)


class TestExtremes:
    @pytest.mark.parametrize("dtype", ["float64", "float32", "int64", "uint16", "int8", "bool"])
    @pytest.mark.parametrize("name", ["maximum", "minimum"])
    def test_against_numpy(self, name, dtype):
        reverse = name == "minimum"  # a compilation for each: every name and direction once
        run, known = extreme(dtype, reverse, name == "maximum"), getattr(np, name)
        for n in LENGTHS:
            b = numbers(dtype, n)
            for state in (b[n // 2], b.min(), b.max()):
                values, _, trusted = run(b, b, state)
                in_order = known.accumulate(b[::-1] if reverse else b)
                expected = known(in_order, state)[:: -1 if reverse else 1]
                assert trusted
                np.testing.assert_array_equal(values, expected)

    @DIRECTIONS
    def test_infinities_count_and_nan_does_not(self, reverse):
        run = extreme("float64", reverse, largest=True)
        b = numbers("float64", 40)
        b[[3, 30]] = -np.inf
        values, _, trusted = run(b, b, -np.inf)
        in_order = np.maximum.accumulate(b[::-1] if reverse else b)
        assert trusted
        np.testing.assert_array_equal(values, in_order[:: -1 if reverse else 1])
        for place in (0, 17, 39):
            other = np.where(np.arange(40) == place, np.nan, b)
            assert not run(other, other, 0.0)[2]
        assert not run(b, b, np.nan)[2]


def walked(a, b, state, reverse, sum_first, dtype="float64"):
    """Return the values of all steps, one after the other, and bounds of their rounding errors."""
    n = b.size
    values, sizes = np.empty(n), np.empty(n)
    size, a, b = abs(state), np.float64(a), np.float64(b)
    for t in reversed(range(n)) if reverse else range(n):
        if sum_first:
            values[t], sizes[t] = state + b[t], size + abs(b[t])
            state, size = a[t] * values[t], abs(a[t]) * sizes[t]
        else:
            state, size = a[t] * state + b[t], abs(a[t]) * size + abs(b[t])
            values[t], sizes[t] = state, size
    return values, 50 * np.finfo(dtype).eps * sizes


class TestAffine:
    """All forms, as for machines with long and with short vector registers."""

    @pytest.fixture(params=[32, 64], ids=["short", "long"], autouse=True)
    def registers(self, request, monkeypatch):
        for module in SCANS:
            monkeypatch.setattr(module, "register_bytes", lambda: request.param)

    def check(self, run, reverse, fixed=False, product=False, sum_first=False, dtype="float64"):
        """Compare with one step after the other, and look for numbers that are not trusted."""
        for n in (1, 3, 4, 5, 8, 15, 16, 17, 33, 100, 1024):
            rng = np.random.default_rng(n)
            a, b = rng.uniform(-1.1, 1.1, n).astype(dtype), rng.standard_normal(n).astype(dtype)
            a[n // 2] = 0.0
            if fixed:
                a[:] = -0.97
            if product:
                b[:] = 0.0
            values, after, trusted = run(a, b, 2.0)
            expected, errors = walked(a, b, 2.0, reverse, sum_first, dtype)
            assert trusted
            assert np.all(np.abs(values - expected) <= errors)
            last = 0 if reverse else -1
            known = a[last] * values[last] if sum_first else values[last]
            np.testing.assert_allclose(after, known, rtol=1e-5, atol=1e-5)
            assert run(a, b, 2.0)[0].tobytes() == values.tobytes()
            for place in {0, n // 3, n - 1}:
                for bad in (np.nan, np.inf, np.finfo(dtype).max):
                    other = np.where(np.arange(n) == place, bad, a).astype(dtype)
                    assert fixed or not run(other, b, 2.0)[2]
                    other = np.where(np.arange(n) == place, bad, b).astype(dtype)
                    assert product or not run(a, other, 2.0)[2]
            assert not run(a, b, np.inf)[2]

    @DIRECTIONS
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_affine(self, reverse, dtype):
        self.check(affine_scan(dtype, reverse), reverse, dtype=dtype)

    @DIRECTIONS
    def test_product(self, reverse):
        self.check(affine_scan("float64", reverse, product=True), reverse, product=True)

    @DIRECTIONS
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_one_coefficient(self, reverse, dtype):
        self.check(affine_scan(dtype, reverse, fixed=True), reverse, fixed=True, dtype=dtype)

    @DIRECTIONS
    @pytest.mark.parametrize("fixed", [False, True])
    @pytest.mark.parametrize("dtype", ["float64", "float32"])
    def test_sums_first(self, reverse, fixed, dtype):
        run = affine_scan(dtype, reverse, fixed=fixed, sum_first=True)
        self.check(run, reverse, fixed, sum_first=True, dtype=dtype)

    @DIRECTIONS
    def test_the_interpreter_has_the_same_bits(self, reverse):
        for options in ({}, {"fixed": True}, {"sum_first": True}):
            for dtype in ("float64", "float32"):
                run = affine_scan(dtype, reverse, **options)
                rng = np.random.default_rng(3)
                a, b = (rng.uniform(-1, 1, 37).astype(dtype) for _ in range(2))
                for one, other in zip(run(a, b, 0.3), run(a, b, 0.3, interpreted), strict=True):
                    assert np.asarray(one).tobytes() == np.asarray(other).tobytes()

    @DIRECTIONS
    def test_coefficients_that_are_not_trusted(self, reverse):
        run = affine_scan("float64", reverse)
        pairs = ((1e200, 0), (1e-200, 0), (np.nan, 0), (1, np.inf), (1, np.nan), (1, 1e300))
        for place in (0, 16, 20, 39):
            for factor, term in pairs:
                a, b = np.ones(40), np.zeros(40)
                assert run(a, b, 1.0)[2]
                a[place], b[place] = factor, term
                assert not run(a, b, 1.0)[2], (place, factor, term)
        for state in (1e300, -1e300, np.nan):
            assert not run(np.ones(40), np.zeros(40), state)[2]


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_ranges_are_tested_as_comparisons_would(dtype):
    low, high, moderate = (edge[dtype] for edge in (trust.LOWEST, trust.HIGHEST, trust.MODERATE))
    large, infinity = clamp._LARGE[dtype], np.dtype(dtype).type(np.inf)

    def body(w, a, out, n):
        items = Span(w, dtype, a)
        tests = [trust.extreme, *(trust.above(x) for x in (moderate, np.inf, large))]
        for place, test in enumerate(tests):
            w.store(out, place, trust.some(w, items, n, test))

    kernel = write_kernel("tests", {"a": POINTER, "out": POINTER, "n": INT64}, body)
    ends = [np.dtype(dtype).type(value) for value in (low, high, moderate, large)]
    ends += [np.nextafter(end, np.dtype(dtype).type(0)) for end in ends] + [
        np.nextafter(e, infinity) for e in ends
    ]
    info = np.finfo(dtype)
    ends += [0, info.smallest_subnormal, info.tiny, info.max, infinity, np.nan]
    for end in ends:
        for value in (end, -end):
            for n in (1, 3, 70):
                a = np.ones(n, dtype)
                a[n // 2] = value
                size, answers = np.abs(a), np.zeros(4, bool)
                by_llvm(kernel, [a, answers, np.int64(n)])
                expected = [
                    bool(np.any((size != 0) & ~((size >= low) & (size <= high)))),
                    not np.all(size <= moderate),
                    bool(np.any(np.isnan(a))),
                    not np.all(size <= large),
                ]
                assert answers.tolist() == expected, (value, n)


def test_rows_that_lie_apart_or_backwards():
    """Sequences that are slices of others reach the kernels as they are, or block by block."""
    x, y = pt.dvector("x"), pt.dmatrix("y")
    trace = scanlib.scan(
        lambda a, b, c, h: a * h + b * c,
        sequences=[x[::-1], y[::3, 1], y[::3][:, 0]],
        outputs_info=[np.float64(1.0)],
        return_updates=False,
    )
    function = pytensor.function([x, y], trace, mode=MODES["numba"])
    rng = np.random.default_rng(0)
    for n in (1, 2, 1024, 2500):
        x_value, y_value = rng.uniform(-1, 1, n), rng.standard_normal((3 * n, 2))
        before = x_value.copy(), y_value.copy()
        state, expected = 1.0, []
        for t in range(n):
            state = x_value[n - 1 - t] * state + y_value[3 * t, 1] * y_value[3 * t, 0]
            expected.append(state)
        np.testing.assert_allclose(function(x_value, y_value), expected, rtol=1e-9, atol=1e-12)
        np.testing.assert_array_equal(before[0], x_value)
        np.testing.assert_array_equal(before[1], y_value)


@pytest.mark.parametrize("width", [None, 3], ids=["one channel", "channels"])
def test_histories_of_loops_with_until_grow(width):
    start = pt.tensor("start", dtype="float64", shape=() if width is None else (width,))
    limit, n_steps = pt.dscalar("limit"), pt.lscalar("n_steps")
    first = start if width is None else start[0]
    trace = scanlib.scan(
        lambda count, h, limit: (
            [count + 1, pt.sqrt(h * h + 1.0)],
            scanlib.until(count + 1 >= limit),
        ),
        outputs_info=[first * 0, start],
        non_sequences=[limit],
        n_steps=n_steps,
        return_updates=False,
    )[1]
    function = pytensor.function([start, limit, n_steps], trace, mode=MODES["numba"])
    value = np.array(2.0) if width is None else np.array([2.0, -1.0, 0.5])
    for stop in (1, 63, 64, 65, 128, 129, 300, 1000):
        for most in (1, 64, 100, 300):
            steps_run = min(stop, most)
            state, expected = value, []
            for _ in range(steps_run):
                state = np.sqrt(state * state + 1.0)
                expected.append(state)
            np.testing.assert_allclose(function(value, stop, most), expected, rtol=1e-13)


def test_what_elements_and_outputs_share_is_computed_once():
    x, n = pt.dvector("x"), pt.dscalar("n")
    trace, squares = scanlib.scan(
        lambda x, two, one, n: (0.5 * one + 0.25 * two + x / n, (x / n) ** 2 * one),
        sequences=[x],
        outputs_info=[{"initial": pt.zeros(2), "taps": [-2, -1]}, None],
        non_sequences=[n],
        return_updates=False,
    )
    function = pytensor.function([x, n], [trace, squares], mode=MODES["numba"])
    (op,) = (v.op for v in function.maker.fgraph.toposort() if isinstance(v.op, ElemwiseScan))
    vectors = [
        line for line in program_text(elementwise_program(op)).splitlines() if "fdiv <" in line
    ]
    assert len(vectors) == 1
    values = np.random.default_rng(0).standard_normal(1100)
    state, products = [0.0, 0.0], []
    for value in values:
        products.append((value / 3.0) ** 2 * state[-1])
        state.append(0.5 * state[-1] + 0.25 * state[-2] + value / 3.0)
    found = function(values, 3.0)
    np.testing.assert_allclose(found[0], state[2:], rtol=1e-9)
    np.testing.assert_allclose(found[1], products, rtol=1e-9)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", ["numba", "c"])
def test_quotients_by_what_stays_the_same_are_those_of_divisions(name, dtype, monkeypatch):
    """In elements of recurrences, in outputs and in sums."""
    monkeypatch.setattr(quotients, "LONG", 32)  # on every processor
    x, n = pt.vector("x", dtype=dtype), pt.scalar("n", dtype=dtype)
    trace, output, addend = scanlib.scan(
        lambda x, h, n: (
            pt.maximum(h, x / n),
            (x + pt.minimum(h, 0)) / n,
            x / n - pt.minimum(h, 0),
        ),
        sequences=[x],
        outputs_info=[np.asarray(0, dtype), None, None],
        non_sequences=[n],
        return_updates=False,
    )
    function = pytensor.function([x, n], [trace, output, addend.sum()], mode=MODES[name])
    info, rng, one = np.finfo(dtype), np.random.default_rng(0), np.dtype(dtype).type(1)
    ends = [0.0, -0.0, np.inf, np.nan, info.tiny, info.smallest_subnormal, info.max, info.max / 3]
    divisors = (3, -7, 1 + info.eps, 2 - info.eps, 1e-30, 0, np.inf, np.nan, info.max, info.tiny)
    near = one + rng.integers(0, 99, 600).astype(dtype) * np.spacing(one)
    many = np.concatenate([near, 2 * near - info.eps, rng.uniform(1, 2, 600).astype(dtype)])
    for divisor in divisors:
        divisor = np.asarray(divisor, dtype)
        for value in (*ends, None, "among"):
            given = np.sort(many)[:: -1 if divisor < 0 else 1]
            if value == "among":
                given[700] = info.smallest_subnormal
            elif value is not None:
                given = np.full(41, value, dtype)
            with np.errstate(all="ignore"):
                exact = given / divisor
                before = np.maximum.accumulate(np.append(np.zeros(1, dtype), exact))
                least = np.minimum(before[:-1], 0)
                expected = (given + least) / divisor
                total = np.sum(exact - least, dtype="float64").astype(dtype)
            found = function(given, divisor)
            np.testing.assert_array_equal(found[0], before[1:])
            np.testing.assert_array_equal(found[1], expected)
            np.testing.assert_allclose(found[2], total, rtol=2e-4 if dtype == "float32" else 1e-12)
