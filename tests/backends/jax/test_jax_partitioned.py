"""Loops that XLA cuts over the devices of a mesh: values, shardings, and what moves between them.

Checks run in a process of their own, whose CPU stands for four devices.
"""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.errors import SequenceLengthError
from tests.jax_loops import collectives, compiled, run_on_devices

jax = pytest.importorskip("jax", reason="jax is not installed")

from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

HERE = __name__
rng = np.random.default_rng(5)


def scan(*arguments, **options):
    return scanlib.scan(*arguments, return_updates=False, **options)


def mesh_of(kind, count=4):
    kinds = (getattr(jax.sharding.AxisType, kind),)
    return jax.make_mesh((count,), ("c",), axis_types=kinds)


def collectives_of(function, arguments, specs):
    """Return what moves; the values are held against one device's."""
    return check(function, arguments, specs, None)


def check(function, arguments, specs, expected, *, kind="Auto", outputs=None):
    """Hold values against one device's, and what moves against what is expected."""
    mesh = mesh_of(kind)
    placed = [
        jax.device_put(value, NamedSharding(mesh, spec))
        for value, spec in zip(arguments, specs, strict=True)
    ]
    results = jax.jit(lambda *a: tuple(function(*a)))(*placed)
    for found, wanted in zip(results, function(*arguments), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-12, atol=1e-12)
    found = collectives(lambda *a: tuple(function(*a)), *placed)
    assert expected is None or found == expected, found
    if outputs:
        for value, spec in zip(results, outputs, strict=True):
            assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), value.ndim)
    return found


CHANNELS, CHANNEL = P(None, "c"), P("c")


def affine():
    x, a = pt.dmatrix("x"), pt.dvector("a")
    h = scan(lambda x, h, a: a * h + x, x, pt.zeros(a.shape), non_sequences=a)
    outputs = [h, *pytensor.grad((h**2).sum(axis=0).mean(), [x, a])]
    return compiled([x, a], outputs).vm.jit_fn, (rng.random((64, 8)), rng.random(8))


def check_channels():
    function, data = affine()
    cut = (CHANNELS, CHANNEL)
    for kind in ("Auto", "Explicit"):
        check(function, data, cut, [], kind=kind, outputs=(CHANNELS, CHANNELS, CHANNEL))
    # Sizes that do not divide stay whole, and time is gathered: the values are right.
    check(function, (data[0][:, :6], data[1][:6]), (P(), P()), [])
    check(function, data, (P("c"), P()), [("all-gather", 64 * 8)])
    # Nonlinear steps, two taps, a sum over channels: one number of each device is added up.
    x, s, h0 = pt.dmatrix("x"), pt.dscalar("s"), pt.dmatrix("h0")
    h = scan(lambda x, h, g, s: pt.tanh(s * h) - 0.5 * g + x, x,
             {"initial": h0, "taps": [-1, -2]}, non_sequences=s)  # fmt: skip
    function = compiled([x, s, h0], [h, pytensor.grad((h**2).sum(), s)]).vm.jit_fn
    data = (rng.random((33, 8)), 0.4, rng.random((2, 8)))
    check(function, data, (CHANNELS, P(), CHANNELS), [("all-reduce", 1)], outputs=(CHANNELS, P()))
    # A sum that is taken in the loop.
    h = scan(lambda x, h: pt.tanh(h) + x, x, h0[0])
    function = compiled([x, h0], [(h**2).sum()]).vm.jit_fn
    check(function, data[::2], (CHANNELS, CHANNELS), [("all-reduce", 1)])
    # Numbers of 32 bits, walked backwards, for a known number of steps.
    y, n = pt.fmatrix("y"), pt.iscalar("n")
    h = scan(
        lambda y, h: pt.maximum(h, y), y[:n], pt.zeros(8, "float32"), go_backwards=True, n_steps=n
    )
    function = compiled([y, n], [h]).vm.jit_fn
    data = (rng.random((7, 8)).astype("float32"),)
    check(lambda y: function(y, 5), data, (CHANNELS,), [])


def check_matrices():
    x, M, p = pt.dtensor3("x"), pt.dmatrix("M"), pt.dmatrix("p")
    h = scan(lambda x, h, M: x + h @ M, x, pt.zeros(x.shape[1:]), non_sequences=M)
    function = compiled([x, M], [h, pytensor.grad((h**2).sum(), x)]).vm.jit_fn
    data = (rng.random((20, 8, 3)), rng.random((3, 3)) / 3)
    check(function, data, (CHANNELS, P()), [])
    # The forward pass of a hidden Markov model, for a batch of series.
    one = lambda x, M: function(x, M)  # noqa: E731
    many = jax.vmap(lambda x, M: tuple(one(x, M)), in_axes=(0, None))
    check(many, (rng.random((8, 20, 2, 3)), data[1]), (CHANNEL, P()), [])
    log = scan(
        lambda p, h, M: pt.logsumexp(h[:, None] + M, axis=0) + p, p, pt.zeros(3), non_sequences=M
    )
    density = compiled([p, M], [pt.logsumexp(log[-1])]).vm.jit_fn
    many = jax.vmap(lambda p, M: tuple(density(p, M)), in_axes=(0, None))
    check(many, (rng.random((8, 20, 3)), data[1]), (CHANNEL, P()), [], outputs=(CHANNEL,))


def check_steps():
    """Any step: axes that it does not mix, such as the batch of a network."""
    x, W, h0 = pt.dtensor3("x"), pt.dmatrix("W"), pt.dmatrix("h0")
    h = scan(lambda x, h, W: pt.tanh(h @ W + x), x, h0, non_sequences=W)
    function = compiled([x, W, h0], [h, pytensor.grad((h**2).sum(), x)]).vm.jit_fn
    data = (rng.random((20, 8, 3)), rng.random((3, 3)), rng.random((8, 3)))
    check(function, data, (CHANNELS, P(), CHANNEL), [], outputs=(CHANNELS, CHANNELS))
    weights = pt.constant(rng.random(8))
    for step, moved in (
        (lambda x, h, W: pt.exp(h - h.max(axis=-1, keepdims=True)) @ W + x, 0),
        (lambda x, h, W: pt.tanh(h @ W + x) * weights[:, None], 0),  # one for each item
        (lambda x, h, W: pt.sort(h @ W, axis=1) + x, 0),
        (lambda x, h, W: pt.sort(h @ W, axis=0) + x, 1),
        (lambda x, h, W: pt.tanh(h @ W + x)[::-1], 1),
        (lambda x, h, W: pt.tanh(h @ W + x) - h.mean(axis=0), 1),
    ):
        h = scan(step, x, h0, non_sequences=W)
        function = compiled([x, W, h0], [h]).vm.jit_fn
        found = collectives_of(function, data, (CHANNELS, P(), CHANNEL))
        assert bool(found) == bool(moved), found
    # A matrix that meets itself: its axes mix, whichever is cut.
    s, square = pt.dvector("s"), rng.random((8, 8))
    for step in (lambda s, h: s * (h @ h) / 9, lambda s, h: s * h.T + h):
        function = compiled([s, h0], [scan(step, s, h0)]).vm.jit_fn
        for spec in (P("c", None), P(None, "c")):
            check(function, (rng.random(5), square), (P(), spec), None)
    # Parts of rows, put together again.
    step = lambda x, h: pt.concatenate([pt.special.softmax(h[:, 1:], axis=1), h[:, :1]], axis=1) + x  # noqa: E731
    function = compiled([x, h0], [scan(step, x, h0)]).vm.jit_fn
    check(function, data[::2], (CHANNELS, CHANNEL), [])


def check_batches():
    function, (x, a) = affine()
    many = jax.vmap(lambda x, a: tuple(function(x, a)), in_axes=(0, None))
    more = jax.vmap(many, in_axes=(2, None))
    for kind in ("Auto", "Explicit"):
        check(many, (rng.random((8, 16, 8)), a), (CHANNEL, P()), [], kind=kind)
        check(many, (rng.random((3, 16, 8)), a), (P(None, None, "c"), CHANNEL), [], kind=kind)
        check(more, (rng.random((4, 16, 3, 8)), a), (CHANNEL, P()), [], kind=kind)
    # JAX's own derivative, of a loop that it does not see into.
    square = jax.grad(lambda x, a: (function(x, a)[0] ** 2).sum())
    check(lambda x, a: [square(x, a)], (x, a), (CHANNELS, CHANNEL), [])


@pytest.mark.parametrize(
    "name", ["check_channels", "check_matrices", "check_steps", "check_batches"]
)
@pytest.mark.slow
def test_cut_over_devices(name):
    run_on_devices(f"{HERE}:{name}")


def test_time_cut_by_the_user():
    """In `jax.shard_map`, a loop that gets a part of the rows is no loop of its own."""
    mesh, x = mesh_of("Auto", 1), pt.matrix("x", shape=(8, 2))
    kernel = scan(lambda x, h: 0.5 * h + x, x, pt.zeros(2), name="filter")
    function = compiled([x], [kernel]).vm.jit_fn
    A = pt.dmatrix("A")
    matrices = scan(lambda x, h, A: A @ h + x, x, pt.zeros(2), non_sequences=A)
    linear = compiled([x, A], [matrices]).vm.jit_fn

    def cut(function):
        return jax.shard_map(function, mesh=mesh, in_specs=P("c"), out_specs=P("c"))

    data = np.ones((8, 2), pytensor.config.floatX)
    np.testing.assert_allclose(cut(lambda x: function(x)[0])(data), function(data)[0])
    with pytest.raises(SequenceLengthError, match="scan `filter`: sequence `x` has 8 rows, but 4"):
        cut(lambda x: function(x)[0])(data[:4])
    with pytest.raises(SequenceLengthError, match=r"has 8 rows, but 4 in .* over 'c'"):
        cut(lambda x: linear(x, np.eye(2))[0])(data[:4])
