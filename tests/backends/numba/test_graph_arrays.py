"""Arrays of any number of axes around loops: the same values and errors as NumPy's."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from numba.core import event
from pytensor.graph.op import Op
from pytensor.graph.replace import vectorize_graph
from pytensor.tensor.math import Sum

import scanlib
from scanlib.backends.numba import dispatch
from tests.backends.numba.test_graph_function import Compiled

# How each expression of x (n, m), y (m,), z (n, m, 2), k (p,) with places of rows, and flags (n, m)
# is written, and what NumPy has for it.
CASES = {
    "elementwise": (
        lambda x, y, z, k, f: pt.exp(x) * y - x.sum(1)[:, None],
        lambda x, y, z, k, f: np.exp(x) * y - x.sum(1)[:, None],
    ),
    "two results": (
        lambda x, y, z, k, f: pt.tanh(z + x[:, :, None]).sum(),
        lambda x, y, z, k, f: np.tanh(z + x[:, :, None]).sum(),
    ),
    "range to a float": (
        lambda x, y, z, k, f: pt.arange(x.shape[0] + 1.5) + y.sum(),
        lambda x, y, z, k, f: np.arange(x.shape[0] + 1.5) + y.sum(),
    ),
    "sum of rows": (lambda x, y, z, k, f: (x * y).sum(1), lambda x, y, z, k, f: (x * y).sum(1)),
    "sum of columns": (
        lambda x, y, z, k, f: (x - 1).sum(0),
        lambda x, y, z, k, f: (x - 1).sum(0),
    ),
    "sum over outer axes": (
        lambda x, y, z, k, f: pt.sum(z, (0, 2)),
        lambda x, y, z, k, f: z.sum((0, 2)),
    ),
    "sum of single floats": (
        lambda x, y, z, k, f: Sum(axis=0, acc_dtype="float64")(x.astype("float32")),
        lambda x, y, z, k, f: x.astype("f4").sum(0, dtype="f8").astype("f4"),
    ),
    "sum of a transpose": (lambda x, y, z, k, f: x.T.sum(0), lambda x, y, z, k, f: x.sum(1)),
    "sum of small integers": (
        lambda x, y, z, k, f: pt.sum(pt.cast(100 * f, "int8"), 1),
        lambda x, y, z, k, f: (100 * f).sum(1),
    ),
    "product": (lambda x, y, z, k, f: pt.prod(z, (1, 2)), lambda x, y, z, k, f: z.prod((1, 2))),
    "largest": (
        lambda x, y, z, k, f: pt.max(pt.concatenate([z, z[:, :, :1] - 1], 2), 2),
        lambda x, y, z, k, f: z.max(2),
    ),
    "smallest of all": (
        lambda x, y, z, k, f: pt.min(pt.concatenate([x.ravel(), [5.0]])),
        lambda x, y, z, k, f: np.min([*x.ravel(), 5.0]),
    ),
    "all and any": (
        lambda x, y, z, k, f: pt.all(f, 1) | pt.any(f & (x > 0), 1),
        lambda x, y, z, k, f: f.all(1) | (f & (x > 0)).any(1),
    ),
    "transpose": (
        lambda x, y, z, k, f: z.transpose(2, 0, 1),
        lambda x, y, z, k, f: z.transpose(2, 0, 1),
    ),
    "new axes": (lambda x, y, z, k, f: y[None, :, None], lambda x, y, z, k, f: y[None, :, None]),
    "slices": (lambda x, y, z, k, f: z[1:, ::-1, 0], lambda x, y, z, k, f: z[1:, ::-1, 0]),
    "row": (lambda x, y, z, k, f: z[:, :, -1], lambda x, y, z, k, f: z[:, :, -1]),
    "joined rows": (
        lambda x, y, z, k, f: pt.concatenate([x, x[:1] * 0, y[None]], 0),
        lambda x, y, z, k, f: np.concatenate([x, x[:1] * 0, y[None]]),
    ),
    "joined columns": (
        lambda x, y, z, k, f: pt.concatenate([z, x[:, :, None]], -1),
        lambda x, y, z, k, f: np.concatenate([z, x[:, :, None]], -1),
    ),
    "split": (
        lambda x, y, z, k, f: pt.split(z, [1, 1], n_splits=2, axis=2)[1],
        lambda x, y, z, k, f: z[:, :, 1:],
    ),
    "reshape": (lambda x, y, z, k, f: z.reshape((2, -1)), lambda x, y, z, k, f: z.reshape(2, -1)),
    "reshaped transpose": (
        lambda x, y, z, k, f: x.T.reshape((-1,)),
        lambda x, y, z, k, f: x.T.reshape(-1),
    ),
    "filled": (
        lambda x, y, z, k, f: pt.alloc(y, x.shape[0], x.shape[1]) + 1,
        lambda x, y, z, k, f: np.broadcast_to(y, x.shape) + 1,
    ),
    "set": (
        lambda x, y, z, k, f: x[:, 1:].set(7.0),
        lambda x, y, z, k, f: np.concatenate([x[:, :1], 0 * x[:, 1:] + 7], 1),
    ),
    "added": (
        lambda x, y, z, k, f: z[:, :, 1].inc(x),
        lambda x, y, z, k, f: z + np.eye(2)[1] * x[:, :, None],
    ),
    "added row": (
        lambda x, y, z, k, f: z[:, :, 0].inc(y),
        lambda x, y, z, k, f: z + np.eye(2)[0] * y[:, None],
    ),
    "gathered": (lambda x, y, z, k, f: z[k], lambda x, y, z, k, f: z[k]),
    "gathered items": (
        lambda x, y, z, k, f: pt.constant(np.arange(6.0).reshape(2, 3))[[[0], [-1]], [2, 0]],
        lambda x, y, z, k, f: np.array([[2.0, 0.0], [5.0, 3.0]]),
    ),
    "scattered": (
        lambda x, y, z, k, f: pt.zeros((4, 2))[k].inc(1.0),
        lambda x, y, z, k, f: np.stack([np.bincount(k % 4, minlength=4)] * 2, 1) * 1.0,
    ),
    "set at places": (
        lambda x, y, z, k, f: pt.zeros(4)[k].set(pt.cast(k, "float64")),
        lambda x, y, z, k, f: scattered(k),
    ),
    "gathered in a batch": (
        lambda x, y, z, k, f: gathered_batch(k),
        lambda x, y, z, k, f: np.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])[
            [[0], [1]], [[2, 0], [-1, 1]]
        ],
    ),
}


def scattered(k):
    out = np.zeros(4)
    for place in k:
        out[place] = place
    return out


def gathered_batch(k):
    x, i = pt.vector("x", shape=(3,)), pt.lvector("i")
    table = pt.constant([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]])
    places = pt.constant(np.array([[2, 0], [-1, 1]])) + 0 * k.sum()
    return vectorize_graph(x[i], {x: table, i: pt.specify_shape(places, (2, 2))})


def with_loop(outputs, x):
    """Put a loop into the graph, so that it is written as one function."""
    h = scanlib.scan(
        lambda x, h: 0.5 * h + x, sequences=x, outputs_info=np.float64(0.0), return_updates=False
    )
    return [h.sum(), *outputs]


def values_of(n, m, p, dtype="float64"):
    rng = np.random.default_rng(n + 10 * m)
    return [
        rng.normal(size=(n, m)).astype(dtype),
        rng.normal(size=m).astype(dtype),
        rng.normal(size=(n, m, 2)).astype(dtype),
        rng.integers(-n, n, size=p) if n else np.zeros(0, np.int64),
        rng.random((n, m)) < 0.7,
    ]


def unknown(value):
    """Return a shape of which only the last of three sizes is known."""
    return (None, None, 2) if value.ndim == 3 else (None,) * value.ndim


def build(values, static):
    """Compile all cases; with `static`, for the sizes of these values alone."""
    inputs = [pt.tensor(dtype=v.dtype, shape=v.shape if static else unknown(v)) for v in values]
    outputs = [make(*inputs) for make, _ in CASES.values()]
    outputs = with_loop(outputs, inputs[1])
    return pytensor.function(inputs, outputs, mode="NUMBA", on_unused_input="ignore")


@pytest.fixture(scope="module")
def functions():
    return {static: build(values_of(4, 3, 5), static) for static in (False, True)}


def check(function, values):
    kept = [value.copy() for value in values]
    results = function(*values)[1:]
    for (name, (_, expect)), mine in zip(CASES.items(), results, strict=True):
        expected = np.asarray(expect(*values))
        assert mine.shape == expected.shape, name
        np.testing.assert_allclose(
            mine, expected, rtol=1e-6 if mine.dtype == "f4" else 1e-12, err_msg=name
        )
        assert not any(np.shares_memory(mine, value) for value in values), name
    for value, before in zip(values, kept, strict=True):
        np.testing.assert_array_equal(value, before)


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_values_are_numpys(functions, static):
    check(functions[static], values_of(4, 3, 5))


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4, 3, 0), (4, 1, 1), (4, 0, 3)])
def test_other_sizes(functions, sizes):
    check(functions[False], values_of(*sizes))


@pytest.mark.slow
@pytest.mark.parametrize("static", [False, True])
def test_strided_inputs(functions, static):
    values = values_of(4, 3, 5)
    strided = [np.repeat(value, 2, -1)[..., ::2] for value in values]
    turned = [np.asfortranarray(value) for value in values]
    for other in (strided, turned):
        check(functions[static], other)


WRONG = {
    "elementwise": ("along axis 1", lambda x, z, k: x * z[:, :, 0]),
    "elementwise and sum": ("along axis 1", lambda x, z, k: (x + z[:, 1]).sum(1)),
    "joined": ("must match exactly", lambda x, z, k: pt.concatenate([x, z[:, :, 0]], 0)),
    "reshaped": ("cannot reshape", lambda x, z, k: z.reshape((5, -1))),
    "reshaped to sizes": ("cannot reshape", lambda x, z, k: x.reshape((5, 2))),
    "split": ("Split sizes", lambda x, z, k: pt.split(x, [1, 1], n_splits=2, axis=1)[0]),
    "assigned": ("shape", lambda x, z, k: x[1:].set(z[:, :, 0])),
    "negative size": (
        "negative dimensions",
        lambda x, z, k: pt.concatenate([x[:, 0], pt.zeros(k[0] - 1)]),
    ),
    "filled": ("could not broadcast", lambda x, z, k: pt.alloc(x[0], 2, 7)),
    "place too large": ("out of bounds", lambda x, z, k: z[k]),
    "place too small": ("out of bounds", lambda x, z, k: z[-1 - k]),
    "written place": ("out of bounds", lambda x, z, k: pt.zeros((3, 2))[k].inc(1.0)),
    "written values": ("shape", lambda x, z, k: pt.zeros((9, 3))[k].set(z[:, :, 0])),
    "index": ("out of bounds", lambda x, z, k: x[:, 3]),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_shapes_and_places_are_errors(name, monkeypatch):
    monkeypatch.setattr(dispatch, "LoopOp", Op)  # graphs without loops, which compile faster
    message, make = WRONG[name]
    x, z, k = pt.dmatrix("x"), pt.dtensor3("z"), pt.lvector("k")
    outputs = [make(x, z, k)]
    function = pytensor.function([x, z, k], outputs, mode="NUMBA", on_unused_input="ignore")
    with pytest.raises((ValueError, IndexError), match=message):
        function(np.ones((4, 3)), np.ones((4, 2, 2)), np.array([0, 4]))


def test_nan_is_the_largest_and_the_smallest():
    x = pt.tensor("x", shape=(3, 2))
    turned = x.T * 1.0
    outputs = with_loop([pt.max(x, 1), pt.min(x, 0), pt.max(turned), pt.min(turned, 1)], x[:, 0])
    function = pytensor.function([x], outputs, mode="NUMBA")
    for values in ([[1, np.nan], [2, 3], [5, 4]], [[np.nan, 1], [-2, 3], [np.inf, -np.inf]]):
        value = np.array(values)
        expected = [value.max(1), value.min(0), value.max(), value.T.min(1)]
        for mine, theirs in zip(function(value)[1:], expected, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.slow
def test_arrays_are_no_functions_of_their_own():
    """All nodes of arrays are in programs."""
    compiled = Compiled()
    with pytensor.config.change_flags(numba__cache=False):
        function = build(values_of(2, 3, 2), static=True)
        with event.install_listener("numba:compile", compiled):
            function(*values_of(2, 3, 2))
    assert not compiled.names
