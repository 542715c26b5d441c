"""`CheckedConvergence`: what iterations have found, or an error that says how far they came."""

from __future__ import annotations

from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable

from scanlib.ops.errors import ConvergenceError
from scanlib.ops.row_ops.checked_rows import CheckedArray


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
