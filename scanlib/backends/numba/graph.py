"""A graph that holds loops, as one function.

PyTensor's numba linker makes two functions of every node of a graph, and two more that call them
all. Around a loop of scalars stand a dozen small nodes (lengths and the checks that they agree,
slices, a join of the initial value and a sequence, a sum behind the loop), and compiling these
took longer than compiling the loop and its gradient. Here the whole graph is one function: scalars
are local variables, vectors are walked by plain loops, loops are calls of what `lazy` compiles
apart, and all else is a call of the function that PyTensor makes for a node. The graph itself stays
as PyTensor's rewrites left it: this is how it is compiled, not what it is.

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
from pytensor.scalar.basic import Add, ScalarType
from pytensor.tensor.basic import Join
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from pytensor.tensor.type import DenseTensorType

from scanlib.backends.numba.dispatch import loop_call
from scanlib.backends.numba.elementwise import Operand, Value
from scanlib.backends.numba.emit import Emitter
from scanlib.backends.numba.lazy import apart
from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import VERSION as VECTORS
from scanlib.backends.numba.vectors import as_array, failing, new_vector
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


class GraphWriter(Emitter):
    """Writes the function of one graph; see the module's text."""

    def __init__(self, fgraph: FunctionGraph) -> None:
        super().__init__(Source())
        self.fgraph = fgraph
        self.source.object("as_array", as_array)
        self.source.object("new_vector", new_vector)
        self.done: set[Apply] = set()

    def write(self, squeeze_output: bool = False) -> tuple[Callable[..., Any], str | None]:
        """Return the Python source function of the graph and its key."""
        arguments = [f"in{i}" for i in range(len(self.fgraph.inputs))]
        for variable, name in zip(self.fgraph.inputs, arguments, strict=True):
            if isinstance(variable.type, ScalarType):
                self.bind_scalar(variable, name)
            else:
                self.bind_array(variable, name)
        for node in self.fgraph.toposort():
            if node not in self.done:
                self.emit(node)
        results = [self.argument(out) for out in self.fgraph.outputs]
        together = f"({', '.join(results)},)"
        single = squeeze_output and len(results) == 1
        self.source.line(f"return {results[0] if single else together}")
        return self.source.compile("graph", arguments, VERSION)

    # How values are held

    def array(self, variable: Variable) -> str:
        value = self.find(variable)
        if value.array is None:
            value.array = self.source.name("a")
            self.source.line(f"{value.array} = as_array({value.scalar})")
        return value.array

    def _materialize(self, node: Apply) -> None:
        if node.inputs[0].type.ndim == 0 and node.outputs[0].type.ndim == 1:
            self._row(node)
        else:
            super()._materialize(node)

    def _row(self, node: Apply) -> None:
        """Write an array of one item."""
        (item,), (out,) = node.inputs, node.outputs
        name = self._empty(out, "1")
        self.source.line(f"{name}[0] = {self.scalar(item)}")

    def _empty(self, out: Variable, size: str) -> str:
        """Write a new vector that holds a result, and return its name."""
        name = self.source.name("a")
        self.source.line(f"{name} = new_vector({size}, {self._dtype(out)})")
        self.bind_array(out, name)
        return name

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
            array = self.array(x)
            name = self._empty(out, f"{array}.shape[0]")
            self._fill(name, f"{array}.shape[0]", f"{array}[j]")

    def _fill(self, name: str, size: str, item: str, first: str = "0") -> None:
        """Write a loop over `j` that assigns items from `first` on."""
        if size == "1":
            self.source.line(f"{name}[{first}] = {item}")
            return
        with self.source.block(f"for j in range({size}):"):
            self.source.line(f"{name}[{first} + j] = {item}")

    @_emit.register
    def _as_row(self, op: AsRow, node: Apply) -> None:
        if node.inputs[0].type.ndim:
            self._call(op, node)
        else:
            self._row(node)

    @_emit.register
    def _filled(self, op: Filled, node: Apply) -> None:
        value, *sizes = node.inputs
        if len(sizes) != 1:
            self._call(op, node)
            return
        name, item = self._empty(node.outputs[0], self.scalar(sizes[0])), self.scalar(value)
        self._fill(name, f"{name}.shape[0]", item)

    @_emit.register
    def _slice(self, op: Subtensor, node: Apply) -> None:
        indices = indices_from_subtensor(node.inputs[1:], op.idx_list)
        if len(indices) != 1 or not isinstance(indices[0], slice):
            super()._emit(op, node)
            return
        ends = (indices[0].start, indices[0].stop, indices[0].step)
        texts = ["" if end is None else self._end(end) for end in ends]
        name = self.source.name("a")
        inside = ":".join(texts if texts[2] else texts[:2])
        self.source.line(f"{name} = {self.array(node.inputs[0])}[{inside}]")
        self.bind_array(node.outputs[0], name)

    def _end(self, end: Any) -> str:
        if isinstance(end, Constant):
            return str(int(np.asarray(end.data)))
        return f"np.int64({self.scalar(end)})" if isinstance(end, Variable) else str(int(end))

    @_emit.register
    def _join(self, op: Join, node: Apply) -> None:
        axis, *parts = node.inputs
        out = node.outputs[0]
        if out.type.ndim != 1 or not isinstance(axis, Constant):
            self._call(op, node)
            return
        dtype, sizes, texts = self._dtype(out), [], []
        for part in parts:
            item = self._only_item(part)
            array = None if item else self.array(part)
            sizes.append(f"{array}.shape[0]" if array else "1")
            texts.append(f"{dtype}({item or f'{array}[j]'})")
        name, first = self._empty(out, " + ".join(sizes)), "0"
        for size, text in zip(sizes, texts, strict=True):
            self._fill(name, size, text, first)
            first = f"{first} + {size}"

    def _only_item(self, variable: Variable) -> str | None:
        """Return the item of a vector that is a scalar with an axis, if it is not there yet."""
        node = variable.owner
        if variable in self.values or node is None or not isinstance(node.op, DimShuffle):
            return None
        return self.scalar(node.inputs[0]) if node.inputs[0].type.ndim == 0 else None

    @_emit.register
    def _product(self, op: Dot, node: Apply) -> None:
        self._call(op, node)  # of any size: not what the base class makes of a step's products

    # Elementwise operations and sums

    @_emit.register
    def _elemwise(self, op: Elemwise, node: Apply) -> None:
        if node.outputs[0].type.ndim > 1:
            self._call(op, node)
            return
        total = self._sum_behind(node)
        if total is None:
            self.write_elemwise(op, node)
        else:
            self._write_sum(node, total)
            self.done.add(total)

    def _sum_behind(self, node: Apply) -> Apply | None:
        """Return the sum that alone reads a vector computed by a node, if there is one."""
        out = node.outputs[0]
        clients = self.fgraph.clients[out]
        if len(node.outputs) > 1 or out.type.ndim != 1 or len(clients) != 1:
            return None
        ((reader, _),) = clients
        return reader if isinstance(reader, Apply) and _is_plain_sum(reader) else None

    def _allocate(self, node: Apply, outputs: list[str], sizes: list[str]) -> None:
        for out, fresh in zip(node.outputs, self._fresh, strict=True):
            if fresh is not None:
                self.source.line(f"{fresh} = new_vector({sizes[0]}, {self._dtype(out)})")

    def _write_sum(self, node: Apply, total: Apply) -> None:
        """Write the sum of an elementwise expression, whose items are not stored."""
        operands = [self._operand(inp, 1) for inp in node.inputs]
        sizes = self._elemwise_sizes(node, operands)
        self._check_sizes(node, operands, sizes)
        dtype, index, name = self._acc_dtype(total), self.source.name("j"), self.source.name("s")
        self.source.line(f"{name} = {dtype}(0)")
        with self.source.block(f"for {index} in range({sizes[0]}):"):
            items = [operand.item([index]) for operand in operands]
            scalar_node = node.op.make_scalar_node(*node.inputs)
            (item,) = self._scalar_op(node.op.scalar_op, scalar_node, items)
            self.source.line(f"{name} += {dtype}({item})")
        self._bind_sum(total, name)

    def _acc_dtype(self, total: Apply) -> str:
        out = total.outputs[0]
        dtype = np.dtype(getattr(total.op, "acc_dtype", None) or out.type.dtype)
        return self.source.object(f"np_{dtype.name}", dtype.type)

    def _bind_sum(self, total: Apply, name: str) -> None:
        (out,) = total.outputs
        rounded = self.source.name("s")
        self.source.line(f"{rounded} = {self._dtype(out)}({name})")
        self.bind_scalar(out, rounded)

    @_emit.register(AxesSum)
    @_emit.register(CAReduce)
    def _sum(self, op: Op, node: Apply) -> None:
        if not _is_plain_sum(node):
            self._call(op, node)
            return
        array, dtype = self.array(node.inputs[0]), self._acc_dtype(node)
        name = self.source.name("s")
        self.source.line(f"{name} = {dtype}(0)")
        with self.source.block(f"for j in range({array}.shape[0]):"):
            self.source.line(f"{name} += {dtype}({array}[j])")
        self._bind_sum(node, name)

    def _check_sizes(self, node: Apply, operands: list[Operand], sizes: list[str]) -> None:
        """Raise where vectors of an elementwise operation differ in length."""
        seen = set()
        for k, operand in enumerate(operands):
            size = f"{operand.text}.shape[0]"
            if operand.axes != (0,) or size in seen:
                continue
            if seen or sizes[0].isdigit():  # else it is where `sizes` was read
                self._fail_if(ValueError, _mismatch(k), f"{size} != {sizes[0]}")
            seen.add(size)

    def _fail_if(self, error: type[Exception], message: str, condition: str) -> None:
        """Write a check that raises where a condition holds."""
        kind = f"{VECTORS} {error.__module__}.{error.__qualname__}"
        name = self.source.function(failing(error, message), f"{kind} {message}", "fail_if")
        self.source.line(f"{name}({condition})")


def _mismatch(k: int) -> str:
    return (
        f"Vectorized input {k} has an incompatible shape in axis 0 "
        "(an input of length 1 is broadcast only if its type says that it has length 1)."
    )


def _is_plain_sum(node: Apply) -> bool:
    """Whether a node adds up all items of a vector of numbers."""
    (x,) = node.inputs[:1]
    if not isinstance(node.op, AxesSum):
        if not isinstance(node.op, CAReduce) or not isinstance(node.op.scalar_op, Add):
            return False
        if node.op.axis not in (None, (0,), (-1,)):
            return False
    return x.type.ndim == 1 and node.outputs[0].type.ndim == 0 and x.type.dtype != "bool"
