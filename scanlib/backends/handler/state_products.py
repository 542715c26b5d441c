"""A matrix recurrence with products of its states and other rows, written as they are computed.

    z_t[i, j] = h_t[i] x_t[j]        or        z_t[i, j] = x_t[i] h_t[j]

The gradient by a matrix for each step is such a product of the adjoint and the state. The steps of
small matrices wait for one another and leave the memory idle; the products, which are as large as
the matrices, are written meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors
from pytensor.scalar.basic import Mul
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise

from scanlib.ops.graph import depends_on
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.schedules.linear_steps import has_products

_LAST, _MIDDLE = (0, 1, "x"), (0, "x", 1)


@dataclass(frozen=True)
class Products:
    """The products of a recurrence's states, which are computed with them.

    Attributes
    ----------
    product : Apply
        The node.
    other : Variable
        Where the other rows are; it has to be computed before the recurrence.
    outer : {"after", "before"}
        The place of the states, see `scanlib.schedules.linear_steps.linear_program`.
    """

    product: Apply
    other: Variable
    outer: str


def products_of(fgraph: FunctionGraph) -> dict[Apply, Products]:
    """Return the recurrences of a graph that have such products."""
    found: dict[Apply, Products] = {}
    for node in fgraph.toposort():
        if isinstance(node.op, LinearScan):
            products = _products_of(fgraph, node, {p.other for p in found.values()})
            if products is not None:
                found[node] = products
    return found


def _products_of(fgraph: FunctionGraph, node: Apply, waited_for: set[Variable]) -> Products | None:
    history = node.outputs[0]
    # What others wait for must not wait itself.
    if not has_products(node) or waited_for & depends_on([*waited_for], [history]):
        return None
    for shuffle, _ in fgraph.clients[history]:
        if not _is_shuffle(shuffle):
            continue
        for product, _ in fgraph.clients[shuffle.outputs[0]]:
            other = _other_rows(product, shuffle)
            if other is None or _is_summed(fgraph, product.outputs[0]):
                continue  # sums of products need no memory for these
            above = {v.owner for v in ancestors([other]) if v.owner is not None}
            # What is moved to an earlier place must not write where somebody has yet to read.
            if node in above or any(n.op.destroy_map for n in [*above, product]):
                continue
            return Products(product, other, "after" if shuffle.op.new_order == _LAST else "before")
    return None


def _is_summed(fgraph: FunctionGraph, variable: Variable) -> bool:
    clients = fgraph.clients[variable]
    return len(clients) == 1 and isinstance(clients[0][0].op, CAReduce)


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
