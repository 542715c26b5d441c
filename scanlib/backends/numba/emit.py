"""From the nodes of a body to statements of a numba function.

A value of zero dimensions is a numba scalar; it becomes a 0-d array only where an Op wants
one. Elementwise Ops become plain loops over their axes, with the scalar code of PyTensor's
own scalar Ops; dimshuffles are folded into the indices of those loops. Every other Op is a
call of the function that PyTensor's numba dispatch makes for it.
"""

from __future__ import annotations

from functools import singledispatchmethod

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.type import Type
from pytensor.link.numba.dispatch.basic import numba_typify
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from pytensor.tensor.type import TensorType

from scanlib.backends.numba.body import constant_value
from scanlib.backends.numba.elementwise import Value
from scanlib.backends.numba.scalar import as_scalar
from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vector_products import VectorProducts

BLAS_DTYPES = {"float32", "float64", "complex64", "complex128"}


def is_zero_dim(type: Type) -> bool:
    """Whether values of this type are held as scalars."""
    return isinstance(type, ScalarType) or (isinstance(type, TensorType) and type.ndim == 0)


class Emitter(VectorProducts):
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

    @_emit.register
    def _make_vector(self, op: MakeVector, node: Apply) -> None:
        name, dtype = self.source.name("a"), self._dtype(node.outputs[0])
        items = [self.scalar(inp) for inp in node.inputs]
        self.source.line(f"{name} = np.empty({len(items)}, {dtype})")
        for i, item in enumerate(items):
            self.source.line(f"{name}[{i}] = {item}")
        self.bind_array(node.outputs[0], name)

    @_emit.register
    def _subtensor(self, op: Subtensor, node: Apply) -> None:
        indices = indices_from_subtensor(node.inputs[1:], op.idx_list)
        whole = node.inputs[0].type.ndim == len(indices)
        if not whole or any(isinstance(index, slice) for index in indices):
            self._call(op, node)
            return
        array = self.array(node.inputs[0])
        names = []
        for axis, index in enumerate(indices):
            name = self.source.name("i")
            text = self.scalar(index) if isinstance(index, Variable) else str(int(index))
            size = f"{array}.shape[{axis}]"
            self.source.line(f"{name} = np.int64({text})")
            self.source.line(f"{name} = {name} + {size} if {name} < 0 else {name}")
            with self.source.block(f"if {name} < 0 or {name} >= {size}:"):
                self.source.line("raise IndexError('index out of bounds')")
            names.append(name)
        result = self.source.name("s")
        self.source.line(f"{result} = {array}[{', '.join(names)}]")
        self.bind_scalar(node.outputs[0], result)

    @_emit.register
    def _dot(self, op: Dot, node: Apply) -> None:
        """Write a matrix product into memory that is reused from step to step."""
        if self.write_vector_product(node):
            return
        out = node.outputs[0]
        dtypes = {variable.type.dtype for variable in [*node.inputs, out]}
        reusable = self.escaping is not None and out not in self.escaping
        if out.type.ndim != 2 or len(dtypes) > 1 or out.type.dtype not in BLAS_DTYPES:
            self._call(op, node)
            return
        if not reusable and out not in self.destinations:
            self._call(op, node)
            return
        left, right = (self.array(inp) for inp in node.inputs)
        sizes = [f"{left}.shape[0]", f"{right}.shape[1]"]
        name = self.destinations.get(out)
        if name is None:
            name = self.source.name("a")
            self.source.before_loop(f"{name} = np.empty((0, 0), {self._dtype(out)})")
        self._resize(name, out, sizes)
        self.source.line(f"np.dot({left}, {right}, {name})")
        self.bind_array(out, name)

    @_emit.register
    def _elemwise(self, op: Elemwise, node: Apply) -> None:
        self.write_elemwise(op, node)

    @_emit.register
    def _reduction(self, op: CAReduce, node: Apply) -> None:
        if self.can_reduce(op, node):
            self.write_reduction(op, node)
        else:
            self._call(op, node)
