"""Where loops start: arrays filled with one number, and rows made into one-row histories.

`Filled` and `AsRow` compute what PyTensor's `Alloc` and `ExpandDims` compute. They exist for
the time that compiling takes: numba spends two to four seconds on the former, because it
assigns a scalar to a slice and with that brings in the code that formats error messages, and a
tenth of a second on the latter. A late rewrite puts them in front of loops, in numba mode
only; no user meets them before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op
from pytensor.tensor.type import TensorType


class Filled(Op):
    """An array of the given sizes that holds one number everywhere.

    Parameters
    ----------
    static_shape : tuple of (int or None)
        The sizes that are known when the graph is built.
    """

    __props__ = ("static_shape",)

    def __init__(self, static_shape: tuple[int | None, ...]) -> None:
        self.static_shape = static_shape

    def make_node(self, value: Variable, *sizes: Variable) -> Apply:
        value = pt.as_tensor_variable(value)
        dims = [pt.cast(pt.as_tensor_variable(size), "int64") for size in sizes]
        if value.type.ndim or any(dim.type.ndim for dim in dims):
            raise TypeError("Filled takes a scalar and scalar sizes")
        if len(dims) != len(self.static_shape):
            raise ValueError(f"Filled takes {len(self.static_shape)} sizes, got {len(dims)}")
        out = TensorType(value.type.dtype, shape=self.static_shape)()
        return Apply(self, [value, *dims], [out])

    def infer_shape(self, *arguments: Any) -> list[tuple[Variable, ...]]:
        return [tuple(arguments[-2].inputs[1:])]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        value, *sizes = inputs
        shape = tuple(int(size) for size in sizes)
        output_storage[0][0] = np.full(shape, value, dtype=node.outputs[0].type.dtype)


class AsRow(Op):
    """``expand_dims(value, 0)``, as a copy."""

    __props__ = ()

    def make_node(self, value: Variable) -> Apply:
        value = pt.as_tensor_variable(value)
        return Apply(self, [value], [TensorType(value.type.dtype, shape=(1, *value.type.shape))()])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [(pt.constant(1, dtype="int64"), *arguments[-1][0])]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        output_storage[0][0] = np.array(inputs[0])[np.newaxis]
