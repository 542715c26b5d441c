"""Random loops in the step of a loop that adds what their results are."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytensor
import pytensor.tensor as pt
from hypothesis import assume
from pytensor.graph.replace import graph_replace
from pytensor.tensor.type import TensorType

import scanlib
from scanlib.ops.execution import LoopOp
from tests.checks import assert_same
from tests.derivatives import moved, random_directions
from tests.exploration import MARGIN
from tests.loops import LoopCase
from tests.modes import MODES
from tests.reference import reference_scan
from tests.strategies import with_inputs_only

ROWS = 3


def scan(*args, **kwargs):
    return scanlib.scan(*args, return_updates=False, **kwargs)


def outer_loops(function):
    """Return the loops of a function whose steps have loops."""
    return [
        node
        for node in function.maker.fgraph.toposort()
        if isinstance(node.op, LoopOp)
        and any(isinstance(inner.op, LoopOp) for inner in node.op.scan.body.apply_nodes)
    ]


def of_fixed_length(case, static):
    """Return a loop that takes as many steps in each step around it, of sizes known or not."""
    case = with_inputs_only(case)
    groups = {
        name: tuple(replace(operand, static=static) for operand in getattr(case, name))
        for name in ("sequences", "states", "non_sequences")
    }
    n_steps = "int" if case.n_steps == "symbolic" else case.n_steps
    return replace(case, n_steps=n_steps, until=None, **groups)


def nested(case):
    """Return the inputs of a loop around a random one, and its traces: of the loop's results, and
    of a state that the next steps read."""
    loop = case.render(scanlib.scan, scanlib.until, case.values())
    own = list(loop.inputs)
    batches = [TensorType(v.type.dtype, shape=(None, *v.type.shape))(v.name) for v in own]

    def step(*arguments):
        *rows, level = arguments
        moved = [row + 0.1 * level if row.dtype == "float64" else row for row in rows]
        results = graph_replace(loop.traces, dict(zip(own, moved, strict=True)), strict=False)
        floats = [result.sum() for result in results if result.dtype == "float64"]
        return [0.5 * level + 0.1 * sum(floats, pt.constant(1.0)), *results]

    return batches, scan(step, batches, [0.0, *(None for _ in loop.traces)], return_list=True)


def batch_of_values(case):
    cases = [replace(case, seed=case.seed + k) for k in range(ROWS)]
    values = [each.values() for each in cases]
    return {name: np.stack([own[name] for own in values]) for name in values[0]}


def plain(case, values):
    """Run the loop around a random one in Python."""
    records = []

    def step(*arguments):
        *rows, level = arguments
        own = {
            name: row + 0.1 * level if row.dtype == "float64" else row
            for name, row in zip(values, rows, strict=True)
        }
        results, record = case.reference(own)
        records.append(record)
        floats = [result.sum() for result in results if result.dtype == "float64"]
        return [0.5 * level + 0.1 * sum(floats, 1.0), *results]

    info = [np.array(0.0), *(None for _ in case.order)]
    return reference_scan(step, list(values.values()), info), records


def assert_values(case: LoopCase, linkers: tuple[str, ...], check: Callable) -> None:
    """Compare with the plain loop; `check` gets each function and the name of its linker."""
    assume(case.operands)
    values = batch_of_values(case)
    expected, records = plain(case, values)
    assume(min(record.margin for record in records) > MARGIN)
    single = "float32" in {o.dtype for o in case.operands} | {e.dtype for e in case.bodies}
    inputs, traces = nested(case)
    for linker in linkers:
        function = pytensor.function(inputs, traces, mode=MODES[linker], on_unused_input="ignore")
        check(function, linker)
        for actual, wanted in zip(function(*values.values()), expected, strict=True):
            exact = wanted.dtype.kind in "bi"
            tolerance = 0.0 if exact else 3e-4 if single else 1e-8
            assert_same([actual], [wanted], rtol=tolerance, atol=tolerance)


def assert_gradients(case: LoopCase, linkers: tuple[str, ...], check: Callable) -> None:
    """Compare gradients with differences; `check` gets each function and its linker."""
    assume(case.operands)
    values = batch_of_values(case)
    names = [name for name, value in values.items() if value.dtype == "float64"]
    results, records = plain(case, values)
    weighted = [k for k, result in enumerate(results) if result.dtype == "float64"]
    assume(names and min(record.margin for record in records) > MARGIN)
    inputs, traces = nested(case)
    cost = sum(pt.sum(pt.sin(traces[k])) for k in weighted)
    wrt = [inputs[list(values).index(name)] for name in names]
    gradients = pytensor.grad(cost, wrt, disconnected_inputs="ignore")
    points = [values[name] for name in names]
    directions, sides = random_directions(points, case.seed), []
    for scale in (1e-6, -1e-6):
        point = dict(zip(names, moved(points, (scale, directions)), strict=True))
        outputs, side = plain(case, values | point)
        assume([s.decisions for s in side] == [r.decisions for r in records])
        sides.append(sum(float(np.sum(np.sin(outputs[k]))) for k in weighted))
    for linker in linkers:
        function = pytensor.function(
            inputs, gradients, mode=MODES[linker], on_unused_input="ignore"
        )
        check(function, linker)
        found = function(*values.values())
        slope = sum(float(np.sum(g * d)) for g, d in zip(found, directions, strict=True))
        np.testing.assert_allclose(slope, (sides[0] - sides[1]) / 2e-6, rtol=1e-5, atol=1e-6)
