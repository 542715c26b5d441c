"""Functions that hold loops, in numba mode: functions of Python that call programs of kernels.

PyTensor's numba linker types and lowers a function of the whole graph, which takes longer than
compiling the kernels of its loops. Here the graph becomes a function of Python (`GraphWriter`),
whose programs are compiled already; numba compiles the nodes that have no kernel, one by one.
Compiled code may call such a function as well, ``function.vm.jit_fn``: then PyTensor's linker makes
the function.

Graphs without loops are PyTensor's own business.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np
from numba.extending import typeof_impl
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.link.numba.dispatch.basic import numba_funcify_ensure_cache, numba_njit, numba_typify

from scanlib._compat.numba import Container, NumbaLinker, map_storage, raise_with_op, route_graphs
from scanlib.backends.handler.clusters import gather
from scanlib.backends.handler.functions import performed, plain
from scanlib.backends.numba.disk import sealed
from scanlib.backends.numba.dispatch import OrSteps, compiled_loop, holds_loops
from scanlib.backends.numba.graph_function import GraphWriter
from scanlib.ops.execution import LoopOp
from scanlib.ops.loop_rewrite import rare_collections


@route_graphs(holds_loops)
@rare_collections()
def make_all(
    linker: NumbaLinker,
    input_storage: Sequence[list[Any]] | None = None,
    output_storage: Sequence[list[Any]] | None = None,
    storage_map: dict[Variable, list[Any]] | None = None,
) -> tuple[Any, ...]:
    """Return what runs a graph; see `pytensor.link.basic.LocalLinker.make_all`."""
    fgraph = linker.fgraph
    nodes = linker.schedule(fgraph)
    stored = map_storage(fgraph, nodes, input_storage, output_storage, storage_map)
    whole = GraphWriter(fgraph, node_function, constant_value)
    run = graph_function(linker, whole, *stored)
    inputs, outputs = (
        [
            Container(variable, cell, readonly=readonly)
            for variable, cell in zip(some, cells, strict=True)
        ]
        for some, cells, readonly in zip(
            (fgraph.inputs, fgraph.outputs), stored, (False, True), strict=False
        )
    )
    return run, inputs, outputs, [run], nodes[:1]


def graph_function(
    linker: NumbaLinker,
    whole: GraphWriter,
    inputs: Sequence[list[Any]],
    outputs: Sequence[list[Any]],
    storage_map: dict[Variable, list[Any]],
) -> Callable[[], list[Any]]:
    """Return the thunk of a whole graph, with the attributes that PyTensor's functions ask for."""
    fgraph = linker.fgraph

    def fail(node: Apply, values: list[list[Any]]) -> None:
        raise_with_op(fgraph, node, SimpleNamespace(inputs=values))

    def update_profile(profile: Any) -> None:
        """Add the times of the last call to PyTensor's profile; it calls this after each."""
        for number, line in enumerate(whole.lines):
            profile.apply_time[fgraph, line.node] += whole.seconds[number]
            profile.apply_callcount[fgraph, line.node] += 1
            profile.apply_cimpl[line.node] = True
            whole.seconds[number] = 0.0

    values, run = whole.functions(inputs, outputs, fail, bool(fgraph.profile))
    run.inputs, run.outputs, run.storage_map = list(inputs), list(outputs), storage_map
    run.lazy, run.allow_gc, run.update_profile = False, linker.allow_gc, update_profile
    run.jit_fn = CompiledGraph(linker, values)
    return run


class CompiledGraph:
    """The function of a graph, for Python and for code that numba compiles."""

    def __init__(self, linker: NumbaLinker, values: Callable[..., list[Any]]) -> None:
        self._linker, self._values = linker, values

    def __call__(self, *values: Any) -> tuple[Any, ...]:
        return tuple(self._values(*values))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dispatcher, name)

    @cached_property
    def dispatcher(self) -> Any:
        """The function as numba compiles it, when compiled code first asks for it."""
        fgraph, _ = self._linker.fgraph.clone_get_equiv(attach_feature=True)
        gather(fgraph)
        return self._linker.jit_compile(self._linker.fgraph_convert(fgraph))


@typeof_impl.register(CompiledGraph)
def _type_of_graph(value: CompiledGraph, context: Any) -> Any:
    return typeof_impl(value.dispatcher, context)


def node_function(node: Apply) -> Callable[..., Any]:
    """Return the function of a node that has no kernel."""
    op = node.op
    if isinstance(op, LoopOp):
        return performed(node) if config.scanlib__perform == "python" else whole_loop(op, node)
    if type(op).__module__.startswith("scanlib."):
        return performed(node)
    function, key = numba_funcify_ensure_cache(op, node=node)
    kept = key is not None
    called = function.py_func if kept else plain(function, len(node.inputs))
    return sealed(numba_njit(called, final_function=True, cache=kept))


def whole_loop(op: LoopOp, node: Apply) -> Callable[..., Any]:
    """Return the function of a loop that numba compiles, as long as it can."""
    run = OrSteps(compiled_loop, op, node)
    return run if len(node.outputs) > 1 else lambda *inputs: run(*inputs)[0]


def constant_value(constant: Constant) -> Any:
    """Return the value of a constant as numba's functions take it."""
    value = numba_typify(constant.data, variable=constant)
    return np.asarray(value) if isinstance(value, np.generic) else value
