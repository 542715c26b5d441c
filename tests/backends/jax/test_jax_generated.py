"""Random loops under PyTensor's JAX linker, against the plain Python loop.

Each function is called three times. The first call traces and compiles; from the second call on
JAX takes a shorter way through code of its own, which has crashed on results that the first call
gave.
"""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import assume

import scanlib
from tests.checks import assert_same, in_python
from tests.exploration import MARGIN, explore, half
from tests.strategies import DIFFERENTIABLE, loops, with_inputs_only

pytest.importorskip("jax", reason="jax is not installed")

from pytensor.compile.mode import get_mode

pytestmark = pytest.mark.slow
SINGLE, DOUBLE = 3e-4, 1e-8


def results(inputs, outputs):
    """Return what a function gives, the same in each of three calls, and whether it has a loop."""
    with pytensor.config.change_flags(on_opt_error="raise"):
        function = pytensor.function(
            list(inputs), outputs, mode=get_mode("JAX"), on_unused_input="ignore"
        )
    arrays = [np.array(value) for value in inputs.values()]
    first, *others = [[np.asarray(out) for out in function(*arrays)] for _ in range(3)]
    for again in others:
        assert_same(again, first, 0.0, 0.0)
    for array, value in zip(arrays, inputs.values(), strict=True):
        assert array.tobytes() == np.asarray(value).tobytes()
    nodes = function.maker.fgraph.apply_nodes
    return first, any(type(node.op).__module__.startswith("scanlib.ops") for node in nodes)


@pytest.mark.parametrize("shard", half(500, 502))
def test_values(shard):
    def check(case):
        values = case.values()
        expected, record = case.reference(values)
        assume(record.margin > MARGIN)
        loop = case.render(scanlib.scan, scanlib.until, values)
        found, has_loop = results(loop.inputs, loop.traces)
        if not has_loop:  # PyTensor's JAX linker gives sums of float32 in float64
            found = [f.astype(e.dtype) for f, e in zip(found, expected, strict=True)]
        single = "float32" in {o.dtype for o in case.operands} | {e.dtype for e in case.bodies}
        tolerance = SINGLE if single else DOUBLE
        assert_same(found, expected, tolerance, tolerance)

    explore(loops(), check, shard, 20)


@pytest.mark.parametrize("shard", half(502, 504))
def test_gradients(shard):
    """Those of the plain mode are held against finite differences elsewhere."""

    def check(case):
        case = with_inputs_only(case)
        values = case.values()
        _, record = case.reference(values)
        names = [name for name, value in values.items() if value.dtype == "float64"]
        loop = case.render(scanlib.scan, scanlib.until, values)
        floats = [trace for trace in loop.traces if trace.dtype == "float64"]
        assume(names and floats and record.margin > MARGIN)
        cost = sum((trace**2).sum() for trace in floats)
        wrt = [loop.variables[name] for name in names]
        outputs = [cost, *pytensor.grad(cost, wrt, disconnected_inputs="ignore")]
        expected = in_python(loop.inputs, outputs)(*loop.inputs.values())
        found, _ = results(loop.inputs, outputs)
        assert_same(found, expected, 1e-7, 1e-9)

    explore(loops(dtypes=DIFFERENTIABLE), check, shard, 20)


def test_a_state_that_is_the_same_in_all_channels():
    """Its initial rows alone say how many channels its trace has."""
    x, h0, level = pt.dvector("x"), pt.dvector("h0"), pt.bvector("level")
    h, ones = scanlib.scan(
        lambda x, h, level: (h * x + level, pt.ones(1, "int8")),
        x,
        [h0, level],
        return_updates=False,
    )
    values = {x: np.arange(3.0), h0: np.ones(1), level: np.array([3], "int8")}
    found, has_loop = results(values, [h, ones])
    assert has_loop
    np.testing.assert_array_equal(found[0][:, 0], [3, 4, 9])
    np.testing.assert_array_equal(found[1], np.ones((3, 1)))
