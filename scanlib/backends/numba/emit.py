"""From the nodes of a body to statements of a numba function.

A value of zero dimensions is a numba scalar; it becomes a 0-d array only where an Op wants
one. Elementwise Ops become plain loops over their axes, with the scalar code of PyTensor's
own scalar Ops; dimshuffles are folded into the indices of those loops. Every other Op is a
call of the function that PyTensor's numba dispatch makes for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Any

import numba
import numpy as np
from numba.extending import overload
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.graph.type import Type
from pytensor.link.numba.dispatch.basic import numba_funcify_ensure_cache, numba_typify
from pytensor.scalar.basic import Composite, ScalarType, Tanh
from pytensor.tensor.basic import MakeVector, ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.math import Dot
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor
from pytensor.tensor.type import TensorType

from scanlib.backends.numba.body import constant_value
from scanlib.backends.numba.source import Source
from scanlib.codegen.vector_math import VECTOR_TANH

BLAS_DTYPES = {"float32", "float64", "complex64", "complex128"}


def as_scalar(value: Any) -> Any:
    """Return the item of a 0-d array, or a scalar as it is (compiled code only)."""
    return value.item() if isinstance(value, np.ndarray) else value


@overload(as_scalar)
def _as_scalar(value):
    if isinstance(value, numba.types.Array):
        return lambda value: value.item()
    return lambda value: value


@dataclass
class Value:
    """How a variable is held: as a `scalar`, an `array`, or both, by name."""

    scalar: str | None = None
    array: str | None = None


@dataclass
class Operand:
    """An input of an elementwise loop: an array and, for each of its own axes, the loop's axis
    that walks it (None for axes of size one); or a scalar."""

    text: str
    axes: tuple[int | None, ...] | None

    def item(self, indices: list[str]) -> str:
        if self.axes is None:
            return self.text
        inside = ", ".join("0" if axis is None else indices[axis] for axis in self.axes)
        return f"{self.text}[{inside}]"


def is_zero_dim(type: Type) -> bool:
    """Whether values of this type are held as scalars."""
    return isinstance(type, ScalarType) or (isinstance(type, TensorType) and type.ndim == 0)


class Emitter:
    """Writes the statements that compute nodes, and knows how each variable is held."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.values: dict[Variable, Value] = {}
        # Where an elementwise result may be written instead of into fresh memory.
        self.destinations: dict[Variable, str] = {}
        # Results that may outlive the step: they need fresh memory every time.
        self.escaping: set[Variable] | None = None
        source.object("as_scalar", as_scalar)

    # Reading variables

    def bind_scalar(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(scalar=name)

    def bind_array(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(array=name)

    def _value(self, variable: Variable) -> Value:
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

    def scalar(self, variable: Variable) -> str:
        """Return the name of a zero-dimensional variable's scalar."""
        value = self._value(variable)
        if value.scalar is None:
            value.scalar = self.source.name("s")
            self.source.line(f"{value.scalar} = as_scalar({value.array})")
        return value.scalar

    def array(self, variable: Variable) -> str:
        """Return the name under which an Op that wants arrays finds a variable."""
        value = self._value(variable)
        if value.array is None:
            value.array = self.source.name("a")
            self.source.line(f"{value.array} = np.asarray({value.scalar})")
        return value.array

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
            self.values[node.outputs[0]] = self._value(source)
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

    def _function(self, op: Op, node: Apply) -> str:
        """Register the function of PyTensor's numba dispatch for a node and return its name.

        The dispatch may use the number and the static types of inputs, which its own keys
        leave out.
        """
        function, key = numba_funcify_ensure_cache(op, node=node)
        if key is not None:
            key = f"{key}{[variable.type for variable in [*node.inputs, *node.outputs]]}"
        return self.source.function(function, key)

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

    # Elementwise Ops

    @_emit.register
    def _elemwise(self, op: Elemwise, node: Apply) -> None:
        ndim = node.outputs[0].type.ndim
        operands = [self._operand(inp, ndim) for inp in node.inputs]
        scalar_node = op.make_scalar_node(*node.inputs)
        if ndim == 0:
            results = self._scalar_op(
                op.scalar_op, scalar_node, [operand.text for operand in operands]
            )
            for out, result in zip(node.outputs, results, strict=True):
                self.bind_scalar(out, result)
            return
        outputs = self._elemwise_outputs(op, node, operands)
        indices = [self.source.name("j") for _ in range(ndim)]
        sizes = self._elemwise_sizes(node, operands)
        self._check_sizes(node, operands, sizes)
        self._allocate(node, outputs, sizes)
        self._walk(op, scalar_node, operands, outputs, indices, sizes)

    def _walk(
        self,
        op: Elemwise,
        scalar_node: Apply,
        operands: list[Operand],
        outputs: list[str],
        indices: list[str],
        sizes: list[str],
        axis: int = 0,
    ) -> None:
        """Write nested loops over the axes and the scalar code inside them."""
        if axis < len(sizes):
            with self.source.block(f"for {indices[axis]} in range({sizes[axis]}):"):
                self._walk(op, scalar_node, operands, outputs, indices, sizes, axis + 1)
            return
        items = [operand.item(indices) for operand in operands]
        results = self._scalar_op(op.scalar_op, scalar_node, items)
        for output, result in zip(outputs, results, strict=True):
            self.source.line(f"{output}[{', '.join(indices)}] = {result}")

    def _operand(self, variable: Variable, ndim: int) -> Operand:
        """Return how an elementwise loop reads an input, looking through dimshuffles."""
        axes: list[int | None] = list(range(ndim))
        if variable.type.ndim == 0:
            return Operand(self.scalar(variable), None)
        if isinstance(variable, Constant) and np.asarray(variable.data).size == 1:
            item = np.asarray(variable.data).reshape(-1)[0]
            return Operand(self.source.constant(item), None)
        while (
            variable not in self.values
            and variable.owner is not None
            and isinstance(variable.owner.op, DimShuffle)
        ):
            source = variable.owner.inputs[0]
            inner: list[int | None] = [None] * source.type.ndim
            for axis, old in enumerate(variable.owner.op.new_order):
                if old != "x":
                    inner[old] = axes[axis]
            variable, axes = source, inner
            if variable.type.ndim == 0:
                return Operand(self.scalar(variable), None)
        kept = tuple(
            None if broadcast else axis
            for axis, broadcast in zip(axes, variable.type.broadcastable, strict=True)
        )
        return Operand(self.array(variable), kept)

    def _elemwise_outputs(self, op: Elemwise, node: Apply, operands: list[Operand]) -> list[str]:
        """Return the arrays the results go to; those not yet made are in `_fresh`."""
        names = []
        self._fresh: list[str | None] = []
        for i, out in enumerate(node.outputs):
            reused = op.inplace_pattern.get(i)
            destination = self.destinations.get(out)
            if destination is not None:
                names.append(destination)
                self._fresh.append(None)
            elif reused is not None:
                names.append(self.array(node.inputs[reused]))
                self._fresh.append(None)
            else:
                names.append(self.source.name("a"))
                self._fresh.append(names[-1])
            self.values[out] = Value(array=names[-1])
        return names

    def _elemwise_sizes(self, node: Apply, operands: list[Operand]) -> list[str]:
        """Return the size of each axis of an elementwise loop."""
        sizes = []
        for axis, known in enumerate(node.outputs[0].type.shape):
            if known is not None:
                sizes.append(str(known))
                continue
            for operand in operands:
                if operand.axes is not None and axis in operand.axes:
                    name = self.source.name("n")
                    own = operand.axes.index(axis)
                    self.source.line(f"{name} = {operand.text}.shape[{own}]")
                    sizes.append(name)
                    break
            else:
                sizes.append("1")
        return sizes

    def _check_sizes(self, node: Apply, operands: list[Operand], sizes: list[str]) -> None:
        """Raise where sizes differ at run time: broadcasting must be known beforehand."""
        checked = set()
        for operand in operands:
            for own, axis in enumerate(operand.axes or ()):
                text = f"{operand.text}.shape[{own}]"
                if axis is None or (text, axis) in checked or len(operands) == 1:
                    continue
                checked.add((text, axis))
                with self.source.block(f"if {text} != {sizes[axis]}:"):
                    self.source.line(
                        "raise ValueError('Incompatible Elemwise input shapes inside a scan')"
                    )

    def _allocate(self, node: Apply, outputs: list[str], sizes: list[str]) -> None:
        shape = "(" + ", ".join(sizes) + ",)"
        for out, fresh, name in zip(node.outputs, self._fresh, outputs, strict=True):
            if fresh is not None and self.escaping is not None and out not in self.escaping:
                self.source.before_loop(
                    f"{fresh} = np.empty(({'0, ' * len(sizes)}), {self._dtype(out)})"
                )
                self._resize(fresh, out, sizes)
            elif fresh is not None:
                self.source.line(f"{fresh} = np.empty({shape}, {self._dtype(out)})")
            elif out in self.destinations:
                self._resize(name, out, sizes)

    def _resize(self, name: str, variable: Variable, sizes: list[str]) -> None:
        """Write that an array is made anew if its shape is not the one that is needed."""
        tests = [f"{name}.shape[{axis}] != {size}" for axis, size in enumerate(sizes)]
        shape = "(" + ", ".join(sizes) + ",)"
        with self.source.block(f"if {' or '.join(tests)}:"):
            self.source.line(f"{name} = np.empty({shape}, {self._dtype(variable)})")

    def _dtype(self, variable: Variable) -> str:
        dtype = np.dtype(variable.type.dtype)
        return self.source.object(f"np_{dtype.name}", dtype.type)

    # Scalar code

    def _scalar_op(self, op: Op, node: Apply, items: list[str]) -> list[str]:
        """Write scalar code and return the names of the results, each of its exact dtype."""
        if isinstance(op, Composite):
            return self._composite(op, items)
        name = self._vector_function(op, node) or self._function(op, node)
        results = [self.source.name("s") for _ in node.outputs]
        call = f"{name}({', '.join(items)})"
        if len(results) == 1:
            self.source.line(f"{results[0]} = {self._dtype(node.outputs[0])}({call})")
            return results
        raw = [self.source.name("s") for _ in node.outputs]
        self.source.line(f"{', '.join(raw)} = {call}")
        for out, result, value in zip(node.outputs, results, raw, strict=True):
            self.source.line(f"{result} = {self._dtype(out)}({value})")
        return results

    def _vector_function(self, op: Op, node: Apply) -> str | None:
        """Return scanlib's own code for a function that numba does not vectorize, if any."""
        dtype = node.outputs[0].type.dtype
        if isinstance(op, Tanh) and node.inputs[0].type.dtype == dtype and dtype in VECTOR_TANH:
            return self.source.function(VECTOR_TANH[dtype], f"scanlib tanh {dtype} 1")
        return None

    def _composite(self, op: Composite, items: list[str]) -> list[str]:
        """Write the nodes of a fused Op one by one, each result with its own dtype."""
        held = dict(zip(op.fgraph.inputs, items, strict=True))

        def text(variable: Variable) -> str:
            if variable not in held:
                assert isinstance(variable, Constant)
                dtype = np.dtype(variable.type.dtype)
                held[variable] = self.source.constant(dtype.type(np.asarray(variable.data).item()))
            return held[variable]

        for inner in op.fgraph.toposort():
            results = self._scalar_op(inner.op, inner, [text(inp) for inp in inner.inputs])
            held.update(zip(inner.outputs, results, strict=True))
        return [text(out) for out in op.fgraph.outputs]
