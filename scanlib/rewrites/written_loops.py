"""The loops of a graph as they were written, kept with the graph for `scanlib.explain`."""

from __future__ import annotations

from dataclasses import dataclass, field

from pytensor.graph.basic import Apply
from pytensor.graph.features import Feature
from pytensor.graph.fg import FunctionGraph

from scanlib._compat import features, is_legacy_scan
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.scan import Scan


@dataclass(eq=False)
class WrittenLoops(Feature):
    """Loops before rewriting: nodes by name, on inputs that stand for those of the graph.

    A gradient runs its loop once more, to store more of it; of such loops it is the smallest.
    """

    loops: dict[str, Apply] = field(default_factory=dict)

    def note(self, node: Apply) -> None:
        """Remember a loop."""
        name = node.op.name or "loop"
        known = self.loops.get(name)
        if known is None or len(node.outputs) < len(known.outputs):
            inputs = [inp.type(name=inp.name) for inp in node.inputs]
            outputs = [out.type() for out in node.outputs]
            self.loops[name] = Apply(node.op, inputs, outputs)


class RememberLoops(LoopRewrite):
    """Note which loops a graph has; changes nothing."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if any(features(fgraph, WrittenLoops)):
            return
        record = WrittenLoops()
        for node in fgraph.apply_nodes:
            if isinstance(node.op, Scan) or is_legacy_scan(node.op):
                record.note(node)
        if record.loops:
            fgraph.attach_feature(record)


def written_loops(fgraph: FunctionGraph) -> dict[str, Apply]:
    """Return the loops that a graph had, by name."""
    return next((record.loops for record in features(fgraph, WrittenLoops)), {})
