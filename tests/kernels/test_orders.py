"""Orders in kernels: LLVM and the interpreter against NumPy, loops against the plain loop."""

from functools import cache
from itertools import product
from math import prod

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from pytensor.graph.replace import vectorize_graph

import scanlib
from scanlib.kernels.arrays.orders import LANES, RUN, sort_row
from scanlib.kernels.language import DTYPES, INT64, POINTER
from scanlib.kernels.scalars import NoKernelError
from scanlib.schedules.array_loops import array_program
from tests.kernel_runs import by_llvm, interpreted, write_kernel
from tests.kernel_verifier import verify
from tests.modes import MODES
from tests.reference import reference_scan

SIZES = [0, 1, 2, 7, 8, 9, RUN - 1, RUN, RUN + 1, 2 * RUN, 2 * RUN + 1, 3 * RUN + 5]
FLOATS = ("float64", "float32")
SPECIAL = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, -np.nan]
rng = np.random.default_rng(5)


def draw(size, dtype, kind="few"):
    """Return a row in which many items are equal, or few are, or that is in order."""
    if dtype in FLOATS:
        found = rng.normal(size=size).astype(dtype)
        if kind == "few":
            return np.where(rng.random(size) < 0.7, rng.choice(SPECIAL, size), found).astype(dtype)
    elif dtype == "bool":
        return rng.integers(0, 2, size).astype(dtype)
    else:
        info = np.iinfo(dtype)
        low, high = (info.min, info.max) if kind != "few" else (0, 5)
        found = rng.integers(low, high, size, dtype, endpoint=True)
        if kind == "few" and size:
            found[rng.integers(size)], found[rng.integers(size)] = info.min, info.max
    return np.sort(found)[::-1].copy() if kind == "backwards" else found


def sorted_row(way, row, with_places):
    """Return what a kernel makes of a row, and where the items were."""
    count, dtype = row.size, "uint8" if row.dtype == "bool" else row.dtype.name
    names = ["source", "stride", "count", "items", "spare"]
    names += ["places", "spare_places"] if with_places else []
    types = {name: INT64 if name in ("stride", "count") else POINTER for name in names}
    kernel = write_kernel("sorter", types, lambda w, *v: sort_row(w, *v, dtype=dtype))
    verify(kernel)
    numbers = [row.dtype, row.dtype, np.int64, np.int64][: 4 if with_places else 2]
    memory = [np.zeros(count + LANES * (k % 2), kind) for k, kind in enumerate(numbers)]
    # Memory of no items has no address that the interpreter could take.
    memory = [part if part.size else np.zeros(1, part.dtype) for part in memory]
    source = row if count else np.zeros(1, row.dtype)
    assert way(kernel, [source, row.strides[0], count, *memory])[0] == 0
    return [part[:count] for part in memory[::2]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", [by_llvm, interpreted], ids=["llvm", "interpreted"])
@pytest.mark.all_forms
def test_rows(way, dtype):
    sizes = [*SIZES, 1000, 4321] if way is by_llvm else SIZES[1::3]
    for size, kind in product(sizes, ("few", "many", "backwards")):
        for row in (draw(size, dtype, kind), draw(2 * size, dtype, kind)[::-2]):
            wanted = np.argsort(row, kind="stable")
            for with_places in (False, True):
                items, *places = sorted_row(way, row, with_places)
                assert items.tobytes() == row[wanted].tobytes()  # zeros and NaNs have signs
                for found in places:
                    np.testing.assert_array_equal(found, wanted)


@cache
def loop(mode, dtype, ndim, axis, kind):
    """Return a loop that sorts a state in every step, and its step for NumPy."""

    def step(x, h):
        new = pt.maximum(x, h[::-1])
        return pt.sort(new, axis=axis, kind=kind), pt.argsort(new, axis=axis, kind="stable")

    def plain(x, h):
        new = np.maximum(x, h[::-1])
        return np.sort(new, axis, "stable"), np.argsort(new, axis, "stable")

    x = pt.tensor("x", dtype=dtype, shape=(None,) * (ndim + 1))
    h = pt.tensor("h", dtype=dtype, shape=(None,) * ndim)
    ys = scanlib.scan(step, x, [h, None], return_updates=False)
    return pytensor.function([x, h], ys, mode=MODES[mode]), plain


@st.composite
def cases(draw):
    """Return a dtype, an axis, a kind, and a sequence and a first state that are made of it."""
    dtype = draw(st.sampled_from([d for d in DTYPES if d not in ("uint16", "uint32", "int16")]))
    shape = draw(array_shapes(max_dims=3, min_side=0, max_side=9))
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    fill = st.just(draw(st.sampled_from([0, 1])))
    if dtype in FLOATS:
        items = st.one_of(st.sampled_from(SPECIAL), st.floats(width=int(dtype[-2:])))
    else:
        items = None
    values = [draw(arrays(dtype, size, elements=items, fill=fill)) for size in ((3, *shape), shape)]
    return dtype, axis, draw(st.sampled_from([None, "stable"])), *values


@pytest.mark.parametrize("mode", ["numba", "c"])
@pytest.mark.all_forms
@given(cases())
def test_loops(mode, case):
    dtype, axis, kind, x, h = case
    f, plain = loop(mode, dtype, h.ndim, axis, kind)
    wanted = reference_scan(plain, [x], [h, None])
    for found, expected in zip(f(x, h), wanted, strict=True):
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
    assert "as a kernel" in str(scanlib.explain(f).details())


@cache
def searches(mode, dtypes, ndim):
    """Return a loop that searches in a state, which is sorted; it does not change."""

    def step(v, h):
        return [h, *(pt.searchsorted(h, v, side=side) for side in ("left", "right"))]

    v = pt.tensor("v", dtype=dtypes[0], shape=(None,) * (ndim + 1))
    h = pt.tensor("h", dtype=dtypes[1], shape=(None,))
    ys = scanlib.scan(step, v, [h, None, None], return_updates=False)
    return pytensor.function([v, h], ys[1:], mode=MODES[mode])


@pytest.mark.parametrize("mode", ["numba", "c"])
@pytest.mark.parametrize("ndim", [0, 1, 2])
@pytest.mark.all_forms
def test_searches(mode, ndim):
    pairs = [("float64", "float64"), ("int64", "uint64"), ("bool", "bool"), ("int8", "float32")]
    for dtypes in pairs:
        f = searches(mode, dtypes, ndim)
        for size in (0, 1, 2, 3, 10, 33):
            for kind in ("few", "many"):
                h = np.sort(draw(size, dtypes[1], kind))
                shape = (4, *(11, 3)[:ndim][::-1])  # some at once, and the rest
                v = draw(prod(shape), dtypes[0], kind).reshape(shape)
                for found, side in zip(f(v, h), ("left", "right"), strict=True):
                    np.testing.assert_array_equal(found, [np.searchsorted(h, u, side) for u in v])


def test_batches():
    x, many = pt.dvector("x"), pt.dmatrix("many")

    def step(h, np_or_pt):
        s = np_or_pt.sort(h)
        return s[::-1] * 0.5 + np_or_pt.argsort(h) + np_or_pt.searchsorted(s, h)

    y = scanlib.scan(lambda h: step(h, pt), None, [x], n_steps=3, return_updates=False)
    f = pytensor.function([many], vectorize_graph(y, {x: many}), mode=MODES["c"])
    values = rng.normal(size=(4, 5))
    wanted = [reference_scan(lambda h: [step(h, np)], [], [v], n_steps=3)[0] for v in values]
    np.testing.assert_allclose(f(values), wanted)
    assert "as a kernel" in str(scanlib.explain(f).details())


def test_what_has_no_kernel():
    h = pt.zvector("h")
    x = pt.dvector("x")
    steps = {
        h: lambda h: pt.sort(h)[::-1],
        x: lambda x: x + pt.searchsorted(x, x, sorter=pt.argsort(x)),
    }
    for start, step in steps.items():
        y = scanlib.scan(step, None, [start], n_steps=2, return_updates=False)
        op = next(v.owner.op for v in pytensor.graph.traversal.ancestors([y]) if is_loop(v))
        with pytest.raises(NoKernelError):
            array_program(op)


def is_loop(variable):
    return variable.owner is not None and isinstance(variable.owner.op, scanlib.ops.scan.Scan)
