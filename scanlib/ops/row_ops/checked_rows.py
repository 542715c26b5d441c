"""Checks that a loop makes at every step, of what is read for all steps at once; of iterations.

When a loop is taken apart, what read a sequence row by row reads the whole of it. The loop's
check that it has one row for every step, and the loop's message, stay with the array:
`CheckedRows`. A step's index is checked; numba does not check arrays of indices, and would read
and write anywhere: `checked_places`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.raise_op import CheckAndRaise

from scanlib.ops.errors import ConvergenceError, SequenceLengthError
from scanlib.ops.graph import Variables


class CheckedValue(CheckAndRaise):
    """A value, or an error; PyTensor's Op has no forward derivative.

    JAX raises no errors in compiled code: there, what is known when it compiles is checked.
    """

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
    view_map: ClassVar[dict[int, list[int]]] = {0: [0]}

    def __init__(self, message: str) -> None:
        self.message = message

    def __str__(self) -> str:
        return type(self).__name__

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [tuple(arguments[-1][0])]


class CheckedRows(CheckedArray):
    """The array it is given, or an error whose message has ``{}`` for the numbers of rows and of
    steps."""

    def make_node(self, rows: Variable, steps: Variable) -> Apply:
        rows = pt.as_tensor_variable(rows)
        return Apply(self, [rows, pt.cast(steps, "int64")], [rows.type()])

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        rows, steps = inputs
        if len(rows) != steps:
            raise SequenceLengthError(self.message, len(rows), int(steps))
        output_storage[0][0] = rows


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
