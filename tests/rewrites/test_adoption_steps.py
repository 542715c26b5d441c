"""Adopted loops whose steps PyTensor's types, modes or numbers of steps say too little about."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.compile.mode import Mode
from pytensor.raise_op import assert_op

import scanlib
from scanlib.ops.errors import SequenceLengthError
from tests.modes import MODES

ADOPTING = {name: mode.including("scanlib_adopt") for name, mode in MODES.items()}


@pytest.mark.parametrize("shape", [(5, 2), (None, None)], ids=str)
@pytest.mark.parametrize("mode", ["numba", "py"])
def test_a_factor_with_fewer_rows_than_its_type_has(mode, shape):
    """PyTensor's QR returns m rows in Python and min(m, n) in numba, and always says m."""
    a = pt.tensor("a", shape=shape, dtype="float64")
    rows = pt.dtensor3("rows")

    def step(row, total, a):
        factor = pt.linalg.qr(a + row, mode="r")
        return total + abs(factor[:2, :2]), abs(factor).sum()

    totals, sums = pytensor.scan(
        step,
        sequences=rows,
        outputs_info=[pt.zeros((2, 2)), None],
        non_sequences=a,
        return_updates=False,
    )
    f = pytensor.function([rows, a], [totals, sums], mode=ADOPTING[mode])
    rng = np.random.default_rng(3)
    for size in [(5, 2), (2, 5)] if shape[0] is None else [shape]:
        value, steps = rng.normal(size=size), rng.normal(size=(4, *size))
        total, wanted = np.zeros((2, 2)), []
        for row in steps:
            factor = np.linalg.qr(value + row, mode="r")
            total = total + abs(factor[:2, :2])
            wanted.append((total, abs(factor).sum()))
        found = f(steps, value)
        for own, values in zip(found, zip(*wanted, strict=True), strict=True):
            np.testing.assert_allclose(own, np.array(values), rtol=1e-12)


def test_a_raw_factor():
    """Its shapes are not known, so the loop stays."""
    rows = pt.tensor("rows", shape=(2, 4, 3), dtype="float64")
    out = pytensor.scan(
        lambda row: pt.linalg.qr(row, mode="raw")[2].sum(), sequences=rows, return_updates=False
    )
    (loop,) = scanlib.explain(out, ADOPTING["py"]).adoption
    assert "QR" in loop.reason


def test_rewrites_that_the_mode_of_a_loop_names():
    """They are run on the step, as PyTensor does; so a loop may leave out its assertions."""
    x = pt.dvector("x")

    def build(mode):
        return pytensor.scan(
            lambda x, y: 0.5 * y + assert_op(x, x > 0),
            sequences=x,
            outputs_info=pt.zeros(()),
            mode=mode,
            return_updates=False,
        )

    unchecked = Mode().including("local_remove_all_assert")
    f = pytensor.function([x], build(unchecked), mode=ADOPTING["py"])
    np.testing.assert_allclose(f([-1.0, 2.0]), [-1.0, 1.5])
    for mode in (None, "FAST_RUN", MODES["c"]):
        with pytest.raises(AssertionError):
            pytensor.function([x], build(mode), mode=ADOPTING["py"])([-1.0, 2.0])


@pytest.mark.parametrize("taps", [[-1], [-2, -1]], ids=str)
def test_a_draw_from_a_state_beside_another_state(taps):
    """A generator has no dtype, which the search for linear recurrences stumbled over."""
    rng = pytensor.shared(np.random.default_rng(5))
    first = np.array([0.25] * len(taps))

    def step(*args):
        mean, *values, rng = args
        total = mean + sum(values)
        return total + 1, pt.random.normal(total, 1.0, rng=rng, return_next_rng=True)[1]

    initial = pt.constant(first if len(taps) > 1 else first[0])
    outputs = pytensor.scan(
        step,
        outputs_info=[pt.zeros(()), {"initial": initial, "taps": taps}],
        non_sequences=rng,
        n_steps=4,
        return_updates=False,
    )
    means, drawn = pytensor.function([], outputs, mode=ADOPTING["c"])()
    mean, values = 0.0, list(first)
    for found_mean, found in zip(means, drawn, strict=True):
        total = sum(values[-len(taps) :])
        # The generator is not advanced: each step draws the same number.
        values.append(np.random.default_rng(5).normal(mean + total, 1.0))
        mean = mean + total + 1
        np.testing.assert_allclose([found_mean, found], [mean, values[-1]])


def test_a_sequence_that_is_known_to_be_too_short():
    """Nothing fails before the error that says so, though two numbers of steps are known."""
    x, y = (pt.tensor(name, shape=(1, 2), dtype="float64") for name in "xy")
    n = pt.iscalar("n")
    h = pytensor.scan(
        lambda x, y, h: pt.tanh(h) + x,
        sequences=[x, y],
        outputs_info=pt.zeros(2),
        n_steps=pt.switch(pt.eq(n, n), 10, n),  # PyTensor finds out later that it is ten
        return_updates=False,
    )
    f = pytensor.function(
        [x, y, n], h.owner.inputs[0], mode=ADOPTING["c"], on_unused_input="ignore"
    )
    ones = np.ones((1, 2))
    with pytest.raises(SequenceLengthError, match=r"gives (1|\{\}) rows"):
        f(ones, ones, 10)


@pytest.mark.parametrize("mode", ADOPTING)
@pytest.mark.parametrize("factor", [1.0, 0.9])
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_gradient_of_an_extreme(shape, factor, mode):
    """PyTensor's compares the values that the forward loop kept with what they may be."""
    x, a = pt.tensor("x", shape=(None, *shape)), pt.tensor("a", shape=shape)
    y = pytensor.scan(
        lambda x, h, a: pt.maximum(factor * h + a, x),
        sequences=x,
        outputs_info=[pt.full(shape, 0.3)],
        non_sequences=a,
        return_updates=False,
    )
    f = pytensor.function([x, a], [y, pytensor.grad(y.sum(), a)], mode=ADOPTING[mode])
    rng = np.random.default_rng(3)
    rows, added = rng.random((200, *shape)) * 20, np.full(shape, 0.1) + 0.01 * rng.random(shape)
    h, slope = np.full(shape, 0.3), np.zeros(shape)
    values, slopes = [], []
    for row in rows:
        slope = np.where(factor * h + added > row, factor * slope + 1, 0)
        h = np.maximum(factor * h + added, row)
        values.append(h)
        slopes.append(slope)
    found, gradient = f(rows, added)
    np.testing.assert_allclose(found, values, rtol=1e-12)
    np.testing.assert_allclose(gradient, np.sum(slopes, axis=0), rtol=1e-12)
