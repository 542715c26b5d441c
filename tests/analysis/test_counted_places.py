"""Index arrays that count through an axis, ``h[arange(n), i]``: rows, diagonals, whole arrays."""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from tests.checks import assert_same
from tests.modes import MODES
from tests.reference import reference_scan

N, T = 3, 4


def count_through(lib, array, axis):
    return lib.arange(array.shape[axis])


def put(lib, array, index, value, add=False):
    """Return an array with other items at an index."""
    if lib is pt:
        return (pt.inc_subtensor if add else pt.set_subtensor)(array[index], value)
    array = np.array(array)
    array[index] = array[index] + value if add else value
    return array


def first(lib, H):
    return count_through(lib, H, 0)


def second(lib, H):
    return count_through(lib, H, 1)


MATRICES = {
    "a diagonal set": lambda lib, H, x: put(lib, H, (first(lib, H), second(lib, H)), x),
    "a diagonal added to": lambda lib, H, x: put(lib, H, (first(lib, H), second(lib, H)), x, True),
    "a diagonal read": lambda lib, H, x: H * 0.5 + H[first(lib, H), second(lib, H)] * x,
    "a diagonal matrix": lambda lib, H, x: H * 0.5 + lib.diag(x * H[0]),
    "all rows": lambda lib, H, x: put(lib, H, (first(lib, H),), x * H),
    "all columns": lambda lib, H, x: put(lib, H, (slice(None), second(lib, H)), x, True),
    "all items": lambda lib, H, x: put(lib, H, (first(lib, H)[:, None], second(lib, H)), x * H),
    "all items, transposed": lambda lib, H, x: put(
        lib, H, (first(lib, H), second(lib, H)[:, None]), x * H.T, True
    ),
}


@pytest.mark.parametrize("recurrent", [True, False])
@pytest.mark.parametrize("name", MATRICES)
def test_matrices(name, recurrent):
    step = MATRICES[name]
    rng = np.random.default_rng(0)
    x, H = pt.dmatrix("x"), pt.dtensor3("H") if not recurrent else pt.dmatrix("H")
    values = [rng.normal(size=(T, N)), rng.normal(size=(N, N) if recurrent else (T, N, N))]
    sequences, initials = ([x], [H]) if recurrent else ([x, H], [None])
    trace = scanlib.scan(lambda x, H: step(pt, H, x), sequences, initials, return_updates=False)
    function = pytensor.function([x, H], trace, mode=MODES["c"])
    expected = reference_scan(
        lambda x, H: [step(np, H, x)],
        values[:1] if recurrent else values,
        values[1:] if recurrent else [None],
    )
    assert_same([function(*values)], expected)


@pytest.mark.parametrize("what", ["set", "added to", "read"])
@pytest.mark.parametrize("leading", [False, True])
def test_a_diagonal_at_a_place(leading, what):
    """``H[c, c, k]`` for all `c`: two axes are counted together, and one is read at a place."""
    x, k, H = pt.dmatrix("x"), pt.lvector("k"), pt.tensor("H", dtype="float64", shape=(N, N, N))

    def step(lib, x, k, H):
        counted = lib.arange(N)
        place = (k, counted, counted) if leading else (counted, counted, k)
        if what == "read":
            return [H * 0.5, H[place] * x]
        return [put(lib, H, place, x, what == "added to")]

    initials = [H, None] if what == "read" else [H]
    traces = scanlib.scan(
        lambda *args: step(pt, *args), [x, k], initials, return_updates=False, return_list=True
    )
    function = pytensor.function([x, k, H], traces, mode=MODES["c"])
    rng = np.random.default_rng(0)
    values = rng.normal(size=(T, N)), np.array([0, 2, -2, 2]), rng.normal(size=(N, N, N))
    initials[0] = values[2]
    expected = reference_scan(lambda *a: step(np, *a), values[:2], initials)
    assert_same(function(*values), expected)


@pytest.mark.parametrize("add", [False, True])
def test_a_whole_vector(add):
    x, h = pt.dvector("x"), pt.dvector("h")
    trace = scanlib.scan(
        lambda x, h: put(pt, h, first(pt, h), h * x, add), x, h, return_updates=False
    )
    function = pytensor.function([x, h], trace, mode=MODES["c"])
    values = np.array([0.5, 2.0, -1.0]), np.array([1.0, 2.0])
    expected = reference_scan(lambda x, h: [h * x + add * h], values[:1], values[1:])
    assert_same([function(*values)], expected)
