"""Which steps of a loop with `until` ran: what a gradient needs in a batch.

The gradient of a loop with `until` walks back over the steps that ran. In a batch of such loops
(`scanlib.ops.batching`) every one stops by itself and keeps its values until all have stopped; what
it kept are no steps, and its gradient must pass over them. So the loop that walks back has a mask
among its sequences, `RanSteps` of a result of the forward loop. For a single loop it is true
everywhere, so no step reads it, and rewrites drop it. `vectorize_graph` makes of it the masks of
the batch, and has the steps of the batched loop read them.
"""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.tensor.type import TensorType

from scanlib.ops.row_ops.linear_op import UnconnectedOp


class RanSteps(UnconnectedOp):
    """True for every row that a loop stacked, but for `depth` initial rows.

    If it is not used `from_first`, from the first step on (the last steps of a loop are others for
    every member of a batch), there is no batch of it.
    """

    __props__ = ("depth", "from_first")

    def __init__(self, depth: int, from_first: bool = True) -> None:
        self.depth = depth
        self.from_first = from_first

    def make_node(self, rows: Variable) -> Apply:
        rows = pt.as_tensor_variable(rows)
        known = rows.type.shape[0]
        steps = None if known is None else known - self.depth
        return Apply(self, [rows], [TensorType("bool", shape=(steps,))()])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [(arguments[-1][0][0] - self.depth,)]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = np.ones(len(inputs[0]) - self.depth, dtype=bool)


def is_mask(variable: Variable) -> bool:
    """Whether a variable says which steps ran."""
    return variable.owner is not None and isinstance(variable.owner.op, RanSteps)


def steps_of(mask: Variable) -> Variable:
    """Return how many steps a mask is for."""
    node = mask.owner
    return node.inputs[0].shape[0] - node.op.depth
