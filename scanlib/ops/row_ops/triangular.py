"""The triangular factor of a matrix, in the shape that it really has.

A QR decomposition of an m × n matrix has a factor R with k = min(m, n) rows that are not zero.
PyTensor's `QR` in the mode ``r`` says that it returns m rows. Python and JAX do, numba and PyTorch
return k. What relies on the type then reads past the end, or fails. In steps of loops the
Op is replaced by one that always returns k rows, and says so; the zeros are put behind them.
"""

from typing import Any

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter, node_rewriter
from pytensor.tensor.blockwise import Blockwise
from pytensor.tensor.linalg.decomposition.qr import QR

from scanlib.ops.graph import core_op


class TriangularFactor(QR):
    """The first k rows of R: compiled like PyTensor's Op, of which it is one."""

    def __init__(self, mode: str = "r", overwrite_a: bool = False, pivoting: bool = False) -> None:
        super().__init__(mode=mode, overwrite_a=overwrite_a, pivoting=pivoting)
        self.gufunc_signature = "(m,n)->(k,n)" + (",(n)" if pivoting else "")

    def make_node(self, x: Variable) -> Apply:
        node = super().make_node(x)
        rows, columns = node.inputs[0].type.shape
        known = None if None in (rows, columns) else min(rows, columns)
        factor = pt.tensor(shape=(known, columns), dtype=node.outputs[0].type.dtype)
        return Apply(self, node.inputs, [factor, *node.outputs[1:]])

    def infer_shape(self, *arguments: Any) -> list[Any]:
        ((rows, columns),) = arguments[-1]
        return [(pt.minimum(rows, columns), columns), *([(columns,)] if self.pivoting else [])]

    def perform(self, node: Apply, inputs: list[Any], outputs: list[Any]) -> None:
        super().perform(node, inputs, outputs)
        outputs[0][0] = outputs[0][0][: min(inputs[0].shape)]


def returns_other_shapes(node: Apply) -> bool:
    """Whether a node's results have other shapes than PyTensor says, with each linker."""
    op = core_op(node)
    return isinstance(op, QR) and op.mode == "raw"


@node_rewriter([QR, Blockwise])
def say_how_many_rows(fgraph: FunctionGraph, node: Apply) -> list[Variable] | None:
    """Take the rows that are not zero, and put the others behind them."""
    op = core_op(node)
    if type(op) is not QR or op.mode != "r":
        return None
    (x,) = node.inputs
    rows, columns = x.type.shape[-2:]
    if rows is not None and columns is not None and rows <= columns:
        return None
    made = TriangularFactor(pivoting=op.pivoting)
    factor, *rest = (made if x.type.ndim == 2 else Blockwise(made)).make_node(x).outputs
    sizes = [x.shape[axis] for axis in range(x.type.ndim)]
    missing = (*sizes[:-2], sizes[-2] - factor.shape[-2], sizes[-1])
    whole = pt.join(-2, factor, pt.zeros(missing, dtype=factor.type.dtype))
    return [node.outputs[0].type.filter_variable(whole, allow_convert=True), *rest]


true_shapes = dfs_rewriter(say_how_many_rows)
