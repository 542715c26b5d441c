"""Which recurrences in matrices are left to the loop for what their matrices would cost.

A lowered recurrence reads a matrix for each step. Where the loop itself multiplies with a fixed
matrix and with a row, as the adjoint of ``h_t = tanh(x_t + U h_{t-1})`` does with ``U`` and
``1 - h_t²``, the matrices ``diag(1 - h_t²) U`` of all steps would have to be made: `d` times as
many numbers as the loop moves, and as many more for each item of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from pytensor.graph.basic import Variable
from pytensor.graph.traversal import ancestors
from pytensor.scalar import basic as ps
from pytensor.tensor.basic import ScalarFromTensor, TensorFromScalar
from pytensor.tensor.elemwise import DimShuffle, Elemwise
from pytensor.tensor.shape import SpecifyShape
from pytensor.tensor.subtensor import Subtensor

# Sizes of matrices that are made for every step at no cost to speak of, and at too great a cost.
SMALL, LARGE = 4, 32

_VIEWS = (DimShuffle, Subtensor, SpecifyShape, ScalarFromTensor, TensorFromScalar)


def builds_matrices(matrix: Variable, rows: Iterable[Variable]) -> bool:
    """Whether a recurrence's matrices of all steps take more memory than what they are made of.

    Parameters
    ----------
    matrix : Variable
        The matrix of one step, with the state's other axes in front of its own two.
    rows : iterable of Variable
        What differs from step to step.
    """
    source = matrix
    while source.owner is not None and isinstance(source.owner.op, _VIEWS):
        source = source.owner.inputs[0]
    varying = set(rows)
    if not _is_product(source) or not varying.intersection(ancestors([matrix])):
        return False
    factors = [inp for inp in source.owner.inputs if True not in inp.type.broadcastable[-2:]]
    if varying.intersection(ancestors(factors)):
        return False  # a step makes such matrices in any case
    size = max((length or 0 for length in matrix.type.shape[-2:]), default=0)
    if 0 < size <= SMALL:
        return False
    if any(length != 1 for length in matrix.type.shape[:-2]):
        return True
    return size > LARGE


def _is_product(variable: Variable) -> bool:
    node = variable.owner
    return (
        node is not None and isinstance(node.op, Elemwise) and isinstance(node.op.scalar_op, ps.Mul)
    )
