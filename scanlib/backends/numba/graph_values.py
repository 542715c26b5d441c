"""What the function of a graph has around its loops and clusters: numbers, checks, views.

A tensor of one item is a scalar of the function until something wants it in memory. What only looks
at an array in another way (axes in another order, slices, parts) is a view made with a few
instructions. Indices are checked like PyTensor's own code does; an index that is negative counts
from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import singledispatchmethod
from typing import Any

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.subtensor import Subtensor, indices_from_subtensor

from scanlib.backends.numba.bundles import VERSION as BUNDLES
from scanlib.backends.numba.bundles import reading, taking
from scanlib.backends.numba.elementwise import Operand, Part, Value
from scanlib.backends.numba.emit import Emitter
from scanlib.backends.numba.source import Source
from scanlib.backends.numba.vectors import VERSION, as_array, failing, shuffling


class GraphValues(Emitter):
    """Writes numbers, checks and views."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        source.object("as_array", as_array)

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

    def _fail_if(self, error: type[Exception], message: str, condition: str) -> None:
        """Write a check that raises where a condition holds."""
        kind = f"{VERSION} {error.__module__}.{error.__qualname__}"
        name = self.source.function(failing(error, message), f"{kind} {message}", "fail_if")
        self.source.line(f"{name}({condition})")

    def write_items(self, op: Elemwise, node: Apply) -> None:
        """Write an elementwise operation on tensors of one item."""
        inner = op.make_scalar_node(*node.inputs)
        items = [self._item(inp) for inp in node.inputs]
        for out, result in zip(node.outputs, self._scalar_op(inner, items), strict=True):
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
        super()._emit(op, node)

    @_emit.register
    def _elemwise(self, op: Elemwise, node: Apply) -> None:
        if all(map(is_item, node.outputs)):
            self.write_items(op, node)
        else:
            self._call(op, node)

    # Views

    def _materialize(self, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        if is_item(x) and is_item(out):
            self.bind_scalar(out, self._item(x))
            return
        op = node.op
        if not isinstance(op, DimShuffle) or any(x.type.shape[axis] != 1 for axis in op.drop):
            super()._materialize(node)
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
