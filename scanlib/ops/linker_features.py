"""What a linker wants of the rewrites of loops, as marks on graphs."""

from collections.abc import Sequence

from pytensor.compile.builders import OpFromGraph
from pytensor.graph.basic import Variable
from pytensor.graph.features import Feature
from pytensor.graph.fg import FunctionGraph

from scanlib._compat import features, leave_alone
from scanlib.ops.execution import LoopOp
from scanlib.ops.loop_rewrite import LoopRewrite


class NeedsKnownLengths(Feature):
    """Says that the split of loops (`scanlib.rewrites.split.split`) needs to know their lengths.

    JAX compiles for known shapes. A loop whose length a value decides runs there with bounded
    buffers; the batches that a split makes of its steps would be arrays of unknown length. Graphs
    that have loops get the mark: lengths are made known (`scanlib.backends.jax.prepare`) also where
    no loop is left. `data` are inputs that are never known, though they may be integers: what
    changes from step to step, where the graph is a step.
    """

    def __init__(self, data: Sequence[Variable] = ()) -> None:
        self.data = tuple(data)


class TakesSteps(Feature):
    """Says that the linker takes matrix recurrences step by step, and not all steps at once.

    `in_cache` is whether matrices that functions make had better be made by steps, too.
    """

    def __init__(self, in_cache: bool = True) -> None:
        self.in_cache = in_cache


class MarkSteps(LoopRewrite):
    """Mark the graphs of linkers that take steps: numba's and C's. (JAX's do on one CPU.)"""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        fgraph.attach_feature(TakesSteps())


class HadLoops(Feature):
    """Says that a graph had loops, of which rewrites may leave none."""


# Programs around loops write no result over an array they are given, and trying which nodes might
# takes the square of their number.
leave_alone("inplace_elemwise", lambda fgraph: bool(features(fgraph, HadLoops)))


class RememberLoops(LoopRewrite):
    """Mark graphs that have loops, before any is taken apart."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        if any(isinstance(node.op, LoopOp) for node in fgraph.apply_nodes):
            fgraph.attach_feature(HadLoops())


def holds_scanlib_ops(fgraph: FunctionGraph) -> bool:
    """Whether an Op of scanlib stands in a graph, or in the graph of an `OpFromGraph` in it."""
    return any(
        holds_scanlib_ops(node.op.fgraph)
        if isinstance(node.op, OpFromGraph)
        else type(node.op).__module__.startswith("scanlib.")
        for node in fgraph.apply_nodes
    )


def needs_known_lengths(fgraph: FunctionGraph) -> bool:
    """Whether loops of unknown length, and all other loops of the graph, are to stay whole."""
    return bool(features(fgraph, NeedsKnownLengths))


def takes_steps(fgraph: FunctionGraph) -> TakesSteps | None:
    """Return the mark of a linker that takes matrix recurrences step by step, if there is one."""
    return next(iter(features(fgraph, TakesSteps)), None)


def data_in(fgraph: FunctionGraph) -> tuple[Variable, ...]:
    """Return the inputs of a graph that are never known when it is compiled."""
    marks = features(fgraph, NeedsKnownLengths)
    return tuple(variable for mark in marks for variable in mark.data)
