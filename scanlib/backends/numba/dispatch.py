"""scanlib's Ops in code that numba compiles, and `Scan.perform`.

A function that holds loops is one of Python's (`scanlib.backends.numba.linker`). This is for
what numba compiles itself: steps without kernels, and what PyTensor's functions call, in an
`OpFromGraph`, a `pytensor.scan`, or by `function.vm.jit_fn`. What has kernels is a call of them, a
loop that has none a plain loop, and for what is left Python computes the results.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import numba
import numpy as np
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FrozenFunctionGraph, FunctionGraph
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch.basic import (
    get_numba_type,
    numba_njit,
    register_funcify_and_cache_key,
)
from pytensor.tensor.random.utils import custom_rng_deepcopy

from scanlib._compat import features
from scanlib._compat.numba import NumbaError
from scanlib.backends.handler.functions import performed
from scanlib.backends.handler.programs import program_of, program_of_node
from scanlib.backends.handler.thunks import library, runner
from scanlib.backends.numba.disk import sealed
from scanlib.backends.numba.general_loop import LoopWriter
from scanlib.backends.numba.graph_function import graph_inside
from scanlib.backends.numba.programs import call_program
from scanlib.backends.numba.stepped_loop import SteppedLoop
from scanlib.ops.execution import Compiler, LoopOp, NotCompilableError, Runner, brings
from scanlib.ops.kernel_graph import KernelGraph
from scanlib.ops.linker_features import HadLoops
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.row_ops.checked_rows import CheckedArray
from scanlib.ops.row_ops.generator_words import GeneratorFromWords, GeneratorWords
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.row_ops.row_segments import MergeRows, SplitRows
from scanlib.ops.row_ops.step_products import StepProducts
from scanlib.ops.scan import Scan

Found = tuple[Callable[..., Any], str | None]


def holds_loops(fgraph: FunctionGraph | FrozenFunctionGraph) -> bool:
    """Whether there are loops in a graph, or in graphs that are parts of it, or were before."""
    if features(fgraph, HadLoops):
        return True
    for node in fgraph.apply_nodes:
        inside = graph_inside(node.op)
        if isinstance(node.op, LoopOp) or (inside is not None and holds_loops(inside)):
            return True
    return False


def funcify_node(op: Op, node: Apply, **kwargs: Any) -> Found:
    """Return the function of a loop or of a program for code that numba compiles."""
    program = None if library() is None else program_of_node(node)
    if program is not None:
        return call_program(program)
    if not isinstance(op, Scan | ElemwiseScan):
        return funcify_performed(op, node)
    function, key = LoopWriter(op.scan, copies_carries=True).write()
    return numba_njit(function), key


def funcify_performed(op: Op, node: Apply, **kwargs: Any) -> Found:
    """Return a function of compiled code that has Python compute a node of one result."""
    kind, perform = get_numba_type(node.outputs[0].type), performed(node)

    @numba_njit
    def call(*inputs):
        with numba.objmode(result=kind):
            result = perform(*inputs)
        return result

    return call, None


for with_kernels in (Scan, ElemwiseScan, LinearScan, KernelGraph, StepProducts):
    register_funcify_and_cache_key(with_kernels)(funcify_node)
for moves_rows in (
    CheckedArray,
    GeneratorFromWords,
    GeneratorWords,
    MergeRows,
    PaddedRows,
    SplitRows,
):
    register_funcify_and_cache_key(moves_rows)(funcify_performed)


class OrSteps:
    """Runs a loop as a compiler does, and step by step, from then on, where that cannot be; `run`
    is what runs it now."""

    def __init__(self, compiler: Compiler, op: LoopOp, node: Apply) -> None:
        self.op = op
        self.run: Runner
        try:
            self.run = compiler(op, node)
        except NotCompilableError:
            self.run = op.python_loop(SteppedLoop)

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        try:
            return self.run(*inputs)
        except NotCompilableError:
            self.run = self.op.python_loop(SteppedLoop)
            return self.run(*inputs)


@brings("compiler")
def runner_of(op: LoopOp, node: Apply) -> Runner:
    """Return what `perform` runs."""
    if config.scanlib__perform == "numba":
        return compiled_loop(op, node)
    return OrSteps(kernels_or_numba, op, node)


def kernels_or_numba(op: LoopOp, node: Apply) -> Runner:
    """Return what runs a loop: its kernels, else steps, or what numba compiles where that pays; it
    may be unable to (`NotCompilableError`)."""
    program = program_of(op, node)
    if program is not None:
        return runner(program)
    if isinstance(op, LinearScan):
        return op.python_loop(SteppedLoop)
    stepped = SteppedLoop(op.scan)
    return _plain_loop(op, node) if stepped.pays_compiled else stepped


def compiled_loop(op: LoopOp, node: Apply) -> Runner:
    """Return what runs a loop compiled; `NotCompilableError` if numba cannot compile what has no
    kernels."""
    program = program_of(op, node)
    return _plain_loop(op, node) if program is None else runner(program)


def _plain_loop(loop: LoopOp, node: Apply) -> Runner:
    """Return a function from values to values that numba compiles whole."""
    op = loop.scan
    try:
        for variable in [*node.inputs, *node.outputs]:
            get_numba_type(variable.type)
        writer = LoopWriter(op)
        function, key = writer.write()
    except NotImplementedError as error:
        raise NotCompilableError(str(error)) from error
    kept = key is not None and config.numba__cache
    compiled = sealed(numba_njit(function, final_function=True, cache=kept))
    n, m = op.signature.n_states, op.signature.n_carries
    single = n + m + op.signature.n_outputs == 1
    first = len(op.outer_input_types()) - m - op.signature.n_non_sequences
    # Which carries Python copies before the loop, and which behind it.
    before = [first + i for i in sorted(writer.body.destroyed)]
    behind = [n + i for i in range(m) if i not in writer.body.destroyed]

    def run(*inputs: Any) -> Sequence[Any]:
        given = list(inputs)
        for place in before:
            given[place] = _copied(given[place])
        try:
            found = compiled(*given)
        except (NumbaError, NotImplementedError) as error:
            raise NotCompilableError(str(error)) from error
        results = [found] if single else list(found)
        for place in behind:
            results[place] = _copied(results[place])
        return results

    return run


def _copied(value: Any) -> Any:
    if isinstance(value, np.random.Generator):
        return custom_rng_deepcopy(value)
    return value.copy() if isinstance(value, np.ndarray) else deepcopy(value)
