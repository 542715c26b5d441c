"""The recipes of ``examples/recipes`` against plain NumPy loops, gradients by differences."""

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
import scipy.signal
from pytensor.compile.mode import Mode

from examples.recipes import (
    adstock,
    arma,
    filtering,
    garch,
    hidden_markov,
    holt_winters,
    kalman,
    newton,
    policy_gradient,
    power_iteration,
    sir,
    state_space,
)
from tests.modes import MODES

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ROOT / "examples" / "recipes"
NAMES = sorted(path.stem for path in RECIPES.glob("*.py") if not path.stem.startswith("_"))
MODE = MODES["c"]
rng = np.random.default_rng(20)


@pytest.fixture
def interpreted():
    """Run the rewritten graph in Python where compiling it would take most of a test."""
    with pytensor.config.change_flags(scanlib__perform="python"):
        yield Mode(linker="py", optimizer="fast_run")


def compiled(inputs, outputs, mode=MODE):
    return pytensor.function(inputs, outputs, mode=mode, on_unused_input="ignore")


def slopes(function, x, step=1e-6):
    """Return the derivative of a scalar NumPy function by central differences."""
    x = np.asarray(x, dtype="float64")
    result = np.zeros(x.shape)
    for place in np.ndindex(*x.shape):
        change = np.zeros(x.shape)
        change[place] = step
        result[place] = (function(x + change) - function(x - change)) / (2 * step)
    return result


def close(values, expected, rtol=1e-9, atol=1e-12):
    np.testing.assert_allclose(values, expected, rtol=rtol, atol=atol)


def numpy_errors(y, ar, ma):
    errors = np.zeros(len(y))
    for t in range(len(ar), len(y)):
        errors[t] = y[t] - sum(c * y[t - 1 - i] for i, c in enumerate(ar))
        for j, c in enumerate(ma):
            errors[t] -= c * errors[t - 1 - j] if t - 1 - j >= len(ar) else 0.0
    return errors[len(ar) :]


@pytest.mark.parametrize("orders", [(2, 0), (1, 1), (2, 3)], ids=str)
def test_arma(orders):
    y, free = rng.normal(size=30), rng.uniform(-0.4, 0.4, size=sum(orders))
    variable, series = pt.dvector("free"), pt.dvector("y")
    ar = [variable[i] for i in range(orders[0])]
    ma = [variable[i] for i in range(orders[0], sum(orders))]
    errors = arma.arma_errors(series, ar, ma)
    gradient = pytensor.grad((errors**2).sum(), variable)
    values, slope = compiled([series, variable], [errors, gradient])(y, free)

    def cost(free):
        return (numpy_errors(y, free[: orders[0]], free[orders[0] :]) ** 2).sum()

    close(values, numpy_errors(y, free[: orders[0]], free[orders[0] :]))
    close(slope, slopes(cost, free), rtol=1e-6)


def test_arma_forecast():
    y, past = rng.normal(size=5), rng.normal(size=4)
    ar, ma = [0.5, -0.3], [0.4, 0.2]
    forecast = arma.arma_forecast(pt.constant(y), pt.constant(past), ar, ma, 4)
    values, errors = list(y), list(past)
    for _ in range(4):
        expected = 0.5 * values[-1] - 0.3 * values[-2] + 0.4 * errors[-1] + 0.2 * errors[-2]
        values.append(expected)
        errors.append(0.0)
    close(compiled([], forecast)(), values[-4:])


def numpy_garch(errors, omega, alpha, gamma, beta, first):
    variances = [first]
    for error in errors[:-1]:
        variances.append(omega + (alpha + gamma * (error < 0)) * error**2 + beta * variances[-1])
    return np.array(variances)


@pytest.mark.slow
def test_garch():
    errors, at = rng.normal(size=40), np.array([0.1, 0.05, 0.1, 0.8, 1.2])
    free = pt.dvector("free")
    series = pt.dvector("errors")
    variances = garch.garch_variances(series, *(free[i] for i in range(5)))
    likelihood = garch.log_likelihood(series, variances)
    f = compiled([series, free], [variances, likelihood, pytensor.grad(likelihood, free)])
    values, total, slope = f(errors, at)

    def expected(at):
        v = numpy_garch(errors, *at)
        return -0.5 * np.sum(np.log(2 * np.pi * v) + errors**2 / v)

    close(values, numpy_garch(errors, *at))
    close(total, expected(at))
    close(slope, slopes(expected, at), rtol=1e-6)


def numpy_holt_winters(y, rates, level, trend, season):
    alpha, beta, gamma = rates
    seasons, rows = list(season), []
    for value in y:
        old, expected = level, level + trend + seasons[0]
        level = alpha * (value - seasons[0]) + (1 - alpha) * (level + trend)
        trend = beta * (level - old) + (1 - beta) * trend
        seasons.append(gamma * (value - level) + (1 - gamma) * seasons.pop(0))
        rows.append([expected, level, trend, seasons[-1]])
    return np.array(rows).T


@pytest.mark.slow
def test_holt_winters():
    y, at, season = rng.normal(size=15), np.array([0.3, 0.1, 0.4]), rng.normal(size=4)
    rates, series = pt.dvector("rates"), pt.dvector("y")
    initial = [pt.constant(0.5), pt.constant(0.1), pt.constant(season)]
    traces = holt_winters.holt_winters(series, rates, *initial, period=4)
    gradient = pytensor.grad(((series - traces[0]) ** 2).sum(), rates)
    *values, slope = compiled([series, rates], [*traces, gradient])(y, at)

    def cost(at):
        return ((y - numpy_holt_winters(y, at, 0.5, 0.1, season)[0]) ** 2).sum()

    close(values, numpy_holt_winters(y, at, 0.5, 0.1, season))
    close(slope, slopes(cost, at), rtol=1e-6)


def test_adstock(interpreted):
    spend = rng.gamma(1.0, size=(20, 3))
    at = np.array([0.8, 0.5, 0.1, 2.0, 1.0, 3.0, 5.0, 4.0, 3.0, 10.0])

    def numpy_sales(at):
        carried, sales = np.zeros(3), []
        for row in spend:
            carried = row + at[:3] * carried
            sales.append(at[9] + (at[6:9] * carried / (carried + at[3:6])).sum())
        return np.array(sales)

    free, rows = pt.dvector("free"), pt.dmatrix("spend")
    sales = adstock.expected_sales(rows, free[:3], free[3:6], free[6:9], free[9])
    f = compiled([rows, free], [sales, pytensor.grad((sales**2).sum(), free)], interpreted)
    values, slope = f(spend, at)
    close(values, numpy_sales(at))
    close(slope, slopes(lambda at: (numpy_sales(at) ** 2).sum(), at), rtol=1e-6)


def numpy_forward(start, move, emission):
    alphas = [np.exp(start + emission[0])]
    for row in emission[1:]:
        alphas.append(np.exp(row) * (alphas[-1] @ np.exp(move)))
    return np.log(alphas)


def best_path(start, move, emission):
    """Try all paths."""
    steps, regimes = emission.shape
    best, found = -np.inf, None
    for path in np.ndindex(*(regimes,) * steps):
        score = start[path[0]] + sum(emission[t, k] for t, k in enumerate(path))
        score += sum(move[i, j] for i, j in pairwise(path))
        if score > best:
            best, found = score, path
    return found


@pytest.mark.slow
def test_hidden_markov(interpreted):
    y, logits = rng.normal(size=7), np.array([1.0, 0.5])
    mean, log_deviation = np.array([0.3, -0.2]), np.array([-0.2, 0.4])
    variable = pt.dvector("logits")
    chain = hidden_markov.two_regimes(variable)
    emissions = hidden_markov.normal_emissions(pt.constant(y), mean, log_deviation)
    alphas = hidden_markov.forward(*chain, emissions)
    total = pt.logsumexp(alphas[-1])
    path = hidden_markov.viterbi(*chain, emissions)
    outputs = [*chain, emissions, alphas, path, pytensor.grad(total, variable)]
    start, move, emission, values, found, slope = compiled([variable], outputs, interpreted)(logits)

    deviation = np.exp(log_deviation)
    density = np.exp(-0.5 * ((y[:, None] - mean) / deviation) ** 2) / deviation / np.sqrt(2 * np.pi)
    close(np.exp(emission), density)
    close(np.exp(move).sum(axis=1), 1.0)
    close(values, numpy_forward(start, move, emission))
    assert tuple(found) == best_path(start, move, emission)

    def likelihood(logits):
        stay = 1 / (1 + np.exp(-logits))
        move = np.log([[stay[0], 1 - stay[0]], [1 - stay[1], stay[1]]])
        return np.log(np.exp(numpy_forward(start, move, emission)[-1]).sum())

    close(slope, slopes(likelihood, logits), rtol=1e-6)


def joint_normal(y, move, read, drift, noise, mean, spread):
    """Means and covariances of all states given all observations, and the log-density of these."""
    steps, d = len(y), len(mean)
    center, cover = np.zeros((steps, d)), np.zeros((steps, d, steps, d))
    for t in range(steps):
        mean, spread = move @ mean, move @ spread @ move.T + drift
        center[t], ahead = mean, spread
        for s in range(t, steps):
            cover[s, :, t], cover[t, :, s] = ahead, ahead.T
            ahead = move @ ahead
    cover = cover.reshape(steps * d, steps * d)
    reads = np.kron(np.eye(steps), read)
    inner = reads @ cover @ reads.T + noise * np.eye(steps)
    error = y - center @ read
    gain = cover @ reads.T @ np.linalg.inv(inner)
    means = center + (gain @ error).reshape(steps, d)
    covers = (cover - gain @ reads @ cover).reshape(steps, d, steps, d)
    density = -0.5 * (
        error @ np.linalg.solve(inner, error) + np.linalg.slogdet(2 * np.pi * inner)[1]
    )
    return means, np.array([covers[t, :, t] for t in range(steps)]), density


@pytest.mark.slow
def test_kalman(interpreted):
    y, logs = rng.normal(size=6), np.array([-1.0, -2.0, -0.5])
    start = [np.array([0.3, 0.1]), np.array([[1.0, 0.2], [0.2, 0.5]])]
    free = pt.dvector("free")
    variances = pt.exp(free)
    model = [pt.constant(kalman.MOVE), pt.constant(kalman.READ)]
    noises = [pt.diag(variances[:2]), variances[2]]
    filtered = kalman.kalman_filter(pt.constant(y), *model, *noises, *map(pt.constant, start))
    smoothed = kalman.kalman_smoother(model[0], *filtered[:4])
    total = filtered[-1].sum()
    outputs = [*filtered[:2], *smoothed, total, pytensor.grad(total, free)]
    means, spreads, smooth, narrow, density, slope = compiled([free], outputs, interpreted)(logs)

    def exact(logs, rows):
        drift, noise = np.diag(np.exp(logs[:2])), np.exp(logs[2])
        return joint_normal(y[:rows], kalman.MOVE, kalman.READ, drift, noise, *start)

    close(smooth, exact(logs, 6)[0])
    close(narrow, exact(logs, 6)[1])
    close(density, exact(logs, 6)[2])
    close(means[2], exact(logs, 3)[0][-1])  # the filter knows what came so far
    close(spreads[2], exact(logs, 3)[1][-1])
    close(slope, slopes(lambda logs: exact(logs, 6)[2], logs), rtol=1e-5)


def numpy_epidemic(beta, gamma, first, people=100.0, days=12):
    susceptible, infected, recovered, rows = people - first, first, 0.0, []
    for _ in range(days):
        cases, recoveries = beta * susceptible * infected / people, gamma * infected
        susceptible, infected = susceptible - cases, infected + cases - recoveries
        recovered += recoveries
        rows.append([susceptible, infected, recovered, cases])
    return np.array(rows).T


@pytest.mark.slow
def test_sir():
    counts, at = rng.poisson(3.0, size=12).astype(float), np.array([0.5, 0.2, 2.0])
    free = pt.dvector("free")
    traces = sir.epidemic(*(free[i] for i in range(3)), people=100.0, days=12)
    likelihood = sir.log_likelihood(pt.constant(counts), traces[-1])
    *values, slope = compiled([free], [*traces, pytensor.grad(likelihood, free)])(at)

    def expected(at):
        cases = numpy_epidemic(*at)[-1]
        return (counts * np.log(cases) - cases).sum()

    close(values, numpy_epidemic(*at))
    close(slope, slopes(expected, at), rtol=1e-6)


@pytest.mark.slow
def test_returns_and_advantages():
    rewards, values = rng.normal(size=(3, 9)), rng.normal(size=(3, 10))
    going_on = (rng.uniform(size=(3, 9)) < 0.7).astype(float)
    r, g, v = pt.dmatrices("r", "g", "v")
    returns = policy_gradient.discounted_returns(r, g, gamma=0.9)
    gae = policy_gradient.advantages(r, g, v, gamma=0.9, lam=0.8)
    found, advantages = compiled([r, g, v], [returns, gae])(rewards, going_on, values)
    for row in range(3):
        total, advantage = 0.0, 0.0
        for t in reversed(range(9)):
            keep = 0.9 * going_on[row, t]
            total = rewards[row, t] + keep * total
            error = rewards[row, t] + keep * values[row, t + 1] - values[row, t]
            advantage = error + 0.8 * keep * advantage
            close([found[row, t], advantages[row, t]], [total, advantage])


@pytest.mark.slow
@pytest.mark.parametrize("critic", [False, True])
def test_the_policy_gradient_of_a_batch(critic, interpreted):
    inputs, gradients = policy_gradient.losses(critic)
    rng = np.random.default_rng(5)
    logits, table = rng.normal(size=(8, 2)), rng.normal(size=8)
    cells, actions, rewards, going_on, valid = policy_gradient.play(logits, rng)
    f = compiled(inputs, gradients, interpreted)
    by_logits, by_table = f(logits, table, cells, actions, rewards, going_on, valid)

    returns, weight = np.zeros_like(rewards), np.zeros_like(rewards)
    keep = policy_gradient.GAMMA * going_on
    decay = policy_gradient.LAMBDA * keep
    total = advantage = np.zeros(len(cells))
    for t in reversed(range(rewards.shape[1])):
        total = rewards[:, t] + keep[:, t] * total
        error = rewards[:, t] + keep[:, t] * table[cells[:, t + 1]] - table[cells[:, t]]
        advantage = error + decay[:, t] * advantage
        returns[:, t], weight[:, t] = total, advantage if critic else total

    def policy(logits):
        logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        chosen = logs[cells[:, :-1], actions]
        return -(valid * chosen * weight).sum() / policy_gradient.EPISODES

    def value(table):
        return (valid * (table[cells[:, :-1]] - returns) ** 2).sum() / valid.sum()

    close(by_logits, slopes(policy, logits), rtol=1e-6, atol=1e-7)
    close(by_table, slopes(value, table), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_policy_gradients_shorten_the_way():
    update = compiled(*policy_gradient.losses(critic=True))
    lengths = policy_gradient.train(update, seed=0, rounds=15)
    assert lengths[-3:].mean() < 0.6 * lengths[0]


def numpy_layer(x, w):
    batch, length, _ = x.shape
    inner, size = x @ w["enter"], np.log1p(np.exp(x @ w["size"] + w["size_bias"]))
    h = np.zeros((batch, *w["log_rates"].shape))
    y = np.zeros((batch, length))
    for t in range(length):
        decay = np.exp(-size[:, t, :, None] * np.exp(w["log_rates"]))
        h = decay * h + (size * inner)[:, t, :, None] * (x[:, t] @ w["B"])[:, None, :]
        y[:, t] = (h * (x[:, t] @ w["C"])[:, None, :]).sum(axis=-1) @ w["leave"]
    return y


@pytest.mark.slow
def test_state_space(interpreted):
    x, target = state_space.sequences(np.random.default_rng(0), batch=2, length=6)
    weights = state_space.initial_weights()
    variables = {
        name: pt.tensor(name, shape=w.shape, dtype="float64") for name, w in weights.items()
    }
    y = state_space.layer(pt.constant(x), variables)
    gradients = pytensor.grad(pt.mean((y - target) ** 2), list(variables.values()))
    values, *found = compiled(list(variables.values()), [y, *gradients], interpreted)(
        *weights.values()
    )
    close(values, numpy_layer(x, weights))
    for (name, weight), gradient in zip(weights.items(), found, strict=True):

        def cost(value, name=name):
            return ((numpy_layer(x, weights | {name: value}) - target) ** 2).mean()

        close(gradient, slopes(cost, weight), rtol=1e-5, atol=1e-9)


def test_the_task_of_the_state_space_layer():
    x, target = state_space.sequences(np.random.default_rng(1), batch=3, length=20)
    for row in range(3):
        last = 0.0
        for t in range(20):
            last = x[row, t, 0] if x[row, t, 1] else last
            assert target[row, t] == last


def test_newton(interpreted):
    times, shapes = np.linspace(0.1, 3.0, 7), np.full(7, 0.6)
    anomaly, slope = newton.solver(mode=interpreted)(times, shapes)
    close(anomaly - 0.6 * np.sin(anomaly), times)
    close(slope, 1 / (1 - 0.6 * np.cos(anomaly)))


def test_the_iterates_of_newton():
    mean, eccentricity = pt.dscalars("mean", "eccentricity")
    trace = newton.eccentric_anomaly(mean, eccentricity)
    values = compiled([mean, eccentricity], trace)(0.4, 0.9)
    anomaly, before, expected = 1.3, np.inf, []
    while abs(anomaly - before) >= 1e-12:
        before = anomaly
        anomaly -= (anomaly - 0.9 * np.sin(anomaly) - 0.4) / (1 - 0.9 * np.cos(anomaly))
        expected.append(anomaly)
    close(values, expected)


def test_notch():
    noisy, _ = filtering.simulate(samples=50)
    signal = pt.dvector("signal")
    b, a = scipy.signal.iirnotch(50.0, 15.0, fs=filtering.RATE)
    y, x = np.zeros(52), np.concatenate([np.zeros(2), noisy])
    for t in range(2, 52):
        y[t] = b[0] * x[t] + b[1] * x[t - 1] + b[2] * x[t - 2] - a[1] * y[t - 1] - a[2] * y[t - 2]
    close(compiled([signal], filtering.notch(signal))(noisy), y[2:])


@pytest.mark.slow
def test_resonator():
    given, at = rng.normal(size=25), np.array([0.9, 0.7])
    free = pt.dvector("free")
    rung = filtering.resonator(pt.constant(given), free[0], free[1])
    values, slope = compiled([free], [rung, pytensor.grad((rung**2).sum(), free)])(at)

    def ring(at):
        y = np.zeros(27)
        for t in range(25):
            y[t + 2] = given[t] + 2 * at[0] * np.cos(at[1]) * y[t + 1] - at[0] ** 2 * y[t]
        return y[2:]

    close(values, ring(at))
    close(slope, slopes(lambda at: (ring(at) ** 2).sum(), at), rtol=1e-6)


def test_power_iteration(interpreted):
    links = power_iteration.simulate(pages=6)
    variable = pt.dmatrix("links")
    start = np.full(6, 1 / 6)
    trace = power_iteration.power_iteration(
        power_iteration.surfing(variable), pt.constant(start), steps=200
    )
    best = trace[-1][-1]
    vectors, worth = compiled([variable], [trace, pytensor.grad(best, variable)], interpreted)(
        links
    )

    def rank(links):
        matrix, vector, before = 0.15 / 6 + 0.85 * links / links.sum(axis=0), start, np.inf
        rows = []
        while np.abs(vector - before).max() >= 1e-12:
            before, vector = vector, matrix @ vector / (matrix @ vector).sum()
            rows.append(vector)
        return np.array(rows)

    close(vectors, rank(links))
    close(worth, slopes(lambda links: rank(links)[-1, -1], links), rtol=1e-5, atol=1e-8)


BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_recipe(name):
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    part = page.partition(f"(../examples/recipes/{name}.py)")[0].rpartition("\n## ")[2]
    script = (RECIPES / f"{name}.py").read_text(encoding="utf-8")
    blocks = BLOCK.findall(part)
    assert blocks, f"docs/recipes.md shows no code of {name}"
    for block in blocks:
        for piece in re.split(r"\n{3,}", block.strip()):
            assert piece in script, f"docs/recipes.md and {name}.py differ:\n{piece}"
    assert f"figures/recipe-{name.replace('_', '-')}.png" in part


@pytest.mark.slow
@pytest.mark.parametrize("name", ["garch", "sir"])
def test_a_recipe_draws(name, tmp_path):
    pytest.importorskip("matplotlib").use("Agg")
    module = {"garch": garch, "sir": sir}[name]
    module.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
