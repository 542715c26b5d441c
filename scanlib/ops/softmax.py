"""Softmax over axes of an array, in a form that compiles fast.

With the axes `r` of an array ``x[k, r]`` normalized, in any place::

    y[k, r] = exp(x[k, r] - m[k]) / Σ_s exp(x[k, s] - m[k])        m[k] = max_s x[k, s]

PyTensor's `Softmax` computes the same with four Ops, of which the maximum alone takes numba three
seconds to compile: the first of a process brings in the code that sorts and formats text. The
gradients of hidden Markov chains are full of them. A late rewrite puts `AxesSoftmax` behind loops,
in numba mode only; no user meets it before.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.op import Op


class AxesSoftmax(Op):
    """The softmax of an array over some of its axes.

    Parameters
    ----------
    axes : tuple of int
        The axes that are normalized together, none of them negative.
    """

    __props__ = ("axes",)

    def __init__(self, axes: tuple[int, ...]) -> None:
        self.axes = axes

    def make_node(self, x: Variable) -> Apply:
        x = pt.as_tensor_variable(x)
        if not self.axes or not set(self.axes) <= set(range(x.type.ndim)):
            raise ValueError(
                f"cannot take the softmax of an array of {x.type.ndim} axes over axes {self.axes}"
            )
        return Apply(self, [x], [x.type()])

    def infer_shape(self, *arguments: Any) -> list[tuple[Any, ...]]:
        return [tuple(arguments[-1][0])]

    def perform(self, node: Apply, inputs: list[Any], output_storage: list[list[Any]]) -> None:
        (x,) = inputs
        if not x.size:
            output_storage[0][0] = np.empty_like(x)
            return
        with np.errstate(invalid="ignore"):  # infinities become NaN, as in compiled code
            e = np.exp(x - x.max(axis=self.axes, keepdims=True))
        output_storage[0][0] = e / e.sum(axis=self.axes, keepdims=True)
