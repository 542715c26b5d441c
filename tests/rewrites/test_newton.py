"""Loops solved for all their steps at once are the loops: values, derivatives, batches, failures."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.replace import vectorize_graph

import scanlib
from scanlib.ops.errors import ConvergenceError
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.loop import Loop
from scanlib.ops.newton_scan import NewtonScan
from scanlib.rewrites.newton.linearize import linearize
from tests.checks import assert_derivatives, assert_same, evaluate
from tests.reference import reference_scan

rng = np.random.default_rng(1)
D = 3
W = rng.normal(size=(D, D)) / 2
V = rng.normal(size=(D, D)) / 2


def library(*values):
    """Return what computes with arrays: symbols or numbers."""
    return pt if any(isinstance(v, pytensor.graph.basic.Variable) for v in values) else np


def number(x, h):
    xp = library(x, h)
    return [xp.tanh(0.9 * h + x)]


def recurrent(x, h, w):
    xp = library(x, h)
    return [xp.tanh(xp.dot(w, h) + x), (h * x).sum()]


def batch(x, h, w):
    xp = library(x, h)
    return [xp.tanh(xp.dot(h, w) + x)]


def columns(x, h, w):
    xp = library(x, h)
    return [xp.tanh(xp.dot(w, h) + x)]


def coupled(x, h, c):
    xp = library(x, h, c)
    new = c / (1 + xp.exp(-h)) + 0.5 * xp.tanh(h + x)
    return [xp.tanh(new) / (1 + xp.exp(-x - h)), new]


def dense_pair(x, h, c, w):
    xp = library(x, h, c)
    new = 0.5 * c + xp.tanh(xp.dot(w, h) + x)
    return [xp.tanh(new) * 0.5, new]


def lags(x, a, b, w):
    xp = library(x, a, b)
    return [xp.tanh(xp.dot(w, b) - 0.3 * a + x)]


def lags_of_numbers(x, a, b):
    xp = library(x, a, b)
    return [xp.sin(0.5 * b - 0.3 * a * b + x)]


def matrix(x, h, w):
    xp = library(x, h)
    return [xp.tanh(xp.dot(w, xp.dot(h, w)) + x)]


def mixed(x, h, s, w):
    """A vector and a number."""
    xp = library(x, h, s)
    return [xp.tanh(xp.dot(w, h) * s + x), 0.3 * xp.sin(s + h.sum())]


# name: step, rows of x, initial values, non-sequences; the Jacobian that is found.
CASES = {
    "number": (number, (), [0.3], [], "numbers"),
    "elementwise": (number, (2, D), [np.full((2, D), 0.2)], [], "numbers"),
    "recurrent": (recurrent, (D,), [np.full(D, 0.1), None], [W], "one matrix"),
    "batch": (batch, (2, D), [np.full((2, D), 0.2)], [W], "batch"),
    "columns": (columns, (D, 2), [np.full((D, 2), 0.2)], [W], "batch"),
    "coupled": (coupled, (D,), [np.zeros(D), np.ones(D)], [], "numbers"),
    "dense pair": (dense_pair, (2,), [np.zeros(2), np.ones(2)], [W[:2, :2]], "one matrix"),
    "lags": (
        lags,
        (D,),
        [{"initial": np.full((2, D), 0.3), "taps": [-2, -1]}],
        [W],
        "one matrix",
    ),
    "lags of numbers": (
        lags_of_numbers,
        (D,),
        [{"initial": np.full((3, D), 0.3), "taps": [-3, -1]}],
        [],
        "numbers",
    ),
    "matrix": (matrix, (D, D), [np.full((D, D), 0.1)], [W], "one matrix"),
    "mixed": (mixed, (D,), [np.zeros(D), np.asarray(0.1)], [W], "one matrix"),
}


def built(name, method, steps=9, dtype="float64", **options):
    """Return a case's loop with inputs, their values, and what the plain loop gives."""
    step, row, initial, rest, _ = CASES[name]
    values = [rng.normal(size=(steps, *row)), *rest]
    given = [np.asarray(v, dtype=dtype) for v in values]
    variables = [pt.TensorType(dtype, (None,) * v.ndim)() for v in given]

    def typed(spec):
        if isinstance(spec, dict):
            return spec | {"initial": np.asarray(spec["initial"], dtype=dtype)}
        return None if spec is None else np.asarray(spec, dtype=dtype)

    starts = [typed(spec) for spec in initial]
    results, _ = scanlib.scan(
        step, variables[0], starts, variables[1:], method=method, return_list=True, **options
    )
    rows = [(), dtype]
    types = [None if spec is not None else rows for spec in starts]
    expected = reference_scan(
        step, [given[0]], starts, given[1:], rows=types, go_backwards=options.get("go_backwards", 0)
    )
    return results, dict(zip(variables, given, strict=True)), expected


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loops(name, mode):
    results, inputs, expected = built(name, "newton")
    assert_same(evaluate(results, inputs, mode), expected)


@pytest.mark.parametrize("name", ["recurrent", "coupled", "batch"])
def test_short_loops(name, fast_mode):
    for steps in (1, 0):
        results, inputs, expected = built(name, "newton", steps)
        assert_same(evaluate(results, inputs, fast_mode), expected)


@pytest.mark.all_forms
@pytest.mark.parametrize("name", CASES)
def test_structure_of_the_jacobian(name):
    results, _, _ = built(name, "newton")
    (node,) = {v.owner for v in pytensor.graph.traversal.ancestors(results) if is_newton(v.owner)}
    found = linearize(Loop.from_op(node.op.scan, node.inputs), "auto")
    kind = "numbers" if found.elementwise else "batch" if found.axes else "one matrix"
    assert kind == CASES[name][-1]


def is_newton(node):
    return node is not None and isinstance(node.op, NewtonScan)
