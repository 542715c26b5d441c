"""Checks of parameters inside steps, where PyMC makes minus infinity of them.

Densities of PyMC check their parameters and raise. What PyMC compiles turns these checks into
choices, or leaves them out if the model says so: rewrites of PyMC's own, which its functions ask
for by name, and which do not look into loops. Here they are run on steps. So a proposal with a
negative scale has no density instead of ending a sampler's run.
"""

from pytensor.compile.mode import optdb
from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph
from pytensor.raise_op import CheckAndRaise

from scanlib.ops.loop_rewrite import LoopRewrite, holds
from scanlib.ops.scan import Scan
from scanlib.rewrites.edit import replace, rewrite_step
from scanlib.rewrites.pytensor_rewrites import CANONICAL

# The names under which PyMC registers its rewrites.
NAMES = "local_check_parameter_to_ninf_switch", "local_remove_check_parameter"


class ChecksInSteps(LoopRewrite):
    """Run a rewrite of checks on the steps of loops, and on those of loops inside of them.

    It has a name, and stands beside PyTensor's canonicalization.
    """

    def __init__(self, rewrite: str) -> None:
        self.tag = rewrite

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        # This rewrite is registered under the same name: it finds the loops in the step.
        query = CANONICAL.including(self.tag)
        for node in list(fgraph.toposort()):
            if isinstance(node.op, Scan) and holds(node.op.body, _is_check):
                with self.attempt(fgraph, node):
                    found = rewrite_step(node, lambda body: optdb.query(query).rewrite(body))
                    replace(fgraph, found, "scanlib_parameter_checks")


def _is_check(node: Apply) -> bool:
    """Whether a node checks a parameter of a density."""
    return isinstance(node.op, CheckAndRaise) and hasattr(node.op, "can_be_replaced_by_ninf")
