"""Checkpointed loops store the starts of their segments only.

The gradient of a checkpointed loop is that of a nest of loops over its segments
(`ops.gradient.checkpointed`), which stands in the graph beside the loop. What becomes of the loop:

* without such a nest, or where it is that of other steps (there is no gradient, or one of a loop
  with `until`), it is an ordinary loop;
* otherwise it becomes the same nest, and merging makes one of both. Results that are read whole
  are stacked segment by segment.
"""

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.gradient.checkpointed import nest_of, segments_name
from scanlib.rewrites.edit import LoopEdit
from scanlib.rewrites.simplify.last_rows import is_loop, last_row_reads, tap_of_view


def settle_checkpoints(fgraph: FunctionGraph, node: Apply) -> dict[Variable, Variable]:
    """Return what replaces results of a checkpointed loop, and of the nest of its gradient."""
    schedule = node.op.checkpoint
    edit = LoopEdit(fgraph, node)
    loop = edit.loop
    loop.checkpoint = None
    name = segments_name(loop.name)
    has_nest = any(
        is_loop(other)
        and other.op.recompute
        and not other.op.signature.reverse
        and other.op.name == name
        for other in fgraph.apply_nodes
    )
    if loop.stop is not None or not has_nest:
        return edit.replacements()
    nest, histories = nest_of(loop, schedule), node.outputs[: len(loop.states)]
    others, steps = node.outputs[len(histories) :], loop.length()
    results = dict(zip(others, [*nest.carries, *nest.outputs], strict=True))
    for history, state, trace, final in zip(
        histories, loop.states, nest.traces, nest.ends, strict=True
    ):
        last, only = last_row_reads(fgraph, history, state.depth)
        if not only or any(read.back > state.depth for read in last):
            results[history] = pt.concatenate([state.initial, trace])
            for client, position in fgraph.clients[history]:
                if position == 0 and tap_of_view(client, state.depth) == 0:
                    results[client.outputs[0]] = trace
            continue
        for read in last:
            is_there = read.exists(constant_integer(steps))
            results[read.old] = read.of(final) if is_there else read.checked(loop, final, steps)
    return results
