"""Elementwise loops become `ElemwiseScan`s."""

from __future__ import annotations

from pytensor.compile.mode import optdb
from pytensor.configdefaults import config
from pytensor.graph.basic import Apply
from pytensor.graph.features import ReplaceValidate
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import GraphRewriter
from pytensor.graph.rewriting.db import RewriteDatabaseQuery

from scanlib.analysis.recurrences import analyse
from scanlib.analysis.scalar_body import NotElementwiseError, scalar_loop
from scanlib.ops.elemwise_scan import ElemwiseScan
from scanlib.ops.loop import Loop
from scanlib.rewrites.absorb import absorb_producers
from scanlib.rewrites.last_rows import is_loop
from scanlib.rewrites.logs import stabilize_logs
from scanlib.rewrites.simplify import replace

_SPECIALIZED = RewriteDatabaseQuery(
    include=["canonicalize", "stabilize", "specialize", "merge"],
    exclude=["inplace", "fusion", "BlasOpt"],
)


class LowerElementwiseLoops(GraphRewriter):
    """Replace every loop whose body is elementwise; see `scanlib.ops.elemwise_scan`."""

    def add_requirements(self, fgraph: FunctionGraph) -> None:
        fgraph.attach_feature(ReplaceValidate())

    def apply(self, fgraph: FunctionGraph) -> None:
        for node in [node for node in fgraph.toposort() if is_loop(node)]:
            self.lower(fgraph, node)

    @staticmethod
    def lower(fgraph: FunctionGraph, node: Apply) -> bool:
        """Replace one loop; return whether it could be."""
        if not config.scanlib__lower:
            return False
        try:
            new = lower_elementwise(absorb_producers(fgraph, node))
        except NotElementwiseError:
            return False
        replace(fgraph, dict(zip(node.outputs, new.outputs, strict=True)), "scanlib_elementwise")
        return True


def lower_elementwise(loop: Loop) -> Apply:
    """Return the `ElemwiseScan` node of a loop, which is edited on the way.

    Raises
    ------
    NotElementwiseError
        If its body is not elementwise.
    """
    specialize_body(loop)
    scalar = scalar_loop(loop)
    analysis = analyse(scalar)
    results = loop.apply()
    op = ElemwiseScan(
        results.node.op, scalar.freeze(), scalar.layout, analysis.recurrences, analysis.notes
    )
    return op.make_node(*results.node.inputs)


def specialize_body(loop: Loop) -> None:
    """Run PyTensor's rewrites on the body, but for fusion and in-place ones."""
    fgraph = FunctionGraph(loop.body_inputs(), loop.body_outputs(), clone=False)
    stabilize_logs(fgraph)
    optdb.query(_SPECIALIZED).rewrite(fgraph)
    loop.set_body_outputs(list(fgraph.outputs))
