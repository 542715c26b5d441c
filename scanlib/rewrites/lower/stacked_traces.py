"""Traces of elementwise loops that are arrays of their own, not slices of histories.

A history holds the initial rows before the others, so that the trace is a view of it:
``history[K:]``. XLA has no views: it copies the slice, which takes longer than a compiled loop.
Where nothing else is read of a history but last rows, the loop keeps these only, and stacks the new
rows as one more output.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph

from scanlib.analysis.scalar_values import NotElementwiseError
from scanlib.ops.loop import Loop, Output, State
from scanlib.ops.loop_rewrite import LoopRewrite
from scanlib.ops.lowered.elemwise_scan import ElemwiseScan
from scanlib.rewrites.lower.lower_elementwise import lower_elementwise
from scanlib.rewrites.simplify.last_rows import last_row_reads, tap_of_view
from scanlib.rewrites.simplify.simplify import replace

Reader = tuple[Variable, State | Output, Callable[[Variable], Variable]]


class StackTraces(LoopRewrite):
    """Have loops stack the rows of states of which only the trace and last rows are read."""

    def rewrite_loops(self, fgraph: FunctionGraph) -> None:
        for node in fgraph.toposort():
            if not isinstance(node.op, ElemwiseScan) or node.op.signature.has_stop:
                continue
            loop = Loop.from_node(node)
            readers = _stack(fgraph, node, loop)
            if not readers:
                continue
            # The initial rows alone may tell how many channels there are: an output has none.
            with self.attempt(fgraph, node), suppress(NotElementwiseError):
                may_round = bool(node.op.recurrences)
                new = lower_elementwise(loop, may_round).outputs  # the stacked ones come last
                results = dict(zip(loop.parts, new, strict=True))
                replacements = dict(zip(node.outputs, new, strict=False))
                replacements |= {old: read(results[part]) for old, part, read in readers}
                replace(fgraph, replacements, "scanlib_stack_traces")


def _stack(fgraph: FunctionGraph, node: Apply, loop: Loop) -> list[Reader]:
    """Give a loop outputs in the place of such traces.

    Returns what reads their histories, of which part instead, and how.
    """
    found: list[Reader] = []
    histories = node.op.signature.split_outputs(node.outputs).histories
    for state, history in zip(loop.states, histories, strict=True):
        clients = [client for client, _ in fgraph.clients[history]]
        views = [view for view in clients if tap_of_view(view, state.depth, loop.reverse) == 0]
        reads = [] if loop.reverse else last_row_reads(fgraph, history, state.depth)[0]
        rows = [read for read in reads if not read.needs_step and read.back <= state.depth]
        if state.untraced or not views or len(views) + len(rows) < len(clients):
            continue
        state.untraced = True
        loop.outputs.append(Output(state.next, state.name))
        found += [(view.outputs[0], loop.outputs[-1], lambda trace: trace) for view in views]
        found += [(row.old, state, row.of) for row in rows]
    return found
