"""From the nodes of a body to statements of a numba function.

A value of zero dimensions is a numba scalar; it becomes a 0-d array only where an Op wants
one. Dimshuffles are written where something other than an elementwise loop reads them. Subclasses
write the Ops they know; every other one is a call of the function that PyTensor's numba dispatch
makes for it.
"""

from __future__ import annotations

from functools import singledispatchmethod

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.type import Type
from pytensor.link.numba.dispatch.basic import numba_typify
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.type import TensorType

from scanlib.backends.numba.body import constant_value
from scanlib.backends.numba.elementwise import ElementwiseLoops, Value
from scanlib.backends.numba.scalar import as_scalar
from scanlib.backends.numba.source import Source


def is_zero_dim(type: Type) -> bool:
    """Whether values of this type are held as scalars."""
    return isinstance(type, ScalarType) or (isinstance(type, TensorType) and type.ndim == 0)


class Emitter(ElementwiseLoops):
    """Writes the statements that compute nodes, and knows how each variable is held."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        source.object("as_scalar", as_scalar)

    # Reading variables

    def find(self, variable: Variable) -> Value:
        if variable not in self.values:
            if isinstance(variable, Constant):
                self.values[variable] = self._constant(variable)
            else:
                assert variable.owner is not None, variable
                self._materialize(variable.owner)
        return self.values[variable]

    def _constant(self, variable: Constant) -> Value:
        data = variable.data
        if is_zero_dim(variable.type):
            dtype = np.dtype(variable.type.dtype)
            return Value(scalar=self.source.constant(dtype.type(np.asarray(data).item())))
        return Value(
            array=self.source.constant(numba_typify(constant_value(data), variable=variable))
        )

    def argument(self, variable: Variable) -> str:
        """Return a variable as PyTensor's numba functions take it."""
        if isinstance(variable.type, ScalarType):
            return self.scalar(variable)
        return self.array(variable)

    # Writing nodes

    def emit(self, node: Apply) -> None:
        """Write the statements that compute a node."""
        if not self._is_lazy(node):
            self._emit(node.op, node)

    def _is_lazy(self, node: Apply) -> bool:
        """Dimshuffles are written where something other than an elementwise loop reads them."""
        return isinstance(node.op, DimShuffle)

    def _materialize(self, node: Apply) -> None:
        source = node.inputs[0]
        if node.outputs[0].type.ndim == 0 and source.type.ndim == 0:
            self.values[node.outputs[0]] = self.find(source)
        else:
            self._call(node.op, node)

    @singledispatchmethod
    def _emit(self, op: Op, node: Apply) -> None:
        self._call(op, node)

    def _call(self, op: Op, node: Apply) -> None:
        """Call the function that PyTensor's numba dispatch makes for a node."""
        name = self._function(op, node)
        arguments = ", ".join(self.argument(inp) for inp in node.inputs)
        results = [self.source.name("v") for _ in node.outputs]
        self.source.line(f"{', '.join(results)} = {name}({arguments})")
        for out, result in zip(node.outputs, results, strict=True):
            if isinstance(out.type, ScalarType):
                self.bind_scalar(out, result)
            else:
                self.bind_array(out, result)

    @_emit.register
    def _tensor_from_scalar(self, op: TensorFromScalar, node: Apply) -> None:
        self.bind_scalar(node.outputs[0], self.scalar(node.inputs[0]))

    @_emit.register
    def _scalar_from_tensor(self, op: ScalarFromTensor, node: Apply) -> None:
        self.bind_scalar(node.outputs[0], self.scalar(node.inputs[0]))

    @_emit.register
    def _shape_i(self, op: Shape_i, node: Apply) -> None:
        name = self.source.name("s")
        self.source.line(f"{name} = np.int64({self.array(node.inputs[0])}.shape[{op.i}])")
        self.bind_scalar(node.outputs[0], name)
