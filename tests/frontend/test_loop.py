"""`scanlib.loop` against the plain loop: trees, lags, conditions, generators, gradients."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import assume, given, settings
from pytensor.compile.mode import get_mode

import scanlib
from scanlib import lags, loop
from scanlib.frontend.lags import Lags
from tests.checks import assert_derivatives, assert_same, evaluate
from tests.modes import MODES
from tests.tree_loops import LOOPS, TreeLoop, leaves, mapped

rng = np.random.default_rng(23)
LINKERS = ["py", "c", "numba", "JAX", "PYTORCH"]


on_linkers = pytest.mark.parametrize(
    "linker", [pytest.param(x, marks=[pytest.mark.slow] * (x != "py")) for x in LINKERS]
)


@contextmanager
def using(linker):
    """Give the mode of a linker; under ``py`` loops are walked in Python."""
    if linker in ("JAX", "PYTORCH"):
        pytest.importorskip({"JAX": "jax", "PYTORCH": "torch"}[linker])
    perform = "python" if linker == "py" else "auto"
    with pytensor.config.change_flags(scanlib__perform=perform):
        yield MODES.get(linker) or get_mode(linker)


def symbolic(tree, trees_of_leaves, inputs):
    """Return a tree of variables for a tree of arrays, in `lags` where leaves say so."""

    def variable(leaf, array):
        x = pt.tensor(f"v{len(inputs)}", shape=(None,) * array.ndim, dtype=array.dtype.name)
        if 1 in leaf.shape:  # what is broadcast has to be known
            x = pt.tensor(x.name, shape=(*x.type.shape[: array.ndim - 2], 1, None), dtype=x.dtype)
        inputs[x] = array
        return x if leaf.lags is None else lags(x, leaf.lags)

    return mapped(variable, trees_of_leaves, tree)


def built(case: TreeLoop):
    """Return variables with values, final and ys as lists, of a loop of symbols."""
    inputs: dict = {}
    init, xs = case.arrays()
    arguments = symbolic(init, case.carry, inputs), symbolic(xs, case.xs, inputs)
    length = None if leaves(case.xs) else case.steps
    final, ys = loop(case.step, *arguments, length=length, reverse=case.reverse)
    found = [v.rows if isinstance(v, Lags) else v for v in leaves(final)]
    kept = [v for v, leaf in zip(found, leaves(case.carry), strict=True) if leaf.lags != 0]
    mapped(lambda leaf, value: None, case.carry, final)  # the structure of `init`
    return inputs, (init, xs), kept, leaves(ys)


@on_linkers
@given(case=LOOPS)
def test_generated_trees(linker, case):
    inputs, (init, xs), final, ys = built(case)
    expected = case.run(init, xs)
    with using(linker) as mode:
        results = evaluate([*final, *ys], inputs, mode)
    assert_same(results, [*expected[0], *expected[1]])


@on_linkers
@given(case=LOOPS)
@settings(max_examples=8)
def test_gradients_of_generated_trees(linker, case):
    inputs, (init, xs), final, ys = built(case)

    def reference(*values):
        given = iter(values)
        trees = mapped(lambda _: next(given), init), mapped(lambda _: next(given), xs)
        return sum(np.sum(np.sin(v)) for part in case.run(*trees) for v in part)

    assume(inputs)
    cost = sum((pt.sin(v).sum() for v in [*final, *ys]), pt.zeros(()))
    with using(linker) as mode:
        assert_derivatives(cost, inputs, reference, mode, rtol=1e-5, disconnected_inputs="ignore")


def numbers(outputs, inputs=None):
    """Evaluate without compiling loops."""
    with using("py"):
        return evaluate(outputs, inputs, "FAST_COMPILE")


X = np.array([1.0, 2.0, 6.0])
x = pt.vector("x")


@on_linkers
@pytest.mark.parametrize("reverse", [False, True])
def test_a_condition_ends_the_loop(linker, reverse):
    def step(carry, x):
        total = carry + x
        return total, (total, carry), total > limit

    limit = pt.scalar("limit")
    outputs = loop(step, 0.0, x, reverse=reverse)
    by_until = loop(
        lambda *given: step(*given)[:2], 0.0, x, reverse=reverse, until=lambda new: new > limit
    )
    with using(linker) as mode:
        flat = [outputs[0], *outputs[1], outputs[2], by_until[0], *by_until[1], by_until[2]]
        f = pytensor.function([x, limit], flat, mode=mode)
        slope = pytensor.function([x, limit], pytensor.grad(outputs[0], x), mode=mode)
        values = X[::-1] if reverse else X
        for end, steps in ((2.5, 1 if reverse else 2), (99.0, 3)):
            totals = values[:steps].cumsum()
            before = np.concatenate([[0.0], totals[:-1]])
            direction = -1 if reverse else 1
            expected = [totals[-1], totals[::direction], before[::direction], np.array(steps < 3)]
            assert_same(f(X, end), 2 * expected)
            ran = (np.arange(3) < steps).astype(float)
            assert_same([slope(X, end)], [ran[::direction]])


def test_no_condition_was_met_without_steps():
    final, ys, done = loop(lambda c, _: (c + 1, c, c < 9), 5, length=0)
    assert_same(numbers([final, ys, done]), [np.array(5), np.zeros(0, "int64"), np.array(False)])


def test_until_sees_lags():
    final, ys, done = loop(
        lambda f, _: (f[1] + f[2], f[1]),
        lags(np.array([1, 1]), 2),
        length=50,
        until=lambda f: f[1] - f[2] > 3,
    )
    expected = [[1, 2, 3, 5, 8], [8, 13], 13, 8, True]
    results = numbers([ys, final.rows, final[1], final[2], done])
    assert_same(results, [np.array(value) for value in expected])


@dataclass(frozen=True)
class Settings:
    rate: Any
    kind: str = field(default="linear", metadata={"static": True})

    def __post_init__(self):
        assert self.rate is not None


class Trend(NamedTuple):
    level: Any
    slope: Any


def test_containers_come_back_as_they_were():
    def step(carry, row):
        trend, held, nothing = carry
        assert isinstance(trend, Trend)
        assert (held["settings"].kind, nothing) == ("linear", None)
        level = trend.level + held["settings"].rate * row[0]
        # A dict may come in another order.
        return (Trend(level, trend.slope), dict(reversed(held.items())), None), Trend(level, None)

    init = (Trend(0.0, 1.0), {"settings": Settings(0.5), "more": [1.0]}, None)
    final, ys = loop(step, init, [x])
    assert (list(final[1]), final[2], ys.slope) == (["settings", "more"], None, None)
    assert final[1]["settings"].kind == "linear"
    assert (final[0].level.name, ys.level.name) == ("level", "level")
    assert_same(
        numbers([final[0].level, final[1]["settings"].rate, final[1]["more"][0], ys.level], {x: X}),
        [np.array(4.5), np.array(0.5), np.array(1.0), np.array([0.5, 1.5, 4.5])],
    )


def test_no_carry_no_rows_no_outputs():
    final, ys = loop(lambda carry, row: (carry, row**2), None, x)
    assert final is None
    last, nothing = loop(lambda carry, row: (2 * carry, None), 3, length=4)
    assert nothing is None
    assert_same(numbers([ys, last], {x: X}), [X**2, np.array(48)])
    with pytest.raises(IndexError):
        lags(x, 2)[3]


def test_initial_values_are_promoted():
    def step(carry, row):
        count, total, _, wide = carry
        return (count + 1, total + row, 0, wide + row * np.ones((1, 2))), total

    final, _ = loop(step, (0, 0, 1.5, np.zeros((1, 1), "float32")), x)
    dtypes = [v.dtype for v in final]
    assert dtypes == ["int64", "float64", "float64", "float64"]
    count, total, reset, wide = numbers([*final], {x: X})
    assert (count, total, reset, wide.tolist()) == (3, 9.0, 0.0, [[9.0, 9.0]])


def test_outputs_that_are_states_are_read_from_their_history():
    def step(carry, row):
        new = 0.5 * carry + row
        return new, (carry, new, new)

    node = loop(step, 0.0, x)[0].owner.inputs[0].owner
    assert len(node.outputs) == 1


@pytest.mark.parametrize("checkpoint", [2, "sqrt"])
def test_checkpoints_walk_backwards_as_well(checkpoint):
    def step(carry, row):
        new = 0.5 * carry[1] * carry[2] + row[0] - row[1]
        return new, (new, carry[2])

    weights, starts = rng.normal(size=6), rng.normal(size=2)
    w, s = pt.vectors("w", "s")
    results = []
    for options in ({}, {"checkpoint": checkpoint}):
        final, ys = loop(step, lags(s, 2), lags(w, 1), reverse=True, **options)
        cost = (ys[0] ** 2).sum() + ys[1].prod() + final.rows[0] + final[2]
        results.append(
            numbers([*ys, final.rows, *pytensor.grad(cost, [w, s])], {w: weights, s: starts})
        )
    assert_same(results[1], results[0])


@pytest.mark.parametrize("reverse", [False, True])
def test_newton(reverse):
    def step(h, row):
        new = pt.tanh(0.5 * h + row)
        return new, h

    values = [
        numbers([*loop(step, 0.1, x, reverse=reverse, method=method)], {x: X})
        for method in ("sequential", "newton")
    ]
    assert_same(values[1], values[0], rtol=1e-6)


def test_an_axis_of_its_own():
    matrix = rng.normal(size=(2, 4))
    m = pt.matrix("m")
    for axis in (1, -1):
        final, (rows, sums, before) = loop(
            lambda c, r: (c[1] + r, (c[1] + r, r.sum(), c[2])),
            lags(np.ones((2, 2)), 2),
            m,
            axis=axis,
        )
        totals = 1 + matrix.cumsum(axis=1)
        expected = [totals[:, -2:], totals[:, -1], totals[:, -2], totals, matrix.sum(0)]
        values = numbers([final.rows, final[1], final[2], rows, sums, before], {m: matrix})
        assert_same(values[:-1], expected)
        assert_same([values[-1]], [np.hstack([np.ones((2, 2)), totals[:, :2]])])


def test_generators_are_carried():
    generator = pytensor.shared(np.random.default_rng(5), name="rng")
    other = pytensor.shared(np.random.default_rng(6), name="other")

    def step(carry, _):
        after, place = carry["rngs"][0].normal(carry["place"], 1.0)
        other, jump = carry["rngs"][1].poisson(2.0)
        return {"rngs": (after, other), "place": place}, jump

    final, jumps = loop(step, {"place": 0.0, "rngs": (generator, other)}, length=3)
    f = pytensor.function(
        [], [final["place"], jumps], updates={generator: final["rngs"][0], other: final["rngs"][1]}
    )
    numpy_rng, numpy_other = np.random.default_rng(5), np.random.default_rng(6)
    for _ in range(2):
        place, jumps = f()
        assert_same([place], [numpy_rng.normal(size=3).sum()])
        assert jumps.tolist() == numpy_other.poisson(2.0, size=3).tolist()


def test_shared_variables_have_no_updates():
    counter = pytensor.shared(np.array(2), name="counter")
    final, seen = loop(lambda c, _: (c + 1, c * counter), counter, length=3)
    f = pytensor.function([], seen, updates={counter: final})
    assert (f().tolist(), f().tolist(), int(counter.get_value())) == ([4, 6, 8], [25, 30, 35], 8)


def test_the_same_loop_as_that_of_scan():
    new = loop(lambda h, x: (pt.tanh(h + x), None), 0.0, x)[0]
    old = scanlib.scan(lambda x, h: pt.tanh(h + x), x, 0.0, return_updates=False)
    assert new.owner.inputs[0].owner.op == old.owner.inputs[0].owner.op


def test_gradients_by_what_a_step_captures(python_kernels):
    w = pt.vector("w")

    def step(carry, row):
        new = pt.tanh(w * carry["h"] + row)
        return {"h": new}, new.sum()

    final, ys = loop(step, {"h": pt.zeros(2)}, x)

    def reference(w, x):
        h, total = np.zeros(2), 0.0
        for row in x:
            h = np.tanh(w * h + row)
            total += h.sum() ** 2
        return total + h[0]

    cost = (ys**2).sum() + final["h"][0]
    assert_derivatives(cost, {w: np.array([0.3, -0.4]), x: X / 9}, reference, "FAST_COMPILE")


@pytest.mark.parametrize("ys", [lambda u: u, lambda u: (pt.zeros(()), {"counts": [u]})])
def test_updates_are_not_outputs(ys):
    count = pytensor.shared(0, name="count")
    with pytest.raises(
        ValueError, match=r"^loop `counter`: the step changes .*\[count\].* carry what"
    ):
        loop(lambda s, _: (2 * s, ys({count: count + 1})), 0.5, length=3, name="counter")
