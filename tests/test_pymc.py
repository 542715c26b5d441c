"""PyMC models compiled with adoption on and off; left out where PyMC is not installed."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.rewrites.adopt import adoption_record

pm = pytest.importorskip("pymc")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
DATA = np.random.default_rng(0).normal(size=200)


def garch():
    omega = pm.HalfNormal("omega", 1)
    alpha, beta = pm.Beta("alpha", 1, 5), pm.Beta("beta", 5, 1)
    return pm.GARCH11("y", omega=omega, alpha_1=alpha, beta_1=beta, initial_vol=1.0, observed=DATA)


def smoothing():
    alpha, start, sigma = (
        pm.Beta("alpha", 2, 2),
        pm.Normal("start", 0, 1),
        pm.HalfNormal("sigma", 1),
    )
    level = pytensor.scan(
        lambda x, level, alpha: alpha * x + (1 - alpha) * level,
        sequences=pt.as_tensor(DATA[:-1]),
        outputs_info=[start],
        non_sequences=[alpha],
        return_updates=False,
    )
    return pm.Normal("y", pt.concatenate([start[None], level]), sigma, observed=DATA)


def autoregression():
    rho, sigma = pm.Normal("rho", 0, 0.5, shape=2), pm.HalfNormal("sigma", 1)
    start = pm.Normal.dist(0, 1)
    return pm.AR("y", rho=rho, sigma=sigma, init_dist=start, steps=20)


@pytest.mark.parametrize("build", [garch, smoothing, autoregression])
def test_log_density_and_draws(build):
    with pm.Model() as model:
        y = build()
    point = pm.blocking.DictToArrayBijection.map(model.initial_point(random_seed=1))
    results, draws = [], []
    for on in (False, True):
        with scanlib.enabled(on):
            f = model.logp_dlogp_function()
            f.set_extra_values({})
            results.append(f(point))
            with model:
                draws.append(pm.draw(y, draws=2, random_seed=1))
        record = adoption_record(f._pytensor_function.maker.fgraph)
        has_loop = build is not autoregression  # PyMC's density of AR is a convolution
        assert (record is not None) == (on and has_loop)
        assert record is None or all(loop.reason is None for loop in record.loops)
    (value, gradient), (adopted_value, adopted_gradient) = results
    np.testing.assert_allclose(adopted_value, value, rtol=1e-10)
    np.testing.assert_allclose(adopted_gradient, gradient, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(draws[1], draws[0], rtol=1e-10, atol=1e-12)
