"""Steps of loops that stay: slices a derivative writes into zeros are joined, loops inside lowered.

A kernel of a loop calls the kernels of the loops in its step (`scanlib.schedules.inner_loops`), so
the step gets all rewrites up to here, as what stands around loops does: what leaves an inner loop
is computed by the step, and an inner loop and its gradient share what both compute.
"""

from __future__ import annotations

from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import dfs_rewriter
from pytensor.graph.rewriting.db import RewriteDatabaseQuery
from pytensor.tensor.subtensor import IncSubtensor

from scanlib.ops.loop import Loop
from scanlib.ops.loop_rewrite import LowersLoops
from scanlib.ops.scan import Scan
from scanlib.rewrites.edit import replace
from scanlib.rewrites.over_time.written_rows import join_slices
from scanlib.rewrites.pytensor_rewrites import BodyRewrite, run_query

POSITION = 1.6665  # of this rewrite among PyTensor's
_LOWERING = RewriteDatabaseQuery(
    include=["fast_run"], exclude=["inplace"], position_cutoff=POSITION + 1e-6
)
_join_slices = dfs_rewriter(join_slices)


def _lower_body(body: FunctionGraph) -> None:
    if any(isinstance(inner.op, Scan) for inner in body.apply_nodes):
        run_query(_LOWERING, body)


def _lower_derivative(body: FunctionGraph) -> None:
    _join_slices.rewrite(body)
    _lower_body(body)


# By whether the loop is a derivative: what a user writes to a slice may be repeated there.
_LOWER = {
    False: BodyRewrite(_lower_body, settles=True),
    True: BodyRewrite(_lower_derivative, settles=True),
}


class LowerBodies(LowersLoops):
    """Join slices and lower loops in the steps of loops."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        is_derivative = node.op.signature.reverse
        changed = Scan | IncSubtensor if is_derivative else Scan
        if not any(isinstance(n.op, changed) for n in node.op.body.apply_nodes):
            return False
        loop = Loop.from_node(node)
        if not _LOWER[is_derivative](loop):
            return False
        new = dict(zip(node.outputs, loop.apply().node.outputs, strict=True))
        replace(fgraph, new, "scanlib_lower_bodies")
        return True
