"""Kernels in which the small sizes of a call are known numbers, and those for all sizes."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest

import scanlib
from scanlib.backends.handler import programs
from scanlib.backends.handler.programs import MOST_VARIANTS
from tests.modes import MODES

rng = np.random.default_rng(3)
T = 4


def step(x, h, W, m=np):
    moved = m.concatenate([h[1:], x[:1]]) - h
    return m.tanh(W @ h + x - x.mean()) + 0.1 * moved * (h**2).sum()


def function(name, mode="numba"):
    """Return a loop over arrays of any sizes, with the gradient of its sum of squares; programs are
    known by the names of loops."""
    x, h, W = pt.dmatrix("x"), pt.dvector("h"), pt.dmatrix("W")
    y = scanlib.scan(
        lambda *values: step(*values, pt), [x], [h], [W], return_updates=False, name=name
    )
    gradients = pytensor.grad((y**2).sum(), [x, h, W])
    return pytensor.function([x, h, W], [y, *gradients], mode=MODES[mode])


def values(n):
    return rng.normal(size=(T, n)), rng.normal(size=n), rng.normal(size=(n, n)) / max(n, 1) ** 0.5


def cost(x, h, W):
    found = []
    for row in x:
        h = step(row, h, W)
        found.append(h)
    return np.reshape(found, x.shape)


def described(name):
    """Return what C knows of the programs of loops of a name."""
    return [
        programs._described[key]
        for key, program in programs._programs.items()
        if program.name == name and program.free_sizes and key in programs._described
    ]


@pytest.mark.parametrize("mode", ["numba", "c"])
@pytest.mark.all_forms
def test_values(mode):
    f, name = function(f"variants_{mode}", mode), f"variants_{mode}"
    (own,) = described(name)
    assert (own.n_variants, own.prepare) == (0, 0)
    found = {}
    for n in (5, 3, 5, 40, 2, 1, 9, 32, 4, 33, 3, 40, 0):
        rows, first, matrix = found.setdefault(n, values(n))
        y, gx, _, _ = f(rows, first, matrix)
        if n == 5 and len(found) == 1:
            assert (own.n_variants, own.prepare) == (1, 0)  # no kernels for all sizes
        np.testing.assert_allclose(y, cost(rows, first, matrix), rtol=1e-10, atol=1e-12)
        if n:
            d = 1e-6 * rng.normal(size=rows.shape)
            ends = [(cost(rows + k * d, first, matrix) ** 2).sum() for k in (1, -1)]
            np.testing.assert_allclose((gx * d).sum(), (ends[0] - ends[1]) / 2, rtol=1e-5)
    assert own.n_variants == MOST_VARIANTS
    assert own.prepare


def test_bits_are_those_of_the_sizes():
    f, given = function("bits"), [values(n) for n in (3, 5, 7)]
    before = [f(*one) for one in given]
    for one, wanted in reversed([*zip(given, before, strict=True)]):
        for a, b in zip(f(*one), wanted, strict=True):
            np.testing.assert_array_equal(a, b)


def test_threads_share_variants():
    f, given = function("threads").copy(), [values(n) for n in (3, 5, 7, 9, 11, 3, 40, 5)]
    copies = [f.copy(share_memory=False) for _ in given]
    with ThreadPoolExecutor(len(given)) as pool:
        found = [*pool.map(lambda pair: pair[0](*pair[1]), zip(copies, given, strict=True))]
    for (y, *_), one in zip(found, given, strict=True):
        np.testing.assert_allclose(y, cost(*one), rtol=1e-10)
    assert described("threads")[0].n_variants == MOST_VARIANTS


@pytest.mark.parametrize("mode", ["numba", "c"])
def test_sizes_that_do_not_fit(mode):
    """They raise what they raise of arrays of other sizes, also after those that do."""
    x, h = pt.dmatrix("x"), pt.dvector("h")
    loops = {
        "added": lambda x, h: pt.tanh(x + h[::-1]),
        "other": lambda x, h: 2 * x + h.sum(),
        "item": lambda x, h: h[4] * x,
        "join": lambda x, h: pt.concatenate([x, h])[:3] * 0.5,
    }
    for name, loop in loops.items():
        y = scanlib.scan(loop, [x], [h], return_updates=False, name=f"unfit_{name}")
        messages = []
        for shift in (0, 100):
            f = pytensor.function([x, h], y, mode=MODES[mode])
            with pytest.raises((ValueError, IndexError)) as error:
                f(np.ones((T, 2 + shift)), np.ones(4 + shift * (name != "item")))
            lines = str(error.value).splitlines()
            messages.append((error.type, lines[0].replace("102", "2").replace("104", "4")))
        assert messages[0] == messages[1]
    y = scanlib.scan(loops["added"], [x], [h], return_updates=False)
    f = pytensor.function([x, h], y, mode=MODES[mode])
    assert f(np.ones((0, 2)), np.ones(4)).shape == (0, 4)


@pytest.mark.parametrize("mode", ["numba", "c"])
def test_loops_that_stop(mode):
    x, h = pt.dmatrix("x"), pt.dvector("h")
    y = scanlib.scan(
        lambda x, h: (h[::-1] + x, scanlib.until(h.sum() > 300)), [x], [h], return_updates=False
    )
    f = pytensor.function([x, h], y, mode=MODES[mode])
    for n in (2, 3, 50):
        sums = n * np.arange(500.0)
        taken = int(np.argmax(sums > 300)) + 1
        wanted = np.broadcast_to(np.arange(1.0, taken + 1)[:, None], (taken, n))
        np.testing.assert_array_equal(f(np.ones((500, n)), np.zeros(n)), wanted)


def test_inner_loops():
    """They are given the sizes of the step around, and those that fit nothing fail as others do."""
    x, h, W = pt.dmatrix("x"), pt.dvector("h"), pt.dmatrix("W")

    def step(x, h, W):
        moves = scanlib.scan(
            lambda z: 0.9 * z[::-1] + pt.tanh(W @ z + x), None, [h], n_steps=3, return_updates=False
        )
        return moves[-1]

    y = scanlib.scan(step, [x], [h], [W], return_updates=False)
    f = pytensor.function([x, h, W], y)
    for n in (3, 2, 40, 5, 1):
        rows, last, matrix = values(n)
        found = f(rows, last, matrix)
        for row, state in zip(rows, found, strict=True):
            for _ in range(3):
                last = 0.9 * last[::-1] + np.tanh(matrix @ last + row)
            np.testing.assert_allclose(state, last, rtol=1e-10)
    for n in (4, 50):
        with pytest.raises(ValueError, match=f"{n + 1}"):
            f(np.ones((T, n)), np.ones(n + 1), np.ones((n, n)))
