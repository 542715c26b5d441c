"""Statements of scalar code that are compiled as one function give what Python gives."""

import ast

import numpy as np
import pytest
from numba import njit
from numpy.testing import assert_array_equal

from scanlib.backends.numba.statements import joined

LOOPS = """
def run(a, b, h, n):
    total = 0.0
    k = 0
    for j in range(n):
        s1 = a[j]
        if s1 < b:
            s2 = s1 * b
        else:
            s2 = b - s1
        h[j] = s2
        total = total + s2
    while k + 2 <= n:
        h[k], last = total, h[k + 1]
        k += 2
    return total, k
""".replace(
    "        h[k], last = total, h[k + 1]\n", "        last = h[k + 1]\n        h[k] = last\n"
)

MANY = "\n".join(
    [
        f"def run({', '.join(f'x{i}' for i in range(40))}):",
        *(f"    y{i} = x{i} + x{(i + 1) % 40}" for i in range(40)),
        f"    return {' + '.join(f'y{i} * {i}' for i in range(40))}",
    ]
)

ROWS = """
def run(table, j):
    row = table[j]
    first = row[0]
    return row, first + row[-1]
"""


def compiled(text):
    """Return a function of a text with its statements joined, and Python's own."""
    known, own = {"np": np}, {"np": np}
    exec(text, own)

    def register(function):
        name = f"statements{len(known)}"
        known[name] = function
        return name

    short = joined(text, known, {}, register)
    assert len(known) > 1
    ast.parse(short)
    exec(short, known)
    return njit(known["run"]), own["run"]


def test_loops_and_choices():
    ours, python = compiled(LOOPS)
    a = np.random.default_rng(0).normal(size=7)
    one, two = np.zeros(7), np.zeros(7)
    assert ours(a, 0.3, one, 7) == python(a, 0.3, two, 7)
    assert_array_equal(one, two)
    assert ours(a, 0.3, one, 0) == (0.0, 0)


def test_many_arguments_and_results():
    ours, python = compiled(MANY)
    numbers = [float(i) for i in range(40)]
    assert ours(*numbers) == python(*numbers)


@pytest.mark.parametrize("j", [0, -1])
def test_rows_are_views_that_their_array_holds(j):
    ours, python = compiled(ROWS)
    table = np.arange(6.0).reshape(2, 3)
    for one, two in zip(ours(table, j), python(table, j), strict=True):
        assert_array_equal(one, two)


ROUNDED = """
def run(a, h, n):
    for j in range(n):
        h[j] = np_float64(rounded(a[j]) + a[j])
    return h
"""


def test_functions_with_arguments_left_out():
    """``np.round`` has more arguments than it is given: numba calls it, not the statements."""
    known, own = ({"np_float64": np.float64, "rounded": np.round} for _ in range(2))
    exec(ROUNDED, own)

    def register(function):
        known["statements"] = function
        return "statements"

    exec(joined(ROUNDED, known, {}, register), known)
    assert "statements" in known
    values = np.array([-2.5, -0.5, 0.5, 1.5, 2.6])
    assert_array_equal(
        njit(known["run"])(values, np.empty(5), 5), own["run"](values, np.empty(5), 5)
    )
