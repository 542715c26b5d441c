"""The benchmark of loops that users write: its table, and loops that all libraries have."""

import numpy as np
import pytensor
import pytest

from benchmarks import user_loops
from benchmarks.model import load_library
from benchmarks.users import LOOPS
from tests.modes import MODES


@pytest.mark.all_forms
@pytest.mark.parametrize("name", LOOPS)
def test_all_loops_can_be_built(name):
    loop = LOOPS[name].make()
    graph = loop.graph(load_library("scanlib"))
    assert [x.type.dtype for x in graph.inputs] == [str(x.dtype) for x in loop.data()]
    assert LOOPS[name].title
    assert bool(graph.wrt) == loop.has_gradient
    if graph.wrt:
        pytensor.grad(graph.cost, list(graph.wrt), disconnected_inputs="ignore")


@pytest.mark.parametrize(
    "name", ["holt_winters", "poisson_counts", "heat", "q_learning", "leapfrog"]
)
def test_values_are_those_of_jax(name):
    pytest.importorskip("jax")
    loop, library = LOOPS[name].make(), load_library("scanlib")
    for gradient in (False, True):
        found = loop.compile(library, gradient, MODES["numba"])(*loop.data())
        assert user_loops.farthest(found, loop.compile_jax(gradient)(*loop.data())) < 1e-9


def test_table(capsys):
    pytest.importorskip("jax")
    names = ["threshold_ar", "edit_distance"]
    assert user_loops.main(["--rounds", "1", "--adopted", "--loops", *names]) == 0
    header, _, *rows = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert len(rows) == len(names)
    assert header.count("adopted / scanlib") == 2
    cells = [cell.strip() for cell in rows[0].strip("| ").split("|")]
    assert [cells[k] for k in (3, 5, 8, 10)] == ["yes"] * 4
    assert all(float(cells[k]) > 0 for k in (1, 2, 4, 6, 7, 9))


def test_what_does_not_agree():
    ones = np.ones(3)
    assert user_loops.farthest([ones], [ones]) == 0.0
    assert user_loops.farthest([ones], [ones * 1.5]) == pytest.approx(1 / 3)
    assert user_loops.farthest([ones, ones * np.nan], [ones, ones]) == np.inf
    assert user_loops.farthest([ones], [np.ones(4)]) == np.inf
