"""Products of all steps at once: ``z[t] = x[t] @ y[t]``, or their sum ``z = Σ_t x[t] @ y[t]``.

The matrices are ``x[t]`` of shape (m, d) and ``y[t]`` of shape (d, n), of which one may be the same
at every step. PyTensor writes such a product as five nodes or more, for sizes and for arrays of
other shapes; loops that are taken apart leave this Op instead. No user meets it before.
"""

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.type import TensorType


class StepProducts(Op):
    """The matrix product of every step's two matrices, or the sum of these over all steps
    (`total`).

    An argument of two axes is the same matrix at every step; with two of them, the result is their
    product. A sum needs two with a time axis.
    """

    __props__ = ("total",)

    def __init__(self, total: bool = False) -> None:
        self.total = total

    def make_node(self, x: Variable, y: Variable) -> Apply:
        x, y = pt.as_tensor_variable(x), pt.as_tensor_variable(y)
        least = 3 if self.total else 2
        ranks = {x.type.ndim, y.type.ndim}
        if not ranks <= {least, 3} or x.type.dtype != y.type.dtype:
            raise TypeError(f"expected two arrays of matrices of one dtype, got {x.type}, {y.type}")
        shape = self._shape(x.type.shape, y.type.shape)
        return Apply(self, [x, y], [TensorType(x.type.dtype, shape=shape)()])

    def _shape(self, x: tuple[Any, ...], y: tuple[Any, ...]) -> tuple[Any, ...]:
        if self.total or len(x) == len(y) == 2:
            return (x[-2], y[-1])
        if len(x) == len(y):
            return (y[0] if x[0] is None else x[0], x[-2], y[-1])
        return (x[0] if len(x) == 3 else y[0], x[-2], y[-1])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [self._shape(*map(tuple, arguments[-1]))]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        x, y = inputs
        if x.ndim == y.ndim == 3 and len(x) != len(y):
            raise ValueError(LENGTHS)
        if x.shape[-1] != y.shape[-2]:
            raise ValueError(SIZES)
        if self.total:
            product = np.tensordot(x, y, ((0, 2), (0, 1)))
        elif y.ndim == 2 and x.ndim == 3 and x.shape[1] < FEW_ROWS:
            product = np.tensordot(x, y, 1)  # the rows of all steps below one another
        else:
            product = np.matmul(x, y)
        output_storage[0][0] = np.asarray(product, dtype=x.dtype)


FEW_ROWS = 8  # of each step: from there on, a product for each step is faster
LENGTHS = "cannot multiply matrices step by step: one array has more of them than the other"
SIZES = "cannot multiply matrices step by step: the columns of one are not the rows of the other"
