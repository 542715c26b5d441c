"""Elementwise Ops and sums as plain loops over axes."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.scalar.basic import Add, Mul
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise

from scanlib.backends.numba.scalar import ScalarCode
from scanlib.backends.numba.source import Source


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

    def item(self, indices: Sequence[str]) -> str:
        if self.axes is None:
            return self.text
        inside = ", ".join("0" if axis is None else indices[axis] for axis in self.axes)
        return f"{self.text}[{inside}]"

    def size(self, axis: int) -> str:
        """Return the size of the array along one of the loop's axes, which it must have."""
        assert self.axes is not None
        return f"{self.text}.shape[{self.axes.index(axis)}]"


class Values(ScalarCode):
    """How the variables of a body are held, and how each is read."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.values: dict[Variable, Value] = {}
        # Where an elementwise result may be written instead of into fresh memory.
        self.destinations: dict[Variable, str] = {}
        # Results that may outlive the step: they need fresh memory every time. None while
        # there are no steps yet.
        self.escaping: set[Variable] | None = None
        # Arrays that are the same at every step.
        self.whole: set[str] = set()

    def bind_scalar(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(scalar=name)

    def bind_array(self, variable: Variable, name: str) -> None:
        self.values[variable] = Value(array=name)

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
            value.array = self.source.name("a")
            self.source.line(f"{value.array} = np.asarray({value.scalar})")
        return value.array

    def find(self, variable: Variable) -> Value:
        """Return how a variable is held; subclasses make what is not held yet."""
        return self.values[variable]


class ElementwiseLoops(Values):
    """Writes elementwise Ops and sums."""

    def write_elemwise(self, op: Elemwise, node: Apply) -> None:
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

    # Sums and products

    def can_reduce(self, op: CAReduce, node: Apply) -> bool:
        """Whether `write_reduction` handles a reduction."""
        dtype = node.outputs[0].type.dtype
        return (
            isinstance(op.scalar_op, Add | Mul)
            and node.inputs[0].type.ndim > 0
            and (getattr(op, "acc_dtype", None) or dtype) == dtype
            and node.inputs[0].type.dtype == dtype
        )

    def write_reduction(self, op: CAReduce, node: Apply) -> None:
        """Write a sum or product over some axes, in the order of memory."""
        ndim, out = node.inputs[0].type.ndim, node.outputs[0]
        axes = tuple(range(ndim)) if op.axis is None else tuple(axis % ndim for axis in op.axis)
        kept = [axis for axis in range(ndim) if axis not in axes]
        text = self.array(node.inputs[0])
        sizes = [f"{text}.shape[{axis}]" for axis in range(ndim)]
        dtype = self._dtype(out)
        start = f"{dtype}({0 if isinstance(op.scalar_op, Add) else 1})"
        total = self.source.name("a")
        indices = [self.source.name("j") for _ in range(ndim)]
        sign = "+" if isinstance(op.scalar_op, Add) else "*"
        if kept:
            shape = ", ".join(sizes[axis] for axis in kept)
            self.source.line(f"{total} = np.empty(({shape},), {dtype})")
            place = ", ".join(indices[axis] for axis in kept)
            kept_sizes = [sizes[axis] for axis in kept]
            self._nest([indices[axis] for axis in kept], kept_sizes, f"{total}[{place}] = {start}")
            cell = f"{total}[{place}]"
        else:
            self.source.line(f"{total} = {start}")
            cell = total
        item = f"{text}[{', '.join(indices)}]"
        self._nest(indices, sizes, f"{cell} = {dtype}({cell} {sign} {item})")
        if kept:
            self.bind_array(out, total)
        else:
            self.bind_scalar(out, total)

    def _nest(self, indices: list[str], sizes: list[str], statement: str) -> None:
        """Write a statement inside nested loops."""
        with ExitStack() as stack:
            for index, size in zip(indices, sizes, strict=True):
                stack.enter_context(self.source.block(f"for {index} in range({size}):"))
            self.source.line(statement)
