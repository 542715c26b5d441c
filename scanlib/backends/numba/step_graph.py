"""The graph of a step that numba compiles: numbers, checks, views, and calls.

A tensor of no axes, or of one item, is a scalar of the function until something wants it in memory.
What only looks at an array in another way (axes in another order, slices, parts) is a view made
with a few instructions. Indices are checked like PyTensor's own code does; an index that is
negative counts from the end. Scalar Ops are functions of kernels; nodes over arrays that have
kernels are gathered into programs (`scanlib.backends.handler.clusters`); any other node is a call
of the function that PyTensor's numba dispatch makes for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatchmethod
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.op import Op
from pytensor.graph.type import Type
from pytensor.link.numba.dispatch.basic import numba_funcify_ensure_cache, numba_typify
from pytensor.raise_op import CheckAndRaise
from pytensor.scalar.basic import Add, Mul, ScalarOp, ScalarType
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from pytensor.tensor.type import TensorType

from scanlib._compat import thaw_graph
from scanlib.backends.handler.clusters import Cluster, Plan
from scanlib.backends.handler.instructions import graph_inside
from scanlib.backends.numba.body import constant_value
from scanlib.backends.numba.kernel_functions import numba_intrinsic, scalar_function
from scanlib.backends.numba.programs import call_program
from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import VERSION, as_array, as_scalar, failing, shuffling
from scanlib.kernels.scalars import NoKernelError
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan

MOST_TERMS = 16  # of one call


@dataclass
class Value:
    """How a variable is held: as a `scalar`, an `array`, or both, by name."""

    scalar: str | None = None
    array: str | None = None


def is_zero_dim(type: Type) -> bool:
    """Whether values of this type are held as scalars."""
    return isinstance(type, ScalarType) or (isinstance(type, TensorType) and type.ndim == 0)


class GraphWriter:
    """Writes the nodes of a graph, and knows how each variable is held.

    Parameters
    ----------
    fgraph : FunctionGraph
    """

    def __init__(self, fgraph: FunctionGraph) -> None:
        self.fgraph = fgraph
        self.source = source = Source()
        self.values: dict[Variable, Value] = {}
        source.object("as_array", as_array)
        source.object("as_scalar", as_scalar)

    # How variables are held

    def bind_scalar(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(scalar=name)

    def bind_array(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(array=name)

    def find(self, variable: Variable) -> Value:
        """Return how a variable is held."""
        if variable not in self.values:
            if isinstance(variable, Constant):
                self.values[variable] = self._constant(variable)
            else:
                assert variable.owner is not None, variable
                self._write_shuffle(variable.owner)
        return self.values[variable]

    def _constant(self, variable: Constant) -> Value:
        data = variable.data
        if is_zero_dim(variable.type):
            dtype = np.dtype(variable.type.dtype)
            return Value(scalar=self.source.constant(dtype.type(np.asarray(data).item())))
        return Value(
            array=self.source.constant(numba_typify(constant_value(data), variable=variable))
        )

    def scalar(self, variable: Variable) -> str:
        """Return the name of a zero-dimensional variable's scalar."""
        value = self.find(variable)
        if value.scalar is None:
            value.scalar = self.source.name("s")
            self.source.line(f"{value.scalar} = as_scalar({value.array})")
        return value.scalar

    def array(self, variable: Variable) -> str:
        """Return the name under which an Op that wants arrays finds a variable."""
        value = self.find(variable)
        if value.array is None:
            value.array = name = self.source.name("a")
            ndim = variable.type.ndim
            if ndim:  # one item
                self.source.line(f"{name} = new_array({self._dtype(variable)}{', 1' * ndim})")
                self.source.line(f"{name}[{', '.join(['0'] * ndim)}] = {value.scalar}")
            else:
                self.source.line(f"{name} = as_array({value.scalar})")
        return value.array

    def _item(self, variable: Variable) -> str:
        """Return the only item of a tensor that has one."""
        value = self.find(variable)
        if isinstance(variable, Constant) and value.scalar is None:
            value.scalar = self.source.constant(np.asarray(variable.data).reshape(-1)[0])
        elif value.scalar is None and variable.type.ndim:
            array = self.array(variable)
            value.scalar = self.source.name("s")
            place = ", ".join(["0"] * variable.type.ndim)
            self.source.line(f"{value.scalar} = {array}[{place}]")
        return self.scalar(variable)

    def argument(self, variable: Variable) -> str:
        """Return a variable as PyTensor's numba functions take it."""
        if isinstance(variable.type, ScalarType):
            return self.scalar(variable)
        return self.array(variable)

    def _dtype(self, variable: Variable) -> str:
        dtype = np.dtype(variable.type.dtype)
        return self.source.object(f"np_{dtype.name}", dtype.type)

    # Checks

    def _fail_if(self, error: type[Exception], message: str, condition: str) -> None:
        """Write a check that raises where a condition holds."""
        kind = f"{VERSION} {error.__module__}.{error.__qualname__}"
        name = self.source.function(failing(error, message), f"{kind} {message}", "fail_if")
        self.source.line(f"{name}({condition})")

    # Nodes

    def write_nodes(self) -> None:
        """Write the nodes of the graph: those over arrays together, the others one by one."""
        for item in Plan(self.fgraph).order():
            if isinstance(item, Cluster):
                name = self.source.function(*call_program(item.program), "arrays")
                self._bind_results(name, self._for_kernels(item.inputs), item.outputs)
            else:
                self.emit(item)

    def emit(self, node: Apply) -> None:
        """Write the statements that compute a node; axes are reordered where they are read."""
        inside = graph_inside(node.op)
        if inside is not None:
            self._write_inside(inside, node)
        elif not isinstance(node.op, DimShuffle):
            self._emit(node.op, node)

    def _write_inside(self, inside: FunctionGraph, node: Apply) -> None:
        """Write a graph in the place of a node."""
        held = [self.find(inp) for inp in node.inputs]
        outside = self.fgraph, self.values
        inside = thaw_graph(inside)  # equal nodes may share the variables of their graphs
        self.fgraph, self.values = inside, dict(zip(inside.inputs, held, strict=True))
        self.write_nodes()
        results = [self.find(own) for own in inside.outputs]
        self.fgraph, self.values = outside
        self.values.update(zip(node.outputs, results, strict=True))

    def _for_kernels(self, variables: Sequence[Variable]) -> list[str]:
        """Return variables as kernels take them: numbers need no memory."""
        return [self.scalar(v) if is_zero_dim(v.type) else self.array(v) for v in variables]

    def _bind_results(self, name: str, given: list[str], outputs: Sequence[Variable]) -> None:
        """Write a call, and bind what it returns."""
        results = [self.source.name("v") for _ in outputs]
        self.source.line(f"{', '.join(results)} = {name}({', '.join(given)})")
        for out, result in zip(outputs, results, strict=True):
            if isinstance(out.type, ScalarType):
                self.bind_scalar(out, result)
            else:
                self.bind_array(out, result)

    @singledispatchmethod
    def _emit(self, op: Op, node: Apply) -> None:
        self._call(op, node)

    def _call(self, op: Op, node: Apply) -> None:
        """Call the function that PyTensor's numba dispatch makes for a node."""
        given = [self.argument(inp) for inp in node.inputs]
        self._bind_results(self._function(op, node), given, node.outputs)

    @_emit.register(Scan)
    @_emit.register(ElemwiseScan)
    @_emit.register(LinearScan)
    def _loop(self, op: Op, node: Apply) -> None:
        name = self._function(op, node)
        self._bind_results(name, self._for_kernels(node.inputs), node.outputs)

    @_emit.register
    def _check(self, op: CheckAndRaise, node: Apply) -> None:
        checked, *conditions = node.inputs
        for condition in conditions:
            self._fail_if(op.exc_type, op.msg, f"not {self.scalar(condition)}")
        self.values[node.outputs[0]] = replace(self.find(checked))

    @_emit.register
    def _number(self, op: ScalarOp, node: Apply) -> None:
        results = self._scalar_op(node, [self.scalar(inp) for inp in node.inputs])
        for out, result in zip(node.outputs, results, strict=True):
            self.bind_scalar(out, result)

    def _function(self, op: Op, node: Apply) -> str:
        """Register the function of a node and return its name.

        It is that of PyTensor's numba dispatch, which may use the number and the static types of
        inputs; its own keys leave those out.
        """
        function, key = numba_funcify_ensure_cache(op, node=node)
        if key is not None:
            key = f"{key}{[variable.type for variable in [*node.inputs, *node.outputs]]}"
        return self.source.function(function, key)

    # Numbers

    def _scalar_op(self, node: Apply, items: list[str]) -> list[str]:
        """Write a scalar node and return the names of the results."""
        while isinstance(node.op, Add | Mul) and len(items) > MOST_TERMS:
            # From the left: a call of hundreds of arguments takes numba long.
            first = node.op.make_node(*(inp.type() for inp in node.inputs[:MOST_TERMS]))
            if first.outputs[0].type != node.outputs[0].type:
                break
            items = [*self._scalar_op(first, items[:MOST_TERMS]), *items[MOST_TERMS:]]
            rest = [node.outputs[0], *node.inputs[MOST_TERMS:]]
            node = node.op.make_node(*(variable.type() for variable in rest))
        results = [self.source.name("s") for _ in node.outputs]
        try:
            name = self.source.function(*numba_intrinsic(scalar_function(node)), "scalar")
        except NoKernelError:
            name = self._function(node.op, node)
        given = ", ".join(items)
        if len(results) == 1:
            kind = self._dtype(node.outputs[0])
            self.source.line(f"{results[0]} = {kind}({name}({given}))")
        else:
            self.source.line(f"{', '.join(results)} = {name}({given})")
        return results

    def write_items(self, op: Elemwise, node: Apply) -> None:
        """Write an elementwise operation on tensors of one item."""
        inner = op.make_scalar_node(*node.inputs)
        items = [self._item(inp) for inp in node.inputs]
        for out, result in zip(node.outputs, self._scalar_op(inner, items), strict=True):
            self.bind_scalar(out, result)

    @_emit.register
    def _elemwise(self, op: Elemwise, node: Apply) -> None:
        if all(map(is_item, node.outputs)):
            self.write_items(op, node)
        else:
            self._call(op, node)

    @_emit.register(TensorFromScalar)
    @_emit.register(ScalarFromTensor)
    def _same_number(self, op: Op, node: Apply) -> None:
        self.bind_scalar(node.outputs[0], self.scalar(node.inputs[0]))

    @_emit.register
    def _shape_i(self, op: Shape_i, node: Apply) -> None:
        name = self.source.name("s")
        self.source.line(f"{name} = np.int64({self.array(node.inputs[0])}.shape[{op.i}])")
        self.bind_scalar(node.outputs[0], name)

    # Views

    def _write_shuffle(self, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        if out.type.ndim == 0 and x.type.ndim == 0:
            self.values[out] = self.find(x)
            return
        if is_item(x) and is_item(out):
            self.bind_scalar(out, self._item(x))
            return
        op = node.op
        if not isinstance(op, DimShuffle) or any(x.type.shape[axis] != 1 for axis in op.drop):
            self._call(op, node)
            return
        order = tuple(None if axis == "x" else int(axis) for axis in op.new_order)
        shuffled = self.source.function(
            shuffling(order, x.type.shape), f"{VERSION} {order} {x.type.shape}", "shuffled"
        )
        self._view(out, f"{shuffled}({self.array(x)})")

    def _view(self, out: Variable, text: str) -> str:
        name = self.source.name("a")
        self.source.line(f"{name} = {text}")
        self.bind_array(out, name)
        return name

    # Indices

    @_emit.register
    def _index(self, op: Subtensor, node: Apply) -> None:
        indices = indices_from_subtensor(node.inputs[1:], op.idx_list)
        x, out = node.inputs[0], node.outputs[0]
        if not all(isinstance(index, slice | int | Variable) for index in indices):
            self._call(op, node)
            return
        text = self._indexed(self.array(x), indices)
        if out.type.ndim:
            self._view(out, text)
        else:
            name = self.source.name("s")
            self.source.line(f"{name} = {text}")
            self.bind_scalar(out, name)

    def _indexed(self, array: str, indices: Sequence[Any]) -> str:
        """Return the text of an array with basic indices, which are checked."""
        inside = []
        for axis, index in enumerate(indices):
            if isinstance(index, slice):
                texts = [self._end(end) for end in (index.start, index.stop, index.step)]
                inside.append(":".join(texts if texts[2] else texts[:2]))
            else:
                inside.append(self._checked(self._end(index), f"{array}.shape[{axis}]"))
        return f"{array}[{', '.join(inside)}]"

    def _checked(self, text: str, size: str) -> str:
        """Write the check of an index, and return the place that it means."""
        place = self.source.name("i")
        if text[0] == "-":  # no choice, which numba would write as blocks of code
            self.source.line(f"{place} = {size} + {text}")
        else:
            self.source.line(f"{place} = {text}")
            if not text.isdigit():
                self.source.line(f"{place} += {size} if {place} < 0 else 0")
        self._fail_if(IndexError, "index out of bounds", f"({place} < 0) | ({place} >= {size})")
        return place

    def _end(self, end: Any) -> str:
        """Return the text of an index, or of an end of a slice: nothing where it has none."""
        if isinstance(end, Variable) and not isinstance(end, Constant):
            return f"np.int64({self.scalar(end)})"
        number = end.data if isinstance(end, Constant) else end
        return "" if number is None else str(int(number))


def is_item(variable: Variable) -> bool:
    """Whether a tensor is a number, or surely an array of one."""
    return all(variable.type.broadcastable)
