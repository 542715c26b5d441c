"""Rows that a step reads and writes at computed places, against the plain loop.

They are steps of arrays: a kernel takes them, one after the other.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytensor.graph.basic import Constant
from pytensor.graph.replace import vectorize_graph
from pytensor.graph.traversal import ancestors, toposort
from pytensor.tensor.basic import Alloc

import scanlib
from scanlib.analysis.linear_forms import LinearForms
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from scanlib.schedules.array_loops import array_program
from tests.checks import assert_derivatives
from tests.modes import MODES
from tests.reference import reference_scan

LOOPS = (ElemwiseScan, LinearScan, Scan)


def loops(function):
    return [node.op for node in function.maker.fgraph.toposort() if isinstance(node.op, LOOPS)]


def assert_kernels(function):
    """Check that the steps of all loops are taken by kernels."""
    found = [op for op in loops(function) if isinstance(op, Scan)]
    assert found
    assert all(array_program(op) for op in found)


def put(row, index, value, add=False):
    """Return a copy of a row with other items at an index."""
    row = np.array(row)
    with np.errstate(all="ignore"):
        row[index] = row[index] + value if add else value
    return row


class Case(NamedTuple):
    """A loop, symbolic and in NumPy.

    `rows` are the sequences: ``"i"`` for an index into the axis of `sizes` given beside it, else a
    shape. `states` are the shapes of the states, in letters: ``n`` and ``m`` are drawn.
    """

    step: Callable
    plain: Callable
    rows: tuple
    states: tuple = ("n",)
    outputs: int = 0


def sym(row, index, value, add=False):
    return (pt.inc_subtensor if add else pt.set_subtensor)(row[index], value)


def _both(make):
    return make(sym, pt), make(put, np)


CASES = {
    "delta-rule": Case(
        *_both(lambda to, xp: lambda i, x, h: [to(h, i, 0.3 * (x - h[i]), True)]), ("n", "x")
    ),
    "replace": Case(
        *_both(lambda to, xp: lambda i, x, h: [to(h, i, 0.5 * h[i] + x)]), ("n", "x")
    ),
    "overwrite": Case(*_both(lambda to, xp: lambda i, x, h: [to(h, i, x)]), ("n", "x")),
    "nonlinear": Case(
        *_both(lambda to, xp: lambda i, x, h: [to(h, i, xp.tanh(h[i]) * x)]),
        ("n", "x"),
    ),
    "decay-of-the-others": Case(
        *_both(lambda to, xp: lambda i, x, h: [to(0.9 * h, i, h[i] + x)]), ("n", "x")
    ),
    "reads-what-it-wrote": Case(
        *_both(lambda to, xp: lambda i, x, h: [to(h, i, h[i] + x), to(h, i, h[i] + x)[i]]),
        ("n", "x"), outputs=1,
    ),
    "output": Case(
        *_both(lambda to, xp: lambda i, x, h: [to(h, i, x - h[i], True), h[i] * x]),
        ("n", "x"), outputs=1,
    ),
    "two-places": Case(
        *_both(lambda to, xp: lambda i, j, x, h: [to(to(h, i, h[i] + x), j, h[j] * x)]),
        ("n", "n", "x"),
    ),
    "temporal-difference": Case(
        *_both(lambda to, xp: lambda i, j, x, h: [to(h, i, 0.2 * (x + 0.9 * h[j] - h[i]), True)]),
        ("n", "n", "x"),
    ),
    "two-states": Case(
        *_both(
            lambda to, xp: lambda i, x, h, g: [
                to(h, i, x - h[i], True), to(g, i, g[i] * 0.5 + h[i])
            ]
        ),
        ("n", "x"), ("n", "n"),
    ),
    "scalar-beside": Case(
        *_both(lambda to, xp: lambda i, x, h, s: [to(h, i, s * x), 0.5 * s + h[i]]),
        ("n", "x"), ("n", ""),
    ),
    "items-of-a-matrix": Case(
        *_both(lambda to, xp: lambda i, j, x, h: [to(h, (i, j), 0.5 * h[i, j] + x), h[i, j]]),
        ("n", "m", "x"), ("nm",), outputs=1,
    ),
    "rows-of-a-matrix": Case(
        *_both(lambda to, xp: lambda i, x, h: [to(h, i, 0.5 * h[i] + x)]), ("n", "xm"), ("nm",)
    ),
    "columns-of-a-matrix": Case(
        *_both(
            lambda to, xp: lambda i, x, h: [
                to(h, (slice(None), i), 0.5 * h[:, i] + x), h[:, i] + x
            ]
        ),
        ("m", "xn"), ("nm",), outputs=1,
    ),
    "batch": Case(
        *_both(
            lambda to, xp: lambda i, x, h: [
                to(h, (xp.arange(h.shape[0]), i), 0.5 * h[xp.arange(h.shape[0]), i] + x),
                h[xp.arange(h.shape[0]), i],
            ]
        ),
        ("mn", "xn"), ("nm",), outputs=1,
    ),
}  # fmt: skip


def shape_of(letters, n, m):
    return tuple({"n": n, "m": m}[letter] for letter in letters)


def render(case, dtype="float64"):
    """Return the inputs of a loop and its traces."""
    rows, states = [], []
    for k, row in enumerate(case.rows):
        index = row[0] in "nm"
        shape = (None,) * len(row)
        rows.append(pt.tensor(f"r{k}", dtype="int64" if index else dtype, shape=shape))
    for k, letters in enumerate(case.states):
        states.append(pt.tensor(f"h{k}", dtype=dtype, shape=(None,) * len(letters)))

    def step(*arguments):
        return [v.astype(dtype) for v in case.step(*arguments)]

    info = [*states, *([None] * case.outputs)]
    traces = scanlib.scan(step, rows, info, return_updates=False)
    return [*rows, *states], traces if isinstance(traces, list) else [traces]


def draw_values(case, steps, n, m, seed, dtype="float64"):
    rng = np.random.default_rng([steps, n, m, seed])
    values = []
    for row in case.rows:
        if row[0] in "nm":
            size = {"n": n, "m": m}[row[0]]
            shape = (steps, *shape_of(row[1:], n, m))
            values.append(rng.integers(-size, size, shape) if size else np.zeros(shape, "int64"))
        else:
            values.append(_numbers(rng, (steps, *shape_of(row[1:], n, m)), dtype))
    return values + [_numbers(rng, shape_of(letters, n, m), dtype) for letters in case.states]


def _numbers(rng, shape, dtype):
    kind = np.dtype(dtype).kind
    if kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if kind in "iu":
        return rng.integers(-100, 100, shape).astype(dtype)
    values = rng.uniform(-2, 2, shape)
    return (values + 1j * rng.uniform(-2, 2, shape) if kind == "c" else values).astype(dtype)


def expected(case, values):
    count = len(case.rows)
    dtype = values[-1].dtype

    def plain(*arguments):
        return [np.asarray(value).astype(dtype) for value in case.plain(*arguments)]

    rows = []
    for row, value in zip([*case.rows, *case.states], values, strict=True):
        rows.append(value.shape[1:] if row in case.rows else value.shape)
    info = [*values[count:], *([None] * case.outputs)]
    types = [(v.shape, v.dtype) for v in values[count:]]
    types += [(OUT_ROWS.get(id(case), lambda v: ())(values), dtype)] * case.outputs
    return reference_scan(plain, values[:count], info, rows=types)


OUT_ROWS = {
    id(CASES["columns-of-a-matrix"]): lambda values: values[1].shape[1:],
    id(CASES["batch"]): lambda values: values[1].shape[1:],
}


@pytest.fixture(scope="module")
def compiled():
    """Return functions by case, dtype and mode, each compiled once."""
    known = {}

    def get(name, mode="c", dtype="float64"):
        key = name, mode, dtype
        if key not in known:
            inputs, traces = render(CASES[name], dtype)
            known[key] = pytensor.function(inputs, traces, mode=MODES[mode])
        return known[key]

    return get


def compare(function, case, values, rtol=1e-12):
    before = [value.copy() for value in values]
    for actual, wanted in zip(function(*values), expected(case, values), strict=True):
        assert actual.shape == wanted.shape
        np.testing.assert_allclose(actual, wanted, rtol=rtol, atol=1e-13)
    for value, old in zip(values, before, strict=True):
        np.testing.assert_array_equal(value, old)


@pytest.mark.parametrize("name", CASES)
def test_kernels(name, compiled):
    assert_kernels(compiled(name))


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=25)
@given(
    steps=st.sampled_from([0, 1, 2, 3, 17]),
    n=st.sampled_from([1, 2, 3, 8, 33]),
    m=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 99),
)
def test_values(compiled, name, steps, n, m, seed):
    compare(compiled(name), CASES[name], draw_values(CASES[name], steps, n, m, seed))


@pytest.mark.parametrize("name", ["two-places", "items-of-a-matrix", "batch"])
def test_values_in_numba_mode(compiled, name):
    function = compiled(name, "numba")
    assert_kernels(function)
    for seed, (steps, n, m) in enumerate([(0, 2, 3), (1, 1, 1), (9, 4, 3), (30, 2, 7), (5, 40, 1)]):
        compare(function, CASES[name], draw_values(CASES[name], steps, n, m, seed))


@pytest.mark.parametrize("dtype", ["float32", "complex128", "int8", "int64", "bool"])
@pytest.mark.parametrize("name", ["overwrite", "reads-what-it-wrote"])
def test_dtypes(compiled, name, dtype):
    if dtype == "bool" and name != "overwrite":
        pytest.skip("truth values are not added")
    function = compiled(name, "c", dtype)
    assert_kernels(function)
    for seed in range(5):
        values = draw_values(CASES[name], 12, 5, 2, seed, dtype)
        compare(function, CASES[name], values, 1e-5 if dtype == "float32" else 1e-12)


@pytest.mark.parametrize("name", ["replace", "output", "batch", "two-places"])
def test_other_channels_do_not_leak(compiled, name):
    """NaN and infinity stay where they are."""
    case = CASES[name]
    for seed in range(8):
        values = draw_values(case, 6, 5, 3, seed)
        start = values[-1]
        start[..., :2] = [np.nan, np.inf][: start[..., :2].shape[-1]]
        start[1] = -np.inf
        with np.errstate(all="ignore"):
            compare(compiled(name), case, values)


@pytest.mark.parametrize("mode", ["c", "numba"])
@pytest.mark.parametrize("name", ["overwrite", "items-of-a-matrix", "batch"])
def test_indices_out_of_range(compiled, name, mode):
    case, function = CASES[name], compiled(name, mode)
    for bad in (4, -5, 2**40):
        values = draw_values(case, 6, 4, 4, 0)
        values[0][3] = bad
        with pytest.raises(IndexError, match=f"step 3: index {bad} is out of bounds"):
            function(*values)
        for trace in function(*[v[:3] if k < len(case.rows) else v for k, v in enumerate(values)]):
            assert len(trace) == 3
    none = [v[:0] if k < len(case.rows) else v for k, v in enumerate(draw_values(case, 1, 4, 4, 0))]
    assert all(len(trace) == 0 for trace in function(*none))


def test_rows_without_items(compiled):
    function = compiled("overwrite")
    assert function(np.zeros(0, int), np.zeros(0), np.zeros(0))[0].shape == (0, 0)
    with pytest.raises(IndexError):
        function(np.zeros(1, int), np.zeros(1), np.zeros(0))


DERIVATIVES = [
    "delta-rule", "nonlinear", "two-places", "temporal-difference", "two-states", "scalar-beside",
    "items-of-a-matrix", "columns-of-a-matrix", "batch",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    case = CASES[name]
    inputs, traces = render(case)
    values = draw_values(case, 5, 3, 2, 1)
    numbers = {v: x for v, x in zip(inputs, values, strict=True) if v.dtype == "float64"}
    fixed = {v: pt.constant(x) for v, x in zip(inputs, values, strict=True) if v.dtype == "int64"}
    cost = sum((trace**2).sum() for trace in traces)
    from pytensor.graph.replace import clone_replace

    cost = clone_replace([cost], fixed)[0]

    def reference(*given):
        rest = iter(given)
        full = [x if x.dtype == np.int64 else next(rest) for x in values]
        return float(sum((trace**2).sum() for trace in expected(case, full)))

    assert_derivatives(cost, numbers, reference, MODES["c"])


@pytest.mark.parametrize("name", DERIVATIVES)
def test_kernels_of_gradients(name):
    case = CASES[name]
    inputs, traces = render(case)
    cost = sum((trace**2).sum() for trace in traces)
    numbers = [v for v in inputs if v.dtype == "float64"]
    function = pytensor.function(inputs, pytensor.grad(cost, numbers), mode=MODES["c"])
    assert len(loops(function)) == 2
    assert_kernels(function)


@pytest.mark.parametrize("name", ["delta-rule", "output", "temporal-difference"])
def test_batches_of_loops(name):
    """What `vectorize_graph` makes of a loop has kernels, too."""
    case = CASES[name]
    inputs, traces = render(case)
    batched = [pt.tensor(dtype=v.dtype, shape=(None,) * (v.ndim + 1)) for v in inputs]
    many = vectorize_graph(traces, dict(zip(inputs, batched, strict=True)))
    function = pytensor.function(batched, many, mode=MODES["c"])
    assert_kernels(function)
    each = [draw_values(case, 7, 4, 1, seed) for seed in range(3)]
    results = function(*[np.stack(values) for values in zip(*each, strict=True)])
    for k, values in enumerate(each):
        for actual, wanted in zip(results, expected(case, values), strict=True):
            np.testing.assert_allclose(actual[k], wanted, rtol=1e-12)


def test_last_rows_and_reversed_order():
    i, x, h = pt.lvector("i"), pt.vector("x"), pt.vector("h")
    step = CASES["reads-what-it-wrote"].step
    for backwards in (False, True):
        traces = scanlib.scan(step, [i, x], [h, None], go_backwards=backwards, return_updates=False)
        function = pytensor.function([i, x, h], [traces[0][-1], traces[1]], mode=MODES["c"])
        assert_kernels(function)
        values = draw_values(CASES["reads-what-it-wrote"], 8, 3, 1, 0)
        plain = CASES["reads-what-it-wrote"].plain
        wanted = reference_scan(plain, values[:2], [values[2], None], go_backwards=backwards)
        for actual, e in zip(function(*values), [wanted[0][-1], wanted[1]], strict=True):
            np.testing.assert_allclose(actual, e, rtol=1e-12)


def test_deeper_taps_and_until():
    i, x, h = pt.lvector("i"), pt.vector("x"), pt.matrix("h")

    def step(i, x, h1, h3):
        new = pt.set_subtensor(h1[i], h3[i] + x)
        return new, scanlib.until(new[i] > 3.0)

    trace = scanlib.scan(step, [i, x], [{"initial": h, "taps": [-1, -3]}], return_updates=False)
    function = pytensor.function([i, x, h], trace, mode=MODES["c"])
    assert_kernels(function)

    def plain(i, x, h1, h3):
        new = put(h1, i, h3[i] + x)
        return [new, new[i] > 3.0]

    rng = np.random.default_rng(1)
    for _ in range(10):
        values = rng.integers(-3, 3, 40), rng.uniform(0, 0.5, 40), rng.normal(size=(3, 3))
        (wanted,) = reference_scan(
            plain, values[:2], [{"initial": values[2], "taps": [-1, -3]}], until=True
        )
        np.testing.assert_allclose(function(*values), wanted, rtol=1e-12)


OTHERS = {
    # The place depends on all items.
    "greedy": (
        lambda i, x, h: pt.inc_subtensor(h[pt.argmax(h)], x),
        lambda i, x, h: put(h, np.argmax(h), x, True),
    ),
    # What is written is no function of single items.
    "reads-all": (
        lambda i, x, h: pt.set_subtensor(h[i], h.max() + x),
        lambda i, x, h: put(h, i, h.max() + x),
    ),
    "part-of-a-row": (
        lambda i, x, h: pt.set_subtensor(h[1:], h[:-1] + x),
        lambda i, x, h: np.concatenate([h[:1], h[:-1] + x]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_other_writes(name):
    symbolic, plain = OTHERS[name]
    i, x, h = pt.lvector("i"), pt.vector("x"), pt.vector("h")
    trace = scanlib.scan(symbolic, [i, x], h, return_updates=False)
    function = pytensor.function([i, x, h], trace, mode=MODES["c"])
    for seed in range(4):
        values = draw_values(CASES["overwrite"], 9, 4, 1, seed)
        (wanted,) = reference_scan(lambda *a: [plain(*a)], values[:2], [values[2]])
        np.testing.assert_allclose(function(*values), wanted, rtol=1e-12)


def test_rows_that_are_changed_and_returned():
    """A loop of arrays: its outputs are rows of a matrix, picked before they change."""

    def plain(values, rows, start):
        h, trace = start.copy(), []
        for i, x in zip(values, rows, strict=True):
            trace.append(h[i] * x)
            h[i] = 0.5 * h[i] + x
        return np.array(trace).reshape(rows.shape)

    i, x, h0 = pt.lvector("i"), pt.dmatrix("x"), pt.dmatrix("h0")
    trace = scanlib.scan(
        lambda i, x, h: [pt.set_subtensor(h[i], 0.5 * h[i] + x), h[i] * x],
        [i, x],
        [h0, None],
        return_updates=False,
    )[1]
    function = pytensor.function([i, x, h0], trace, mode=MODES["c"])
    rng = np.random.default_rng(0)
    for steps, n, m in ((0, 2, 3), (9, 4, 3), (5, 40, 1)):
        places, rows = rng.integers(-n, n, steps), rng.normal(size=(steps, m))
        start = rng.normal(size=(n, m))
        np.testing.assert_allclose(
            function(places, rows, start), plain(places, rows, start), rtol=1e-12
        )


def test_sizes_are_not_read_off_what_was_computed():
    """Each write would go through all that was computed before, of which there may be much."""
    h, n = pt.dvector("h"), pt.lscalar("n")
    y = h
    for _ in range(5):
        y = pt.inc_subtensor(y[1:3], 2.0 * y[:2])
    forms = LinearForms([h], [y], lambda variable: [n] * variable.type.ndim)
    values = [block.value for block in forms.forms[y].values()]
    filled = [node for node in toposort(values) if isinstance(node.op, Alloc)]
    assert len(filled) == 5
    for node in filled:
        assert {v for v in ancestors(node.inputs[1:]) if not isinstance(v, Constant)} == {n}
