"""Functions over a mesh of devices whose axis carries time: values, gradients, what is exchanged.

Checks run in a process of their own, whose CPU stands for several devices.
"""

import socket
import subprocess
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests import sharded_loops
from tests.jax_loops import collectives, compiled, run_on_devices, run_python
from tests.sharded_loops import CASES, affine, around, garch, hidden_markov, matrix, scan

jax = pytest.importorskip("jax", reason="jax is not installed")

from jax.sharding import AxisType, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

rng = np.random.default_rng(23)


def time_mesh(kind="Explicit", count=None):
    count = jax.device_count() if count is None else count
    return jax.make_mesh((count,), ("time",), axis_types=(getattr(AxisType, kind),))


def specs_of(text):
    return [P("time") if letter == "t" else P() for letter in text]


def assert_same(found, wanted, tolerance=1e-11):
    """Compare results; sums of many rows are added in another order."""
    for one, other in zip(found, wanted, strict=True):
        scale = max(1.0, np.max(np.abs(other), initial=0))
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=tolerance * scale)


def check_cases(cases, steps):
    for case in cases:
        for length in steps:
            inputs, outputs, data, specs = case(length)
            plain = compiled(inputs, outputs)
            cut = scanlib.shard(plain, specs_of(specs), mesh=time_mesh())
            assert_same(jax.jit(cut)(*data), plain(*data))


def check_1():
    check_cases([affine, matrix, garch, hidden_markov], [12])


def check_2():
    check_cases([affine, sharded_loops.ar2, matrix, around], [12, 7])


def check_3():
    check_cases(CASES, [11])


def check_4():
    check_cases(CASES, [32])


def check_8():
    check_cases(CASES, [9])  # three devices have nothing to do


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_every_class_on_any_number_of_devices(devices):
    run_on_devices(f"{__name__}:check_{devices}", devices)


def check_exchange():
    """No array with the time axis moves; an affine loop gathers two numbers for each channel."""
    for kind in ("Explicit", "Auto"):
        inputs, outputs, data, specs = affine(64)
        mesh, cuts = time_mesh(kind), specs_of(specs)
        pairs = zip(data, cuts, strict=True)
        placed = [jax.device_put(value, NamedSharding(mesh, spec)) for value, spec in pairs]
        forward = scanlib.shard((inputs, outputs[:1]), cuts, mesh=mesh)
        assert collectives(forward, *placed) == [("all-gather", 4 * 3 * 2)]
        assert jax.jit(forward)(*placed)[0].sharding.spec[0] == "time"
        both = scanlib.shard((inputs, outputs), cuts, mesh=mesh)
        found = collectives(both, *placed)
        # The gradient reads the state one step before; that of a parameter is a sum over time.
        assert sorted(found) == [
            ("all-gather", 24), ("all-gather", 24), ("all-reduce", 3), ("collective-permute", 3)
        ]  # fmt: skip
        assert both.describe() == (
            "scan: 4 pieces over 'time', summaries gathered, 1 rounds, 192 bytes to each device\n"
            "scan `gradient`: 4 pieces over 'time', summaries gathered, 1 rounds, "
            "192 bytes to each device"
        )
    for case in (matrix, sharded_loops.log_affine, around):
        inputs, outputs, data, specs = case(256)
        found = collectives(
            scanlib.shard((inputs, outputs), specs_of(specs), mesh=time_mesh("Auto")), *data
        )
        assert found
        # Rows behind each device's 64 would be 64 numbers at the least; the outputs of other
        # lengths, that every device has whole, are the test's own.
        largest = {count for _, count in found if count >= 64}
        assert not largest or case is around
    inputs, outputs, data, specs = matrix(64)
    cut = scanlib.shard((inputs, outputs[:1]), specs_of(specs), mesh=time_mesh("Auto"))
    assert collectives(cut, *data) == [("collective-permute", 4 * 4 + 4)] * 3  # log2(4) and one


def check_meshes():
    """Time and channels; JAX's derivatives; steps in turn; a single result; vectors of series."""
    mesh = jax.make_mesh((2, 2), ("time", "c"), axis_types=(AxisType.Auto,) * 2)
    x, a = pt.dmatrix("x"), pt.dvector("a")
    data = rng.normal(size=(64, 6)), rng.uniform(-1, 1, 6)
    h = scan(lambda x, h, a: a * h + x, x, pt.zeros(a.shape), non_sequences=a)
    plain = compiled([x, a], [h, *pytensor.grad((h**2).sum(), [x, a])])
    cut = scanlib.shard(plain, [P("time", "c"), P("c")], mesh=mesh)
    results = jax.jit(cut)(*data)
    assert_same(results, plain(*data))
    assert results[0].sharding.spec == P("time", "c")
    moved = collectives(cut, *data)
    assert max(count for _, count in moved) <= 2 * 6 * 2

    alone = scanlib.shard(compiled([x, a], h), [P("time"), P()], mesh=time_mesh())
    assert_same([alone(*data)], [plain(*data)[0]])
    square = jax.grad(lambda x, a: (alone(x, a) ** 2).sum(), (0, 1))
    assert_same(jax.jit(square)(*data), plain(*data)[1:])

    with jax.set_mesh(time_mesh("Auto")):
        assert_same(
            [scanlib.shard(compiled([x, a], h), [P("time"), P()])(*data)], [plain(*data)[0]]
        )

    h = scan(lambda x, h, a: pt.tanh(a * h) + x, x, pt.zeros(a.shape), non_sequences=a)
    plain = compiled([x, a], [h, *pytensor.grad((h**2).sum(), [x, a])])
    cut = scanlib.shard(plain, [P("time"), P()], mesh=time_mesh(), in_turn=True)
    for steps in (64, 50):
        part = data[0][:steps], data[1]
        assert_same(jax.jit(cut)(*part), plain(*part))
    assert "devices in turn, 3 rounds" in cut.describe()
    explained = " ".join(str(scanlib.explain(cut)).split())
    assert all(f"over devices: {line}" in explained for line in cut.describe().splitlines())

    scanlib.enable()  # a loop of PyTensor's, whose gradient turns sequences around
    h = pytensor.scan(lambda x, h, a: a * h + x, [x], [pt.zeros(6)], [a], return_updates=False)
    cost = ((x[1:] - a * h[:-1]) ** 2).sum()
    plain = compiled([x, a], [cost, *pytensor.grad(cost, [x, a])])
    cut = scanlib.shard(plain, [P("time"), P()], mesh=time_mesh())
    assert_same(jax.jit(cut)(*data), plain(*data))


def check_pymc():
    """The density of a GARCH process, and its gradient, time cut over four devices."""
    import pymc as pm

    scanlib.enable()
    with pm.Model() as model:
        omega, alpha, beta = pm.HalfNormal("omega"), pm.Beta("alpha", 1, 1), pm.Beta("beta", 1, 1)
        pm.GARCH11("y", omega, alpha, beta * (1 - alpha), initial_vol=1.0, steps=63)
    values, density = model.value_vars, model.logp()
    plain = compiled(values, [density, *pytensor.grad(density, values)])
    cut = scanlib.shard(plain, [P(), P(), P(), P("time")], mesh=time_mesh())
    data = np.array(0.3), np.array(-1.0), np.array(0.2), rng.normal(size=64)
    assert_same(jax.jit(cut)(*data), plain(*data))
    assert "summaries gathered" in cut.describe()


def check_series():
    """A panel of series, whose log density PyMC's samplers call: series cut over devices."""
    import pymc as pm
    from pymc.sampling.jax import get_jaxified_logp

    with pm.Model() as model:
        rho = pm.Uniform("rho", -1, 1, shape=8)
        data = rng.normal(size=(32, 8))
        h = scan(lambda y, h, r: r * h + y, data[:-1], pt.zeros(8), non_sequences=rho)
        pm.Normal("y", h, 1.0, observed=data[1:])
    density = get_jaxified_logp(model)
    value_and_gradient = jax.value_and_grad(lambda rho: density([rho]))
    rho = rng.normal(size=8)
    placed = jax.device_put(rho, NamedSharding(time_mesh("Auto"), P("time")))
    found, wanted = jax.jit(value_and_gradient)(placed), value_and_gradient(rho)
    assert_same(found, wanted)
    assert found[1].sharding.spec == P("time")
    moved = collectives(value_and_gradient, placed)
    assert {kind for kind, _ in moved} <= {"all-reduce"}, moved
    assert max(count for _, count in moved) == 1


@pytest.mark.slow
@pytest.mark.parametrize("what", ["exchange", "meshes", "pymc", "series"])
def test_on_four_devices(what):
    if what in ("pymc", "series"):
        pytest.importorskip("pymc")
    run_on_devices(f"{__name__}:check_{what}")


def check_tiles(path, cases=(affine, sharded_loops.log_affine, sharded_loops.ar2, matrix)):
    """Results of tiles are the same bits as those that another number of devices has left."""
    for case in cases:
        inputs, outputs, data, specs = case(44)
        plain = compiled(inputs, outputs)
        cut = scanlib.shard(plain, specs_of(specs), mesh=time_mesh(), tile=4)
        found = [np.asarray(value) for value in jax.jit(cut)(*data)]
        assert_same(found, plain(*data), 1e-10)
        name = f"{path}/{case.__name__}.npz"
        if jax.device_count() == 1:
            np.savez(name, *found)
        else:
            with np.load(name) as known:
                for one, other in zip(found, known.values(), strict=True):
                    np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_devices(tmp_path):
    for devices in (1, 2, 3, 4, 8):
        run_python(
            f"import jax; jax.config.update('jax_num_cpu_devices', {devices})\n"
            "jax.config.update('jax_enable_x64', True)\n"
            f"from {__name__} import check_tiles; check_tiles({str(tmp_path)!r})"
        )


def process(place, port):
    """One of two processes with two devices each."""
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, place)
    mesh = time_mesh()
    assert mesh.size == 4
    for case in (affine, matrix):
        inputs, outputs, data, specs = case(32)
        plain, cuts = compiled(inputs, outputs), specs_of(specs)
        arrays = [
            jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), value.__getitem__)
            for value, spec in zip(data, cuts, strict=True)
        ]
        results = jax.jit(scanlib.shard(plain, cuts, mesh=mesh))(*arrays)
        for found, wanted in zip(results, plain(*data), strict=True):
            for piece in found.addressable_shards:
                assert_same([piece.data], [wanted[piece.index]])


@pytest.mark.slow
def test_two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import process; process({place}, {port})"]
        )
        for place in range(2)
    ]
    try:
        assert [one.wait(timeout=300) for one in processes] == [0, 0]
    finally:
        for one in processes:
            one.kill()


class TestErrors:
    """Wrong use is found when the function is traced, on one device as well."""

    x = pt.dmatrix("x")
    data = np.ones((8, 3))

    def shard(self, outputs, specs=None, **options):
        options, specs = {"mesh": time_mesh(count=1)} | options, specs or [P("time")]
        return scanlib.shard(([self.x], outputs), specs, **options)

    @pytest.mark.parametrize(
        "step, name, text",
        [
            (lambda x, h: pt.tanh(h) + x, "net", "scan `net`: state number 0 .* in order .*tanh"),
            (lambda x, h: h / (1 + h) + x, "ratio", r"'moebius' are not exchanged|true_div|Möbius"),
            (
                lambda x, h: (x + h, scanlib.until(h.sum() > 3)),
                "stops",
                "scan `stops`: its `until`",
            ),
        ],
    )
    def test_steps_in_order(self, step, name, text):
        h = scan(step, self.x, pt.zeros(3), name=name)
        with pytest.raises(ValueError, match=text) as error:
            self.shard([h[-1]])(self.data)
        assert "over the axis 'time'" in str(error.value)

    def test_what_does_not_work_row_by_row(self):
        with pytest.raises(ValueError, match=r"SortOp.* of `x` .* over the axis 'time'"):
            self.shard([pt.sort(self.x, axis=0)])(self.data)
        step = lambda h, x: h + pt.tanh(h * x).sum(axis=0)  # noqa: E731
        whole = scan(step, None, pt.zeros(3), self.x, n_steps=2)
        with pytest.raises(ValueError, match="8 rows that are cut over the axis 'time', and"):
            self.shard([whole])(self.data)

    def test_meshes_and_specs(self):
        with pytest.raises(
            ValueError, match="names the axis 't', but the mesh has the axes 'time'"
        ):
            self.shard([self.x + 1], [P("t")])(self.data)
        with pytest.raises(ValueError, match="time names the axis 't'"):
            self.shard([self.x + 1], [P()], time="t")(self.data)
        with pytest.raises(ValueError, match="1 inputs, got 2 in_specs"):
            self.shard([self.x + 1], [P(), P()])
        with pytest.raises(ValueError, match="no entry of in_specs has the axis 'time'"):
            self.shard([self.x + 1], [P()])(self.data)
        with pytest.raises(ValueError, match="pass mesh="):
            self.shard([self.x + 1], mesh=None)(self.data)
        with pytest.raises(TypeError, match="expected 1 arguments, got 2"):
            self.shard([self.x + 1])(self.data, self.data)
        n = pytensor.shared(0)
        updated = pytensor.function([self.x], self.x + n, updates=[(n, n + 1)], mode="JAX")
        with pytest.raises(TypeError, match="updates"):
            scanlib.shard(updated, [P("time")], mesh=time_mesh(count=1))
        mesh = jax.make_mesh((1, 1), ("time", "c"), axis_types=(AxisType.Explicit,) * 2)
        with pytest.raises(ValueError, match="'c' of the mesh is Explicit"):
            self.shard([self.x + 1], mesh=mesh)(self.data)
