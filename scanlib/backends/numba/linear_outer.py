"""A matrix recurrence with products of its states and other rows, written as they are computed.

    z_t[i, j] = h_t[i] x_t[j]        or        z_t[i, j] = x_t[i] h_t[j]

The gradient by a matrix for each step is such a product of the adjoint and the state. The steps of
small matrices wait for one another and leave the memory idle; the products, which are as large as
the matrices, are written meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.traversal import ancestors
from pytensor.link.numba.dispatch.basic import numba_njit
from pytensor.scalar.basic import Mul
from pytensor.tensor.elemwise import DimShuffle, Elemwise

from scanlib.backends.numba.graph_arrays import total_behind
from scanlib.backends.numba.lazy import lazily
from scanlib.backends.numba.linear_scan import LinearWriter, fastmath_of
from scanlib.ops.linear_scan import LinearScan

_LAST, _MIDDLE = (0, 1, "x"), (0, "x", 1)


class OuterWriter(LinearWriter):
    """Writes the function of a node that takes the other rows, too, and returns the products.

    They have no rows where the other array has not as many as the history: the caller raises then.
    """

    def __init__(self, op: LinearScan, node: Apply, outer: str) -> None:
        super().__init__(op, node)
        self.outer = outer
        self.arguments = [*self.arguments, "other"]

    def write(self, caller: str = "compiled code") -> tuple[Callable[..., Any], str | None]:
        line = self.line
        self.write_checks()
        line("others = contiguous(other)")
        line(f"rows, width = steps + {self.initial}.shape[0], others.shape[1]")
        line("rows = rows if others.shape[0] == rows else 0")
        sizes = "d, width" if self.outer == "after" else "width, d"
        line(f"z = new_array(number, rows, {sizes})")
        known = " | ".join(f"(d == {size})" for size in self.vector_sizes())
        with self.block(f"if (rows > 0) & (width == d) & ({known}):"):
            self.write_storage()
            self.write_by_vectors()
        with self.block("else:"):
            self.write_one_by_one()
        line("return h, z")
        return self.source.compile("linear_outer", self.arguments, self.versions(caller))

    def outer_products(self) -> tuple[str, str]:
        return self.outer, "others, z"

    def write_one_by_one(self) -> None:
        """Write all steps, and then all products."""
        out = self.node.outputs[0].type
        function, key = LinearWriter(self.op, self.node).write()
        call = lazily(function, str(key), [(out.dtype, out.ndim)], True)
        name = self.source.function(call, key, "alone")
        self.line(f"h = {name}(({', '.join(self.arguments[:-1])},))")
        left, right = ("h", "others") if self.outer == "after" else ("others", "h")
        nest = ("t in range(rows)", "i in range(z.shape[1])", "j in range(z.shape[2])")
        with ExitStack() as stack:
            for loop in nest:
                stack.enter_context(self.block(f"for {loop}:"))
            self.line(f"z[t, i, j] = {left}[t, i] * {right}[t, j]")


def write_with_products(op: LinearScan, node: Apply, outer: str) -> tuple[Any, str | None]:
    """Return the compiled function of a recurrence with products, and its key."""
    function: Callable[..., Any]
    function, key = OuterWriter(op, node, outer).write()
    return numba_njit(function, fastmath=fastmath_of(op)), key


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
        The place of the states, see `linear_vectors.StepKind`.
    first : list of Apply
        What has to be computed before, in this order.
    """
    op, history = node.op, node.outputs[0]
    if op.coefficient == "fixed" or op.has_mask or not LinearWriter(op, node).by_vectors():
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
