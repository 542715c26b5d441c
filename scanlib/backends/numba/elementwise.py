"""How variables are held in numba code, and how elementwise loops read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.tensor.elemwise import DimShuffle

from scanlib.backends.numba.bundles import Rows
from scanlib.backends.numba.scalar import ScalarCode
from scanlib.backends.numba.source import Source


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


class Values(ScalarCode):
    """How the variables of a body are held, and how each is read."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.values: dict[Variable, Value] = {}

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
    """Knows how elementwise loops read their inputs, and how long they are."""

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
