"""`OneRow`: the row a recurrence starts from, also where there is none.

A recurrence that starts from the first row of its data, ``h_0 = x_0``, has nothing to start
from if there are no data. Its loop still needs an initial row, which nobody reads then::

    OneRow(x[:1]) = x[:1]   if x has rows
                    0       otherwise

of shape (1, …). With `zeros` it is 0 in any case: a row of zeros like the rows of `x`. Written
with PyTensor's own Ops, either would copy `x` or take numba seconds to compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytensor.gradient as pg
import pytensor.tensor as pt
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.type import TensorType

from scanlib._compat import vectorize_rule


class OneRow(Op):
    """The first row of an array, as an array of one row; zeros if the array has no rows.

    Parameters
    ----------
    zeros : bool, optional
        Whether the row is zero in any case; then only the shape of the array is read.
    """

    __props__ = ("zeros",)

    def __init__(self, zeros: bool = False) -> None:
        self.zeros = zeros

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
        if not self.zeros:
            row[: len(value)] = value[:1]
        output_storage[0][0] = row

    def connection_pattern(self, node: Apply) -> list[list[bool]]:
        return [[not self.zeros]]

    def pullback(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        cotangents: Sequence[Variable],
    ) -> list[Variable]:
        (value,), (cotangent,) = inputs, cotangents
        if self.zeros or isinstance(cotangent.type, DisconnectedType):
            return [pg.disconnected_type()]
        zeros = pt.zeros_like(value, dtype=cotangent.type.dtype)
        return [pt.set_subtensor(zeros[:1], cotangent[: value.shape[0]])]

    def pushforward(
        self,
        inputs: Sequence[Variable],
        outputs: Sequence[Variable],
        tangents: Sequence[Variable],
    ) -> list[Variable]:
        (tangent,) = tangents
        if self.zeros or isinstance(tangent.type, DisconnectedType):
            return [pg.disconnected_type()]
        return [self(tangent)]


@vectorize_rule.register(OneRow)
def vectorize_one_row(op: OneRow, node: Apply, batched: Variable) -> list[Variable]:
    """Return the first rows of a batch of arrays."""
    rank = batched.type.ndim - node.inputs[0].type.ndim
    return [pt.moveaxis(op(pt.moveaxis(batched, rank, 0)), 0, rank)]
