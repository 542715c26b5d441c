"""Random loops against the plain Python loop: values, gradients, untouched inputs.

Every loop is rendered twice from one description, see `tests.loops`. Examples come in shards of
fixed seeds, so that workers share them and a failure names one.

A loop runs in one of two ways wherever it is not part of a numba function: ``perform`` compiles
it, or walks it in plain Python. The first is what users get and costs seconds of compilation;
the second costs none, so that it is the one to see most of the examples.
"""

from collections.abc import Callable

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import assume

import scanlib
from tests.checks import assert_same
from tests.derivatives import moved, random_directions
from tests.exploration import MARGIN, explore, half
from tests.loops import LoopCase
from tests.modes import MODES
from tests.strategies import DIFFERENTIABLE, loops, with_inputs_only

SINGLE, DOUBLE = 3e-4, 1e-8
FLOAT_LOOPS = loops(dtypes=DIFFERENTIABLE)


def compiled(inputs: dict, outputs: list, linker: str, perform: str) -> Callable:
    """Compile a function of the given variables; return it bound to copies of their values."""
    with pytensor.config.change_flags(scanlib__perform=perform):  # constants are folded here
        function = pytensor.function(
            list(inputs), outputs, mode=MODES[linker], on_unused_input="ignore"
        )

    def call() -> list[np.ndarray]:
        arrays = [np.array(value) for value in inputs.values()]
        with pytensor.config.change_flags(scanlib__perform=perform):
            results = function(*arrays)
        for variable, array, value in zip(inputs, arrays, inputs.values(), strict=True):
            assert array.tobytes() == np.asarray(value).tobytes(), f"{variable} was changed"
        return results

    return call


def assert_values(case: LoopCase, *linkers: tuple[str, str]) -> None:
    """Compare the values of a loop under each (linker, way to perform the loop)."""
    values = case.values()
    expected, record = case.reference(values)
    assume(record.margin > MARGIN)
    loop = case.render(scanlib.scan, scanlib.until, values)
    assert not loop.updates
    shared = {k: v for k, v in loop.variables.items() if hasattr(v, "get_value")}
    single = "float32" in {o.dtype for o in case.operands} | {e.dtype for e in case.bodies}
    for linker, perform in linkers:
        call = compiled(loop.inputs, loop.traces, linker, perform)
        for _ in range(2):  # twice: what the first call leaves behind must not show
            results = call()
            assert len(results) == len(expected)
            for k, (actual, wanted) in enumerate(zip(results, expected, strict=True)):
                exact = wanted.dtype.kind in "bi"
                tolerance = 0.0 if exact else SINGLE if single else DOUBLE
                assert_same([actual], [wanted], rtol=tolerance, atol=tolerance)
                assert actual.flags.writeable, f"output {k} must belong to the caller"
        for name, variable in shared.items():
            assert variable.get_value().tobytes() == values[name].tobytes(), f"{name} was changed"


def assert_gradients(case: LoopCase, *linkers: tuple[str, str]) -> None:
    """Compare the gradient of a weighted sum of all float outputs with central differences."""
    case = with_inputs_only(case)
    values = case.values()
    results, record = case.reference(values)
    rng = np.random.default_rng(case.seed)
    weights = {k: rng.normal(size=r.shape) for k, r in enumerate(results) if r.dtype == "float64"}
    names = [name for name, value in values.items() if value.dtype == "float64"]
    assume(weights and names)
    assume(record.margin > MARGIN)

    def weighted(outputs: list[np.ndarray]) -> float:
        return sum(float(np.sum(outputs[k] * weight)) for k, weight in weights.items())

    loop = case.render(scanlib.scan, scanlib.until, values)
    cost = sum(pt.sum(loop.traces[k] * weight) for k, weight in weights.items())
    wrt = [loop.variables[name] for name in names]
    gradient = pytensor.grad(cost, wrt, disconnected_inputs="ignore")

    step, points = 1e-6, [values[name] for name in names]
    expected, directions = [], random_directions(points, case.seed)
    for k, _ in enumerate(names):
        direction = [d if j == k else np.zeros_like(d) for j, d in enumerate(directions)]
        sides = []
        for scale in (step, -step):
            point = dict(zip(names, moved(points, (scale, direction)), strict=True))
            outputs, side = case.reference(values | point)
            assume(side.decisions == record.decisions)  # no kink or jump in between
            sides.append(weighted(outputs))
        expected.append((sides[0] - sides[1]) / (2 * step))

    for linker, perform in linkers:
        computed, *gradients = compiled(loop.inputs, [cost, *gradient], linker, perform)()
        np.testing.assert_allclose(computed, weighted(results), rtol=1e-8, atol=1e-10)
        for name, g, d, wanted in zip(names, gradients, directions, expected, strict=True):
            assert g.shape == values[name].shape, f"gradient of {name}: shape"
            np.testing.assert_allclose(
                np.sum(g * d), wanted, rtol=1e-5, atol=1e-6, err_msg=f"{linker}: gradient of {name}"
            )


@pytest.mark.slow
@pytest.mark.parametrize("shard", half(0, 10))
def test_values(shard):
    linkers = ("py", "python"), ("c", "python")
    if shard < 4:  # a second for each example
        linkers += (("numba", "auto"),)
    explore(loops(), lambda case: assert_values(case, *linkers), shard, 25)


@pytest.mark.slow
@pytest.mark.parametrize("shard", half(100, 102))
def test_values_of_the_compiled_loop(shard):
    """What ``perform`` compiles for the other linkers."""
    explore(loops(), lambda case: assert_values(case, ("c", "numba")), shard, 10)


@pytest.mark.parametrize("shard", half(400, 402))
def test_values_of_c_code(shard):
    """What the C linker runs: C code where a loop has some."""
    explore(loops(), lambda case: assert_values(case, ("c", "auto")), shard, 12)


def test_gradients_of_c_code():
    explore(FLOAT_LOOPS, lambda case: assert_gradients(case, ("c", "auto")), 402, 6)


@pytest.mark.slow
@pytest.mark.parametrize("shard", half(200, 208))
def test_gradients(shard):
    linkers = ("py", "python"), ("c", "python")
    explore(FLOAT_LOOPS, lambda case: assert_gradients(case, *linkers), shard, 25)


@pytest.mark.slow
@pytest.mark.parametrize("shard", half(300, 304))
def test_gradients_of_the_compiled_loop(shard):
    linkers = ("c", "numba"), ("numba", "auto")
    explore(FLOAT_LOOPS, lambda case: assert_gradients(case, *linkers), shard, 4)
