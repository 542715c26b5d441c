"""Variables of a PyMC model that a step makes, which the model would have once for all steps."""

import re

import numpy as np
import pytensor
import pytest

import scanlib

# PyMC changes the flags of all C code; other tests' code would be compiled once more for it.
flags = pytensor.config.gcc__cxxflags
pm = pytest.importorskip("pymc")
pytensor.config.gcc__cxxflags = flags

pytestmark = pytest.mark.filterwarnings("ignore")
DATA = np.arange(3.0)


def draw(row, last, scale):
    return pm.Normal("made", last, scale)


def observe(row, last, scale):
    pm.Normal("made", last, scale, observed=row)
    return row


def keep(row, last, scale):
    return pm.Deterministic("made", 0.5 * last + row)


def add(row, last, scale):
    pm.Potential("made", last - row)
    return row


@pytest.mark.all_forms
@pytest.mark.parametrize(
    "step, advice",
    [
        (draw, "pass it as a sequence"),
        (observe, "make it after the loop"),
        (keep, "pass the loop's result to pm.Deterministic"),
        (add, "pass the loop's result to pm.Potential"),
    ],
)
@pytest.mark.parametrize("initial", [0.0, np.float32(0.0)])  # the second is traced twice
def test_named_in_a_step(step, advice, initial):
    said = "scan `walk`: the step makes `made`, a variable of the PyMC model.*" + re.escape(advice)
    with pm.Model():
        scale = pm.HalfNormal("scale")
        with pytest.raises(ValueError, match=said) as raised:
            scanlib.scan(step, DATA, initial, scale, name="walk")
    assert not hasattr(raised.value, "__notes__")


def test_named_in_a_step_of_loop():
    with pm.Model():
        scale = pm.HalfNormal("scale")
        with pytest.raises(ValueError, match="loop: the step makes `made`"):
            scanlib.loop(lambda last, row: (keep(row, last, scale), row), 0.0, DATA)


def test_data_made_in_a_step():
    with pm.Model():
        scale = pm.HalfNormal("scale")

        def step(row, last):
            return scale * last + row * pm.Data("weight", 2.0)

        path = scanlib.scan(step, DATA, np.float64(1.0), return_updates=False)
        pm.Deterministic("path", path)
    drawn, rows = pm.draw([scale, path], random_seed=1)
    last, expected = 1.0, []
    for row in DATA:
        last = drawn * last + 2.0 * row
        expected.append(last)
    np.testing.assert_allclose(rows, expected)
