"""PyTensor's rewrites, run on graphs of any length and kept for the bodies of loops."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from pytensor.compile.mode import optdb
from pytensor.graph.basic import Constant
from pytensor.graph.fg import FrozenFunctionGraph, FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

from scanlib._compat import copy_graph, freeze_graph, thaw_graph
from scanlib.ops.loop import Loop
from scanlib.rewrites.long_sums import flatten_long_sums

LONG = 200  # operations
# These write each partial product of a chain as the product of all its factors, try each way to
# multiply sums out, or look for sigmoids among all factors: quadratic and worse in a derivative.
_QUADRATIC = ("local_mul_canonizer", "local_greedy_distributor", "local_sigm_times_exp")
KEPT = 64  # bodies
LARGE = 1 << 16  # items of a constant that nothing should keep alive


def run_query(query: RewriteDatabaseQuery, fgraph: FunctionGraph) -> None:
    """Run the rewrites of a query, without those whose time grows faster than a long graph."""
    flatten_long_sums(fgraph)
    optdb.query(without_quadratic(query, fgraph)).rewrite(fgraph)


def without_quadratic(query: RewriteDatabaseQuery, fgraph: FunctionGraph) -> RewriteDatabaseQuery:
    """Return a query as it is for short graphs, without those rewrites for long ones."""
    return query.excluding(*_QUADRATIC) if len(fgraph.apply_nodes) > LONG else query


class BodyRewrite:
    """A rewrite of bodies that is run once on each.

    Passes ask for the same body in the same form again and again, and so do the functions of a
    value and of its gradient.

    Parameters
    ----------
    rewrite : callable
        Changes the graph of a body.
    settles : bool
        Whether it leaves as it is what it made itself.
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
            self._keep(body, made)
        if made == body:
            return False
        loop.set_body_outputs(copy_graph(made.inputs, made.outputs, onto=inputs)[1])
        return True

    def _keep(self, body: FrozenFunctionGraph, made: FrozenFunctionGraph) -> None:
        if any(_is_large(inp) for node in body.apply_nodes for inp in node.inputs):
            return
        self._made[body] = made
        if self.settles:
            self._made[made] = made
        while len(self._made) > KEPT:
            self._made.popitem(last=False)


def _is_large(variable: object) -> bool:
    return isinstance(variable, Constant) and getattr(variable.data, "size", 0) > LARGE
