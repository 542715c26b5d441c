"""A matrix recurrence with products of its states and other rows, written as they are computed.

    z_t[i, j] = h_t[i] x_t[j]        or        z_t[i, j] = x_t[i] h_t[j]

The gradient by a matrix for each step is such a product of the adjoint and the state. The steps of
small matrices wait for one another and leave the memory idle; the products, which are as large as
the matrices, are written meanwhile.
"""

from __future__ import annotations

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Mul
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from scanlib.backends.numba.graph_arrays import total_behind
from scanlib.kernels.schedules.linear import has_products

_LAST, _MIDDLE = (0, 1, "x"), (0, "x", 1)


def products_behind(
    fgraph: FunctionGraph, node: Apply, later: list[Apply], underway: set[Apply]
) -> tuple[Apply, Variable, str, list[Apply]] | None:
    """Return the node of products of a recurrence's states, to be computed with them.

    Parameters
    ----------
    fgraph : FunctionGraph
        The graph.
    node : Apply
        A node of a `LinearScan`.
    later : list of Apply
        What is computed after it, in an order in which it can be.
    underway : set of Apply
        Nodes that wait for this one.

    Returns
    -------
    product : Apply
        The node.
    other : Variable
        Where the other rows are.
    outer : {"after", "before"}
        The place of the states, see `scanlib.kernels.schedules.linear.linear_program`.
    first : list of Apply
        What has to be computed before, in this order.
    """
    history = node.outputs[0]
    if not has_products(node):
        return None
    shuffles = [reader for reader, _ in fgraph.clients[history] if _is_shuffle(reader)]
    for shuffle in shuffles:
        for product in later:
            other = _other_rows(product, shuffle)
            if other is None or total_behind(fgraph, product.outputs[0]) is not None:
                continue  # sums of products need no memory for these
            above = {v.owner for v in ancestors([other]) if v.owner is not None}
            first = [n for n in later if n in above]
            # What is moved to an earlier place must not write where somebody has yet to read.
            if above & {node, *underway} or any(n.op.destroy_map for n in [*first, product]):
                continue
            return product, other, "after" if shuffle.op.new_order == _LAST else "before", first
    return None


def _is_shuffle(node: Apply) -> bool:
    return isinstance(node.op, DimShuffle) and node.op.new_order in (_LAST, _MIDDLE)


def _other_rows(product: Apply, shuffle: Apply) -> Variable | None:
    """Return the rows that a node multiplies with shuffled states, None if it does not."""
    if not isinstance(product.op, Elemwise) or not isinstance(product.op.scalar_op, Mul):
        return None
    factors = [v for v in product.inputs if v is not shuffle.outputs[0]]
    if len(product.inputs) != 2 or len(factors) != 1:
        return None
    owner = factors[0].owner
    if owner is None or not _is_shuffle(owner) or owner.op.new_order == shuffle.op.new_order:
        return None
    other, states = owner.inputs[0], shuffle.inputs[0]
    same = other.type.dtype == states.type.dtype == product.outputs[0].type.dtype
    if not same or 1 in (other.type.shape[0], states.type.shape[0]):
        return None
    return other
