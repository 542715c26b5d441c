"""Logarithms and exponentials in steps of loops that stay, stabilized as PyTensor does elsewhere.

``log(1 + exp(x))`` overflows as it stands, and so do ``log(softmax(x))``, a logarithm of a sum of
exponentials in PyTensor 3.0.7, and their derivatives; ``1 - erf(x)`` rounds to zero. PyTensor's
rewrites do not see steps, and recurrences are recognized by the naive forms, so this comes after
those are lowered; what leaves a loop is stabilized as it leaves (`over_time.peel`).
"""

from pytensor.graph.basic import Apply
from pytensor.graph.fg import FunctionGraph

from scanlib.ops.loop_rewrite import LowersLoops
from scanlib.ops.scan import Scan
from scanlib.rewrites.edit import LoopEdit, replace
from scanlib.rewrites.pytensor_rewrites import BodyRewrite, may_overflow, stabilize
from scanlib.rewrites.simplify.redundant import forward_inputs


class StabilizeBodies(LowersLoops):
    """Stabilize the steps of loops, and those of loops in steps."""

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        nodes = node.op.body.toposort()
        if not any(may_overflow(n) or isinstance(n.op, Scan) for n in nodes):
            return False
        edit = LoopEdit(fgraph, node)
        forward_inputs(edit)  # the one of ``log(1 + exp(x))``
        if not _stable(edit.loop):
            return False
        replace(fgraph, edit.replacements(), "scanlib_stable_bodies")
        return True


def _stabilize(body: FunctionGraph) -> None:
    stabilize(body)
    StabilizeBodies().rewrite(body)


_stable = BodyRewrite(_stabilize, settles=True)
