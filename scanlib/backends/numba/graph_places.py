"""Outside of loops: views of arrays, and arrays made of parts of others.

What only looks at an array in another way (axes in another order, slices, parts, other sizes) is a
view made with a few instructions; what puts arrays together is a nest of plain loops for each part.
Indices are checked like PyTensor's own code does; an index that is negative counts from the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, singledispatchmethod
from typing import Any

import numpy as np
from pytensor.compile.ops import DeepCopyOp
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.op import Op
from pytensor.tensor.basic import Alloc, Join, MakeVector, Split
from pytensor.tensor.elemwise import DimShuffle
from pytensor.tensor.shape import Reshape
from pytensor.tensor.subtensor import IncSubtensor, Subtensor, indices_from_subtensor
from pytensor.tensor.type import DenseTensorType

from scanlib._compat import join_of, split_of
from scanlib.backends.numba.array_values import NEGATIVE_SIZE
from scanlib.backends.numba.contiguous import contiguous
from scanlib.backends.numba.elementwise import Part, Value
from scanlib.backends.numba.graph_arrays import ArrayEmitter
from scanlib.backends.numba.graph_vectors import is_item
from scanlib.backends.numba.vectors import VERSION, reshaped, shuffling
from scanlib.ops.graph import is_length
from scanlib.ops.initial import AsRow, Filled

JOINED = "all the input array dimensions except for the concatenation axis must match exactly"
ALLOCATED = "could not broadcast input array into the shape requested by Alloc"
ASSIGNED = "cannot assign an array of another shape to a slice"


class PlaceEmitter(ArrayEmitter):
    """Writes views, indices, joins and copies."""

    @singledispatchmethod
    def _emit(self, op: Op, node: Apply) -> None:
        super()._emit(op, node)

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

    @_emit.register
    def _reshape(self, op: Reshape, node: Apply) -> None:
        x, shape = node.inputs
        out = node.outputs[0]
        wanted = self._wanted_sizes(shape)
        if wanted is None or not out.type.ndim or not x.type.ndim:
            self._call(op, node)
            return
        self.source.object("contiguous", contiguous)
        self.source.object("reshaped", reshaped)
        array = self.source.name("a")
        self.source.line(f"{array} = contiguous({self.array(x)})")
        known = [size for size in wanted if size is not None]
        rest, total = self.source.name("n"), self.source.name("n")
        self.source.line(f"{total} = {' * '.join(known) or '1'}")
        message = "cannot reshape array: its items do not fill the new shape"
        if None in wanted:
            self.source.line(f"{rest} = {array}.size // max({total}, 1)")
            total = f"{total} * {rest}"
        self._fail_if(ValueError, message, f"{array}.size != {total}")
        sizes = [rest if size is None else size for size in wanted]
        self._view(out, f"reshaped({array}, {', '.join(sizes)})")

    def _wanted_sizes(self, shape: Variable) -> list[str | None] | None:
        """Return the sizes that an array shall have, None for one that follows from the others.

        None where they are not known one by one.
        """
        if isinstance(shape, Constant):
            numbers = [int(size) for size in np.asarray(shape.data)]
            if min(numbers, default=0) < -1 or numbers.count(-1) > 1:
                return None
            return [None if size == -1 else str(size) for size in numbers]
        if shape.owner is None or not isinstance(shape.owner.op, MakeVector):
            return None
        sizes: list[str | None] = []
        for size in shape.owner.inputs:
            if isinstance(size, Constant):
                number = int(np.asarray(size.data))
                sizes.append(None if number == -1 else str(number))
            else:
                sizes.append(f"np.int64({self.scalar(size)})")
        # A size that is only known when the function runs might be -1.
        return sizes if all(size is not None and size.isdigit() for size in sizes) else None

    @_emit.register
    def _as_row(self, op: AsRow, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        if is_item(x):
            self.bind_scalar(out, self._item(x))
            return
        order = (None, *range(x.type.ndim))
        key = f"{VERSION} {order} {x.type.shape}"
        shuffled = self.source.function(shuffling(order, x.type.shape), key, "shuffled")
        self._view(out, f"{shuffled}({self.array(x)})")

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

    @_emit.register
    def _assign(self, op: IncSubtensor, node: Apply) -> None:
        x, y, *inputs = node.inputs
        indices = indices_from_subtensor(inputs, op.idx_list)
        if not all(isinstance(index, slice | int | Variable) for index in indices):
            self._call(op, node)
            return
        out = node.outputs[0]
        whole = self.array(x) if op.inplace else self._copied(x, out)
        self.bind_array(out, whole)
        dtype, sign = self._dtype(out), "=" if op.set_instead_of_inc else "+="
        ndim = x.type.ndim - sum(not isinstance(index, slice) for index in indices)
        if not ndim:
            self.source.line(f"{self._indexed(whole, indices)} {sign} {dtype}({self._item(y)})")
            return
        part = self.source.name("a")
        self.source.line(f"{part} = {self._indexed(whole, indices)}")
        sizes = [f"{part}.shape[{axis}]" for axis in range(ndim)]
        places = self._new_indices(sizes)
        item = self._broadcast(y, sizes, places, ASSIGNED)
        self._write_nest(
            sizes,
            places,
            lambda: self.source.line(f"{part}[{', '.join(places)}] {sign} {dtype}({item})"),
        )

    def _copied(self, x: Variable, out: Variable) -> str:
        """Write a copy of an array, and return its name."""
        array = self.array(x)
        sizes = [f"{array}.shape[{axis}]" for axis in range(x.type.ndim)]
        name = self._empty(out, *sizes)
        self.write_items_of(name, sizes, lambda indices: f"{array}[{', '.join(indices)}]")
        return name

    def _broadcast(
        self, y: Variable, sizes: Sequence[str], places: Sequence[str], message: str
    ) -> str:
        """Return the text of an item of what is assigned to an array of some sizes.

        Axes of size one are repeated, also those that turn out to have it: so it is in NumPy.
        """
        if is_item(y):
            return self._item(y)
        array, first = self.array(y), len(sizes) - y.type.ndim
        inside = []
        for axis, known in enumerate(y.type.shape):
            size, place = f"{array}.shape[{axis}]", places[first + axis]
            wanted = sizes[first + axis]
            if known == 1:
                inside.append("0")
            elif known is not None:
                self._fail_if(ValueError, message, f"{known} != {wanted}")
                inside.append(place)
            else:
                self._fail_if(ValueError, message, f"({size} != 1) & ({size} != {wanted})")
                step = self.source.name("n")
                self.source.line(f"{step} = np.int64({size} != 1)")
                inside.append(f"{place} * {step}")
        return f"{array}[{', '.join(inside)}]"

    # Arrays made of others

    @_emit.register
    def _copy(self, op: DeepCopyOp, node: Apply) -> None:
        (x,), (out,) = node.inputs, node.outputs
        if not isinstance(out.type, DenseTensorType):
            self._call(op, node)
        elif is_item(x):
            self.bind_scalar(out, self._item(x))
        else:
            self._copied(x, out)

    @_emit.register(Alloc)
    @_emit.register(Filled)
    def _filled(self, op: Op, node: Apply) -> None:
        value, *wanted = node.inputs
        out = node.outputs[0]
        if not wanted:
            self._call(op, node)
            return
        sizes = [self._size(size) for size in wanted]
        first = len(sizes) - value.type.ndim
        operand = self._operand(value, value.type.ndim)
        for axis in operand.axes or ():
            if axis is not None:
                wanted_size = sizes[first + axis]
                self._fail_if(ValueError, ALLOCATED, f"{operand.size(axis)} != {wanted_size}")
        self.write_items_of(
            self._empty(out, *sizes), sizes, lambda indices: operand.item(indices[first:])
        )

    def _size(self, size: Variable) -> str:
        """Return the name of a size, or its digits; it must not be negative."""
        if isinstance(size, Constant) and is_length(size):
            return str(int(np.asarray(size.data)))
        name = self.source.name("n")
        self.source.line(f"{name} = np.int64({self.scalar(size)})")
        if not is_length(size):
            self._fail_if(ValueError, NEGATIVE_SIZE, f"{name} < 0")
        return name

    @_emit.register
    def _made_vector(self, op: MakeVector, node: Apply) -> None:
        items = [self.scalar(inp) for inp in node.inputs]
        name = self._empty(node.outputs[0], str(len(items)))
        for i, item in enumerate(items):
            self.source.line(f"{name}[{i}] = {item}")

    @_emit.register
    def _join(self, op: Join, node: Apply) -> None:
        axis, parts = join_of(node)
        if axis is None:
            self._call(op, node)
        elif node.outputs[0].type.ndim == 1:
            self._join_vectors(parts, node.outputs[0])
        else:
            self._join_arrays(axis, parts, node.outputs[0])

    def _join_vectors(self, parts: Sequence[Variable], out: Variable) -> None:
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

    def _join_arrays(self, axis: int, parts: Sequence[Variable], out: Variable) -> None:
        operands = [self._operand(part, out.type.ndim) for part in parts]
        all_sizes = [
            self._sizes_of(part, operand) for part, operand in zip(parts, operands, strict=True)
        ]
        sizes = list(all_sizes[0])
        for others in all_sizes[1:]:
            for other, (mine, theirs) in enumerate(zip(sizes, others, strict=True)):
                if other != axis and mine != theirs:
                    self._fail_if(ValueError, JOINED, f"{mine} != {theirs}")
        whole = list(sizes)
        whole[axis] = " + ".join(own[axis] for own in all_sizes)
        name, first, dtype = self._empty(out, *whole), "0", self._dtype(out)
        for operand, own in zip(operands, all_sizes, strict=True):
            indices = self._new_indices(own)
            places = list(indices)
            places[axis] = f"{first} + {indices[axis]}"
            text = f"{name}[{', '.join(places)}] = {dtype}({operand.item(indices)})"
            self._write_nest(own, indices, partial(self.source.line, text))
            first = f"{first} + {own[axis]}"

    @_emit.register
    def _split(self, op: Split, node: Apply) -> None:
        whole, axis, sizes = split_of(node)
        counts = np.asarray(sizes.data).tolist() if isinstance(sizes, Constant) else [-1]
        if axis is None or min(counts) < 0 or len(op.view_map) < len(counts):
            self._call(op, node)
            return
        array, first = self.array(whole), 0
        message = f"Split sizes sum to {sum(counts)}; what is split has another length."
        self._fail_if(ValueError, message, f"{array}.shape[{axis}] != {sum(counts)}")
        for out, count in zip(node.outputs, counts, strict=True):
            self._view(out, f"{array}[{':, ' * axis}{first}:{first + count}]")
            first += count


def _fixed_ends(indices: Sequence[Any]) -> tuple[int | None, int | None] | None:
    """Return the ends of the only slice among indices; None if there is more, or they may vary."""
    if len(indices) != 1 or not isinstance(indices[0], slice) or indices[0].step is not None:
        return None
    ends = [
        int(end.data) if isinstance(end, Constant) else end
        for end in (indices[0].start, indices[0].stop)
    ]
    return None if any(isinstance(end, Variable) for end in ends) else (ends[0], ends[1])
