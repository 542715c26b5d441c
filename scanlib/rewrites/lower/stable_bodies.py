"""Logarithms of sums of exponentials, and their derivatives, in steps of loops that stay.

PyTensor 3.0.7 writes both naively, overflow and all, and counts on its stabilization, which does
not see steps. Recurrences are recognized by the naive form, so this comes after them.
"""

from __future__ import annotations

from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.scalar import basic as ps
from pytensor.tensor.math import Sum

from scanlib.ops.graph import applies
from scanlib.ops.logaddexp import stable_logs
from scanlib.ops.loop import Loop
from scanlib.ops.loop_rewrite import LowersLoops
from scanlib.rewrites.pytensor_rewrites import CANONICAL, STABLE, BodyRewrite, run_query
from scanlib.rewrites.simplify.simplify import replace


class StabilizeBodies(LowersLoops):
    """Stabilize the steps of loops, and those of loops in steps."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        loop = Loop.from_node(node)
        if not _stable(loop):
            return False
        new = loop.apply().node.outputs
        replace(fgraph, dict(zip(node.outputs, new, strict=True)), "scanlib_stable_bodies")
        return True


def _stabilize(body: FunctionGraph) -> None:
    sums = [node for node in body.apply_nodes if isinstance(node.op, Sum)]
    if any(applies(node.inputs[0].owner, ps.Exp) for node in sums):
        run_query(CANONICAL, body)
        for old, new in stable_logs(body.outputs).items():
            body.replace(old, new, reason="scanlib_logs", import_missing=True)
        run_query(STABLE, body)
    StabilizeBodies().rewrite(body)


_stable = BodyRewrite(_stabilize, settles=True)
