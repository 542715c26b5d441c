"""What the function of a graph has around its loops: numbers, vectors, and sums of them.

A tensor of one item is a scalar of the function until something wants it in memory. Elementwise
operations on vectors are plain loops that LLVM vectorizes, and the sum of one is computed in the
same loop: nothing is stored for it.
"""

from __future__ import annotations

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.scalar.basic import Add
from pytensor.tensor.elemwise import CAReduce, Elemwise

from scanlib.backends.numba.elementwise import Operand
from scanlib.backends.numba.emit import Emitter
from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import VERSION, as_array, failing, new_vector
from scanlib.ops.reductions import AxesSum


class VectorEmitter(Emitter):
    """Writes numbers and vectors outside of loops."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        source.object("as_array", as_array)
        source.object("new_vector", new_vector)
        self.walks = False  # whether code is written that walks a vector

    def array(self, variable: Variable) -> str:
        value = self.find(variable)
        if value.array is None:
            value.array = name = self.source.name("a")
            if variable.type.ndim:  # one item
                self.source.line(f"{name} = new_vector(1, {self._dtype(variable)})")
                self.source.line(f"{name}[0] = {value.scalar}")
            else:
                self.source.line(f"{name} = as_array({value.scalar})")
        return value.array

    def _item(self, variable: Variable) -> str:
        """Return the only item of a tensor that has one."""
        value = self.find(variable)
        if isinstance(variable, Constant) and value.scalar is None:
            value.scalar = self.source.constant(np.asarray(variable.data).reshape(-1)[0])
        elif value.scalar is None and variable.type.ndim:
            value.scalar = self.source.name("s")
            self.source.line(f"{value.scalar} = {value.array}[0]")
        return self.scalar(variable)

    def _materialize(self, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        if is_item(x) and is_item(out):
            self.bind_scalar(out, self._item(x))
        else:
            super()._materialize(node)

    def _operand(self, variable: Variable, ndim: int) -> Operand:
        if is_item(variable) and not isinstance(variable, Constant):
            return Operand(self._item(variable), None)
        return super()._operand(variable, ndim)

    def _empty(self, out: Variable, size: str) -> str:
        """Write a new vector that holds a result, and return its name."""
        name = self.source.name("a")
        self.source.line(f"{name} = new_vector({size}, {self._dtype(out)})")
        self.bind_array(out, name)
        return name

    def _fill(self, name: str, size: str, item: str, first: str = "0") -> None:
        """Write a loop over `j` that assigns items from `first` on."""
        if size == "1":
            self.source.line(f"{name}[{first}] = {item}")
            return
        with self.source.block(f"for j in range({size}):"):
            self.source.line(f"{name}[{first} + j] = {item}")

    def _fail_if(self, error: type[Exception], message: str, condition: str) -> None:
        """Write a check that raises where a condition holds."""
        kind = f"{VERSION} {error.__module__}.{error.__qualname__}"
        name = self.source.function(failing(error, message), f"{kind} {message}", "fail_if")
        self.source.line(f"{name}({condition})")

    def write_walk(self, op: Elemwise, node: Apply, total: Apply | None) -> None:
        """Write an elementwise operation on vectors; `total` is a sum that alone reads it."""
        self.walks = True
        if total is None:
            self.write_elemwise(op, node)
        else:
            self._write_sum(node, total)
        self.walks = False

    def write_items(self, op: Elemwise, node: Apply) -> None:
        """Write an elementwise operation on tensors of one item."""
        inner = op.make_scalar_node(*node.inputs)
        items = [self._item(inp) for inp in node.inputs]
        for out, result in zip(
            node.outputs, self._scalar_op(op.scalar_op, inner, items), strict=True
        ):
            self.bind_scalar(out, result)

    def write_total(self, node: Apply) -> None:
        """Write the sum of a vector."""
        array, dtype = self.array(node.inputs[0]), self._acc_dtype(node)
        name = self.source.name("s")
        self.source.line(f"{name} = {dtype}(0)")
        with self.source.block(f"for j in range({array}.shape[0]):"):
            self.source.line(f"{name} += {dtype}({array}[j])")
        self._bind_sum(node, name)

    def _vector_function(self, op: Op, node: Apply) -> str | None:
        # For a single number, what the C library has is less to compile.
        return super()._vector_function(op, node) if self.walks else None

    def _allocate(self, node: Apply, outputs: list[str], sizes: list[str]) -> None:
        for out, fresh in zip(node.outputs, self._fresh, strict=True):
            if fresh is not None:
                self.source.line(f"{fresh} = new_vector({sizes[0]}, {self._dtype(out)})")

    def _check_sizes(self, node: Apply, operands: list[Operand], sizes: list[str]) -> None:
        """Raise where vectors of an elementwise operation differ in length."""
        seen: set[str] = set()
        for k, operand in enumerate(operands):
            size = f"{operand.text}.shape[0]"
            if operand.axes != (0,) or size in seen:
                continue
            if seen or sizes[0].isdigit():  # else it is where `sizes` was read
                self._fail_if(ValueError, _mismatch(k), f"{size} != {sizes[0]}")
            seen.add(size)

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


def _mismatch(k: int) -> str:
    return (
        f"Vectorized input {k} has an incompatible shape in axis 0 "
        "(an input of length 1 is broadcast only if its type says that it has length 1)."
    )


def is_item(variable: Variable) -> bool:
    """Whether a tensor is a number, or surely a vector of one."""
    return variable.type.ndim == 0 or variable.type.broadcastable == (True,)


def is_plain_sum(node: Apply) -> bool:
    """Whether a node adds up all items of a vector of numbers."""
    x = node.inputs[0]
    if not isinstance(node.op, AxesSum):
        if not isinstance(node.op, CAReduce) or not isinstance(node.op.scalar_op, Add):
            return False
        if node.op.axis not in (None, (0,), (-1,)):
            return False
    return x.type.ndim == 1 and node.outputs[0].type.ndim == 0 and x.type.dtype != "bool"
