"""Checkpointed loops store the starts of their segments only.

The gradient of a checkpointed loop reads its histories through `SegmentStarts`. What else reads
them decides what the forward loop is:

* nothing reads starts (there is no gradient): an ordinary loop;
* every history with starts is read whole as well: it is stored anyway, and starts are slices of it;
* otherwise: a nest of segments (`ops.gradient.nest`). The outer loop's histories are the starts.
  Results that are read whole are stacked segment by segment.

A loop with `until` stacks nothing by segments, since the last one may have fewer rows: there the
history is stored if any result is read whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytensor.tensor as pt
from pytensor.graph.basic import Apply, Variable
from pytensor.graph.fg import FunctionGraph
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.raise_op import CheckAndRaise

from scanlib.lengths.numbers import constant_integer
from scanlib.ops.gradient.nest import Cut, outer_loop, restored_carry, tail_loop
from scanlib.ops.loop import Results
from scanlib.ops.row_ops.row_segments import JoinRows, MergeRows, PlacedStarts, SegmentStarts
from scanlib.rewrites.edit import LoopEdit
from scanlib.rewrites.simplify.last_rows import LastRow, last_row_reads, tap_of_view


@dataclass
class _Reads:
    """Who reads one history."""

    starts: list[Apply] = field(default_factory=list)
    last: list[LastRow] = field(default_factory=list)
    whole: bool = False


def settle_checkpoints(fgraph: FunctionGraph, node: Apply) -> dict[Variable, Variable] | None:
    """Return what replaces results of a checkpointed loop, None for other loops."""
    if node.op.checkpoint is None:
        return None
    edit = LoopEdit(fgraph, node)
    reads = [_reads(edit, i) for i in range(len(edit.loop.states))]
    starts = [client for each in reads for client in each.starts]
    if not starts:
        edit.loop.checkpoint = None
        return edit.replacements()
    if _as_slices(edit, reads):
        return {client.outputs[0]: client.op.as_slices(*client.inputs) for client in starts}
    return _Nest(edit, reads).replacements()


def _reads(edit: LoopEdit, i: int) -> _Reads:
    state = edit.loop.states[i]
    history = edit.node.outputs[i]
    clients = [client for client, _ in edit.fgraph.clients.get(history, ())]
    starts = [client for client in clients if isinstance(client.op, SegmentStarts)]
    last, only = last_row_reads(edit.fgraph, history, state.depth, ignored=SegmentStarts)
    farthest = 1 if edit.loop.stop is not None else state.depth
    return _Reads(starts, last, not only or any(read.back > farthest for read in last))


def _as_slices(edit: LoopEdit, reads: list[_Reads]) -> bool:
    """Whether the starts of segments are best read from stored histories."""
    if all(each.whole for each in reads if each.starts):
        return True
    if edit.loop.stop is not None and (
        any(each.whole for each in reads) or any(map(edit.is_read, edit.loop.outputs))
    ):
        return True
    lengths = {client.inputs[2] for each in reads for client in each.starts}
    known = {constant_integer(length) for length in lengths}
    return len(lengths) > 1 and (len(known) > 1 or None in known)


class _Nest:
    """A checkpointed loop as a nest, and what becomes of its results."""

    def __init__(self, edit: LoopEdit, reads: list[_Reads]) -> None:
        self.edit, self.reads, self.loop = edit, reads, edit.loop
        loop = edit.loop
        length = next(client.inputs[2] for each in reads for client in each.starts)
        self.traced = [i for i, each in enumerate(reads) if each.whole]
        self.stacked = [i for i, output in enumerate(loop.outputs) if edit.is_read(output)]
        self.cut = Cut.of(loop.length(), length)
        outer = outer_loop(loop, self.cut, None, self.traced, self.stacked)
        self.outer = outer.apply()
        self.tail = self.apply_tail()

    def apply_tail(self) -> Results | None:
        loop, steps = self.loop, None
        if constant_integer(self.cut.rest(loop.length())) == 0:
            return None
        if loop.stop is not None:
            steps = pt.switch(self.outer.carries[-1], 0, self.cut.rest(loop.length()))
        states = len(loop.states)
        ends = [history[-1] for history in self.outer.histories]
        carries = [
            restored_carry(carry, end)
            for carry, end in zip(loop.carries, ends[states:], strict=True)
        ]
        return tail_loop(loop, self.cut, ends[:states], carries, None, steps).apply()

    def final_rows(self, i: int) -> Variable:
        """Return the last rows of a state."""
        return self.outer.histories[i][-1] if self.tail is None else self.tail.histories[i]

    def replacements(self) -> dict[Variable, Variable]:
        loop, node = self.loop, self.edit.node
        results: dict[Variable, Variable] = {}
        for i, each in enumerate(self.reads):
            for client in each.starts:
                rows = self.outer.histories[i]
                stops = loop.stop is not None
                results[client.outputs[0]] = rows[: client.inputs[1] + 1] if stops else rows
            if i in self.traced:
                results.update(self.trace(i))
            else:
                results.update({read.old: self.last_row(i, read) for read in each.last})
        states = len(loop.states)
        for i, carry in enumerate(loop.carries):
            if self.tail is not None:
                final = self.tail.carries[i]
            else:
                final = restored_carry(carry, self.outer.histories[states + i][-1])
            results[node.outputs[states + i]] = final
        outputs = node.outputs[states + len(loop.carries) :]
        for position, i in enumerate(self.stacked, start=len(self.traced)):
            results[outputs[i]] = self.join(
                position, None if self.tail is None else self.tail.outputs[i]
            )
        return results

    def join(self, position: int, rest: Variable | None) -> Variable:
        """Return the rows of all steps of what the outer loop stacked."""
        segments = self.outer.outputs[position]
        return MergeRows()(segments) if rest is None else JoinRows()(segments, rest)

    def trace(self, i: int) -> dict[Variable, Variable]:
        """Return what replaces the history of a state that is read whole."""
        state, history = self.loop.states[i], self.edit.node.outputs[i]
        rest = None if self.tail is None else self.tail.histories[i][state.depth :]
        rows = self.join(self.traced.index(i), rest)
        results = {history: pt.concatenate([state.initial, rows])}
        for client, position in self.edit.fgraph.clients.get(history, ()):
            if position == 0 and tap_of_view(client, state.depth) == 0:
                results[client.outputs[0]] = rows
        return results

    def last_row(self, i: int, read: LastRow) -> Variable:
        row = read.of(self.final_rows(i))
        known = constant_integer(self.loop.length())
        if not read.needs_step or (known is not None and known >= read.back):
            return row
        message = self.loop.messages().missing_steps(read.back)
        return CheckAndRaise(IndexError, message)(row, pt.ge(self.loop.length(), read.back))


@node_rewriter([SegmentStarts, PlacedStarts])
def slice_starts(fgraph: FunctionGraph, node: Apply) -> list[Variable]:
    """Write reads of starts that no loop answered to with slices."""
    return [node.op.as_slices(*node.inputs)]
