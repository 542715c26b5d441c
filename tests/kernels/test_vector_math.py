"""Elementary functions that compilers vectorize, against extended precision."""

import ctypes
import platform
import re
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.handler.programs import program_of
from scanlib.kernels.elementary import vector_function
from scanlib.kernels.language import INT64, POINTER, Kernel, Type, Writer, functions_of
from scanlib.kernels.printers.c import print_functions
from scanlib.kernels.processor import has_fused_multiply_add
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.kernel_runs import ARGUMENTS, COMPILER, by_llvm
from tests.modes import MODES

INF, NAN = np.inf, np.nan


def sigmoid(x):
    e = np.exp(-np.abs(x))
    return np.where(x < 0, e, np.ones_like(e)) / (1 + e)


def exp_of_square(x, sign):
    """Return ``exp(± x²)`` of double precision: the square is a sum of two, the first exact."""
    high = np.trunc(x * 2.0**20) / 2.0**20
    return np.exp(sign * high * high) * np.exp(sign * (x - high) * (x + high))


def scaled_erfc(x):
    """Return ``exp(x²) erfc(x)`` of numbers from one: a continued fraction of Laplace's."""
    tail = np.zeros_like(x)
    for k in range(400, 0, -1):
        tail = k / 2 / (x + tail)
    return 1 / (np.sqrt(np.pi, dtype=x.dtype) * (x + tail))


def erf_series(x):
    """Return ``erf(x)`` of small numbers: terms of one sign."""
    term = found = 2 * x / np.sqrt(np.longdouble(PI))
    for k in range(1, 60):
        term = term * 2 * x * x / (2 * k + 1)
        found = found + term
    return found * exp_of_square(x, -1)


def erfc(x):
    size = np.minimum(np.abs(x), 120)
    tail = scaled_erfc(np.maximum(size, 1)) * exp_of_square(size, -1)
    return np.where(size < 1.2, 1 - erf_series(np.clip(x, -2, 2)), np.where(x < 0, 2 - tail, tail))


def erf(x):
    small = erf_series(np.clip(x, -2, 2))
    return np.where(np.abs(x) < 1.2, small, np.copysign(1 - erfc(np.abs(x)), x))


def erfcx(x):
    small = exp_of_square(np.clip(x, -120, 2), 1) * erfc(np.minimum(x, 2))
    return np.where(x < 1.2, small, scaled_erfc(np.maximum(x, 1)))


PI = np.longdouble("3.14159265358979323846264338327950288")
# What each function is held against, in whatever precision its argument has.
CIRCULAR = {"cos": np.cos, "sin": np.sin, "tan": np.tan}
ANGLES = CIRCULAR | {"acos": np.arccos, "asin": np.arcsin, "atan": np.arctan}
EXACT = ANGLES | {
    "erf": erf,
    "erfc": erfc,
    "erfcx": erfcx,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "log": np.log,
    "log10": np.log10,
    "log1p": np.log1p,
    "log2": np.log2,
    "sigmoid": sigmoid,
    "softplus": lambda x: np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x))),
    "tanh": np.tanh,
}
NAMED = {"acos": "arccos", "asin": "arcsin", "atan": "arctan"}
UNITS = dict.fromkeys(EXACT, 2.5) | {"tanh": 3} | dict.fromkeys(("cos", "sin", "exp2"), 1)
UNITS |= dict.fromkeys(("log2", "log10"), 0.6) | dict.fromkeys(("acos", "erfc"), 3)
DTYPES = ("float64", "float32")
SCALES = (1e-30, 1e-12, 1e-6, 1e-3, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 50.0, 400.0)
ZEROS = [0.0, -0.0]
SPECIAL = [*ZEROS, INF, -INF, NAN, 5e-324, -5e-324, 1e-310, 1e300, -1e300]
needs_extended_precision = pytest.mark.skipif(
    np.finfo(np.longdouble).nmant <= 52, reason="long doubles are doubles on this machine"
)


def llvm_loop(name, dtype, count=1):
    """Return a loop of machine code that LLVM makes of a kernel; the last array is the result."""
    w, item, size = Writer(), Type(dtype), np.dtype(dtype).itemsize
    arrays = [w.parameter(POINTER, f"x{k}") for k in range(count + 1)]
    length = w.parameter(INT64, "length")
    with w.loop(0, length) as i:
        given = [w.load(item, array, i * size) for array in arrays[:-1]]
        w.store(arrays[-1], i * size, *w.call(vector_function(name, dtype), *given))
    kernel = Kernel("loop", (*arrays, length), w.block, tuple(range(count + 2)))
    return lambda *given: by_llvm(kernel, [*given, len(given[0])])


def c_loop(name, dtype):
    """Return a loop of C++ code, in a library of its own."""
    function = vector_function(name, dtype)
    source = f"""
    #include <math.h>
    #include <string.h>
    #include <stdint.h>
    {print_functions([function])}
    typedef {"double" if dtype == "float64" else "float"} T;
    extern "C" void loop(const T *__restrict__ x, T *__restrict__ out, long n) {{
      for (long i = 0; i < n; i++) out[i] = {function.name}(x[i]);
    }}
    """
    flags = ["-O3", "-fno-math-errno", *ARGUMENTS]
    if has_fused_multiply_add() and platform.machine() == "x86_64":
        flags.append("-mfma")
    with TemporaryDirectory() as folder:
        for target, how in (("loop.s", ["-S"]), ("loop.so", ["-shared", "-fPIC"])):
            command = [*COMPILER, *flags, *how, "-x", "c++", "-", "-o", f"{folder}/{target}"]
            subprocess.run(command, input=source.encode(), check=True)
        function = ctypes.CDLL(f"{folder}/loop.so").loop
        assembly = Path(f"{folder}/loop.s").read_text()
    pointer = np.ctypeslib.ndpointer(dtype, flags="C")
    function.argtypes = [pointer, pointer, ctypes.c_long]

    def loop(x, out):
        function(x, out, len(x))

    loop.assembly = assembly
    return loop


@pytest.fixture(scope="module", params=["llvm", "c"])
def loops(request):
    """Return a function from a name and a dtype to a compiled loop over an array."""
    if request.param == "c" and not COMPILER[0]:
        pytest.skip("there is no C++ compiler")
    return cache(llvm_loop if request.param == "llvm" else c_loop)


def run(loop, x):
    out = np.empty_like(x)
    loop(x, out)
    return out


def cast(values, dtype):
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(values).astype(dtype)


def reference(name, x):
    """Return the exact values and their neighbours' distance, in extended precision."""
    with np.errstate(all="ignore"):
        exact = EXACT[name](x.astype(np.longdouble))
        return exact, np.spacing(np.abs(exact).astype(x.dtype)).astype(np.longdouble)


def arguments(name, dtype):
    """Return arguments of all sizes at which the function is finite."""
    rng = np.random.default_rng(0)
    x = np.concatenate([scale * rng.uniform(-1, 1, 20_000) for scale in SCALES])
    if name in CIRCULAR:
        large = [scale * rng.uniform(-1, 1, 20_000) for scale in (1e5, 2.0**30, 1e12, 1e30)]
        x = np.concatenate([x, np.pi / 2 * np.arange(-20_000, 20_000), *large])
    if name in ("acos", "asin"):
        x = np.concatenate([x[np.abs(x) <= 1], 1 - np.abs(x[np.abs(x) <= 1])])
    if name in ("log", "log2", "log10"):
        x = np.concatenate([np.exp(x), 1 + x[np.abs(x) < 0.9]])
    if name == "log1p":
        x = np.concatenate([x[np.abs(x) < 1], np.exp(x)])
    return cast(x, dtype)


@needs_extended_precision
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_error_in_units_in_the_last_place(loops, name, dtype):
    x = arguments(name, dtype)
    out = run(loops(name, dtype), x)
    exact, unit = reference(name, x)
    finite = np.isfinite(cast(exact, dtype))
    assert finite.sum() > 100_000
    np.testing.assert_array_equal(np.isfinite(out), finite)
    assert np.max(np.abs(out[finite] - exact[finite]) / unit[finite]) < UNITS[name]


@needs_extended_precision
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_overflow_and_underflow(loops, name, dtype):
    """Results and arguments among the subnormal numbers, and the last before infinity."""
    info = np.finfo(dtype)
    low, high = np.log(float(info.smallest_subnormal)), np.log(float(info.max))
    if name == "exp2":
        low, high = low / np.log(2), high / np.log(2)
    if name.startswith("erfc"):
        low, high = -np.sqrt(high), np.sqrt(-low)
    edges = np.concatenate(
        [np.linspace(low - 2, low + 40, 5000), np.linspace(-1, 1e-3, 999) + high]
    )
    if name in ("acos", "asin"):
        edges = np.linspace(-1, 1, 6000)
    if name.startswith("log"):
        tiny = float(info.smallest_subnormal)
        edges = np.concatenate([tiny * np.arange(1, 999), np.linspace(0.1, 1, 999) * info.max])
    x = cast(edges, dtype)
    out = run(loops(name, dtype), x)
    exact, unit = reference(name, x)
    expected = cast(exact, dtype)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(out[~finite], expected[~finite])
    assert np.max(np.abs(out[finite] - exact[finite]) / unit[finite]) < UNITS[name]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", EXACT)
def test_special_values(loops, name, dtype):
    x = cast([*SPECIAL, -1.0, -1.5, 1.0, 8.0, 1000.0], dtype)
    out = run(loops(name, dtype), x)
    with np.errstate(all="ignore"):
        expected = cast(EXACT[name](x.astype(np.longdouble)), dtype)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=0)
    whole = np.trunc(expected) == expected
    np.testing.assert_array_equal(out[whole], expected[whole])
    number = ~np.isnan(out)
    np.testing.assert_array_equal(np.signbit(out[number]), np.signbit(expected[number]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bounded_functions_keep_their_bounds(loops, dtype):
    x = arguments("tanh", dtype)
    assert np.abs(run(loops("tanh", dtype), x)).max() <= 1
    share = run(loops("sigmoid", dtype), x)
    assert share.min() >= 0
    assert share.max() <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_logaddexp(dtype):
    loop = llvm_loop("logaddexp", dtype, count=2)
    rng = np.random.default_rng(1)
    x = cast(np.concatenate([SPECIAL, 30 * rng.normal(size=500)]), dtype)
    for y in (x, x[::-1].copy(), *(np.full_like(x, number) for number in x[:10])):
        out = np.empty_like(x)
        loop(x, y, out)
        with np.errstate(all="ignore"):
            exact = np.logaddexp(x.astype(np.longdouble), y.astype(np.longdouble))
        rtol = 4 * np.finfo(dtype).eps
        np.testing.assert_allclose(out, cast(exact, dtype), rtol=rtol, atol=rtol)


@needs_extended_precision
@pytest.mark.parametrize("dtype", DTYPES)
def test_angles_of_two_numbers(dtype):
    loop, rng = llvm_loop("atan2", dtype, count=2), np.random.default_rng(5)
    special = np.meshgrid(SPECIAL, SPECIAL)
    sizes = [np.exp(scale * rng.normal(size=(2, 9_000))) for scale in (0.01, 1, 10, 100)]
    y, x = cast(np.concatenate([s * rng.choice([-1, 1], s.shape) for s in sizes], axis=1), dtype)
    y, x = (np.append(v, cast(own, dtype)) for v, own in zip((y, x), special, strict=True))
    out = np.empty_like(x)
    loop(y, x, out)
    exact = np.arctan2(y.astype(np.longdouble), x.astype(np.longdouble))
    number = ~np.isnan(exact)
    np.testing.assert_array_equal(np.isnan(out), ~number)
    np.testing.assert_array_equal(np.signbit(out[number]), np.signbit(exact[number]))
    unit = np.spacing(np.abs(exact[number]).astype(dtype)).astype(np.longdouble)
    assert np.max(np.abs(out[number] - exact[number]) / unit) < 2.5


@pytest.mark.parametrize("dtype", DTYPES)
def test_remainders_are_exact(dtype):
    loop, rng = llvm_loop("fmod", dtype, count=2), np.random.default_rng(6)
    special = np.meshgrid([*SPECIAL, 1.0, 3.0, 7.5], [*SPECIAL, 1.0, 3.0, 7.5])
    x, y = (scale * rng.normal(size=(2, 9_000)) for scale in (1e3, 1.0))
    pairs = [np.stack([x[0], y[0]]), np.stack([np.round(x[1]), np.round(9 * y[1])])]
    whole = rng.integers(1, 999, 9_000) * y[1]  # next to whole numbers of divisors
    pairs += [cast([np.nextafter(whole, side), y[1]], dtype) for side in (INF, 0)]
    pairs += [np.exp(30 * y), np.stack([np.ravel(own) for own in special])]
    x, y = cast(np.concatenate(pairs, axis=1), dtype)
    out = np.empty_like(x)
    loop(x, y, out)
    with np.errstate(all="ignore"):
        expected = np.fmod(x, y)
    np.testing.assert_array_equal(out, expected)
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(out[number]), np.signbit(expected[number]))


@needs_extended_precision
@pytest.mark.parametrize("dtype", DTYPES)
def test_powers(dtype):
    loop, rng = llvm_loop("power", dtype, count=2), np.random.default_rng(2)
    pairs = [
        (1 + small * rng.normal(size=9_000), rng.normal(size=9_000) / small) for small in SCALES
    ]
    bases = [np.exp(scale * rng.normal(size=9_000)) for scale in (0.1, 1, 10, 100)]
    pairs += [(x, scale * rng.normal(size=9_000)) for x in bases for scale in (0.1, 1, 10, 1000)]
    x, y = (cast(np.concatenate(values), dtype) for values in zip(*pairs, strict=True))
    x, out = np.abs(x), np.empty_like(x)
    loop(x, y, out)
    with np.errstate(all="ignore"):
        exact = np.power(x.astype(np.longdouble), y.astype(np.longdouble))
        expected = exact.astype(dtype)
        finite = np.isfinite(expected)
        np.testing.assert_array_equal(out[~finite], expected[~finite])
        unit = np.spacing(np.abs(expected[finite])).astype(np.longdouble)
    assert np.max(np.abs(out[finite] - exact[finite]) / unit) < 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_that_are_exact(dtype):
    """Of special numbers, as in C, and of whole ones."""
    loop = llvm_loop("power", dtype, count=2)
    numbers = [*SPECIAL, *np.arange(-5, 41), 0.5, -0.5, 2.0**52 + 1, -(2.0**52) - 1, 2.0**53 + 2]
    x, y = (v.ravel() for v in np.meshgrid(cast(numbers, dtype), cast(numbers, dtype)))
    out = np.empty_like(x)
    loop(x.copy(), y.copy(), out)
    with np.errstate(all="ignore"):
        expected = np.power(x.astype(float), y.astype(float)).astype(dtype)
    rtol = 2 * np.finfo(dtype).eps
    np.testing.assert_allclose(out, expected, rtol=rtol, atol=0)
    whole = (np.abs(expected) < 2.0 ** np.finfo(dtype).nmant) & (np.trunc(expected) == expected)
    np.testing.assert_array_equal(out[whole], expected[whole])
    number = ~np.isnan(expected)
    np.testing.assert_array_equal(np.signbit(out[number]), np.signbit(expected[number]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(set(EXACT) - set(ANGLES)))
@pytest.mark.skipif(not COMPILER[0], reason="there is no C++ compiler")
def test_loops_are_vectorized(name, dtype):
    loop = c_loop(name, dtype)
    run(loop, np.ones(3, dtype))
    assert not re.search(r"(call|jmp|bl)\s.*\b(exp|expm1|log|log1p|tanh)f?\b", loop.assembly)
    if platform.machine() == "x86_64":
        assert re.search("mulp[ds]", loop.assembly)


@pytest.mark.parametrize("linker", ["numba", "c"])
def test_loops_of_scanlib_use_them(linker):
    """Where argument and result have the same dtype; others keep PyTensor's functions."""
    x, n = pt.vector("x", dtype="float64"), pt.vector("n", dtype="int64")
    named = sorted(set(EXACT) - {"exp", "exp2"})

    def step(x, n, y):
        rates = sum(getattr(pt, NAMED.get(name, name))(x) for name in named)
        return 0.5 * y + rates + pt.exp(-x) + pt.exp(n) + x**0.3, pt.sinh(y)

    results = scanlib.scan(step, sequences=[x, n], outputs_info=[0.0, None], return_updates=False)
    f = pytensor.function([x, n], results, mode=MODES[linker])
    loops = [v.op for v in f.maker.fgraph.apply_nodes if isinstance(v.op, ElemwiseScan)]
    kernels = [kernel for op in loops for kernel in program_of(op).kernels.run]
    called = " ".join(own.name for kernel in kernels for own in functions_of(kernel))
    assert set(re.findall(r"scanlib_([a-z0-9]+)_float64\b", called)) == {*named, "exp", "power"}
    x_value, n_value = np.array([0.5, 1e-9, 3.0, 700.0]), np.array([1, 0, -2, 3])
    expected = np.exp(n_value.astype(float))
    expected += (
        np.exp(-x_value)
        + x_value**0.3
        + sum(EXACT[name](x_value.astype(np.longdouble)) for name in named)
    )
    for t in range(1, 4):
        expected[t] += 0.5 * expected[t - 1]
    np.testing.assert_allclose(f(x_value, n_value)[0], expected, rtol=1e-14)
