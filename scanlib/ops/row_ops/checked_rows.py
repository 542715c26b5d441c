"""Checks that a loop makes at every step, of what is read for all steps at once; of iterations.

When a loop is taken apart, what read a sequence row by row reads the whole of it. The loop's
check that it has one row for every step, and the loop's message, stay with the array:
`CheckedRows`; so do those of single items, `CheckedItems`. A step's index is checked; numba does
not check arrays of indices, and would read and write anywhere: `checked_places`.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.raise_op import CheckAndRaise
from pytensor.tensor.shape import Shape_i

from scanlib.lengths.numbers import Rows, Steps
from scanlib.ops.errors import ConvergenceError, SequenceLengthError
from scanlib.ops.graph import Variables


class CheckedValue(CheckAndRaise):
    """A value, or an error; PyTensor's Op has no forward derivative.

    JAX raises no errors in compiled code: there, what is known when it compiles is checked.
    """

    is_check = True  # messages and reports say what it checks

    def pushforward(
        self, inputs: Variables, outputs: Variables, tangents: Variables
    ) -> list[Variable]:
        return [tangents[0]]


def checked_places(places: Variable, array: Variable, axis: int = 0) -> Variable:
    """Return indices, known to lie in an axis of an array; negative ones count from its end."""
    size = array.shape[axis]
    inside = pt.and_(pt.ge(places, -size), pt.lt(places, size))
    name = f"`{array.name}`" if array.name else "an array"
    text = f"index out of bounds: a step reads or writes outside of {name}"
    return CheckedValue(IndexError, text)(places, pt.all(inside))


class CheckedArray(Op):
    """Base of Ops that give the array they are given, or an error with a message."""

    __props__ = ("message",)
    is_check = True
    view_map: ClassVar[dict[int, list[int]]] = {0: [0]}

    def __init__(self, message: str) -> None:
        self.message = message

    def __str__(self) -> str:
        return type(self).__name__

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [tuple(arguments[-1][0])]


class CheckedSizes(CheckedArray):
    """Base of Ops that check the shape of the array they are given, and a number of steps."""

    def larger(self, shape: Sequence[int], steps: int | None) -> tuple[int, ...] | None:
        """Return the sizes of zeros that take the place of an array, None if it passes, or raise
        the error; the number of steps may not be known."""
        raise NotImplementedError

    def passed(self, array: Any, steps: Any = None) -> Any:
        """Return the array, or zeros, or raise the error."""
        sizes = self.larger(array.shape, len(array) if steps is None else int(steps))
        return array if sizes is None else np.zeros(sizes, array.dtype)

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = self.passed(*inputs)


class CheckedRows(CheckedSizes):
    """The array it is given, or an error whose message has ``{}`` for the numbers of rows and of
    steps."""

    def make_node(self, rows: Variable, steps: Variable) -> Apply:
        rows = pt.as_tensor_variable(rows)
        return Apply(self, [rows, pt.cast(steps, "int64")], [rows.type()])

    def larger(self, shape: Sequence[int], steps: int | None) -> None:
        if steps is not None and shape[0] != steps:
            raise SequenceLengthError(self.message, shape[0], steps)


class Item(NamedTuple):
    """A place along an axis of an array, and the error if it is none: ``{}`` are the number of the
    step and the size of the axis."""

    axis: int
    place: int
    message: str

    @property
    def least(self) -> int:
        """The size that the axis must have."""
        return self.place + 1 if self.place >= 0 else -self.place


class CheckedItems(CheckedSizes):
    """The array it is given, which has some items, or an `IndexError`.

    There is no error without steps, whose number is given, or else that of the rows. The result is
    then zeros, enough of them to read the items.
    """

    __props__ = ("items",)
    __str__ = CheckedArray.__str__  # PyTensor's would show all messages

    def __init__(self, items: tuple[Item, ...]) -> None:
        """`sizes` are those that axes have at least."""
        self.items = items
        axes = sorted({item.axis for item in items})
        self.sizes = {axis: max(i.least for i in items if i.axis == axis) for axis in axes}

    def covers(self, other: "CheckedItems") -> bool:
        """Whether an array that passes has the items of another check."""
        return all(self.sizes.get(axis, 0) >= least for axis, least in other.sizes.items())

    def make_node(self, array: Variable, *steps: Variable) -> Apply:
        shape = [None if k in self.sizes else n for k, n in enumerate(array.type.shape)]
        return Apply(self, [array, *steps], [array.type.clone(shape=shape)()])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        node, shapes = arguments[-2:]
        (out,) = node.outputs
        found = enumerate(shapes[0])
        return [tuple(Shape_i(k)(out) if k in self.sizes else size for k, size in found)]

    def steps_of(self, node: Apply) -> Steps | None:
        """Return what there is to say of lengths: it has the rows that it is given."""
        is_rows = len(node.inputs) == 1
        return Steps(None, node.inputs[:1], [Rows(0, each_step=True)], [None]) if is_rows else None

    def larger(self, shape: Sequence[int], steps: int | None) -> tuple[int, ...] | None:
        if all(shape[axis] >= least for axis, least in self.sizes.items()):
            return None
        if steps != 0:
            wrong = next(item for item in self.items if shape[item.axis] < item.least)
            raise IndexError(wrong.message.format(0, shape[wrong.axis]))
        return tuple(max(size, self.sizes.get(axis, 0)) for axis, size in enumerate(shape))


class CheckedConvergence(CheckedArray):
    """The array it is given, or a `ConvergenceError` where `failed`.

    JAX raises no errors in compiled code: there, the array is NaN then. The message has ``{}`` for
    the number of iterations, the step whose residual is the largest, and the residual.
    """

    def make_node(
        self, rows: Variable, failed: Variable, count: Variable, step: Variable, residual: Variable
    ) -> Apply:
        numbers = [pt.cast(count, "int64"), pt.cast(step, "int64"), pt.cast(residual, "float64")]
        return Apply(self, [rows, failed, *numbers], [rows.type()])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        rows, failed, count, step, residual = inputs
        if failed:
            raise ConvergenceError(self.message, int(count), int(step), float(residual))
        output_storage[0][0] = rows
