"""Elementwise Ops and sums over arrays in memory, as loops over pointers.

    out[j] = f(a[j], b[j], …)

Each loop is written in place. Axes along which all arrays lie one behind the other are walked as
one; the innermost loop then has unit strides, and what it writes is told apart from what it reads
(`scanlib.backends.numba.pointers.apart`), so that compilers vectorize it. They are told so of all
steps at once: a row of a history is not told apart from the row that the step writes, since other
steps read that one. A result goes straight
into the row that will hold it, or over an argument that nobody reads any more, or into a workspace.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from pytensor.graph.basic import Apply, Variable
from pytensor.scalar.basic import AND, Add, Mul
from pytensor.tensor.elemwise import CAReduce, Elemwise

from scanlib.backends.numba import pointers
from scanlib.backends.numba.array_values import ArrayValues
from scanlib.backends.numba.places import Place

SHAPES = "raise ValueError('Incompatible Elemwise input shapes inside a scan')"


@dataclass
class Walked:
    """An array inside nested loops: its pointer, and its stride along each loop's axis."""

    start: str
    strides: list[str]
    written: int = -1
    memory: str = ""

    def meets(self, other: Walked) -> bool:
        """Whether an array may lie where another one does, in this step or in another one."""
        return self.start == other.start or (self.memory != "" and self.memory == other.memory)

    def offset(self, indices: Sequence[str]) -> str:
        terms = [
            index if stride == "1" else f"{index} * {stride}"
            for index, stride in zip(indices, self.strides, strict=True)
            if stride != "0"
        ]
        return " + ".join(terms) or "0"


class ArrayLoops(ArrayValues):
    """Writes elementwise Ops, sums, copies and fills."""

    _loops = 0

    # Elementwise Ops

    def write_elemwise(self, op: Elemwise, node: Apply) -> None:
        ndim = node.outputs[0].type.ndim
        scalar_node = op.make_scalar_node(*node.inputs)
        if ndim == 0:
            items = [self.scalar(inp) for inp in node.inputs]
            results = self._scalar_op(op.scalar_op, scalar_node, items)
            for out, result in zip(node.outputs, results, strict=True):
                self.bind_scalar(out, result)
            return
        operands: list[str | Walked] = []
        places: list[tuple[Variable, Place]] = []
        for inp in node.inputs:
            item = self.only_item(inp)
            if item is not None:
                operands.append(item)
            else:
                place = self.place(inp)
                places.append((inp, place))
                strides = list(self._walked_strides(inp, place))
                operands.append(Walked(place.start, strides, memory=place.memory))
        sizes = self._loop_sizes(node, places)
        targets = [self.target(out, sizes, places) for out in node.outputs]
        walked = [
            Walked(
                place.start,
                [self._stride(*pair) for pair in zip(sizes, place.strides, strict=True)],
                number,
                place.memory,
            )
            for number, place in enumerate(targets)
        ]
        for operand in operands:
            if isinstance(operand, Walked):
                for out in walked:
                    if operand.meets(out):
                        operand.written = out.written
        self._write_nest(op, scalar_node, operands, walked, list(sizes))
        for out, place in zip(node.outputs, targets, strict=True):
            self.bind_place(out, place)

    def _walked_strides(self, variable: Variable, place: Place) -> list[str]:
        shape = variable.type.shape
        return [
            "0" if known == 1 else stride
            for known, stride in zip(shape, place.strides, strict=True)
        ]

    def _stride(self, size: str, stride: str) -> str:
        return "0" if size == "1" else stride

    def _loop_sizes(self, node: Apply, places: list[tuple[Variable, Place]]) -> list[str]:
        """Return the size of each axis, with the checks that all arguments have it."""
        sizes = []
        for axis, known in enumerate(node.outputs[0].type.shape):
            size = None if known is None else str(known)
            for variable, place in places:
                if variable.type.shape[axis] == 1:
                    continue
                own = place.sizes[axis]
                size = own if size is None else self.sizes.require_equal(size, own, SHAPES)
            sizes.append(self.sizes.same(size or "1"))
        return sizes

    def _write_nest(
        self,
        op: Elemwise,
        scalar_node: Apply,
        operands: list[str | Walked],
        outputs: list[Walked],
        sizes: list[str],
    ) -> None:
        arrays = [operand for operand in operands if isinstance(operand, Walked)]
        sizes = self._collapse([*arrays, *outputs], sizes)
        loop, self._loops = self._loops, self._loops + 1
        items: list[str] = []
        with ExitStack() as stack:
            indices = self._open(stack, sizes)
            loaded: dict[tuple[str, str], str] = {}
            for operand in operands:
                if isinstance(operand, str):
                    items.append(operand)
                    continue
                key = (operand.start, operand.offset(indices))
                if key not in loaded:
                    loaded[key] = self.source.name("e")
                    load = self._apart("load", loop, operand.written)
                    self.source.line(f"{loaded[key]} = {load}({key[0]}, {key[1]})")
                items.append(loaded[key])
            results = self._scalar_op(op.scalar_op, scalar_node, items)
            for output, result in zip(outputs, results, strict=True):
                store = self._apart("store", loop, output.written)
                self.source.line(f"{store}({output.start}, {output.offset(indices)}, {result})")

    def _apart(self, name: str, loop: int, written: int) -> str:
        if written >= pointers.MOST_WRITTEN:
            return name
        make = pointers.load_apart if name == "load" else pointers.store_apart
        return self.source.function(
            make(loop, written), f"{pointers.VERSION} {name} {loop} {written}", name
        )

    def _open(self, stack: ExitStack, sizes: list[str]) -> list[str]:
        """Open nested loops and return their indices."""
        indices = []
        for size in sizes:
            if size == "1":
                indices.append("0")
                continue
            index = self.source.name("j")
            indices.append(index)
            stack.enter_context(self.source.block(f"for {index} in range({size}):"))
        return indices

    def _collapse(self, arrays: list[Walked], sizes: list[str]) -> list[str]:
        """Walk axes as one where all arrays allow it; change their strides, return the sizes."""
        kept = [axis for axis, size in enumerate(sizes) if size != "1"]
        for array in arrays:
            array.strides = [self.sizes.same(array.strides[axis]) for axis in kept]
        sizes = [sizes[axis] for axis in kept]
        for axis in range(len(sizes) - 2, -1, -1):
            inner = sizes[axis + 1]
            if all(self._follows(array, axis, inner) for array in arrays):
                for array in arrays:
                    del array.strides[axis]
                sizes[axis : axis + 2] = [self.sizes.product(sizes[axis], inner)]
        return sizes

    def _follows(self, array: Walked, axis: int, inner: str) -> bool:
        """Whether an array goes on along an axis where the next one ends."""
        outer, stride = array.strides[axis], array.strides[axis + 1]
        if stride == "0":
            return outer == "0"
        return outer == self.sizes.product(stride, inner)

    # Copies

    def write_copy(self, source: Place | str, target: Place, add: bool = False) -> None:
        """Write that an array of the target's sizes, or a scalar, is copied or added."""
        walked = Walked(target.start, list(target.strides), 0, target.memory)
        sizes = list(target.sizes)
        arrays = [walked]
        if isinstance(source, Place):
            read = Walked(source.start, list(source.strides), -1, source.memory)
            read.written = 0 if read.meets(walked) else -1
            arrays.append(read)
        sizes = self._collapse(arrays, sizes)
        loop, self._loops = self._loops, self._loops + 1
        with ExitStack() as stack:
            indices = self._open(stack, sizes)
            if isinstance(source, Place):
                load = self._apart("load", loop, read.written)
                item = f"{load}({read.start}, {read.offset(indices)})"
            else:
                item = source
            place = walked.offset(indices)
            if add:
                load = self._apart("load", loop, 0)
                item = f"{load}({walked.start}, {place}) + {item}"
            store = self._apart("store", loop, 0)
            self.source.line(f"{store}({walked.start}, {place}, {item})")

    # Sums and products

    def can_reduce(self, op: CAReduce, node: Apply) -> bool:
        """Whether `write_reduction` handles a reduction."""
        item = np.dtype(node.inputs[0].type.dtype)
        total = np.dtype(getattr(op, "acc_dtype", None) or node.outputs[0].type.dtype)
        if isinstance(op.scalar_op, AND):
            return node.inputs[0].type.ndim > 0 and item.kind == "b"
        return (
            isinstance(op.scalar_op, Add | Mul)
            and node.inputs[0].type.ndim > 0
            and item.kind in "fiuc"
            and total.kind == item.kind
            and np.dtype(node.outputs[0].type.dtype).kind == item.kind
        )

    def write_reduction(self, op: CAReduce, node: Apply) -> None:
        """Write a sum or product over some axes, in the order of memory."""
        variable, out = node.inputs[0], node.outputs[0]
        ndim = variable.type.ndim
        axes = set(range(ndim)) if op.axis is None else {axis % ndim for axis in op.axis}
        place = self.place(variable)
        dtype = self.source.object(
            f"np_{np.dtype(getattr(op, 'acc_dtype', None) or out.type.dtype).name}",
            np.dtype(getattr(op, "acc_dtype", None) or out.type.dtype).type,
        )
        final = self._dtype(out)
        start = f"{dtype}({0 if isinstance(op.scalar_op, Add) else 1})"
        sign = {Add: "+", Mul: "*", AND: "&"}[type(op.scalar_op)]
        kept = [axis for axis in range(ndim) if axis not in axes]
        sizes = [place.sizes[axis] for axis in kept]
        source = Walked(place.start, list(place.strides), -1, place.memory)
        with ExitStack() as stack:
            if not kept:
                total = self.source.name("a")
                self.source.line(f"{total} = {start}")
                indices = self._open(stack, list(place.sizes))
                item = f"load({source.start}, {source.offset(indices)})"
                self.source.line(f"{total} = {dtype}({total} {sign} {item})")
                stack.close()
                self.source.line(f"{total} = {final}({total})")
                self.bind_scalar(out, total)
                return
            target = self.target(out, sizes, [])
            sums = target
            if dtype != final:
                sums = self.fresh(dtype, sizes)
            self.write_copy(start, sums)
            strides = ["0"] * ndim
            for axis, stride in zip(kept, sums.strides, strict=True):
                strides[axis] = stride
            walked = Walked(sums.start, strides, 0, sums.memory)
            loop, self._loops = self._loops, self._loops + 1
            load = self._apart("load", loop, 0 if source.meets(walked) else -1)
            add = self._apart("load", loop, 0)
            store = self._apart("store", loop, 0)
            indices = self._open(stack, list(place.sizes))
            item = f"{load}({source.start}, {source.offset(indices)})"
            at = walked.offset(indices)
            old = f"{add}({sums.start}, {at})"
            self.source.line(f"{store}({sums.start}, {at}, {dtype}({old} {sign} {item}))")
            stack.close()
        if sums is not target:
            self.write_copy(sums, target)
        self.bind_place(out, target)
