"""What the function of a graph has around its loops: numbers, and arrays of one of them.

A tensor of one item is a scalar of the function until something wants it in memory.
"""

from __future__ import annotations

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.tensor.elemwise import Elemwise

from scanlib.backends.numba.bundles import VERSION as BUNDLES
from scanlib.backends.numba.bundles import reading, taking
from scanlib.backends.numba.elementwise import Operand
from scanlib.backends.numba.emit import Emitter
from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import VERSION, as_array, failing


class VectorEmitter(Emitter):
    """Writes numbers, and what walks of arrays need, outside of loops."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        source.object("as_array", as_array)
        self.walks = False  # whether code is written that walks an array

    def scalar(self, variable: Variable) -> str:
        value = self.find(variable)
        if value.scalar is None and value.array is None and value.part is not None:
            place = value.part.rows[0]
            name = self.source.function(reading(place), f"{BUNDLES} {place}", "number_in")
            value.scalar = self.source.name("s")
            self.source.line(f"{value.scalar} = {name}({value.part.bundle})")
        return super().scalar(variable)

    def array(self, variable: Variable) -> str:
        value = self.find(variable)
        if value.array is None and value.scalar is None and value.part is not None:
            rows = value.part.rows
            name = self.source.function(taking(rows), f"{BUNDLES} taken {rows}", "taken")
            value.array = self.source.name("a")
            self.source.line(f"{value.array} = {name}({value.part.bundle})")
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

    def _operand(self, variable: Variable, ndim: int) -> Operand:
        if is_item(variable) and not isinstance(variable, Constant):
            return Operand(self._item(variable), None)
        return super()._operand(variable, ndim)

    def _empty(self, out: Variable, *sizes: str) -> str:
        """Write a new array that holds a result, and return its name."""
        name = self.source.name("a")
        self.source.line(f"{name} = new_array({self._dtype(out)}, {', '.join(sizes)})")
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

    def write_items(self, op: Elemwise, node: Apply) -> None:
        """Write an elementwise operation on tensors of one item."""
        inner = op.make_scalar_node(*node.inputs)
        items = [self._item(inp) for inp in node.inputs]
        for out, result in zip(
            node.outputs, self._scalar_op(op.scalar_op, inner, items), strict=True
        ):
            self.bind_scalar(out, result)

    def _vector_function(self, op: Op, node: Apply) -> str | None:
        # For a single number, what the C library has is less to compile.
        return super()._vector_function(op, node) if self.walks else None

    def _check_sizes(self, node: Apply, operands: list[Operand], sizes: list[str]) -> None:
        """Raise where arrays of an elementwise operation differ in size along an axis."""
        for axis, size in enumerate(sizes):
            seen = {size} if size.isdigit() else set()
            for k, operand in enumerate(operands):
                if axis not in (operand.axes or ()):
                    continue
                known = node.inputs[k].type.shape[axis]
                own = operand.size(axis)
                text = own if known is None else str(known)
                if text not in seen and seen:  # else it is where the size was read
                    self._fail_if(ValueError, _mismatch(k, axis), f"{text} != {size}")
                seen.add(text)


def _mismatch(k: int, axis: int) -> str:
    return (
        f"Vectorized input {k} has an incompatible shape in axis {axis} "
        "(an input of length 1 is broadcast only if its type says that it has length 1)."
    )


def is_item(variable: Variable) -> bool:
    """Whether a tensor is a number, or surely an array of one."""
    return all(variable.type.broadcastable)
