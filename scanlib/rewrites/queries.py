"""PyTensor's rewrites, run on graphs of any length."""

from __future__ import annotations

from pytensor.compile.mode import optdb
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

LONG = 200  # operations
# These write each partial product of a chain as the product of all its factors, try each way to
# multiply sums out, or look for sigmoids among all factors: quadratic and worse in a derivative.
_QUADRATIC = ("local_mul_canonizer", "local_greedy_distributor", "local_sigm_times_exp")


def run_query(query: RewriteDatabaseQuery, fgraph: FunctionGraph) -> None:
    """Run the rewrites of a query, without those whose time grows faster than a long graph."""
    optdb.query(without_quadratic(query, fgraph)).rewrite(fgraph)


def without_quadratic(query: RewriteDatabaseQuery, fgraph: FunctionGraph) -> RewriteDatabaseQuery:
    """Return a query as it is for short graphs, without those rewrites for long ones."""
    return query.excluding(*_QUADRATIC) if len(fgraph.apply_nodes) > LONG else query
