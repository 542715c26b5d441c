"""`OneRow`: the row a recurrence starts from, also where there is none.

A recurrence that starts from the first row of its data, ``h_0 = x_0``, has nothing to start
from if there are no data. Its loop still needs an initial row, which nobody reads then::

    OneRow(x[:1]) = x[:1]   if x has rows
                    0       otherwise

of shape (1, …). Written with PyTensor's own Ops, it would copy `x` or take numba long to compile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import TensorType

from scanlib._compat import vectorize_rule
from scanlib.ops.derivatives import Variables
from scanlib.ops.row_ops.linear_op import LinearOp


class OneRow(LinearOp):
    """The first row of an array, as an array of one row; zeros if the array has no rows."""

    __props__ = ()

    def make_node(self, value: Variable) -> Apply:
        value = pt.as_tensor_variable(value)
        if value.type.ndim == 0:
            raise TypeError("OneRow takes an array with rows, got a scalar")
        out = TensorType(value.type.dtype, shape=(1, *value.type.shape[1:]))
        return Apply(self, [value], [out()])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [(pt.constant(1, dtype="int64"), *arguments[-1][0][1:])]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        (value,) = inputs
        row = np.zeros((1, *value.shape[1:]), dtype=value.dtype)
        row[: len(value)] = value[:1]
        output_storage[0][0] = row

    def adjoint(self, inputs: Variables, cotangent: Variable) -> list[Variable]:
        zeros = pt.zeros_like(inputs[0], dtype=cotangent.type.dtype)
        return [pt.set_subtensor(zeros[:1], cotangent[: inputs[0].shape[0]])]


@vectorize_rule.register(OneRow)
def vectorize_one_row(op: OneRow, node: Apply, batched: Variable) -> list[Variable]:
    """Return the first rows of a batch of arrays."""
    rank = batched.type.ndim - node.inputs[0].type.ndim
    return [pt.moveaxis(op(pt.moveaxis(batched, rank, 0)), 0, rank)]
