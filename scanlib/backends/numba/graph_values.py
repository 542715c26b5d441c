"""What the function of a graph has around its loops and clusters: numbers, checks, views.

A tensor of one item is a scalar of the function until something wants it in memory. What only looks
at an array in another way (axes in another order, slices, parts) is a view made with a few
instructions. Indices are checked like PyTensor's own code does; an index that is negative counts
from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import singledispatchmethod
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.link.numba.dispatch.basic import numba_typify
from pytensor.scalar.basic import ScalarType
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import Shape_i
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib.backends.numba.body import constant_value, is_zero_dim
from scanlib.backends.numba.bundles import VERSION as BUNDLES
from scanlib.backends.numba.bundles import Rows, reading, taking
from scanlib.backends.numba.scalar import ScalarCode, as_scalar
from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import VERSION, as_array, failing, shuffling


@dataclass(frozen=True)
class Part:
    """Rows of an array in a bundle that has a name."""

    bundle: str
    rows: Rows


@dataclass
class Value:
    """How a variable is held: as a `scalar`, an `array`, or both, by name; as part of a bundle."""

    scalar: str | None = None
    array: str | None = None
    part: Part | None = None


@dataclass
class Operand:
    """An input of an elementwise loop: an array and, for each of its own axes, the loop's axis
    that walks it (None for axes of size one); or a scalar."""

    text: str
    axes: tuple[int | None, ...] | None

    def item(self, indices: Sequence[str]) -> str:
        if self.axes is None:
            return self.text
        inside = ", ".join("0" if axis is None else indices[axis] for axis in self.axes)
        return f"{self.text}[{inside}]"

    def size(self, axis: int) -> str:
        """Return the size of the array along one of the loop's axes, which it must have."""
        assert self.axes is not None
        return f"{self.text}.shape[{self.axes.index(axis)}]"


class GraphValues:
    """Writes numbers, checks and views, and knows how each variable is held."""

    def __init__(self, source: Source) -> None:
        self.source, self.scalars = source, ScalarCode(source)
        self.values: dict[Variable, Value] = {}
        source.object("as_scalar", as_scalar)
        source.object("as_array", as_array)

    def bind_scalar(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(scalar=name)

    def bind_array(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(array=name)

    def find(self, variable: Variable) -> Value:
        """Return how a variable is held; what is not held yet is made."""
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
        """Return the name of the number that a tensor without axes holds."""
        value = self.find(variable)
        if value.scalar is None and value.array is None and value.part is not None:
            place = value.part.rows[0]
            name = self.source.function(reading(place), f"{BUNDLES} {place}", "number_in")
            value.scalar = self.source.name("s")
            self.source.line(f"{value.scalar} = {name}({value.part.bundle})")
        if value.scalar is None:
            value.scalar = self.source.name("s")
            self.source.line(f"{value.scalar} = as_scalar({value.array})")
        return value.scalar

    def array(self, variable: Variable) -> str:
        """Return the name under which an Op that wants arrays finds a variable."""
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
                self.source.line(
                    f"{name} = new_array({self.scalars.dtype(variable)}{', 1' * ndim})"
                )
                self.source.line(f"{name}[{', '.join(['0'] * ndim)}] = {value.scalar}")
            else:
                self.source.line(f"{name} = as_array({value.scalar})")
        return value.array

    def argument(self, variable: Variable) -> str:
        """Return a variable as PyTensor's numba functions take it."""
        if isinstance(variable.type, ScalarType):
            return self.scalar(variable)
        return self.array(variable)

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
        """Return how an elementwise loop reads an input, looking through dimshuffles."""
        axes: list[int | None] = list(range(ndim))
        if is_item(variable) and not isinstance(variable, Constant):
            return Operand(self._item(variable), None)
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
            node.outputs, self.scalars.write(op.scalar_op, inner, items), strict=True
        ):
            self.bind_scalar(out, result)

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

    @singledispatchmethod
    def _emit(self, op: Op, node: Apply) -> None:
        self._call(op, node)

    def _call(self, op: Op, node: Apply) -> None:
        """Call the function that PyTensor's numba dispatch makes for a node."""
        name = self.scalars.function(op, node)
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
    def _elemwise(self, op: Elemwise, node: Apply) -> None:
        if all(map(is_item, node.outputs)):
            self.write_items(op, node)
        else:
            self._call(op, node)

    def emit(self, node: Apply) -> None:
        """Write the statements that compute a node; dimshuffles are written where they are read."""
        if not isinstance(node.op, DimShuffle):
            self._emit(node.op, node)

    # Views

    def _materialize(self, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
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
        part, ends = self.find(x).part, _fixed_ends(indices)
        if part is not None and part.rows[1:] == (None, None) and ends is not None:
            self.values[out] = Value(part=Part(part.bundle, (part.rows[0], *ends)))
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


def _mismatch(k: int, axis: int) -> str:
    return (
        f"Vectorized input {k} has an incompatible shape in axis {axis} "
        "(an input of length 1 is broadcast only if its type says that it has length 1)."
    )


def is_item(variable: Variable) -> bool:
    """Whether a tensor is a number, or surely an array of one."""
    return all(variable.type.broadcastable)


def _fixed_ends(indices: Sequence[Any]) -> tuple[int | None, int | None] | None:
    """Return the ends of the only slice among indices; None if there is more, or they may vary."""
    if len(indices) != 1 or not isinstance(indices[0], slice) or indices[0].step is not None:
        return None
    ends = [
        int(end.data) if isinstance(end, Constant) else end
        for end in (indices[0].start, indices[0].stop)
    ]
    return None if any(isinstance(end, Variable) for end in ends) else (ends[0], ends[1])
