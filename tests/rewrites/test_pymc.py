"""PyMC models compiled with adoption on and off; left out where PyMC is not installed."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.loop_rewrite import record_of

# PyMC changes the flags of all C code; other tests' code would be compiled once more for it.
flags = pytensor.config.gcc__cxxflags
pm = pytest.importorskip("pymc")
pytensor.config.gcc__cxxflags = flags

from benchmarks import pymc_models as models  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
LENGTH = 40
WITHOUT_LOOP = models.autoregression, models.random_walk  # in the density
DRAWN = (
    models.autoregression,
    models.random_walk,
    models.garch,
    models.smoothing,
    models.adstock,
    models.epidemic,
)


def model_of(build):
    if build in models.EXTRAS:
        pytest.importorskip("pymc_extras")
    return build(LENGTH)


@pytest.mark.parametrize("build", models.MODELS.values(), ids=lambda build: build.__name__)
def test_log_density(build):
    model = model_of(build)
    point = pm.blocking.DictToArrayBijection.map(model.initial_point(random_seed=1))
    results = []
    for on in (False, True):
        with scanlib.enabled(on):
            function = model.logp_dlogp_function()
            function.set_extra_values({})
            results.append(function(point))
        record = record_of(function._pytensor_function.maker.fgraph)
        assert bool(record.adopted) == (on and build not in WITHOUT_LOOP)
        assert all(loop.reason is None for loop in record.adopted)
    (value, gradient), (adopted_value, adopted_gradient) = results
    np.testing.assert_allclose(adopted_value, value, rtol=1e-10)
    np.testing.assert_allclose(adopted_gradient, gradient, rtol=1e-10, atol=1e-10)


def test_explain_takes_what_a_model_compiles():
    with scanlib.enabled(), models.smoothing(LENGTH) as model:
        compiled = model.compile_logp(), model.compile_dlogp(), model.logp_dlogp_function()
    for function, loops in zip(compiled, (1, 2, 2), strict=True):
        found = scanlib.explain(function).loops
        assert [loop.schedule for loop in found] == ["blocks of steps"] * loops
    with pytest.raises(TypeError, match=r"got Model; pass what its compile_logp\(\) or compile_dl"):
        scanlib.explain(model)


@pytest.mark.parametrize("build", DRAWN, ids=lambda build: build.__name__)
def test_draws(build):
    """The same numbers from the same seed."""
    drawn = []
    for on in (False, True):
        with scanlib.enabled(on), model_of(build):
            prior = pm.sample_prior_predictive(draws=3, random_seed=1)
        drawn.append({**prior["prior"].data_vars, **prior["prior_predictive"].data_vars})
    plain, adopted = drawn
    assert set(plain) == set(adopted)
    for name, values in plain.items():
        np.testing.assert_allclose(adopted[name], values, rtol=1e-10, atol=1e-12)


def test_draws_of_a_loop_of_scanlibs():
    """PyMC finds where the loop leaves its generators: each call draws anew, from its seed."""

    def dist(scan):
        def step(level, rho):
            level = pm.Normal.dist(rho * level, 1.0)
            return level, pm.pytensorf.collect_default_updates([level])

        def walk(rho, size):
            levels, _ = scan(step, outputs_info=[pt.zeros(())], non_sequences=[rho], n_steps=5)
            return levels

        return walk

    drawn = []
    for scan in (scanlib.scan, pytensor.scan):
        with pm.Model():
            rho = pm.Normal("rho", 0, 0.5)
            pm.CustomDist("level", rho, dist=dist(scan), shape=(5,))
            prior = pm.sample_prior_predictive(draws=3, random_seed=1)["prior"]
        assert np.unique(prior["level"]).size == 15
        drawn.append(prior)
    for name in ("rho", "level"):
        np.testing.assert_allclose(drawn[0][name], drawn[1][name], rtol=1e-12)


def test_derived_density():
    """PyMC derives the density of draws inside a loop; adopted, it is the one of the steps."""
    y = np.array([0.3, -0.2, 0.5, 0.1])

    def step(level, rho):
        level = pm.Normal.dist(rho * level, 0.7)
        return level, pm.pytensorf.collect_default_updates([level])

    def walk(rho, size):
        levels, _ = pytensor.scan(
            step, outputs_info=[pt.zeros(())], non_sequences=[rho], n_steps=len(y)
        )
        return levels

    with scanlib.enabled(), pm.Model() as model:
        rho = pm.Normal("rho")
        pm.CustomDist("level", rho, dist=walk, shape=(len(y),), observed=y)
        density = model.compile_logp(vars=model["level"])
        slope = model.compile_dlogp(vars=[rho])
    assert record_of(density.f.maker.fgraph).adopted[0].reason is None
    before = np.concatenate([[0.0], y[:-1]])
    error = y - 0.4 * before
    expected = -0.5 * (error**2 / 0.49 + np.log(2 * np.pi * 0.49)).sum()
    np.testing.assert_allclose(density({"rho": 0.4}), expected)
    np.testing.assert_allclose(slope({"rho": 0.4}), [error @ before / 0.49 - 0.4])


def test_draws_by_rejection():
    """Draws are repeated until all lie between the bounds; adopted, they are the same."""
    truncated = pm.Truncated.dist(pm.SkewNormal.dist(alpha=2.0), lower=0.2, upper=0.9, shape=(5,))
    drawn = []
    for on in (False, True):
        with scanlib.enabled(on):
            function = pm.pytensorf.compile([], truncated, random_seed=1)
            drawn.append([function() for _ in range(3)])
        record = record_of(function.maker.fgraph)
        assert bool(record.adopted) == on
    assert np.unique(drawn[1]).size == 15
    np.testing.assert_array_equal(*drawn)


@pytest.mark.parametrize("adopted", [False, True])
def test_check_of_a_parameter_in_a_step(adopted):
    """A scale that is not positive has no density; it is no error, as outside of loops."""
    scan = pytensor.scan if adopted else scanlib.scan
    y = np.array([0.3, -0.2, 0.5])
    with scanlib.enabled(adopted), pm.Model() as model:
        scale = pm.Normal("scale")
        total = scan(
            lambda y, total, scale: total + pm.logp(pm.Normal.dist(0, scale), y),
            sequences=pt.as_tensor(y),
            outputs_info=[pt.zeros(())],
            non_sequences=scale,
            return_updates=False,
        )
        pm.Potential("total", total[-1])
        density = model.compile_logp()
    own = -0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(density({"scale": 1.0}), 4 * own - 0.5 - 0.5 * np.sum(y**2))
    assert density({"scale": -1.0}) == -np.inf


def test_sampling_on_two_processes():
    """Loops are compiled for one thread each, and processes get what they need to run them."""
    assert pytensor.config.scanlib__threads == 1
    with scanlib.enabled(), models.smoothing(LENGTH):
        trace = pm.sample(draws=300, tune=300, chains=2, cores=2, random_seed=3, progressbar=False)
    mean = trace["posterior"].mean(("chain", "draw"))
    np.testing.assert_allclose(mean["sigma"], models.noise(LENGTH).std(), rtol=0.15)
