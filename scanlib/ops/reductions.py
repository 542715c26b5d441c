"""What reads all rows of a loop at once: sums over axes, products step by step, checks of shapes.

These Ops compute what PyTensor's `Sum`, `Dot`, `BatchedDot` and `SpecifyShape` compute. They exist
for the time that compiling takes: numba spends two to three seconds on the first of these of a
process, which assigns arrays to slices, sorts strides or writes numbers into an error's text, and
so brings in the code that formats text; and the one large product that takes the place of a step's
small ones is five nodes or more of PyTensor's, for the sizes and for the arrays of other shapes. In
numba mode, the split of loops and a late rewrite write these Ops instead, and `StepProducts` under
JAX, too; no user meets them before.

===============  =========================================================================
`AxesSum`        ``y[k] = Σ_r x[k, r]``, `r` the axes that are summed over, in any place
`StepProducts`   ``z[t] = x[t] @ y[t]`` or ``z = Σ_t x[t] @ y[t]``, with matrices ``x[t]`` (m, d)
                 and ``y[t]`` (d, n), of which one may be the same at every step
`SpecifiedSizes` ``x``, after the check that some of its sizes are what they should be
===============  =========================================================================
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.type import TensorType

from scanlib.ops.errors import SpecifiedShapeError


class AxesSum(Op):
    """The sum of an array over some of its axes.

    Parameters
    ----------
    axes : tuple of int
        The axes to sum over, none of them negative.
    dtype : str
        The dtype of the result.
    acc_dtype : str
        The dtype in which items are added.
    """

    __props__ = ("axes", "dtype", "acc_dtype")

    def __init__(self, axes: tuple[int, ...], dtype: str, acc_dtype: str) -> None:
        self.axes, self.dtype, self.acc_dtype = axes, dtype, acc_dtype

    def make_node(self, x: Variable) -> Apply:
        x = pt.as_tensor_variable(x)
        if not self.axes or not set(self.axes) <= set(range(x.type.ndim)):
            raise ValueError(f"cannot sum an array of {x.type.ndim} axes over axes {self.axes}")
        kept = self._kept(x.type.shape)
        return Apply(self, [x], [TensorType(self.dtype, shape=kept)()])

    def _kept(self, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(size for axis, size in enumerate(sizes) if axis not in self.axes)

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [self._kept(tuple(arguments[-1][0]))]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        total = np.sum(inputs[0], axis=self.axes, dtype=self.acc_dtype)
        output_storage[0][0] = np.asarray(total, dtype=self.dtype)


class StepProducts(Op):
    """The matrix product of every step's two matrices, or the sum of these over all steps.

    Parameters
    ----------
    total : bool
        Whether the products are added up. Both arguments must have a time axis then.

    Notes
    -----
    An argument of two axes is the same matrix at every step; with two of them, the result is
    their product.
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
        product = np.tensordot(x, y, ((0, 2), (0, 1))) if self.total else np.matmul(x, y)
        output_storage[0][0] = np.asarray(product, dtype=x.dtype)


class SpecifiedSizes(Op):
    """An array, after the check that it has some of its sizes.

    Parameters
    ----------
    sizes : tuple of (int or None)
        The size of each axis; None where it may be any.
    """

    __props__ = ("sizes",)
    view_map: ClassVar[dict[int, list[int]]] = {0: [0]}

    def __init__(self, sizes: tuple[int | None, ...]) -> None:
        self.sizes = sizes

    def make_node(self, x: Variable) -> Apply:
        x = pt.as_tensor_variable(x)
        if x.type.ndim != len(self.sizes):
            raise ValueError(f"expected an array of {len(self.sizes)} axes, got {x.type}")
        both = zip(self.sizes, x.type.shape, strict=True)
        shape = tuple(known if size is None else size for size, known in both)
        return Apply(self, [x], [TensorType(x.type.dtype, shape=shape)()])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        node, shapes = arguments[-2:]
        known = node.outputs[0].type.shape
        both = zip(known, shapes[0], strict=True)
        return [tuple(s if k is None else pt.constant(k, dtype="int64") for k, s in both)]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        for axis, size in enumerate(self.sizes):
            if size is not None and inputs[0].shape[axis] != size:
                raise SpecifiedShapeError(SPECIFIED, axis, inputs[0].shape[axis], size)
        output_storage[0][0] = inputs[0]


SPECIFIED = "SpecifyShape: dim {} of input has shape {}, expected {}."
LENGTHS = "cannot multiply matrices step by step: one array has more of them than the other"
SIZES = "cannot multiply matrices step by step: the columns of one are not the rows of the other"
