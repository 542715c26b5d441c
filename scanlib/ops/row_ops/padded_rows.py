"""Rows with zero rows behind them, without a copy where there are none to add.

A loop over sequences of different lengths reads the first rows of each, so that the gradient of a
sequence is the loop's rows in an array of zeros. Nearly always the lengths are equal and the
rows are the gradient already.
"""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.type import TensorType

from scanlib.lengths.numbers import Rows, Steps


class PaddedRows(Op):
    """The given rows, written before `stop` into zeros of a length: a view if they fill these.

    As elsewhere, a single row is repeated.
    """

    __props__ = ()
    view_map = {0: [0]}  # noqa: RUF012 -- the form PyTensor reads

    def make_node(self, rows: Variable, stop: Variable, length: Variable) -> Apply:
        rows = pt.as_tensor_variable(rows)
        stop, length = (pt.cast(pt.as_tensor_variable(n), "int64") for n in (stop, length))
        out = TensorType(rows.type.dtype, shape=(None, *rows.type.shape[1:]))()
        return Apply(self, [rows, stop, length], [out])

    def steps_of(self, node: Apply) -> Steps:
        """Return what there is to say of lengths: the given one counts, not that of the rows."""
        return Steps(node.inputs[2], [], [Rows(0, each_step=True)], node.inputs[:1])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        node, shapes = arguments[-2:]
        return [(node.inputs[2], *shapes[0][1:])]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        rows, stop, length = inputs
        if not len(rows) == stop == length:
            padded = np.zeros((int(length), *rows.shape[1:]), dtype=rows.dtype)
            padded[:stop] = rows
            rows = padded
        output_storage[0][0] = rows
