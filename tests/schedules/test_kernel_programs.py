"""Elementwise loops as kernels: the interpreter and LLVM against the canonical loop, in Python."""

import ctypes
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import OPT_FAST_RUN, Mode

import scanlib
from scanlib.backends.handler.programs import program_of
from scanlib.kernels.python_driver import Runner, compiled_runner
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.kernel_runs import interpreted_entry
from tests.kernel_verifier import verify

rng = np.random.default_rng(5)


def scan(*arguments, **options):
    return scanlib.scan(*arguments, return_updates=False, **options)


def lowered(inputs, outputs, values):
    """Yield the elementwise loops of a function, with the values of their inputs."""
    known = {v: np.asarray(x, v.type.dtype) for v, x in zip(inputs, values, strict=True)}
    with pytensor.config.change_flags(scanlib__perform="python"):
        f = pytensor.function(inputs, outputs, mode=Mode("py", OPT_FAST_RUN))
        graph = f.maker.fgraph
        known = dict(zip(graph.inputs, known.values(), strict=True))
        for node in graph.toposort():
            own = [known[v] if v.owner or v in known else v.data for v in node.inputs]
            results = [[None] for _ in node.outputs]
            node.op.perform(node, own, results)
            known.update((v, r[0]) for v, r in zip(node.outputs, results, strict=True))
            if isinstance(node.op, ElemwiseScan):
                yield node.op, own, [known[v] for v in node.outputs]


def assert_program(op, inputs, right, rtol=1e-12):
    program = program_of(op)
    kernels = program.kernels
    for kernel in kernels.all:
        verify(kernel)
    results = compiled_runner(program)(*inputs)
    entries = [interpreted_entry(k, program.words) for k in kernels.all]

    def run(table, frame):
        words = np.frombuffer((ctypes.c_int64 * program.words.size).from_address(table), np.int64)
        return entries[2 + words[program.words.choice]](table, frame)

    again = Runner(program, *entries[:2], run)(*inputs)
    for known, result, other in zip(right, results, again, strict=True):
        assert result.dtype == known.dtype
        assert result.shape == known.shape
        np.testing.assert_allclose(result, known, rtol=rtol, atol=rtol / 10)
        np.testing.assert_array_equal(result, other)


def vector(dtype="float64"):
    return pt.vector(dtype=dtype)


def matrix(dtype="float64"):
    return pt.matrix(dtype=dtype)


def channel(steps, channels, layout="rows"):
    x, w = matrix(), vector()
    h = scan(lambda x, h, w: pt.tanh(w * h + x), x, [pt.zeros_like(w)], [w])
    gradient = pytensor.grad((h**2).sum(), w)
    data = rng.normal(size=(steps, channels))
    if layout == "columns":
        data = np.asfortranarray(data)
    weights = (
        rng.normal(size=2 * channels)[::2] if layout == "columns" else rng.normal(size=channels)
    )
    return [x, w], [h, gradient], [data, weights]


def several_taps():
    x, start = vector(), matrix()
    state = {"initial": start, "taps": [-1, -3]}
    h = scan(lambda x, near, far: pt.cos(near) * x + far / 2, x, [state])
    return [x, start], [h, h[-1]], [rng.normal(size=6), rng.normal(size=(3, 9))]


def last_row_only():
    x, start = vector(), matrix()
    state = {"initial": start, "taps": [-1, -2]}
    h = scan(lambda x, near, far: pt.sin(near) * x + far, x, [state])
    return [x, start], [h[-1]], [rng.normal(size=5), rng.normal(size=(2, 3))]


def until(steps):
    x = vector()
    h = scan(lambda x, h: ((y := pt.exp(h / 9) * x), scanlib.until(y > 3)), x, [1.0])
    data = np.full(300, 0.7)
    data[steps:] = 9.0
    return [x], [h, pytensor.grad(h.sum(), x)], [data]


def whole_numbers():
    x = vector("int32")
    h = scan(lambda x, h: h * 31 // 7 + x % 5, x, [pt.constant(1, dtype="int32")])
    return [x], [h], [np.arange(-9, 20)]


def complex_numbers():
    x, w = vector("complex128"), pt.zscalar()
    h = scan(lambda x, h, w: w * h * h + x, x, [np.complex128(0)], [w])
    return [x, w], [h], [0.1 * rng.normal(size=7) + 0.2j, 0.3 + 0.1j]


def complex_outputs_of_blocks():
    """Their parts lie side by side: several steps cannot be written at once."""
    x = vector()
    h, z = scan(lambda x, h: (0.5 * h + x, pt.cast(h, "complex128")), x, [np.float64(1), None])
    return [x], [h, z], [rng.normal(size=37)]


def truth_values():
    x = matrix("bool")
    h = scan(lambda x, h: pt.switch(x, pt.invert(h), h), x, [pt.zeros(x.shape[1], dtype="bool")])
    return [x], [h], [rng.integers(0, 2, (6, 21))]


def single_precision():
    x, w = matrix("float32"), vector("float32")
    h = scan(lambda x, h, w: pt.tanh(w * h + x), x, [pt.zeros_like(w)], [w])
    total = h.sum(axis=1)
    return [x, w], [h, total], [rng.normal(size=(4, 37)), rng.normal(size=37)]


def special_functions():
    x = matrix()
    h = scan(lambda x, h: pt.gammaln(h + x), x, [pt.ones(x.shape[1])])
    return [x], [h], [rng.uniform(1, 3, (5, 6))]


def two_axes():
    x, w = pt.tensor3(), matrix()
    h = scan(lambda x, h, w: pt.tanh(h) * w + x, x, [pt.zeros_like(w)], [w])
    return [x, w], [h, pytensor.grad(h.sum(), w)], [rng.normal(size=(3, 4, 11)), np.ones((4, 11))]


CASES = {
    "wide": lambda: channel(4, 37),
    "narrow": lambda: channel(5, 3),
    "columns": lambda: channel(3, 19, "columns"),
    "no steps": lambda: channel(0, 5),
    "one step": lambda: channel(1, 8),
    "no channels": lambda: channel(4, 0),
    "taps": several_taps,
    "last row": last_row_only,
    "stops": lambda: until(150),
    "stops at once": lambda: until(0),
    "never stops": lambda: until(300),
    "integers": whole_numbers,
    "complex": complex_numbers,
    "complex outputs of blocks": complex_outputs_of_blocks,
    "bool": truth_values,
    "float32": single_precision,
    "special functions": special_functions,
    "two axes": two_axes,
}


@pytest.mark.parametrize("name", CASES)
def test_programs_compute_what_the_loop_says(name):
    tried = 0
    for op, inputs, right in lowered(*CASES[name]()):
        rtol = 2e-6 if name == "float32" else 1e-12
        if program_of(op).functions:
            continue  # whose addresses numba's backend knows
        assert_program(op, inputs, right, rtol)
        tried += 1
    assert tried or name == "special functions"


@pytest.mark.parametrize("name", ["stops", "wide", "special functions", "last row", "complex"])
def test_numba_calls_them(name):
    inputs, outputs, values = CASES[name]()
    values = [np.asarray(x, v.type.dtype) for v, x in zip(inputs, values, strict=True)]
    kept = [value.copy() for value in values]
    f = pytensor.function(inputs, outputs, mode="NUMBA")
    with pytensor.config.change_flags(scanlib__perform="python"):
        g = pytensor.function(inputs, outputs, mode=Mode("py", None))
    for result, right in zip(f(*values), g(*values), strict=True):
        np.testing.assert_allclose(result, right, rtol=1e-12, atol=1e-14)
    for value, same in zip(values, kept, strict=True):
        np.testing.assert_array_equal(value, same)


# In numba's compiled code, called from Python, and from PyTensor's C code.
LINKERS = {"numba": "NUMBA", "python": Mode("py", OPT_FAST_RUN), "c": Mode("cvm", OPT_FAST_RUN)}


@pytest.mark.parametrize("linker", LINKERS)
def test_errors_name_the_loop(linker):
    x, y, n = matrix(), matrix(), pt.lscalar()
    first = [pt.zeros(x.shape[1])]
    h = scan(lambda x, y, h: pt.tanh(h * x + y), [x, y], first, n_steps=n, name="both")
    f = pytensor.function([x, y, n], h, mode=LINKERS[linker])
    with pytest.raises(ValueError, match=r"scan `both`: .* gives 2 rows, but .*n_steps=3 steps"):
        f(np.ones((2, 4)), np.ones((3, 4)), 3)
    with pytest.raises(ValueError, match="shape"):
        f(np.ones((2, 4)), np.ones((2, 5)), 2)
    with pytest.raises(ValueError, match="must not be negative"):
        f(np.ones((2, 4)), np.ones((2, 4)), -1)
    assert f(np.ones((2, 4)), np.ones((2, 4)), 2).shape == (2, 4)


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="the system has no timer")
@pytest.mark.parametrize("linker", LINKERS)
def test_a_long_loop_can_be_interrupted(linker):
    assert threading.current_thread() is threading.main_thread()
    n = pt.lscalar()
    h = scan(lambda h: pt.sin(h) + 1.0, outputs_info=[0.0], n_steps=n)[-1]
    f = pytensor.function([n], h, mode=LINKERS[linker])
    assert np.isfinite(f(10))

    def interrupt(*arguments):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            f(10**11)  # would take half an hour
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert np.isfinite(f(10))


@pytest.mark.parametrize("threads", [2, 3])
def test_parts_add_up(threads):
    inputs, outputs, values = channel(4, 3_000)
    flags = {"scanlib__threads": threads, "scanlib__parallel_channels": 8}
    with pytensor.config.change_flags(**flags):
        f = pytensor.function(inputs, [*outputs, outputs[0].sum(axis=1)], mode="NUMBA")
        results = f(*values)
        again = f(*values)
    with pytensor.config.change_flags(scanlib__perform="python"):
        g = pytensor.function(inputs, [*outputs, outputs[0].sum(axis=1)], mode=Mode("py", None))
        right = g(*values)
    for one, two, known in zip(results, again, right, strict=True):
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, known, rtol=1e-10, atol=1e-12)


KEYS = """
import pytensor, pytensor.tensor as pt, scanlib
from pytensor.compile.mode import OPT_FAST_RUN, Mode
from scanlib.backends.handler.programs import program_of
from scanlib.kernels.compiled import program_key
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
x, y, p = pt.dvector("x"), pt.dmatrix("y"), pt.dvector("p")
a = scanlib.scan(
    lambda x, h, p: p[0] + p[1] * x**2 + p[2] * h,
    sequences=x, outputs_info=pt.ones(()), non_sequences=p, return_updates=False,
)
b = scanlib.scan(
    lambda y, h, p: pt.tanh(p[0] * h + y), sequences=y, outputs_info=y[0], non_sequences=p,
    return_updates=False,
)
cost = pt.log(a).sum() + (b**2).sum()
f = pytensor.function([x, y, p], pytensor.grad(cost, [x, y, p]), mode=Mode("py", OPT_FAST_RUN))
for node in f.maker.fgraph.toposort():
    if isinstance(node.op, ElemwiseScan):
        print(program_key(program_of(node.op)))
"""


def test_keys_are_the_same_in_every_process():
    """Else what is kept on disk is never found: no set decides the order of what is written."""
    found = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", KEYS]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert len(done.stdout.split()) >= 3
        found.add(done.stdout)
    assert len(found) == 1
