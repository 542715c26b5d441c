"""Leave to the split of loops to write products of all steps as one node."""

from __future__ import annotations

from pytensor.graph.fg import FunctionGraph

from scanlib.ops.linker_features import CompilesStepProducts
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.ops.lowered.linear_scan import LinearScan
from scanlib.ops.scan import Scan


class AllowStepProducts(LoopRewrite):
    """Let later rewrites write the products of all steps as one `StepProducts`."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        loops = Scan | ElemwiseScan | LinearScan
        has_loops = any(isinstance(node.op, loops) for node in fgraph.apply_nodes)
        fgraph.attach_feature(CompilesStepProducts(has_loops))
