"""The CUDA kernels, run on the CPU: every schedule against the plain loop."""

import ctypes

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given

import scanlib
from scanlib.backends.cuda.launch import KernelLoop
from scanlib.backends.cuda.printer import template
from scanlib.ops.c_linker import NoCCodeError
from tests.c_loops import compiled as compiled_c
from tests.cuda_device import check_calls, emulated, forced, host_library, walked_again
from tests.families import FAMILIES, assert_close, both
from tests.recurrences.test_extreme_values import assert_same_kind, loops_of, plain_affine

pytestmark = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")

SCHEDULES = {
    "serial": forced("serial"),
    "rows": forced("rows", lanes=8),
    "one-row": forced("rows", lanes=1),
    "look-back": forced("look-back", lanes=8),
    "one-row-looks-back": forced("look-back", lanes=1),
}
# Zero, one, primes, and next to the lengths of segments and stretches.
LENGTHS = (0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 127, 128, 129, 257, 4095, 4096, 4097, 9001)
LATE = {"season", "far"}  # have no kernel


@pytest.fixture(params=list(SCHEDULES))
def device(request):
    with emulated(SCHEDULES[request.param]) as (mode, ran):
        yield mode
        assert ran, "no loop ran on the device"


def run_families(names, mode, lengths):
    for name in names:
        family = FAMILIES[name]
        inputs, traces = family.render()
        function = pytensor.function(inputs, traces, mode=mode, on_unused_input="ignore")
        for steps in lengths:
            if steps >= 4000 and name == "cumprod":
                continue
            values = family.values(steps)
            wanted = family.reference(values)
            for actual, expected in zip(function(*values), wanted, strict=True):
                assert_close(actual, expected, f"{name}, {steps} steps")


COMPOSED = ("affine", "affine-complex", "affine-f32", "affine-fixed-f32", "affine-u8",
            "cumsum-i64", "cumprod", "extremes", "minimum-i32", "log-affine",
            "log-sum")  # fmt: skip


@pytest.mark.slow
def test_families_that_compose(device):
    run_families(COMPOSED, device, (0, 1, 2, 17, 129, 1025, 4097))


def test_every_length(device):
    run_families(["affine"], device, LENGTHS)


@pytest.mark.slow
def test_families_that_do_not():
    names = [name for name in FAMILIES if name not in (*COMPOSED, *LATE)]
    with emulated() as (mode, _):
        run_families(names, mode, (0, 1, 2, 17, 33, 65))


@pytest.mark.parametrize("name", sorted(LATE))
def test_loops_without_a_kernel(name):
    inputs, traces = FAMILIES[name].render()
    function = pytensor.function(inputs, traces, mode="CVM", on_unused_input="ignore")
    (op,) = [node.op for node in function.maker.fgraph.toposort() if hasattr(node.op, "layout")]
    with pytest.raises(NoCCodeError, match="has no CUDA kernel"):
        KernelLoop(op)


def channels(seed=0):
    """A loop over two axes of channels: broadcast inputs, a parameter, an output, a last row."""
    x, a = pt.dtensor3("x"), pt.dmatrix("a")
    scale, row = pt.dscalar("scale"), pt.dvector("row")
    (h, y), _ = scanlib.scan(
        lambda x, a, h, scale, row: [a * h + scale * pt.tanh(x), row * h],
        sequences=[x, a[:, :, None]],
        outputs_info=[pt.zeros(x.shape[1:]), None],
        non_sequences=[scale, row],
    )
    cost = (h**2).sum() + (y * x).sum() + h[-1].sum()
    inputs = [x, a, scale, row]
    return inputs, [h, y, *pytensor.grad(cost, inputs)]


def values_of_channels(steps, rows, columns):
    """Values for the inputs of `channels`."""
    rng = np.random.default_rng(steps)
    return [
        rng.normal(size=(steps, rows, columns)),
        rng.uniform(-0.9, 0.9, (steps, rows)),
        np.array(0.7),
        rng.normal(size=columns),
    ]


def test_channels_and_gradients(device):
    inputs, outputs = channels()
    function, plain = both(inputs, outputs, device)
    for steps, rows, columns in [(1, 1, 1), (5, 2, 3), (70, 3, 5), (300, 1, 11), (40, 9, 8)]:
        values = values_of_channels(steps, rows, columns)
        values[0] = np.moveaxis(np.moveaxis(values[0], 2, 0).copy(), 0, 2)  # other strides
        before = [np.copy(value) for value in values]
        for actual, expected in zip(function(*values), plain(*values), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-10)
        for value, copy in zip(values, before, strict=True):
            np.testing.assert_array_equal(value, copy)


@pytest.mark.slow
def test_nonlinear_steps():
    x, h0 = pt.fmatrix("x"), pt.fvector("h0")
    h = scanlib.scan(
        lambda x, h, g: pt.tanh(x + 0.5 * h) * pt.exp(-(g**2)),
        x,
        {"initial": pt.stack([h0, h0]), "taps": [-1, -2]},
        return_updates=False,
    )
    last = h[-1]
    outputs = [h, *pytensor.grad(last.sum(), [x, h0])]
    with emulated() as (mode, ran):
        function, plain = both([x, h0], outputs, mode)
        for steps in (1, 2, 15, 16, 17, 40):
            rng = np.random.default_rng(steps)
            values = rng.normal(size=(steps, 5)).astype("f4"), rng.normal(size=5).astype("f4")
            for actual, expected in zip(function(*values), plain(*values), strict=True):
                np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-6)
        assert len(ran) == 2


def test_quotients_of_integers():
    x, h0 = pt.lmatrix("x"), pt.lvector("h0")
    h = scanlib.scan(lambda x, h: h // x + 7 % x - h, x, h0, return_updates=False)
    with emulated() as (mode, _):
        function, plain = both([x, h0], [h], mode)
        values = np.random.default_rng(0).integers(1, 9, (50, 5)) * [1, -1, 1, -1, 1]
        check_calls(function, plain, [(values, np.arange(-2, 3))])


def affine_of(dtype, mode):
    a, b, h0 = (
        pt.matrix("a", dtype=dtype),
        pt.matrix("b", dtype=dtype),
        pt.vector("h0", dtype=dtype),
    )
    h = scanlib.scan(lambda a, b, h: a * h + b, [a, b], h0, return_updates=False)
    return pytensor.function([a, b, h0], h, mode=mode)


@pytest.mark.all_forms
def test_half_precision_is_kept_in_memory_only(device):
    function = affine_of("float16", device)
    rng = np.random.default_rng(0)
    for steps in (1, 40, 1000):
        a = rng.uniform(-0.9, 0.9, (steps, 3)).astype("float16")
        b = (rng.normal(size=(steps, 3)) * 100).astype("float16")
        b[0, 0], b[-1, 1] = 6e-8, 65504
        h = np.zeros(3, "float32")
        wanted = np.zeros((steps, 3), "float16")
        for t in range(steps):
            h = a[t].astype("float32") * h + b[t]
            with np.errstate(over="ignore"):
                wanted[t] = h
        actual = function(a, b, np.zeros(3, "float16"))
        assert actual.dtype == "float16"
        np.testing.assert_allclose(actual.astype("f8"), wanted.astype("f8"), rtol=2e-3, atol=1e-3)


def test_every_number_of_half_precision():
    """They are read and written as NumPy does, and so are numbers between them."""
    source = """
    extern "C" void widen(const uint16_t *bits, float *values, int n) {
      for (int i = 0; i < n; i++) values[i] = scanlib_widened(bits[i]);
    }
    extern "C" void narrow(const float *values, uint16_t *bits, int n) {
      for (int i = 0; i < n; i++) bits[i] = scanlib_narrowed(values[i]);
    }
    """
    library = ctypes.CDLL(
        str(host_library("#define SCANLIB_THREADS 1\n" + template("device") + source))
    )
    bits = np.arange(1 << 16, dtype=np.uint16)
    values, halves = np.empty(bits.size, np.float32), bits.view(np.float16)
    library.widen(bits.ctypes, values.ctypes, bits.size)
    np.testing.assert_array_equal(values, halves.astype(np.float32))
    rng = np.random.default_rng(0)
    numbers = np.concatenate([values, values * rng.uniform(0.999, 1.001, bits.size)])
    numbers = numbers.astype(np.float32)
    found = np.empty(numbers.size, np.uint16)
    library.narrow(numbers.ctypes, found.ctypes, numbers.size)
    with np.errstate(over="ignore"):
        wanted = numbers.astype(np.float16)
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(found[number], wanted.view(np.uint16)[number])
    assert np.isnan(found.view(np.float16)[~number]).all()


@pytest.mark.parametrize("kind", ["rows", "look-back"])
def test_order_of_threads_does_not_matter(kind):
    rng = np.random.default_rng(0)
    steps = 3000
    values = rng.uniform(-1, 1, (steps, 5)), rng.normal(size=(steps, 5)), np.zeros(5)
    values[0][1500:, 1] = 1e200  # one channel overflows, and is walked again
    values[1][700, 2] = np.nan
    found = []
    for flags in ((), ("-DSCANLIB_LAST_THREAD_FIRST",)):
        with emulated(SCHEDULES[kind], flags=flags) as (mode, _):
            found.append(affine_of("float64", mode)(*values))
    assert found[0].tobytes() == found[1].tobytes()


class TestExtremeValues:
    @pytest.fixture(scope="class", params=["rows", "look-back"])
    def affine(self, request):
        lanes = forced(request.param, lanes=32)
        with emulated(lanes) as (mode, _):
            functions = {dtype: affine_of(dtype, mode) for dtype in ("float64", "float32")}

            def call(a, b, h):
                """Run the loop in one channel of three; the others are ordinary."""
                a, b, h = np.asarray(a), np.asarray(b), np.asarray(h)
                rng = np.random.default_rng(0)
                others = [rng.uniform(-1, 1, (len(a), 2)).astype(a.dtype) for _ in range(2)]
                rows = [np.column_stack([o[:, :1], v, o[:, 1:]])
                        for o, v in zip(others, (a, b), strict=True)]  # fmt: skip
                start = np.array([0.5, h, -0.5], a.dtype)
                with np.errstate(all="ignore"):
                    return functions[a.dtype.name](*rows, start)[:, 1]

            yield call

    @given(loops_of())
    def test_affine(self, affine, drawn):
        a, b, h = drawn
        assert_same_kind(affine(a, b, h), *plain_affine(a, b, h))

    @given(loops_of())
    def test_single_precision(self, affine, drawn):
        with np.errstate(over="ignore"):
            a, b, h = (np.asarray(value).astype("float32") for value in drawn)
        assert_same_kind(affine(a, b, h), *plain_affine(a, b, h))

    @given(loops_of())
    def test_product(self, affine, drawn):
        a, _, h = drawn
        zeros = np.zeros_like(a)
        assert_same_kind(affine(a, zeros, h), *plain_affine(a, zeros, h))

    @pytest.mark.all_forms
    @pytest.mark.parametrize("place", [3, 40, 64, 100, 159, 160, 700])
    def test_overflow_that_a_later_step_would_undo(self, affine, place):
        a = np.ones(1000)
        a[place], a[place + 1] = 1e200, 1e-200
        expected, allowed = plain_affine(a, np.zeros(1000), np.float64(1e300))
        assert np.isinf(expected[-1])
        assert_same_kind(affine(a, np.zeros(1000), 1e300), expected, allowed)

    def test_growth_that_a_reset_forgets(self, affine):
        steps = 20_000
        rng = np.random.default_rng(1)
        for resets in ([steps // 2], [0], range(500, steps, 501), [13_001]):
            a, b = np.full(steps, 1.05), rng.normal(size=steps) * 1e-12
            a[list(resets)] = 0.0
            expected, allowed = plain_affine(a, b, np.float64(0.0))
            assert_same_kind(affine(a, b, 0.0), expected, allowed)

    @pytest.mark.all_forms
    @pytest.mark.parametrize("place", [3, 40, 64, 100, 159, 160, 700])
    def test_overflow_inside_a_chunk_that_ends_in_ordinary_values(self, affine, place):
        """What the chunk does as a whole is ordinary, so the chunks after it start wrong."""
        a = np.ones(1000)
        a[place], a[place + 1] = 1e200, 1e-200
        expected, allowed = plain_affine(a, np.zeros(1000), np.float64(1e250))
        assert np.isinf(expected[-1])
        assert_same_kind(affine(a, np.zeros(1000), 1e250), expected, allowed)

    def test_a_state_that_decays_and_grows_again(self, affine):
        """Products of coefficients vanish where the state itself, large at first, does not."""
        for before in range(0, 200, 7):
            a = np.repeat(np.array([1, 0.125, 8, 1], "float32"), [before, 60, 60, 200])
            expected, allowed = plain_affine(a, np.zeros_like(a), np.float32(2.0**90))
            assert expected[-1] == 2.0**90
            assert_same_kind(affine(a, np.zeros_like(a), np.float32(2.0**90)), expected, allowed)
            a, b = np.insert(a, 0, 0), np.zeros(len(a) + 1, "float32")
            b[0] = 2.0**90
            expected, allowed = plain_affine(a, b, np.float32(0))
            assert_same_kind(affine(a, b, np.float32(0)), expected, allowed)

    @pytest.mark.all_forms
    def test_only_one_stretch_is_not_finite(self, affine):
        a, b = np.full(5000, 0.5), np.ones(5000)
        b[1500], a[2100] = np.nan, 0.0
        expected, allowed = plain_affine(a, b, np.float64(0.0))
        assert np.isnan(expected[-1])
        assert_same_kind(affine(a, b, 0.0), expected, allowed)


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "start, noise, most",
    [(0.0, 0.0, 0), (1.0, 1.0, 0), (1e-3, 0.0, 12), (2.0**90, 0.0, 12), (np.nan, 1.0, 0)],
)
def test_decay_is_composed(start, noise, most):
    """Products of coefficients underflow; that counts only while it could show in the state."""
    steps = 3000
    a, b = np.full((steps, 1), 0.5, "float32"), np.random.default_rng(0).normal(size=(steps, 1))
    with emulated(forced("rows", lanes=32)) as (mode, ran):
        function = affine_of("float32", mode)
        function(a[:1], a[:1], a[0])
        walked_again(KernelLoop(ran[0]).unit("walk"))
        b = (noise * b).astype("float32")
        result = function(a, b, np.full(1, start, "float32"))
        expected, allowed = plain_affine(a[:, 0], b[:, 0], np.float32(start))
        assert_same_kind(result[:, 0], expected, allowed)
        assert walked_again(KernelLoop(ran[0]).unit("walk")) <= most


@pytest.mark.parametrize("kind", ["rows", "look-back"])
def test_extreme_values_of_logarithms(kind):
    a, b, h0 = pt.dmatrix("a"), pt.dmatrix("b"), pt.dvector("h0")
    h = scanlib.scan(lambda a, b, h: pt.logaddexp(h + a, b), [a, b], h0, return_updates=False)
    pool = [0.0, -1.0, 700.0, 1e5, -1e5, 1e300, -1e300, 1e308, -1e308, -np.inf, np.nan]
    rng = np.random.default_rng(2)
    shape = 333, 300
    share = np.where(np.arange(300) % 2, 0.02, 0.3)
    values = [
        np.where(rng.random(shape) < share, rng.choice(pool, shape), rng.normal(size=shape))
        for _ in range(2)
    ]
    # Sums of coefficients are infinite with both signs where the state itself is just -inf.
    values[0][:, :30] = rng.choice([0.0, 1e308, -1e308], (333, 30))
    values[1][:, :30] = -np.inf
    start = rng.choice([0.0, -np.inf, 1e4], 300)
    last, error = start, np.zeros(300)
    with emulated(forced(kind, lanes=32)) as (mode, _):
        found = pytensor.function([a, b, h0], h, mode=mode)(*values, start)
    for x, y, mine in zip(*values, found, strict=True):
        terms = np.abs([last, x, y])
        error = error + 1e-12 * np.where(np.isfinite(terms), terms, 1.0).max(axis=0)
        with np.errstate(all="ignore"):
            last = np.logaddexp(last + x, y)
        assert_same_kind(mine, last, error)


def test_the_c_backend_agrees():
    """The same graph, compiled for the CPU and run by the kernels: the last word on both."""
    inputs, outputs = channels()
    reference = compiled_c(inputs, outputs)
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(50, 2, 3)), rng.uniform(-1, 1, (50, 2)), np.float64(2), np.ones(3)]
    with emulated() as (mode, _):
        function = pytensor.function(inputs, outputs, mode=mode)
        for actual, expected in zip(function(*values), reference(*values), strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-9, atol=1e-11)


def test_complex_numbers_of_single_precision(device):
    function = affine_of("complex64", device)
    rng = np.random.default_rng(0)
    for steps in (1, 33, 1000):
        a, b = (
            (rng.uniform(-0.6, 0.6, (steps, 3)) + 1j * rng.normal(size=(steps, 3)) / 3)
            .astype("complex64")
            for _ in range(2)
        )  # fmt: skip
        h, wanted = np.zeros(3, "complex128"), []
        for t in range(steps):
            h = a[t] * h + b[t]
            wanted.append(h)
        actual = function(a, b, np.zeros(3, "complex64"))
        assert actual.dtype == "complex64"
        np.testing.assert_allclose(actual, np.array(wanted), rtol=2e-5, atol=2e-5)


def test_complex_sums_over_channels(device):
    """A carry that sums over steps and channels; states that compose."""
    x, w = pt.zmatrix("x"), pt.zscalar("w")
    h = scanlib.scan(
        lambda x, h, w: w * h + x, x, pt.zeros(x.shape[1:], dtype="complex128"), w,
        return_updates=False,
    )  # fmt: skip
    total = scanlib.scan(lambda h, s: s + pt.sum(h), h, np.complex128(0), return_updates=False)[-1]
    function = pytensor.function([x, w], total, mode=device)
    rng = np.random.default_rng(1)
    values = rng.normal(size=(300, 3)) + 1j * rng.normal(size=(300, 3))
    weight, state, expected = 0.6 + 0.5j, np.zeros(3, complex), 0
    for row in values:
        state = weight * state + row
        expected += state.sum()
    np.testing.assert_allclose(function(values, weight), expected, rtol=1e-10)
