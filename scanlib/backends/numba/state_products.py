"""Products of the states of a matrix recurrence and other rows, computed with the recurrence,

    z_t[i, j] = h_t[i] x_t[j]        or        z_t[i, j] = x_t[i] h_t[j]

The gradient by a matrix for each step is such a product of the adjoint and the state. The steps of
small matrices wait for one another and leave the memory idle; the products, which are as large as
the matrices, are written meanwhile (`scanlib.schedules.linear_steps`).
"""

from collections.abc import Iterator
from typing import NamedTuple

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import toposort_with_orderings
from pytensor.scalar.basic import Mul
from pytensor.tensor.elemwise import CAReduce, DimShuffle, Elemwise

from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.schedules.linear_steps import has_products

# An axis behind the numbers of a row, or before them, and the place of the states in a product.
OUTER = {(0, 1, "x"): "after", (0, "x", 1): "before"}


class Products(NamedTuple):
    """The products of a recurrence: the node that multiplies, where the other rows are, which have
    to be computed before the recurrence, and the place of the states (``"after"`` or ``"before"``),
    see `scanlib.schedules.linear_steps.linear_program`."""

    product: Apply
    other: Variable
    outer: str


def products_of(fgraph: FunctionGraph) -> dict[Apply, Products]:
    """Return the recurrences of a graph that are computed with such products.

    The other rows come before the recurrence then, and the graph must have an order all the same:
    they may depend on it, or on a recurrence that waits for it, or their memory on who reads it.
    """
    found: dict[Apply, Products] = {}
    orderings = dict(fgraph.orderings())
    for node in fgraph.toposort():
        if not isinstance(node.op, LinearScan) or not has_products(node):
            continue
        for products in _with(fgraph, node.outputs[0]):
            owner = products.other.owner
            before = [*orderings.get(node, ()), *[owner] * (owner is not None)]
            if _have_order(fgraph, {**orderings, node: before}):
                found[node], orderings[node] = products, before
                break
    return found


def _have_order(fgraph: FunctionGraph, orderings: dict[Apply, list[Apply]]) -> bool:
    try:
        return bool(list(toposort_with_orderings(fgraph.outputs, orderings=orderings)))
    except ValueError:  # the graph contains cycles
        return False


def _with(fgraph: FunctionGraph, states: Variable) -> Iterator[Products]:
    """Yield the products of states and other rows."""
    for shuffle, _ in fgraph.clients[states]:
        if not _is_shuffle(shuffle):
            continue
        (rows,) = shuffle.outputs
        for product, _ in fgraph.clients[rows]:
            other = _other_rows(product, rows)
            if other is not None and not _is_summed(fgraph, product.outputs[0]):
                yield Products(product, other, OUTER[shuffle.op.new_order])


def _is_shuffle(node: Apply | None) -> bool:
    return node is not None and isinstance(node.op, DimShuffle) and node.op.new_order in OUTER


def _other_rows(product: Apply, states: Variable) -> Variable | None:
    """Return the rows that a node multiplies with shuffled states, None if it does not."""
    is_product = isinstance(product.op, Elemwise) and isinstance(product.op.scalar_op, Mul)
    if not is_product or len(product.inputs) != 2 or product.op.destroy_map:
        return None
    first, second = (inp.owner for inp in product.inputs)
    other, own = (second, first) if product.inputs[0] is states else (first, second)
    if not _is_shuffle(other) or other.op.new_order == own.op.new_order:
        return None
    pair = other.inputs[0], own.inputs[0]
    same = {variable.type.dtype for variable in (*pair, product.outputs[0])}
    return pair[0] if len(same) == 1 and 1 not in [v.type.shape[0] for v in pair] else None


def _is_summed(fgraph: FunctionGraph, variable: Variable) -> bool:
    """Whether only a sum reads products, which needs no memory for them."""
    clients = fgraph.clients[variable]
    return len(clients) == 1 and isinstance(clients[0][0].op, CAReduce)
