"""Random loops of `pytensor.scan`, adopted, against the plain Python loop.

The loops are those of `tests.loops`, rendered with PyTensor's function. What it cannot build or
differentiate itself is passed over.
"""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from hypothesis import HealthCheck, assume
from pytensor.graph.traversal import ancestors
from pytensor.scan.utils import until

from scanlib._compat import LegacyScan
from scanlib.ops.loop_rewrite import record_of
from tests.checks import assert_same
from tests.derivatives import moved, random_directions
from tests.exploration import MARGIN, explore, half
from tests.modes import MODES
from tests.strategies import DIFFERENTIABLE, loops, with_inputs_only

STEPS = (1, 2, 3, 3, 4, 7, 12)  # PyTensor gives rows of the wrong shape where there are none

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def rendered(case, values):
    """Return the loop built by PyTensor, or pass the example over."""
    try:
        loop = case.render(pytensor.scan, until, values)
        for variable in ancestors(loop.traces):
            if variable.owner is not None and isinstance(variable.owner.op, LegacyScan):
                variable.owner.op.validate_inner_graph()  # as PyTensor does when it compiles
    except (TypeError, ValueError):
        assume(False)
    return loop


def run(inputs, outputs, linker):
    mode = MODES[linker].including("scanlib_adopt")
    with pytensor.config.change_flags(scanlib__perform="python", on_opt_error="raise"):
        f = pytensor.function(list(inputs), outputs, mode=mode, on_unused_input="ignore")
        record = record_of(f.maker.fgraph)
        assert all(loop.reason is None for loop in record.adopted)
        arrays = [np.array(value) for value in inputs.values()]
        results = f(*arrays)
    for array, value in zip(arrays, inputs.values(), strict=True):
        assert array.tobytes() == np.asarray(value).tobytes()
    return results


def assert_values(case):
    values = case.values()
    expected, record = case.reference(values)
    assume(record.margin > MARGIN)
    loop = rendered(case, values)
    single = "float32" in {o.dtype for o in case.operands} | {e.dtype for e in case.bodies}
    for linker in ("py", "c"):
        for actual, wanted in zip(run(loop.inputs, loop.traces, linker), expected, strict=True):
            tolerance = 0.0 if wanted.dtype.kind in "bi" else 3e-4 if single else 1e-8
            assert_same([actual], [wanted], rtol=tolerance, atol=tolerance)


def assert_gradients(case):
    case = with_inputs_only(case)
    # PyTensor 3.0.x reads sequences one row too far ahead in gradients of such loops.
    assume(case.until is None)
    values = case.values()
    results, record = case.reference(values)
    rng = np.random.default_rng(case.seed)
    weights = {k: rng.normal(size=r.shape) for k, r in enumerate(results) if r.dtype == "float64"}
    names = [name for name, value in values.items() if value.dtype == "float64"]
    assume(weights and names)
    assume(record.margin > MARGIN)

    def weighted(outputs):
        return sum(float(np.sum(outputs[k] * weight)) for k, weight in weights.items())

    points = [values[name] for name in names]
    expected, directions = [], random_directions(points, case.seed)
    for k, _ in enumerate(names):
        direction = [d if j == k else np.zeros_like(d) for j, d in enumerate(directions)]
        sides = []
        for scale in (1e-6, -1e-6):
            point = dict(zip(names, moved(points, (scale, direction)), strict=True))
            outputs, side = case.reference(values | point)
            assume(side.decisions == record.decisions)  # no kink or jump in between
            sides.append(weighted(outputs))
        expected.append((sides[0] - sides[1]) / 2e-6)

    loop = rendered(case, values)
    cost = sum(pt.sum(loop.traces[k] * weight) for k, weight in weights.items())
    wrt = [loop.variables[name] for name in names]
    try:
        gradient = pytensor.grad(cost, wrt, disconnected_inputs="ignore")
    except (TypeError, ValueError):
        assume(False)
    computed, *gradients = run(loop.inputs, [cost, *gradient], "py")
    np.testing.assert_allclose(computed, weighted(results), rtol=1e-8, atol=1e-10)
    for name, g, d, wanted in zip(names, gradients, directions, expected, strict=True):
        assert g.shape == values[name].shape, f"gradient of {name}: shape"
        np.testing.assert_allclose(np.sum(g * d), wanted, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("shard", half(500, 502))
def test_values(shard):
    explore(loops(steps=STEPS), assert_values, shard, 24, *HealthCheck)


@pytest.mark.slow
@pytest.mark.parametrize("shard", half(510, 512))
def test_gradients(shard):
    explore(loops(dtypes=DIFFERENTIABLE, steps=STEPS), assert_gradients, shard, 16, *HealthCheck)
