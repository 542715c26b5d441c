"""Loops along named dimensions against a plain loop over arrays that broadcast by name."""

from dataclasses import dataclass

import numpy as np
import pytensor.tensor as pt
import pytensor.xtensor as px
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pytensor.graph.replace import clone_replace
from pytensor.xtensor.random import shared_rng

from scanlib import lags, loop
from tests.checks import assert_derivatives, assert_same, evaluate
from tests.frontend.test_loop import on_linkers, using

SIZES = {"chain": 2, "feature": 3, "place": 1}


@dataclass
class Named:
    """An array with names for its axes."""

    dims: tuple
    array: np.ndarray

    def aligned(self, dims):
        order = [self.dims.index(dim) for dim in dims if dim in self.dims]
        new = [i for i, dim in enumerate(dims) if dim not in self.dims]
        return np.expand_dims(self.array.transpose(order), new)

    def _with(self, other, function):
        if not isinstance(other, Named):
            return Named(self.dims, function(self.array, other))
        dims = (*self.dims, *(dim for dim in other.dims if dim not in self.dims))
        return Named(dims, function(self.aligned(dims), other.aligned(dims)))

    def __add__(self, other):
        return self._with(other, np.add)

    def __mul__(self, other):
        return self._with(other, np.multiply)

    def sum(self, dim):
        dims = tuple(d for d in self.dims if d != dim)
        return Named(dims, self.array.sum(axis=self.dims.index(dim)))

    def isel(self, time):
        axis = self.dims.index("time")
        return Named(tuple(d for d in self.dims if d != "time"), self.array.take(time, axis))


def shuffled(dims):
    return st.permutations(dims).map(tuple)


SUBSETS = st.sets(st.sampled_from(sorted(SIZES))).flatmap(lambda s: shuffled(sorted(s)))
WALKED = st.sets(st.sampled_from(sorted(SIZES))).flatmap(lambda s: shuffled(["time", *sorted(s)]))


@dataclass
class NamedLoop:
    """Dims of a sequence, of another with a lag, of a state, of what a step captures; the walk."""

    x: tuple
    lagged: tuple
    state: tuple
    captured: tuple
    reverse: bool
    seed: int

    def arrays(self):
        random = np.random.default_rng(self.seed)
        sizes = {"x": 4, "lagged": 5}
        return {
            key: random.normal(size=[SIZES.get(dim, sizes.get(key)) for dim in getattr(self, key)])
            for key in ("x", "lagged", "state", "captured")
        }

    def step(self, state, x, lagged, captured):
        """The next state has the dims of all that it is made of."""
        new = state * 0.4 + x * captured + lagged[0] * state * 0.1 + lagged[1] * 0.3
        total = new.sum(min(new.dims)) if new.dims else new
        return new, (new, total, lagged[1] * 1.0)

    def run(self, x, lagged, state, captured):
        """The plain loop; time stands behind the dims that it follows in `x`."""
        given, past = Named(self.x, x), Named(self.lagged, lagged)
        state, captured = Named(self.state, state), Named(self.captured, captured)
        columns = [[], [], []]
        steps = range(4)[::-1] if self.reverse else range(4)
        for t in steps:
            now, before = (t, t + 1) if self.reverse else (t + 1, t)
            seen = {0: past.isel(now), 1: past.isel(before)}
            state, ys = self.step(state, given.isel(t), seen, captured)
            for column, y in zip(columns, ys, strict=True):
                column.append(y)
        return state, [self.stacked(column[::-1] if self.reverse else column) for column in columns]

    def stacked(self, column):
        before = self.x[: self.x.index("time")]
        dims = column[-1].dims
        place = max([dims.index(dim) + 1 for dim in dims if dim in before], default=0)
        array = np.stack([row.array for row in column], axis=place)
        return Named((*dims[:place], "time", *dims[place:]), array)

    def built(self):
        """Return variables with values, the last state and what was stacked, named."""
        arrays = self.arrays()
        v = {key: px.xtensor(key, dims=getattr(self, key)) for key in arrays}
        final, ys = loop(
            lambda state, rows: self.step(state, *rows, v["captured"]),
            v["state"],
            (v["x"], lags(v["lagged"], 1)),
            dim="time",
            reverse=self.reverse,
        )
        return {v[key]: array for key, array in arrays.items()}, final, list(ys)


LOOPS = st.builds(NamedLoop, WALKED, WALKED, SUBSETS, SUBSETS, st.booleans(), st.integers(0, 99))


@on_linkers
@given(case=LOOPS)
@settings(max_examples=12)
def test_generated_dims(linker, case):
    inputs, final, ys = case.built()
    expected_final, expected = case.run(*inputs.values())
    for variable, wanted in zip([final, *ys], [expected_final, *expected], strict=True):
        assert set(variable.type.dims) == set(wanted.dims)
    assert [y.type.dims.index("time") for y in ys[2:]] == [
        e.dims.index("time") for e in expected[2:]
    ]
    with using(linker) as mode:
        results = evaluate([final, *ys], inputs, mode)
    wanted = [
        named.aligned(variable.type.dims)
        for variable, named in zip([final, *ys], [expected_final, *expected], strict=True)
    ]
    assert_same(results, wanted)


@on_linkers
@given(case=LOOPS)
@settings(max_examples=4)
def test_gradients_of_generated_dims(linker, case):
    inputs, final, ys = case.built()

    def reference(*values):
        last, stacked = case.run(*values)
        return sum(np.sum(np.sin(named.array)) for named in [last, *stacked])

    assume(all(np.size(value) for value in inputs.values()))
    tensors = {
        pt.tensor(v.name, shape=v.type.shape, dtype="float64"): value for v, value in inputs.items()
    }
    cost = sum(pt.sin(v.values).sum() for v in [final, *ys])
    given_by_name = {
        v: px.as_xtensor(t, dims=v.type.dims) for v, t in zip(inputs, tensors, strict=True)
    }
    cost = clone_replace(cost, given_by_name)
    with using(linker) as mode:
        assert_derivatives(cost, tensors, reference, mode, rtol=1e-5)


def test_generators_that_draw_by_name():
    x = px.xtensor("x", dims=("chain", "time"))
    generator = shared_rng(np.random.default_rng(3), name="generator")
    after, draws = loop(lambda rng, row: rng.normal(row, 1.0), generator, x, dim="time")
    assert draws.type.dims == ("chain", "time")
    X = np.arange(6.0).reshape(2, 3)
    values = evaluate([draws], {x: X}, "FAST_COMPILE", updates={generator: after})
    assert_same(values, [X + np.random.default_rng(3).normal(size=(3, 2)).T])


def test_last_values_of_lags_by_name():
    x = px.xtensor("x", dims=("chain", "time"))
    for reverse in (False, True):
        final, _ = loop(
            lambda y, row: (y[1] + row, None), lags(x, 2), x, dim="time", reverse=reverse
        )
        assert final.rows.type.dims == ("chain", "time")
        assert final[1].type.dims == ("chain",)
        X = np.arange(4.0).reshape(2, 2)
        order = X[:, ::-1] if reverse else X
        totals = order[:, 1:] + order.cumsum(axis=1)
        rows = totals[:, ::-1] if reverse else totals
        with using("py"):
            values = evaluate([final.rows, final[1]], {x: X}, "FAST_COMPILE")
        assert_same(values, [rows, totals[:, -1]])
