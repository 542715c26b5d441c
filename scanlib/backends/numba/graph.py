"""A graph that holds loops, as one function.

PyTensor's numba linker makes two functions of every node of a graph, and two more that call them
all. Around a loop of scalars stand a dozen small nodes (lengths and the checks that they agree,
slices, a join of the initial value and a sequence, a sum behind the loop), and compiling these
took longer than compiling the loop and its gradient. Here the whole graph is one function: numbers
are local variables, vectors are walked by plain loops (`graph_vectors`), loops are calls of what
`lazy` compiles apart, and all else is a call of the function that PyTensor makes for a node. The
graph itself stays as PyTensor's rewrites left it: this is how it is compiled, not what it is.

Graphs without loops are PyTensor's own business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import singledispatchmethod
from hashlib import sha256
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch.basic import (
    numba_funcify_and_cache_key,
    numba_njit,
    register_funcify_and_cache_key,
)
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import ScalarOp, ScalarType
from pytensor.tensor.type import DenseTensorType

from scanlib._compat import FUSED_ELEMWISE, NUMBERS_INSIDE, READY_GRAPHS, thaw_graph
from scanlib._compat.numba import Dispatcher
from scanlib.backends.handler.clusters import Cluster, Plan
from scanlib.backends.numba.bundles import VERSION as BUNDLES
from scanlib.backends.numba.bundles import as_arrays, constants, digest_of, picking
from scanlib.backends.numba.disk import sealed
from scanlib.backends.numba.dispatch import loop_call
from scanlib.backends.numba.graph_values import GraphValues, Part, Value, is_zero_dim
from scanlib.backends.numba.lazy import apart, tuple_text
from scanlib.backends.numba.programs import call_program
from scanlib.backends.numba.recurrences import recurrence_call
from scanlib.backends.numba.results import RESULTS_VERSION, as_results
from scanlib.backends.numba.source import Source, may_cache
from scanlib.backends.numba.state_products import Products, products_of
from scanlib.kernels.compiled import program_key
from scanlib.ops.checked_linear import CheckedLinearScan
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.loop_clock import WHOLE, clock_of
from scanlib.ops.reductions import StepProducts
from scanlib.ops.scan import Scan
from scanlib.ops.softmax import AxesSoftmax
from scanlib.source_keys import source_key

VERSION = source_key(__name__)
FEW = 1 << 14  # items that stay in the cache
FEW_RESULTS = 32  # so many are arrays for compiled code that calls the function
FEW_ITEMS = 16  # of a constant that is written where it is used
LOOPS = (Scan, ElemwiseScan, LinearScan)
_pytensors = numba_funcify_and_cache_key.dispatch(FunctionGraph)


@register_funcify_and_cache_key(FunctionGraph)
def funcify_graph(
    fgraph: FunctionGraph,
    node: Apply | None = None,
    squeeze_output: bool = False,
    **kwargs: Any,
) -> tuple[Callable[..., Any], str | None]:
    """Return the compiled function of a graph."""
    if not any(isinstance(inner.op, LOOPS) for inner in fgraph.apply_nodes):
        return _pytensors(fgraph, node=node, squeeze_output=squeeze_output, **kwargs)
    stored = kwargs.get("storage_map") or {}
    for_python = bool(fgraph.outputs) and all(out in stored for out in fgraph.outputs)
    function, key = GraphWriter(fgraph).write(squeeze_output, for_python)
    if not may_cache(key):
        return numba_njit(function), key  # what the linker calls then
    call = apart(function, f"graph {key}", cache=True)
    call.__name__ = "graph"
    return call, key


class GraphWriter(GraphValues):
    """Writes the function of one graph; see the module's text."""

    def __init__(self, fgraph: FunctionGraph) -> None:
        super().__init__(Source())
        self.fgraph = self.whole = fgraph
        self.clock = clock_of(fgraph.profile)
        self.products: dict[Apply, Products] = {}  # that recurrences compute with their states

    def write(
        self, squeeze_output: bool = False, for_python: bool = False
    ) -> tuple[Callable[..., Any], str | None]:
        """Return the Python source function of the graph and its key."""
        arguments = [f"in{i}" for i in range(len(self.fgraph.inputs))]
        for variable, name in zip(self.fgraph.inputs, arguments, strict=True):
            if isinstance(variable.type, ScalarType):
                self.bind_scalar(variable, name)
            else:
                self.bind_array(variable, name)
        self._mark(WHOLE)
        self.write_nodes()
        self._mark(WHOLE)
        if for_python:
            as_tuple = self.source.function(as_results, RESULTS_VERSION, "as_results")
            few = len(self.fgraph.outputs) <= FEW_RESULTS
            wanted = self.arguments if few else self.bundled_arguments
            result = f"{as_tuple}({tuple_text(wanted(self.fgraph.outputs))})"
        else:
            results = self.arguments(self.fgraph.outputs)
            single = squeeze_output and len(results) == 1
            result = results[0] if single else f"({', '.join(results)},)"
        self.source.line(f"return {result}")
        return self.source.compile("graph", arguments, VERSION)

    def write_nodes(self) -> None:
        """Write the nodes of the graph: those over arrays together, the others one by one."""
        self.products = products_of(self.fgraph)
        written = {found.product for found in self.products.values()}
        early = {node: [found.other] for node, found in self.products.items()}
        for item in Plan(self.fgraph, set(written), early).order():
            if isinstance(item, Cluster):
                self._write_cluster(item)
            elif item not in written:
                self.emit(item)

    def _write_cluster(self, cluster: Cluster) -> None:
        program = cluster.program
        key = f"program {program_key(program)}"
        name = self.source.function(call_program(program, key), key, "arrays")
        arguments = tuple_text(self.arguments_of(cluster.inputs, self.for_loop))
        self._bind_results(cluster.outputs, f"{name}({arguments})", len(program.outputs) > 1)

    def _bind_results(self, outputs: Sequence[Variable], call: str, bundled: bool) -> None:
        """Write a call, and bind what it returns: arrays, or a bundle of them."""
        if not bundled:
            results = [self.source.name("v") for _ in outputs]
            self.source.line(f"{', '.join(results)} = {call}")
            for out, result in zip(outputs, results, strict=True):
                self.bind_array(out, result)
            return
        whole = self.source.name("b")
        self.source.line(f"{whole} = {call}")
        for place, out in enumerate(outputs):
            self.values[out] = Value(part=Part(whole, (place, None, None)))

    def emit(self, node: Apply) -> None:
        inside = _graph_inside(node.op)
        if inside is not None:
            self._write_inside(inside, node)
        elif self.clock is None or self.fgraph is not self.whole or not isinstance(node.op, LOOPS):
            super().emit(node)
        else:
            number = self.clock.number(node)
            self._mark(number)
            super().emit(node)
            self._mark(number)

    def _mark(self, number: int) -> None:
        """Write a call of the clock, where the function is profiled."""
        if self.clock is not None:
            self.source.cacheable = False
            self.source.object("mark", self.clock.mark)
            self.source.line(f"mark({number})")

    def _write_inside(self, inside: FunctionGraph, node: Apply) -> None:
        """Write a graph in the place of a node."""
        held = [self.find(inp) for inp in node.inputs]
        outside = self.fgraph, self.values, self.products
        # Equal nodes may share the variables of their graphs.
        inside = thaw_graph(inside)
        self.fgraph, self.values = inside, {}
        self.values.update(zip(inside.inputs, held, strict=True))
        self.write_nodes()
        results = [self.find(own) for own in inside.outputs]
        self.fgraph, self.values, self.products = outside
        self.values.update(zip(node.outputs, results, strict=True))

    # Nodes

    @singledispatchmethod
    def _emit(self, op: Op, node: Apply) -> None:
        super()._emit(op, node)

    @_emit.register(Scan)
    @_emit.register(ElemwiseScan)
    def _loop(self, op: Op, node: Apply) -> None:
        known = loop_call(node)
        if known is None:
            self._call(op, node)
            return
        name = self.source.function(known.function, known.key, "loop")
        arguments = tuple_text(self.arguments_of(node.inputs, self.for_loop))
        self._bind_results(node.outputs, f"{name}({arguments})", known.bundled)

    def bundled_arguments(self, variables: Sequence[Variable]) -> list[str]:
        """Return variables as `arguments` does, those of a bundle as one."""
        return self.arguments_of(variables, self.arguments)

    def arguments(self, variables: Sequence[Variable]) -> list[str]:
        """Return variables as PyTensor's numba functions take them."""
        return [self.argument(variable) for variable in variables]

    def arguments_of(
        self,
        variables: Sequence[Variable],
        others: Callable[[Sequence[Variable]], list[str]],
    ) -> list[str]:
        """Return variables as arguments; those that stand side by side in a bundle are one."""
        values = [None if isinstance(v, Constant) else self.find(v) for v in variables]
        free = [v.part if v and v.array is None and v.scalar is None else None for v in values]
        names: list[str] = []
        for bundle, run in groupby(
            zip(variables, free, strict=True), lambda both: both[1] and both[1].bundle
        ):
            if bundle is None:
                names += others([variable for variable, _ in run])
                continue
            rows = tuple(part.rows for _, part in run if part is not None)
            words = sha256(str(rows).encode()).hexdigest()
            picked = self.source.function(picking(rows), f"{BUNDLES} picked {words}", "picked")
            names.append(self.source.name("b"))
            self.source.line(f"{names[-1]} = {picked}({bundle})")
        return names

    def for_loop(self, variables: Sequence[Variable]) -> list[str]:
        """Return variables as loops take them: numbers need no memory, small constants no name."""
        names = []
        for small, run in groupby(variables, _is_small_array):
            if small:
                values = [np.asarray(variable.data) for variable in run]
                given = self.source.function(
                    constants(values), f"{BUNDLES} {digest_of(values)}", "given"
                )
                names.append(f"{given}()")
                continue
            names += [
                self.scalar(variable) if is_zero_dim(variable.type) else self.array(variable)
                for variable in run
            ]
        return names

    @_emit.register
    def _matrix_recurrence(self, op: LinearScan, node: Apply) -> None:
        if isinstance(op, CheckedLinearScan):
            self._kernel(op, node)
            return
        found = self.products.get(node)
        if found is None:
            name = self.source.function(*recurrence_call(node), "loop")
            arguments = tuple_text(self.arguments_of(node.inputs, self.for_loop))
            self._view(node.outputs[0], f"{name}({arguments})")
            return
        product, other, outer = found.product, found.other, found.outer
        name = self.source.function(*recurrence_call(node, outer), "loop")
        history, products = self.source.name("v"), self.source.name("v")
        self.source.object("as_arrays", as_arrays)
        arguments = tuple_text(self.arguments_of([*node.inputs, other], self.for_loop))
        self.source.line(f"{history}, {products} = as_arrays({name}({arguments}))")
        self.bind_array(node.outputs[0], history)
        self._check_sizes(product)
        self.bind_array(product.outputs[0], products)

    def _apart(self, function: Dispatcher, key: str, node: Apply) -> str:
        """Return the name of a kernel that is compiled apart from this function."""
        function.enable_caching()  # its own options are kept, unlike those of its Python function
        sealed(function)
        key = f"kernel {key}{[inp.type for inp in node.inputs]}"
        return self.source.function(apart(function, key, cache=True), key, "kernel")

    @_emit.register(StepProducts)
    @_emit.register(AxesSoftmax)
    def _kernel(self, op: Op, node: Apply) -> None:
        """Write a call of what is compiled apart, and not once more with this function."""
        function, key = numba_funcify_and_cache_key(op, node=node)
        if not isinstance(function, Dispatcher) or not may_cache(key):
            self._call(op, node)
            return
        call = self._apart(function, key, node)
        self._view(node.outputs[0], f"{call}({', '.join(map(self.argument, node.inputs))})")

    @_emit.register
    def _check(self, op: CheckAndRaise, node: Apply) -> None:
        checked, *conditions = node.inputs
        for condition in conditions:
            self._fail_if(op.exc_type, op.msg, f"not {self.scalar(condition)}")
        value = self.find(checked)
        self.values[node.outputs[0]] = replace(value)

    @_emit.register
    def _number(self, op: ScalarOp, node: Apply) -> None:
        results = self._scalar_op(node, [self.scalar(inp) for inp in node.inputs])
        for out, result in zip(node.outputs, results, strict=True):
            self.bind_scalar(out, result)


def _graph_inside(op: Op) -> FunctionGraph | None:
    """Return the graph that may be written in the place of a node, if there is one."""
    if isinstance(op, NUMBERS_INSIDE):
        return op.fgraph
    if isinstance(op, FUSED_ELEMWISE):
        indexed = any(op.indexed_inputs) or any(op.indexed_outputs)
        # One walk there is several here, and what is between them has memory.
        return None if indexed and not _is_small(op.fgraph) else op.fgraph
    finds = numba_funcify_and_cache_key.dispatch
    ready = isinstance(op, READY_GRAPHS) and finds(type(op)) is finds(OpFromGraph)
    return op.fgraph if ready else None


def _is_small_array(variable: Variable) -> bool:
    """Whether a variable is a constant with axes, but few items."""
    if not isinstance(variable, Constant) or not isinstance(variable.type, DenseTensorType):
        return False
    return variable.type.ndim > 0 and np.asarray(variable.data).size <= FEW_ITEMS


def _is_small(fgraph: FunctionGraph) -> bool:
    """Whether all that is computed in a graph surely has few items."""
    return all(
        None not in out.type.shape and prod(out.type.shape) <= FEW
        for node in fgraph.apply_nodes
        for out in node.outputs
    )
