"""Densities that PyMC derives from draws inside of loops; left out where PyMC is not installed.

What is expected is summed up by a plain loop over the rows, with SciPy's densities.
"""

import subprocess
import sys

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from scipy import stats

import scanlib
from scanlib import rewrites
from tests.modes import MODES

# PyMC changes the flags of all C code; other tests' code would be compiled once more for it.
flags = pytensor.config.gcc__cxxflags
pm = pytest.importorskip("pymc")
pytensor.config.gcc__cxxflags = flags

from pymc.logprob import conditional_logp  # noqa: E402
from pymc.pytensorf import collect_default_updates as updates  # noqa: E402

from benchmarks import pymc_models as models  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("python_kernels"),
]
T = 5
rng = np.random.default_rng(0)
Y = np.random.default_rng(0).normal(size=T)
ROWS = np.random.default_rng(1).normal(size=(T, 3))
COUNTS = np.array([1, 0, 3, 2, 2])
MOVES = np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4]])
normal = stats.norm.logpdf


def test_a_release_of_pymc_that_is_not_known(monkeypatch, caplog):
    """Loops are made as before; one warning says what is missing."""
    monkeypatch.delattr(rewrites, "densities", raising=False)
    monkeypatch.setitem(sys.modules, "scanlib.rewrites.densities", None)
    assert rewrites.load_densities()
    assert "derives no density of draws in loops" in caplog.text


def value_of(variable, inputs=()):
    return pytensor.function([], variable, mode=MODES["py"])()


def before(y, *initial):
    return np.concatenate([initial, y])[: len(y)]


def drawn(draw, **arguments):
    """Return the rows of a loop each of which is drawn, given those before and what it reads."""

    def step(*given):
        row = draw(*given)
        return row, updates([row])

    rows, _ = scanlib.scan(step, **arguments)
    return rows


def two_taps():
    start = {"initial": pt.constant([0.3, -0.2]), "taps": [-2, -1]}
    rows = drawn(
        lambda a, b: 0.5 * b - 0.3 * a + pm.Normal.dist(0, 0.7), outputs_info=[start], n_steps=T
    )
    last, earlier = before(Y, -0.2), before(Y, 0.3, -0.2)
    return rows, Y, normal(Y, 0.5 * last - 0.3 * earlier, 0.7)


def variance_that_is_no_draw():
    def step(y, variance):
        variance = 0.1 + 0.2 * y**2 + 0.5 * variance
        y = pm.Normal.dist(0, pt.sqrt(variance))
        return (y, variance), updates([y])

    (rows, _), _ = scanlib.scan(step, outputs_info=[pt.zeros(()), pt.ones(())], n_steps=T)
    expected, variance = [], 1.0
    for last, y in zip(before(Y, 0.0), Y, strict=True):
        variance = 0.1 + 0.2 * last**2 + 0.5 * variance
        expected.append(normal(y, 0, np.sqrt(variance)))
    return rows, Y, expected


def chain():
    states = np.array([1, 1, 2, 0, 1])
    rows = drawn(
        lambda state, moves: pm.Categorical.dist(p=moves[state]),
        outputs_info=[pt.constant(0, dtype="int64")],
        non_sequences=[pt.constant(MOVES)],
        n_steps=T,
    )
    return rows, states, np.log(MOVES[before(states, 0).astype(int), states])


def no_state():
    x = np.linspace(-1.0, 1.0, T)
    rows = drawn(lambda x: pm.Normal.dist(x, 2.0), sequences=[pt.constant(x)])
    return rows, Y, normal(Y, x, 2.0)


def longer_sequence():
    """The number of steps cuts a sequence."""
    x = np.linspace(-1.0, 1.0, T + 3)
    rows = drawn(
        lambda x, y: pm.Normal.dist(x + 0.5 * y, 2.0),
        sequences=[pt.constant(x)],
        outputs_info=[pt.zeros(())],
        n_steps=T,
    )
    return rows, Y, normal(Y, x[:T] + 0.5 * before(Y, 0.0), 2.0)


def flipped_sequence():
    x = np.linspace(-1.0, 1.0, T)
    rows = drawn(
        lambda x, y: pm.Normal.dist(x + 0.5 * y, 2.0),
        sequences=[pt.constant(x)],
        outputs_info=[pt.zeros(())],
        go_backwards=True,
    )
    return rows, Y, normal(Y, x[::-1] + 0.5 * before(Y, 0.0), 2.0)


def from_the_last_row():
    """A loop of `loop`, which carries the generator."""

    def step(carry, _):
        y, generator = carry
        generator, y = pm.Normal.dist(0.5 * y, 1.0, rng=generator, return_next_rng=True)
        return (y, generator), y

    start = pt.zeros(()), pt.random.shared_rng(seed=1)
    _, rows = scanlib.loop(step, start, length=T, reverse=True)
    return rows, Y, normal(Y, 0.5 * np.append(Y[1:], 0.0), 1.0)


def vectors():
    rows = drawn(lambda y: pm.Normal.dist(0.5 * y, 1.0), outputs_info=[pt.zeros(3)], n_steps=T)
    last = np.vstack([np.zeros(3), ROWS[:-1]])
    return rows, ROWS, normal(ROWS, 0.5 * last, 1.0)


def rows_of_one_density():
    covariance = np.eye(3) + 0.3
    rows = drawn(
        lambda y: pm.MvNormal.dist(0.5 * y, covariance), outputs_info=[pt.zeros(3)], n_steps=T
    )
    last = np.vstack([np.zeros(3), ROWS[:-1]])
    density = stats.multivariate_normal(np.zeros(3), covariance).logpdf
    return rows, ROWS, [density(y - 0.5 * x) for x, y in zip(last, ROWS, strict=True)]


def loop_in_a_loop():
    def outer(last):
        def step(y):
            y = pm.Normal.dist(0.5 * y, 1.0)
            return y, updates([y])

        return scanlib.scan(step, outputs_info=[last[-1]], n_steps=3)

    rows, _ = scanlib.scan(outer, outputs_info=[pt.zeros(3)], n_steps=T)
    flat = ROWS.ravel()
    return rows, ROWS, normal(flat, 0.5 * before(flat, 0.0), 1.0).reshape(ROWS.shape)


def first_row_drawn_before():
    first = pm.Normal.dist(0, 3)
    rows = drawn(lambda y: pm.Normal.dist(0.5 * y, 1.0), outputs_info=[first], n_steps=T - 1)
    scales = np.array([3.0, *np.ones(T - 1)])
    return pt.concatenate([first[None], rows]), Y, normal(Y, 0.5 * before(Y, 0.0), scales)


def function_of_all_rows():
    rows = drawn(lambda y: pm.Normal.dist(0.5 * y, 1.0), outputs_info=[pt.zeros(())], n_steps=T)
    return pt.exp(rows), np.exp(Y), normal(Y, 0.5 * before(Y, 0.0), 1.0) - Y


def function_of_a_row():
    rows = drawn(lambda y: pt.exp(pm.Normal.dist(y, 1.0)), outputs_info=[pt.ones(())], n_steps=T)
    return rows, np.exp(Y), normal(Y, before(np.exp(Y), 1.0), 1.0) - Y


def mixture_with_a_point():
    """A part of the distribution has no parameter that a step gives it."""
    rows = drawn(
        lambda y: pm.ZeroInflatedPoisson.dist(0.5, 1 + 0.5 * y),
        outputs_info=[pt.constant(0, dtype="int64")],
        n_steps=T,
    )
    mass = 0.5 * stats.poisson.pmf(COUNTS, 1 + 0.5 * before(COUNTS, 0)) + 0.5 * (COUNTS == 0)
    return rows, COUNTS, np.log(mass)


def draws_of_integers_in_a_state_of_floats():
    rows = drawn(lambda y: pm.Poisson.dist(1 + 0.5 * y), outputs_info=[pt.zeros(())], n_steps=T)
    return rows, COUNTS, stats.poisson.logpmf(COUNTS, 1 + 0.5 * before(COUNTS, 0))


def no_steps():
    rows = drawn(lambda y: pm.Normal.dist(0.5 * y, 1.0), outputs_info=[pt.zeros(())], n_steps=0)
    return rows, np.zeros(0), np.zeros(0)


CASES = [
    two_taps,
    variance_that_is_no_draw,
    chain,
    no_state,
    longer_sequence,
    flipped_sequence,
    from_the_last_row,
    vectors,
    rows_of_one_density,
    loop_in_a_loop,
    first_row_drawn_before,
    function_of_all_rows,
    function_of_a_row,
    mixture_with_a_point,
    draws_of_integers_in_a_state_of_floats,
    no_steps,
]


@pytest.mark.all_forms
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_density_of_each_row(case):
    rows, value, expected = case()
    density = value_of(pm.logp(rows, pt.constant(value)))
    assert density.shape == np.shape(expected)
    np.testing.assert_allclose(density, expected, rtol=1e-6)


def test_two_draws_of_a_step():
    """Both have values; the density of the second depends on that of the first."""

    def step(level):
        level = pm.Normal.dist(0.5 * level, 1.0)
        y = pm.Normal.dist(level, 0.3)
        return (level, y), updates([level, y])

    (levels, ys), _ = scanlib.scan(step, outputs_info=[pt.zeros(()), None], n_steps=T)
    level_values, y_values = pt.vector("levels"), pt.vector("y")
    terms = conditional_logp({levels: level_values, ys: y_values})
    both = [terms[level_values], terms[y_values]]
    function = pytensor.function([level_values, y_values], both, mode=MODES["py"])
    of_levels, of_ys = function(Y, ROWS[:, 0])
    np.testing.assert_allclose(of_levels, normal(Y, 0.5 * before(Y, 0.0), 1.0))
    np.testing.assert_allclose(of_ys, normal(ROWS[:, 0], Y, 0.3))


def test_what_cannot_be_derived():
    def step(level):
        level = pm.Normal.dist(level, 1.0)
        y = pm.Normal.dist(level, 1.0)
        return (level, y), updates([level, y])

    (_, ys), _ = scanlib.scan(step, outputs_info=[pt.zeros(()), None], n_steps=T, name="seen")
    with pytest.raises(NotImplementedError, match=r"scan `seen`: .* depends on another draw"):
        pm.logp(ys, Y)

    def product(y):
        return pm.Normal.dist(y, 1.0) * pm.Normal.dist()

    rows = drawn(product, outputs_info=[pt.zeros(())], n_steps=T, name="products")
    with pytest.raises(NotImplementedError, match=r"scan `products`: .* of state 0 at one step"):
        pm.logp(rows, Y)

    def ends(y):
        y = pm.Normal.dist(y, 1.0)
        return y, updates([y]), scanlib.until(y > 3)

    rows, _ = scanlib.scan(ends, outputs_info=[pt.zeros(())], n_steps=T)
    with pytest.raises(NotImplementedError, match="ends by a condition"):
        pm.logp(rows, Y)


def test_rows_that_are_left_out_have_no_density():
    """The rest depends on them."""
    rows = drawn(lambda y: pm.Normal.dist(y, 1.0), outputs_info=[pt.zeros(())], n_steps=T)
    for some in (rows[1:], rows[:-1], rows[::2]):
        with pytest.raises(NotImplementedError):
            pm.logp(some, Y[: T - 1])
    with pytest.raises(TypeError, match="a value of state 0 must have 1 dimensions"):
        pm.logp(rows, 1.0)


def walk(scale, size):
    return drawn(
        lambda level, scale: pm.Normal.dist(0.9 * level, scale),
        outputs_info=[pt.ones(())],
        non_sequences=[scale],
        n_steps=T,
    )


def density_at(model, **values):
    with pytensor.config.change_flags(mode=MODES["py"]):
        return model.compile_logp()(values)


def test_missing_values():
    seen = np.where([0, 0, 1, 0, 1], np.nan, Y)
    with pm.Model() as model:
        pm.CustomDist("y", 0.5, dist=walk, observed=seen)
    whole = np.where(np.isnan(seen), 0.25, seen)
    expected = normal(whole, 0.9 * before(whole, 1.0), 0.5).sum()
    np.testing.assert_allclose(density_at(model, y_unobserved=np.full(2, 0.25)), expected)


def test_start_of_sampling_and_changed_models():
    """A variable starts at the support points of the draws; it may be observed, or set."""
    with pm.Model() as model:
        scale = pm.HalfNormal("scale", 1)
        pm.CustomDist("level", scale, dist=walk, shape=(T,))
    with pytensor.config.change_flags(mode=MODES["py"]):
        start = model.initial_point(random_seed=1)
    np.testing.assert_allclose(start["level"], 0.9 ** np.arange(1, T + 1))
    of_rows = normal(Y, 0.9 * before(Y, 1.0), 1.0).sum()
    of_scale = stats.halfnorm.logpdf(1.0)
    observed = pm.observe(model, {"level": Y})
    np.testing.assert_allclose(density_at(observed, scale_log__=0.0), of_rows + of_scale)
    np.testing.assert_allclose(density_at(pm.do(model, {"scale": 1.0}), level=Y), of_rows)


@pytest.mark.slow
@pytest.mark.parametrize("build", models.WITH_DRAWS.values(), ids=lambda build: build.__name__)
def test_density_and_gradient_of_models(build):
    """They are those of PyTensor's loop, run by Python."""
    results = []
    for scan, mode in ((pytensor.scan, "py"), (scanlib.scan, "numba")):
        model = build(20, scan)
        with pytensor.config.change_flags(mode=MODES[mode]):
            function = model.logp_dlogp_function()
            function.set_extra_values({})
            point = pm.blocking.DictToArrayBijection.map(model.initial_point(random_seed=1))
        shift = 0.1 * np.cos(np.arange(point.data.size))
        results.append(function(point._replace(data=point.data + shift)))
    (value, slope), (own_value, own_slope) = results
    assert np.isfinite(own_slope).all()
    assert np.any(own_slope)
    np.testing.assert_allclose(own_value, value, rtol=1e-10)
    np.testing.assert_allclose(own_slope, slope, rtol=1e-8, atol=1e-10)


@pytest.mark.slow
def test_sampling():
    """Posterior and predictive draws of an AR(1)."""
    y = np.zeros(200)
    for t, shock in enumerate(np.random.default_rng(5).normal(size=200)):
        y[t] = 0.6 * y[t - 1] + shock

    def dist(rho, size):
        return drawn(
            lambda y, rho: pm.Normal.dist(rho * y, 1.0),
            outputs_info=[pt.zeros(())],
            non_sequences=[rho],
            n_steps=200,
        )

    with pytensor.config.change_flags(scanlib__perform="auto"), pm.Model():
        rho = pm.Normal("rho", 0, 0.5)
        pm.CustomDist("y", rho, dist=dist, observed=y)
        options = {"random_seed": 1, "progressbar": False}
        trace = pm.sample(draws=300, tune=300, chains=2, cores=1, **options)
        seen = pm.sample_posterior_predictive(trace, **options)["posterior_predictive"]["y"]
    fitted = float(trace["posterior"]["rho"].mean())
    np.testing.assert_allclose(fitted, y[1:] @ y[:-1] / (y[:-1] @ y[:-1] + 4), atol=0.03)
    assert np.unique(seen).size == seen.size == 2 * 300 * 200
    last, rows = np.ravel(seen[..., :-1]), np.ravel(seen[..., 1:])
    np.testing.assert_allclose(last @ rows / (last @ last), fitted, atol=0.02)


@pytest.mark.slow
def test_pymc_is_imported_by_those_who_use_it():
    """Not by scanlib; and it may be imported after the first loops were made."""
    script = """
import sys
import numpy as np, pytensor.tensor as pt, scanlib

def walk():
    step = lambda x, rng: (lambda rng, d: [x + d, rng])(*rng.normal())
    start = [pt.zeros(()), pt.random.rng("rng")]
    return scanlib.scan(step, outputs_info=start, n_steps=3, return_updates=False)[0]

walk()
assert not {"pymc", "scanlib.rewrites.densities"} & set(sys.modules)
import pymc as pm
print(float(pm.logp(walk(), np.zeros(3)).sum().eval(mode="FAST_COMPILE")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=300
    )
    np.testing.assert_allclose(float(done.stdout), 3 * normal(0.0))
