"""Loops of `pytensor.scan` compiled as scanlib's loops, against the plain Python loop.

PyTensor's own results are never the measure. `tests.legacy_loops` holds the loops.
"""

import numpy as np
import pytensor
import pytensor.tensor as pt
import pytest
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors

import scanlib
from scanlib._compat import is_legacy_scan
from scanlib.rewrites.adopt import AdoptLoops, adoption_record
from tests.checks import assert_derivatives, assert_same
from tests.legacy_loops import LOOPS
from tests.modes import MODES

ADOPTING = {name: mode.including("scanlib_adopt") for name, mode in MODES.items()}
NUMBA = ["two_taps", "vector_state"]


@pytest.fixture(autouse=True)
def strict():
    """A rewrite that fails must fail the test; PyTensor would print a warning and go on."""
    with pytensor.config.change_flags(on_opt_error="raise"):
        yield


def variables(case):
    return [
        pt.tensor(f"v{i}", dtype=value.dtype, shape=(None,) * value.ndim)
        for i, value in enumerate(case.values)
    ]


def assert_all_adopted(fgraph):
    assert not any(is_legacy_scan(node.op) for node in fgraph.apply_nodes)
    assert all(loop.reason is None for loop in adoption_record(fgraph).loops)


def derivatives(cost, inputs, order):
    found = [cost]
    for _ in range(order):
        total = sum(pt.sum(value) for value in found)
        found += pytensor.grad(total, inputs, disconnected_inputs="ignore")
    return found


def adopted(outputs):
    """Return a copy of a graph after adoption alone."""
    fgraph = FunctionGraph(outputs=outputs, clone=True)
    AdoptLoops(when_enabled=False).rewrite(fgraph)
    return fgraph


@pytest.mark.parametrize("linker", ["c", "py"])
@pytest.mark.parametrize("name", LOOPS)
def test_values(name, linker):
    case = LOOPS[name]
    inputs = variables(case)
    outputs = case.build(*inputs)
    assert any(v.owner is not None and is_legacy_scan(v.owner.op) for v in ancestors(outputs))
    with pytensor.config.change_flags(scanlib__perform="python"):
        f = pytensor.function(inputs, outputs, mode=ADOPTING[linker], on_unused_input="ignore")
        assert_all_adopted(f.maker.fgraph)
        results = f(*case.values)
    expected = [np.asarray(value) for value in case.plain(*case.values)]
    rtol = 1e-5 if case.values[0].dtype == "float32" else 1e-9
    assert_same(results, expected, rtol=rtol)


@pytest.mark.parametrize("name", [name for name, case in LOOPS.items() if case.order])
def test_derivatives(name):
    case = LOOPS[name]
    inputs = variables(case)
    weights = [np.cos(np.arange(np.size(v))).reshape(np.shape(v)) for v in case.plain(*case.values)]

    def total(outputs):
        return sum((out * weight).sum() for out, weight in zip(outputs, weights, strict=True))

    cost = total(case.build(*inputs))
    with pytensor.config.change_flags(scanlib__perform="python"):
        assert_derivatives(
            cost,
            dict(zip(inputs, case.values, strict=True)),
            lambda *values: total([np.asarray(v) for v in case.plain(*values)]),
            ADOPTING["c"],
            order=case.order,
            disconnected_inputs="ignore",
        )
        assert_all_adopted(adopted(derivatives(cost, inputs, case.order)))
