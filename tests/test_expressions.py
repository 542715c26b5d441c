"""Scalar code as few statements: the same numbers, whatever their types."""

import itertools

import numpy as np
import pytest
from numba import njit

from scanlib.backends.numba import expressions
from scanlib.backends.numba.scalar import divide
from scanlib.backends.numba.vectors import multiply_add

CASTS = {f"np_{np.dtype(kind).name}": kind for kind in (np.float64, np.float32, np.int8, np.bool_)}


def functions(lines):
    """Return the functions of some lines, as they are and with few statements, and those lines."""
    names = {**CASTS, "divide": divide, "multiply_add": multiply_add, "np": np}

    def register(structure, function):
        name = f"x{len(names)}"
        names[name] = function
        return name

    short = expressions.compact(["    " + line for line in lines], register)
    made = []
    for body in (["    " + line for line in lines], short):
        scope = dict(names)
        exec("\n".join(["def f(a, b, c, v):", *body]), scope)
        made.append(njit(scope["f"], error_model="numpy"))
    return (*made, [line.strip() for line in short])


CASES = {
    "sums and products": ["s1 = np_float64(a * b)", "s2 = np_float64(s1 - c)", "return s2 + 1"],
    "read twice": ["s1 = np_float64(a * b)", "s2 = np_float64(s1 * s1 + c)", "return s2"],
    "choice": ["s1 = np_float64((a if b < c else -c))", "return s1"],
    "comparisons": [
        "s1 = np_bool((a < b) | (a >= c))",
        "s2 = np_bool((a == b) | (b != c))",
        "s3 = np_bool(s1 & s2)",
        "return s3, np_float64(s1 + s2)",
    ],
    "quotient": [
        "s1 = np_float64(a + 0.0 * b)",
        "s2 = np_float64(divide(s1, s1 - s1))",
        "return s2",
    ],
    "fused": ["s1 = np_float64(multiply_add(a * 1.0, b * 1.0, c * 1.0))", "return s1"],
    "rounding": ["s1 = np_float32(a * b)", "s2 = np_float64(s1 + c)", "return s2"],
    "items": ["s1 = np_float64(v[0] * a)", "v[0] = np_float64(s1 + v[1])", "return v[0]"],
    "changed on the way": [
        "d = np_float64(a + b)",
        "s1 = np_float64(d * 2.0)",
        "d = np_float64(d * c + s1)",
        "s2 = np_float64(s1 + d)",
        "return s2",
    ],
    "changed before it is read": [
        "d = np_float64(a)",
        "s1 = np_float64(d * 2.0 + a)",
        "d = np_float64(b * c)",
        "s2 = np_float64(s1 + d)",
        "return s2",
    ],
    "stored on the way": [
        "s1 = np_float64(v[0] * a + b)",
        "v[0] = np_float64(a * c + b)",
        "s2 = np_float64(s1 + v[0])",
        "return s2",
    ],
}
NUMBERS = [0.5, -3, np.nan, np.inf, 2**40, True, np.float32(0.1), np.int8(100)]


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_the_same(name):
    plain, short, _ = functions(CASES[name])
    for a, b, c in list(itertools.product(NUMBERS, repeat=3))[:: 7 if name == "choice" else 31]:
        results = [f(a, b, c, np.array([1.5, -2.5])) for f in (plain, short)]
        np.testing.assert_array_equal(*results)
        assert type(results[0]) is type(results[1])


def test_what_is_read_once_is_one_statement():
    *_, short = functions(CASES["sums and products"])
    assert len(short) == 2
    *_, short = functions(CASES["comparisons"])
    assert len(short) == 4  # both comparisons are read twice


def test_other_code_stays_as_it_is():
    lines = [
        "n = a.shape[0] - 1",
        "s1 = np_float64(f(a) + 1)",
        "s2 = np_float64((a[j] if j < n else 0.0))",
        "s3 = np_float64(a // b + c)",
        "for j in range(n):",
        "    total += a[j]",
        "return total",
    ]
    assert expressions.compact(lines, lambda structure, function: "wrong") == lines
