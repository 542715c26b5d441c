"""Numba code of Ops that stand for others, which PyTensor's numba linker compiles slowly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_and_cache_key

from scanlib.backends.numba.lazy import tuple_text
from scanlib.backends.numba.programs import call_program
from scanlib.backends.numba.source import Source
from scanlib.kernels.compiled import program_key
from scanlib.kernels.schedules.graphs import graph_program
from scanlib.ops import reductions
from scanlib.ops.errors import SpecifiedShapeError
from scanlib.ops.reductions import AxesSum, SpecifiedSizes, StepProducts
from scanlib.ops.softmax import AxesSoftmax
from scanlib.source_keys import source_key

VERSION = source_key(__name__)


@register_funcify_and_cache_key(AxesSum)
@register_funcify_and_cache_key(AxesSoftmax)
@register_funcify_and_cache_key(StepProducts)
def funcify_array_op(
    op: AxesSum | AxesSoftmax | StepProducts, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the function of a node that is a program by itself: outside of graphs with loops."""
    inputs = [inp.type() for inp in node.inputs]
    program = graph_program(FunctionGraph(inputs, op.make_node(*inputs).outputs, clone=False))
    source, key = Source(), f"program {program_key(program)}"
    arguments = [f"x{i}" for i in range(len(inputs))]
    name = source.function(call_program(program, key), key, "arrays")
    source.line(f"return {name}({tuple_text(arguments)})")
    function, own_key = source.compile("array_op", arguments, VERSION)
    return numba_njit(function), own_key


@register_funcify_and_cache_key(SpecifiedSizes)
def funcify_specified_sizes(
    op: SpecifiedSizes, node: Apply, **kwargs: Any
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a `SpecifiedSizes`."""
    source = Source()
    source.object("SpecifiedShapeError", SpecifiedShapeError)
    for axis, size in enumerate(op.sizes):
        if size is None:
            continue
        with source.block(f"if x.shape[{axis}] != {size}:"):
            numbers = f"{axis}, x.shape[{axis}], {size}"
            source.line(f"raise SpecifiedShapeError({reductions.SPECIFIED!r}, {numbers})")
    source.line("return x")
    function, key = source.compile("specified_sizes", ["x"], VERSION)
    return numba_njit(function), key
