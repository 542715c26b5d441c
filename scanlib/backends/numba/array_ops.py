"""scanlib's own Ops in code that numba compiles: programs of kernels, or what Python computes.

In a function that holds loops they are parts of programs (`scanlib.backends.handler.clusters`);
this is for graphs that PyTensor's numba linker compiles itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch.basic import (
    get_numba_type,
    numba_njit,
    register_funcify_and_cache_key,
)

from scanlib._compat import thaw_graph
from scanlib.backends.numba.programs import call_program
from scanlib.ops.kernel_graph import KernelGraph
from scanlib.ops.row_ops.checked_convergence import CheckedConvergence
from scanlib.ops.row_ops.checked_rows import CheckedRows
from scanlib.ops.row_ops.generator_words import GeneratorFromWords, GeneratorWords
from scanlib.ops.row_ops.one_row import OneRow
from scanlib.ops.row_ops.padded_rows import PaddedRows
from scanlib.ops.row_ops.row_segments import JoinRows, MergeRows, SplitRows
from scanlib.ops.row_ops.step_products import StepProducts
from scanlib.schedules.graphs import graph_program


@register_funcify_and_cache_key(StepProducts)
def funcify_step_products(
    op: StepProducts, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the function of a node that is a program by itself."""
    inputs = [inp.type() for inp in node.inputs]
    graph = FunctionGraph(inputs, op.make_node(*inputs).outputs, clone=False)
    return call_program(graph_program(graph))


@register_funcify_and_cache_key(KernelGraph)
def funcify_kernel_graph(
    op: KernelGraph, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the function of several nodes that are a program."""
    return call_program(op.program or graph_program(thaw_graph(op.body)))


@register_funcify_and_cache_key(CheckedConvergence)
@register_funcify_and_cache_key(CheckedRows)
@register_funcify_and_cache_key(GeneratorFromWords)
@register_funcify_and_cache_key(GeneratorWords)
@register_funcify_and_cache_key(JoinRows)
@register_funcify_and_cache_key(MergeRows)
@register_funcify_and_cache_key(OneRow)
@register_funcify_and_cache_key(PaddedRows)
@register_funcify_and_cache_key(SplitRows)
def funcify_performed(op: Op, node: Apply, **kwargs: Any) -> tuple[Callable[..., Any], None]:
    """Return a function of compiled code that has Python compute a node of one result."""
    kind = get_numba_type(node.outputs[0].type)

    def perform(inputs: tuple[Any, ...]) -> Any:
        cells: list[list[Any]] = [[None]]
        op.perform(node, list(inputs), cells)
        return cells[0][0]

    @numba_njit
    def performed(*inputs):
        with numba.objmode(result=kind):
            result = perform(inputs)
        return result

    return performed, None
