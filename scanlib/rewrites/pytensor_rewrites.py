"""PyTensor's rewrites, run on graphs of any length and kept for the bodies of loops.

Sums of hundreds of terms as flat trees: ``((a + b) + c) + …`` becomes ``add(add(a, b, …), …)``.

PyTensor's rewrites of nested sums and products call themselves for each term, which Python's stack
does not hold, and try again at each of the partial sums. The cost of hundreds of loops' results is
such a sum, and so is the derivative by what all operations of a long step use.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply, Constant, Variable
from pytensor.graph.fg import FrozenFunctionGraph, FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.scalar import Add, Mul
from pytensor.scalar import basic as ps
from pytensor.scalar import math as ps_math
from pytensor.tensor.basic import AllocDiag, Eye
from pytensor.tensor.elemwise import Elemwise

from scanlib._compat import SHORT_PRODUCTS, copy_graph, freeze_graph, thaw_graph
from scanlib.ops.graph import applies, core_op, is_tensor, taken_apart
from scanlib.ops.logaddexp import write_stable_logs
from scanlib.ops.loop import Loop
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.scan import Scan

MANY = 60  # terms, or operations
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
    return applies(node, Add | Mul)


def _is_partial(fgraph: FunctionGraph, node: Apply) -> bool:
    """Whether all that reads a sum is one larger sum."""
    out = node.outputs[0]
    (reader, _), *others = fgraph.clients[out]
    same = _is_sum(reader) and reader.op == node.op and reader.outputs[0].type == out.type
    return same and not others


class FlattenLongSums(LoopRewrite):
    """Long sums of graphs with loops; those of steps are flattened with the steps."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if any(isinstance(node.op, Scan) for node in fgraph.apply_nodes):
            flatten_long_sums(fgraph)


CANONICAL = RewriteDatabaseQuery(include=["canonicalize", "merge"])
LONG = 200  # operations
# This one goes on and on where a step multiplies many sums, as several of Newton's iterations do.
_ENDLESS = ("local_greedy_distributor",)
# These write each partial product of a chain as the product of all its factors, or look for
# sigmoids among all factors: quadratic and worse in a derivative.
_QUADRATIC = ("local_mul_canonizer", "local_sigm_times_exp")
# These search all above each factor of a product for what may make it diagonal, or choose rows.
_STRUCTURED = ("dot_diag_to_elemwise", "selection_dot_to_indexing")
KEPT = 64  # bodies
LARGE = 1 << 16  # items of a constant that nothing should keep alive

# What PyTensor's stable forms are made of.
_UNSTABLE = (
    *(ps.Log, ps.Log1p, ps.Exp),
    *(ps_math.Sigmoid, ps_math.Erf, ps_math.Erfc, ps_math.Ive, ps_math.Kve),
)
_STABILIZE = RewriteDatabaseQuery(include=["stabilize"])
# Canonical bodies have products with -1 where stable forms, as ``log1p(-sigmoid(x))``, have none.
_as_negative = dfs_rewriter(SHORT_PRODUCTS)


def run_query(query: RewriteDatabaseQuery, fgraph: FunctionGraph) -> None:
    """Run the rewrites of a query, without those whose time grows faster than a long graph."""
    flatten_long_sums(fgraph)
    operations = len(fgraph.apply_nodes)
    query = query.excluding(*_ENDLESS) if operations > MANY else query
    query = query.excluding(*_QUADRATIC) if operations > LONG else query
    if operations > LONG and not any(map(_has_structure, fgraph.apply_nodes)):
        query = query.excluding(*_STRUCTURED)
    optdb.query(query).rewrite(fgraph)


def _has_structure(node: Apply) -> bool:
    """Whether a node makes, or reads, a matrix that may be diagonal or choose rows."""
    constants = [inp.type for inp in node.inputs if isinstance(inp, Constant) and is_tensor(inp)]
    is_read = any(type.ndim > 1 and not all(type.broadcastable) for type in constants)
    return is_read or isinstance(core_op(node), AllocDiag | Eye)


def may_overflow(node: Apply) -> bool:
    """Whether PyTensor may have a stable form for what a node is part of."""
    return applies(node, _UNSTABLE)


def stabilize(graph: FunctionGraph) -> None:
    """Write logarithms and exponentials in forms that do not overflow, as PyTensor does."""
    if any(map(may_overflow, graph.apply_nodes)):
        write_stable_logs(graph)
        _as_negative.rewrite(graph)
        run_query(_STABILIZE, graph)


class BodyRewrite:
    """A rewrite of bodies, which changes a graph, that is run once on each.

    Passes ask for the same body in the same form again and again, and so do the functions of a
    value and of its gradient. One that `settles` leaves as it is what it made itself.
    """

    def __init__(self, rewrite: Callable[[FunctionGraph], None], settles: bool = False) -> None:
        self.rewrite = rewrite
        self.settles = settles
        self._made: OrderedDict[FrozenFunctionGraph, FrozenFunctionGraph] = OrderedDict()

    def __call__(self, loop: Loop) -> bool:
        """Rewrite the body of a loop; return whether that changed it."""
        inputs = loop.body_inputs()
        body = freeze_graph(inputs, loop.body_outputs())
        made = self._made.get(body)
        if made is None:
            graph = thaw_graph(body)
            self.rewrite(graph)
            made = freeze_graph(graph.inputs, graph.outputs)
            read = (inp for node in body.apply_nodes for inp in node.inputs)
            constants = (inp.data for inp in read if isinstance(inp, Constant))
            if all(getattr(data, "size", 0) <= LARGE for data in constants):
                self._made |= {body: made, made: made} if self.settles else {body: made}
            while len(self._made) > KEPT:
                self._made.popitem(last=False)
        if made == body:
            return False
        loop.set_body_outputs(copy_graph(made.inputs, made.outputs, onto=inputs)[1])
        return True
