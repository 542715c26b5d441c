"""Associative scans as loops: what a single processor does fastest.

Every `AssociativeScan` becomes its walk (`scanlib.ops.lowered.associative_scan.as_loop`), early, so
that everything known about loops applies to it. For backends that combine rows in
parallel, the graph carries the feature `CombinesInTrees`, and this rewrite does nothing.
"""

from __future__ import annotations

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.raise_op import CheckAndRaise

from scanlib._compat import features
from scanlib.ops.linker_features import CombinesInTrees
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.lowered.associative_scan import AssociativeScan, walked
from scanlib.rewrites.simplify.last_rows import _last_row
from scanlib.rewrites.simplify.simplify import replace

NO_ROWS = "index -1 is out of bounds: the associative scan has no rows, so it has no last one"


class AssociativeToLoop(LoopRewrite):
    """Replace associative scans by canonical loops."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if features(fgraph, CombinesInTrees):
            return
        for node in fgraph.toposort():
            if isinstance(node.op, AssociativeScan):
                with self.attempt(fgraph, node):
                    replace(fgraph, _replacements(fgraph, node), "scanlib_associative_to_loop")


def _replacements(fgraph: FunctionGraph, node: Apply) -> dict[Variable, Variable]:
    """Return what takes the place of a scan's results, and of reads of their last rows."""
    rows, results = walked(node)
    replacements: dict[Variable, Variable] = {}
    for out, new, history in zip(node.outputs, rows, results.histories, strict=True):
        if new is not history:
            replacements |= _last_rows(fgraph, node, out, history)
        replacements[out] = new
    return replacements


def _last_rows(
    fgraph: FunctionGraph, node: Apply, out: Variable, history: Variable
) -> dict[Variable, Variable]:
    """Let reads of the last row read the history itself, which then need not be stored.

    The history of a scan of no rows has one all the same, hence the check.
    """
    found: dict[Variable, Variable] = {}
    for client, position in fgraph.clients.get(out, ()):
        read = _last_row(client, position, needs_step=False)
        if read is not None and read.back == 1:
            row = history[(-1, *read.rest)]
            check = CheckAndRaise(IndexError, NO_ROWS)
            found[read.old] = check(row, pt.gt(node.inputs[0].shape[0], 0))
    return found
