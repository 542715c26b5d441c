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

from collections.abc import Callable
from functools import singledispatchmethod
from typing import Any

import numpy as np
from pytensor.compile.ops import DeepCopyOp
from pytensor.configdefaults import config
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
from pytensor.tensor.basic import Join, MakeVector, Split
from pytensor.tensor.elemwise import CAReduce, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from pytensor.tensor.type import DenseTensorType

from scanlib._compat import FUSED_ELEMWISE, NUMBERS_INSIDE, join_of, split_of
from scanlib.backends.numba.dispatch import loop_call
from scanlib.backends.numba.elementwise import Value
from scanlib.backends.numba.graph_vectors import VectorEmitter, is_item, is_plain_sum
from scanlib.backends.numba.lazy import apart
from scanlib.backends.numba.source import Source
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.initial import AsRow, Filled
from scanlib.ops.linear_scan import LinearScan
from scanlib.ops.reductions import AxesSum
from scanlib.ops.scan import Scan

VERSION = "scanlib-graph-1"
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
    function, key = GraphWriter(fgraph).write(squeeze_output)
    if key is None or not config.numba__cache:
        return numba_njit(function), key  # what the linker calls then
    call = apart(function, f"graph {key}", cache=True)
    call.__name__ = "graph"
    return call, key


class GraphWriter(VectorEmitter):
    """Writes the function of one graph; see the module's text."""

    def __init__(self, fgraph: FunctionGraph) -> None:
        super().__init__(Source())
        self.fgraph = fgraph
        self.done: set[Apply] = set()

    def write(self, squeeze_output: bool = False) -> tuple[Callable[..., Any], str | None]:
        """Return the Python source function of the graph and its key."""
        arguments = [f"in{i}" for i in range(len(self.fgraph.inputs))]
        for variable, name in zip(self.fgraph.inputs, arguments, strict=True):
            if isinstance(variable.type, ScalarType):
                self.bind_scalar(variable, name)
            else:
                self.bind_array(variable, name)
        self._write_nodes()
        results = [self.argument(out) for out in self.fgraph.outputs]
        together = f"({', '.join(results)},)"
        single = squeeze_output and len(results) == 1
        self.source.line(f"return {results[0] if single else together}")
        return self.source.compile("graph", arguments, VERSION)

    def _write_nodes(self) -> None:
        for node in self.fgraph.toposort():
            if node not in self.done:
                self.emit(node)

    def emit(self, node: Apply) -> None:
        inside = _graph_inside(node.op)
        if inside is None:
            super().emit(node)
        else:
            self._write_inside(inside, node)

    def _write_inside(self, inside: FunctionGraph, node: Apply) -> None:
        """Write a graph in the place of a node."""
        held = [self.find(inp) for inp in node.inputs]
        outside = self.fgraph, self.values, self.done
        # Equal nodes may share the variables of their graphs.
        self.fgraph, self.values, self.done = inside, {}, set()
        self.values.update(zip(inside.inputs, held, strict=True))
        self._write_nodes()
        results = [self.find(out) for out in inside.outputs]
        self.fgraph, self.values, self.done = outside
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
        call, key = known
        name = self.source.function(call, key, "loop")
        arguments = ", ".join(self.argument(inp) for inp in node.inputs)
        results = [self.source.name("v") for _ in node.outputs]
        self.source.line(f"{', '.join(results)} = {name}(({arguments},))")
        for out, result in zip(node.outputs, results, strict=True):
            self.bind_array(out, result)

    @_emit.register
    def _check(self, op: CheckAndRaise, node: Apply) -> None:
        checked, *conditions = node.inputs
        for condition in conditions:
            self._fail_if(op.exc_type, op.msg, f"not {self.scalar(condition)}")
        value = self.find(checked)
        self.values[node.outputs[0]] = Value(value.scalar, value.array)

    @_emit.register
    def _copy(self, op: DeepCopyOp, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        kind = out.type
        if not isinstance(kind, DenseTensorType) or kind.ndim > 1:
            self._call(op, node)
        elif kind.ndim == 0:
            self.bind_scalar(out, self.scalar(x))
        else:
            size = f"{self.array(x)}.shape[0]"
            self._fill(self._empty(out, size), size, f"{self.array(x)}[j]")

    @_emit.register
    def _as_row(self, op: AsRow, node: Apply) -> None:
        if node.inputs[0].type.ndim:
            self._call(op, node)
        else:
            self.bind_scalar(node.outputs[0], self.scalar(node.inputs[0]))

    @_emit.register
    def _filled(self, op: Filled, node: Apply) -> None:
        value, *sizes = node.inputs
        if len(sizes) != 1:
            self._call(op, node)
            return
        name, item = self._empty(node.outputs[0], self.scalar(sizes[0])), self.scalar(value)
        self._fill(name, f"{name}.shape[0]", item)

    @_emit.register
    def _index(self, op: Subtensor, node: Apply) -> None:
        indices = indices_from_subtensor(node.inputs[1:], op.idx_list)
        if len(indices) != 1:
            super()._emit(op, node)
        elif isinstance(indices[0], slice):
            self._slice(indices[0], node)
        elif node.outputs[0].type.ndim:
            self._call(op, node)
        else:
            self._read(indices[0], node)

    def _slice(self, index: slice, node: Apply) -> None:
        texts = [self._end(end) for end in (index.start, index.stop, index.step)]
        name = self.source.name("a")
        inside = ":".join(texts if texts[2] else texts[:2])
        self.source.line(f"{name} = {self.array(node.inputs[0])}[{inside}]")
        self.bind_array(node.outputs[0], name)

    def _read(self, index: Any, node: Apply) -> None:
        """Write the read of one item of a vector."""
        array, place = self.array(node.inputs[0]), self.source.name("i")
        size = f"{array}.shape[0]"
        self.source.line(f"{place} = {self._end(index)}")
        self.source.line(f"{place} += {size} if {place} < 0 else 0")
        self._fail_if(IndexError, "index out of bounds", f"({place} < 0) | ({place} >= {size})")
        name = self.source.name("s")
        self.source.line(f"{name} = {array}[{place}]")
        self.bind_scalar(node.outputs[0], name)

    def _end(self, end: Any) -> str:
        """Return the text of an index, or of an end of a slice: nothing where it has none."""
        if isinstance(end, Variable) and not isinstance(end, Constant):
            return f"np.int64({self.scalar(end)})"
        number = end.data if isinstance(end, Constant) else end
        return "" if number is None else str(int(number))

    @_emit.register
    def _made_vector(self, op: MakeVector, node: Apply) -> None:
        items = [self.scalar(inp) for inp in node.inputs]
        name = self._empty(node.outputs[0], str(len(items)))
        for i, item in enumerate(items):
            self.source.line(f"{name}[{i}] = {item}")

    @_emit.register
    def _join(self, op: Join, node: Apply) -> None:
        axis, parts = join_of(node)
        out = node.outputs[0]
        if out.type.ndim != 1 or axis is None:
            self._call(op, node)
            return
        dtype, sizes, texts = self._dtype(out), [], []
        for part in parts:
            alone = is_item(part)
            held = self._item(part) if alone else self.array(part)
            sizes.append("1" if alone else f"{held}.shape[0]")
            texts.append(f"{dtype}({held if alone else f'{held}[j]'})")
        name, first = self._empty(out, " + ".join(sizes)), "0"
        for size, text in zip(sizes, texts, strict=True):
            self._fill(name, size, text, first)
            first = f"{first} + {size}"

    @_emit.register
    def _split(self, op: Split, node: Apply) -> None:
        whole, axis, sizes = split_of(node)
        counts = np.asarray(sizes.data).tolist() if isinstance(sizes, Constant) else [-1]
        if axis != 0 or min(counts) < 0 or len(op.view_map) < len(counts):
            self._call(op, node)
            return
        array, first = self.array(whole), 0
        message = f"Split sizes sum to {sum(counts)}; what is split has another length."
        self._fail_if(ValueError, message, f"{array}.shape[0] != {sum(counts)}")
        for out, count in zip(node.outputs, counts, strict=True):
            name = self.source.name("a")
            self.source.line(f"{name} = {array}[{first}:{first + count}]")
            self.bind_array(out, name)
            first += count

    @_emit.register
    def _product(self, op: Dot, node: Apply) -> None:
        self._call(op, node)  # of any size: not what the base class makes of a step's products

    # Elementwise operations and sums

    @_emit.register
    def _elemwise(self, op: Elemwise, node: Apply) -> None:
        if node.outputs[0].type.ndim > 1:
            self._call(op, node)
        elif all(map(is_item, node.outputs)):
            self.write_items(op, node)
        else:
            total = _sum_behind(self.fgraph, node)
            self.write_walk(op, node, total)
            if total is not None:
                self.done.add(total)

    @_emit.register(AxesSum)
    @_emit.register(CAReduce)
    def _sum(self, op: Op, node: Apply) -> None:
        if is_plain_sum(node):
            self.write_total(node)
        else:
            self._call(op, node)

    @_emit.register
    def _number(self, op: ScalarOp, node: Apply) -> None:
        results = self._scalar_op(op, node, [self.scalar(inp) for inp in node.inputs])
        for out, result in zip(node.outputs, results, strict=True):
            self.bind_scalar(out, result)


def _graph_inside(op: Op) -> FunctionGraph | None:
    """Return the graph that may be written in the place of a node, if there is one."""
    if isinstance(op, NUMBERS_INSIDE):
        return op.fgraph
    if not isinstance(op, FUSED_ELEMWISE) or any(op.indexed_inputs) or any(op.indexed_outputs):
        return None
    kept = [node for node in op.fgraph.toposort() if not is_plain_sum(node)]
    if len(kept) > 1 or any(
        len(node.outputs) > 1 or node.outputs[0].type.ndim > 1 for node in kept
    ):
        return None  # one walk there would be several here
    return op.fgraph


def _sum_behind(fgraph: FunctionGraph, node: Apply) -> Apply | None:
    """Return the sum that alone reads a vector computed by a node, if there is one."""
    out = node.outputs[0]
    clients = fgraph.clients[out]
    if len(node.outputs) > 1 or out.type.ndim != 1 or len(clients) != 1:
        return None
    ((reader, _),) = clients
    return reader if isinstance(reader, Apply) and is_plain_sum(reader) else None
