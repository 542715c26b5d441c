"""What stands around loops, or in a step without kernels, as few nodes that are programs."""

from __future__ import annotations

from pytensor.compile.mode import optdb
from pytensor.configdefaults import config
from pytensor.graph.basic import Variable
from pytensor.graph.fg import FunctionGraph

from scanlib._compat import IfElse, freeze_graph
from scanlib.backends.handler.clusters import Cluster, Plan
from scanlib.ops.kernel_graph import KernelGraph
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan


class GatherAroundLoops(LoopRewrite):
    """Put one node in the place of those around loops that one program can compute."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        ops = [node.op for node in fgraph.apply_nodes]
        if not any(isinstance(op, Scan | ElemwiseScan | LinearScan) for op in ops):
            return
        # Branches that are not taken are not computed.
        if config.scanlib__perform != "auto" or any(isinstance(op, IfElse) for op in ops):
            return
        gather(fgraph)


def gather(fgraph: FunctionGraph, with_numbers: bool = False) -> None:
    """Put one node in the place of each cluster of nodes, or of numbers as well."""
    new: dict[Variable, Variable] = {}
    plan = Plan(fgraph)
    for cluster in list(plan.order_with_numbers()) if with_numbers else plan.order():
        if not isinstance(cluster, Cluster):
            continue
        op = KernelGraph(freeze_graph(cluster.body.inputs, cluster.body.outputs), cluster.program)
        outputs = op.make_node(*(new.get(v, v) for v in cluster.inputs)).outputs
        pairs = list(zip(cluster.outputs, outputs, strict=True))
        new.update(pairs)
        fgraph.replace_all_validate(pairs, reason="scanlib_gather")


optdb.register("scanlib_gather", GatherAroundLoops(), "fast_run", "cxx_only", position=48.6)
