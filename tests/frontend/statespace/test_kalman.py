"""The Kalman filter and smoother against the textbook's formulas in NumPy, and statsmodels."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib import StateSpace, kalman_filter, kalman_sample, kalman_smoother
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from tests.checks import assert_derivatives, assert_same, evaluate

rng = np.random.default_rng(1)
STEPS = 12
FIELDS = (
    "transition",
    "observation",
    "state_cov",
    "observation_cov",
    "initial_mean",
    "initial_cov",
    "state_intercept",
    "observation_intercept",
    "selection",
)


def covariance(size, rank=None):
    root = rng.normal(size=(size, size if rank is None else rank))
    return root @ root.T / size


def parts(kind, m=3, p=2, r=3):
    """Return the arrays of a model."""
    timed = (STEPS,) if kind == "varying" else ()
    given = {
        "transition": 0.5 * rng.normal(size=(*timed, m, m)),
        "observation": rng.normal(size=(*timed, p, m)),
        "state_cov": covariance(r),
        "observation_cov": covariance(p) + 0.2 * np.eye(p),
        "initial_mean": rng.normal(size=m),
        "initial_cov": covariance(m),
    }
    if kind in ("varying", "intercepts"):
        given["state_intercept"] = rng.normal(size=(*timed, m))
        given["observation_intercept"] = rng.normal(size=p)
        given["selection"] = rng.normal(size=(*timed, m, r))
    if kind == "singular":
        given["state_cov"] = np.diag([1.0, 0.0, 0.0])
        given["initial_cov"] = np.zeros((m, m))
    return given


def at(given, name, t, default):
    value = given.get(name)
    if value is None:
        return default
    core = {"initial_mean": 1, "state_intercept": 1, "observation_intercept": 1}.get(name, 2)
    return value[t] if value.ndim > core else value


def textbook(y, given):
    """Return the log density of each step, filtered, predicted and smoothed moments."""
    a, cov = given["initial_mean"], given["initial_cov"]
    m = len(a)
    before, after, densities, moves = [], [], [], []
    for t, row in enumerate(y):
        z, h = at(given, "observation", t, None), at(given, "observation_cov", t, None)
        d = at(given, "observation_intercept", t, np.zeros(len(row)))
        before.append((a, cov))
        seen = ~np.isnan(row)
        density = 0.0
        if seen.any():
            z, h, d = z[seen], h[np.ix_(seen, seen)], d[seen]
            s = z @ cov @ z.T + h
            v = row[seen] - z @ a - d
            gain = cov @ z.T @ np.linalg.inv(s)
            density = -0.5 * (
                v @ np.linalg.solve(s, v) + np.linalg.slogdet(s)[1] + len(v) * np.log(2 * np.pi)
            )
            a, cov = a + gain @ v, cov - gain @ s @ gain.T
        densities.append(density)
        after.append((a, cov))
        f, q = at(given, "transition", t, None), at(given, "state_cov", t, None)
        c, r = at(given, "state_intercept", t, np.zeros(m)), at(given, "selection", t, np.eye(m))
        moves.append(f)
        a, cov = f @ a + c, f @ cov @ f.T + r @ q @ r.T
    before.append((a, cov))
    smooth = [after[-1]] if after else []
    for t in range(len(after) - 2, -1, -1):
        gain = after[t][1] @ moves[t].T @ np.linalg.pinv(before[t + 1][1], rcond=1e-12)
        mean = after[t][0] + gain @ (smooth[0][0] - before[t + 1][0])
        spread = after[t][1] + gain @ (smooth[0][1] - before[t + 1][1]) @ gain.T
        smooth.insert(0, (mean, spread))
    stacked = [
        np.stack(column) for pairs in (after, before, smooth) for column in zip(*pairs, strict=True)
    ]
    return [np.array(densities), *stacked]


def results(filtered, smooth=None):
    found = [
        filtered.log_densities,
        filtered.mean,
        filtered.cov,
        filtered.predicted_mean,
        filtered.predicted_cov,
    ]
    return found if smooth is None else [*found, smooth.mean, smooth.cov]


def observations(kind, p=2):
    y = rng.normal(size=(STEPS, p))
    if kind == "missing":
        y[2], y[5, 0], y[-1, 1] = np.nan, np.nan, np.nan
    return y


KINDS = ["plain", "varying", "intercepts", "singular", "missing"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_filter_and_smoother(kind, mode):
    given, y = parts(kind), observations(kind)
    symbols = {pt.TensorType("float64", v.shape)(name): v for name, v in given.items()}
    model = StateSpace(**dict(zip(given, symbols, strict=True)))
    rows = pt.matrix("y")
    smooth = kalman_smoother(rows, model)
    found = evaluate(results(smooth.filtered, smooth), {rows: y, **symbols}, mode)
    assert_same(found, textbook(y, given), rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["parallel", "square-root"])
def test_associative_elements(kind, method, mode):
    given, y = parts(kind), observations(kind)
    smooth = kalman_smoother(y, StateSpace(**given), method=method)
    found = evaluate(results(smooth.filtered, smooth), {}, mode)
    assert_same(found, textbook(y, given), rtol=1e-8, atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "intercepts", "singular"])
def test_convergent(kind, fast_mode):
    given = parts("plain" if kind == "intercepts" else kind)
    if kind == "intercepts":
        given |= {"state_intercept": rng.normal(size=3), "observation_intercept": np.ones(2)}
    y = rng.normal(size=(60, 2))
    smooth = kalman_smoother(y, StateSpace(**given), True, "convergent")
    found = evaluate(results(smooth.filtered, smooth), {}, fast_mode)
    assert_same(found, textbook(y, given), rtol=1e-8, atol=1e-9)


def likelihood(names, values, given, y):
    return textbook(y, given | dict(zip(names, values, strict=True)))[0].sum()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sequential", "parallel", "square-root", "convergent"])
@pytest.mark.parametrize("kind", ["plain", "singular"])
def test_derivatives_of_the_likelihood(kind, method, fast_mode):
    given = parts(kind)
    y = rng.normal(size=(30 if method == "convergent" else 6, 2))
    names = ["transition", "observation", "observation_cov", "initial_mean"]
    names += ["state_cov"] if kind == "plain" else []  # differences leave the cone of covariances
    symbols = {pt.TensorType("float64", given[n].shape)(n): given[n] for n in names}
    model = StateSpace(**given | dict(zip(names, symbols, strict=True)))
    cost = kalman_filter(y, model, True, method).log_likelihood

    def reference(*values):
        half = [
            (v + v.T) / 2 if n.endswith("_cov") else v for n, v in zip(names, values, strict=True)
        ]
        return likelihood(names, half, given, y)

    # A covariance is symmetric: its derivative is taken along symmetric directions.
    symmetric = [
        (v + v.T) / 2 if n.endswith("_cov") else v for n, v in zip(names, symbols, strict=True)
    ]
    cost = pytensor.graph.replace.clone_replace(
        cost, dict(zip(list(symbols), symmetric, strict=True)), rebuild_strict=False
    )
    rtol = 1e-5 if method == "convergent" else 1e-6
    assert_derivatives(cost, symbols, reference, fast_mode, rtol=rtol)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sequential", "parallel"])
@pytest.mark.parametrize("observed", ["nan", "mask", "all"])
def test_batches(observed, method, fast_mode):
    given = parts("varying")
    y = rng.normal(size=(2, 3, STEPS, 2))
    mask = rng.random(y.shape) > 0.3
    holes = np.where(mask, y, np.nan) if observed != "all" else y
    how = {"nan": None, "mask": pt.constant(mask), "all": True}[observed]
    rows = pt.tensor4("y")
    smooth = kalman_smoother(rows, StateSpace(**given), how, method)
    total = smooth.filtered.log_likelihood
    found = evaluate(
        [*results(smooth.filtered, smooth), pytensor.grad(total.sum(), rows)],
        {rows: holes if observed == "nan" else y},
        fast_mode,
    )
    series = [textbook(each, given) for each in holes.reshape(6, STEPS, 2)]
    expected = [np.stack(v).reshape(2, 3, *v[0].shape) for v in zip(*series, strict=True)]
    assert_same(found[:-1], expected, rtol=1e-8, atol=1e-9)
    assert np.all(found[-1][~mask] == 0) or observed == "all"


@pytest.mark.slow
def test_short_series_and_one_observation(fast_mode):
    given = parts("plain", m=2, p=1, r=2)
    for steps in (0, 1, 2):
        y = rng.normal(size=steps)
        for method in ("sequential", "parallel", "convergent"):
            filtered = kalman_filter(y, StateSpace(**given), True, method)
            found = evaluate([filtered.log_likelihood, filtered.predicted_mean], {}, fast_mode)
            if steps:
                density, _, _, mean, *_ = textbook(y[:, None], given)
                np.testing.assert_allclose(found[0], density.sum(), rtol=1e-10)
                np.testing.assert_allclose(found[1], mean, rtol=1e-10)
            else:
                assert_same(found, [np.zeros(()), given["initial_mean"][None]])


@pytest.mark.slow
def test_single_precision(fast_mode):
    """A nearly exact observation of a vague state: what plain float32 covariances lose."""
    move = np.array([[1.0, 1.0], [0.0, 1.0]])
    given = {
        "transition": move,
        "observation": np.array([[1.0, 0.0]]),
        "state_cov": np.diag([1e-4, 1e-5]),
        "observation_cov": np.array([[1e-3]]),
        "initial_mean": np.zeros(2),
        "initial_cov": 1e4 * np.eye(2),
    }
    y = np.cumsum(rng.normal(size=(200, 1)), axis=0)
    expected = textbook(y, given)[0].sum()
    model = StateSpace(**{name: value.astype("float32") for name, value in given.items()})
    for method in ("square-root", "sequential"):
        total = kalman_filter(y.astype("float32"), model, True, method).log_likelihood
        assert total.dtype == "float32"
        np.testing.assert_allclose(evaluate(total, {}, fast_mode), expected, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_smoother_of_a_vague_first_state(dtype, fast_mode):
    """By factors it is exact, where ``P - P N P`` is not; held against the precision matrix."""
    m, move, look = 2, np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[1.0, 0.0]])
    noise, error = np.diag([1e-4, 1e-5]), np.array([[1e-3]])
    first = (1e4 if dtype == "float64" else 100.0) * np.eye(m)
    y = np.cumsum(0.1 * rng.normal(size=(STEPS, 1)), axis=0)
    given = [move, look, noise, error, np.zeros(m), first]
    precision, pull = np.zeros((STEPS, m, STEPS, m)), np.zeros((STEPS, m))
    precision[0, :, 0] += np.linalg.inv(first)
    for t, row in enumerate(y):
        precision[t, :, t] += look.T @ look / error
        pull[t] += look.T @ row / error[0]
        if t:
            ends = np.linalg.inv(noise) @ np.hstack([-move, np.eye(m)])
            whole = np.hstack([-move, np.eye(m)]).T @ ends
            for i, j in np.ndindex(2, 2):
                block = whole[m * i : m * i + m, m * j : m * j + m]
                precision[t - 1 + i, :, t - 1 + j] += block
    cov = np.linalg.inv(precision.reshape(STEPS * m, -1)).reshape(precision.shape)
    mean = np.tensordot(cov, pull, axes=2)
    cov = np.stack([cov[t, :, t] for t in range(STEPS)])
    scale = np.sqrt(np.einsum("tii->ti", cov))
    model = StateSpace(*(v.astype(dtype) for v in given))
    smooth = kalman_smoother(y.astype(dtype), model, method="square-root")
    found = evaluate([smooth.mean, smooth.cov], {}, fast_mode)
    assert [v.dtype for v in found] == [dtype] * 2
    limit = 1e-9 if dtype == "float64" else 1e-4
    assert (np.abs(found[1] - cov) / (scale[:, :, None] * scale[:, None])).max() < limit
    assert (np.abs(found[0] - mean) / scale).max() < (1e-6 if dtype == "float64" else 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["parallel", "square-root"])
def test_values_and_gradients_are_parallel_in_time(method, monkeypatch):
    """Where JAX combines rows in trees, no loop is left: not in the likelihood, the smoother, the
    gradient, or the second derivative."""
    backend = pytest.importorskip("scanlib.backends.jax")
    monkeypatch.setattr(backend, "combines_in_trees", lambda: True)
    given = parts("varying")
    y = pt.constant(observations("missing"))
    names = ["transition", "observation", "state_cov", "initial_mean"]
    symbols = {pt.TensorType("float64", given[n].shape)(n): given[n] for n in names}
    model = StateSpace(**given | dict(zip(names, symbols, strict=True)))
    found = []
    for kind, mode in ((method, "JAX"), ("sequential", "FAST_RUN")):
        smooth = kalman_smoother(y, model, method=kind)
        cost = smooth.filtered.log_likelihood + (smooth.mean**2).sum() + (smooth.cov**2).sum()
        gradient = pytensor.grad(cost, list(symbols))
        second = pytensor.grad((gradient[0] ** 2).sum(), next(iter(symbols)))
        function = pytensor.function(list(symbols), [cost, *gradient, second], mode=mode)
        if mode == "JAX":
            nodes = function.maker.fgraph.apply_nodes
            assert not any(isinstance(node.op, Scan | LinearScan) for node in nodes)
        cost, move, look, cov, *rest = function(*symbols.values())
        found.append([cost, move, look, cov + cov.T, *rest])
    assert_same(*found, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_draws_have_the_smoothed_moments(fast_mode):
    given = parts("intercepts")
    y = observations("missing")
    generator = pytensor.shared(np.random.default_rng(5))
    after, states = kalman_sample(y, StateSpace(**given), generator, draws=20_000)
    draw = pytensor.function([], states, updates={generator: after}, mode=fast_mode)
    found, again = draw(), draw()
    assert not np.array_equal(found, again)
    _, _, _, _, _, mean, cov = textbook(y, given)
    scale = np.sqrt(np.einsum("tii->ti", cov))
    np.testing.assert_array_less(np.abs(found.mean(axis=0) - mean), 0.05 * scale + 1e-12)
    spread = np.stack([np.cov(found[:, t].T) for t in range(STEPS)])
    assert np.abs(spread - cov).max() < 0.05 * np.abs(cov).max()
    generator = pytensor.shared(np.random.default_rng(5))
    _, batch = kalman_sample(np.stack([y, y]), StateSpace(**given), generator, draws=3)
    assert evaluate(batch, {}, fast_mode).shape == (3, 2, STEPS, 3)


@pytest.mark.slow
def test_statsmodels(fast_mode):
    """A SARIMAX model with a singular state covariance, and Nile's flow with gaps."""
    sarimax = pytest.importorskip("statsmodels.tsa.statespace.sarimax")
    y = np.cumsum(rng.normal(size=300))
    y[40:45] = np.nan
    theirs = sarimax.SARIMAX(y, order=(2, 1, 1), seasonal_order=(1, 0, 1, 4))
    theirs.ssm.filter_timing = 0
    theirs.ssm.initialize_approximate_diffuse(100.0)
    theirs.ssm.loglikelihood_burn = 0
    smooth = theirs.smooth([0.3, -0.2, 0.4, 0.5, 0.2, 1.3])
    ssm = theirs.ssm
    model = StateSpace(
        ssm["transition"],
        ssm["design"],
        ssm["state_cov"],
        ssm["obs_cov"],
        np.zeros(ssm.k_states),
        100.0 * np.eye(ssm.k_states),
        selection=ssm["selection"],
    )
    for method in ("sequential", "parallel"):
        ours = kalman_smoother(y, model, method=method)
        values = [ours.filtered.log_likelihood, ours.filtered.predicted_mean, ours.mean]
        total, predicted, mean = evaluate(values, {}, fast_mode)
        np.testing.assert_allclose(total, smooth.llf_obs.sum(), rtol=1e-8)
        np.testing.assert_allclose(predicted, smooth.predicted_state.T, rtol=1e-7, atol=1e-7)
        np.testing.assert_allclose(mean, smooth.smoothed_state.T, rtol=1e-6, atol=1e-6)


def test_mistakes_are_told():
    good = parts("plain")
    model = StateSpace(**good)
    with pytest.raises(ValueError, match="observation has size 4 where transition has 3"):
        StateSpace(**good | {"observation": np.ones((2, 4))})
    with pytest.raises(ValueError, match="initial_mean must have shape"):
        StateSpace(**good | {"initial_mean": np.ones((3, 1))})
    with pytest.raises(ValueError, match="y has 5 observations at each step, the model has 2"):
        kalman_filter(np.ones((4, 5)), model)
    with pytest.raises(ValueError, match="method must be one of"):
        kalman_filter(np.ones((4, 2)), model, method="fast")
    with pytest.raises(ValueError, match="do not vary over time"):
        kalman_filter(np.ones((STEPS, 2)), StateSpace(**parts("varying")), True, "convergent")
    with pytest.raises(TypeError, match="rng must be a random generator"):
        kalman_sample(np.ones((4, 2)), model, 5)
    with pytest.raises(TypeError, match="model must be a"):
        kalman_filter(np.ones((4, 2)), good)
    assert scanlib.kalman_filter is kalman_filter
