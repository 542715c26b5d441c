"""Matrix recurrences whose matrix no step computes: products of what it multiplies one by one."""

import pickle

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.ops.lowered.checked_linear import CheckedLinearScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan
from tests.modes import MODES
from tests.reference import reference_scan

STEPS = {
    "scaled": lambda x, h, A, w: (A @ h) * w + x,
    "scaled before": lambda x, h, A, w: A @ (h * w) + x,
    "scaled at each step": lambda x, h, A, w: (A @ h) * x + w,
    "divided": lambda x, h, A, w: (A @ h) / w + x,
    "two products": lambda x, h, A, w: A @ (A @ h) + x * w,
}
COMPUTED = {
    "product": lambda x, h, A, w: A @ h + x * w,
    "scaled matrix": lambda x, h, A, w: (A * w) @ h + x,
    "difference": lambda x, h, A, w: x - A @ h + 0 * w,
}
# The size of items of the matrix, of the factors, and of the first state.
SIZES = [(1e200, 1e200, 1e-250), (1e-200, 1e-200, 1e300), (1e300, 1e-300, 1e10), (1.0, 1.0, 1.0)]


def recurrences(function):
    nodes = function.maker.fgraph.apply_nodes
    return [type(node.op) for node in nodes if isinstance(node.op, LinearScan | Scan)]


def variables(size):
    """Matrices for each step are worth making where they are known to be small."""
    shapes = {"x": (None, size), "h": (size,), "A": (size, size), "w": (size,)}
    return [pt.tensor(name, shape=shape, dtype="float64") for name, shape in shapes.items()]


def compiled(step, mode, size):
    x, h, A, w = variables(size)
    trace = scanlib.scan(step, x, h, [A, w], return_updates=False)
    return pytensor.function([x, h, A, w], trace, mode=MODES[mode], on_unused_input="ignore")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["numba", "c"])
@pytest.mark.parametrize("name", STEPS)
def test_products_that_overflow_or_vanish(name, mode):
    step = STEPS[name]
    function = compiled(step, mode, 3)
    assert recurrences(function) == [CheckedLinearScan]
    rng = np.random.default_rng(3)
    for matrix, factor, start in SIZES:
        A, w = rng.uniform(0.1, 0.3, (3, 3)) * matrix, rng.uniform(0.5, 1.0, 3) * factor
        first = rng.uniform(0.5, 1.0, 3) * start
        for steps in (0, 1, 9):
            x = rng.uniform(0.5, 1.0, (steps, 3)) * (factor if "each" in name else 1.0)
            with np.errstate(all="ignore"):
                (expected,) = reference_scan(lambda *v: [step(*v)], [x], [first], [A, w])
            np.testing.assert_allclose(function(x, first, A, w), expected, rtol=1e-11)


@pytest.mark.parametrize("name", STEPS)
def test_infinite_and_missing_factors(name):
    step = STEPS[name]
    function = compiled(step, "numba", 2)
    A, x, first = np.array([[0.5, 0.0], [0.25, 0.5]]), np.ones((5, 2)), np.array([1.0, 2.0])
    for special in (np.inf, -np.inf, np.nan, 0.0):
        w = np.array([special, 0.5])
        x[3, 1] = special
        with np.errstate(all="ignore"):
            (expected,) = reference_scan(lambda *v: [step(*v)], [x], [first], [A, w])
        np.testing.assert_allclose(function(x, first, A, w), expected, rtol=1e-11)


@pytest.mark.parametrize("mode", ["numba", "c"])
@pytest.mark.parametrize("name", ["scaled", "divided"])
def test_the_last_row_needs_no_history(name, mode):
    step = STEPS[name]
    x, h, A, w = variables(3)
    last = scanlib.scan(step, x, h, [A, w], return_updates=False)[-1]
    function = pytensor.function([x, h, A, w], last, mode=MODES[mode])
    (op,) = (n.op for n in function.maker.fgraph.apply_nodes if isinstance(n.op, LinearScan))
    assert isinstance(op, CheckedLinearScan)
    assert op.untraced
    assert op.exact.signature.untraced == (True,)
    rng = np.random.default_rng(5)
    for matrix, factor, start in SIZES:
        A, w = rng.uniform(0.1, 0.3, (3, 3)) * matrix, rng.uniform(0.5, 1.0, 3) * factor
        first = rng.uniform(0.5, 1.0, 3) * start
        for steps in (1, 2, 8, 9):
            x = rng.uniform(0.5, 1.0, (steps, 3))
            with np.errstate(all="ignore"):
                (expected,) = reference_scan(lambda *v: [step(*v)], [x], [first], [A, w])
            np.testing.assert_allclose(function(x, first, A, w), expected[-1], rtol=1e-11)


def test_the_op_is_a_value():
    """A loop beside the recurrence is part of what the Op is, but not of its name."""
    nodes = compiled(STEPS["scaled"], "numba", 3).maker.fgraph.apply_nodes
    (op,) = (node.op for node in nodes if isinstance(node.op, CheckedLinearScan))
    same = pickle.loads(pickle.dumps(op))
    assert same == op
    assert hash(same) == hash(op)
    assert str(op) == "CheckedLinearScan{real, fixed, left}"


@pytest.mark.parametrize("name", COMPUTED)
def test_matrices_that_a_step_computes_are_not_checked(name):
    assert recurrences(compiled(COMPUTED[name], "numba", 3)) == [LinearScan]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["scaled", "scaled at each step"])
def test_gradients(name):
    """Cotangents are multiplied by the same factors, the other way round."""
    x, h, A, w = given = variables(3)
    trace = scanlib.scan(STEPS[name], x, h, [A, w], return_updates=False)
    wanted = pytensor.grad((trace**2).sum(), given)
    function = pytensor.function(given, wanted, mode=MODES["numba"])
    assert recurrences(function) == [CheckedLinearScan] * 2
    off = {f"scanlib__{name}": False for name in ("lower", "linear", "split", "simplify")}
    with pytensor.config.change_flags(scanlib__perform="python", **off):
        plain = pytensor.function(given, wanted, mode=MODES["py"])
    rng = np.random.default_rng(4)
    for factor, start in ((1.0, 1.0), (1e-160, 1e150), (1e160, 1e-150)):
        values = [
            rng.uniform(0.5, 1.0, (6, 3)) * (factor if "each" in name else start),
            rng.uniform(0.5, 1.0, 3) * start,
            rng.uniform(0.1, 0.3, (3, 3)) / factor,
            rng.uniform(0.5, 1.0, 3) * (start if "each" in name else factor),
        ]
        with pytensor.config.change_flags(scanlib__perform="python"):
            expected = plain(*values)
        for actual, wanted_value in zip(function(*values), expected, strict=True):
            np.testing.assert_allclose(actual, wanted_value, rtol=1e-9)
