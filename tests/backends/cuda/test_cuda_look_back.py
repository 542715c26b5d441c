"""CUDA kernels that look back, run on the CPU: blocks are threads, and really wait for each other.

Blocks are made small here (64 threads of two steps, four stretches in a group), so that short loops
have many of them. Between what a block does, it sleeps now and then, so that others get ahead.
"""

import ctypes
import subprocess
from unittest import mock

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.cuda import launch as launching
from scanlib.backends.cuda.launch import KernelLoop
from scanlib.backends.cuda.printer import LoopWriter
from tests.backends.cuda.test_cuda_kernels import affine_of, run_families
from tests.cuda_device import (
    HOST,
    emulated,
    emulated_driver,
    forced,
    host_library,
    poisoned,
    small_blocks,
)
from tests.families import both
from tests.recurrences.test_extreme_values import assert_same_kind, plain_affine

pytestmark = pytest.mark.skipif(not pytensor.config.cxx, reason="no C++ compiler")

USUAL = LoopWriter._block
FLAGS = ("-DSCANLIB_GROUP=4",)
STRETCH = {1: 128, 2: 64}  # steps, for so many channels of a block
LANES = tuple(STRETCH)
SEEDS = (1, 4001, 0)  # of sleeps; 0 for none


@pytest.fixture(autouse=True, scope="module")
def blocks():
    with small_blocks():
        yield


@pytest.fixture(scope="module", params=LANES)
def lanes(request):
    return request.param


@pytest.fixture(scope="module")
def device(lanes):
    with emulated(forced("look-back", lanes=lanes), flags=FLAGS) as (mode, ran):
        yield mode, ran
        assert ran, "no loop ran on the device"


def control(op, name):
    """Return a variable of the kernels' library."""
    library = ctypes.CDLL(str(host_library(KernelLoop(op).unit("look_back").source, *FLAGS)))
    return ctypes.c_int.in_dll(library, name)


def lengths(stretch):
    """Zero, one, and next to the ends of stretches, groups and regions of four groups each."""
    ends = (stretch, 4 * stretch, 16 * stretch, 48 * stretch)
    return [0, 1, *(end + more for end in ends for more in (-1, 0, 1)), 70 * stretch + 5]


def rows(steps, channels, dtype="float64"):
    rng = np.random.default_rng(steps)
    a, b = rng.uniform(-1, 1, (steps, channels)), rng.normal(size=(steps, channels))
    return a.astype(dtype), b.astype(dtype), rng.normal(size=channels).astype(dtype)


def plain(a, b, h):
    found = np.zeros(a.shape, np.result_type(a.dtype, "float32"))
    h = h.astype(found.dtype)
    for t in range(len(a)):
        h = a[t] * h + b[t]
        found[t] = h
    return found


@pytest.mark.parametrize("channels", [1, 3])
def test_every_length(device, lanes, channels):
    mode, _ = device
    function = affine_of("float64", mode)
    for steps in lengths(STRETCH[lanes]):
        values = rows(steps, channels)
        np.testing.assert_allclose(function(*values), plain(*values), rtol=1e-12, atol=1e-12)


def test_the_order_of_blocks_does_not_matter(device):
    """Whoever is first: the same bits; and there were blocks that waited."""
    mode, ran = device
    function = affine_of("float32", mode)
    values = rows(20_000, 3, "float32")
    values[0][9000:9010, 1] = 1e30  # overflows, and stays infinite
    values[1][12_345, 2] = np.nan
    function(*values)
    seed, waits = (control(ran[-1], name) for name in ("scanlib_seed", "scanlib_waits"))
    found = set()
    for first in SEEDS * 2:
        seed.value, waits.value = first, 0
        found.add(function(*values).tobytes())
        assert waits.value or not first
    assert len(found) == 1
    assert_close_kind(np.frombuffer(found.pop(), "float32").reshape(-1, 3), values)


def assert_close_kind(result, values):
    a, b, h = values
    for channel in range(a.shape[1]):
        expected, allowed = plain_affine(a[:, channel], b[:, channel], h[channel])
        assert_same_kind(result[:, channel], expected, allowed)


@pytest.mark.parametrize("name", ["affine-f32", "extremes", "log-affine", "affine-complex"])
def test_families(device, lanes, name):
    run_families([name], device[0], (0, 1, STRETCH[lanes] + 1, 2500))


def test_half_precision(device):
    function = affine_of("float16", device[0])
    values = rows(3000, 3, "float16")
    np.testing.assert_allclose(function(*values), plain(*values), rtol=2e-3, atol=2e-3)


def test_gradients_with_sums(device):
    """Reversed loops with several results, and a sum over steps and channels."""
    x, a, h0 = pt.dmatrix("x"), pt.dscalar("a"), pt.dvector("h0")
    h = scanlib.scan(lambda x, h, a: pt.tanh(a) * h + x, x, h0, a, return_updates=False)
    outputs = [h, *pytensor.grad((h**2).sum() + h[-1].sum(), [x, a, h0])]
    function, reference = both([x, a, h0], outputs, device[0])
    for steps, channels in ((1, 1), (2049, 1), (700, 3)):
        _, values, start = rows(steps, channels)
        given = values, np.array(0.8), start
        for mine, expected in zip(function(*given), reference(*given), strict=True):
            np.testing.assert_allclose(mine, expected, rtol=1e-9, atol=1e-9)
        for first, second in zip(function(*given), function(*given), strict=True):
            np.testing.assert_array_equal(first, second)


class TestExtremeValues:
    """Overflow, NaN, and what composing would hide or invent, in one of three channels."""

    @pytest.fixture(scope="class")
    def affine(self, device):
        function = affine_of("float64", device[0])

        def check(a, b, h):
            rng = np.random.default_rng(0)
            others = [rng.uniform(-1, 1, (len(a), 2)) for _ in range(2)]
            values = [np.insert(o, 1, v, axis=1) for o, v in zip(others, (a, b), strict=True)]
            values.append(np.array([0.5, h, -0.5]))
            assert_close_kind(function(*values), values)

        return check

    @pytest.mark.parametrize("resets", [(10_000,), (0,), range(500, 20_000, 501), (13_001,)])
    def test_growth_that_a_reset_forgets(self, affine, resets):
        a, b = np.full(20_000, 1.05), np.random.default_rng(1).normal(size=20_000) * 1e-12
        a[list(resets)] = 0.0
        affine(a, b, 0.0)

    @pytest.mark.parametrize("start", [1e300, 1e250])
    def test_overflow_that_later_steps_would_undo(self, affine, start):
        for place in (3, 63, 64, 127, 128, 700, 2047, 2048, 4000):
            a = np.ones(5000)
            a[place], a[place + 1] = 1e200, 1e-200
            affine(a, np.zeros(5000), start)

    def test_a_state_that_decays_and_grows_again(self, affine):
        for before in range(0, 2500, 311):
            a = np.repeat([1, 0.125, 8, 1], [before, 400, 400, 2000])
            affine(a, np.zeros(len(a)), 2.0**800)

    def test_zeros_after_a_pulse(self, affine):
        b = np.zeros(6000)
        b[100] = 1.0
        affine(np.full(6000, 0.9), b, 0.0)

    def test_numbers_drawn_from_everywhere(self, affine):
        rng = np.random.default_rng(3)
        pool = [0.0, 1.0, -1.0, 1e155, -1e155, 1e-155, 1e-310, 1e308, np.inf, np.nan]
        for share in (0.0005, 0.003, 0.03):
            a, b = (
                np.where(rng.random(4000) < share, rng.choice(pool, 4000), rng.normal(size=4000))
                for _ in range(2)
            )
            affine(a / 2, b, rng.choice(pool[:9]))


@pytest.mark.parametrize("choice", ["dense", "spread"])
def test_scratch_memory_is_cleared_by_every_call(choice):
    """The same memory for intermediate results, twice: with flags that are up, and poisoned."""
    (a, b, h0), driver = rows(5000, 1), emulated_driver()
    if choice == "spread":
        a = np.repeat(a, 2, axis=1)[:, ::2]  # items that follow one another are apart
    with emulated(forced("look-back", lanes=1), flags=FLAGS) as (mode, ran):
        function = affine_of("float64", mode)
        expected = function(a, b, h0)
        kernels = KernelLoop(ran[-1])
        arrays = order(kernels, a, b, h0)
        sizes = kernels.sizes([x.shape for x in arrays])
        call = kernels.call(sizes, [x.strides for x in arrays], 2)
        outputs = [
            poisoned(shape, array.dtype)
            for shape, array in zip(call.shapes, kernels.parameters.outputs, strict=True)
        ]
        names = [call.kernels.names[one.kernel] for one in call.launches]
        assert names == ["reset", f"look_back{'_dense' * (choice == 'dense')}", "mend"]
        works = [np.full(size, 0xA5, np.uint8) for size in call.works]
        addresses = [x.ctypes.data for x in [*arrays, *outputs, *works]]
        handles = call.kernels.handles(driver, 16)
        for _ in range(3):
            for output in outputs:
                output.view(np.uint8).fill(0xA5)
            launching.launch(driver, handles, call, addresses, 0)
            history = outputs[0].reshape(-1, 1)
            np.testing.assert_array_equal(history[-len(expected) :], expected)


def order(kernels, a, b, h0):
    """Return the arguments in the order of the loop."""
    outer = kernels.writer.plan.outer
    (start,) = outer.initials
    given = dict(zip([*outer.sequences, start], [a, b, h0[None]], strict=True))
    return [given[array.name] for array in kernels.parameters.inputs]


def test_the_usual_sizes_of_blocks(blocks):
    """Many groups of blocks as they are on a device, chosen as on a device."""
    with mock.patch.object(LoopWriter, "_block", USUAL), emulated() as (mode, ran):
        function = affine_of("float32", mode)
        for steps, channels in ((700_001, 1), (60_000, 11)):
            values = rows(steps, channels, "float32")
            np.testing.assert_allclose(function(*values), plain(*values), rtol=2e-4, atol=1e-5)
        assert KernelLoop(ran[-1]).writer.threads == 256


MAIN = r"""
#include <cstdio>
#include <vector>
int main() {
  const long steps = 20000, channels = 3, chunks = (steps + 63) / 64;
  std::vector<float> a(steps * channels, 0.9f), b(a), start(channels, 0.5f);
  std::vector<float> h(a.size() + channels);
  a[7777] = 1e30f;
  std::vector<char> summaries(2 * chunks * channels * 16), states(chunks * channels * 8);
  std::vector<int> flags(1 + channels * (1 + 3 * chunks), -1);
  Params p;
  memset(&p, 0, sizeof p);
  p.steps = steps, p.channels = p.n[0] = channels, p.chunk = 64, p.chunks = chunks;
  p.lanes = 2, p.lane_bits = 1;
  PLACES
  p.summaries = summaries.data();
  p.states = states.data();
  p.flags = (char *)flags.data();
  reset(flags.size() / 64 + 1, 64, &p);
  look_back(2 * chunks, 64, &p);
  mend(1, 32, &p);
  printf("%d\n", scanlib_waits > 0 && fabs(h.back() - 9) < 1e-3);
}
"""


@pytest.mark.slow
@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_what_blocks_share_is_ordered_by_flags(tmp_path, sanitizer):
    """A program of the kernels alone, in which the compiler's sanitizer finds no race."""
    with emulated(forced("look-back")) as (mode, ran):
        affine_of("float32", mode)(*rows(3, 3, "float32"))
    writer = KernelLoop(ran[0]).writer
    names = [*writer.plan.outer.sequences, *writer.plan.outer.initials, "h0"]
    places = "".join(
        f"p.at[Params::{name}] = {{(char *){own}.data(), 4 * channels, {{4}}}};"
        for name, own in zip(names, ("a", "b", "start", "h"), strict=True)
    )
    source, program = tmp_path / "loop.cpp", tmp_path / "loop"
    source.write_text(writer.write("look_back") + MAIN.replace("PLACES", places))
    command = [pytensor.config.cxx, "-O1", "-std=c++17", "-w", "-fwrapv", *FLAGS]
    command.append(f'-DSCANLIB_HOST="{HOST}"')
    made = subprocess.run([*command, f"-fsanitize={sanitizer}", source, "-o", program, "-lpthread"])
    if made.returncode:
        pytest.skip("the compiler has no such sanitizer")
    done = subprocess.run([program], capture_output=True, text=True)
    if "FATAL" in done.stderr:
        pytest.skip("the sanitizer does not run on this machine")
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
