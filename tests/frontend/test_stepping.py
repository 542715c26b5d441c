"""`scanlib.step_through`: what it gives is what the compiled loop computes."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.modes import MODES

X = np.array([0.3, -1.0, 2.0, 0.5, 4.0])


def compiled(outputs, values):
    return pytensor.function(list(values), outputs, mode=MODES["py"])(*values.values())


@pytest.mark.all_forms
@pytest.mark.parametrize("backwards", [False, True])
def test_states_with_taps_and_outputs(backwards):
    x, a = pt.dvector("x"), pt.dscalar("a")
    y, z = scanlib.scan(
        lambda now, after, last, before, a: (a * last - before / 2 + now, after + last),
        sequences={"input": x, "taps": [0, 1]},
        outputs_info=[{"initial": np.array([0.5, 1.0]), "taps": [-1, -2], "name": "y"}, None],
        non_sequences=a,
        go_backwards=backwards,
        return_updates=False,
    )
    values = {x: X, a: 0.7}
    steps = list(scanlib.step_through(y, values))
    expected_y, expected_z = compiled([y, z], values)
    np.testing.assert_allclose([step.results["y"] for step in steps], expected_y)
    np.testing.assert_allclose([step.results["output 0"] for step in steps], expected_z)
    assert [step.number for step in steps] == [0, 1, 2, 3]
    assert steps[1].inputs["y[t-1]"] == steps[0].results["y"]
    assert steps[2].inputs["y[t-2]"] == steps[0].results["y"]
    assert steps[0].inputs["a"] == 0.7
    assert steps[0].operations[-1][1] in steps[0].results.values()
    assert "(a * y[t-1])" in str(steps[0])


def test_the_gradient_of_a_loop():
    x, a = pt.dvector("x"), pt.dscalar("a")
    y = scanlib.scan(lambda x, y, a: pt.tanh(a * y + x), x, np.float64(0), a, return_updates=False)
    slope, values = pytensor.grad(y.sum(), a), {x: X, a: 0.7}
    steps = list(scanlib.step_through(slope, values))
    assert [step.number for step in steps] == [4, 3, 2, 1, 0]
    assert compiled(slope, values) in steps[-1].results.values()


def test_until_and_an_early_end():
    x = pt.dvector("x")
    total = scanlib.scan(
        lambda x, s: (s + x, scanlib.until(s + x > 1)), x, np.float64(0), return_updates=False
    )
    steps = list(scanlib.step_through(total[-1], {x: X}))
    assert [step.stops for step in steps] == [False, False, True]
    assert "step 2, the last (until)" in str(steps[-1])
    assert next(scanlib.step_through(total, {x: X})).number == 0


def test_random_draws():
    rng = pytensor.shared(np.random.default_rng(3), name="rng")

    def step(y):
        new_rng, draw = pt.random.normal.make_node(rng, None, 0.0, 1.0).outputs
        return y + draw, {rng: new_rng}

    y, _ = scanlib.scan(step, outputs_info=pt.dscalar("y"), n_steps=3)
    start = next(v for v in pytensor.graph.traversal.explicit_graph_inputs([y]))
    steps = list(scanlib.step_through(y, {start: 1.0}))
    expected = 1 + np.random.default_rng(3).normal(size=3).cumsum()
    np.testing.assert_allclose([step.results["y"] for step in steps], expected)


def test_operations_of_several_results():
    """A draw is what is seen of one, not the generator after it; a factorization has two."""
    seed = np.random.default_rng(3)

    def step(total, generator):
        after, z = pt.random.normal(rng=generator, return_next_rng=True)
        q, r = pt.linalg.qr(z * np.eye(2))
        return (total + z + r.sum() + q.sum(), after), None

    (total, _), _ = scanlib.loop(
        lambda carry, _: step(*carry), (0.0, pytensor.shared(seed)), length=2
    )
    draws = np.random.default_rng(3).normal(size=2)
    for taken, draw in zip(scanlib.step_through(total), draws, strict=True):
        values = [value for name, value in taken.operations if name.startswith("normal(")]
        np.testing.assert_array_equal([value.item() for value in values[:1]], [draw])
        found = [value for name, value in taken.operations if name.startswith("qr(")]
        np.testing.assert_allclose(found[0] @ found[1], draw * np.eye(2), atol=1e-15)


def test_where_nan_begins():
    x = pt.dvector("x")
    y = scanlib.scan(
        lambda x, y: pt.log(y - x) * 2, x, pt.constant(3.0, name="y"), return_updates=False
    )
    bad = next(step for step in scanlib.step_through(y, {x: X}) if step.first_not_finite())
    assert np.isnan(compiled(y, {x: X})[bad.number])
    assert not np.isnan(compiled(y, {x: X})[: bad.number]).any()
    assert bad.first_not_finite().lower() == "log(y[t-1] - x)"
    given = next(scanlib.step_through(y, {x: np.array([np.inf])}))
    assert given.first_not_finite() == "x"


def test_no_steps():
    x = pt.dvector("x")
    y = scanlib.map(lambda x: 2 * x, x, return_updates=False)
    assert list(scanlib.step_through(y, {x: []})) == []


def test_a_missing_value():
    x, a = pt.dvector("x"), pt.dscalar("a")
    y = scanlib.scan(lambda x, a: x * a, x, non_sequences=a, return_updates=False)
    with pytest.raises(pytensor.graph.utils.MissingInputError, match=r"from a, .* \{a: \.\.\.\}"):
        next(scanlib.step_through(y, {x: X}))
    shared = pytensor.shared(2.0)
    half = x / 2
    y = scanlib.map(lambda x: x * shared, half, return_updates=False)
    steps = list(scanlib.step_through(y, {half: X}))
    assert [float(step.results["output 0"]) for step in steps] == list(2 * X)


def test_what_a_loop_returned():
    x = pt.dvector("x")

    def step(carry, x):
        return {"level": carry["level"] + x}, (carry["level"], {"x": carry["level"] * x})

    result = scanlib.loop(step, {"level": 0.0}, x)
    for part in (result, result[0], result[1], scanlib.scan(lambda x: 2 * x, x)):
        assert len(list(scanlib.step_through(part, {x: X}))) == len(X)
        scanlib.explain(part)
    lagged = scanlib.loop(lambda y, x: (y[1] + x, None), scanlib.lags(np.ones(1), 1), x)
    assert len(list(scanlib.step_through(lagged, {x: X}))) == len(X)


def test_what_has_no_name_is_called_by_what_it_is():
    """As what the loop of a gradient reads; each input is shown."""
    x, a = pt.dvector("x"), pt.dscalar("a")
    y = scanlib.scan(
        lambda now, before, h: pt.where(now > before, pt.sqrt(now - 1) + a * h, 0.0),
        {"input": x, "taps": [0, -1]},
        np.float64(0.0),
        name="chain",
        return_updates=False,
    )
    values = {x: np.array([1.0, 1.0, 2.0]), a: 0.5}
    first, _ = scanlib.step_through(y, values)
    assert list(first.inputs) == ["x", "sequence 1", "state 0[t-1]", "a"]
    *_, last = scanlib.step_through(pytensor.grad(y.sum(), x), values)
    assert {"x[1:]", "state 0 of chain[:-1]", "a"} < set(last.inputs)
    assert last.first_not_finite().endswith("/ sqrt(x[1:] - 1)")
