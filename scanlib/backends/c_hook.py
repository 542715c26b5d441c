"""Has what stands around loops computed by programs where PyTensor's C linker runs.

A mode asks for its rewrites before they run, and adoption makes a program's first loop while they
do, with which the backends load. So this rewrite is there from the start, and what it calls loads
when it finds a loop.
"""

from importlib import import_module

from pytensor.compile.mode import optdb
from pytensor.configdefaults import config
from pytensor.graph.fg import FunctionGraph

from scanlib._compat import IfElse, features
from scanlib.ops.execution import LoopOp
from scanlib.ops.linker_features import HadLoops
from scanlib.ops.loop_rewrite import LoopRewrite


class GatherAroundLoops(LoopRewrite):
    """Put one node in the place of those around loops, or of what is left of loops, that one
    program can compute."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        ops = [node.op for node in fgraph.apply_nodes]
        if not (features(fgraph, HadLoops) or any(isinstance(op, LoopOp) for op in ops)):
            return
        # Branches that are not taken are not computed.
        if config.scanlib__perform != "auto" or any(isinstance(op, IfElse) for op in ops):
            return
        import_module("scanlib.backends.handler.clusters").gather(fgraph)


optdb.register("scanlib_gather", GatherAroundLoops(), "fast_run", "cxx_only", position=48.6)
