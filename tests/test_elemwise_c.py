"""The C code of elementwise loops against the plain Python loop."""

import numpy as np
import pytensor
import pytensor.scalar as ps
import pytensor.tensor as pt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytensor.tensor.elemwise import Elemwise

import scanlib
from scanlib.backends.c.block import BLOCK, BlockPrinter
from scanlib.backends.c.printer import print_loop, printer_for
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.errors import InitialRowsError, SequenceLengthError, StepCountError
from scanlib.ops.initial import InitialRow  # noqa: F401 -- replaced below if it is not there
from tests.checks import assert_same
from tests.derivatives import central_gradient
from tests.modes import MODES
from tests.reference import reference_scan

LENGTHS = 0, 1, 2, 3, 4, 5, 7, 13, 64, 127, 129, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 17


def loops(function) -> list:
    return [n for n in function.maker.fgraph.toposort() if isinstance(n.op, ElemwiseScan)]


def compiled(inputs, outputs):
    """Compile for the C linker, and make sure that every loop is elementwise and runs as C."""
    outputs = outputs if isinstance(outputs, list) else [outputs]
    function = pytensor.function(inputs, outputs, mode=MODES["c"], on_unused_input="ignore")
    nodes = function.maker.fgraph.toposort()
    assert loops(function), "the loop was not lowered"
    for node, thunk in zip(nodes, function.vm.thunks, strict=True):
        if isinstance(node.op, ElemwiseScan):
            assert hasattr(thunk, "cthunk"), f"{node.op} runs through perform"
            node.op.perform = None  # nobody may call it

    def call(*values):
        before = [np.asarray(value).tobytes() for value in values]
        results = function(*values)
        for value, bytes_before in zip(values, before, strict=True):
            assert np.asarray(value).tobytes() == bytes_before, "an input was changed"
        return results

    call.loops = loops(function)
    return call


def schedules(call) -> list:
    return [type(printer_for(node.op)) for node in call.loops]
