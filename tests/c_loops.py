"""Loops compiled for the C linker, with a check that they run as C code."""

import numpy as np
import pytensor

import scanlib
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from tests.checks import keeping_inputs
from tests.modes import MODES


def compiled(inputs, outputs):
    """Compile for the C linker; every loop must be elementwise and run as C code."""
    outputs = outputs if isinstance(outputs, list) else [outputs]
    function = pytensor.function(inputs, outputs, mode=MODES["c"], on_unused_input="ignore")
    nodes = function.maker.fgraph.toposort()
    found = [node for node in nodes if isinstance(node.op, ElemwiseScan)]
    assert found, "no loop was lowered"
    assert not any(type(node.op).__name__ == "Scan" for node in nodes)
    for node, thunk in zip(nodes, function.vm.thunks, strict=True):
        if isinstance(node.op, ElemwiseScan):
            assert hasattr(thunk, "cthunk"), f"{node.op} runs through perform"

    call = keeping_inputs(function)
    call.ops = [node.op for node in found]
    return call


def trace(step, **arguments):
    return scanlib.scan(step, **arguments, return_updates=False)


def uniform(*shape, seed=0, dtype="float64"):
    return np.random.default_rng([seed, *shape]).uniform(-0.9, 0.9, shape).astype(dtype)
