"""Sums of hundreds of terms as flat trees: ``((a + b) + c) + …`` becomes ``add(add(a, b, …), …)``.

PyTensor's rewrites of nested sums and products call themselves for each term, which Python's stack
does not hold, and try again at each of the partial sums. The cost of hundreds of loops' results is
such a sum, and so is the derivative by what all operations of a long step use.
"""

from __future__ import annotations

from collections.abc import Sequence

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.scalar import Add, Mul
from pytensor.tensor.elemwise import Elemwise

from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.recursion import taken_apart
from scanlib.ops.scan import Scan

MANY = 60  # terms
MOST_AT_ONCE = 24  # PyTensor's `perform` takes no more than 31


def flatten_long_sums(fgraph: FunctionGraph) -> None:
    """Replace nested sums and products of more than `MANY` terms by a flat tree of all of them."""
    if len(fgraph.apply_nodes) < MANY:
        return
    for node in fgraph.toposort():
        if node not in fgraph.apply_nodes or not _is_sum(node) or _is_partial(fgraph, node):
            continue
        terms = _terms(fgraph, node)
        if len(terms) > MANY and len(node.inputs) < MOST_AT_ONCE:
            fgraph.replace(node.outputs[0], _tree(node.op, terms), reason="scanlib_long_sums")


def _terms(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    root = node.outputs[0]

    def parts(variable: Variable) -> Sequence[Variable] | None:
        owner = variable.owner
        if variable is root or (
            _is_sum(owner)
            and owner.op == node.op
            and variable.type == root.type
            and len(fgraph.clients[variable]) == 1
        ):
            return owner.inputs
        return None

    return taken_apart(root, parts)


def _tree(op: Elemwise, terms: list[Variable]) -> Variable:
    while len(terms) > 1:
        starts = range(0, len(terms), MOST_AT_ONCE)
        groups = [terms[start : start + MOST_AT_ONCE] for start in starts]
        terms = [op(*group) if len(group) > 1 else group[0] for group in groups]
    return terms[0]


def _is_sum(node: Apply | None) -> bool:
    return (
        node is not None
        and isinstance(node.op, Elemwise)
        and isinstance(node.op.scalar_op, Add | Mul)
    )


def _is_partial(fgraph: FunctionGraph, node: Apply) -> bool:
    """Whether all that reads a sum is one larger sum."""
    clients = fgraph.clients[node.outputs[0]]
    if len(clients) != 1:
        return False
    reader = clients[0][0]
    return (
        _is_sum(reader) and reader.op == node.op and reader.outputs[0].type == node.outputs[0].type
    )


class FlattenLongSums(LoopRewrite):
    """Long sums of graphs with loops; those of steps are flattened with the steps."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if any(isinstance(node.op, Scan) for node in fgraph.apply_nodes):
            flatten_long_sums(fgraph)
